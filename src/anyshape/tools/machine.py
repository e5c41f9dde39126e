"""`anyshape machine`: which routine does each kind of matrix product on this machine, and what was measured."""
from __future__ import annotations

import argparse

import torch

from anyshape.backend.cpu.autotune import KINDS
from anyshape.backend.cpu.bytecode.products import Fixed, does
from anyshape.backend.cpu.machine.target import model
from anyshape.backend.cpu.target import target_of
from anyshape.base.config import Config
from anyshape.base.disk_cache import cache_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `main` reads."""
    parser.add_argument("--again", action="store_true", help="measure anew, and keep what is found")


def main(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    config = Config.make()
    tune = target_of(cache_of(config), config.products_mode).autotune
    machine = tune.machine
    print(f"{model()} ({machine.cpu}), vectors of {machine.vector_bytes} bytes, torch {torch.__version__}; "
          f"products={config.products!r}, calibrate={config.calibrate}")
    print(f"{'products':<20}{'by':<10}ours over the library")
    for kind, one in KINDS.items():
        if not does(one.dtype, Fixed(machine, True)):
            print(f"{kind:<20}{'PyTorch':<10}-")
            continue
        if arguments.again:
            tune.measure_again(kind)
        by = "ours" if tune.ours(kind) else one.other
        gain = tune.gain(kind) if config.products_mode == "measured" else None
        print(f"{kind:<20}{by:<10}{'not measured' if gain is None else f'{gain:.2f}'}")
    return 0
