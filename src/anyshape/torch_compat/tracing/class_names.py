"""Constant folding of the names of torch's own classes and functions in torch's tracer. It takes those of other classes
for constants; of torch's it makes attributes of which it knows no value, and has a graph break where one is used.

    type(module.weight).__module__.startswith("torchao.")  -->  False

Without effect where torch's internals are not as expected.
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from anyshape import torch_compat as compat

VARIABLES = "torch._dynamo.variables."
NAMES = ("__module__", "__name__", "__qualname__")


@contextlib.contextmanager
def names_traced() -> Iterator[None]:
    """Inside, Dynamo takes such names for constants. When nested, the inner one changes nothing more."""
    found = [compat.get(VARIABLES + name) for name in (
        "builtin.GetAttrBuiltinVariable", "builtin.GetAttrBuiltinVariable._call_getattr",
        "TorchInGraphFunctionVariable", "constant.ConstantVariable")]
    if None in found:
        yield
        return
    owner, read, Torchs, ConstantVariable = found

    def _call_getattr(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(args[0], Torchs) and args[1].is_python_constant() and args[1].as_python_constant() in NAMES:
            value = getattr(args[0].value, args[1].as_python_constant(), None)
            if isinstance(value, str):
                return ConstantVariable.create(value)
        return read(self, tx, args, kwargs)

    owner._call_getattr = _call_getattr
    try:
        yield
    finally:
        owner._call_getattr = read
