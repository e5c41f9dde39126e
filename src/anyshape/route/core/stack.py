"""Stacked branches of any structure (horizontal fusion): equal modules become one over the rows of all branches.

    [Conv2d(8, 8, 3), ReLU(), ...] * E     parameters stacked [E, ...]; each operator in its grouped form

A branch is captured by torch.export (stack_body.py). That branches are equal is checked, never assumed: their classes,
their attributes, the shapes of their tensors; and the grouped form is compared with every branch on random rows. Where
there is no grouped form for what a call is given, it runs branch by branch.
"""
from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anyshape.base.errors import InputError
from anyshape.route.core.router import run_split
from anyshape.route.core.stack_body import Cells, GroupedBody, capture, cells_of
from anyshape.route.core.stack_rules import NotStacked

PROBES = 2  # random rows of each branch
# a call with other parameters puts these into the module meanwhile, and a capture changes settings of every thread
_ONE_AT_A_TIME = threading.RLock()
_OF_MODULES = frozenset(vars(nn.Module()))  # what every module has


class StackError(InputError):
    """Branches that cannot be stacked."""


def stack(branches: Iterable[nn.Module], example: Any = None) -> StackedBranches:
    """One module over rows sorted by branch, for `route.Router`, with the parameters of all branches stacked.

    Args:
        branches: modules of equal structure: the same classes, attributes, and shapes and dtypes of parameters and
            buffers. They stay as they are: the result has copies.
        example: what a branch gets, rows [n, *cell] (or a tuple of them), n of any size. Given, the grouped form is
            made now, and branches that have none are refused. Left out, it is made by the first call that no compiler
            traces; a compiled program that has seen none runs branch by branch.

    Raises:
        StackError: the branches are not equal, share tensors, have hooks, or their body has no grouped form: an
            operator that mixes cells, batch norm in training.
    """
    modules = list(branches)
    if not modules or not all(isinstance(branch, nn.Module) for branch in modules):
        raise StackError("branches are no list of modules", why=f"{branches!r:.80} was given",
                         do="give at least one module")
    reason = difference(modules)
    if reason:
        raise StackError("branches cannot be stacked", why=reason,
                         do="leave them as a list: the router runs them apart")
    stacked = StackedBranches(modules)
    if example is not None:
        rows = tuple(example) if isinstance(example, (tuple, list)) else (example,)
        try:
            stacked.prepare(rows, lambda branch, own: modules[branch](*own))
        except NotStacked as refusal:
            raise StackError("branches cannot be stacked", why=str(refusal),
                             do="leave them as a list: the router runs them apart") from refusal
    return stacked


class StackedBranches(nn.Module):
    """See `stack`. `branch_count`, and `forward(*rows, ends)`, are what route.Router asks for.

    Parameters have the names that they have in a branch, behind "stacked.": [branches, *shape]. The state of a list of
    branches ("0.weight", "1.weight", ...) loads, too.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.branch_count = len(modules)
        self.stacked = nn.Module()
        # one branch without values: what it does, not what it holds; a tuple keeps it out of the module tree
        self._template = (copy.deepcopy(modules[0]).to("meta"),)
        self.training = modules[0].training
        self._bodies: list[GroupedBody] = []
        self._refused: dict[Any, str] = {}
        self._traced_apart = _TracedApart()
        for name, parameter in modules[0].named_parameters():
            every = torch.stack([branch.get_parameter(name).detach() for branch in modules])
            _holder(self.stacked, name).register_parameter(
                name.rpartition(".")[2], nn.Parameter(every, requires_grad=parameter.requires_grad))
        kept = modules[0].state_dict()
        for name, _ in modules[0].named_buffers():
            every = torch.stack([branch.get_buffer(name) for branch in modules])
            _holder(self.stacked, name).register_buffer(name.rpartition(".")[2], every, persistent=name in kept)
        self.register_load_state_dict_pre_hook(_stack_loaded)

    # --- calls

    def forward(self, *operands: Tensor) -> Any:
        """operands: rows [S, *cell], sorted by branch, one or more of them; then the ends of the groups [branches]."""
        rows, ends = operands[:-1], operands[-1]
        body = self._fitting(rows)
        if body is None and not torch.compiler.is_compiling() and not self.why_not(rows):
            try:
                body = self.prepare(rows, self.run_branch)
            except NotStacked as refusal:
                self._refused[cells_of(rows), self.training] = str(refusal)
        if body is None:
            if torch.compiler.is_compiling():
                _tell_apart(self._traced_apart, self.training)
            own = [_Branch(self, number) for number in range(self.branch_count)]
            return run_split(own, list(rows), ends)
        tensors = self.tensors()
        return body.graph(*rows, ends, *[tensors[name] for name in body.tensors])

    def _fitting(self, rows: tuple[Tensor, ...]) -> GroupedBody | None:
        for body in self._bodies:
            if body.fits(rows, self.training):
                return body
        return None

    @property
    def way(self) -> str:
        """How rows run in this mode: "grouped", or "branch by branch" and why; of a program that was traced with other
        rows than those that have a grouped form, both."""
        if any(body.training == self.training for body in self._bodies):
            return "grouped; branch by branch where traced before a call outside of a trace gave it such rows" \
                if self.training in self._traced_apart.modes else "grouped"
        reasons = dict.fromkeys(why for (_, training), why in self._refused.items() if training == self.training)
        return f"branch by branch: {'; '.join(reasons) or 'no call outside of a trace has given it rows'}"

    def why_not(self, rows: tuple[Tensor, ...]) -> str:
        """Why such rows have no grouped form in this mode; "" where they have one, or it was not tried."""
        return self._refused.get((cells_of(rows), self.training), "")

    def tensors(self) -> dict[str, Tensor]:
        """The stacked parameters and buffers [branches, ...] by their names in a branch."""
        return {**dict(self.stacked.named_parameters()), **dict(self.stacked.named_buffers())}

    def run_branch(self, branch: int, rows: tuple[Tensor, ...]) -> Any:
        """One branch, on its own rows."""
        own = {name: tensor[branch] for name, tensor in self.tensors().items()}
        with _alone():
            return torch.func.functional_call(self._template[0], own, rows)

    def run_batched(self, rows: tuple[Tensor, ...]) -> Any:
        """All branches at once, on rows [branches, n, *cell], as many of each: [branches, n, *out]."""
        template = self._template[0]

        def one(own: dict[str, Tensor], *given: Tensor) -> Any:
            return torch.func.functional_call(template, own, given)

        with _alone():
            return torch.vmap(one)(self.tensors(), *rows)

    def pads(self, rows: tuple[Tensor, ...]) -> bool:
        """Whether rows that are there for padding change nothing in others: the body has a grouped form in which cells
        are independent, and draws no numbers."""
        body = self._fitting(rows)
        return body is not None and not body.draws and not self.training

    def prepare(self, rows: tuple[Tensor, ...], reference: Callable[[int, tuple[Tensor, ...]], Any]) -> GroupedBody:
        """Captures the grouped form for such rows, and compares it with `reference(branch, rows)`, unless it draws.

        Raises:
            Refused: there is none, or it gives other values.
        """
        # what is saved here is nothing of the call that captures: a checkpoint around it is not told
        with _alone(), torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
            known = self._fitting(rows)
            if known is not None:
                return known
            rows = tuple(row.detach() for row in rows)
            body = capture(self.branch(0), tuple(_random(row, 1) for row in rows))
            if not body.draws:
                self._compare(body, rows, reference)
            self._bodies.append(body)
            return body

    def _compare(self, body: GroupedBody, rows: tuple[Tensor, ...],
                 reference: Callable[[int, tuple[Tensor, ...]], Any]) -> None:
        probes = tuple(_random(row, PROBES * self.branch_count) for row in rows)
        ends = torch.arange(1, self.branch_count + 1, dtype=torch.int32, device=rows[0].device) * PROBES
        tensors = self.tensors()
        with torch.no_grad():
            found = body.graph(*probes, ends, *[tensors[name] for name in body.tensors])
            for branch in range(self.branch_count):
                own = slice(PROBES * branch, PROBES * (branch + 1))
                expected = reference(branch, tuple(probe[own] for probe in probes))
                pairs = zip(_flat(found), _flat(expected), strict=True)
                if not all(_close(mine[own], theirs) for mine, theirs in pairs):
                    raise NotStacked(f"the grouped form gives other values than branch {branch} on random rows")

    # --- branches of their own

    def branch(self, number: int) -> nn.Module:
        """A module of its own that is one branch, with a copy of its parameters."""
        found = copy.deepcopy(self._template[0])
        for name, tensor in self.tensors().items():
            holder, last = found.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
            own = tensor[number].detach().clone()
            if name in dict(found.named_parameters()):
                setattr(holder, last, nn.Parameter(own, requires_grad=tensor.requires_grad))
            else:
                setattr(holder, last, own)
        return found

    def unstack(self) -> nn.ModuleList:
        """All branches as modules of their own, with copies of their parameters."""
        return nn.ModuleList(self.branch(number) for number in range(self.branch_count))

    def branch_states(self) -> list[dict[str, Tensor]]:
        """The state of each branch, as its own module would give it."""
        states = self.stacked.state_dict()
        return [{name: tensor[number] for name, tensor in states.items()} for number in range(self.branch_count)]

    # --- as a module

    def train(self, mode: bool = True) -> StackedBranches:
        """As of every module; of the branches, too. Rows seen in one mode get their grouped form for the other, once: a
        program compiled afterwards has it from its first call on."""
        super().train(mode)
        self._template[0].train(mode)
        self._capture([*(body.cells for body in self._bodies), *(cells for cells, _ in self._refused)])
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A pickled body is the cells that it was captured for: it is captured again."""
        super().__setstate__(state)
        pickled, self._bodies = self._bodies, []
        self._capture([body.cells for body in pickled])

    def _capture(self, every: Sequence[Cells]) -> None:
        """Grouped forms for rows of such cells, in this mode."""
        for cells in dict.fromkeys(every):
            rows = tuple(torch.zeros(1, *shape, dtype=dtype, device=self._device()) for shape, dtype in cells)
            if not self.why_not(rows):
                try:
                    self.prepare(rows, self.run_branch)
                except NotStacked as refusal:
                    self._refused[cells, self.training] = str(refusal)

    def _device(self) -> torch.device | None:
        return next((tensor.device for tensor in self.tensors().values()), None)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        before = [(tensor.dtype, tensor.device) for tensor in self.tensors().values()]
        super()._apply(fn, recurse)
        if before != [(tensor.dtype, tensor.device) for tensor in self.tensors().values()]:
            # what was captured may say dtypes; the next call captures again
            self._template[0]._apply(lambda tensor: fn(torch.empty(0, dtype=tensor.dtype)).new_empty(
                tensor.shape, device="meta") if tensor.is_floating_point() else tensor)
            self._bodies.clear()
            self._refused.clear()
            self._traced_apart.modes.clear()
        return self

    def extra_repr(self) -> str:
        cells = "; ".join(" ".join(f"{dtype} {shape}" for shape, dtype in body.cells) for body in self._bodies)
        return f"{self.branch_count} of {type(self._template[0]).__name__}, captured for cells of {cells or 'no shape'}"


def _alone() -> contextlib.AbstractContextManager[Any]:
    """Other threads wait meanwhile; nothing where Dynamo traces. `is_compiling` would not do: it is true in all threads
    while one of them captures."""
    return contextlib.nullcontext() if torch.compiler.is_dynamo_compiling() else _ONE_AT_A_TIME


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


class _TracedApart:
    """In which modes a trace has run a stack branch by branch; a copy or a pickle begins anew, its programs do, too."""

    def __init__(self) -> None:
        self.modes: set[bool] = set()

    def __deepcopy__(self, _: Any) -> _TracedApart:
        return _TracedApart()

    def __reduce__(self) -> Any:
        return _TracedApart, ()


@torch.compiler.assume_constant_result
def _tell_apart(told: _TracedApart, training: bool) -> None:
    """Called when a trace is made, not by the program: Dynamo takes it for a constant."""
    told.modes.add(training)


class _Branch:
    """One branch as a function of its rows."""

    def __init__(self, stacked: StackedBranches, number: int) -> None:
        self.stacked, self.number = stacked, number

    def __call__(self, *rows: Tensor) -> Any:
        return self.stacked.run_branch(self.number, rows)


def _holder(root: nn.Module, name: str) -> nn.Module:
    """The module that holds a parameter of this name, made where it is not there."""
    for part in name.split(".")[:-1]:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        found = root._modules[part]
        assert found is not None
        root = found
    return root


def _stack_loaded(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """The state of a list of branches, "0.name", becomes that of their stack, "stacked.name"."""
    assert isinstance(module, StackedBranches)
    for name in module.stacked.state_dict():
        own = [f"{prefix}{number}.{name}" for number in range(module.branch_count)]
        if f"{prefix}stacked.{name}" not in state and all(key in state for key in own):
            state[f"{prefix}stacked.{name}"] = torch.stack([state.pop(key) for key in own])


def _random(row: Tensor, count: int) -> Tensor:
    """Random rows like these; of whole numbers, those that are there over and over, or zeros."""
    shape = (count, *row.shape[1:])
    if row.is_floating_point() or row.is_complex():
        draw = torch.Generator(device=row.device).manual_seed(0)
        return torch.randn(shape, generator=draw, dtype=row.dtype, device=row.device)
    if not row.shape[0]:
        return row.new_zeros(shape)
    return row.repeat(-(-count // row.shape[0]), *(1,) * (row.dim() - 1))[:count].clone()


def _flat(results: Any) -> list[Tensor]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


def _close(mine: Tensor, theirs: Tensor) -> bool:
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return False
    tolerance = 0.0 if not mine.is_floating_point() else 100 * torch.finfo(mine.dtype).eps ** 0.75
    scale = float(theirs.abs().max()) if theirs.numel() and mine.is_floating_point() else 0.0
    return torch.allclose(mine, theirs, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


# ---- equal structure


def difference(modules: Sequence[nn.Module]) -> str:
    """Why these modules are not of equal structure, or cannot be stacked; "" where they can."""
    trees = [dict(branch.named_modules()) for branch in modules]
    seen: dict[int, int] = {}
    for number, (branch, tree) in enumerate(zip(modules, trees, strict=True)):
        if tree.keys() != trees[0].keys():
            return f"branch {number} has other submodules than branch 0"
        for path, module in tree.items():
            reason = _module_difference(trees[0][path], module)
            if reason:
                return f"{path or 'the module'} of branch {number} differs from branch 0: {reason}"
        for name, tensor in (*branch.named_parameters(remove_duplicate=False),
                             *branch.named_buffers(remove_duplicate=False)):
            if id(tensor) in seen:
                return f"{name} of branch {number} is a tensor of branch {seen[id(tensor)]} as well"
            seen[id(tensor)] = number
    return ""


def _module_difference(one: nn.Module, other: nn.Module) -> str:
    if type(one) is not type(other):
        return f"{type(other).__name__} in place of {type(one).__name__}"
    for table in ("_parameters", "_buffers"):
        mine, theirs = getattr(one, table), getattr(other, table)
        if mine.keys() != theirs.keys():
            return f"other {table[1:]}"
        for name, tensor in mine.items():
            if _signature(tensor) != _signature(theirs[name]):
                return f"{name} is {_signature(theirs[name])}, not {_signature(tensor)}"
    for name in _OF_MODULES:
        if name.endswith("_hooks") and (getattr(one, name) or getattr(other, name)):
            return "it has hooks"
    mine, theirs = _attributes(one), _attributes(other)
    if mine.keys() != theirs.keys():
        return "other attributes"
    for name in mine:
        if not _same(mine[name], theirs[name]):
            return f"attribute {name}"
    return ""


def _signature(tensor: Tensor | None) -> Any:
    return None if tensor is None else (tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name == "training" or name not in _OF_MODULES}


def _same(one: Any, other: Any) -> bool:
    """Whether two attributes are the same, as far as that can be told."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (int, float, complex, str, bytes, bool, torch.dtype, torch.device, torch.Size, set, frozenset)):
        return bool(one == other)
    return type(one).__eq__ is not object.__eq__ and (one == other) is True
