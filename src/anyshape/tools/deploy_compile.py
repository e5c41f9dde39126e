"""`anyshape compile MODEL`: an ONNX or TensorFlow model to a file to deploy, which `anyshape run` and `load` take."""
from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import anyshape


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `main` reads."""
    parser.add_argument("model", help="an ONNX model, the folder of a SavedModel, or a .keras file")
    parser.add_argument("--signature", default="serving_default", metavar="NAME",
                        help="which signature of a SavedModel (default %(default)s)")
    parser.add_argument("-o", "--output", required=True, help="the file to write, such as model.any")
    parser.add_argument("--no-native", action="store_true", help="without the machine code of this machine")


def main(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    if Path(arguments.model).is_dir() or Path(arguments.model).suffix == ".keras":
        compiled: Any = anyshape.compile_tensorflow(arguments.model, signature=arguments.signature)
    else:
        compiled = anyshape.compile_onnx(arguments.model)
    path = anyshape.save(compiled, arguments.output, native=not arguments.no_native)
    print(path)
    return 0
