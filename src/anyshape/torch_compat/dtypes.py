"""Our dtype names and torch's dtypes."""
from __future__ import annotations

import torch

TORCH_DTYPES: dict[str, torch.dtype] = {
    "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64,
    "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64,
    "u8": torch.uint8, "u16": torch.uint16, "u32": torch.uint32, "u64": torch.uint64,
    "bool": torch.bool,
    "c32": torch.complex32, "c64": torch.complex64, "c128": torch.complex128,
}  # fmt: skip

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}

HALVES = (torch.bfloat16, torch.float16)
