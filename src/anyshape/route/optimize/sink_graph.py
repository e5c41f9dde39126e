"""Operator sinking on a torch.fx graph whose leaves are routers: what may sink, the proof, and the new branches."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from anyshape.route.core.router import Router
from anyshape.route.flow import branch_independent, same_program, unread_arguments
from anyshape.route.optimize.dead_branches import GuardedBranches

TRIES = 6  # sets of operators that are tried, each with a proof


class NotSunk(Exception):
    """Nothing sinks; the text says why."""


class RouterTracer(fx.Tracer):
    """Symbolic tracing with routers as leaves: their router functions are traced inline, and routes given to them."""

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(m, Router):
            return super().call_module(m, forward, args, kwargs)
        cells = tuple(args[0]) if isinstance(args[0], (tuple, list)) else (args[0],)
        given = dict(kwargs)
        routes = given.pop("routes", None)
        decided = m.router_fn(*cells, *args[1:], **given) if routes is None else routes
        return self.create_proxy("call_module", self.path_of_module(m), (cells,), {"routes": decided})


def traced(root: nn.Module, arguments: tuple[Any, ...]) -> fx.GraphModule:
    """A module's program, proved the same as the module: both are captured on the arguments, and are one graph.

    Raises:
        Refused: it cannot be traced, or Python did something else while it was.
    """
    try:
        graph = RouterTracer().trace(root)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, NotImplementedError,
            fx.proxy.TraceError) as fault:
        raise NotSunk(f"torch.fx cannot trace it: {(str(fault).splitlines() or ['?'])[0][:120]}") from fault
    program = fx.GraphModule(root, graph)
    program.training = root.training
    difference = same_program(root, program, arguments)
    if difference:
        raise NotSunk(difference)
    return program


@dataclass(frozen=True, eq=False)
class Sinking:
    """What has sunk. program: the new program. count: operators that have sunk. users: branches that compute them."""

    program: fx.GraphModule
    count: int
    users: tuple[int, ...]


class SunkBranch(nn.Module):
    """A branch that computes some of its arguments from other rows.

    order: for each argument of the branch its place among (rows that are given, results of `sunk`). given: how many are
    given as they are. reads: whether the branch reads a result of `sunk`. cells: shapes of its results' cells.
    """

    def __init__(self, branch: nn.Module, sunk: fx.GraphModule | None, order: Sequence[int], given: int,
                 cells: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> None:
        super().__init__()
        self.branch, self.sunk = branch, sunk
        self.order, self.given, self.cells = tuple(order), given, tuple(cells)
        self.training = branch.training

    def forward(self, *rows: Tensor) -> Any:
        if self.sunk is not None:
            made = self.sunk(*rows[self.given:])
        else:  # the branch does not read them: rows without numbers
            made = [rows[0].new_zeros((), dtype=dtype).expand(rows[0].shape[0], *cell) for cell, dtype in self.cells]
        every = (*rows[:self.given], *made)
        return self.branch(*(every[place] for place in self.order))


def sunk_router(program: fx.GraphModule, router: Router, arguments: tuple[Any, ...]) -> Sinking:
    """The program with what can sink behind one of its routers.

    Raises:
        Refused: nothing can.
    """
    call = next((node for node in program.graph.nodes if node.op == "call_module"
                 and program.get_submodule(str(node.target)) is router), None)
    if call is None:
        raise NotSunk("its call is not in the traced program")
    if sum(node.op == "call_module" and node.target == call.target for node in program.graph.nodes) > 1:
        raise NotSunk("it is called more than once")
    guarded = isinstance(router.branches, GuardedBranches)
    if router.grouped and not guarded:
        raise NotSunk("its branches run as one module over all rows")
    if router.drop == "identity":
        raise NotSunk("dropped cells keep their value, so that all of it is needed")
    shapes = values_of(program, arguments)
    cells = list(call.args[0])
    sinking, body, sources = _proved(program, call, shapes)
    sunk = [node for node in dict.fromkeys(cells) if node in sinking]
    kept = [node for node in dict.fromkeys(cells) if node not in sinking]
    order = [kept.index(node) if node in kept else len(kept) + sunk.index(node) for node in cells]
    like = [(tuple(shapes[node].shape[1:]), shapes[node].dtype) for node in sunk]
    rows = [shapes[node] for node in cells]
    branches, users = [], []
    for number, branch in enumerate(router.branches):
        unread = unread_arguments(branch, *rows)
        reads = any(node in sinking and place not in unread for place, node in enumerate(cells))
        users += [number] if reads else []
        branches.append(SunkBranch(branch, body if reads else None, order, len(kept), like))
    if len(users) == len(branches):
        raise NotSunk("every branch reads what could sink")
    return Sinking(_rewritten(program, router, call, branches, kept + sources, sinking), len(sinking), tuple(users))


def values_of(program: fx.GraphModule, arguments: tuple[Any, ...]) -> dict[fx.Node, Any]:
    """What each node gives on the arguments."""
    found: dict[fx.Node, Any] = {}

    class Keep(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            found[n] = super().run_node(n)
            return found[n]

    with torch.no_grad():
        Keep(program).run(*arguments)
    return found


def candidates(call: fx.Node, shapes: dict[fx.Node, Any]) -> list[fx.Node]:
    """Nodes that only the cells of a router's call need, in order; those that take a list apart stay."""
    decided: set[fx.Node] = set()
    fx.node.map_arg(call.kwargs, lambda node: decided.add(node))
    found: set[fx.Node] = set()
    cells = set(call.args[0])  # type: ignore[arg-type]
    order = list(call.graph.nodes)
    for node in reversed(order[:order.index(call)]):
        if node.op not in ("call_module", "call_function", "call_method") or node in decided or not node.users:
            continue
        if any(isinstance(shapes.get(one), (list, tuple)) for one in node.all_input_nodes):
            continue
        if all(user in found or (user is call and node in cells) for user in node.users):
            found.add(node)
    return [node for node in order if node in found]


def _proved(program: fx.GraphModule, call: fx.Node,
            shapes: dict[fx.Node, Any]) -> tuple[set[fx.Node], fx.GraphModule, list[fx.Node]]:
    """The longest tail of the candidates that is proved row-wise: (the nodes, their module, what it reads)."""
    every = candidates(call, shapes)
    low, high, reason = 0, len(every), ""
    best: tuple[set[fx.Node], fx.GraphModule, list[fx.Node]] | None = None
    for _ in range(TRIES):
        if low >= high:
            break
        start = low if best is None and high == len(every) else (low + high) // 2
        tail = every[start:]
        found = _body(program, call, tail, shapes)
        if isinstance(found, str):
            reason, low = reason or found, start + 1
        else:
            best, high = (set(tail), *found), start
    if best is None:
        raise NotSunk(reason or "its decision, or others, need all that its branches get")
    if not any(node.op == "call_module" and list(program.get_submodule(str(node.target)).parameters())
               for node in best[0]):
        raise NotSunk("; ".join([*([reason] if reason else []), "only operators without weights could sink"]))
    return best


def _body(program: fx.GraphModule, call: fx.Node, tail: list[fx.Node],
          shapes: dict[fx.Node, Any]) -> tuple[fx.GraphModule, list[fx.Node]] | str:
    """The tail as a module from what it reads to the cells that it makes; or why it is not row-wise."""
    inside = set(tail)
    outputs = [node for node in dict.fromkeys(call.args[0]) if node in inside]  # type: ignore[arg-type]
    reads = [node for node in dict.fromkeys(one for node in tail for one in node.all_input_nodes)
             if node not in inside and node.op != "get_attr"]
    first = call.args[0][0]  # type: ignore[index]
    count = shapes[first].shape[0]
    if not reads or not all(isinstance(shapes[node], Tensor) and shapes[node].dim()
                            and shapes[node].shape[0] == count for node in reads):
        return "what could sink is not made from tensors with a row for each cell"
    graph = fx.Graph()
    copied = {node: graph.placeholder(f"rows{number}") for number, node in enumerate(reads)}
    for node in [one for one in call.graph.nodes if one.op == "get_attr"] + tail:
        if node.op != "get_attr" or any(user in inside for user in node.users):
            copied[node] = graph.node_copy(node, lambda one: copied[one])
    graph.output(tuple(copied[node] for node in outputs))
    body = fx.GraphModule(program, graph)
    body.training = program.training
    verdict = branch_independent(body, *(shapes[node] for node in reads))
    return (body, reads) if verdict else verdict.reason


def _rewritten(program: fx.GraphModule, router: Router, call: fx.Node, branches: list[nn.Module],
               cells: list[fx.Node], sunk: set[fx.Node]) -> fx.GraphModule:
    path = str(call.target)
    call.args = (tuple(cells),)
    for node in reversed([one for one in program.graph.nodes if one in sunk]):
        program.graph.erase_node(node)
    made = Router(router.router_fn, branches, combine=router.combine, drop=router.drop, name=router.name)
    if isinstance(router.branches, GuardedBranches):
        made.branches, made.grouped = GuardedBranches(branches, router.branches.live), True
    made.training = router.training
    program.set_submodule(path, made)
    program.graph.lint()
    program.recompile()
    return program
