"""Node metadata: what the nodes of a traced graph say about values: types from fake tensors, source lines, refusals in
words."""
from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from anyshape.base.errors import Unsupported
from anyshape.frontend.symbols.symint import SymIntImporter
from anyshape.ir.graph import Graph
from anyshape.ir.types import SizeType, TensorType
from anyshape.sym.expr import Expr, Size, coefficient_of, dense_strides, symbols_of
from anyshape.torch_compat.dtypes import DTYPE_NAMES
from anyshape.torch_compat.user_lines import is_library

_FRAME = re.compile(r'File "([^"]*)", line (\d+), in [^\n]*\n\s*([^\n]*)')
SOURCE = "anyshape_source"  # what stands for a line where no line of the user's made a node


def where_of(node: Node, cache: dict[str, str]) -> str:
    """The innermost line of the user's program that the node comes from, as "file.py:12  code"."""
    trace = node.meta.get("stack_trace")
    if not trace:
        return str(node.meta.get(SOURCE, ""))
    known = cache.get(trace)
    if known is None:
        frames = _FRAME.findall(trace)
        own = [frame for frame in frames if not is_library(frame[0])] or frames
        known = ""
        if own:
            path, line, code = own[-1]
            known = f"{path.rsplit('/', 1)[-1]}:{line}  {code.strip()}"
        cache[trace] = known
    return known


class UnsupportedNode(Unsupported):
    """A node that the IR has no form for."""

    def __init__(self, node: Node, what: str, where: str, why: str = "the IR has no form for it") -> None:
        super().__init__(what, where=where, why=why, do="the program runs as PyTorch would")
        self.node = node


class NodeMetadata:
    """Reads types and source lines off the nodes of one graph."""

    def __init__(self, sizes: SymIntImporter) -> None:
        self.sizes = sizes
        self.lines: dict[str, str] = {}

    def where(self, node: Node) -> str:
        """The innermost line of the user's program that the node comes from, as "file.py:12  code"."""
        return where_of(node, self.lines)

    def tensor_type(self, value: torch.Tensor, node: Node) -> TensorType:
        """The type of a traced tensor, with its strides.

        Raises:
            Unsupported: a layout or dtype that the IR does not have.
        """
        if value.layout != torch.strided or value.dtype not in DTYPE_NAMES or value.is_quantized:
            raise self.unsupported(node, f"a tensor of dtype {value.dtype} and layout {value.layout}")
        shape = self.sizes.shape(value.shape)
        strides = self.strides(value, shape)
        return TensorType(DTYPE_NAMES[value.dtype], shape, strides, str(value.device))

    def strides(self, value: torch.Tensor, shape: tuple[Size, ...]) -> tuple[Size, ...] | None:
        """The traced strides, or None when they are the dense ones (dims of size 1 do not count)."""
        strides = self.sizes.strides(value.stride())
        dense = dense_strides(shape)
        if strides == dense or any(size == 0 for size in shape):
            return None
        same = all(a == b or size == 1 for a, b, size in zip(strides, dense, shape, strict=True))
        return None if same else strides

    def dense(self, value: torch.Tensor, node: Node) -> TensorType:
        """The dtype and shape of a traced tensor."""
        dtype = DTYPE_NAMES.get(value.dtype)
        if dtype is None or value.layout != torch.strided:
            raise self.unsupported(node, f"a tensor of dtype {value.dtype} and layout {value.layout}")
        return TensorType(dtype, self.sizes.shape(value.shape), None, str(value.device))

    def result_types(self, node: Node) -> Any:
        """The types of a node's results: one, a tuple (other Python values stay as they are), or None."""
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            return self.tensor_type(value, node)
        if isinstance(value, (tuple, list)):
            return self.tensor_types(value, node)
        if value is None:
            return None
        raise self.unsupported(node, f"a result of type {type(value).__name__}")

    def tensor_types(self, values: Sequence[Any], node: Node) -> tuple[Any, ...]:
        """The types of several results; other Python values stay as they are."""
        return tuple(self.tensor_type(v, node) if isinstance(v, torch.Tensor) else v for v in values)

    @contextlib.contextmanager
    def at(self, node: Node) -> Iterator[None]:
        """Inside, a refusal that does not know its node is one of `node`."""
        try:
            yield
        except UnsupportedNode:
            raise
        except Unsupported as error:
            raise UnsupportedNode(node, error.what, self.where(node), error.why) from error

    def unsupported(self, node: Node, what: str) -> UnsupportedNode:
        """The error for a node that the IR has no form for."""
        where = f"{node.format_node() or node.name}  {self.where(node)}".strip()
        return UnsupportedNode(node, f"AnyShape does not compile {what}", where)


def check_bound(graph: Graph) -> None:
    """Every symbol must be readable from an input: a number, or a dimension that is affine in it.

    Raises:
        Unsupported: a symbol that is used cannot be read.
    """
    bound = {value.name for value in graph.inputs if isinstance(value.type, SizeType)}
    open_dims = [size for value in graph.inputs if isinstance(value.type, TensorType) for size in value.type.shape]
    progress = True
    while progress:
        progress = False
        for size in open_dims:
            missing = symbols_of(size) - bound
            if len(missing) == 1:
                name = next(iter(missing))
                if coefficient_of(size, name) is not None:
                    bound.add(name)
                    progress = True
    free = _used_symbols(graph) - bound
    if free:
        raise Unsupported(f"the size {min(free)} cannot be read from an input of {graph.name}",
                          why="no input has it as a dimension or as a number", do="pass it as an argument")


def _used_symbols(graph: Graph) -> set[str]:
    found: set[str] = set()
    for value in graph.inputs:
        if isinstance(value.type, TensorType):
            for size in value.type.shape:
                found |= symbols_of(size)
    for node in graph.nodes:
        for value in node.outputs:
            for size in value.tensor.shape:
                found |= symbols_of(size)
        for operand in node.inputs:
            if isinstance(operand, Expr):
                found |= symbols_of(operand)
    for returned in (*graph.outputs, *graph.saved):
        if isinstance(returned, Expr):
            found |= symbols_of(returned)
    return found


def devices_of(gm: GraphModule) -> dict[str, Node]:
    """The devices of a graph's tensors, as PyTorch calls them, each with the first node that is there; in order. A
    number that a decomposition made a tensor of is where the tensors are that it meets."""
    found: dict[str, Node] = {}
    for node in gm.graph.nodes:
        if node.target is torch.ops.aten.scalar_tensor.default and all(user.op != "output" for user in node.users):
            continue
        for one in _tensors(node.meta.get("val")):
            found.setdefault(str(one.device), node)
    return found


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors(one)
