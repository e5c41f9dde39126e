"""Profile-guided optimisation of dynamic networks: a plan of checked decisions, applied, watched for drift."""
from anyshape.route.optimize.decision import Decision, DecisionContext, Optimisation
from anyshape.route.optimize.plan import Plan, optimize

__all__ = ["Decision", "DecisionContext", "Optimisation", "Plan", "optimize"]
