"""What a tensor may be beside dtype, sizes and strides, asked where it enters a program, and the answer for each kind.

    negative or conjugate bit, a tensor of zeros without memory    materialised: the same numbers in memory of their own
    a gradient that is sparse, or of a subclass                    materialised as a plain tensor
    sparse, nested, MKL-DNN's own layout, on another device        refused before anything runs (`refused`)
    sizes, but a storage of 0 bytes                                refused; found by the host, which has the addresses

Programs read memory. A tensor's bits say that what lies there is not what the tensor means, and `data_ptr()` gives the
address all the same. What Dynamo traces is guarded by the bits (its guards compare dispatch keys); gradients, tensors
of exported programs and results of PyTorch's operators are not.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from anyshape.base.errors import InputError
from anyshape.ir.types import TensorType
from anyshape.plan.ir.program import Plan
from anyshape.torch_compat import is_zeros


def odd(name: str, wanted: str, dtype: torch.dtype, device: str) -> str:
    """Text of a condition: whether the tensor `name` has another dtype than `wanted`, the name of this dtype, is more
    than its memory, or not on the device that the name `device` stands for. Asked where the quick comparison with
    tensors that were looked at (`alike` in runtime/call/dispatch_codegen.py) has failed."""
    conjugate = f" or {name}.is_conj()" if dtype.is_complex else ""
    return (f"{name}.dtype is not {wanted} or {name}.device != {device} or {name}.layout is not strided"
            f" or {name}.is_neg(){conjugate} or (not {name}.data_ptr() and is_zeros({name}))")


def refused(tensor: torch.Tensor, plan: Plan, position: int) -> InputError | None:
    """The error for an input that no program takes; None where programs do. Of a tape, what the forward did not keep is
    not there."""
    if tensor.is_meta and position in plan.restored:
        return None
    if tensor.is_nested:
        why, do = "it is a nested tensor, whose sizes are no ordinary numbers", "use padded tensors"
    elif str(tensor.device) != (device := device_of(plan, position)) or tensor.layout != torch.strided:
        where = "the CPU" if device == "cpu" else device
        why = f"it is a {tensor.layout} tensor on {tensor.device}; the program runs on dense tensors on {where}"
        do = f"move it with .to({device!r})" if str(tensor.device) != device else "pass it as .to_dense()"
    elif tensor.numel() and not tensor.data_ptr() and not is_zeros(tensor):
        why = f"it has no memory: its storage has {tensor.untyped_storage().nbytes()} bytes, its elements need " \
              f"{tensor.numel() * tensor.itemsize}"
        do = "give it its memory before the call, for example with untyped_storage().resize_"
    else:
        return None
    return InputError(f"input {position} of {plan.name} does not fit the compiled program", where=plan.name, why=why,
                      do=do)


def device_of(plan: Plan, position: int) -> str:
    """PyTorch's word for the device of an input."""
    kind = plan.inputs[position]
    return kind.device if isinstance(kind, TensorType) else "cpu"


def without_memory(plan: Plan, inputs: Sequence[Any]) -> InputError:
    """The error for a call in which an input has elements and no address; nothing has run."""
    found = (refused(one, plan, position) for position, one in enumerate(inputs)
             if isinstance(one, torch.Tensor) and not one.is_meta)
    return next((error for error in found if error is not None), InputError(f"an input of {plan.name} has no memory"))
