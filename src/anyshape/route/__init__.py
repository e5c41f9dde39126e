"""Dynamic networks (mixtures of experts, early exits, patches): cells, routers, optimisation from a profile."""
from anyshape.route.adopt import adopt, release
from anyshape.route.core.branches import Experts
from anyshape.route.core.cells import annotate_cell, restore
from anyshape.route.core.router import Router
from anyshape.route.core.router_functions import top_k
from anyshape.route.core.routes import Routes

__all__ = ["Experts", "Router", "Routes", "adopt", "annotate_cell", "release", "restore", "top_k"]
