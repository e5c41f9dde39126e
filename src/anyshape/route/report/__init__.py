"""The report of a dynamic network's profile and plan: a page, a picture, or data, in one file each."""
from anyshape.route.report.contents import collect
from anyshape.route.report.write import write_report

__all__ = ["collect", "write_report"]
