"""Meshes and placements: their text forms, where ranks are, and what is refused."""
from __future__ import annotations

import pytest

from anyshape.base.errors import ConfigError, ParseError
from anyshape.dist.mesh import Axis, Mesh, mesh_of
from anyshape.dist.placement import (
    REPLICATE,
    Partial,
    Shard,
    layout_of,
    layout_text,
    local_count,
    placement_of,
)
from anyshape.sym.expr import symbol


def test_ranks_and_coordinates_are_inverse() -> None:
    mesh = mesh_of(data=2, tensor=3, pipe=2)
    assert mesh.world == 12
    assert [mesh.rank(mesh.coordinates(rank)) for rank in range(12)] == list(range(12))
    assert mesh.coordinates(1) == {"data": 0, "tensor": 0, "pipe": 1}
    assert mesh.group(1, "tensor") == (1, 3, 5)
    assert sorted(rank for group in mesh.groups("tensor") for rank in group) == list(range(12))
    assert mesh_of(str(mesh)) == mesh


def test_text_forms_come_back() -> None:
    s = symbol("s0")
    for placement in (REPLICATE, Shard(1), Shard(0, 6, 4), Shard(2, s, s * 2 + 1), Partial("maximum")):
        assert placement_of(str(placement)) == placement
    layout = (Shard(0, s, s + 1), REPLICATE, Partial())
    assert layout_of(layout_text(layout)) == layout


def test_parts_cover_everything_once() -> None:
    for n in range(12):
        for ranks in range(1, 6):
            parts = [local_count(n, ranks, rank) for rank in range(ranks)]
            assert [i for low, high in parts for i in range(low, high)] == list(range(n))


def test_what_is_no_mesh_or_placement_says_so() -> None:
    for wrong in (lambda: Axis("a b", 2), lambda: Axis("a", 0), lambda: Mesh(()), lambda: mesh_of("data=2"),
                  lambda: Mesh((Axis("a", 2), Axis("a", 2)))):
        with pytest.raises(ConfigError, match="why:"):
            wrong()
    with pytest.raises(ParseError):
        placement_of("S(x)")
