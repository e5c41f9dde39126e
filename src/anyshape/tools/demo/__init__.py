"""`anyshape demo`: train a small language model on batches whose shape changes at every step, and compare with eager.

The heavy imports wait until `main`, so that the command line can list the options at once.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from anyshape.tools.demo.status import STOPPED

BACKENDS = ("anyshape", "inductor", "eager")


def whole_number(least: int, text: str) -> int:
    """`text` as an int of at least `least`; argparse reports the error."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} is below {least}")
    return value


def _positive(text: str) -> int:
    return whole_number(1, text)


def _natural(text: str) -> int:
    return whole_number(0, text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to `parser`. What is left out comes from the checkpoint, or from the defaults."""
    parser.add_argument("--backend", choices=BACKENDS, default="anyshape", help="how the model runs (default anyshape)")
    parser.add_argument("--strategy", default="", metavar="WORD", help="how ranks that torchrun has started train "
                        "together: auto (searched, and explained), ddp, zero1, fsdp, tp, sp, ulysses, ring, pp, or "
                        "axes of a mesh such as data=2,tensor=2 (default under torchrun: auto)")
    parser.add_argument("--device", default="cpu", help="where the model is: cpu, or cuda (NVIDIA's and AMD's GPUs; "
                        "default cpu)")
    parser.add_argument("--steps", type=_positive, help="train up to this step (default 250)")
    parser.add_argument("--seed", type=_natural, help="seed of the weights, the data order and the sample (default 0)")
    parser.add_argument("--tokens", type=_positive, help="most tokens in a batch, padding counted (default 2048)")
    parser.add_argument("--threads", type=_positive, help="threads of torch (default: torch's choice)")
    parser.add_argument("--memory-limit", default="", metavar="BYTES",
                        help="hold a step to this many bytes beyond weights and optimiser, such as 80MB, or to "
                        "\"half\" of the peak that it would have; the display then shows peaks, predicted and counted")
    parser.add_argument("--documents", type=Path, metavar="FOLDER",
                        help="train on the Python files of a folder (default: Python's own library)")
    parser.add_argument("--out", type=Path, default=Path("anyshape-demo"),
                        help="folder for the checkpoint, the picture and the summary (default anyshape-demo)")
    parser.add_argument("--resume", nargs="?", type=Path, const=Path(), metavar="FOLDER",
                        help="go on from the checkpoint in FOLDER (default: the --out folder)")
    parser.add_argument("--save-every", type=_positive, default=50, help="steps between checkpoints (default 50)")


def main(args: argparse.Namespace) -> int:
    """Run the demo; 0 done, 1 failed with a message, 130 stopped by Ctrl-C (the checkpoint is kept)."""
    try:
        from anyshape.tools.demo.command import run

        return run(args)
    except KeyboardInterrupt:
        print("stopped at once; a checkpoint that was written before is whole", file=sys.stderr)
        return STOPPED
