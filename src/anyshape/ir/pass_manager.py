"""The pass manager: runs passes in order over a graph or a plan, and keeps what happened: times, sizes, texts on
request.

A pass is `f(ir, context) -> ir`; its name is the function's. `config.disable` leaves passes out, `config.show` and
`config.dump` give what it made, `config.edit` puts something else in its place, `config.check` verifies it and names
the pass that broke it. What differs between graphs (passes/driver/pipeline.py) and plans (plan/driver/pipeline.py) says
a subclass of `PassManager`.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from anyshape.base.config import Config
from anyshape.ir.graph import Graph
from anyshape.ir.ir_dumps import Edited, Edits, publish

IR = TypeVar("IR")
Context = TypeVar("Context")
Pass = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class DumpPoint:
    """One pass that ran: its name, seconds, equations (steps of a plan) before and after, and what it gave: a graph, or
    plans."""

    name: str
    seconds: float
    before: int
    after: int
    ir: Any

    def __str__(self) -> str:
        return f"{self.name:<21} {self.before:>5} -> {self.after:<5} {self.unit}  {self.seconds * 1e3:8.2f} ms"

    @property
    def unit(self) -> str:
        """What is counted."""
        return "equations" if isinstance(self.ir, Graph) else "steps"


@dataclass(slots=True)
class History:
    """The stages of one compilation, in order. `captured` is the graph before the first pass."""

    captured: Graph | None = None
    stages: list[DumpPoint] = field(default_factory=list)

    def seconds(self) -> dict[str, float]:
        """Time per pass name, in seconds."""
        total: dict[str, float] = {}
        for stage in self.stages:
            total[stage.name] = total.get(stage.name, 0.0) + stage.seconds
        return total

    def __str__(self) -> str:
        return "\n".join(str(stage) for stage in self.stages)


class PassManager(Generic[IR, Context]):
    """Runs passes over one kind of IR. first: number and name of the stage before the first pass; last: of one behind
    them, where there is one."""

    first: ClassVar[tuple[int, str]]
    last: ClassVar[tuple[int, str] | None] = None

    def __init__(self, passes: Sequence[Pass], config: Config) -> None:
        self.passes = passes
        self.config = config
        self.left_out = self.disabled(config)

    def run(self, ir: IR, context: Context, history: History | None = None, edits: Edits | None = None) -> IR:
        """What all passes make of `ir`; `history` receives what each did. `edits`: stages that a person has edited.

        Raises:
            EditError: an edited stage is not valid or does not fit. VerifyError: with `config.check` of at least 1, the
                first pass that left something broken, by name.
        """
        number, name = self.first
        ir = self.finished(ir, number, name, edits or {})
        for step in self.passes:
            number, name = number + 1, step.__name__
            if name in self.left_out:
                continue
            before = self.count(ir)
            start = time.perf_counter()
            ir = self.apply(step, ir, context)
            seconds = time.perf_counter() - start
            ir = self.finished(ir, number, name, edits or {})
            if history is not None:
                history.stages.append(DumpPoint(name, seconds, before, self.count(ir), ir))
        return ir if self.last is None else self.finished(ir, *self.last, edits or {})

    def finished(self, ir: IR, number: int, name: str, edits: Edits) -> IR:
        """What stands after a stage: put back if edited, published, verified."""
        if name in edits:
            ir = self.put_back(ir, edits[name], name)
        publish(self.config, self.name(ir), number, name, lambda: self.text(ir))
        if self.config.check >= 1 or edits:
            self.verify(ir, name)
        return ir

    def stages(self) -> list[tuple[int, str]]:
        """Number and name of the stages that `run` computes."""
        number, first = self.first
        names = [first, *(step.__name__ for step in self.passes)]
        found = [(number + k, name) for k, name in enumerate(names) if name not in self.left_out]
        return found if self.last is None else [*found, self.last]

    # ---- what a subclass says

    def disabled(self, config: Config) -> frozenset[str]:
        """Names of passes that are left out."""
        return config.disabled()

    def apply(self, step: Pass, ir: IR, context: Context) -> IR:
        """What a pass makes."""
        made: IR = step(ir, context)
        return made

    def name(self, ir: IR) -> str:
        """The name of the program."""
        raise NotImplementedError

    def count(self, ir: IR) -> int:
        """Equations, or steps."""
        raise NotImplementedError

    def text(self, ir: IR) -> str:
        """The text form."""
        raise NotImplementedError

    def verify(self, ir: IR, stage: str) -> None:
        """Raises VerifyError, which names the stage."""
        raise NotImplementedError

    def put_back(self, computed: IR, edited: Edited, stage: str) -> IR:
        """What a person has edited, if it fits in place of what is computed."""
        raise NotImplementedError
