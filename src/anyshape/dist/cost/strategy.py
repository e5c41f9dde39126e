"""A sharding strategy: degrees of a mesh, a placement of each layer's parameters, what is recomputed, the schedule.

    strategy mesh(pipe=1, data=16, context=1, tensor=8) sequence micro=1 schedule=1f1b chunks=1 early merged
      embed_tokens: cut fsdp recompute(1, 0, 0)
      layers.*: cut fsdp recompute(40, 0, 40)

This is the text form, which `strategy_of` reads back. recompute(a, b, c): so many layers keep everything, what
selective recomputation keeps, and their inputs alone; those that keep least come first, for theirs would be kept
longest.
"""
from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from anyshape.base.errors import ParseError
from anyshape.dist.cost.parallel import DATA, RECOMPUTE, TENSOR, Degrees, LayerChoice

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Of layers that are alike. recompute: how many recompute none, selective, full."""

    name: str
    choice: LayerChoice
    recompute: tuple[int, int, int]

    def modes(self) -> list[str]:
        """Per layer, in order, one of RECOMPUTE."""
        none, selective, full = self.recompute
        return ["full"] * full + ["selective"] * selective + ["none"] * none

    @property
    def block(self) -> str:
        """As of the layers."""
        head, star, _ = self.name.partition("*")
        return head + star

    def __str__(self) -> str:
        return f"{self.name}: {self.choice} recompute{self.recompute}"


@dataclass(frozen=True, slots=True)
class LayerStrategy:
    """How a train step is dealt out over a mesh, as the cost model sees it. micro: micro-batches of a step. chunks:
    stages of a rank, of an interleaved schedule. early: collectives run on streams of their own, begun as soon as they
    can be; else each where it is needed. merged: those of one layer are one. stages: the first layer of each stage of
    the pipeline; (): cut by their seconds."""

    degrees: Degrees
    layers: tuple[LayerPlan, ...]
    micro: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    early: bool = True
    merged: bool = True
    stages: tuple[int, ...] = ()

    def replace(self, **changes: object) -> LayerStrategy:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def order(self) -> list[tuple[LayerPlan, str]]:
        """Every layer as it comes in the model, with what it recomputes: neighbours of one block take turns."""
        found: list[tuple[LayerPlan, str]] = []
        for _, group in itertools.groupby(self.layers, key=lambda plan: plan.block):
            modes = [[(plan, mode) for mode in plan.modes()] for plan in group]
            found += [one for turn in itertools.zip_longest(*modes) for one in turn if one is not None]
        return found

    def __str__(self) -> str:
        words = ["strategy", str(self.degrees), *(["sequence"] if self.degrees.sequence else []),
                 f"micro={self.micro}", f"schedule={self.schedule}", f"chunks={self.chunks}",
                 *(["early"] if self.early else []), *(["merged"] if self.merged else []),
                 *([f"stages={','.join(map(str, self.stages))}"] if self.stages else [])]
        return "\n".join([" ".join(words), *(f"  {layer}" for layer in self.layers)])

    @property
    def summary(self) -> str:
        """In a line: `tensor=8 fsdp full`."""
        one = self.degrees
        main = max(self.layers, key=lambda layer: (sum(layer.recompute), layer.recompute[2], layer.recompute[1]))
        words = [f"{name}={size}" for name, size in (("pipe", one.pipe), ("data", one.data), ("context", one.context),
                                                     ("tensor", one.tensor)) if size > 1] or ["one rank"]
        if one.tensor > 1:
            words.append(main.choice.tensor + ("+sequence" if one.sequence and main.choice.tensor == "cut" else ""))
        kinds = [f"{kind} {count}" for kind, count in zip(RECOMPUTE, main.recompute, strict=True) if count]
        words.append(main.choice.data)
        if main.recompute[0] < sum(main.recompute):
            words.append("recompute " + ", ".join(kinds))
        if self.micro > 1:
            words.append(f"micro={self.micro}" + (f" {self.schedule}" if one.pipe > 1 else ""))
        return " ".join(words)


_HEAD = re.compile(r"strategy mesh\(pipe=(\d+), data=(\d+), context=(\d+), tensor=(\d+)\)( sequence)? micro=(\d+) "
                   r"schedule=([\w-]+) chunks=(\d+)( early)?( merged)?(?: stages=([\d,]+))?")
_LAYER = re.compile(r"\s+(\S+): (\w+) (\w+) recompute\((\d+), (\d+), (\d+)\)")


def strategy_of(text: str) -> LayerStrategy:
    """A strategy from its text form.

    Raises:
        ParseError: it is none.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    head = _HEAD.fullmatch(lines[0].strip()) if lines else None
    if head is None or head.group(7) not in SCHEDULES:
        raise ParseError("this is no strategy", where=repr(lines[0] if lines else ""),
                         why=f"its first line has a mesh, micro=, schedule= of {', '.join(SCHEDULES)}, and chunks=",
                         do="compare with str() of a strategy")
    pipe, data, context, tensor = (int(head.group(place)) for place in range(1, 5))
    layers = [_layer_of(line) for line in lines[1:]]
    return LayerStrategy(Degrees(data, tensor, context, pipe, bool(head.group(5))), tuple(layers), int(head.group(6)),
                    head.group(7), int(head.group(8)), bool(head.group(9)), bool(head.group(10)),
                    tuple(map(int, head.group(11).split(","))) if head.group(11) else ())


def _layer_of(line: str) -> LayerPlan:
    found = _LAYER.fullmatch(line.rstrip())
    if found is None or found.group(2) not in TENSOR or found.group(3) not in DATA:
        raise ParseError("this is no layer of a strategy", where=repr(line),
                         why=f"it has a name, one of {', '.join(TENSOR)}, one of {', '.join(DATA)}, and recompute(..)",
                         do="compare with str() of a strategy")
    name, tensor, data, *counts = found.groups()
    none, selective, full = (int(one) for one in counts)
    return LayerPlan(name, LayerChoice(tensor, data), (none, selective, full))


def uniform(degrees: Degrees, layers: Sequence[tuple[str, int]], tensor: str, data: str, recompute: str,
            **settings: object) -> LayerStrategy:
    """A strategy that treats all layers (name, count) alike, as strategies by hand do."""
    place = RECOMPUTE.index(recompute)
    plans = []
    for name, count in layers:
        counts = [0, 0, 0]
        counts[place] = count
        plans.append(LayerPlan(name, LayerChoice(tensor, data), (counts[0], counts[1], counts[2])))
    return LayerStrategy(degrees, tuple(plans)).replace(**settings)
