"""Benchmark cases of dynamic networks: a model in plain torch, the same in routed form, batches with forced routes.

A model's file has both forms side by side and `cases() -> list[Case]` (a Case, or a Study for what no pair of forms
tells); `routes/catalog.py` names the files. The harness (experiments/routes/) compiles, compares and measures.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from anyshape_bench.routes.names import EAGER, GROUPED, INDUCTOR, LOOP, PADDED, PLANNED, ROUTED

Inputs = tuple[Tensor, ...]
AS_IT_IS = "eager"  # the backend of what needs no compiling, or is compiled already


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a case.

    make: gives what is called; it is made when it is its turn. backend: what compiles it, "inductor" or "anyshape";
    "eager": nothing. counts: whose programs are counted, where it is not the backend. same_bits: its results have to be
    those of the routed form bit for bit.
    """

    make: Callable[[], Callable[..., Any]]
    backend: str = AS_IT_IS
    counts: str = ""
    same_bits: bool = False


@dataclass(slots=True)
class Forms:
    """A case, made: modules with the same weights, and batches.

    Attributes:
        plain: plain torch, a loop over branches; it says what results are right. Run in eager, under Inductor and under
            our compiler.
        routed: by `route.Router`, run under our compiler.
        batches: arguments of calls; the first WARM_UP are for compiling, the rest have loads not seen before.
        padded: padded batched products. grouped_mm: with `torch.nn.functional.grouped_mm`. Both run in eager; None
            where they are not legal, or make no sense.
        planned: the routed form, optimised by a plan and compiled; gets the module and the batches of the warm-up.
        others: more ways by name.
        active: bytes of activations that a batch needs by its loads alone; None: not asked.
        left_out: ways that are not measured (a form that does not end in a sensible time), with the reason.
    """

    plain: nn.Module
    routed: nn.Module
    batches: list[Inputs]
    padded: nn.Module | None = None
    grouped_mm: nn.Module | None = None
    planned: Callable[[nn.Module, list[Inputs]], Callable[..., Any]] | None = None
    others: dict[str, Way] = field(default_factory=dict)
    active: Callable[[Inputs], int] | None = None
    left_out: dict[str, str] = field(default_factory=dict)

    def ways(self) -> dict[str, Way]:
        """All ways, plain eager first."""
        found = {EAGER: Way(lambda: self.plain), INDUCTOR: Way(lambda: self.plain, "inductor")}
        padded, grouped_mm = self.padded, self.grouped_mm
        if padded is not None:
            found[PADDED] = Way(lambda: padded)
        if grouped_mm is not None:
            found[GROUPED] = Way(lambda: grouped_mm)
        found[LOOP] = Way(lambda: self.plain, "anyshape")
        found[ROUTED] = Way(lambda: self.routed, "anyshape")
        planned = self.planned
        if planned is not None:
            found[PLANNED] = Way(lambda: planned(self.routed, self.batches[:WARM_UP]), counts="anyshape")
        return {name: way for name, way in (found | self.others).items() if name not in self.left_out}


WARM_UP = 2  # batches


@dataclass(frozen=True, slots=True)
class Case:
    """One line of a table.

    name: what `--only` asks for, the model first ("switch-64-zipf"). row: of `experiments/routes/rows.py`. make: builds
    the forms from a fixed seed. trains: a call is forward and backward of the mean square of its results. quick: one
    that `--quick` measures. memory: ways whose memory is counted, in a process each. large: the forms for it, where
    what a process has once would count for more than the batches of `make` need.
    """

    name: str
    row: str
    make: Callable[[], Forms]
    trains: bool = False
    quick: bool = False
    memory: tuple[str, ...] = (EAGER, PADDED, GROUPED, ROUTED)
    large: Callable[[], Forms] | None = None


@dataclass(frozen=True, slots=True)
class Study:
    """What is measured otherwise: `measure(quick)` returns numbers by the names that its row reads (rows.py)."""

    name: str
    row: str
    measure: Callable[[bool], dict[str, float]]
    quick: bool = False
