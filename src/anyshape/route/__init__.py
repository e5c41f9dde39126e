"""Dynamic networks (mixtures of experts, early exits, patches): cells, routers, optimisation from a profile."""
from anyshape.route.adopt import adopt, release
from anyshape.route.core.branches import Experts
from anyshape.route.core.capacity import limited
from anyshape.route.core.cells import annotate_cell, restore
from anyshape.route.core.loop import Loop, loop
from anyshape.route.core.losses import load_balance, z_loss
from anyshape.route.core.router import Router
from anyshape.route.core.router_functions import (
    confidence_exit,
    expert_choice,
    hash_route,
    residual_threshold,
    switch,
    task_route,
    threshold,
    top_k,
)
from anyshape.route.core.routes import Routes
from anyshape.route.core.stack import StackedBranches, stack
from anyshape.route.flow import Flow, Relation, Verdict, analyze, branch_independent
from anyshape.route.optimize.decision import Decision
from anyshape.route.optimize.drift import DriftPolicy
from anyshape.route.optimize.plan import Plan, optimize
from anyshape.route.optimize.plan_files import load_plan, save_plan
from anyshape.route.profile.files import load_profile, save_profile
from anyshape.route.profile.overhead import measure_overhead
from anyshape.route.profile.profile import Profile
from anyshape.route.profile.record import profile
from anyshape.route.profile.replay import replay
from anyshape.route.profile.routers import routers_of
from anyshape.route.profile.synthetic import synthetic

__all__ = ["Decision", "DriftPolicy", "Experts", "Flow", "Loop", "Plan", "Profile", "Relation", "Router",
           "Routes", "StackedBranches", "Verdict", "adopt", "analyze", "annotate_cell", "branch_independent",
           "confidence_exit", "expert_choice", "hash_route", "limited", "load_balance", "load_plan", "load_profile",
           "loop", "measure_overhead", "optimize", "profile", "release", "replay", "residual_threshold", "restore",
           "routers_of", "save_plan", "save_profile", "stack", "switch", "synthetic", "task_route", "threshold",
           "top_k", "z_loss"]
