"""Workload extraction: the forward graph of a model as layers with products, attentions and formulas of their sizes.

    h [b*s, 4096] -> matmul gate, matmul up -> silu, mul -> matmul down        a part: gate and up may be cut along
    their
                                                                               columns, down along its rows

A product may be cut along its columns where nothing adds up over them before the next product does, whose rows are cut
then (Shoeybi et al., "Megatron-LM", 2019, section 3): labels of products run through the graph until a reduction over
their columns stops them. Layers are told by the names of parameters; those that are alike become one with a count.
"""
from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from anyshape.base.errors import InputError
from anyshape.dist.cost.workload import Attention, Layer, Product, Workload
from anyshape.ir.graph import Graph, Node, Value
from anyshape.ir.op import row
from anyshape.sym.expr import Size, product, symbols_of

LOGITS = 3  # what is kept of an element of logits: 16 and 32 bits, in elements of 16; as much again are its gradients
HEAVY = ("matmul", "attention", "grouped")
LINEAR = ("cast", "neg")
VIEWS = ("reshape", "permute", "slice", "broadcast")
_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(slots=True)
class _Part:
    """What is gathered of one part: its parameters (name -> shape), products and values."""

    parameters: dict[str, tuple[int, ...]] = field(default_factory=dict)
    products: list[tuple[str, Node, Value]] = field(default_factory=list)
    attentions: list[Node] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    lookups: set[str] = field(default_factory=set)


def workload_of(graph: Graph, names: Sequence[str], name: str, *, batch: str, length: str, dtype: str,
                counts: Mapping[str, int] | None = None, state_bytes: float = 8.0,
                master_bytes: float = 4.0) -> Workload:
    """A workload from a forward with its loss.

    Args:
        names: of the graph's inputs: a parameter's, or "".
        batch, length: symbols of the graph.
        counts: block ("layers.*") -> how many there really are, where fewer were traced.
    """
    walk = _LayerWalk(graph, dict(zip((value.name for value in graph.inputs), names, strict=False)))
    layers: list[Layer] = []
    for keys, block in _classes(walk):
        count = len(keys)
        star = next((one for one in (counts or {}) if block.startswith(one)), "")
        if star and count > 1:
            assert counts is not None
            count = counts[star]
        layers.append(walk.layer(keys[-1], block if count > 1 else keys[-1], count, keys[-1] == walk.order[-1]))
    return Workload(name, tuple(layers), batch, length, dtype, state_bytes, master_bytes)


def _classes(walk: _LayerWalk) -> list[tuple[list[str], str]]:
    """Parts that are alike, each class at the place of its first: (keys, name with * for the number)."""
    found: dict[tuple[str, object], list[str]] = {}
    for key in walk.order:
        found.setdefault((_INDEX.sub("*", key, count=1), walk.signature(key)), []).append(key)
    return [(keys, block) for (block, _), keys in found.items()]


class _LayerWalk:
    """Assigns nodes to parts, and follows the columns of products."""

    def __init__(self, graph: Graph, names: Mapping[str, str]) -> None:
        self.graph, self.names = graph, names
        self.made, self.users = graph.producers(), graph.users()
        self.weights = {value.name: names[value.name] for value in graph.inputs if names.get(value.name)}
        self.sources: dict[str, str] = {}  # value that shows a weight -> the weight's name
        self.parts: dict[str, _Part] = {}
        self._show()
        self._assign()
        self.order = [key for key in self.parts if self.parts[key].parameters]
        self.labels: dict[str, frozenset[str]] = {}
        self.blocked: set[str] = set()
        self.reached: dict[str, frozenset[str]] = {}
        self._label()
        self.cuts = self._cuts()

    def _show(self) -> None:
        """Which values are weights, through views and casts."""
        self.sources = dict(self.weights)
        for node in self.graph.nodes:
            values = list(node.values())
            if node.op in ("permute", "cast", "reshape") and values and values[0].name in self.sources:
                self.sources[node.output.name] = self.sources[values[0].name]

    def weight_of(self, node: Node) -> str:
        """The weight that a product multiplies by, or that a lookup reads; ""."""
        if node.op not in ("matmul", "take", "matmul_add", "grouped"):
            return ""
        found = [self.sources[value.name] for value in node.values() if value.name in self.sources]
        return found[0] if found else ""

    @staticmethod
    def key_of(weight: str) -> str:
        """The part a weight belongs to: the module below its block, or its module."""
        path = weight.split(".")[:-1] or [weight]
        for place, word in enumerate(path):
            if word.isdigit():
                return ".".join(path[:place + 2])
        return ".".join(path[-1:] if len(path) == 1 else path)

    def _assign(self) -> None:
        """Nodes to parts, from the end: what comes before a part's first product, behind the part before, is its."""
        shapes = {value.name: tuple(map(_number, value.tensor.shape)) for value in self.graph.inputs
                  if value.name in self.weights}
        order: list[str] = []
        taken: set[str] = set()
        now = ""
        own = {self.key_of(weight) for node in self.graph.nodes for weight in (self.weight_of(node),) if weight}
        for node in reversed(self.graph.nodes):
            weight = self.weight_of(node)
            if weight:
                now = self.key_of(weight)
                if now not in order:
                    order.append(now)
            elif not now:
                now = next((self.key_of(self.weight_of(one)) for one in reversed(self.graph.nodes)
                            if self.weight_of(one)), "")
                order += [now] if now else []
            part = self.parts.setdefault(now, _Part())
            part.nodes.append(node)
            for value in node.values():
                if value.name in self.weights and value.name not in taken:
                    taken.add(value.name)
                    weight = self.weights[value.name]
                    home = self.key_of(weight)  # a bias is added behind its product
                    there = self.parts.setdefault(home, _Part()) if home in own else part
                    there.parameters[weight] = shapes[value.name]
        for part in self.parts.values():
            part.nodes.reverse()
            for node in part.nodes:
                weight = self.weight_of(node)
                if weight and node.op == "take":
                    part.lookups.add(weight)
                elif weight:
                    part.products.append((weight, node, next(value for value in node.values()
                                                             if value.name not in self.sources)))
                elif node.op == "attention":
                    part.attentions.append(node)
        self.parts = {key: self.parts[key] for key in reversed(order) if key in self.parts}

    def _label(self) -> None:
        """By value: the products whose columns it has."""
        for node in self.graph.nodes:
            given = [self.labels.get(value.name, frozenset()) for value in node.values()]
            together = frozenset().union(*given)
            weight = self.weight_of(node)
            if weight and node.op != "take":
                self.reached[weight] = self.reached.get(weight, frozenset()) | together
                together = frozenset((weight,))
            elif row(node).kind in ("reduce", "scan"):
                gone = _reduced(node)
                self.blocked |= {one for one in together if self._columns(one) in gone}
                together = frozenset()
            for value in node.outputs:
                self.labels[value.name] = together

    def _columns(self, weight: str) -> int:
        for part in self.parts.values():
            for name, node, _ in part.products:
                if name == weight:
                    size = node.output.tensor.shape[-1]
                    return size if isinstance(size, int) else 0
        return 0

    def _cuts(self) -> dict[str, str]:
        """weight -> "column" or "row"."""
        found: dict[str, str] = {}
        last = [weight for part in self.parts.values() for weight, _, _ in part.products][-1:]
        for key in self.parts:
            for weight, _, _ in self.parts[key].products:
                before = self.reached.get(weight, frozenset())
                if before and not before & self.blocked and all(
                        found.get(one) == "column" and self.key_of(one) == key for one in before):
                    found[weight] = "row"
                elif weight not in self.blocked and any(weight in self.reached.get(other, frozenset())
                                                        for other, _, _ in self.parts[key].products):
                    found[weight] = "column"
        columns = {one for other, cut in found.items() if cut == "row" for one in self.reached[other]}
        found = {weight: cut for weight, cut in found.items() if cut == "row" or weight in columns}
        found.update((weight, "column") for weight in last if weight not in found)
        return found

    # ---- layers

    def signature(self, key: str) -> object:
        """What parts have in common that are alike."""
        part = self.parts[key]
        shapes = sorted((_INDEX.sub("*", name), shape) for name, shape in part.parameters.items())
        products = tuple((_INDEX.sub("*", name), self.cuts.get(name, ""), self._rows(node))
                         for name, node, _ in part.products)
        return tuple(shapes), products, len(part.attentions)

    @staticmethod
    def _rows(node: Node) -> Size:
        return product(node.output.tensor.shape[:-1])

    def layer(self, key: str, name: str, count: int, is_last: bool) -> Layer:
        """The layer of a part."""
        part = self.parts[key]
        own = {weight for weight, _, _ in part.products}
        products = tuple(Product(weight.removeprefix(f"{key}.").removesuffix(".weight"), self._rows(node),
                                 _number(given.tensor.shape[-1]), _number(node.output.tensor.shape[-1]),
                                 self.cuts.get(weight, "")) for weight, node, given in part.products)
        attentions = tuple(_attention(node, self.made) for node in part.attentions)
        parameters = sum(math.prod(shape) for shape in part.parameters.values())
        cut = sum(math.prod(part.parameters.get(weight, (0,))) for weight in own | part.lookups
                  if weight in self.cuts or weight in part.lookups)
        columns = [one.columns for one in products if one.cut == "column"]
        most = min([one.key_heads for one in attentions] or columns or
                   [part.parameters[weight][0] for weight in part.lookups] or [1])
        traffic, cut_traffic, saved, cut_saved, largest = self._values(part, own)
        border = next((value for value in (self._rows(node) * _number(node.output.tensor.shape[-1])
                                           for _, node, _ in reversed(part.products))), 0)
        if part.lookups and not products:
            border = next(node.output.tensor.count for node in part.nodes if self.weight_of(node))
        working: Size = 3 * largest if attentions or not products else 2 * largest
        saved = saved + border if products else saved
        if is_last and products:
            logits = products[-1].rows * products[-1].columns
            border = products[-1].rows * products[-1].inner
            saved = 2 * border
            cut_traffic, cut_saved, working = 2 * LOGITS * logits, LOGITS * logits, LOGITS * logits
        regions = max(sum(1 for one in products if one.cut == "row"), int(bool(cut)))
        return Layer(name, count, products, attentions, parameters, cut, max(len(part.parameters), 1), traffic,
                     cut_traffic, border, saved, cut_saved, working, regions, most)

    def _values(self, part: _Part, own: set[str]) -> tuple[Size, Size, Size, Size, Size]:
        """Elements of traffic and of what is saved, outside and inside of what is cut, and of the largest value."""
        sums: dict[str, Size] = {name: 0 for name in ("traffic", "cut_traffic", "saved", "cut_saved")}
        seen: set[tuple[str, str]] = set()
        largest: Size = 0
        columns = {weight for weight in own if self.cuts.get(weight) == "column"}

        def count(what: str, value: Value, times: int = 1) -> None:
            size, value = value.tensor.count, self._base(value)
            if (what, value.name) in seen or not symbols_of(size) or not value.tensor.dtype.startswith(("f", "bf")):
                return
            seen.add((what, value.name))
            inside = bool(self.labels.get(value.name, frozenset()) & columns)
            sums[f"cut_{what}" if inside else what] += times * size

        for node in part.nodes:
            operands = [value for value in node.values() if value.name not in self.sources]
            if node.op in HEAVY:
                for value in operands[:3] if node.op == "attention" else operands:
                    count("saved", value)
                    if self._is_pointwise(value):
                        count("traffic", value, 2 if node.op == "attention" else 1)
                result = node.outputs[0]
                if node.op == "attention" or self._is_multiplied(result):
                    count("saved", result)
                if node.op != "attention" and self._is_multiplied(result):
                    count("traffic", result)
                size = result.tensor.count
                largest = size if largest == 0 or _bigger(size, largest) else largest
            elif row(node).kind == "reduce":
                count("traffic", operands[0] if operands else node.output)
            elif node.op == "add" and not self.labels.get(node.output.name, frozenset()) & columns:
                count("traffic", node.output, 3)
        return sums["traffic"], sums["cut_traffic"], sums["saved"], sums["cut_saved"], largest

    def _base(self, value: Value) -> Value:
        """What a view shows."""
        node = self.made.get(value.name)
        while node is not None and node.op in VIEWS:
            value = next(node.values())
            node = self.made.get(value.name)
        return value

    def _is_pointwise(self, value: Value) -> bool:
        """Is it made by operations on elements?"""
        node = self.made.get(self._base(value).name)
        return node is not None and node.op not in (*HEAVY, "take") and (
            node.op != "add" or bool(self.labels.get(value.name)))

    def _is_multiplied(self, value: Value) -> bool:
        """Is it an operand of an operation on elements whose gradient needs it: of one that is not linear, or that has
        another operand that differs from sequence to sequence?"""
        waiting = [value.name]
        while waiting:
            for user in self.users.get(waiting.pop(), []):
                if user.op in VIEWS or user.op in LINEAR:
                    waiting.append(user.output.name)
                elif row(user).kind == "pointwise" and user.op not in ("add", "sub"):
                    sizes = [symbols_of(other.tensor.count) for other in user.values()]
                    if len(sizes) == 1 or all(one == sizes[0] for one in sizes):
                        return True
        return False


def _number(size: Size) -> int:
    """A size that is a number.

    Raises:
        InputError: it changes with the batch.
    """
    if isinstance(size, int):
        return size
    raise InputError(f"a model whose widths change cannot be planned: {size}", why="widths of weights, of products and "
                     "of attention's heads are numbers", do="give a batch whose first two dims alone change")


def _bigger(one: Size, other: Size) -> bool:
    """By their largest number: formulas of one part have the same symbols."""
    def weight(size: Size) -> int:
        return size if isinstance(size, int) else max(number for _, number in size.terms)
    return weight(one) > weight(other)


def _reduced(node: Node) -> set[Size]:
    """The sizes of the dims that a reduction or scan goes along."""
    attrs = dict(node.attrs)
    dims = attrs.get("dims", attrs.get("dim"))
    shape = next(node.values()).tensor.shape
    return {shape[dim] for dim in (dims if isinstance(dims, tuple) else (dims,)) if isinstance(dim, int)}


def _attention(node: Node, made: Mapping[str, Node]) -> Attention:
    """Operands q [.., heads, queries, width], k and v [.., key heads, keys, width]."""
    q, k = (value.tensor.shape for value in list(node.values())[:2])
    heads = q[-3] if len(q) > 3 else 1
    key_heads = k[-3] if len(k) > 3 else 1
    causal = bool(dict(node.attrs).get("causal", False))
    waiting, seen = [value.name for value in list(node.values())[3:]], set()
    while waiting and not causal:  # a mask that compares positions
        one = made.get(waiting.pop())
        if one is not None and one.output.name not in seen:
            seen.add(one.output.name)
            causal = one.op in ("le", "lt", "ge", "gt")
            waiting += [value.name for value in one.values()]
    return Attention(q[0], _number(heads), _number(key_heads), q[-2], k[-2], _number(q[-1]), causal)
