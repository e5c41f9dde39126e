"""Cells, routes, routers, and the operators of dispatch and combine, in plain torch."""
from anyshape.route.core.cells import annotate_cell, restore
from anyshape.route.core.router import Router
from anyshape.route.core.routes import Routes

__all__ = ["Router", "Routes", "annotate_cell", "restore"]
