"""Stored results of dynamic networks: per case and way times, recompilations, peaks. Needs no torch."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from anyshape_bench.harness.result_files import StoredRun, made
from anyshape_bench.measure.statistics import median
from anyshape_bench.routes.names import PLANNED, ROUTED

OURS = (PLANNED, ROUTED)  # the first that was measured is ours


@dataclass(slots=True)
class WayRecord:
    """One way of a case. Seconds and bytes.

    Attributes:
        first: of the first call, with compiling. fresh: of calls with loads never seen, in order. seen: the same
            batches again, a list for each pass.
        programs: that were compiled by the end of the warm-up; recompiled: those after it; None: nothing compiles.
        peaks: of each batch, above what was held before the way was made.
        wrong: how results differ from the plain form in eager; empty when they do not.
        error: why there are no numbers.
    """

    name: str
    backend: str
    first: float | None = None
    fresh: list[float] = field(default_factory=list)
    seen: list[list[float]] = field(default_factory=list)
    programs: int | None = None
    recompiled: int | None = None
    uncompiled: int = 0
    peaks: list[int] = field(default_factory=list)
    wrong: str = ""
    error: str = ""

    def time(self) -> float | None:
        """Of one pass over seen batches: the sum of each batch's median."""
        if not self.seen:
            return None
        return sum(median(times) or 0.0 for times in zip(*self.seen, strict=True))

    def fresh_time(self) -> float | None:
        """Of the pass in which every load was new."""
        return sum(self.fresh) if self.fresh else None


@dataclass(slots=True)
class CaseRecord:
    """What one process found: of a case its ways, of a study its values.

    mode: "time" or "memory". active: bytes of activations that each batch needs by its loads alone.
    commit, date: of the tree that was measured; runs into one folder add up.
    """

    case: str
    row: str
    mode: str
    number: int
    threads: int
    commit: str = ""
    date: str = ""
    trains: bool = False
    ways: list[WayRecord] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    active: list[int] = field(default_factory=list)
    error: str = ""

    def way(self, name: str) -> WayRecord | None:
        return next((one for one in self.ways if one.name == name), None)

    def ours(self) -> WayRecord | None:
        """The way that stands for us."""
        return next((way for way in map(self.way, OURS) if way is not None), None)

    def ratio(self, name: str, fresh: bool = False) -> float | None:
        """How many times faster ours is than a way: on seen batches, or in the pass of new loads."""
        ours, other = self.ours(), self.way(name)
        if ours is None or other is None:
            return None
        mine, theirs = (one.fresh_time() if fresh else one.time() for one in (ours, other))
        return theirs / mine if mine and theirs else None


@dataclass(slots=True)
class Routes(StoredRun):
    """A run, with a record for each process."""

    FILE = "routes.json"
    WHAT = "results of dynamic networks"
    COMMAND = "anyshape bench routes"
    records: list[CaseRecord] = field(default_factory=list)

    def take(self, answer: dict[str, Any]) -> None:
        """Adds a record, in the place of an older one of the same case, mode and number."""
        new = made(CaseRecord, answer)
        for place, one in enumerate(self.records):
            if (one.case, one.mode, one.number) == (new.case, new.mode, new.number):
                self.records[place] = new
                return
        self.records.append(new)

    def cases(self) -> list[str]:
        return list(dict.fromkeys(one.case for one in self.records))

    def of(self, case: str, mode: str = "time") -> list[CaseRecord]:
        return [one for one in self.records if one.case == case and one.mode == mode]

    def ratio(self, case: str, way: str, fresh: bool = False) -> float | None:
        """The median over processes."""
        return median(one for record in self.of(case) if (one := record.ratio(way, fresh)) is not None)

    def rows(self, row: str) -> list[str]:
        return [case for case in self.cases() if any(one.row == row for one in self.of(case))]
