"""The reader of ONNX's protobuf: bytes of strangers become plain data, or are refused; the one place that imports onnx.

Limits: bytes, nodes, nesting, rank, and that every tensor has as many bytes as its dims say. Tensors in files beside
the model are read by plain relative names only: no absolute ones, no "..", no links (CVE-2022-25882, CVE-2024-27318).
"""
from __future__ import annotations

import functools
import heapq
import math
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anyshape.base.errors import InputError, Unsupported
from anyshape.base.optional_packages import needed_by
from anyshape.frontend.importer_onnx.model import (
    ELEMENT_OF,
    ELEMENTS,
    MICROSOFT,
    OnnxFunction,
    OnnxGraph,
    OnnxNode,
    OnnxValue,
    captured,
)
from anyshape.frontend.symbols.numpy_arrays import numpy_dtype

with needed_by("anyshape.compile_onnx"):
    import onnx
    from onnx import numpy_helper

MOST_BYTES = 1 << 36
MOST_NODES = 200_000
MOST_DEPTH = 32
MOST_RANK = 16
OLDEST, NEWEST = 1, 28  # operator sets
BLOCKED = "com.microsoft.nchwc"  # onnxruntime's operators with channels in blocks of a vector
# onnxruntime's operators that are ONNX's own of a set, for dtypes and sets that lack them
OF_ONNX = {"QuantizeLinear": 21, "DequantizeLinear": 21, "Trilu": 21, "GatherND": 21, "Pad": 11, "GridSample": 16}


def _refuse(what: str, why: str, do: str = "check where the file comes from, and export it again",
            where: str = "") -> InputError:
    return InputError(what, where=where or "the ONNX model", why=why, do=do)


class Reader:
    """A model that was read, and the bodies of its composed operators.

    Args:
        source: a path, bytes, or an onnx.ModelProto.

    Raises:
        InputError: it is no model, or breaks a limit. Unsupported: its operator set is not known.
    """

    def __init__(self, source: Any) -> None:
        self.folder: Path | None = None
        self.count = 0
        proto = self._proto(source)
        self.opsets: dict[str, int] = {_domain(one.domain): int(one.version) for one in proto.opset_import}
        version = self.opsets.setdefault("", 13)
        if not OLDEST <= version <= NEWEST:
            raise Unsupported(f"the model has operator set {version}", where="the ONNX model",
                              why=f"sets {OLDEST} to {NEWEST} are known", do="export it with another opset_version")
        self.functions = {(_domain(one.domain), one.name, one.overload): one for one in proto.functions}
        self.graph = self._graph(proto.graph, 0, {})

    def _proto(self, source: Any) -> Any:
        if isinstance(source, onnx.ModelProto):
            return source
        where = ""
        if isinstance(source, (str, os.PathLike)):
            path = Path(source)
            where = str(path)
            self.folder = path.parent
            try:
                if path.stat().st_size > MOST_BYTES:
                    raise _refuse(f"{path} is too large", f"it has more than {MOST_BYTES} bytes", where=where)
                source = path.read_bytes()
            except OSError as error:
                raise _refuse(f"{path} cannot be read", str(error.strerror or error), "give the path of a model",
                              where) from error
        if not isinstance(source, (bytes, bytearray, memoryview)):
            raise InputError(f"anyshape.compile_onnx cannot read a {type(source).__name__}", where="its first argument",
                             why="it takes a path, bytes or an onnx.ModelProto", do="pass one of those")
        if bytes(source[4:8]) == b"ORTM":  # the identifier of a flatbuffer
            raise _refuse("these bytes are a model in onnxruntime's own format (.ort)", "only ONNX's protobuf is read",
                          "compile the .onnx file that it was made of", where)
        proto = onnx.ModelProto()
        try:
            proto.ParseFromString(bytes(source))
        except Exception as error:  # protobuf's own type of error is private
            raise _refuse("these bytes are no ONNX model", f"the protobuf cannot be parsed: {error}",
                          where=where) from error
        if not proto.HasField("graph"):
            raise _refuse("these bytes are no ONNX model", "there is no graph in them", where=where)
        return proto

    # ---- graphs

    def _graph(self, proto: Any, depth: int, outer: Mapping[str, Any]) -> OnnxGraph:
        if depth > MOST_DEPTH:
            raise _refuse("the model is nested too deeply", f"graphs lie {depth} deep in each other")
        if proto.sparse_initializer:
            raise Unsupported("the model has sparse constants", where=proto.name, why="only dense ones are read",
                              do="export it with dense weights")
        constants: dict[str, np.ndarray] = {}
        for one in proto.initializer:
            if one.name in constants:
                raise _refuse(f"the constant {one.name!r} is there twice", "names are given once")
            constants[one.name] = self._array(one)
        given = tuple(self._value(one) for one in proto.input)
        inputs, defaults = (tuple(one for one in given if (one.name in constants) == held) for held in (False, True))
        outputs = tuple(self._value(one) for one in proto.output)
        nodes = tuple(self._node(one, depth, outer) for one in proto.node)
        made: set[str] = {one.name for one in inputs} | set(constants)
        for node in nodes:
            for name in node.outputs:
                if name and name in made:
                    raise _refuse(f"the value {name!r} is made twice", "each name is given once", where=str(node))
                made.add(name)
        return OnnxGraph(proto.name, inputs, outputs, constants, _in_order(nodes), defaults)

    def _value(self, proto: Any) -> OnnxValue:
        if not proto.type.HasField("tensor_type"):
            return OnnxValue(proto.name)
        kind = proto.type.tensor_type
        dtype = ELEMENTS.get(kind.elem_type, "")
        if not kind.HasField("shape"):
            return OnnxValue(proto.name, dtype)
        if len(kind.shape.dim) > MOST_RANK:
            raise _refuse(f"{proto.name!r} has {len(kind.shape.dim)} dims", f"at most {MOST_RANK} are taken")
        shape: list[int | str | None] = []
        for dim in kind.shape.dim:
            if dim.HasField("dim_value") and dim.dim_value != -1:  # as some exporters write what may be any size
                if not 0 <= dim.dim_value < 1 << 62:
                    raise _refuse(f"{proto.name!r} has the size {dim.dim_value}", "sizes are at least 0, below 2^62")
                shape.append(int(dim.dim_value))
            else:
                shape.append(None if dim.dim_param in ("", "?") else dim.dim_param)
        return OnnxValue(proto.name, dtype, tuple(shape))

    def _node(self, proto: Any, depth: int, outer: Mapping[str, Any],
              opsets: Mapping[str, int] | None = None) -> OnnxNode:
        self.count += 1
        if self.count > MOST_NODES:
            raise _refuse("the model has too many nodes", f"at most {MOST_NODES} are taken")
        domain = _domain(proto.domain)
        if domain == BLOCKED:
            raise Unsupported(
                f"the operator {domain}:{proto.op_type} is of a file for one kind of processor", where="the ONNX model",
                why="onnxruntime wrote it with all optimisations: channels lie in blocks, whose size the file does not "
                "say", do="compile the model it was made of, or have it written at the level ORT_ENABLE_EXTENDED")
        attributes: dict[str, Any] = {}
        for one in proto.attribute:
            if one.ref_attr_name:
                if one.ref_attr_name in outer:
                    attributes[one.name] = outer[one.ref_attr_name]
            else:
                attributes[one.name] = self._attribute(one, depth, outer)
        if any(one.ref_attr_name for one in proto.attribute):
            proto = _resolved(proto, outer)
        version = (self.opsets if opsets is None else opsets).get(domain, 1)
        _check_arity(proto, domain, version)
        if domain == MICROSOFT and proto.op_type in OF_ONNX:
            domain, version = "", OF_ONNX[proto.op_type]
        return OnnxNode(proto.op_type, domain, version, tuple(proto.input), tuple(proto.output), attributes, proto.name,
                        proto)

    def _attribute(self, one: Any, depth: int, outer: Mapping[str, Any]) -> Any:
        kinds = onnx.AttributeProto
        if one.type == kinds.GRAPH:
            return self._graph(one.g, depth + 1, outer)
        if one.type == kinds.TENSOR:
            return self._array(one.t)
        if one.type == kinds.STRING:
            return one.s.decode("utf-8", "surrogateescape")
        if one.type == kinds.STRINGS:
            return tuple(text.decode("utf-8", "surrogateescape") for text in one.strings)
        if one.type in (kinds.INT, kinds.FLOAT):
            return int(one.i) if one.type == kinds.INT else float(one.f)
        if one.type in (kinds.INTS, kinds.FLOATS):
            return tuple(one.ints if one.type == kinds.INTS else one.floats)
        if one.type == kinds.TYPE_PROTO:
            return self._value(onnx.ValueInfoProto(type=one.tp))
        raise Unsupported(f"the attribute {one.name!r} has a kind that is not read", where="the ONNX model",
                          why=f"kind {one.type}", do="export the model in another way")

    # ---- tensors

    def _array(self, proto: Any) -> np.ndarray:
        """The tensor; one of f32 or the like in a file of its own is mapped.

        Raises:
            InputError: its bytes are not as many as its dims say, or its file is not to be read.
        """
        dims = [int(dim) for dim in proto.dims]
        if len(dims) > MOST_RANK or any(dim < 0 for dim in dims) or math.prod(dims) >= 1 << 62:
            raise _refuse(f"the constant {proto.name!r} has the dims {dims[:MOST_RANK]}", "no tensor has such dims")
        dtype = ELEMENTS.get(proto.data_type)
        if dtype is None:
            raise _refuse(f"the constant {proto.name!r} has element type {proto.data_type}", "there is no such type")
        if proto.data_location == onnx.TensorProto.EXTERNAL:
            return self._external(proto, dims, dtype)
        count = math.prod(dims)
        if not proto.raw_data and count > 64 + 8 * proto.ByteSize():
            raise _refuse(f"the constant {proto.name!r} has too few elements", f"its dims say {count}")
        try:
            return np.asarray(numpy_helper.to_array(proto))
        except Exception as error:  # numpy and onnx raise several kinds
            raise _refuse(f"the constant {proto.name!r} cannot be read", str(error)) from error

    def _external(self, proto: Any, dims: list[int], dtype: str) -> np.ndarray:
        given = {one.key: one.value for one in proto.external_data}
        where = f"the constant {proto.name!r}"
        if self.folder is None:
            raise InputError(f"{where} lies in a file beside the model", where="anyshape.compile_onnx",
                             why="bytes have no folder", do="pass the model's path")
        path = self._safe(given.get("location", ""), where)
        kind = numpy_dtype(dtype)
        try:
            offset = int(given.get("offset", "0") or 0)
            length = int(given["length"]) if given.get("length") else None
        except ValueError as error:
            raise _refuse(f"{where} has no readable offset or length", str(error)) from error
        need = math.prod(dims) * kind.itemsize
        size = path.stat().st_size
        if dtype == "string" or offset < 0 or (length is not None and length != need) or offset + need > size:
            raise _refuse(f"{where} does not fit its file",
                          f"{need} bytes at {offset}, of which the file has {size} in all, and the model says {length}")
        if not need:
            return np.zeros(dims, kind)
        return np.memmap(path, kind, "c", offset, tuple(dims)) if dims else np.fromfile(
            path, kind, 1, offset=offset).reshape(())

    def _safe(self, location: str, where: str) -> Path:
        """The file of that name in the model's folder."""
        assert self.folder is not None
        parts = location.replace("\\", "/").split("/")
        if not location or any(part in ("", "..") or ":" in part or "\0" in part for part in parts):
            raise _refuse(f"{where} names the file {location!r}",
                          "only plain names below the model's folder are read", "export the model again")
        path = self.folder
        for part in parts:
            path = path / part
            try:
                mode = os.lstat(path).st_mode
            except OSError as error:
                raise _refuse(f"{where} names the file {location!r}", str(error),
                              "put the file beside the model") from error
            if stat.S_ISLNK(mode):
                raise _refuse(f"{where} names the file {location!r}", f"{path} is a link",
                              "put the file itself beside the model")
        if not stat.S_ISREG(mode):
            raise _refuse(f"{where} names the file {location!r}", "it is no regular file")
        return path

    # ---- bodies of composed operators

    def body(self, node: OnnxNode, types: Sequence[OnnxValue]) -> OnnxFunction | None:
        """The body of a composed operator, by the model's functions or by ONNX's own; None where it has none.

        Args:
            types: of its inputs, some bodies depend on them.
        """
        own = self.functions.get((node.domain, node.op, node.source.overload if node.source is not None else ""))
        if own is not None:
            return self._function(own, node)
        try:
            schema: Any = onnx.defs.get_schema(node.op, node.version, node.domain)
        except onnx.defs.SchemaError:
            return None
        kinds = [_type(one).SerializeToString() for one in types]
        if schema.has_context_dependent_function:
            if node.source is None:
                return None
            source = node.source.SerializeToString()
            versions = [one for one in schema.context_dependent_function_opset_versions if one <= node.version]
            found = b""
            for version in (*sorted(versions, reverse=True), None):
                try:
                    found = (schema.get_context_dependent_function(source, kinds) if version is None else
                             schema.get_context_dependent_function_with_opset_version(version, source, kinds))
                except Exception:  # it has no body for these types
                    found = b""
                if found:
                    break
            proto = onnx.FunctionProto.FromString(found) if found else None
        else:
            proto = schema.function_body if schema.has_function else None
        if proto is None or not len(proto.node):
            return None
        defaults = {name: onnx.helper.get_attribute_value(one.default_value)
                    for name, one in schema.attributes.items() if one.default_value.type}
        return self._function(proto, node, {key: value.decode() if isinstance(value, bytes) else value
                                            for key, value in defaults.items()})

    def _function(self, proto: Any, node: OnnxNode, defaults: Mapping[str, Any] | None = None) -> OnnxFunction:
        opsets = {**self.opsets, **{_domain(one.domain): int(one.version) for one in proto.opset_import}}
        given = {one.name: self._attribute(one, 0, {}) for one in proto.attribute_proto}
        given.update(defaults or {})
        given.update(node.attributes)
        nodes = tuple(self._node(one, 0, given, opsets) for one in proto.node)
        return OnnxFunction(tuple(proto.input), tuple(proto.output), nodes)


@functools.cache
def _arity(op: str, domain: str, version: int) -> tuple[int, int, int] | None:
    """The least and the largest number of operands, and the largest of results; None of an unknown operator."""
    try:
        schema = onnx.defs.get_schema(op, version, domain)
    except onnx.defs.SchemaError:
        return None
    return schema.min_input, schema.max_input, schema.max_output


def _check_arity(proto: Any, domain: str, version: int) -> None:
    found = _arity(proto.op_type, domain, version)
    if found is not None and not (found[0] <= len(proto.input) <= found[1] and len(proto.output) <= found[2]):
        raise _refuse(f"the node {proto.op_type} {proto.name or ', '.join(proto.output)} is not well formed",
                      f"it has {len(proto.input)} operands and {len(proto.output)} results; the operator takes "
                      f"{found[0]} to {found[1]}, and gives at most {found[2]}")


def _in_order(nodes: tuple[OnnxNode, ...]) -> tuple[OnnxNode, ...]:
    """The nodes in an order in which they can run, that of the file where it is one; some tools append what belongs in
    front. Nodes of a cycle come last, as they stand."""
    makers = {name: place for place, node in enumerate(nodes) for name in node.outputs if name}
    waits: list[set[int]] = []
    for node in nodes:
        inner = [name for value in node.attributes.values() if isinstance(value, OnnxGraph) for name in captured(value)]
        waits.append({makers[name] for name in (*node.inputs, *inner) if name in makers})
    if all(place > max(before, default=-1) for place, before in enumerate(waits)):
        return nodes
    readers: dict[int, list[int]] = {}
    for place, before in enumerate(waits):
        for one in before:
            readers.setdefault(one, []).append(place)
    ready = [place for place, before in enumerate(waits) if not before]
    order: list[int] = []
    while ready:
        place = heapq.heappop(ready)
        order.append(place)
        for reader in readers.get(place, ()):
            waits[reader].discard(place)
            if not waits[reader]:
                heapq.heappush(ready, reader)
    left = set(range(len(nodes))) - set(order)
    return tuple(nodes[place] for place in (*order, *sorted(left)))


def _resolved(proto: Any, outer: Mapping[str, Any]) -> Any:
    """A node of a function's body with the attributes of its call."""
    node = onnx.NodeProto()
    node.CopyFrom(proto)
    kept = []
    for one in proto.attribute:
        if not one.ref_attr_name:
            kept.append(one)
        elif one.ref_attr_name in outer:
            value = outer[one.ref_attr_name]
            if not isinstance(value, (np.ndarray, OnnxGraph, OnnxValue)) and value != ():
                kept.append(onnx.helper.make_attribute(one.name, value))
    del node.attribute[:]
    node.attribute.extend(kept)
    return node


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name


def _type(value: OnnxValue) -> Any:
    if not value.dtype:
        return onnx.TypeProto()
    return onnx.helper.make_tensor_type_proto(ELEMENT_OF[value.dtype], value.shape)
