"""Dynamic networks (mixtures of experts, early exits, patches): cells, routers, optimisation from a profile."""
from anyshape.route.core.branches import Experts
from anyshape.route.core.cells import annotate_cell, restore
from anyshape.route.core.router import Router
from anyshape.route.core.router_functions import top_k
from anyshape.route.core.routes import Routes
from anyshape.route.optimize.decision import Decision
from anyshape.route.optimize.plan import Plan, optimize
from anyshape.route.profile.files import load_profile, save_profile
from anyshape.route.profile.overhead import measure_overhead
from anyshape.route.profile.profile import Profile
from anyshape.route.profile.record import profile
from anyshape.route.profile.replay import replay
from anyshape.route.profile.routers import routers_of
from anyshape.route.profile.synthetic import synthetic

__all__ = ["Decision", "Experts", "Plan", "Profile", "Router", "Routes", "annotate_cell", "load_profile",
           "measure_overhead", "optimize", "profile", "replay", "restore", "routers_of", "save_profile", "synthetic",
           "top_k"]
