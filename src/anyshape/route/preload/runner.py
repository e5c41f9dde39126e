"""The runner of one router's branches: branches with rows in memory and pinned, in rounds where they do not all fit.

    ends [E] -> branches with rows -> in memory, pinned -> read ahead for the next routers -> run -> unpinned

For a compiler it is one operator, `anyshape_route::preloaded(rows, ends, number of the runner) -> results`: which
weights are there is no part of the program.
"""
from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anyshape.base.errors import InputError
from anyshape.route.preload.layout import RouterLayout
from anyshape.route.preload.preloader import Preloader

_numbers = itertools.count(1)
_running: weakref.WeakValueDictionary[int, BranchRunner] = weakref.WeakValueDictionary()  # by the operator's number


class BranchRunner:
    """Runs a router's branches, whose tensors are over the store's address space."""

    def __init__(self, branches: nn.Module, grouped: bool, preloader: Preloader, router: int,
                 compile: Callable[..., Any] | None) -> None:
        self.branches, self.grouped, self.preloader, self.router = branches, grouped, preloader, router
        self.layout: RouterLayout = preloader.layout.routers[router]
        self.call: Callable[..., Any] = compile(branches) if grouped and compile is not None else branches
        self.several = False  # whether branches return tuples
        self.number = next(_numbers)
        _running[self.number] = self

    def run(self, rows: Sequence[Tensor], ends: Tensor) -> list[Tensor]:
        """The results of all branches on their rows: one or more [S, *out]."""
        begun = time.perf_counter()
        until = ends.numpy().astype(np.int64)
        counts = np.diff(until, prepend=0)
        cache, own = self.preloader.cache, int(self.preloader.first[self.router])
        self.preloader.observe(self.router, counts)
        rounds = cache.rounds([own + int(one) for one in np.flatnonzero(counts)])
        found = []
        for number, wanted in enumerate(rounds):
            begin = int(until[wanted[0] - own - 1]) if number and wanted[0] > own else 0
            last = number == len(rounds) - 1
            with cache.use(wanted):
                if last:
                    self.preloader.look_ahead(self.router, counts)
                end = rows[0].shape[0] if last else int(until[wanted[-1] - own])
                whole = not begin and last
                found.append(self._some([row if whole else row[begin:end] for row in rows],
                                        ends if whole else ends.clamp(begin, end) - begin))
        self.preloader.ended(self.router, time.perf_counter() - begun)
        if len(found) == 1:
            return found[0]
        return [torch.cat(same) for same in zip(*found, strict=True)]

    def _some(self, rows: list[Tensor], ends: Tensor) -> list[Tensor]:
        """One round."""
        if self.grouped:
            result = self.call(*rows, ends)
            self.several = isinstance(result, tuple)
            results = list(result) if self.several else [result]
        else:
            results = self._split(rows, ends)
        mine = {row.untyped_storage().data_ptr() for row in rows}
        return [one.clone() if one.untyped_storage().data_ptr() in mine else one for one in results]

    def _split(self, rows: list[Tensor], ends: Tensor) -> list[Tensor]:
        """As core.router.run_split, over the branches that have rows; one is run without any where none has."""
        until = ends.tolist()
        parts: list[Any] = []
        begin = 0
        for number, end in enumerate(until):
            if end > begin or (number == len(until) - 1 and not parts):
                own = [row[begin:end].clone(memory_format=torch.contiguous_format) for row in rows]
                parts.append(self.branches[number](*own))  # type: ignore[index]
            begin = end
        self.several = isinstance(parts[0], tuple)
        columns = list(zip(*parts, strict=True)) if self.several else [tuple(parts)]
        total = rows[0].shape[0]
        return [torch.cat([*same, same[0].new_zeros(total - begin, *same[0].shape[1:])]) for same in columns]

    def shapes(self, rows: Sequence[Tensor], ends: Tensor) -> list[Tensor]:
        """Results without values, for tracing."""
        module = self.branches if self.grouped else self.branches[0]  # type: ignore[index]
        tensors = dict(itertools.chain(module.named_parameters(), module.named_buffers()))
        empty = {name: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
                 for name, tensor in tensors.items()}
        result = torch.func.functional_call(module, empty, (*rows, ends) if self.grouped else tuple(rows))
        self.several = isinstance(result, tuple)
        return [one.new_empty(one.shape) for one in (result if self.several else (result,))]


# ---- the operator


def _runner(number: int) -> BranchRunner:
    found = _running.get(number)
    if found is None:
        raise InputError("the weights of preloaded branches are gone", why="the model that had them is",
                         do="keep the model as long as programs of it are called")
    return found


_library = torch.library.Library("anyshape_route", "FRAGMENT")
_library.define("preloaded(Tensor[] rows, Tensor ends, int number) -> Tensor[]",
                tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("preloaded", lambda rows, ends, number: _runner(number).run(rows, ends), "CompositeExplicitAutograd")
torch.library.register_fake("anyshape_route::preloaded",
                            lambda rows, ends, number: _runner(number).shapes(rows, ends), lib=_library)


def _no_gradient(ctx: Any, *grads: Any) -> Any:
    raise InputError("there is no gradient through preloaded branches",
                     why="a weight that is not in memory gets none",
                     do="train the model that the plan was applied to")


torch.library.register_autograd("anyshape_route::preloaded", _no_gradient, lib=_library)
preloaded = torch.ops.anyshape_route.preloaded.default
