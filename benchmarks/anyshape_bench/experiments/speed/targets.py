"""What is aimed at, beside what was measured: one line per measure, with "short" where the aim is not reached."""
from __future__ import annotations

from collections.abc import Mapping

from anyshape_bench.experiments.roofline.results import LEAST_SHARE, SHARE, Roofline
from anyshape_bench.experiments.speed.results import (
    Cell,
    Results,
    cells,
    models_of,
    per_inductor,
    single_gap,
    speedup,
)
from anyshape_bench.harness.targets import Measure, worst
from anyshape_bench.measure.statistics import geometric_mean
from anyshape_bench.models.suite import PADDED

OURS, INDUCTOR, EAGER = "anyshape", "inductor", "eager"
CALL = "mlp"  # the model whose step is hardly more than a call


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
    return worst(name, aim, most, _known(values))


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
