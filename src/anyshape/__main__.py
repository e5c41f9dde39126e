"""`python -m anyshape` is the command `anyshape`."""
from __future__ import annotations

import sys

from anyshape.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
