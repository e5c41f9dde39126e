"""What is aimed at, beside what was measured: one line per measure, with "short" where the aim is not reached."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rich.table import Table

from anyshape_bench.experiments.roofline.results import LEAST_SHARE, SHARE, Roofline
from anyshape_bench.experiments.speed.results import (
    Cell,
    Results,
    cells,
    geometric_mean,
    models_of,
    per_inductor,
    single_gap,
    speedup,
)
from anyshape_bench.models.padding import BACKEND as PADDED

OURS, INDUCTOR, EAGER = "anyshape", "inductor", "eager"
CALL = "mlp"  # the model whose step is hardly more than a call
NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class Measure:
    """One line. value: as a ratio, or seconds where `unit` is "us"; None: not in the results. most: the aim is an upper
    bound. note: of which models it is, or which is the worst."""

    name: str
    aim: float
    most: bool
    value: float | None
    note: str = ""
    unit: str = "x"

    def said(self, value: float) -> str:
        return {"x": f"{value:.2f}x", "%": f"{value * 100:.0f} %", "us": f"{value * 1e6:.1f} us"}[self.unit]

    def verdict(self) -> str:
        if self.value is None:
            return NOT_MEASURED
        return "reached" if (self.value <= self.aim if self.most else self.value >= self.aim) else "short"

    def cells(self) -> tuple[str, ...]:
        """The columns of HEAD."""
        return (self.name, ("at most " if self.most else "at least ") + self.said(self.aim),
                "-" if self.value is None else self.said(self.value), self.note, self.verdict())


HEAD = ("measure", "aim", "measured", "of", "")
Values = Mapping[str, float | None]


def measures(results: Results, roofline: Roofline | None = None) -> list[Measure]:
    """All of them, in the order of the issue; ratios over the models that have both numbers."""
    by_name = {(cell.model, cell.backend): cell for cell in cells(results)}
    names = models_of(results)

    def field(of: str) -> Values:
        return {m: _ratio(by_name.get((m, OURS)), by_name.get((m, INDUCTOR)), of) for m in names}

    def faster(base: str, what: str) -> Values:
        return {m: speedup(results, m, OURS, base, what, [0] if what == "fresh" else None) for m in names}

    def better(what: str) -> Values:
        eager, inductor = faster(EAGER, what), faster(INDUCTOR, what)
        return {m: _least(eager[m], inductor[m]) for m in names}

    cold = field("cold")
    found = [*_both("cold first step, of Inductor's", 0.25, True, cold)]
    autocast = results.options.get("autocast")
    ways = (("fresh", "new shapes"), ("repeated", "seen shapes"))
    if not autocast:
        found += [_mean(f"{said}, against Inductor", 1.35, False, faster(INDUCTOR, what)) for what, said in ways]
        found += [_worst(f"{said}, against the better of eager and Inductor", 1.05, False, better(what))
                  for what, said in ways]
    elif autocast == "bfloat16":
        found += [_one(f"{model}, {dict(ways)[what]}, against Inductor", aim, False, faster(INDUCTOR, what), model)
                  for model, what, aim in (("llama", "fresh", 2.0), ("llama", "repeated", 1.5), ("bert", "fresh", 1.4))]
        found.append(_one("llama, peak memory, of Inductor's", 0.5, True, field("peak"), "llama"))
    found += [_mean(f"{said}, against Inductor with padding into buckets", 1.3, False, faster(PADDED, what))
              for what, said in ways]
    peak = field("peak")
    found.append(_mean("peak memory, of Inductor's", 0.85, True, peak))
    found.append(_worst("peak memory, of Inductor's", 1.0, True, peak))
    found += _of_roofline(roofline)
    found += _both("launches of a step, of Inductor's", 0.7, True, {m: per_inductor(results, m, OURS) for m in names})
    found += _both("a step, of that of our program for the one shape", 1.05, True,
                   {m: single_gap(results, m) for m in names})
    call = by_name.get((CALL, OURS))
    found.append(Measure("a call from Python to Python (p50)", 25e-6, True, call.p50 if call else None, f"`{CALL}`",
                         "us"))
    return found


def _ratio(ours: Cell | None, theirs: Cell | None, field: str) -> float | None:
    if ours is None or theirs is None:
        return None
    one, other = getattr(ours, field), getattr(theirs, field)
    return one / other if one and other else None


def _least(one: float | None, other: float | None) -> float | None:
    """The lower of two speedups, which is the one against the faster of both."""
    return None if one is None or other is None else min(one, other)


def _known(values: Values) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


def _mean(name: str, aim: float, most: bool, values: Values) -> Measure:
    known = _known(values)
    note = f"geometric mean of {len(known)} model{'s' if len(known) > 1 else ''}" if known else ""
    return Measure(name, aim, most, geometric_mean(known.values()), note)


def _worst(name: str, aim: float, most: bool, values: Values) -> Measure:
    known = _known(values)
    if not known:
        return Measure(name, aim, most, None)
    pick: Callable[..., str] = max if most else min
    model = pick(known, key=known.__getitem__)
    return Measure(name, aim, most, known[model], f"the {'greatest' if most else 'least'}: `{model}`")


def _both(name: str, aim: float, most: bool, values: Values) -> list[Measure]:
    return [_mean(name, aim, most, values), _worst(name, aim, most, values)]


def _one(name: str, aim: float, most: bool, values: Values, model: str) -> Measure:
    return Measure(name, aim, most, values.get(model), f"`{model}`")


def _of_roofline(roofline: Roofline | None) -> list[Measure]:
    name = "kernels bound by memory, of a copy's speed"
    known = {f"{line.name} {line.way}": value for line in (roofline.lines if roofline else ())
             if (value := line.share()) is not None}
    if not known:
        return [Measure(name, aim, False, None, unit="%") for aim in (SHARE, LEAST_SHARE)]
    reached = sum(value >= SHARE for value in known.values())
    last = min(known, key=known.__getitem__)
    return [Measure(name, SHARE, False, geometric_mean(known.values()),
                    f"geometric mean; {reached} of {len(known)} lines reach it", "%"),
            Measure(name, LEAST_SHARE, False, known[last], f"the least: `{last}`", "%")]


def table(found: list[Measure]) -> Table:
    """For a terminal."""
    shown = Table(title="What is aimed at", title_justify="left")
    for i, name in enumerate(HEAD):
        shown.add_column(name, justify="right" if i in (1, 2) else "left")
    for one in found:
        shown.add_row(*one.cells(), style="yellow" if one.verdict() == "short" else None)
    return shown


def markdown(found: list[Measure]) -> str:
    """A table in Markdown."""
    return "\n".join(["| " + " | ".join(HEAD) + " |", "|---|---:|---:|---|---|",
                      *("| " + " | ".join(one.cells()) + " |" for one in found)]) + "\n"
