"""Arrays of numpy for importers: dtypes by our names, and tensors over their memory."""
from __future__ import annotations

from typing import Any

import numpy as np
import torch

_NUMPY: dict[str, Any] = {
    "f16": np.float16, "f32": np.float32, "f64": np.float64, "i8": np.int8, "i16": np.int16, "i32": np.int32,
    "i64": np.int64, "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64, "bool": np.bool_,
    "c64": np.complex64, "c128": np.complex128, "string": object,
}  # fmt: skip
_NAMES: dict[Any, str] = {np.dtype(kind): name for name, kind in _NUMPY.items()}


def numpy_dtype(name: str) -> Any:
    """numpy's dtype of that name; of bf16 and the narrow ones that of ml_dtypes, which the onnx package brings."""
    found = _NUMPY.get(name)
    if found is not None:
        return np.dtype(found)
    import ml_dtypes
    return np.dtype(getattr(ml_dtypes, "bfloat16" if name == "bf16" else name))


def dtype_of(array: np.ndarray) -> str:
    """Our name of an array's dtype."""
    if array.dtype.kind in "OUS":
        return "string"
    name = array.dtype.name
    return _NAMES.get(array.dtype) or ("bf16" if name == "bfloat16" else name)


def to_tensor(array: np.ndarray) -> torch.Tensor:
    """A torch tensor over the array's memory, or a copy where it cannot be written."""
    if array.dtype.kind == "V" and array.dtype.name == "bfloat16":  # the name takes as long as all the rest
        return to_tensor(array.view(np.int16)).view(torch.bfloat16)
    array = np.ascontiguousarray(array) if array.ndim else array
    if min(array.strides, default=0) < 0:  # of sizes 0 and 1, which numpy takes for contiguous
        array = array.copy()
    return torch.from_numpy(array if array.flags.writeable and array.dtype.isnative else array.astype(
        array.dtype.newbyteorder("="), copy=True))
