"""Operators by numpy, for programs without PyTorch: by the target that a plan names, from a fixed list."""
from anyshape.runtime.numpy_ops.calls import call, reason_against

__all__ = ["call", "reason_against"]
