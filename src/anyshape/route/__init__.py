"""Dynamic networks (mixtures of experts, early exits, patches): cells, routers, optimisation from a profile."""
from anyshape.route.adopt import adopt, release
from anyshape.route.core.branches import Experts
from anyshape.route.core.cells import annotate_cell, restore
from anyshape.route.core.router import Router
from anyshape.route.core.router_functions import top_k
from anyshape.route.core.routes import Routes
from anyshape.route.optimize.decision import Decision
from anyshape.route.optimize.plan import Plan, optimize
from anyshape.route.profile.profile import Profile
from anyshape.route.profile.routers import routers_of

__all__ = ["Decision", "Experts", "Plan", "Profile", "Router", "Routes", "adopt", "annotate_cell", "optimize",
           "release", "restore", "routers_of", "top_k"]
