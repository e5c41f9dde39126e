"""Placement of experts over ranks as data: slots, who serves whom, and moves; no process is started."""
from __future__ import annotations

import numpy as np
import pytest

from anyshape.base.errors import InputError
from anyshape.dist.experts import ExpertMap, cells_sent


def random_map(draw: np.random.Generator, experts: int, ranks: int) -> ExpertMap:
    copies = draw.random((experts, ranks)) < 0.3
    copies[np.arange(experts), draw.integers(0, ranks, experts)] = True
    return ExpertMap(copies)


def test_every_cell_goes_to_a_copy_and_its_own_rank_comes_first() -> None:
    draw = np.random.default_rng(0)
    for experts, ranks in ((1, 1), (7, 2), (3, 5), (64, 8)):
        one = random_map(draw, experts, ranks)
        assert sum(len(one.slots(rank)) for rank in range(ranks)) == one.copies.sum()
        for source in range(ranks):
            serving = one.serving(source)
            assert one.copies[np.arange(experts), serving].all()
            assert (serving[one.copies[:, source]] == source).all()
            places, begins = one.places(source)
            for expert in range(experts):  # the slot that a place stands for is that expert's
                slots = one.slots(int(serving[expert]))
                assert slots[places[expert] - begins[serving[expert]]] == expert


def test_replicas_have_equal_shares() -> None:
    one = ExpertMap(np.array([[True, True, False, False]]))
    loads = [np.array([10])] * 4
    assert cells_sent(loads, one).sum(0).tolist() == [20, 20, 0, 0]


def test_moves_make_one_placement_of_another() -> None:
    draw = np.random.default_rng(1)
    for experts, ranks in ((7, 2), (3, 5), (64, 8)):
        before, after = random_map(draw, experts, ranks), random_map(draw, experts, ranks)
        moves = before.moves(after)
        assert all(before.copies[one.expert, one.source] and not before.copies[one.expert, one.target] for one in moves)
        made = before.copies.copy()
        made[[one.expert for one in moves], [one.target for one in moves]] = True
        assert not (after.copies & ~made).any() and len(moves) == (after.copies & ~before.copies).sum()
    assert not before.moves(before)


def test_what_is_no_placement_says_so() -> None:
    for copies in (np.zeros((2, 2), bool), np.ones(3, bool), np.ones((0, 2), bool)):
        with pytest.raises(InputError) as caught:
            ExpertMap(copies)
        assert caught.value.why and caught.value.do
    with pytest.raises(InputError):
        ExpertMap.contiguous(4, 2).moves(ExpertMap.contiguous(5, 2))
