"""Dynamic networks (mixtures of experts, early exits, patches): cells, routers, optimisation from a profile."""
from anyshape.route.core.branches import Experts
from anyshape.route.core.cells import annotate_cell, restore
from anyshape.route.core.router import Router
from anyshape.route.core.router_functions import top_k
from anyshape.route.core.routes import Routes
from anyshape.route.flow import analyze, branch_independent

__all__ = ["Experts", "Router", "Routes", "analyze", "annotate_cell", "branch_independent", "restore", "top_k"]
