"""The layout of branches' weights in a tiered store: which tensors move, and where the bytes of each branch are.

    Experts, weight [E, K, M], bias [E, M]  -->  one tensor [E, K, M] in address space, branch e has its slice;
                                                 the bias, under a page a branch, stays in memory
    a list of modules                       -->  one range a branch, with all its tensors

What stays in memory: tensors that more than one branch, or the model around them, uses as well; tensors whose slices
are smaller than a page; tensors that a module also keeps elsewhere. They count under the limit.
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from anyshape.base.align import align
from anyshape.route.core.branches import Experts
from anyshape.route.core.router import Router
from anyshape.route.store import BranchBytes
from anyshape.route.store.host_memory import PAGE


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor is in address space. key: its id in the model before. branch: whose it is; -1: of all, one slice
    each, in order."""

    key: int
    branch: int
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def place_of(tensor: Tensor, branch: int, start: int) -> Place:
    """The place of a tensor that begins there."""
    return Place(id(tensor), branch, start, tuple(tensor.shape), _dense(tensor), tensor.dtype)


@dataclass(frozen=True, slots=True)
class RouterLayout:
    """The weights of one router's branches. places: of the tensors that move. branches: the bytes of each. kept: bytes
    that stay in memory."""

    name: str
    places: tuple[Place, ...]
    branches: tuple[BranchBytes, ...]
    kept: int

    @property
    def size(self) -> int:
        """Bytes of all branches."""
        return self.kept + sum(one.size for one in self.branches)


@dataclass(frozen=True, slots=True)
class Layout:
    """The weights of all routers. size: bytes of address space."""

    routers: tuple[RouterLayout, ...]
    size: int

    @property
    def branches(self) -> tuple[BranchBytes, ...]:
        return tuple(one for router in self.routers for one in router.branches)

    @property
    def kept(self) -> int:
        return sum(router.kept for router in self.routers)

    @property
    def bytes(self) -> int:
        return sum(router.size for router in self.routers)


def outermost(routers: Mapping[str, Router]) -> dict[str, Router]:
    """Routers that are in no branch of another one: what is nested is part of its branch."""
    inside = {id(module) for router in routers.values() for module in router.branches.modules()}
    return {name: router for name, router in routers.items() if id(router) not in inside}


def reason_against(router: Router) -> str:
    """Why a router's branches cannot be preloaded; "" where they can."""
    tensors = list(itertools.chain(router.branches.parameters(), router.branches.buffers()))
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return "its weights are not on the CPU, and the tiers of devices are not there yet"
    if router.grouped and stacked_tensors(router.branches) is None:
        return f"{type(router.branches).__name__} does not say which of its tensors are stacked (`tensors()`)"
    if router.grouped and any(getattr(module, "_bodies", None) == [] for module in router.branches.modules()):
        return "its stacked branches have not run yet, so that they have no grouped form: call the model first"
    return ""


def stacked_tensors(branches: nn.Module) -> list[Tensor] | None:
    """The tensors [branches, ...] of a grouped module, of what it wraps, too; None where nobody says which they are."""
    found: list[Tensor] = []
    known = False
    for module in branches.modules():
        tensors = getattr(module, "tensors", None)
        if isinstance(module, Experts):
            found += module.parameters()
        elif callable(tensors):
            found += tensors().values()
        else:
            continue
        known = True
    return found if known else None


def lay_out(model: nn.Module, routers: Mapping[str, Router]) -> Layout:
    """Where the weights of the branches of these routers go. Nothing is changed."""
    alone = _owners(model, routers)
    found, at = [], 0
    for name, router in routers.items():
        places, branches, at = (_grouped if router.grouped else _split)(name, router, alone, at)
        moved = {place.key for place in places}
        kept = {id(tensor): tensor.untyped_storage().nbytes() for module in router.branches.modules()
                for tensor in _tensors(module) if id(tensor) not in moved}
        found.append(RouterLayout(name, tuple(places), tuple(branches), sum(kept.values())))
    return Layout(tuple(found), at)


def _grouped(name: str, router: Router, alone: Mapping[int, int], at: int) \
        -> tuple[list[Place], list[BranchBytes], int]:
    places, count = [], router.branch_count
    for tensor in stacked_tensors(router.branches) or ():
        size = tensor.numel() * tensor.element_size() // max(count, 1)
        stride = _dense(tensor)
        if alone.get(_storage(tensor)) == 1 and size >= PAGE and tensor.dim() and tensor.shape[0] == count \
                and stride[0] * count == tensor.numel():
            places.append(place_of(tensor, -1, at))
            at = align(at + size * count, PAGE)
    sizes = [place.bytes // count for place in places]
    branches = [BranchBytes(f"branch {number} of {name}", tuple((place.start + number * size, size) for place, size
                                                                 in zip(places, sizes, strict=True)))
                for number in range(count)]
    return places, branches, at


def _split(name: str, router: Router, alone: Mapping[int, int], at: int) -> tuple[list[Place], list[BranchBytes], int]:
    places, branches = [], []
    for number, branch in enumerate(router.branches):
        begin = at
        done: set[int] = set()
        for module in branch.modules():
            for tensor in _tensors(module):
                if alone.get(_storage(tensor)) == 1 and id(tensor) not in done and _movable(module):
                    done.add(id(tensor))
                    places.append(place_of(tensor, number, at))
                    at = align(at + places[-1].bytes)
        branches.append(BranchBytes(f"branch {number} of {name}", ((begin, at - begin),) if at > begin else ()))
        at = align(at, PAGE)
    return places, branches, at


def _owners(model: nn.Module, routers: Mapping[str, Router]) -> dict[int, int]:
    """How many tensors in branches or around them have each storage: those with one belong to their branch alone."""
    owner: dict[int, tuple[str, int]] = {}
    for name, router in routers.items():
        for number, branch in enumerate([router.branches] if router.grouped else router.branches):
            for module in branch.modules():
                if owner.setdefault(id(module), (name, number)) != (name, number):
                    owner[id(module)] = ("", -1)  # a module that is several branches
    users: dict[int, set[object]] = {}
    for module in model.modules():
        for tensor in _tensors(module):
            own = owner.get(id(module), ("", -1))
            users.setdefault(_storage(tensor), set()).add((own, id(tensor)))
            if own[1] < 0:
                users[_storage(tensor)].add("the model around the branches")
    return {storage: len(found) for storage, found in users.items()}


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """The parameters and buffers of a module itself."""
    yield from (tensor for _, tensor in _named(module))


def _named(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False)]


def _movable(module: nn.Module) -> bool:
    """Whether a module reads its tensors by their names alone (an LSTM has a list of them, too)."""
    own = {id(tensor) for tensor in _tensors(module)}
    return not any(id(item) in own for value in vars(module).values() if isinstance(value, (list, tuple))
                   for item in value)


def _storage(tensor: Tensor) -> int:
    """Tensors without bytes share nothing."""
    return tensor.untyped_storage().data_ptr() or -id(tensor)


def _dense(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a tensor where its elements lie one after another, in whatever order, else those of a copy."""
    wanted = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and step != wanted:
            return torch.empty(tensor.shape, device="meta").stride()
        wanted *= size if size > 1 else 1
    return tuple(tensor.stride())


def flat_bytes(place: Place, tensor: Tensor) -> memoryview:
    """The bytes of a tensor as they will lie in address space."""
    data = tensor.detach()
    if tuple(data.stride()) != place.stride:
        data = data.contiguous()
    return memoryview(data.as_strided((data.numel(),), (1,)).view(torch.uint8).numpy())


def swap(branches: nn.Module, tensors: Mapping[int, Tensor]) -> None:
    """Puts other tensors, by the ids of those before, in place of parameters and buffers of modules. They are no
    parameters, and no part of the state."""
    for module in branches.modules():
        for name, tensor in _named(module):
            if id(tensor) in tensors:
                delattr(module, name)
                module.register_buffer(name, tensors[id(tensor)], persistent=False)
