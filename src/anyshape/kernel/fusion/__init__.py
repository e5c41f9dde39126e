"""Fusion: which equations make one kernel, vertically and horizontally."""
