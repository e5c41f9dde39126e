"""The graph of an ONNX model as plain data: what the reader makes of the protobuf, and the importer walks.

Names of dtypes are ours (ir/types.py) where we have the dtype, and those of ml_dtypes for the narrow ones.
"""
from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# element type of TensorProto -> dtype (onnx.proto, TensorProto.DataType)
ELEMENTS: dict[int, str] = {
    1: "f32", 2: "u8", 3: "i8", 4: "u16", 5: "i16", 6: "i32", 7: "i64", 8: "string", 9: "bool", 10: "f16", 11: "f64",
    12: "u32", 13: "u64", 14: "c64", 15: "c128", 16: "bf16", 17: "float8_e4m3fn", 18: "float8_e4m3fnuz",
    19: "float8_e5m2", 20: "float8_e5m2fnuz", 21: "uint4", 22: "int4", 23: "float4_e2m1fn", 24: "float8_e8m0fnu",
    25: "uint2", 26: "int2",
}  # fmt: skip
ELEMENT_OF: dict[str, int] = {name: number for number, name in ELEMENTS.items()}

MICROSOFT = "com.microsoft"  # the domain of onnxruntime's own operators
CLASSICAL = "ai.onnx.ml"  # and that of classical machine learning


@dataclass(frozen=True, slots=True)
class OnnxValue:
    """An input or output of a graph. dtype: "" where it is not a tensor, or unknown. shape: numbers, names of sizes, or
    None for a size without a name; None for an unknown rank."""

    name: str
    dtype: str = ""
    shape: tuple[int | str | None, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class OnnxNode:
    """An operator of a graph. version: of its domain's operator set. inputs: "" stands for one that is left out.
    attributes: int, float, str, bytes, tuples of those, np.ndarray, OnnxGraph. source: what the reader made it of."""

    op: str
    domain: str
    version: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    source: Any = None

    def __str__(self) -> str:
        title = f"{self.domain}:{self.op}" if self.domain else self.op
        return f"{title} {self.name or (self.outputs[0] if self.outputs else '')}".strip()


@dataclass(frozen=True, slots=True, eq=False)
class OnnxGraph:
    """A graph: inputs, constants by name, nodes in an order in which they can run, outputs. defaults: constants that
    a call may bring in their place."""

    name: str
    inputs: tuple[OnnxValue, ...]
    outputs: tuple[OnnxValue, ...]
    constants: Mapping[str, np.ndarray]
    nodes: tuple[OnnxNode, ...]
    defaults: tuple[OnnxValue, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class OnnxFunction:
    """The body of an operator that is composed of others."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[OnnxNode, ...]


def clean(name: str) -> str:
    """The name as an identifier."""
    text = re.sub(r"\W", "_", name, flags=re.ASCII) or "value"
    return text if text[:1].isalpha() or text[:1] == "_" else f"_{text}"


def renamed(nodes: tuple[OnnxNode, ...], names: Mapping[str, str], prefix: str) -> tuple[OnnxNode, ...]:
    """The nodes of a body in place of its call: its inputs and outputs by `names`, all else with `prefix`."""
    made = dict(names)
    for node in nodes:
        for name in node.outputs:
            if name:
                made.setdefault(name, prefix + name)
    return tuple(_renamed(node, made, prefix) for node in nodes)


def _renamed(node: OnnxNode, names: Mapping[str, str], prefix: str) -> OnnxNode:
    attributes = {key: _renamed_graph(value, names, prefix) if isinstance(value, OnnxGraph) else value
                  for key, value in node.attributes.items()}
    return OnnxNode(node.op, node.domain, node.version, tuple(names.get(name, name) for name in node.inputs),
                    tuple(names.get(name, name) for name in node.outputs), attributes, node.name, node.source)


def _renamed_graph(graph: OnnxGraph, names: Mapping[str, str], prefix: str) -> OnnxGraph:
    """A graph inside of a node: what it takes from outside, by its new names; its own names give way to those."""
    own = {value.name for value in graph.inputs} | set(graph.constants)
    own |= {name for node in graph.nodes for name in node.outputs if name}
    outer = {old: new for old, new in names.items() if old not in own}
    outer |= {name: prefix + name for name in own & set(outer.values())}

    def moved(values: tuple[OnnxValue, ...]) -> tuple[OnnxValue, ...]:
        return tuple(OnnxValue(outer.get(one.name, one.name), one.dtype, one.shape) for one in values)
    return OnnxGraph(graph.name, moved(graph.inputs), moved(graph.outputs),
                     {outer.get(name, name): array for name, array in graph.constants.items()},
                     tuple(_renamed(node, outer, prefix) for node in graph.nodes))


def captured(graph: OnnxGraph) -> tuple[str, ...]:
    """Names that a graph inside of a node takes from outside, in order."""
    own = {value.name for value in graph.inputs} | set(graph.constants)
    found: dict[str, None] = {}
    for node in graph.nodes:
        inner = [name for value in node.attributes.values() if isinstance(value, OnnxGraph) for name in captured(value)]
        for name in (*node.inputs, *inner):
            if name and name not in own:
                found[name] = None
        own |= set(node.outputs)
    for value in graph.outputs:
        if value.name not in own:
            found[value.name] = None
    return tuple(found)
