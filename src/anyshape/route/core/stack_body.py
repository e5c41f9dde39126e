"""Capture of a branch by torch.export, and its grouped form: one body over the rows of all branches.

    conv2d(rows, weight, bias)   -->  convolved(rows, weight [E, ...], ends, bias [E, ...])
    rows * scale                 -->  rows * aligned(scale [E, ...], ends, rows, rank)
    weight * mask                -->  mapped(mul, (0, 0), (weight [E, ...], mask [E, ...]))
    relu(rows)                   -->  relu(rows)

The body is a torch.fx.GraphModule, called with the rows, the ends of the groups, and the stacked tensors in the
order of `tensors`. stack_rules.py says what may stand in it.
"""
from __future__ import annotations

import inspect
import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from anyshape.route.core import stack_rules as rules
from anyshape.route.core.grouped_conv import convolved
from anyshape.route.core.stack_rules import PLAIN, ROWS, SIZE, STACKED, NotStacked, RowKind, bound, name_of, shape_of

# whatever a user's module raises while it is traced is a reason not to stack
_CAUGHT = (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError, AttributeError, LookupError,
           ArithmeticError, torch.fx.proxy.TraceError)
BATCH_NORM = "_native_batch_norm_legit_no_training"  # what torch.export makes of one in evaluation


Cells = tuple[tuple[tuple[int, ...], torch.dtype], ...]  # shape and dtype of a cell of each operand


@dataclass(frozen=True, slots=True)
class Pickled:
    """A Body as it is pickled: torch.fx traces a pickled graph again, and grouped operators ask what no proxy knows."""

    cells: Cells


@dataclass(frozen=True, slots=True)
class GroupedBody:
    """The grouped form of a branch for rows of given shapes and dtypes.

    Attributes:
        graph: (*rows, ends, *tensors) -> rows, or a tuple of them.
        tensors: names of the branch's parameters and buffers that the body reads.
        cells: shape and dtype of a cell of each operand. training: the mode that was captured.
        draws: it draws random numbers (dropout): of the same distribution as the branches', not the same numbers.
    """

    graph: GraphModule
    tensors: tuple[str, ...]
    cells: Cells
    training: bool
    draws: bool

    def fits(self, rows: tuple[Tensor, ...], training: bool) -> bool:
        """Whether it was captured for such rows."""
        return self.training == training and self.cells == cells_of(rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupedBody:
        return self

    def __reduce__(self) -> tuple[type[Pickled], tuple[Cells]]:
        return Pickled, (self.cells,)


def cells_of(rows: tuple[Tensor, ...]) -> Cells:
    """Shape and dtype of a cell of each operand."""
    return tuple((tuple(row.shape[1:]), row.dtype) for row in rows)


def capture(branch: nn.Module, rows: tuple[Tensor, ...]) -> GroupedBody:
    """The grouped form of `branch`, which stands for all.

    Args:
        rows: operands [n, *cell] with n of at least 2; their values are not read.

    Raises:
        Refused: torch.export does not capture it for every n, it writes buffers, or an operator may mix cells.
    """
    # a number of rows that is no size within a cell
    taken = {size for row in rows for size in row.shape[1:]}
    count = next(number for number in range(5, 1 << 30) if number not in taken)
    example = tuple(row[:1].expand(count, *row.shape[1:]).clone() for row in rows)
    dynamic = tuple({0: torch.export.Dim.DYNAMIC} for _ in rows)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(branch, example, dynamic_shapes=_by_parameter(branch, dynamic), strict=False)
            program = program.run_decompositions({})
    except _CAUGHT as error:
        raise NotStacked(f"torch.export does not capture it: {str(error).strip().splitlines()[0]:.200}") from error
    signature = program.graph_signature
    if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
        written = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
        raise NotStacked(f"a call writes {', '.join(map(str, written))}")
    return _Grouping(program, len(rows)).body(cells_of(rows), branch.training)


def _by_parameter(branch: nn.Module, dynamic: tuple[Any, ...]) -> Any:
    """As torch.export wants them: a forward of `*rows` has one parameter."""
    kinds = [parameter.kind for parameter in inspect.signature(branch.forward).parameters.values()]
    if kinds and kinds[0] is inspect.Parameter.VAR_POSITIONAL:
        return (dynamic,)
    return dynamic


@dataclass(slots=True)
class _Grouping:
    """The rewrite of one captured program."""

    program: Any
    count: int
    graph: Graph = field(default_factory=Graph)
    kinds: dict[Node, RowKind] = field(default_factory=dict)
    made: dict[Node, Node] = field(default_factory=dict)
    ends: dict[int, Node] = field(default_factory=dict)
    cells: Any = None  # the symbol of their number
    draws: bool = False

    def body(self, cells: tuple[Any, ...], training: bool) -> GroupedBody:
        signature = self.program.graph_signature
        named = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        constants = signature.inputs_to_lifted_tensor_constants
        nodes = list(self.program.graph.nodes)
        held = nn.Module()
        for node in nodes:
            if node.op == "placeholder" and node.name in signature.user_inputs:
                self.set(node, self.graph.placeholder(node.name), RowKind(ROWS))
                self.cells = shape_of(node)[0]
        self.ends[1] = self.graph.placeholder("ends")
        tensors = []
        for node in nodes:
            if node.op == "placeholder" and node.name in named and node.users:
                self.set(node, self.graph.placeholder(node.name), RowKind(STACKED))
                tensors.append(named[node.name])
        for node in nodes:
            if node.op == "placeholder" and node.name in constants and node.users:
                held.register_buffer(node.name, self.program.constants[constants[node.name]], persistent=False)
                self.set(node, self.graph.get_attr(node.name), RowKind(PLAIN))
        for node in nodes:
            if node.op == "call_function":
                self.rewrite(node)
            elif node.op == "output":
                self.give(node)
            elif node.op != "placeholder":
                raise NotStacked(f"{node.op} {node.target}")
        self.graph.eliminate_dead_code()
        return GroupedBody(GraphModule(held, self.graph), tuple(tensors), cells, training, self.draws)

    def set(self, node: Node, made: Node, kind: RowKind) -> None:
        made.meta["val"] = node.meta.get("val")
        self.made[node], self.kinds[node] = made, kind

    def give(self, node: Node) -> None:
        for result in node.args[0]:  # type: ignore[union-attr]
            if not isinstance(result, Node) or self.kinds[result] != RowKind(ROWS):
                raise NotStacked("a result is not of one row for each cell")
        results = tuple(self.made[result] for result in node.args[0])  # type: ignore[union-attr,arg-type,index]
        spec = self.program.call_spec.out_spec
        self.graph.output(results if spec is not None and not spec.is_leaf() else results[0])

    def ends_of(self, inner: int) -> Node:
        if inner not in self.ends:
            with self.graph.inserting_after(self.ends[1]):
                self.ends[inner] = self.graph.call_function(operator.mul, (self.ends[1], inner))
        return self.ends[inner]

    # --- one operator

    def rewrite(self, node: Node) -> None:
        operands = list(node.all_input_nodes)
        by: dict[str, list[Node]] = {what: [x for x in operands if self.kinds[x].what == what]
                                     for what in (ROWS, STACKED, SIZE, PLAIN)}
        name = name_of(node.target)
        if not isinstance(node.meta.get("val"), (Tensor, tuple, list)):
            self.number(node, name)
            return
        if node.target is operator.getitem and name_of(operands[0].target) == BATCH_NORM:
            if node.users and node.args[1] != 0:
                raise NotStacked("statistics of a batch norm are used")
            self.set(node, self.made[operands[0]], self.kinds[operands[0]])
            return
        if node.target is operator.getitem:
            self.copied(node, self.kinds[operands[0]])
            return
        if not str(node.target).startswith("aten."):
            raise NotStacked(f"{node.target} is no operator of ATen")
        draws = torch.Tag.nondeterministic_seeded in node.target.tags and (
            "scaled_dot_product_attention" not in name or bound(node)["dropout_p"] != 0.0)
        self.draws = self.draws or draws
        if by[SIZE] and name not in (*rules.VIEWS, "expand", "sym_size"):
            raise NotStacked(f"{name} depends on the number of cells")
        if by[STACKED] and by[ROWS]:
            inner = self.inner(by[ROWS])
            self.set(node, self.grouped(node, name, by[ROWS], by[STACKED], by[PLAIN], inner), RowKind(ROWS, inner))
            if name != BATCH_NORM:  # whose statistics are empty
                self.check(node)
        elif by[ROWS]:
            self.inner(by[ROWS])
            rules.keeps_rows(node, by[ROWS], by[PLAIN])
            self.copied(node, RowKind(ROWS, self.leading(node)))
        elif by[STACKED]:
            if by[SIZE] or draws:
                raise NotStacked(f"{name} of parameters depends on the number of cells, or draws")
            self.mapped(node)
        else:
            if by[SIZE] or draws:
                raise NotStacked(f"{name} makes one value for every cell, or draws")
            self.copied(node, RowKind(PLAIN))

    def number(self, node: Node, name: str) -> None:
        """A size, or arithmetic of sizes."""
        if not (name == "sym_size" or node.target in (operator.mul, operator.add, operator.sub, operator.floordiv)):
            raise NotStacked(f"{name} gives a number")
        self.copied(node, RowKind(SIZE))

    def copied(self, node: Node, kind: RowKind) -> None:
        made = self.graph.node_copy(node, lambda old: self.made[old])
        if name_of(node.target) in rules.VIEWS and len(node.args) > 1 and isinstance(node.args[1], (list, tuple)):
            # where there are no rows, -1 says nothing
            sizes = zip(node.args[1], shape_of(node), strict=False)
            made.update_arg(1, [size if isinstance(size, int) and given == -1 else self.made.get(given, given)
                                for given, size in sizes])
        self.set(node, made, kind)

    def inner(self, rows: list[Node]) -> int:
        found = {self.kinds[x].inner for x in rows}
        if len(found) > 1:
            raise NotStacked("operands count positions of cells in different ways")
        return found.pop()

    def leading(self, node: Node) -> int:
        """Positions of a cell that dim 0 of a result counts."""
        found = node.meta["val"]
        inners = {self._positions(node, value) for value in (found if isinstance(found, (tuple, list)) else (found,))}
        if len(inners) != 1:
            raise NotStacked(f"{name_of(node.target)} has results of different kinds")
        return inners.pop()

    def _positions(self, node: Node, value: Tensor) -> int:
        size = value.shape[0] if value.dim() else 0
        expr = getattr(getattr(size, "node", None), "expr", None)
        if expr is not None:
            factor = expr / self.cells.node.expr
            if factor.is_Integer and factor > 0:
                return int(factor)
        raise NotStacked(f"dim 0 of what {name_of(node.target)} gives does not count cells: {tuple(value.shape)}")

    def check(self, node: Node) -> None:
        if self.leading(node) != self.kinds[node].inner:
            raise NotStacked(f"{name_of(node.target)} changes what dim 0 counts")

    def call(self, function: Callable[..., Any], *arguments: Any) -> Node:
        return self.graph.call_function(function, torch.fx.node.map_arg(arguments, lambda old: self.made.get(old, old)))

    def mapped(self, node: Node) -> None:
        """An operator of parameters alone, for each branch apart."""
        if any(isinstance(x, (list, tuple)) and any(isinstance(y, Node) for y in x) for x in node.args) or any(
                isinstance(x, Node) for x in node.kwargs.values()):
            raise NotStacked(f"{name_of(node.target)} of a list of parameters")
        dims = tuple(0 if isinstance(x, Node) and self.kinds[x].what == STACKED else None for x in node.args)
        result = self.call(rules.mapped, node.target, dims, tuple(node.args), dict(node.kwargs))
        self.set(node, result, RowKind(STACKED))

    def grouped(self, node: Node, name: str, rows: list[Node], stacked: list[Node], plain: list[Node],
                inner: int) -> Node:
        """The grouped form of an operator of rows and parameters."""
        given, ends = bound(node), self.ends_of(inner)
        first = next(iter(given.values()))
        rank = len(shape_of(rows[0]))
        if torch.Tag.pointwise in node.target.tags and name not in ("prelu", "_prelu_kernel"):  # type: ignore
            return self.pointwise(node, rows, stacked, plain, ends)
        if name == "embedding" and rows == [given["indices"]]:
            if given["scale_grad_by_freq"] or given["sparse"] or given["padding_idx"] >= 0:
                raise NotStacked("embedding with sparse gradients, scaled ones, or a padding index")
            return self.call(rules.embedding, given["weight"], rows[0], ends)
        if name in ("prelu", "_prelu_kernel") and rank >= 2 and rows == [first] and len(shape_of(stacked[0])) == 1:
            return self.call(rules.prelu, first, stacked[0], ends)
        for what in (given.get("bias"), given.get("weight")):
            if isinstance(what, Node) and what not in stacked:
                raise NotStacked(f"{name} with a weight that is no parameter")
        if name in ("mm", "matmul", "addmm"):
            return self.product(name, given, rows, stacked, ends)
        if name == BATCH_NORM and rows == [first] and rank >= 2:
            return self.call(rules.batch_norm, first, *(given[word] for word in (
                "weight", "bias", "running_mean", "running_var", "eps")), ends)
        rules.keeps_rows(node, rows, stacked)
        if name == "linear":
            return self.call(rules.linear, first, given["weight"], ends, given["bias"])
        if name in rules.CONVOLUTIONS:
            return self.call(convolved, first, given["weight"], ends, given["bias"],
                             *(given[word] for word in ("stride", "padding", "dilation", "groups")))
        if name == "layer_norm":
            return self.call(rules.layer_norm, first, given["normalized_shape"], given["weight"], given["bias"],
                             given["eps"], ends)
        if name == "rms_norm":
            return self.call(rules.rms_norm, first, given["normalized_shape"], given["weight"], given["eps"], ends)
        if name == "group_norm":
            return self.call(rules.group_norm, first, given["num_groups"], given["weight"], given["bias"],
                             given["eps"], ends)
        raise NotStacked(f"{name} with parameters of branches has no grouped form")

    def product(self, name: str, given: dict[str, Any], rows: list[Node], stacked: list[Node], ends: Node) -> Node:
        """rows @ a parameter, and perhaps a bias."""
        left, right = (given["mat1"], given["mat2"]) if name == "addmm" else tuple(given.values())[:2]
        bias = given["input"] if name == "addmm" else None
        if rows != [left] or right not in stacked or len(shape_of(right)) != 2 or len(shape_of(left)) < 2:
            raise NotStacked(f"{name} of a parameter with rows")
        if bias is not None and (bias not in stacked or len(shape_of(bias)) != 1
                                 or given["alpha"] != 1 or given["beta"] != 1):
            raise NotStacked("addmm with factors, or what it adds is no bias")
        return self.call(rules.grouped_linear, left, right, ends, bias)

    def pointwise(self, node: Node, rows: list[Node], stacked: list[Node], plain: list[Node], ends: Node) -> Node:
        """The same operator, with each row's own parameters."""
        rank = len(node.meta["val"].shape)
        rules._aligned(node, rows, plain, rank)
        for value in stacked:
            shape, dtype = shape_of(value), value.meta["val"].dtype
            if len(shape) == rank and shape[0] != 1:
                raise NotStacked(f"{name_of(node.target)} has a parameter for every cell")
            if dtype != rows[0].meta["val"].dtype:
                raise NotStacked(f"{name_of(node.target)} of {rows[0].meta['val'].dtype} with a parameter of {dtype}")
        own = {value: self.call(rules.aligned, value, ends, rows[0], rank) for value in stacked}
        return self.graph.node_copy(node, lambda old: own.get(old, self.made[old]))
