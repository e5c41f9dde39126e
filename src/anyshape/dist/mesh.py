"""Device mesh: ranks in a box with named axes, each with the latency and bandwidth of its links.

    mesh(data=4, tensor=8)   32 ranks; rank = data * 8 + tensor: the last axis runs fastest, as in torch's DeviceMesh
"""
from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from anyshape.base.errors import ConfigError

# a collective over an axis costs alpha seconds a message and beta seconds a byte (Hockney's model, 1994); these are of
# gloo on one machine, until `anyshape calibrate` has measured better ones
LOOPBACK_ALPHA, LOOPBACK_BETA = 1e-4, 1 / 2e9


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a mesh.

    name: an identifier. size: ranks along it. alpha: seconds a message takes to begin. beta: seconds a byte.
    """

    name: str
    size: int
    alpha: float = LOOPBACK_ALPHA
    beta: float = LOOPBACK_BETA

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ConfigError(f"an axis of a mesh is called {self.name!r}", why="axes are named by identifiers",
                              do='give it a name such as "data"')
        if not isinstance(self.size, int) or isinstance(self.size, bool) or self.size < 1:
            raise ConfigError(f"the axis {self.name} of a mesh has the size {self.size!r}",
                              why="it is a number of ranks, at least 1", do="set a whole number")
        if self.alpha < 0 or self.beta < 0:
            raise ConfigError(f"the axis {self.name} of a mesh has alpha {self.alpha!r} and beta {self.beta!r}",
                              why="they are seconds a message and seconds a byte", do="set numbers from 0 on")


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axes in order; the last one runs fastest.

    Raises:
        ConfigError: there is no axis, or two have one name.
    """

    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"a mesh has the axes {', '.join(names) or 'none'}",
                              why="it has at least one, and each a name of its own", do="name each axis once")

    @property
    def world(self) -> int:
        """Number of ranks."""
        total = 1
        for axis in self.axes:
            total *= axis.size
        return total

    def axis(self, name: str) -> Axis:
        """The axis of that name; KeyError if there is none."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise KeyError(f"{self} has no axis {name}")

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank is along each axis."""
        assert 0 <= rank < self.world, (rank, self.world)
        found = {}
        for axis in reversed(self.axes):
            rank, found[axis.name] = divmod(rank, axis.size)
        return {axis.name: found[axis.name] for axis in self.axes}

    def rank(self, coordinates: dict[str, int]) -> int:
        """The rank at these coordinates."""
        found = 0
        for axis in self.axes:
            found = found * axis.size + coordinates[axis.name]
        return found

    def group(self, rank: int, name: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` along the axis `name` only, in order along it."""
        here = self.coordinates(rank)
        return tuple(self.rank({**here, name: place}) for place in range(self.axis(name).size))

    def groups(self, name: str) -> Iterator[tuple[int, ...]]:
        """Every group along an axis, each once, in the order of its first rank."""
        for rank in range(self.world):
            group = self.group(rank, name)
            if group[0] == rank:
                yield group

    def __str__(self) -> str:
        return f"mesh({', '.join(f'{axis.name}={axis.size}' for axis in self.axes)})"


def mesh_of(text: str | None = None, /, **sizes: int) -> Mesh:
    """A mesh with the loopback's links: by names, `mesh_of(data=4, tensor=8)`, or from its text form.

    Raises:
        ConfigError: the text is no mesh.
    """
    if text is not None:
        found = re.fullmatch(r"\s*mesh\(([^()]*)\)\s*", text)
        entries = [re.fullmatch(r"\s*(\w+)\s*=\s*(\d+)\s*", one)
                   for one in (found.group(1).split(",") if found else [""])]
        if None in entries:
            raise ConfigError(f"{text!r} is no mesh", why="its text form is mesh(name=size, ...)",
                              do='write, for example, "mesh(data=2, tensor=4)"')
        return Mesh(tuple(Axis(one.group(1), int(one.group(2))) for one in entries if one is not None))
    return Mesh(tuple(Axis(name, size) for name, size in sizes.items()))
