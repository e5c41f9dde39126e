"""`anyshape.strategy`: strategy search for a user's model; its result is printed, changed, and written as a page.

    search = anyshape.strategy(model, loss_fn, optimizer, batch, world=128, machine="a100x8:800Gb")
    print(search)
    search.override("layers.*.mlp", placement="column")
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from anyshape.base.errors import InputError, OutputError
from anyshape.base.files import write_atomically
from anyshape.base.units import bytes_of
from anyshape.dist.cost.machine import Machine, machine_of
from anyshape.dist.cost.strategy import LayerStrategy
from anyshape.dist.search.explain import text
from anyshape.dist.search.judge import Verdict
from anyshape.dist.search.problem import Override, Search, Shape, override, shapes_of
from anyshape.dist.search.solver import Found, solve
from anyshape.dist.simulate.trace import perfetto
from anyshape.dist.strategies import Strategy
from anyshape.frontend.strategy.capture import capture, sizes_of
from anyshape.frontend.strategy.page import page
from anyshape.frontend.strategy.runnable import runnable

AXES = ("data", "tensor", "context", "pipe")


class StrategySearch:
    """The result of a search: print it, fix parts of it, write it.

    Attributes:
        problem: what was asked. found: the best plan, a bound, all that was tried.
    """

    def __init__(self, problem: Search) -> None:
        self.problem = problem
        self.found: Found = solve(problem)

    @property
    def verdict(self) -> Verdict:
        """Seconds and bytes of the best plan, by simulation."""
        assert self.found.best.verdict is not None
        return self.found.best.verdict

    def at(self, length: int) -> LayerStrategy:
        """The strategy of a step of this length: the same on all ranks, for it depends on the length alone."""
        return self.found.best.plan.at(self.problem.shapes, length)

    def runnable(self, length: int = 0) -> Strategy:
        """What `anyshape.train_step(strategy=...)` runs of it: a mesh, and a strategy along each axis.

        Args:
            length: of the steps; 0: the longest.

        Raises:
            ConfigError: layers differ in their data parallelism, or in what is dealt out along the tensor axis; the
                message says what to fix so that it can be run.
        """
        return runnable(self.at(length or self.problem.shapes[-1].length), self.problem.machine)

    def override(self, pattern: str, *, placement: str = "", data: str = "", recompute: str = "") -> StrategySearch:
        """Fixes what is known of some layers, and searches the rest again; itself.

        Args:
            pattern: a layer's name as it is printed, or with * and without what stands before: "layers.*.mlp".
            placement: "column", "row" or "cut" (tensor parallel), "sequence", "whole".
            data: "ddp", "zero1", "zero2", "fsdp", "hsdp". recompute: "none", "selective", "full".

        Raises:
            InputError: no layer has such a name, or a word is not known; the result stays as it is.
            LimitError: nothing fits any more; the result stays as it is.
        """
        one = override(pattern, placement=placement, data=data, recompute=recompute, workload=self.problem.workload)
        return self._again((*self.problem.overrides, one))

    def _again(self, overrides: tuple[Override, ...]) -> StrategySearch:
        problem = self.problem.replace(overrides=overrides)
        self.found, self.problem = solve(problem), problem
        return self

    def __str__(self) -> str:
        return text(self.problem, self.found)

    def report(self, path: str | Path) -> None:
        """Writes one HTML page: layers by ranks, collectives on a timeline, memory, what else was tried.

        Raises:
            OutputError: it cannot be written.
        """
        _write(Path(path), page(self.problem, self.found))

    def trace(self, path: str | Path, length: int = 0) -> None:
        """Writes the simulated step as a trace for Perfetto (ui.perfetto.dev). length: of the step; 0: the longest.

        Raises:
            OutputError: it cannot be written.
        """
        shapes = self.problem.shapes
        place = next((place for place, shape in enumerate(shapes) if length and length <= shape.length), -1)
        _write(Path(path), perfetto(self.verdict.reports[place].timeline))


def _write(path: Path, content: str) -> None:
    try:
        write_atomically(path, content.encode())
    except OSError as error:
        raise OutputError(f"{path} could not be written", why=str(error.strerror or error),
                          do="give a file in a folder that there is, with space") from error


def strategy(model: torch.nn.Module, loss_fn: Any, optimizer: Any, batch: Any, *, mesh: Any = "auto", world: int,
             machine: str | Machine = "h100", memory_limit: str | int = 0,
             lengths: Sequence[int] | Mapping[int, float] | None = None, dtype: str = "") -> StrategySearch:
    """Searches a strategy for a train step; arguments, result and errors are those of `anyshape.strategy`."""
    where = machine_of(machine) if isinstance(machine, str) else machine
    if not isinstance(world, int) or isinstance(world, bool) or world < 1:
        raise InputError(f"world={world!r} is no number of ranks", why="it is a whole number, at least 1",
                         do="give the number of devices, for example world=128")
    sequences, positions = sizes_of(batch)
    memory = float(bytes_of("memory_limit", memory_limit)) or where.chip.memory
    shapes = shapes_of(lengths, sequences) if lengths is not None else (Shape(positions, 1.0, sequences),)
    kind = dtype or ("f32" if where.chip.name == "cpu" else "bf16")
    if kind not in dict(where.chip.peaks):
        raise InputError(f"dtype={kind!r} is no dtype of products", where=f"machine={where}",
                         why=f"the table of the chip has {', '.join(name for name, _ in where.chip.peaks)}",
                         do='give one of those, or ""')
    workload = capture(model, loss_fn, optimizer, batch, type(model).__name__, kind)
    return StrategySearch(Search(workload, where, world, shapes, memory, (), degrees_of(mesh, world)))


def degrees_of(mesh: Any, world: int) -> tuple[tuple[str, int], ...]:
    """The sizes that a mesh fixes: "auto" none; a mapping, or a Mesh, those of its axes.

    Raises:
        InputError: an axis has another name, or sizes that do not make the world.
    """
    if mesh == "auto":
        return ()
    axes = {axis.name: axis.size for axis in mesh.axes} if hasattr(mesh, "axes") else mesh
    if not isinstance(axes, Mapping) or not set(axes) <= set(AXES):
        raise InputError(f"mesh={mesh!r} is no mesh of a strategy", why=f"its axes are of {', '.join(AXES)}",
                         do='give "auto", or for example {"tensor": 8}: axes that are left out are searched')
    product = 1
    for size in axes.values():
        product *= int(size)
    if product < 1 or world % product or (len(axes) == len(AXES) and product != world):
        near = max(product, world - world % product) if product > 0 else world
        raise InputError(f"a mesh of {', '.join(f'{name}={size}' for name, size in axes.items())} does not divide "
                         f"{world} ranks", where=f"world={world}", why=f"these axes are {product} ranks, and "
                         f"{world} is no multiple of them", do=f"take world={near}, or other sizes")
    return tuple((name, int(size)) for name, size in axes.items())
