"""Preloaded branches, the module that takes the place of a router's branches."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from anyshape.base.errors import InputError
from anyshape.route.core.router import Router
from anyshape.route.preload.layout import swap
from anyshape.route.preload.preloader import Preloader
from anyshape.route.preload.runner import BranchRunner, preloaded


class PreloadedBranches(nn.Module):
    """A router's branches whose weights are in memory when they run, and in a file besides. For `route.Router`:
    `branch_count`, and forward(*rows, ends).

    Its weights are no parameters. `state_dict` reads them from the file, under their names; they cannot be loaded,
    moved to another device or dtype, or trained. A copy shares them.
    """

    def __init__(self, router: Router, preloader: Preloader, number: int,
                 compile: Callable[..., Any] | None = None) -> None:
        super().__init__()
        branches, layout = router.branches, preloader.layout.routers[number]
        self.branch_count, self.training = router.branch_count, branches.training
        where = {place.key: at for at, place in enumerate(layout.places)}
        state = branches.state_dict(keep_vars=True)
        self.state: dict[str, Tensor | int] = {  # a tensor that stays in memory, or the number of a place
            name: where.get(id(tensor), tensor.detach()) for name, tensor in state.items()}
        swap(branches, {place.key: preloader.memory.tensor(place.start, place.shape, place.stride, place.dtype)
                        for place in layout.places})
        self.runner = BranchRunner(branches, router.grouped, preloader, number, compile)

    def forward(self, *operands: Tensor) -> Any:
        """operands: rows [S, *cell], sorted by branch, one or more of them; then the ends of the groups [branches]."""
        if self.training:
            raise InputError("preloaded branches do not train", where=self.runner.layout.name,
                             why="a weight that is not in memory gets no gradient",
                             do="call eval() on the model, or train the model that the plan was applied to")
        results = preloaded(list(operands[:-1]), operands[-1], self.runner.number)
        return tuple(results) if self.runner.several else results[0]

    @property
    def preloader(self) -> Preloader:
        return self.runner.preloader

    def train(self, mode: bool = True) -> PreloadedBranches:
        """As of every module; of the branches, too."""
        self.runner.branches.train(mode)
        return super().train(mode)

    def extra_repr(self) -> str:
        return f"{self.branch_count} branches, {self.preloader.limit} bytes of all routers in memory"

    def summary(self) -> dict[str, Any]:
        """What the cache of all preloaded routers has done, for reports."""
        counts = self.preloader.counts
        return {**asdict(counts), "hit_rate": counts.hit_rate, "held": self.preloader.held}

    # ---- what else modules can do

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        found = self._read() if any(isinstance(one, int) for one in self.state.values()) else {}
        for name, one in self.state.items():
            destination[prefix + name] = found[one] if isinstance(one, int) else one

    def _read(self) -> dict[int, Tensor]:
        """The tensors of all places, from the file."""
        layout, file = self.runner.layout, self.preloader.file
        found = {at: torch.empty_strided(place.shape, place.stride, dtype=place.dtype)
                 for at, place in enumerate(layout.places)}
        flat = {at: one.as_strided((one.numel(),), (1,)).view(torch.uint8) for at, one in found.items()}
        for number, branch in enumerate(layout.branches):
            parts = [torch.empty(size, dtype=torch.uint8) for _, size in branch.parts]
            file.read(int(self.preloader.first[self.runner.router]) + number,
                      [memoryview(part.numpy()) for part in parts])
            pieces = iter(parts)
            for at, place in enumerate(layout.places):
                if place.branch < 0:
                    part = next(pieces)
                    flat[at][number * len(part):(number + 1) * len(part)] = part
                elif place.branch == number:
                    begin = place.start - branch.parts[0][0]
                    flat[at][:] = parts[0][begin:begin + place.bytes]
        return found

    def _load_from_state_dict(self, *_: Any, **__: Any) -> None:
        raise InputError("weights of preloaded branches cannot be loaded", where=self.runner.layout.name,
                         why="they are in a file", do="load the model, and apply the plan to it again")

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        for dtype in {place.dtype for place in self.runner.layout.places}:
            probe = fn(torch.empty(0, dtype=dtype))
            if probe.dtype != dtype or probe.device.type != "cpu":
                raise InputError(f"preloaded branches do not become {probe.dtype} on {probe.device}",
                                 where=self.runner.layout.name, why="their weights are in a file",
                                 do="move the model, and apply the plan to it again")
        return super()._apply(fn, recurse)

    def __deepcopy__(self, memo: dict[int, Any]) -> PreloadedBranches:
        found = self.__class__.__new__(self.__class__)
        found.__dict__ = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(self).items()}
        memo[id(self)] = found
        return found

    def __reduce__(self) -> Any:
        raise InputError("preloaded branches cannot be pickled", where=self.runner.layout.name,
                         why="their weights are in a file of this process", do="save the state_dict")
