"""`anyshape check FILE`: inspection of a deployed file: what it takes and holds. Nothing in it is compiled or run."""
from __future__ import annotations

import argparse

from anyshape.artifact.check import check


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `main` reads."""
    parser.add_argument("file", help="a file that anyshape.save wrote")


def main(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    print(check(arguments.file))
    return 0
