"""A StableHLO module as plain data: what the reader makes of MLIR, and the importer walks.

Names of dtypes are ours (ir/types.py) where we have the dtype; c64 and c128 are complex, "token" has no elements.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

# element type in MLIR's text -> dtype
ELEMENTS: dict[str, str] = {
    "f16": "f16", "bf16": "bf16", "f32": "f32", "f64": "f64", "i1": "bool", "i8": "i8", "i16": "i16", "i32": "i32",
    "i64": "i64", "ui8": "u8", "ui16": "u16", "ui32": "u32", "ui64": "u64", "index": "i64",
    "complex<f32>": "c64", "complex<f64>": "c128", "!stablehlo.token": "token",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Type:
    """A tensor type. shape: numbers, None for a size that is known at run time only."""

    dtype: str
    shape: tuple[int | None, ...] = ()

    @property
    def static(self) -> tuple[int, ...] | None:
        """The shape, None where a size is not known."""
        return None if None in self.shape else tuple(n for n in self.shape if n is not None)


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """An operation. name: with its dialect. inputs, outputs: names of values. takes, gives: their types. attributes:
    int, float, bool, str, tuples of those, dicts, np.ndarray. where: as a person would find it."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    takes: tuple[Type, ...]
    gives: tuple[Type, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    regions: tuple[Block, ...] = ()
    where: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.where})" if self.where else self.name


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A body: what it takes, does, and gives."""

    arguments: tuple[str, ...]
    types: tuple[Type, ...]
    operations: tuple[Operation, ...]
    results: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """A function of a module. names: of sizes, by argument (jax.global_constant); "" where one has none. labels: of
    its arguments; results: of what it gives."""

    body: Block
    names: tuple[str, ...]
    labels: tuple[str, ...] = ()
    results: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Module:
    """A module: functions by name, with "main" among them."""

    functions: Mapping[str, Function]


def operations(block: Block) -> Iterator[Operation]:
    """All operations of a block, those inside of others too."""
    for one in block.operations:
        yield one
        for region in one.regions:
            yield from operations(region)
