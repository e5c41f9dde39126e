"""Static cell flow: which cells depend on which, by abstract interpretation of the captured graph."""
from anyshape.route.flow.analysis import Flow, Relation, analyze
from anyshape.route.flow.capture import same_program
from anyshape.route.flow.rowwise import Verdict, branch_independent, constant_rows, unread_arguments

__all__ = ["Flow", "Relation", "Verdict", "analyze", "branch_independent", "constant_rows",
           "same_program", "unread_arguments"]
