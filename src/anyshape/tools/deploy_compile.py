"""`anyshape compile MODEL`: compilation of an ONNX model to a file to deploy, which `anyshape run` and `load` take."""
from __future__ import annotations

import argparse

import anyshape


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `main` reads."""
    parser.add_argument("model", help="an ONNX model")
    parser.add_argument("-o", "--output", required=True, help="the file to write, such as model.any")
    parser.add_argument("--no-native", action="store_true", help="without the machine code of this machine")


def main(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    path = anyshape.save(anyshape.compile_onnx(arguments.model), arguments.output, native=not arguments.no_native)
    print(path)
    return 0
