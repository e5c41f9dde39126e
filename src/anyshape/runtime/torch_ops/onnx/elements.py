"""Elementwise operators on dtypes that kernels do not compute on, sorting, and conversions, as extern steps."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from anyshape.runtime.numpy_ops import pairwise

# functions of numpy that a graph may name
FUNCTIONS = frozenset((
    "add", "subtract", "multiply", "floor_divide", "remainder", "maximum", "minimum", "power", "less", "less_equal",
    "greater", "greater_equal", "equal", "bitwise_and", "bitwise_or", "bitwise_xor", "invert", "left_shift",
    "right_shift", "clip"))


def by_numpy(name: str, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """numpy's function of that name, of whole numbers of any width. An exponent keeps the dtype of its base."""
    if name not in FUNCTIONS:
        raise ValueError(f"{name} is no function that a program may call")
    arrays = [one.contiguous().numpy() for one in operands]
    with np.errstate(all="ignore"):
        if name in ("left_shift", "right_shift"):
            bits = arrays[0].dtype.itemsize * 8
            inside = arrays[1] < bits
            found = getattr(np, name)(arrays[0], np.where(inside, arrays[1], 0))
            found = np.where(inside, found, 0).astype(arrays[0].dtype)
        else:
            found = getattr(np, name)(*arrays)
    if name == "power":
        found = found.astype(arrays[0].dtype)
    return torch.from_numpy(np.array(found))


def on_arrays(operator: Callable[..., Any], *given: Any) -> Any:
    """The results of an operator of runtime/numpy_ops/ on the tensors' memory. bfloat16, which numpy does not have,
    goes by float32."""
    dtype = given[0].dtype
    arrays = [one if not isinstance(one, torch.Tensor) else
              (one.float() if one.dtype == torch.bfloat16 else one).detach().numpy() for one in given]
    found = operator(*arrays)
    made = [torch.from_numpy(_of_its_own(np.asarray(one, order="C"), arrays)).to(dtype) for one in (
        found if isinstance(found, tuple) else (found,))]
    return tuple(made) if isinstance(found, tuple) else made[0]


def _of_its_own(result: np.ndarray, given: Sequence[Any]) -> np.ndarray:
    """The result, copied where it lies in an operand's memory, which a plan uses again: a tensor of torch made from
    it would not show that."""
    shared = any(isinstance(one, np.ndarray) and np.may_share_memory(result, one) for one in given)
    return result.copy() if shared else result


def converted(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in another dtype, by way of numpy, which wraps whole numbers around."""
    if torch.bfloat16 in (x.dtype, dtype):
        x = x.float() if x.dtype == torch.bfloat16 else x
        return x.to(dtype) if dtype == torch.bfloat16 else converted(x, dtype)
    kind = torch.empty(0, dtype=dtype).numpy().dtype
    with np.errstate(all="ignore"):
        return torch.from_numpy(x.contiguous().numpy().astype(kind))


def bits(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same bits as another dtype of that width."""
    return x.contiguous().view(dtype).clone()


def topk(x: torch.Tensor, count: int, dim: int, largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest (smallest) elements along a dim, sorted, and their places; of equal ones the first comes first."""
    if x.dtype in (torch.uint16, torch.uint32, torch.uint64):
        array = x.contiguous().numpy()
        keys = array.max() - array if largest and array.size else array
        places = torch.from_numpy(np.ascontiguousarray(np.argsort(keys, dim, kind="stable"))).narrow(dim, 0, count)
        return torch.from_numpy(np.ascontiguousarray(np.take_along_axis(array, places.numpy(), dim))), places
    values, at = torch.sort(x, dim=dim, descending=largest, stable=True)
    return values.narrow(dim, 0, count).contiguous(), at.narrow(dim, 0, count).contiguous()


def optional(value: Any, default: Any) -> Any:
    """The value, or the default where there is none."""
    return default if value is None else value


def coupled(pairs: torch.Tensor) -> torch.Tensor:
    """Probabilities of classes out of those of pairs: as of runtime/numpy_ops/pairwise.py."""
    return on_arrays(pairwise.coupled, pairs)  # type: ignore[no-any-return]
