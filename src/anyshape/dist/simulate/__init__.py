"""Simulation of a distributed step: tasks on streams and links; seconds, memory, Perfetto traces."""
from anyshape.dist.simulate.events import Task, Timeline, simulate
from anyshape.dist.simulate.step import Report, simulate_step
from anyshape.dist.simulate.trace import perfetto

__all__ = ["Report", "Task", "Timeline", "perfetto", "simulate", "simulate_step"]
