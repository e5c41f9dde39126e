"""Sharding of one graph along one axis of a mesh: where its inputs lie, and what is asked of values in between.

    axis data 2
    keep data
    place tokens: S(0)
    place w_moment: S(0)
    pin gradient: S(0)

It is data with a text form: a strategy found by a search, or written by hand, is a list of these, an axis each.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from anyshape.base.errors import ParseError
from anyshape.dist.placement import REPLICATE, Partial, Placement, placement_of

KEEPS = ("", "data", "weights")
ATTENTIONS = ("", "ring", "ulysses")


@dataclass(frozen=True, slots=True)
class Sharding:
    """Along one axis.

    axis: its name. ranks: its size.
    placements: (input, placement) each; other inputs are replicated.
    pins: (value, placement) each: a value that is brought there where it is made.
    keep: what does not move where anything else can: "data", what is computed from `data`, as under data parallelism
        and FSDP, which gathers weights; "weights", all the rest, as under tensor parallelism; "": bytes alone count.
    data: names of the inputs that a batch consists of.
    given: symbols of sizes that callers give as parts: each rank says how many it has (rows of a batch).
    attention: how attention over a sequence that is dealt out is done: "ring", keys and values go around; "ulysses",
        heads are dealt out by all_to_all; "": as cost has it.
    """

    axis: str
    ranks: int
    placements: tuple[tuple[str, Placement], ...] = ()
    pins: tuple[tuple[str, Placement], ...] = ()
    keep: str = ""
    data: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    attention: str = ""

    def __post_init__(self) -> None:
        assert self.keep in KEEPS and self.attention in ATTENTIONS, self
        assert not any(isinstance(one, Partial) for _, one in self.placements), self.placements

    def placed(self) -> Mapping[str, Placement]:
        """By name of an input."""
        return dict(self.placements)

    def of(self, name: str) -> Placement:
        """The placement of an input."""
        return self.placed().get(name, REPLICATE)

    def __str__(self) -> str:
        lines = [f"axis {self.axis} {self.ranks}"]
        lines += [f"keep {self.keep}"] if self.keep else []
        lines += [f"attention {self.attention}"] if self.attention else []
        lines += [f"data {' '.join(self.data)}"] if self.data else []
        lines += [f"given {' '.join(self.given)}"] if self.given else []
        lines += [f"place {name}: {one}" for name, one in self.placements]
        return "\n".join([*lines, *(f"pin {name}: {one}" for name, one in self.pins)])


def sharding_of(text: str) -> Sharding:
    """The sharding of a text form.

    Raises:
        ParseError: a line is none of it.
    """
    axis, ranks, keep, attention = "", 0, "", ""
    data: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    placements: list[tuple[str, Placement]] = []
    pins: list[tuple[str, Placement]] = []
    for number, line in enumerate(text.splitlines(), 1):
        word, _, rest = line.strip().partition(" ")
        name, colon, placement = rest.partition(":")
        if word == "axis" and len(rest.split()) == 2 and rest.split()[1].isdigit():
            axis, ranks = rest.split()[0], int(rest.split()[1])
        elif word == "keep" and rest in KEEPS:
            keep = rest
        elif word == "attention" and rest in ATTENTIONS:
            attention = rest
        elif word == "data":
            data = tuple(rest.split())
        elif word == "given":
            given = tuple(rest.split())
        elif word in ("place", "pin") and colon:
            (placements if word == "place" else pins).append((name.strip(), placement_of(placement)))
        elif word:
            raise ParseError(f"line {number} is no line of a sharding: {line.strip()}",
                             why="lines are axis, keep, attention, data, given, place and pin",
                             do="see str() of a sharding")
    if not axis:
        raise ParseError("the text is no sharding", why="it names no axis", do="begin with a line `axis name ranks`")
    return Sharding(axis, ranks, tuple(placements), tuple(pins), keep, data, given, attention)
