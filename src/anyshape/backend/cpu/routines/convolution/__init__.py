"""Convolutions of the host, in the native subset."""
from anyshape.backend.cpu.routines.convolution.grouped_conv import run_grouped_conv

__all__ = ["run_grouped_conv"]
