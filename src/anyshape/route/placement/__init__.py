"""Expert placement: which device has which branch; problem, judge and solver, EPLB and contiguous to compare."""
from anyshape.route.placement.baselines import contiguous, eplb
from anyshape.route.placement.judge import check, cost
from anyshape.route.placement.problem import Placement, PlacementProblem
from anyshape.route.placement.solver import solve
from anyshape.route.placement.traces import RoutingTrace

__all__ = ["Placement", "PlacementProblem", "RoutingTrace", "check", "contiguous", "cost", "eplb", "solve"]
