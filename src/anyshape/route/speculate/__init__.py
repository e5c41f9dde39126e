"""Speculative routing: predicted paths run as straight programs; decisions are checked, wrong ones rolled back."""
from anyshape.route.speculate.overlap import OverlappedRouter
from anyshape.route.speculate.payoff import Payoff
from anyshape.route.speculate.speculated import Speculated

__all__ = ["OverlappedRouter", "Payoff", "Speculated"]
