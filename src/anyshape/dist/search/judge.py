"""The judge of strategies: what a plan costs by simulation, and what is wrong with it, apart from whoever made it."""
from __future__ import annotations

from dataclasses import dataclass

from anyshape.dist.search.problem import Plan, Search
from anyshape.dist.simulate.step import Report, simulate_step


@dataclass(frozen=True, slots=True)
class Verdict:
    """seconds: of a mean step. memory: bytes of the fullest rank at the shape that needs most. reports: per class of
    shapes."""

    seconds: float
    memory: float
    reports: tuple[Report, ...]

    @property
    def exposed(self) -> float:
        """Seconds of exposed communication at the longest shape."""
        return self.reports[-1].exposed


def cost(search: Search, plan: Plan) -> Verdict | None:
    """Simulates a plan at every class of shapes; None where it cannot run at one."""
    reports = []
    for shape, strategy in zip(search.shapes, plan.strategies, strict=True):
        report = simulate_step(search.workload, search.machine, strategy, shape.batch, shape.length, search.precision)
        if report is None:
            return None
        reports.append(report)
    seconds = sum(shape.weight * report.seconds for shape, report in zip(search.shapes, reports, strict=True))
    return Verdict(seconds, max(max(report.memory) for report in reports), tuple(reports))


def check(search: Search, plan: Plan, verdict: Verdict | None = None) -> list[str]:
    """What is wrong with a plan; empty where it is right. verdict: what `cost` says of it, if that is known."""
    found = []
    if len(plan.strategies) != len(search.shapes):
        return [f"it has {len(plan.strategies)} strategies for {len(search.shapes)} classes of shapes"]
    first = plan.strategies[0]
    layers = [(layer.name, layer.count) for layer in search.workload.layers]
    for strategy in plan.strategies:
        degrees = strategy.degrees
        if degrees.world != search.world:
            found.append(f"{degrees} has {degrees.world} ranks of {search.world}")
        if (degrees.tensor, degrees.pipe, strategy.chunks if degrees.pipe > 1 else 0) != (
                first.degrees.tensor, first.degrees.pipe, first.chunks if degrees.pipe > 1 else 0):
            found.append("weights would move between two shapes: the axes tensor or pipe differ")
        if [plan.choice for plan in strategy.layers] != [plan.choice for plan in first.layers]:
            found.append("weights would move between two shapes: placements differ")
        if [(plan.name, sum(plan.recompute)) for plan in strategy.layers] != layers:
            found.append("its layers are not those of the model")
        for layer, own in zip(search.workload.layers, strategy.layers, strict=False):
            found += _broken(search, layer.name, layer.most, own, degrees.tensor)
    if found:
        return found
    verdict = verdict or cost(search, plan)
    if verdict is None:
        return ["it cannot run: fewer sequences than micro-batches, or fewer layers than stages"]
    if verdict.memory > search.memory:
        found.append(f"a rank has {verdict.memory:.0f} bytes of {search.memory:.0f}")
    return found


def _broken(search: Search, name: str, most: int, own: object, tensor: int) -> list[str]:
    found = []
    choice, recompute = own.choice, own.recompute  # type: ignore[attr-defined]
    if choice.tensor == "cut" and most % tensor:
        found.append(f"{name} cannot be cut over {tensor} ranks")
    one = search.fixed_of(name)
    if one.tensor and tensor > 1 and choice.tensor != one.tensor:
        found.append(f"{name} is {choice.tensor}, not {one.tensor}")
    if one.data and choice.data != one.data:
        found.append(f"{name} is {choice.data}, not {one.data}")
    if one.recompute and sum(recompute) != recompute[("none", "selective", "full").index(one.recompute)]:
        found.append(f"{name} recomputes {recompute}, not {one.recompute}")
    return found
