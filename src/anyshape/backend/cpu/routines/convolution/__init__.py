"""Convolutions of the host, in the native subset."""
from anyshape.backend.cpu.routines.convolution.chain import run_grouped_convs
from anyshape.backend.cpu.routines.convolution.direct_conv import run_direct_conv

__all__ = ["run_direct_conv", "run_grouped_convs"]
