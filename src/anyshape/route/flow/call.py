"""Abstract values of the dependence analysis, and one operator's call on them."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anyshape.route.flow.owners import NONE, TOP, CellSets, moved, uniform


@dataclass(frozen=True, eq=False)
class TensorValue:
    """A tensor of the program. owners: int32, broadcasts to `shape`. known: its numbers, where the model fixes them."""

    owners: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    known: Tensor | None = None

    @property
    def constant(self) -> bool:
        """Whether no cell is in it."""
        return bool((self.owners == NONE).all())

    @property
    def rank(self) -> int:
        return len(self.shape)


class NoRule(Exception):
    """An operator is called in a way that its rule does not cover; the caller joins everything."""


@dataclass(frozen=True, eq=False)
class OperatorCall:
    """One call: the operator, its arguments with values in the places of tensors, and the shapes of its results.

    named: the arguments by their names in the schema, with defaults; `self` is called `input`.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    named: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    sets: CellSets

    def value(self, name: str = "input") -> TensorValue:
        found = self.named.get(name)
        if not isinstance(found, TensorValue):
            raise NoRule(f"{name} is no tensor")
        return found

    def values(self) -> list[TensorValue]:
        return values_in((self.args, self.kwargs))

    def joined(self, rank: int, *names: str) -> Tensor:
        """The union of operands as they broadcast, with `rank` dims; an operand that is left out is of no cell."""
        found = [wide(one.owners, rank) for name in names if isinstance(one := self.named.get(name), TensorValue)]
        return self.sets.join(*found) if found else uniform(NONE, rank)

    def dims(self, rank: int, name: str = "dim") -> tuple[int, ...]:
        """An argument that names dims, from 0 on; all where it names none."""
        given = self.named.get(name)
        if given is None or (isinstance(given, (list, tuple)) and not given):
            return tuple(range(rank))
        one = (given,) if isinstance(given, int) else tuple(given)
        return tuple(dim % rank for dim in one) if rank else ()

    def rerun(self, data: int = 1) -> list[Tensor]:
        """The operator itself on owners: its first `data` arguments are moved, others have their known numbers."""
        first = next(iter(values_in(self.args)))
        if data == 1 and isinstance(self.args[0], TensorValue):
            return _listed(moved(first.owners, first.shape, lambda one: self._run((one,))))
        flat = [(one.owners + 1).expand(one.shape) for one in values_in(self.args[:data])]
        try:
            found = _listed(self._run(tuple(flat), data))
        except (RuntimeError, NotImplementedError):
            found = [one.to(torch.int32) for one in _listed(self._run(tuple(one.double() for one in flat), data))]
        return [one - 1 for one in found]

    def _run(self, moving: tuple[Tensor, ...], data: int = 1) -> Any:
        rest = iter(moving)
        args = tuple(put(one, (lambda _: next(rest)) if place < data else numbers)
                     for place, one in enumerate(self.args))
        return self.op(*args, **{name: put(one, numbers) for name, one in self.kwargs.items()})


def numbers(value: TensorValue) -> Tensor:
    """A value's known numbers."""
    if value.known is None:
        raise NoRule("an index is not known")
    return value.known


def _listed(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)


def put(argument: Any, replace: Any) -> Any:
    """An argument with each value in it replaced."""
    if isinstance(argument, TensorValue):
        return replace(argument)
    if isinstance(argument, (list, tuple)):
        return type(argument)(put(one, replace) for one in argument)
    return {name: put(one, replace) for name, one in argument.items()} if isinstance(argument, dict) else argument


def values_in(argument: Any) -> list[TensorValue]:
    """The values of an argument, in order."""
    if isinstance(argument, TensorValue):
        return [argument]
    if isinstance(argument, dict):
        argument = list(argument.values())
    if isinstance(argument, (list, tuple)):
        return [value for one in argument for value in values_in(one)]
    return []


def wide(owners: Tensor, rank: int) -> Tensor:
    """Owners with dims of size 1 before them, as broadcasting has it."""
    return owners.reshape(*(1,) * (rank - owners.dim()), *owners.shape)


def union(sets: CellSets, values: Sequence[TensorValue]) -> int:
    """Every cell of some values."""
    found = NONE
    for value in values:
        found = int(sets.join(torch.tensor(found, dtype=torch.int32),
                              torch.tensor(sets.all_of(value.owners), dtype=torch.int32)))
        if found == TOP:
            break
    return found
