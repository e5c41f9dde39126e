"""Layout propagation (channels last): operands and results of convolutions lie as their library takes and gives them.

before:
    graph example(x: f32[b, 3, h, w], k: f32[8, 3, 3, 3], s: f32[8], l: f32[4, 8, 1, 1])
      a = extern(x, k | target="aten.convolution.default", template=[["args", ["operand", 0], ["operand", 1], ["none"],
        ["list", ["int", 1], ["int", 1]], ["list", ["int", 1], ["int", 1]], ["list", ["int", 1], ["int", 1]],
        ["bool", False], ["list", ["int", 0], ["int", 0]], ["int", 1]], ["kwargs"]], effect=False)  f32[b, 8, h, w]
      c = reshape(s | shape=[8, 1, 1])  f32[8, 1, 1]
      d = mul(a, c)                     f32[b, 8, h, w]
      e = extern(d, l | target="aten.convolution.default", template=[["args", ["operand", 0], ["operand", 1], ["none"],
        ["list", ["int", 1], ["int", 1]], ["list", ["int", 0], ["int", 0]], ["list", ["int", 1], ["int", 1]],
        ["bool", False], ["list", ["int", 0], ["int", 0]], ["int", 1]], ["kwargs"]], effect=False)  f32[b, 4, h, w]
      return e
after:
    graph example(x: f32[b, 3, h, w], k: f32[8, 3, 3, 3], s: f32[8], l: f32[4, 8, 1, 1])
      permute_1 = permute(x | dims=[0, 2, 3, 1])          f32[b, h, w, 3]
      direct_conv_1 = direct_conv(permute_1, k | stride=[1, 1], padding=[1, 1], dilation=[1, 1])  f32[b, h, w, 8]
      c = reshape(s | shape=[8, 1, 1])                    f32[8, 1, 1]
      reshape_1 = reshape(c | shape=[1, 1, 1, 8])         f32[1, 1, 1, 8]
      mul_1 = mul(direct_conv_1, reshape_1)               f32[b, h, w, 8]
      reshape_2 = reshape(mul_1 | shape=[b*h*w, 8])       f32[b*h*w, 8]
      reshape_3 = reshape(l | shape=[4, 8])               f32[4, 8]
      permute_2 = permute(reshape_3 | dims=[1, 0])        f32[8, 4]
      matmul_1 = matmul(reshape_2, permute_2)             f32[b*h*w, 4]
      reshape_4 = reshape(matmul_1 | shape=[b, h, w, 4])  f32[b, h, w, 4]
      e = permute(reshape_4 | dims=[0, 3, 1, 2])          f32[b, 4, h, w]
      return e
The permute behind a convolution sinks through what can be done in either order of dims, until it meets its inverse, and
through operators of PyTorch that give their results the layout of an operand (passes/memory_format.py). A window of one
element becomes a product of matrices, and so does a transposed convolution whose windows do not overlap; channels by
themselves (depthwise) become a kernel, a sum of products; behind
convolutions of 8-bit numbers a permute stands already (frontend/importer_onnx/quantize.py), which sinks, too. A
permute that is left is a strided access in some kernel; where there would be more than one to two convolutions,
the graph stays as it was. A backward follows its forward: what it finds on the tape with channels last begins such a
permute.
"""
from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anyshape.base.config import Config
from anyshape.ir.graph import Attr, Graph, Node, Operand, Value
from anyshape.ir.op import row
from anyshape.ir.types import TensorType
from anyshape.passes.dce import dce
from anyshape.passes.memory_format import RANKS, followers, last_strides, leader, lies_last, trusted
from anyshape.passes.rewriter import Replay
from anyshape.passes.views import reshape_first
from anyshape.sym.expr import Expr, ceildiv, floordiv, product

Dims = tuple[int, ...]
_TARGET = "aten.convolution.default"
_DTYPES = ("f32", "bf16")
LARGEST = 4 << 20  # bytes of weights that the host's own routine takes: it brings them into panels in every call
PLACES = 49  # of a window whose convolution of channels by themselves is a kernel
_TRAINED = RANKS  # of convolutions whose backward takes channels last too


def channels_last(graph: Graph, config: Config) -> Graph:
    """The graph with convolutions and what lies between them in the layout channels last, where that pays."""
    tape = [value for value in graph.restored if isinstance(value.type, TensorType) and lies_last(value.tensor)]
    calls = [call for node in graph.nodes if (call := _call(node)) is not None]
    makers = {value.name: node for node in graph.nodes for value in node.outputs}
    of_bytes = any(_of_bytes(node, lambda one: makers.get(one.name)) for node in graph.nodes)
    if not (tape or calls or of_bytes) or (graph.saved and any(len(call.stride) + 2 not in _TRAINED for call in calls)):
        return graph
    sinking = _Sinking(config.products != "library" and not (graph.saved or graph.restored))
    replay = Replay(graph, sinking.rewrite, sinking.follow)
    sinking.begin(replay, tape)
    turned = dce(replay.run(), config)
    return turned if tape or 2 * (_strided(turned) - _strided(graph)) <= sinking.count else graph


def _strided(graph: Graph) -> int:
    """How many permutes are read by something that does not read any strides as well: all but convolutions, products,
    operators whose results follow, what only stores (weights, in another order), and the tape. One that only moves dims
    of size 1 does not count."""
    readers = {value.name for node in graph.nodes
               if row(node).kind != "library" and node.op not in ("convolution", "permute", "store")
               and leader(node) is None
               for value in node.values()}
    readers.update(value.name for value in graph.roots() if value not in graph.saved)
    return sum(node.op == "permute" and node.output.name in readers and _moves(node) for node in graph.nodes)


def _moves(node: Node) -> bool:
    if isinstance(node.inputs[0], Value) and lies_last(node.inputs[0].tensor):
        return False
    places = [d for d in _dims(node) if _shape(node.inputs[0])[d] != 1]
    return places != sorted(places)


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of a convolution as PyTorch calls it."""

    bias: Operand | None
    stride: Dims
    padding: Dims
    dilation: Dims
    groups: int
    transposed: bool = False


def _call(node: Node) -> _Call | None:
    """What a convolution of PyTorch is called with; None where our op has no such form."""
    if node.op != "extern" or node.attr("target") != _TARGET:
        return None
    x = node.output.tensor
    if x.dtype not in _DTYPES or x.device != "cpu" or not 3 <= x.rank <= 5 or not trusted(node):
        return None
    template = node.attr("template")
    assert isinstance(template, tuple)
    arguments = template[0]
    assert isinstance(arguments, tuple)
    _, source, weights, bias, stride, padding, dilation, turns, more, number = arguments
    if source != ("operand", 0) or weights != ("operand", 1):
        return None
    steps, around, apart = (_integers(entry, x.rank - 2) for entry in (stride, padding, dilation))
    (groups,) = _integers(("list", number), 1) or (0,)
    added = node.inputs[2] if bias == ("operand", 2) else None
    transposed = turns != ("bool", False)
    if not (steps and around and apart and groups) or not _fit(node, added, groups, transposed):
        return None
    if transposed and (any(around) or any(_integers(more, x.rank - 2)) or groups != 1 or not _apart(node, steps)):
        return None
    return _Call(added, steps, around, apart, groups, transposed)


def is_product(node: Node) -> bool:
    """Is the node a convolution over one element at a time, which is a product of the pixels' channels with the
    transpose of its weights?"""
    call = _call(node)
    return call is not None and not call.transposed and _of_one_element(call, node.inputs[1])


def _of_one_element(call: _Call, weights: Operand) -> bool:
    return all(size == 1 for size in _shape(weights)[2:]) and not any(call.padding) and call.groups == 1


def _apart(node: Node, stride: Dims) -> bool:
    """Do the windows of a transposed convolution lie side by side?"""
    weights = node.inputs[1]
    assert isinstance(weights, Value)
    return weights.tensor.shape[2:] == stride


def _of_bytes(node: Node, maker: Callable[[Value], Node | None]) -> bool:
    """Is this the permute behind a convolution of 8-bit numbers, and what is elementwise behind it?"""
    if node.op != "permute" or len(_dims(node)) < 3 or _dims(node) != _orders(len(_dims(node)))[1]:
        return False
    below = maker(node.inputs[0]) if isinstance(node.inputs[0], Value) else None
    while below is not None and (below.op == "reshape" or row(below).kind == "pointwise"):
        first = below.inputs[0]
        below = maker(first) if isinstance(first, Value) else None
    return below is not None and below.op == "conv_bytes"


def _fit(node: Node, bias: Operand | None, groups: int, transposed: bool = False) -> bool:
    """Are the channels of operand and weights equal as formulas, and those of weights and a bias? (The trace of torch
    2.11 does not ask whether the latter are.)"""
    x, weights = node.inputs[:2]
    assert isinstance(weights, Value)
    number, channels = weights.tensor.shape[:2]
    if transposed:
        return _shape(x)[1] == number and (bias is None or _shape(bias) == (channels * groups,))
    return _shape(x)[1] == channels * groups and (bias is None or _shape(bias) == (number,))


def _integers(entry: Attr, count: int) -> Dims:
    """The numbers of a template's list, one for all dims or one per dim; none where one is computed."""
    assert isinstance(entry, tuple)
    found = tuple(item[1] for item in entry[1:] if isinstance(item, tuple) and type(item[1]) is int)
    if len(found) != len(entry) - 1 or len(found) not in (1, count):
        return ()
    return found * count if len(found) == 1 else found


class _Sinking:
    """The rewrite. `turned` holds the values that a convolution's order of dims has reached; a permute of such a value
    sinks on. Any other permute stays where it is."""

    def __init__(self, direct: bool) -> None:
        self.turned: set[str] = set()
        self.count = 0  # convolutions seen
        self.direct = direct  # convolutions may be by the host's own routine

    def begin(self, replay: Replay, tape: Sequence[Value]) -> None:
        """Puts a permute in front of everything that reads one of these values of the tape."""
        roots = {value.name for value in replay.graph.roots()}
        for value in tape:
            if value.name not in roots:
                last = replay.op("permute", value, dims=_orders(value.tensor.rank)[0])
                replay.stand(value, self.back(replay, last, _orders(value.tensor.rank)[1]))

    def follow(self, replay: Replay, node: Node) -> tuple[Value, ...] | None:
        """An operator of PyTorch whose results lie as an operand does that has its channels last."""
        lead = leader(node)
        found = None if lead is None else self.source(replay, lead)
        if lead is None or found is None or found[1] != _orders(lead.tensor.rank)[1]:
            return None
        after = followers(node)
        results = replay.multi(node.op, node.inputs, node.attrs, [
            dataclasses.replace(value.tensor, strides=last_strides(value.tensor.shape)) if turns else value.type
            for value, turns in zip(node.outputs, after, strict=True)])
        return tuple(self.back(replay, replay.op("permute", value, dims=_orders(lead.tensor.rank)[0]), found[1])
                     if turns else value for value, turns in zip(results, after, strict=True))

    def rewrite(self, replay: Replay, node: Node) -> Operand | None:
        call = _call(node)
        if call is not None and (self.direct or not call.transposed):
            return self.convolution(replay, node, call)
        if leader(node) is not None:
            results = self.follow(replay, node)
            return None if results is None else results[0]
        rule = _RULES.get(node.op) or _KINDS.get(row(node).kind)
        return rule(self, replay, node) if rule is not None and len(node.outputs) == 1 else None

    def source(self, replay: Replay, operand: Operand) -> tuple[Value, Dims] | None:
        """The value and the dims of which `operand` is a permute that sinks."""
        below = replay.producer(operand)
        if below is None or below.op != "permute":
            return None
        value = below.inputs[0]
        assert isinstance(value, Value)
        return (value, _dims(below)) if value.name in self.turned else None

    def make(self, replay: Replay, dims: Dims, op: str, /, *inputs: Operand, **attrs: Attr) -> Value:
        """The op in the turned order; what stands for its result in the order of before."""
        value = replay.op(op, *inputs, **attrs)
        return self.back(replay, value, dims)

    def back(self, replay: Replay, value: Value, dims: Dims) -> Value:
        if dims == tuple(range(len(dims))):
            return value
        self.turned.add(value.name)
        return replay.op("permute", value, dims=dims)

    def convolution(self, replay: Replay, node: Node, call: _Call) -> Operand | None:
        x, weights = node.inputs[:2]
        rank = node.output.tensor.rank
        forth, back = _orders(rank)
        found = self.source(replay, x)
        last = found[0] if found is not None and found[1] == back else replay.op("permute", x, dims=forth)
        self.count += 1
        assert isinstance(weights, Value)
        if call.transposed:
            self.count += 3  # the permute of its windows and what follows are one kernel
            return self.back(replay, self.windows(replay, last, weights, call), back)
        if _of_one_element(call, weights):
            return self.back(replay, self.product(replay, last, weights, call), back)
        if self.direct and is_depthwise(node.output.tensor, weights.tensor, call.groups):
            return self.back(replay, self.depthwise(replay, last, weights, call), back)
        bias = () if call.bias is None else (call.bias,)
        if self.direct and is_direct(node.output.tensor, weights.tensor, call.groups):
            return self.make(replay, back, "direct_conv", last, weights, *bias, stride=call.stride,
                             padding=call.padding, dilation=call.dilation)
        return self.make(replay, back, "convolution", last, weights, *bias, stride=call.stride, padding=call.padding,
                         dilation=call.dilation, groups=call.groups)

    def depthwise(self, replay: Replay, x: Value, weights: Value, call: _Call) -> Value:
        """Channels by themselves: for each place of the window the elements that stand there, times a weight a channel,
        added up, which is a kernel."""
        kernel, channels = weights.tensor.shape[2:], weights.tensor.shape[0]
        taps = product(kernel)
        flat = replay.op("reshape", weights, shape=(channels, taps))
        # in memory with the channels side by side
        lines = replay.op("store", replay.op("permute", flat, dims=(1, 0)), dtype=x.tensor.dtype)
        around = (0, *call.padding, 0)
        # once in memory, or each of the reads would ask where the border is
        whole = replay.op("store", replay.op("pad", x, low=around, high=around, value=0.0),
                          dtype=x.tensor.dtype) if any(call.padding) else x
        total: Value | None = None
        for number, place in enumerate(itertools.product(*map(range, kernel))):  # type: ignore[arg-type]
            part = whole
            for dim, (at, size, step, apart, k, pad) in enumerate(zip(
                    place, x.tensor.shape[1:-1], call.stride, call.dilation, kernel, call.padding, strict=True), 1):
                room = size + 2 * pad - apart * (k - 1) - 1
                part = replay.op("slice", part, dim=dim, start=at * apart, count=floordiv(room, step) + 1, step=step)
            own = replay.op("reshape", replay.op("slice", lines, dim=0, start=number, count=1, step=1),
                            shape=(channels,))
            term = replay.op("mul", part, own)
            total = term if total is None else replay.op("add", total, term)
        assert total is not None
        return total if call.bias is None else replay.op("add", total, call.bias)

    def product(self, replay: Replay, x: Value, weights: Value, call: _Call) -> Value:
        """A window of one element: a matrix product of the pixels' channels with the weights."""
        for dim, step in enumerate(call.stride, 1):
            if step != 1:
                x = replay.op("slice", x, dim=dim, start=0, count=ceildiv(x.tensor.shape[dim], step), step=step)
        shape = x.tensor.shape
        number, channels = weights.tensor.shape[:2]
        pixels = replay.op("reshape", x, shape=(product(shape[:-1]), channels))
        matrix = replay.op("permute", replay.op("reshape", weights, shape=(number, channels)), dims=(1, 0))
        result = replay.op("reshape", replay.op("matmul", pixels, matrix), shape=(*shape[:-1], number))
        return result if call.bias is None else replay.op("add", result, call.bias)

    def windows(self, replay: Replay, x: Value, weights: Value, call: _Call) -> Value:
        """A transposed convolution: a matrix product of the pixels' channels with all elements of the window, of which
        those of neighbours lie side by side."""
        inputs, channels, *kernel = weights.tensor.shape
        count, shape = len(kernel), x.tensor.shape
        last = replay.op("store", replay.op("permute", weights, dims=(0, *range(2, 2 + count), 1)),
                         dtype=x.tensor.dtype)
        found = replay.op("matmul", replay.op("reshape", x, shape=(product(shape[:-1]), inputs)),
                          replay.op("reshape", last, shape=(inputs, product((*kernel, channels)))))
        found = replay.op("reshape", found, shape=(*shape[:-1], *kernel, channels))
        found = replay.op("permute", found, dims=(
            0, *itertools.chain(*((1 + d, 1 + count + d) for d in range(count))), 1 + 2 * count))
        found = replay.op("reshape", found, shape=(
            shape[0], *(n * step for n, step in zip(shape[1:-1], call.stride, strict=True)), channels))
        return found if call.bias is None else replay.op("add", found, call.bias)

    def together(self, replay: Replay, node: Node) -> Operand | None:
        """Pointwise ops, and those that put operands of one rank side by side: all take the order of the first."""
        shape = node.output.tensor.shape
        dims = None
        for value in node.values():
            found = self.source(replay, value)
            whole = node.op == "concat" or value.tensor.shape == shape
            if found is not None and len(found[1]) == len(shape) and whole:
                dims = found[1]
                break
        if dims is None:
            return None
        attrs = dict(node.attrs)
        if node.op == "concat":
            attrs["dim"] = dims[_number(node, "dim")]
        operands = [self.turn(replay, x, dims) if isinstance(x, Value) else x for x in node.inputs]
        return self.make(replay, dims, node.op, *operands, **attrs)

    def turn(self, replay: Replay, value: Value, dims: Dims) -> Value:
        """`value`, which may lack leading dims, in the turned order."""
        found = self.source(replay, value)
        if found is not None and found[1] == dims:
            return found[0]
        shape = (1,) * (len(dims) - value.tensor.rank) + value.tensor.shape
        forth = _inverse(dims)
        made = replay.producer(value)
        if made is not None and made.op == "full" and value.tensor.rank == len(dims):
            return replay.op("full", *made.inputs, **dict(made.attrs) | {"shape": tuple(shape[d] for d in forth)})
        if sum(size != 1 for size in shape) <= 1:
            return replay.op("reshape", value, shape=tuple(shape[d] for d in forth)) if value.tensor.rank else value
        whole = replay.op("reshape", value, shape=shape) if shape != value.tensor.shape else value
        return replay.op("permute", whole, dims=forth)

    def along(self, replay: Replay, node: Node) -> Operand | None:
        """Ops along one dim."""
        found = self.source(replay, node.inputs[0])
        if found is None or node.output.tensor.rank != len(found[1]):
            return None
        value, dims = found
        return self.make(replay, dims, node.op, value, *node.inputs[1:],
                         **dict(node.attrs) | {"dim": dims[_number(node, "dim")]})

    def places(self, replay: Replay, node: Node) -> Operand | None:
        """Lookups along neighbouring dims, and writes to such places, by as many dims of indices."""
        data = node.inputs[:len(node.inputs) - len(_dims(node))]
        found = next((one for x in data if (one := self.source(replay, x)) is not None), None)
        along = () if found is None else tuple(found[1][d] for d in _dims(node))
        if found is None or along != tuple(range(along[0], along[0] + len(along))) or any(
                not isinstance(x, Value) or x.tensor.rank != len(found[1]) for x in (*data, node.output)):
            return None
        operands = [self.turn(replay, x, found[1]) for x in data if isinstance(x, Value)]
        return self.make(replay, found[1], node.op, *operands, *node.inputs[len(data):],
                         **dict(node.attrs) | {"dims": along})

    def flip(self, replay: Replay, node: Node) -> Operand | None:
        found = self.source(replay, node.inputs[0])
        if found is None:
            return None
        value, dims = found
        return self.make(replay, dims, "flip", value, dims=tuple(sorted(dims[d] for d in _dims(node))))

    def pad(self, replay: Replay, node: Node) -> Operand | None:
        found = self.source(replay, node.inputs[0])
        if found is None:
            return None
        value, dims = found
        low, high = ([_sizes(node, key)[d] for d in _inverse(dims)] for key in ("low", "high"))
        return self.make(replay, dims, "pad", value, low=tuple(low), high=tuple(high), value=node.attr("value"))

    def broadcast(self, replay: Replay, node: Node) -> Operand | None:
        found = self.source(replay, node.inputs[0])
        shape = node.output.tensor.shape
        if found is None or len(shape) != len(found[1]):
            return None
        value, dims = found
        return self.make(replay, dims, "broadcast", value, shape=tuple(shape[d] for d in _inverse(dims)))

    def reduce(self, replay: Replay, node: Node) -> Operand | None:
        found = self.source(replay, node.inputs[0])
        if found is None:
            return None
        value, dims = found
        over = _dims(node)
        inside = tuple(sorted(dims[d] for d in over))
        left = dims
        if not node.attr("keep"):
            places = [d for d in range(len(dims)) if d not in inside]
            left = tuple(places.index(dims[d]) for d in range(len(dims)) if d not in over)
        kept = [d for d, size in enumerate(value.tensor.shape) if d not in inside and size != 1]
        many = [d for d in inside if value.tensor.shape[d] != 1]
        outer = tuple(d for d in many if any(d < other for other in kept))
        if 0 < len(outer) < len(many) and any(other < many[-1] for other in kept):
            # groups of channels: over the pixels channel by channel, then over each group's few
            value = replay.op(node.op, value, dims=outer, keep=True)
            rest = tuple(d for d in inside if d not in outer)
            value = replay.op(node.op, value, dims=rest, keep=True)
            if not node.attr("keep"):
                value = replay.op("reshape", value, shape=tuple(
                    size for d, size in enumerate(value.tensor.shape) if d not in inside))
            return self.back(replay, value, left)
        return self.make(replay, left, node.op, value, dims=inside, keep=node.attr("keep"))

    def permute(self, replay: Replay, node: Node) -> Operand | None:
        found = self.source(replay, node.inputs[0])
        if found is None and _of_bytes(node, replay.producer):
            self.count += 1
            assert isinstance(node.inputs[0], Value)
            return self.back(replay, node.inputs[0], _dims(node))
        if found is None:
            return None
        value, dims = found
        return self.back(replay, value, tuple(dims[d] for d in _dims(node)))

    def reshape(self, replay: Replay, node: Node) -> Operand | None:
        """Dims may be split, and merged where they also lie side by side in the turned order."""
        found = self.source(replay, node.inputs[0])
        if found is None:
            return None
        value, dims = found
        shape = node.output.tensor.shape
        turned = reshape_first(value.tensor.shape, dims, shape) or (dims, shape, tuple(range(len(shape))))
        if [d for d in turned[0] if value.tensor.shape[d] != 1] != sorted(
                d for d in turned[0] if value.tensor.shape[d] != 1):
            return None
        return self.make(replay, turned[2], "reshape", value, shape=turned[1])


def is_direct(result: TensorType, weights: TensorType, groups: int) -> bool:
    """Does the host's own routine do a convolution? It does each one faster than a step of PyTorch's; what is limited
    is the scratch that the weights take."""
    size = weights.bytes
    return result.rank == 4 and result.dtype == "f32" and groups == 1 and isinstance(size, int) and size <= LARGEST


def is_depthwise(result: TensorType, weights: TensorType, groups: int) -> bool:
    """Is each channel a convolution by itself, with a window that is small?"""
    taps = product(weights.shape[2:])
    return result.dtype == "f32" and weights.shape[:2] == (groups, 1) and isinstance(taps, int) and 0 < taps <= PLACES


def _orders(rank: int) -> tuple[Dims, Dims]:
    """The dims of [N, C, *S] as [N, *S, C] has them, and back."""
    return (0, *range(2, rank), 1), (0, rank - 1, *range(1, rank - 1))


def _inverse(dims: Dims) -> Dims:
    return tuple(dims.index(d) for d in range(len(dims)))


def _dims(node: Node) -> Dims:
    value = node.attr("dims")
    assert isinstance(value, tuple)
    return value  # type: ignore[return-value]


def _number(node: Node, key: str) -> int:
    value = node.attr(key)
    assert isinstance(value, int)
    return value


def _sizes(node: Node, key: str) -> tuple[int | Expr, ...]:
    value = node.attr(key)
    assert isinstance(value, tuple)
    return value  # type: ignore[return-value]


def _shape(operand: Operand) -> tuple[int | Expr, ...]:
    assert isinstance(operand, Value)
    return operand.tensor.shape


_KINDS = {"pointwise": _Sinking.together, "reduce": _Sinking.reduce}
_RULES = {
    "concat": _Sinking.together, "slice": _Sinking.along, "take": _Sinking.along, "flip": _Sinking.flip,
    "pad": _Sinking.pad, "broadcast": _Sinking.broadcast, "permute": _Sinking.permute, "reshape": _Sinking.reshape,
    **dict.fromkeys(("index", "put", "put_add", "put_mul", "put_amax", "put_amin"), _Sinking.places),
}  # fmt: skip
