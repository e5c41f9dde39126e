"""`python -m anyshape.tools.demo`."""

from __future__ import annotations

import argparse
import sys

from anyshape.tools.demo import add_arguments, main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="anyshape demo", description="Train a small language model at every shape.")
    add_arguments(parser)
    sys.exit(main(parser.parse_args()))
