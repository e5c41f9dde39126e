"""Pipeline parallelism: layers cut into stages by dynamic programming, and schedules as data."""
from anyshape.dist.pipeline.cut import cut
from anyshape.dist.pipeline.schedules import Action, check, in_flight, schedule

__all__ = ["Action", "check", "cut", "in_flight", "schedule"]
