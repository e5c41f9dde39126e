"""Abstract interpreter of a captured graph: owner arrays through every operator, by the tables of transfer rules.

What has no rule, or is called in a way that its rule does not cover, is the union of all that it reads: right for any
operator whose results are a function of its operands, and never precise.
"""
from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.operator_schemas import get_signature_for_torch_op

from anyshape.route.flow import routing
from anyshape.route.flow.call import NoRule, OperatorCall, TensorValue, put, union, values_in, wide
from anyshape.route.flow.capture import FlowProgram, draws, is_sized, known_size
from anyshape.route.flow.owners import NONE, TOP, CellSets, compressed, rows, uniform
from anyshape.route.flow.probe import seems_apart
from anyshape.route.flow.regions import RouterCall, regions_of, scale_of
from anyshape.route.flow.regions import routing as routing_name
from anyshape.route.flow.rules import rule_of

LARGEST_KNOWN = 1 << 22  # elements of a constant whose numbers are kept
# operators whose sizes may be symbols: nothing is computed from them
SIZES = """view _unsafe_view reshape expand full zeros ones empty new_zeros new_ones new_empty sym_size
sym_numel""".split()


class Unsized(Exception):
    """A size is found in data: the graph cannot be looked at with sizes that are known."""


@dataclass(frozen=True, eq=False)
class InterpretedProgram:
    """What all interpretations of one program have in common.

    at: the size of each symbol. constants: values that no input is in. live: nodes that an input is in, in order.
    tainted: constants that are not the same for each row, or for any number of rows. apart: the regions proved to
    keep rows apart, by their plans. unknown: names of operators that have no rule, as they are met.
    """

    program: FlowProgram
    sets: CellSets
    at: dict[str, int]
    constants: dict[Node, Any]
    live: tuple[Node, ...]
    regions: tuple[RouterCall, ...]
    tainted: frozenset[Node] = frozenset()
    apart: dict[Node, RouterCall] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)

    def choices(self, region: RouterCall) -> int:
        """How many branches a cell of a router takes."""
        shape = region.ids.meta["val"].shape
        return int(sized(self, shape[1])) if len(shape) > 1 else 1


def prepare(program: FlowProgram, at: dict[str, int] | None = None) -> InterpretedProgram:
    """Constants evaluated, and each region asked whether it keeps rows apart.

    Raises:
        Unsized: a size, or a number that Python reads, is data.
    """
    static: set[Node] = set()
    for node in program.nodes:
        if node.op in ("placeholder", "output"):
            if node.op == "placeholder" and node not in program.inputs:
                static.add(node)
        elif _is_size(node) or (all(one in static for one in node.all_input_nodes) and not draws(node)):
            static.add(node)
    computed = tuple(one for one in program.nodes if one not in static and one.op not in ("placeholder", "output"))
    shared = InterpretedProgram(program, CellSets(), at or {}, {}, computed, regions_of(program.nodes))
    for node in program.nodes:
        if node in static:
            shared.constants[node] = _constant(shared, node)
    for node in shared.live:  # a size or a number that is data is found here, not while it is asked
        _described(shared, node)
    prove_apart(shared)
    return shared


def _is_size(node: Node) -> bool:
    return str(node.target).startswith(("aten.sym_size", "aten.sym_numel"))


def _described(shared: InterpretedProgram, node: Node) -> Any:
    """The shape, or the tuple of shapes, of a node's results as values of no cell."""
    def one(meta: Any) -> Any:
        if isinstance(meta, Tensor):
            shape = tuple(sized(shared, size) for size in meta.shape)
            return TensorValue(uniform(NONE, len(shape)), shape, meta.dtype)
        if isinstance(meta, (list, tuple)):
            return [one(part) for part in meta]
        return sized(shared, meta)
    return one(node.meta.get("val"))


def sized(shared: InterpretedProgram, number: Any) -> Any:
    found = known_size(number, shared.at)
    if is_sized(found):
        raise Unsized(f"the size {found} is data")
    return found


def _constant(shared: InterpretedProgram, node: Node) -> Any:
    if node.op == "get_attr":
        return None
    described = _described(shared, node)
    if node.op == "placeholder":
        held = shared.program.fixed.get(node)
        return described if held is None else TensorValue(described.owners, tuple(held.shape), held.dtype, held)
    if not values_in(described):
        return described
    if node.target is operator.getitem:
        return shared.constants[node.args[0]][node.args[1]]
    env: dict[Node, Any] = {}
    args, kwargs = (_argument(shared, env, NONE, one) for one in (node.args, node.kwargs))
    given = values_in((args, kwargs))
    sizes = [value.shape for value in values_in(described)]
    if any(one.known is None for one in given) or any(torch.Size(one).numel() > LARGEST_KNOWN for one in sizes):
        return described
    if routing_name(node):
        return described
    with torch.no_grad():
        found = node.target(*put(args, _numbers), **put(kwargs, _numbers))  # type: ignore[operator]
    found = found if isinstance(found, (list, tuple)) else [found]
    values = [TensorValue(one.owners, one.shape, one.dtype, real)
              for one, real in zip(values_in(described), found, strict=True)]
    return values[0] if isinstance(described, TensorValue) else values


def _numbers(value: TensorValue) -> Tensor:
    assert value.known is not None
    return value.known


def _argument(shared: InterpretedProgram, env: Mapping[Node, Any], default: int, given: Any) -> Any:
    if isinstance(given, Node):
        if given in env:
            return env[given]
        if given in shared.constants:
            found = shared.constants[given]
            return put(found, lambda one: _all(one, TOP)) if given in shared.tainted else found
        return put(_described(shared, given), lambda one: _all(one, default))
    if isinstance(given, (list, tuple)):
        found = [_argument(shared, env, default, one) for one in given]
        return found if isinstance(given, list) else tuple(found)
    if isinstance(given, dict):
        return {name: _argument(shared, env, default, one) for name, one in given.items()}
    return sized(shared, given) if is_sized(given) else given


def _all(value: TensorValue, owner: int) -> TensorValue:
    return TensorValue(uniform(owner, value.rank), value.shape, value.dtype)


# ---- one interpretation


def interpret(shared: InterpretedProgram, seeds: Mapping[Node, Tensor], *, default: int = NONE,
              among: frozenset[Node] | None = None, probes: bool = False) -> dict[Node, Any]:
    """The values of live nodes.

    Args:
        seeds: the owners of some nodes, which are not computed. default: the owner of values that come from elsewhere:
            inputs that are not seeded, and nodes not in `among`.
        probes: an operator without a rule is probed, and believed where the probe does not refute: results are
            assumptions then.
    """
    env: dict[Node, Any] = {}
    for node, owners in seeds.items():
        described = _described(shared, node)
        env[node] = put(described, lambda one, own=owners: TensorValue(_fit(own, one), one.shape, one.dtype))
    for node in shared.live:
        if node in env or (among is not None and node not in among):
            continue
        env[node] = _step(shared, env, default, node, probes)
    return env


def _fit(owners: Tensor, value: TensorValue) -> Tensor:
    return owners.reshape(-1, *(1,) * (value.rank - 1)) if owners.dim() == 1 and value.rank else owners


def _step(shared: InterpretedProgram, env: Mapping[Node, Any], default: int, node: Node, probes: bool) -> Any:
    args, kwargs = (_argument(shared, env, default, one) for one in (node.args, node.kwargs))
    target: Any = node.target
    if target is operator.getitem:
        return args[0][args[1]]
    described = _described(shared, node)
    outs = values_in(described)
    if not outs:
        return described
    given = values_in((args, kwargs))
    name = target.name() if hasattr(target, "name") else str(target)
    if all(one.constant for one in given):
        owners = [uniform(NONE, one.rank) for one in outs]
    elif sized_wrongly(node, name, outs, args):
        owners = [uniform(TOP, one.rank) for one in outs]
    else:
        call = OperatorCall(target, args, kwargs, _named(target, args, kwargs), tuple(one.shape for one in outs),
                            shared.sets)
        owners = _owners(shared, env, default, node, call, name, probes)
    found = iter([TensorValue(compressed(_checked(own, one)), one.shape, one.dtype)
                  for own, one in zip(owners, outs, strict=True)])
    return put(described, lambda _: next(found))


def _checked(owners: Tensor, value: TensorValue) -> Tensor:
    """A rule's owners, which must broadcast to the value."""
    owners = wide(owners, value.rank) if owners.dim() < value.rank else owners
    fits = owners.dim() == value.rank and all(one in (1, size) for one, size in zip(owners.shape, value.shape))
    assert fits, f"owners of shape {tuple(owners.shape)} for a value of shape {value.shape}"
    return owners.to(torch.int32)


def _named(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    signatures = get_signature_for_torch_op(target) if hasattr(target, "overloadpacket") else None
    if not signatures:
        return dict(kwargs)
    bound = signatures[0].bind(*args, **{"input" if name == "self" else name: one for name, one in kwargs.items()})
    bound.apply_defaults()
    return dict(bound.arguments)


def _owners(shared: InterpretedProgram, env: Mapping[Node, Any], default: int, node: Node, call: OperatorCall,
            name: str, probes: bool) -> list[Tensor]:
    space, _, word = name.partition("::")
    word = word.split(".")[0]
    if space == "anyshape_route":
        found = routing.transfer(call, word, node, shared.apart, _ids(shared, env, default, node, word),
                                 lambda number: int(sized(shared, number)))
        if found is not None:
            return found
    elif space == "aten":
        rule = rule_of(node.target)
        if rule is not None:
            try:
                return rule(call)
            except (NoRule, RuntimeError):  # operands of a kind that the rule was not written for
                return [uniform(union(shared.sets, call.values()), len(shape)) for shape in call.shapes]
    seems = seems_apart(call)
    shared.unknown[name] = "a probe refutes that rows are apart" if seems is False else \
        "not known" if seems is None else "a probe does not refute that rows are apart"
    if probes and seems:
        whole = [shared.sets.reduce(one.owners, range(1, one.rank)) for one in call.values() if one.rank]
        joined = shared.sets.join(*(one.reshape(-1) for one in whole))
        return [joined.reshape(-1, *(1,) * (len(shape) - 1)) for shape in call.shapes]
    return [uniform(union(shared.sets, call.values()), len(shape)) for shape in call.shapes]


def _ids(shared: InterpretedProgram, env: Mapping[Node, Any], default: int, node: Node,
         word: str) -> TensorValue | None:
    """The ids by which a combine, or a grouped_take, finds rows, where their region keeps rows apart."""
    if word not in ("combine", "grouped_take"):
        return None
    for region in shared.apart.values():
        if node in region.combines or (word == "grouped_take" and scale_of(node.args[1], region) is not None):
            found = _argument(shared, env, default, region.ids)
            return found if isinstance(found, TensorValue) else None
    return None


def sized_wrongly(node: Node, name: str, outs: list[TensorValue], args: tuple[Any, ...]) -> bool:
    """Whether a number that is no size of the result is made from the number of rows."""
    word = name.partition("::")[2].split(".")[0]
    if word in SIZES:
        return False
    symbolic = [one for one in _flat(node.args) + _flat(node.kwargs) if _is_symbolic(one)]
    if not symbolic:
        return False
    whole = word == "slice" and isinstance(args[0], TensorValue) and outs[0].shape == args[0].shape
    plan = name.startswith("anyshape_route::") and word in ("merge_rows", "grouped_take")
    return not (whole or plan)


def _flat(given: Any) -> list[Any]:
    if isinstance(given, dict):
        given = list(given.values())
    return [one for part in given for one in _flat(part)] if isinstance(given, (list, tuple)) else [given]


def _is_symbolic(given: Any) -> bool:
    return is_sized(given) or (isinstance(given, Node) and is_sized(given.meta.get("val")))


# ---- regions


def prove_apart(shared: InterpretedProgram) -> None:
    """Finds the regions each of whose rows is computed from its own row alone, the innermost first."""
    for region in reversed(shared.regions):
        shared.apart[region.plan] = region  # its own ends count while it is asked
        seeds: dict[Node, Tensor] = {}
        for node in starts_of(region):
            seeds[node] = row_seeds(shared, node)
        env = interpret(shared, seeds, default=TOP, among=region.body)
        if not all(_apart(shared, env, node.args[0]) for node in region.combines):
            del shared.apart[region.plan]


def starts_of(region: RouterCall) -> list[Node]:
    """The nodes with which a region's body begins: its dispatches, and parameters taken by row."""
    taken = [node for node in region.body if routing_name(node) == "grouped_take"
             and scale_of(node.args[1], region) is not None]
    return [*region.dispatches, *taken]


def row_seeds(shared: InterpretedProgram, node: Node) -> Tensor:
    """Owners by which position i along dim 0 is row i."""
    return rows(sized(shared, node.meta["val"].shape[0]), node.meta["val"].dim())


def _apart(shared: InterpretedProgram, env: Mapping[Node, Any], node: Any) -> bool:
    value = _argument(shared, env, TOP, node)
    return isinstance(value, TensorValue) and is_apart(shared.sets, value)


def is_apart(sets: CellSets, value: TensorValue) -> bool:
    """Whether position i along dim 0 is of row i, or of none."""
    if not value.rank:
        return value.constant
    owners = sets.reduce(value.owners, range(1, value.rank)).reshape(-1)
    own = torch.arange(value.shape[0], dtype=torch.int32)
    return bool(((owners == NONE) | (owners == own)).all())
