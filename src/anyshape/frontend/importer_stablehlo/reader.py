"""The reader of StableHLO: bytes or text of MLIR become plain data; the one place that imports MLIR's bindings.

Read are portable artefacts (vhlo bytecode), MLIR bytecode, and text. The bindings are those that jaxlib ships.
"""
from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np

from anyshape.base.errors import InputError, Unsupported
from anyshape.base.optional_packages import needed_by
from anyshape.frontend.importer_stablehlo.module import ELEMENTS, Block, Function, Module, Operation, Type
from anyshape.frontend.symbols.numpy_arrays import numpy_dtype

with needed_by("anyshape.compile_stablehlo"):
    from jaxlib.mlir import ir
    from jaxlib.mlir._mlir_libs import _jax_mlir_ext
    from jaxlib.mlir.dialects import chlo, sdy, stablehlo

MOST_BYTES = 1 << 32
MOST_OPERATIONS = 200_000
MOST_DEPTH = 32
RETURNS = ("func.return", "stablehlo.return", "chlo.return", "shape.assuming_yield")
# types of MLIR that are no tensors; a witness says that shapes may be broadcast
NO_TENSORS = {"!stablehlo.token": Type("token"), "!mhlo.token": Type("token"), "!shape.shape": Type("i64", (None,)),
              "!shape.size": Type("i64"), "!shape.witness": Type("bool")}


def read(source: Any) -> Module:
    """The module in bytes (a portable artefact or bytecode) or in text.

    Raises:
        InputError: it is none, or breaks a limit. Unsupported: a type is not known.
    """
    if isinstance(source, (bytearray, memoryview)):
        source = bytes(source)
    if not isinstance(source, (str, bytes)):
        raise InputError(f"anyshape.compile_stablehlo cannot read a {type(source).__name__}", do="pass one of those",
                         where="its first argument", why="it takes the bytes of a module, or its text")
    if len(source) > MOST_BYTES:
        raise _refused(f"it has more than {MOST_BYTES} bytes")
    context = _context()
    with context, ir.Location.unknown():
        module = _parsed(context, source)
        return _Reader().module(module)


def _refused(why: str, where: str = "", do: str = "check where it comes from, and export it again") -> InputError:
    return InputError("this is no StableHLO module that can be read", where=where or "anyshape.compile_stablehlo",
                      why=why, do=do)


def _context() -> Any:
    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    context = ir.Context()
    context.append_dialect_registry(registry)
    context.load_all_available_dialects()
    context.allow_unregistered_dialects = True  # TensorFlow leaves some operations of its own
    chlo.register_dialect(context)
    stablehlo.register_dialect(context)
    sdy.register_dialect(context)
    return context


def _parsed(context: Any, source: str | bytes) -> Any:
    if isinstance(source, bytes) and not source.startswith(b"ML\xefR"):
        try:
            source = source.decode()
        except UnicodeDecodeError as error:
            raise _refused("these bytes are neither MLIR's bytecode nor text") from error
    if isinstance(source, str) and _depth(source) > 16 * MOST_DEPTH:
        raise _refused("its brackets are nested too deeply")
    try:
        if isinstance(source, bytes) and b"StableHLO_v" in source[:64]:
            return stablehlo.deserialize_portable_artifact(context, source)
        return ir.Module.parse(source)
    except Exception as error:  # the bindings raise MLIRError, ValueError and others
        said = str(error).strip().splitlines() or [type(error).__name__]
        if isinstance(source, bytes) and len(said) > 1:
            # bytecode says what wrote it in the lines after; only portable artefacts are read by other versions
            raise _refused(f"{' '.join(map(str.strip, said))[:300]} (jaxlib {version('jaxlib')})",
                           do="export it as a portable artefact or as text, or use the jaxlib of its time") from error
        raise _refused(said[0][:300]) from error


def _depth(text: str) -> int:
    """How deep brackets are nested, counting every kind as one."""
    deepest = depth = 0
    for one in re.finditer(r"[][(){}]", text):
        depth += 1 if one.group() in "[({" else -1
        deepest = max(deepest, depth)
    return deepest


class _Reader:
    """Turns one module's operations into data. `names`: of values, as they are met."""

    def __init__(self) -> None:
        self.names: dict[Any, str] = {}
        self.count = 0

    def module(self, module: Any) -> Module:
        functions = {}
        for view in module.body.operations:
            operation = view.operation
            if operation.name == "sdy.mesh":  # shardings say nothing to one device
                continue
            if operation.name != "func.func":
                raise Unsupported(f"the module holds {operation.name}", where="its top level",
                                  why="only functions are read", do="export the function alone")
            name = ir.StringAttr(operation.attributes["sym_name"]).value
            if len(operation.regions[0].blocks) != 1:
                raise Unsupported(f"the function {name} has no body of one block", where=name,
                                  why="control flow is read as operations", do="export it with stablehlo's own")
            block = self.block(operation.regions[0].blocks[0], 0)
            functions[name] = Function(block, *_argument_names(operation, len(block.arguments)),
                                       _result_names(operation, len(block.results)))
        if "main" not in functions:
            if len(functions) != 1:
                raise _refused("it has no function called main")
            functions = {"main": next(iter(functions.values()))}
        return Module(functions)

    def block(self, block: Any, depth: int) -> Block:
        if depth > MOST_DEPTH:
            raise _refused(f"blocks lie {depth} deep in each other")
        arguments = tuple(self.name(one) for one in block.arguments)
        types = tuple(type_of(one.type) for one in block.arguments)
        operations: list[Operation] = []
        results: tuple[str, ...] = ()
        for view in block.operations:
            operation = view.operation
            if operation.name in RETURNS:
                results = tuple(self.name(one) for one in operation.operands)
                break
            operations.append(self.operation(operation, depth))
        return Block(arguments, types, tuple(operations), results)

    def operation(self, operation: Any, depth: int) -> Operation:
        self.count += 1
        if self.count > MOST_OPERATIONS:
            raise _refused(f"it has more than {MOST_OPERATIONS} operations")
        where = _where(operation)
        regions = []
        for region in operation.regions:
            if len(region.blocks) != 1:
                raise Unsupported(f"a region of {operation.name} has {len(region.blocks)} blocks", where=where,
                                  why="one is expected", do="export the module again")
            regions.append(self.block(region.blocks[0], depth + 1))
        return Operation(
            operation.name, tuple(self.name(one) for one in operation.operands),
            tuple(self.name(one) for one in operation.results),
            tuple(type_of(one.type) for one in operation.operands),
            tuple(type_of(one.type) for one in operation.results), _attributes(operation), tuple(regions), where)

    def name(self, value: Any) -> str:
        found = self.names.get(value)
        if found is None:
            found = self.names[value] = f"v{len(self.names)}"
        return found


def _where(operation: Any) -> str:
    """The user's line, of a location's text."""
    found = re.search(r'"([^"]+)":(\d+)', str(operation.location))
    return f"{found[1]}:{found[2]}" if found else ""


def _argument_names(operation: Any, count: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    names, labels = [""] * count, [""] * count
    if "arg_attrs" in operation.attributes:
        for place, one in enumerate(ir.ArrayAttr(operation.attributes["arg_attrs"])):
            found = ir.DictAttr(one)
            for key, into in (("jax.global_constant", names), ("jax.arg_info", labels)):
                if key in found:
                    into[place] = ir.StringAttr(found[key]).value
            labels[place] = labels[place] or _index_path(found)
    return tuple(names), tuple(labels)


def _result_names(operation: Any, count: int) -> tuple[str, ...]:
    names = [""] * count
    if "res_attrs" in operation.attributes:
        for place, one in enumerate(ir.ArrayAttr(operation.attributes["res_attrs"])):
            names[place] = _index_path(ir.DictAttr(one))
    return tuple(names)


def _index_path(found: Any) -> str:
    """The name that a signature of TensorFlow gives to an argument or a result."""
    if "tf_saved_model.index_path" not in found:
        return ""
    return ".".join(str(_data(one)) for one in ir.ArrayAttr(found["tf_saved_model.index_path"]))


def type_of(kind: Any) -> Type:
    """A type of MLIR.

    Raises:
        Unsupported: its elements are none that we have (quantised ones, 4-bit and 8-bit floats), or it has no rank.
    """
    text = str(kind)
    if text in NO_TENSORS or text in ELEMENTS:
        return NO_TENSORS[text] if text in NO_TENSORS else Type(ELEMENTS[text])
    try:
        tensor = ir.RankedTensorType(kind)
        dtype = ELEMENTS[str(tensor.element_type)]
    except (ValueError, KeyError) as error:
        if "string" in text:
            raise Unsupported("the module holds texts", where=f"anyshape.compile_stablehlo: {text}",
                              why="programs compute numbers", do="leave the part with texts outside") from error
        raise Unsupported(f"the type {text} is not carried", where="anyshape.compile_stablehlo",
                          why="elements are whole numbers of 8 to 64 bits, floats of 16 to 64, complex and bool",
                          do="export the module with those") from error
    return Type(dtype, tuple(None if tensor.is_dynamic_dim(d) else int(tensor.get_dim_size(d))
                             for d in range(tensor.rank)))


# ---- attributes


def _attributes(operation: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in operation.attributes:
        name = name if isinstance(name, str) else name.name
        try:
            found[name] = _data(operation.attributes[name])
        except TypeError:  # elements that the bindings cannot hand over
            found[name] = _elements(str(operation))
    return found


def _data(attribute: Any) -> Any:
    """An attribute as plain data; its text where it has no such form."""
    for kind, take in _FORMS:
        if isinstance(attribute, kind):
            return take(attribute)
    text = str(attribute)
    for prefix, form in _DIMENSIONS.items():
        if text.startswith(prefix):
            return form(attribute)
    enumeration = re.fullmatch(r"#(?:stablehlo|chlo)<\w+ ([\w ]+)>", text)
    return enumeration[1] if enumeration else text


def _dense(attribute: Any) -> np.ndarray:
    kind = type_of(attribute.type)
    if not len(attribute):  # of some dtypes numpy gets none of the right one
        return np.zeros(list(kind.static or ()), numpy_dtype(kind.dtype))
    try:
        return np.array(attribute).reshape(kind.static)
    except TypeError:
        return _elements(str(attribute))


def _numbers(kind: Any, *names: str) -> Callable[[Any], dict[str, Any]]:
    def take(attribute: Any) -> dict[str, Any]:
        found = {name: getattr(kind(attribute), name) for name in names}
        return {name: value if isinstance(value, int) else tuple(value) for name, value in found.items()}
    return take


_FORMS: list[tuple[Any, Callable[[Any], Any]]] = [
    (ir.BoolAttr, lambda a: bool(a.value)), (ir.IntegerAttr, lambda a: int(a.value)),
    (ir.FloatAttr, lambda a: float(a.value)), (ir.StringAttr, lambda a: a.value),
    (ir.FlatSymbolRefAttr, lambda a: a.value), (ir.DenseI64ArrayAttr, lambda a: tuple(int(x) for x in a)),
    (ir.DenseBoolArrayAttr, lambda a: tuple(bool(x) for x in a)),
    (ir.DenseElementsAttr, _dense), (ir.ArrayAttr, lambda a: tuple(_data(x) for x in a)),
    (ir.DictAttr, lambda a: {(x if isinstance(x, str) else x.name): _data(a[x if isinstance(x, str) else x.name])
                             for x in a}),
]

_DIMENSIONS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "#stablehlo.gather<": _numbers(
        stablehlo.GatherDimensionNumbers, "offset_dims", "collapsed_slice_dims", "operand_batching_dims",
        "start_indices_batching_dims", "start_index_map", "index_vector_dim"),
    "#stablehlo.scatter<": _numbers(
        stablehlo.ScatterDimensionNumbers, "update_window_dims", "inserted_window_dims", "input_batching_dims",
        "scatter_indices_batching_dims", "scattered_dims_to_operand_dims", "index_vector_dim"),
    "#stablehlo.dot<": _numbers(
        stablehlo.DotDimensionNumbers, "lhs_batching_dimensions", "rhs_batching_dimensions",
        "lhs_contracting_dimensions", "rhs_contracting_dimensions"),
    "#stablehlo.conv<": _numbers(
        stablehlo.ConvDimensionNumbers, "input_batch_dimension", "input_feature_dimension", "input_spatial_dimensions",
        "kernel_input_feature_dimension", "kernel_output_feature_dimension", "kernel_spatial_dimensions",
        "output_batch_dimension", "output_feature_dimension", "output_spatial_dimensions"),
}

def _elements(text: str) -> np.ndarray:
    """The array in the text of `dense<...> : tensor<...>`."""
    found = re.search(r"dense<(.*)>\s*:\s*tensor<([^:]*)>\s*$", text, re.S)
    if found is None:
        raise _refused("the elements of a constant cannot be read", text[:120])
    *dims, element = _tensor_parts(found[2])
    dtype = numpy_dtype(ELEMENTS[element])
    body = found[1].strip()
    if body.startswith('"0x'):
        raw = np.frombuffer(bytes.fromhex(body.strip('"')[2:]), dtype)
        return (np.full(dims, raw[0]) if raw.size == 1 else raw.reshape(dims)).copy()
    numbers = [_number(one, dtype) for one in re.findall(r"\([^()]*\)|[^][(),\s]+", body)]
    array = np.array(numbers).astype(dtype) if numbers else np.zeros(0, dtype)
    return np.full(dims, array[0]) if array.size == 1 else array.reshape(dims)


def _tensor_parts(text: str) -> list[Any]:
    parts = re.fullmatch(r"((?:\d+x)*)(.+)", text)
    assert parts is not None
    return [*(int(n) for n in parts[1].split("x") if n), parts[2]]


def _number(text: str, dtype: Any) -> Any:
    if text.startswith("("):
        real, imaginary = (_number(one.strip(), np.dtype(dtype.type(0).real.dtype)) for one in text[1:-1].split(","))
        return complex(real, imaginary)
    if text.startswith("0x"):
        bits = int(text, 16).to_bytes(dtype.itemsize, "little")
        return np.frombuffer(bits, dtype)[0]
    return {"true": True, "false": False}[text] if text in ("true", "false") else float(text)
