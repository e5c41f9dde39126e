"""Strategy search of one family and shape as an integer program, solved exactly by HiGHS (`anyshape[plan]`).

    minimise sum of seconds[l, o, r] y[l, o, r]
    a layer has one choice                      sum over o of x[l, o] = 1, x in {0, 1}
    its layers recompute one way or another     sum over r of y[l, o, r] = count[l] x[l, o], y a whole number
    what runs takes its transient bytes         y[l, o, r] <= count[l] z[l, o, r], t >= transient[l, o, r] z[l, o, r]
    bytes                                       sum of bytes[l, o, r] y[l, o, r] + t <= room

Where highspy is not installed, the local search's answer stands.
"""
from __future__ import annotations

import importlib.util
import math

import numpy as np

from anyshape.dist.search.tables import Table

SECONDS = 5.0  # that HiGHS may take
LARGEST = 64  # layers that differ, up to which it is asked


def is_installed() -> bool:
    """Is there HiGHS?"""
    return importlib.util.find_spec("highspy") is not None


def solved(one: Table, room: float) -> tuple[float, tuple[int, ...], list[list[int]]] | None:
    """Seconds, choices and counts, [layers, recomputations], that nothing in the table is faster than; None where
    nothing fits, or HiGHS had no time."""
    import highspy

    solver = highspy.Highs()
    for option, value in (("output_flag", False), ("time_limit", SECONDS), ("threads", 1), ("mip_rel_gap", 1e-6)):
        solver.setOptionValue(option, value)
    layers, choices, kinds = one.seconds.shape
    unit = max(room, 1.0)  # bytes are scaled to 1
    entries = [(i, j, r) for i, j, r in np.ndindex(layers, choices, kinds) if np.isfinite(one.seconds[i, j, r])]
    x = {(i, j): place for place, (i, j) in enumerate(sorted({(i, j) for i, j, _ in entries}))}
    y = {entry: len(x) + place for place, entry in enumerate(entries)}
    z = {entry: len(x) + len(y) + place for place, entry in enumerate(entries)}
    number = len(x) + len(y) + len(z)
    counts = [float(count) for count in one.counts]
    upper = [1.0] * len(x) + [counts[i] for i, _, _ in entries] + [1.0] * len(z) + [math.inf]
    solver.addVars(number + 1, [0.0] * (number + 1), upper)
    solver.changeColsIntegrality(number, np.arange(number, dtype=np.int32),
                                 np.full(number, highspy.HighsVarType.kInteger.value, np.uint8))
    for entry in entries:
        solver.changeColCost(y[entry], float(one.seconds[entry]))
    for i in range(layers):
        own = [place for (layer, _), place in x.items() if layer == i]
        solver.addRow(1.0, 1.0, len(own), own, [1.0] * len(own))
    for (i, j), place in x.items():
        own = [y[entry] for entry in entries if entry[:2] == (i, j)]
        solver.addRow(0.0, 0.0, len(own) + 1, [*own, place], [1.0] * len(own) + [-counts[i]])
    for entry in entries:
        solver.addRow(-math.inf, 0.0, 2, [y[entry], z[entry]], [1.0, -counts[entry[0]]])
        solver.addRow(-math.inf, 0.0, 2, [z[entry], number], [float(one.transient[entry]) / unit, -1.0])
    taken = [float(one.bytes[entry]) / unit for entry in entries]
    solver.addRow(-math.inf, room / unit, len(entries) + 1, [*(y[entry] for entry in entries), number], [*taken, 1.0])
    solver.run()
    if solver.getInfo().primal_solution_status != 2:
        return None
    values = solver.getSolution().col_value
    picked = [0] * layers
    found = [[0] * kinds for _ in range(layers)]
    for i, j, r in entries:
        many = round(values[y[i, j, r]])
        if many:
            picked[i], found[i][r] = j, many
    total = sum(counts_ * float(one.seconds[i, picked[i], r])
                for i, row in enumerate(found) for r, counts_ in enumerate(row) if counts_)
    return total, tuple(picked), found
