"""Private attributes of torch's objects, and its operators by names that begin with an underscore."""
from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from anyshape.torch_compat.access import absent, get

if TYPE_CHECKING:
    from torch._ops import OpOverload, OpOverloadPacket
else:
    OpOverload, OpOverloadPacket = type(torch.ops.aten.add.Tensor), type(torch.ops.aten.add)
_own_lock = threading.RLock()
pretended_operators: set[str] = set()  # those that torch seems to lack, for tests


class _Operators:
    """`torch.ops.aten`; what torch lacks is absent (see `Absent`), for no graph can hold it."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch.ops.aten, name, None)
        return absent(f"torch.ops.aten.{name}") if found is None or name in pretended_operators else found


aten: Any = _Operators()


def storage_id(tensor: torch.Tensor) -> int:
    """A number of the storage of a tensor, a fake one too; no two storages have the same at one time."""
    return tensor.untyped_storage()._cdata


def sequence_number(gradient: Any) -> int | None:
    """The number that a node of an autograd graph shares with what its forward wrote into a trace; None: not known."""
    number = getattr(gradient, "_sequence_nr", None)
    return None if number is None else int(number())


def is_mutable(op: Any) -> bool:
    """Whether an operator writes to an operand."""
    return bool(op._schema.is_mutable)


def gives_view(op: Any) -> bool:
    """Whether a result of an operator may lie in the memory of an operand."""
    return any(one.alias_info is not None for one in op._schema.returns)


def schema_text(op: Any) -> str:
    """The schema of an operator, such as `my::op(Tensor x) -> Tensor`."""
    return str(op._schema)


def operator_name(op: Any) -> str:
    """The name of an operator without its namespace and overload, such as `add` or `_softmax`."""
    return str(op._opname)


def arity(op: Any) -> int:
    """The number of arguments of an operator, those with defaults, too."""
    return len(op._schema.arguments)


def compile_lock() -> Any:
    """The lock that Dynamo holds while it traces; one of our own where torch has none."""
    return get("torch._dynamo.convert_frame.compile_lock") or _own_lock


def python_kernels(op: Any) -> tuple[dict[Any, Any], Any]:
    """The Python kernels of an operator that traces run in its place, and what was chosen among them; for a torch that
    has names.PYTHON_KERNELS."""
    return op.py_kernels, op._dispatch_cache


def is_zeros(tensor: torch.Tensor) -> bool:
    """Whether a tensor has the number 0 everywhere, and no memory: what some derivatives give."""
    ask = get("torch.Tensor._is_zerotensor")
    return ask is not None and bool(ask(tensor))
