"""Roofline: memory-bound kernels against the speed of a copy."""
