"""The reference interpreter: runs a graph node by node in torch. Slow, plain, and the oracle of every test.

Values are logically dense here too, whatever strides torch's views have; only outputs get the strides they are
declared with. bf16 and f16 arithmetic is done in f32 and rounded once per node, which is what PyTorch's kernels do.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

import anyshape.ops.table  # noqa: F401  fills the table of ops
from anyshape.base.errors import AnyShapeError, DivisionError, InputError, VerifyError
from anyshape.ir.graph import Graph, Node, Operand, Value
from anyshape.ir.op import OPS, row
from anyshape.ir.panels import from_panels
from anyshape.ir.scalar import SCALAR
from anyshape.ir.types import SizeType, TensorType
from anyshape.ops.pointwise import OPERANDS, POINTWISE, applied
from anyshape.ops.routing import ROUTING
from anyshape.runtime.numpy_ops.convolution import byte_conv
from anyshape.runtime.torch_ops.convolution import convolve
from anyshape.runtime.torch_ops.extern_calls import call_extern, results_of
from anyshape.runtime.torch_ops.fallbacks import (
    by_torch,
    byte_recurrence_by_torch,
    direct_conv_by_torch,
    grouped_by_torch,
    grouped_conv_by_torch,
    recurrence_by_torch,
    routing_by_torch,
)
from anyshape.sym.expr import Expr, Size, evaluate, symbols_of
from anyshape.torch_compat.dtypes import DTYPE_NAMES, HALVES, TORCH_DTYPES
from anyshape.torch_compat.versions import api

Attributes = dict[str, Any]


# ---- the random numbers of the op `random`

GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # as i64


def _mix(z: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 on i64, whose products are modulo 2**64; the mask makes the shift a logical one."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64)):
        z = (z ^ ((z >> shift) & (2 ** (64 - shift) - 1))) * factor
    return z ^ ((z >> 31) & (2**33 - 1))


def uniform(seed: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    """Uniform [0, 1) in f32, one number per counter; seed and counter are i64.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014): element `counter` of the
    SplitMix64 stream whose state starts at mix(seed), its top 24 bits over 2**24. Every backend computes these bits.
    """
    result = _mix(_mix(seed) + (counter + 1) * GOLDEN)
    return ((result >> 40) & 0xFFFFFF).to(torch.float32) * 2.0**-24


# ---- one line per op; operands are tensors or numbers, attributes have their sizes evaluated


def _wrapped(index: torch.Tensor, size: int) -> torch.Tensor:
    """Negative indices count from the end; IndexError when one is out of range."""
    if index.numel() and (int(index.min()) < -size or int(index.max()) >= size):
        raise IndexError(f"index out of range in a dim of size {size}")
    return torch.where(index < 0, index + size, index)


def _inside(index: torch.Tensor, size: int) -> torch.Tensor:
    """The indices; IndexError when one is not in [0, size)."""
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= size):
        raise IndexError(f"index out of range in a dim of size {size}")
    return index


def _take(a: Attributes, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x[(slice(None),) * a["dim"] + (_inside(index, x.shape[a["dim"]]),)]


def _index(a: Attributes, x: torch.Tensor, *indices: torch.Tensor) -> torch.Tensor:
    wrapped = tuple(_wrapped(i, x.shape[d]) for i, d in zip(indices, a["dims"], strict=True))
    return x[(slice(None),) * a["dims"][0] + wrapped]


PUTS = {"put": "", "put_add": "add", "put_mul": "prod", "put_amax": "amax", "put_amin": "amin"}


def _put(a: Attributes, x: torch.Tensor, y: torch.Tensor, *indices: torch.Tensor, how: str = "") -> torch.Tensor:
    """Elements whose place is outside go nowhere. how: "", add, or as scatter_reduce has it."""
    first, count = a["dims"][0], len(a["dims"])
    block = y.dim() - (x.dim() - count)
    shape = y.shape[first:first + block]
    places = [i.expand(shape).reshape(-1) for i in indices]
    rows = y.movedim(tuple(range(first, first + block)), tuple(range(block))).flatten(0, block - 1) if block \
        else y.unsqueeze(0)
    inside = torch.ones_like(places[0], dtype=torch.bool)
    for place, d in zip(places, a["dims"], strict=True):
        inside &= (place >= 0) & (place < x.shape[d])
    result = x.clone(memory_format=torch.contiguous_format)
    turned = result.movedim(a["dims"], tuple(range(count)))
    if how == "add":
        turned.index_put_([place[inside] for place in places], rows[inside], accumulate=True)
        return result
    # one dim in place of those that are indexed
    sizes = turned.shape[:count]
    line = torch.zeros_like(places[0][inside])
    for place, n in zip(places, sizes, strict=True):
        line = line * n + place[inside]
    if how == "":  # the last row for a place stays, which PyTorch leaves to chance on several threads
        order = torch.arange(line.numel())
        last = order.new_zeros(_count(sizes)).scatter_reduce(0, line, order, "amax")[line] == order
        turned.index_put_([place[inside][last] for place in places], rows[inside][last])
        return result
    flat = turned.reshape(_count(sizes), -1).to(torch.uint8 if x.dtype == torch.bool else x.dtype)
    rows = rows[inside].reshape(line.numel(), flat.shape[1]).to(flat.dtype)
    turned.copy_(flat.scatter_reduce(0, line[:, None].expand(rows.shape), rows, how).reshape(turned.shape))
    return result


def _scatter(a: Attributes, x: torch.Tensor, y: torch.Tensor, index: torch.Tensor, how: str = "") -> torch.Tensor:
    """Elements whose place is outside go nowhere."""
    dims = tuple(range(x.dim()))
    if not y.numel():
        return x.clone()
    places = [index if d == a["dim"] else torch.arange(y.shape[d]).reshape([-1 if e == d else 1 for e in dims])
              for d in dims]
    # along `dim` last: where elements meet, the later one counts
    order = (*(d for d in dims if d != a["dim"]), a["dim"])
    return _put({"dims": dims}, x, y.permute(order), *(p.expand(y.shape).permute(order) for p in places), how=how)


def _overwrite(a: Attributes, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    result = x.clone(memory_format=torch.contiguous_format)
    if y.shape[a["dim"]]:
        _slice({**a, "count": y.shape[a["dim"]]}, result).copy_(y)
    return result


def _slice(a: Attributes, x: torch.Tensor) -> torch.Tensor:
    if a["count"] == 0:
        return x.narrow(a["dim"], 0, 0)
    end = a["start"] + (a["count"] - 1) * a["step"] + 1
    return x[(slice(None),) * a["dim"] + (slice(a["start"], end, a["step"]),)]


def _linear_scan(a: Attributes, factors: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
    lines = list(terms.unbind(a["dim"]))
    for place, factor in enumerate(factors.unbind(a["dim"])):
        if place:
            lines[place] = factor * lines[place - 1] + lines[place]
    return torch.stack(lines, a["dim"]) if lines else terms.clone()


def _pad(a: Attributes, x: torch.Tensor) -> torch.Tensor:
    result = x.new_full([s + b + e for s, b, e in zip(x.shape, a["low"], a["high"], strict=True)], a["value"])
    source, target = x, result
    for d, (low, high) in enumerate(zip(a["low"], a["high"], strict=True)):
        begin, end = max(0, -low), x.shape[d] - max(0, -high)
        if end <= begin:
            return result
        source = source.narrow(d, begin, end - begin)
        target = target.narrow(d, max(0, low), end - begin)
    target.copy_(source)
    return result


def _iota(a: Attributes) -> torch.Tensor:
    dtype = TORCH_DTYPES[a["dtype"]]
    place = torch.arange(a["count"], device=a.get("device", "cpu"))
    if isinstance(a["start"], float) or isinstance(a["step"], float):
        place = place.to(torch.float64)
    elements: torch.Tensor = place * a["step"] + a["start"]
    return elements.to(dtype)


def _random(a: Attributes, seed: torch.Tensor) -> torch.Tensor:
    counter = torch.arange(_count(a["shape"]), device=seed.device)
    return uniform(seed, counter).reshape(a["shape"])


def _count(shape: Sequence[int]) -> int:
    total = 1
    for item in shape:
        total *= item
    return total


def _sum(a: Attributes, x: torch.Tensor) -> torch.Tensor:
    # PyTorch too accumulates half precision in f32
    return torch.sum(x, a["dims"], a["keep"], dtype=x.dtype)


def _prod(a: Attributes, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = x.float() if x.dtype in HALVES else x
    for d in reversed(a["dims"]):
        result = result.prod(d, a["keep"], dtype=result.dtype)
    return result.to(x.dtype)


def _matmul(a: Attributes, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    rounded = TORCH_DTYPES[a["rounded"]] if "rounded" in a else x.dtype
    y = from_panels(y, x.shape[-1], a["columns"]) if "columns" in a else y
    result = torch.matmul(x.to(rounded), y.to(rounded))
    return result.to(TORCH_DTYPES[a["dtype"]]) if "dtype" in a else result


def _matmul_add(a: Attributes, x: torch.Tensor, y: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    rounded = TORCH_DTYPES[a["rounded"]] if "rounded" in a else x.dtype
    working = torch.float32 if rounded in HALVES else rounded
    y = from_panels(y, x.shape[-1], a["columns"]) if "columns" in a else y
    result = torch.matmul(x.to(rounded).to(working), y.to(rounded).to(working)) * a["alpha"]
    result = (result + c.to(working) * a["beta"] if a["beta"] else result).to(rounded)
    return result.to(TORCH_DTYPES[a["dtype"]]) if "dtype" in a else result


def _divisor(y: torch.Tensor, count: int) -> torch.Tensor:
    if count and not y.all():
        raise DivisionError("a whole number is divided by 0")
    return y


# ---- scalar instructions on whole tensors


# those that torch has no function of one name for
_SCALAR: dict[str, Callable[..., torch.Tensor]] = {
    "trunc_div": lambda x, y: torch.div(x, y, rounding_mode="trunc"), "random": uniform}


def torch_function(name: str) -> Callable[..., torch.Tensor]:
    """The function of torch of a dotted name."""
    found: Callable[..., torch.Tensor] = functools.reduce(getattr, name.split("."), torch)  # type: ignore[arg-type]
    return found


def scalar_function(op: str) -> Callable[..., torch.Tensor]:
    """The meaning of a scalar instruction, on tensors; a cast has a dtype beside its operand, and is not here."""
    return _SCALAR[op] if op in _SCALAR else torch_function(SCALAR[op].meaning)


class ElementwiseBody:
    """What bodies of pointwise rows ask for (`Body`), with a tensor of all elements as a register."""

    def apply(self, op: str, *args: torch.Tensor, dtype: str) -> torch.Tensor:
        """See Body.apply."""
        if op == "cast":
            return args[0].to(TORCH_DTYPES[dtype])
        return scalar_function(op)(*args)

    def constant(self, value: float | int | bool, dtype: str) -> torch.Tensor:
        """See Body.constant."""
        return torch.tensor(value, dtype=TORCH_DTYPES[dtype])


def _meaning(op: str) -> Callable[..., torch.Tensor]:
    """A pointwise row as a function of tensors: torch's, or what its body says."""
    if OPS[op].torch:
        return torch_function(OPS[op].torch)
    pattern = POINTWISE[op].pattern

    def function(*operands: torch.Tensor) -> torch.Tensor:
        named = {name: (x, DTYPE_NAMES[x.dtype]) for name, x in zip(OPERANDS, operands)}
        result: torch.Tensor = applied(pattern, ElementwiseBody(), named, DTYPE_NAMES[operands[0].dtype])[0]
        return result

    return function


OWN: dict[str, Callable[..., Any]] = {
    "divisor": lambda a, y: _divisor(y, a["count"]),
    "cast": lambda a, x: x.to(TORCH_DTYPES[a["dtype"]]),
    "store": lambda a, x: x.to(TORCH_DTYPES[a["dtype"]]),
    "full": lambda a, value: torch.full(a["shape"], value, dtype=TORCH_DTYPES[a["dtype"]],
                                        device=a.get("device", "cpu")),
    "iota": _iota,
    "random": _random,
    "reshape": lambda a, x: x.reshape(a["shape"]),
    "permute": lambda a, x: x.permute(a["dims"]),
    "broadcast": lambda a, x: x.expand(a["shape"]),
    "slice": _slice,
    "flip": lambda a, x: x.flip(a["dims"]),
    "repeat": lambda a, x: x.repeat_interleave(a["times"], a["dim"]),
    "concat": lambda a, *parts: torch.cat(parts, a["dim"]),
    "pad": _pad,
    "take": _take,
    "gather": lambda a, x, index: x.gather(a["dim"], _inside(index, x.shape[a["dim"]])),
    "index": _index,
    "cumsum": lambda a, x: x.cumsum(a["dim"], dtype=x.dtype),
    "cumprod": lambda a, x: x.cumprod(a["dim"], dtype=x.dtype),
    "linear_scan": _linear_scan,
    "sum": _sum,
    "prod": _prod,
    "amax": lambda a, x: x.amax(a["dims"], a["keep"]),
    "amin": lambda a, x: x.amin(a["dims"], a["keep"]),
    "any": lambda a, x: x.any(a["dims"], a["keep"]),
    "all": lambda a, x: x.all(a["dims"], a["keep"]),
    "checked": lambda a, i: (_wrapped if a["wrap"] else _inside)(i, a["size"]),
    "overwrite": _overwrite,
    **{name: functools.partial(_put, how=how) for name, how in PUTS.items()},
    **{name.replace("put", "scatter"): functools.partial(_scatter, how=how) for name, how in PUTS.items()},
    "matmul": _matmul,
    "matmul_bytes": lambda a, x, y: torch.matmul(x.to(torch.float64), (
        from_panels(y, x.shape[-1], a["columns"]) if "columns" in a else y).to(torch.float64)).long().int(),
    "convolution": lambda a, x, w, b=None: convolve(x, w, b, a["stride"], a["padding"], a["dilation"], a["groups"]),
    "matmul_add": _matmul_add,
    "grouped_conv": lambda a, *x: grouped_conv_by_torch(a, x),
    "direct_conv": lambda a, *x: direct_conv_by_torch(a, x),
    "grouped": lambda a, *x: grouped_by_torch("grouped", a, x),
    "grouped_inner": lambda a, *x: grouped_by_torch("grouped_inner", a, x),
    "attention": lambda a, *x: by_torch("attention", a, x),
    "attention_backward": lambda a, *x: by_torch("attention_backward", a, x),
    "conv_bytes": lambda a, x, w: torch.from_numpy(byte_conv(a, x.cpu().numpy(), w.cpu().numpy())).to(x.device),
    "recurrence": lambda a, *x: recurrence_by_torch(a, x),
    "recurrence_bytes": lambda a, *x: byte_recurrence_by_torch(a, x),
    **{name: functools.partial(routing_by_torch, name) for name in ROUTING},
}


def _as_tensor(number: bool | int | float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A literal of a pointwise op: rank 0."""
    return torch.full((), number, dtype=dtype, device=device)


def _pointwise(node: Node, function: Callable[..., torch.Tensor], operands: list[Any]) -> torch.Tensor:
    """Literals take the tensors' dtype; half precision is computed in f32 and rounded once."""
    choices = operands[1:] if node.op == "where" else operands
    first = next(item for item in choices if isinstance(item, torch.Tensor))
    half = first.dtype in HALVES
    working = torch.float32 if half else first.dtype
    ready: list[torch.Tensor] = []
    for position, item in enumerate(operands):
        if isinstance(item, torch.Tensor):
            ready.append(item.float() if item.dtype in HALVES else item)
        elif node.op == "where" and position == 0:
            ready.append(_as_tensor(item, torch.bool, first.device))
        elif node.output.tensor.dtype == "bool":
            ready.append(_as_tensor(item, first.dtype, first.device).to(working))
        else:
            ready.append(_as_tensor(item, working, first.device))
    result = function(*ready)
    return result.to(first.dtype) if half and result.dtype == working else result


# ---- the graph


class Interpreter:
    """One run of a graph: the values by name and the numbers that the symbols stand for."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.values: dict[str, Any] = {}
        self.symbols: dict[str, int] = {}

    def size(self, size: Size) -> int:
        """The number; VerifyError when a symbol has none."""
        try:
            return evaluate(size, self.symbols)
        except KeyError as error:
            raise VerifyError(f"the size {size} of {self.graph.name} is unknown",
                              why=f"no input or extern result before binds the symbol {error}") from error

    def attribute(self, value: Any) -> Any:
        """An attribute with its sizes evaluated."""
        if isinstance(value, Expr):
            return self.size(value)
        return tuple(self.attribute(item) for item in value) if isinstance(value, tuple) else value

    def operand(self, operand: Operand | None) -> Any:
        """A tensor or a number."""
        if isinstance(operand, Value):
            return self.values[operand.name]
        return self.size(operand) if isinstance(operand, Expr) else operand

    def learn(self, kind: TensorType, tensor: torch.Tensor) -> None:
        """Bind the symbols that stand alone in a dim or stride and have no number yet."""
        pairs = list(zip(kind.shape, tensor.shape, strict=False))
        if kind.strides is not None:
            pairs += list(zip(kind.strides, tensor.stride(), strict=False))
        for size, number in pairs:
            if isinstance(size, Expr) and len(names := symbols_of(size)) == 1:
                (name,) = names
                if str(size) == name and name not in self.symbols:
                    self.symbols[name] = number

    def complaint(self, kind: TensorType, tensor: Any) -> str:
        """Why `tensor` is not of the type `kind`; empty when it is."""
        if not isinstance(tensor, torch.Tensor):
            return f"it is {type(tensor).__name__}, not a tensor"
        found = f"it is {DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))}{list(tensor.shape)}, "
        if tensor.dtype != TORCH_DTYPES[kind.dtype]:
            return found + f"and the declared type is {kind}"
        shape = [self.size(size) for size in kind.shape]
        if list(tensor.shape) != shape:
            return found + f"and the declared type {kind} is {shape} here"
        return ""

    def bind(self, inputs: Sequence[Any]) -> None:
        """Take the inputs, bind the symbols, check dtypes and shapes."""
        parameters = list(self.graph.inputs)
        parameters += [value for value in self.graph.restored if value not in parameters]
        if len(inputs) != len(parameters):
            raise InputError(f"{self.graph.name} takes {len(parameters)} inputs, {len(inputs)} were given")
        tensors: list[tuple[Value, TensorType, Any]] = []
        for value, given in zip(parameters, inputs, strict=True):
            self.values[value.name] = given
            if isinstance(value.type, SizeType):
                self.symbols[value.name] = self.values[value.name] = int(given)
            else:
                tensors.append((value, value.type, given))
        for _, kind, given in tensors:
            if isinstance(given, torch.Tensor):
                self.learn(kind, given)
        for value, kind, given in tensors:
            if problem := self.complaint(kind, given):
                raise InputError(f"input {value.name} of {self.graph.name} does not fit", why=problem)

    def call(self, node: Node) -> tuple[Any, ...]:
        """The results of one node."""
        operands = [self.operand(item) for item in node.inputs]
        if node.op == "extern":
            target = node.attr("target")
            assert isinstance(target, str)
            return results_of(call_extern(target, node.attr("template"), operands), len(node.outputs))
        own = OWN.get(node.op)
        attributes = {name: self.attribute(value) for name, value in node.attrs}
        if row(node).kind == "pointwise":
            function = _meaning(node.op) if own is None else functools.partial(own, attributes)
            if node.op == "cast":
                return (function(*operands),)
            return (_pointwise(node, function, operands),)
        assert own is not None, node.op
        result = own(attributes, *operands)
        return result if isinstance(result, tuple) else (result,)

    def run(self, node: Node) -> None:
        """Run a node and check its results against their declared types."""
        try:
            results = self.call(node)
        except AnyShapeError:
            raise
        except RuntimeError as error:
            error.add_note(f"in {node.op} of {self.graph.name}, {node.where or 'source line unknown'}")
            raise
        for value, result in zip(node.outputs, results, strict=True):
            if isinstance(result, torch.Tensor):
                self.learn(value.tensor, result)
            if problem := self.complaint(value.tensor, result):
                raise VerifyError(f"{value.name} = {node.op}(...) of {self.graph.name} is not what was declared",
                                  where=node.where, why=problem, do="correct the type rule or the traced type")
            self.values[value.name] = result


def _storage(tensor: torch.Tensor) -> int | None:
    return api.storage_key(tensor)


def _strided_copy(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """A new tensor of these strides; a dim of stride 0 holds one element, so its elements must be equal."""
    kept = tuple(1 if stride == 0 else size for size, stride in zip(tensor.shape, strides, strict=True))
    narrow = tensor[tuple(slice(0, size) for size in kept)]
    result = torch.empty_strided(narrow.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return result.copy_(narrow).expand(tensor.shape)


def _finish_output(state: Interpreter, operand: Operand | None, strides: tuple[Size, ...] | None,
                   taken: set[int | None]) -> Any:
    """An output with its strides, in storage of its own; an input that is returned stays the same object."""
    found = state.operand(operand)
    if not isinstance(found, torch.Tensor) or operand in state.graph.inputs:
        return found
    if strides is not None:
        wanted = tuple(state.size(stride) for stride in strides)
        if found.stride() != wanted or _storage(found) in taken:
            found = _strided_copy(found, wanted)
    elif _storage(found) in taken or not found.is_contiguous():
        found = found.clone(memory_format=torch.contiguous_format)
    taken.add(_storage(found))
    return found


def interpret(graph: Graph, inputs: Sequence[Any]) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Run `graph` on tensors and whole numbers, in the order of `graph.inputs` (then those of `graph.restored` that
    are not among them).

    Returns:
        The outputs (tensors of the declared strides, numbers, None), the saved values, and everything by name:
        symbols as numbers, values as tensors.

    Raises:
        InputError: an input has another dtype or shape than declared.
        VerifyError: a node's result has another dtype or shape than declared, or a symbol has no number.
        IndexError: an index is out of range.
    """
    state = Interpreter(graph)
    with torch.no_grad():
        state.bind(inputs)
        for node in graph.nodes:
            state.run(node)
        taken = {_storage(item) for item in inputs if isinstance(item, torch.Tensor)}
        written = {_storage(state.values[target.name]) for target, _ in graph.writes}
        strides = graph.output_strides or (None,) * len(graph.outputs)
        made: dict[Any, Any] = {}
        for key in zip(graph.outputs, strides, strict=True):
            if key not in made:
                made[key] = _finish_output(state, *key, taken)
        outputs = [made[key] for key in zip(graph.outputs, strides, strict=True)]

        def kept(value: Any) -> Any:
            """The value as it is before the writes."""
            return value.clone() if isinstance(value, torch.Tensor) and _storage(value) in written else value

        saved = [kept(state.operand(operand)) for operand in graph.saved]
        values = [kept(state.values[value.name]) for _, value in graph.writes]
        for (target, _), value in zip(graph.writes, values, strict=True):
            state.values[target.name].copy_(value)
    return outputs, saved, {**state.symbols, **state.values}
