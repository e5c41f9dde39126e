"""`anyshape check FILE`: inspection of a deployed file: what it takes and holds; then its own test vectors are run."""
from __future__ import annotations

import argparse
from pathlib import Path

from anyshape.artifact.check import check
from anyshape.artifact.test_vectors import run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `main` reads."""
    parser.add_argument("file", help="a file that anyshape.save wrote")
    parser.add_argument("--trust-native", action="store_true",
                        help="run its tests by the machine code in it; otherwise the program is compiled from its text")
    parser.add_argument("--no-tests", action="store_true", help="run nothing")


def main(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    print(check(arguments.file))
    if not arguments.no_tests and (count := run(Path(arguments.file), arguments.trust_native)):
        print(f"  {count} calls give the results that were saved")
    return 0
