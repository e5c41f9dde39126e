"""The type of a value: dtype, symbolic shape, and strides when the value is not dense and row-major."""
from __future__ import annotations

from dataclasses import dataclass

from anyshape.sym.expr import Size, dense_strides, product

# name -> (bytes per element, kind); kind is one of float, int, uint, bool, complex
DTYPES: dict[str, tuple[int, str]] = {
    "f16": (2, "float"), "bf16": (2, "float"), "f32": (4, "float"), "f64": (8, "float"),
    "i8": (1, "int"), "i16": (2, "int"), "i32": (4, "int"), "i64": (8, "int"),
    "u8": (1, "uint"), "u16": (2, "uint"), "u32": (4, "uint"), "u64": (8, "uint"),
    "bool": (1, "bool"),
    "c32": (4, "complex"), "c64": (8, "complex"), "c128": (16, "complex"),
}  # fmt: skip

# dtypes that kernels compute on; everything else runs as PyTorch would
NATIVE = frozenset(("f16", "bf16", "f32", "f64", "i8", "i16", "i32", "i64", "u8", "bool"))


@dataclass(frozen=True, slots=True)
class TensorType:
    """dtype name, sizes, and strides in elements (None: dense, row-major)."""

    dtype: str
    shape: tuple[Size, ...]
    strides: tuple[Size, ...] | None = None
    device: str = "cpu"

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def count(self) -> Size:
        """Number of elements."""
        return product(self.shape)

    @property
    def bytes(self) -> Size:
        """Bytes of a dense buffer of this type."""
        return self.count * DTYPES[self.dtype][0]

    def layout(self) -> tuple[Size, ...]:
        """The strides in elements, the dense ones when none are given."""
        return dense_strides(self.shape) if self.strides is None else self.strides

    def dense(self) -> TensorType:
        """The same dtype and shape, dense."""
        return TensorType(self.dtype, self.shape, None, self.device)

    def __str__(self) -> str:
        text = f"{self.dtype}[{', '.join(str(s) for s in self.shape)}]"
        if self.strides is not None:
            text += f" strides [{', '.join(str(s) for s in self.strides)}]"
        if self.device != "cpu":
            text += f" on {self.device}"
        return text


@dataclass(frozen=True, slots=True)
class SizeType:
    """The type of a graph input that is a whole number: it binds the symbol of the same name."""

    def __str__(self) -> str:
        return "size"


ValueType = TensorType | SizeType


def kind_of(dtype: str) -> str:
    """float, int, uint, bool or complex."""
    return DTYPES[dtype][1]


def size_of(dtype: str) -> int:
    """Bytes of one element."""
    return DTYPES[dtype][0]
