"""Operators of ONNX that no operator of PyTorch is, for extern steps: by name, as functions of tensors."""
from anyshape.runtime.torch_ops.onnx.table import OPERATORS

__all__ = ["OPERATORS"]
