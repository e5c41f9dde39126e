"""`python -m anyshape_bench`: the same command without the installed script."""
from __future__ import annotations

import argparse
import sys

from anyshape_bench import add_arguments, main

if __name__ == "__main__":
    parser = argparse.ArgumentParser("anyshape bench", description="compare AnyShape with eager and Inductor")
    add_arguments(parser)
    sys.exit(main(parser.parse_args()))
