"""Operators by numpy, for programs without PyTorch: by the target that a plan names, from a fixed list."""
from anyshape.runtime.numpy_ops.calls import call, draws, reason_against

__all__ = ["call", "draws", "reason_against"]
