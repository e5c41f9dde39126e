"""`anyshape report NAME`: compiles a model and writes what is alive at every step, before and after a limit.

    anyshape report llama --memory-limit 100MB           a model of the benchmark
    anyshape report net.py:make --out a.html b.png       your own, described as for `anyshape bench`
    anyshape report loads.profile --out routers.html     a saved profile or plan of a dynamic network

The sliders of the page go over the ranges that the benchmark gives, or those of --size.
"""
from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import anyshape
from anyshape.base.errors import ConfigError
from anyshape.base.units import bytes_of
from anyshape.frontend.diagnostics.explain import known_sizes
from anyshape.frontend.diagnostics.report import check_path, report
from anyshape.frontend.diagnostics.report.contents import NO_LIMIT
from anyshape.frontend.diagnostics.report.spans import POINTS
from anyshape.route import load_plan
from anyshape.route.profile.files import read_profile
from anyshape.route.report import collect, write_report
from anyshape.tools.bench_package import bench_package


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `main` reads."""
    parser.add_argument("name", help="a model of `anyshape bench --list`, or your own: module:function or "
                        "path.py:function (docs/how-to-benchmark.md); or a file of route.save_profile or save_plan")
    parser.add_argument("--out", type=Path, nargs="+", default=[Path("memory.html")], metavar="FILE",
                        help="what to write: a page (.html), a picture (.png), data (.json) (default memory.html)")
    parser.add_argument("--memory-limit", default="", metavar="BYTES", help="the limit in bytes, such as 64MB "
                        "(default: none is set, and the page tries any)")
    parser.add_argument("--memory-store", default="", metavar="FOLDER", help="where values may be moved out to "
                        "(default: they are only computed again)")
    parser.add_argument("--size", action="append", default=[], metavar="NAME=N or NAME=LOW-HIGH",
                        help="where a slider stands, or what it goes over; may be repeated")
    parser.add_argument("--points", type=int, default=POINTS, metavar="N",
                        help="sets of sizes for which the compiler's choice is computed (default %(default)s)")


def main(arguments: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        AnyShapeError: a name, a size or a file is wrong; nothing is written then.
    """
    for path in arguments.out:
        check_path(path)
    if Path(arguments.name).is_file():
        _report_routers(Path(arguments.name), arguments.out)
        print(f"Wrote {', '.join(map(str, arguments.out))}")
        return 0
    limit = bytes_of("--memory-limit", arguments.memory_limit) if arguments.memory_limit else NO_LIMIT
    sizes = dict(_size(text) for text in arguments.size)
    if arguments.points < 1:
        raise ConfigError(f"--points is {arguments.points}", why="at least one set of sizes is computed",
                          do="give 1 or more")
    bench = bench_package("models.custom_model").load_by_name(arguments.name)
    asked = _Asked(limit, arguments.memory_store)
    step = bench.make(asked.compile)
    step(bench.inputs(bench.shapes[0]))  # an ordinary one: without sizes of 1 where there are others
    ranges = _ranges(asked, step, bench)
    report(list(arguments.out), bench.name, asked.fast._anyshape.compilation, {**ranges, **sizes}, arguments.points)
    print(f"Wrote {', '.join(map(str, arguments.out))}")
    return 0


def _report_routers(file: Path, out: Sequence[Path]) -> None:
    """Writes the report of a saved profile or plan of a dynamic network, and shows a plan's decisions."""
    profile, head = read_profile(file)
    plan = load_plan(file) if head else None
    if plan is not None:
        print(plan)
    data = collect(profile, plan.decisions if plan is not None else ())
    for path in out:
        write_report(path, data)


def _size(text: str) -> tuple[str, Any]:
    name, equal, value = text.partition("=")
    low, dash, high = value.strip().partition("-")
    if not name.strip() or not equal or not low.isdigit() or (dash and not high.isdigit()):
        raise ConfigError(f"--size {text!r} is neither NAME=N nor NAME=LOW-HIGH",
                          do="write for example --size x_0=8 or --size x_1=1-512")
    return name.strip(), range(int(low), int(high) + 1) if dash else int(low)


class _Call(Exception):
    """What a step calls its model with, in place of calling it."""

    def __init__(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments
        self.keywords = keywords


class _Asked:
    """A compiled model; after `asking` is set it raises what it is called with."""

    def __init__(self, limit: int, store: str) -> None:
        self.limit = limit
        self.store = store
        self.asking = False
        self.module: nn.Module = nn.Identity()
        self.fast: Any = None

    def compile(self, module: nn.Module) -> Any:
        """As a benchmark has its model compiled."""
        self.module = module
        self.fast = anyshape.compile(module, memory_limit=self.limit, memory_store=self.store)
        return self

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if self.asking:
            raise _Call(arguments, keywords)
        return self.fast(*arguments, **keywords)


def _ranges(asked: _Asked, step: Any, bench: Any) -> dict[str, range]:
    """Least and greatest of every size of the inputs, by the names that `memory()` knows."""
    asked.asking = True
    met: dict[str, list[int]] = {}
    for shape in bench.shapes:
        try:
            step(bench.inputs(shape))
        except _Call as call:
            for name, size in _named_sizes(asked.module, call):
                met.setdefault(name, []).append(size)
    known = known_sizes(asked.fast._anyshape.compilation)
    return {name: range(min(sizes), max(sizes) + 1) for name, sizes in met.items() if name in known}


def _named_sizes(module: nn.Module, call: _Call) -> Sequence[tuple[str, int]]:
    """A tensor's sizes by the name of its parameter, and by its number among the arguments."""
    bound = inspect.signature(module.forward).bind(*call.arguments, **call.keywords).arguments
    named: list[tuple[str, Any]] = [(f"input{i}", value) for i, value in enumerate(call.arguments)]
    for name, value in bound.items():
        named += list(value.items()) if isinstance(value, dict) else [(name, value)]
        if isinstance(value, tuple):
            named += [(f"{name}_{i}", one) for i, one in enumerate(value)]
    return [(f"{name}_{dim}", size) for name, value in named if isinstance(value, Tensor)
            for dim, size in enumerate(value.shape)]
