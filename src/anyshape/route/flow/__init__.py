"""Static cell flow: which cells depend on which, by abstract interpretation of the captured graph."""
from anyshape.route.flow.analysis import Flow, Relation, analyze
from anyshape.route.flow.rowwise import Verdict, branch_independent

__all__ = ["Flow", "Relation", "Verdict", "analyze", "branch_independent"]
