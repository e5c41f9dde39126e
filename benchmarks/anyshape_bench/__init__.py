"""`anyshape bench`: AnyShape against eager and Inductor on models whose shapes change, each cell in fresh processes."""
from __future__ import annotations

from anyshape_bench.command import add_arguments, main

__all__ = ["add_arguments", "main"]
