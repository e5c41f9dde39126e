"""Dynamic networks (mixtures of experts, early exits, patches): cells, routers, optimisation from a profile."""
from anyshape.route.core.branches import Experts
from anyshape.route.core.cells import annotate_cell, restore
from anyshape.route.core.router import Router
from anyshape.route.core.router_functions import top_k
from anyshape.route.core.routes import Routes
from anyshape.route.core.stack import StackedBranches, stack

__all__ = ["Experts", "Router", "Routes", "StackedBranches", "annotate_cell", "restore", "stack", "top_k"]
