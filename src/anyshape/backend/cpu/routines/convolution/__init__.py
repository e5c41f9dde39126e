"""Convolutions of the host, in the native subset."""
from anyshape.backend.cpu.routines.convolution.chain import run_grouped_convs

__all__ = ["run_grouped_convs"]
