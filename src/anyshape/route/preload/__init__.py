"""Speculative weight preload: the layout of branches' weights, prediction, and branches that run from a store."""
from anyshape.route.preload.branch_predictor import BranchPredictor
from anyshape.route.preload.layout import Layout, lay_out, outermost, reason_against
from anyshape.route.preload.preloaded_branches import PreloadedBranches
from anyshape.route.preload.preloader import Preloader

__all__ = ["BranchPredictor", "Layout", "PreloadedBranches", "Preloader", "lay_out", "outermost", "reason_against"]
