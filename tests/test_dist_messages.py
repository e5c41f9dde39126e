"""What messages of collectives consist of: packed, exchanged by hand and unpacked, against the meaning of the ops."""
from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from anyshape.base.errors import VerifyError
from anyshape.dist.lower import message_elements
from anyshape.dist.mesh import mesh_of
from anyshape.dist.placement import local_count
from anyshape.ir.graph import Node, Value
from anyshape.ir.types import TensorType
from anyshape.runtime.collectives import messages, process_group
from anyshape.runtime.collectives.messages import Line, begin, finish
from anyshape.runtime.collectives.parts import cut
from anyshape.runtime.collectives.released import release, restore
from anyshape.runtime.collectives.simulate import result_of


class Arrived:
    """Work that is done."""

    def wait(self) -> None:
        """It has come."""


class Exchange:
    """torch.distributed of all ranks in one process: what was launched is exchanged when all have launched it."""

    ReduceOp = torch.distributed.ReduceOp

    def __init__(self) -> None:
        self.sent: list[tuple[str, Tensor, Tensor]] = []
        self.rank = 0  # that launches
        self.parcels: list[tuple[int, int, Tensor]] = []  # of point to point messages: from, to, what
        self.places: list[tuple[int, int, Tensor]] = []  # the same of what is expected

    def get_global_rank(self, group: Any, place: int) -> int:
        return place

    def isend(self, parcel: Tensor, to: int, group: Any, tag: int) -> Arrived:
        self.parcels.append((self.rank, to, parcel))
        return Arrived()

    def irecv(self, place: Tensor, source: int, group: Any, tag: int) -> Arrived:
        self.places.append((source, self.rank, place))
        return Arrived()

    def all_reduce(self, message: Tensor, reduce: Any, group: Any, async_op: bool) -> str:
        self.sent.append(("reduce", message, message))
        return "work"

    def all_gather_into_tensor(self, out: Tensor, own: Tensor, group: Any, async_op: bool) -> str:
        self.sent.append(("gather", out, own))
        return "work"

    def reduce_scatter_tensor(self, out: Tensor, rows: Tensor, group: Any, async_op: bool) -> str:
        self.sent.append(("scatter", out, rows))
        return "work"

    def all_to_all_single(self, out: Tensor, rows: Tensor, group: Any, async_op: bool) -> str:
        self.sent.append(("exchange", out, rows))
        return "work"

    def arrive(self) -> None:
        for (source, to, parcel), place in zip(sorted(self.parcels, key=lambda one: one[:2]),
                                               sorted(self.places, key=lambda one: one[:2]), strict=True):
            assert place[:2] == (source, to)
            place[2].copy_(parcel)
        given = [one.clone() for _, _, one in self.sent]
        ranks = len(given)
        for rank, (kind, out, _) in enumerate(self.sent):
            if kind == "gather":
                out.copy_(torch.cat(given))
            elif kind == "exchange":
                out.copy_(torch.cat([one.view(ranks, -1)[rank] for one in given]))
            else:
                sums = torch.stack(given).sum(0)
                out.copy_(sums.view(ranks, -1)[rank] if kind == "scatter" else sums)


def of(dim: int, outer: int, n: int, inner: int, ranks: int, rank: int) -> tuple[int, int, int, int, int]:
    low, high = local_count(n, ranks, rank)
    return dim, outer, n, inner, high - low


def elements(op: str, pieces: list[Tensor], numbers: list[Any], ranks: int) -> int:
    """How long the message of a rank is, by the formula that programs have (dist/lower.py)."""
    kinds = [TensorType("f64", tuple(one.shape)) for one in pieces]
    values = tuple(Value(f"x{k}", kind) for k, kind in enumerate(kinds))
    attrs: list[tuple[str, Any]] = [("parts", tuple(numbers[:len(pieces)]))]
    attrs += [("into", tuple(numbers[1:]))] if op == "all_to_all" else []
    found = message_elements(Node(op, values, tuple(attrs), values), ranks)
    assert isinstance(found, int)
    return found


@pytest.mark.parametrize("by_gloo", [False, True], ids=("collectives", "gloo"))
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_messages_give_what_the_collective_means(op: str, ranks: int, by_gloo: bool,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    # (dim, outer, n, inner) of the wholes: even, uneven, fewer than ranks, one, none
    for count in (6, 7, 2, 1, 0):
        cuts = [(0, 1, count, 2), (1, 2, count, 3)]
        whole = [[torch.randn(2 * count, 4).double(), torch.randn(3, 6 * count).double()] for _ in range(ranks)]
        if op == "all_to_all":
            cuts, whole = [cuts[0]], [[one[0]] for one in whole]
        parts = [[of(*one, ranks, rank) for one in cuts] for rank in range(ranks)]
        into = [[of(1, 1, 4, 1, ranks, rank)] for rank in range(ranks)]
        dealt = op in ("all_gather", "all_to_all")
        pieces = [[cut(one, part, ranks, rank).clone() if dealt else one for one, part in zip(
            whole[0 if dealt else rank], parts[rank], strict=True)] for rank in range(ranks)]
        exchange = Exchange()
        monkeypatch.setattr(messages, "dist", exchange)
        numbers = [[*parts[rank], *(into[rank] if op == "all_to_all" else [])] for rank in range(ranks)]
        length = elements(op, pieces[0], numbers[0], ranks)
        given = [torch.full((length,), float("nan"), dtype=torch.float64) for _ in range(ranks)]
        begun = []
        for rank in range(ranks):
            exchange.rank = rank
            begun.append(begin(Line(None, ranks, rank, by_gloo), op, given[rank], pieces[rank], "add", numbers[rank]))
        sends = ranks > 1 and length > 0
        assert [one is not None for one in begun] == [sends] * ranks
        apart = by_gloo and (op == "all_gather" or (op == "reduce_scatter" and ranks == 2))
        assert len(exchange.sent) == (ranks if sends and not apart else 0)
        if apart and sends:  # each rank sends others the line that they need, and nothing else
            lines = {"all_gather": ranks, "reduce_scatter": ranks + 1}[op]
            assert sum(one.numel() for _, _, one in exchange.parcels) == ranks * (ranks - 1) * (length // lines)
        exchange.arrive()
        for rank in range(ranks):
            attrs = {"combine": "add", "into": into[rank]}
            wanted = [result_of(op, [one[place] for one in pieces], [one[place] for one in parts], attrs, rank)
                      for place in range(len(cuts))]
            found = [torch.full_like(one, float("nan")) for one in wanted]
            finish(Line(None, ranks, rank, by_gloo), op, given[rank], found, numbers[rank])
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_call_that_failed_lets_go_of_the_messages_of_its_thread_alone() -> None:
    own, other = torch.zeros(3), torch.zeros(3)
    before = dict(process_group.UNDER_WAY)
    process_group.UNDER_WAY[own.data_ptr()] = process_group.UnderWay("work", threading.get_ident())
    process_group.UNDER_WAY[other.data_ptr()] = process_group.UnderWay("work", threading.get_ident() + 1)
    try:
        process_group.abandon()
        assert process_group.UNDER_WAY.keys() - before.keys() == {other.data_ptr()}
    finally:
        process_group.UNDER_WAY.pop(other.data_ptr())


def test_a_message_that_was_not_launched_is_not_read() -> None:
    mesh = mesh_of(data=2)
    process_group.MESHES[str(mesh)] = process_group.ProcessMesh(mesh, 0, {"data": None})
    try:
        with pytest.raises(VerifyError, match="all_reduce along data is waited for, and is not under way"):
            process_group.wait([torch.zeros(3)], [torch.zeros(3)], "all_reduce", str(mesh), "data", [], 0)
    finally:
        del process_group.MESHES[str(mesh)]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is mapped on Linux")
@pytest.mark.parametrize("count", [1 << 14, 1 << 18, (1 << 19) + 5])
def test_tensors_of_which_a_rank_has_a_part_take_no_memory(count: int) -> None:
    tensor = torch.ones(count)
    before = tensor.data_ptr()
    release(tensor)
    assert tensor.isnan().all() and tensor.data_ptr() != before
    pages = {line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines()
             if int(line.split("-")[0], 16) <= tensor.data_ptr() < int(line.split("-")[1].split()[0], 16)}
    (node,) = pages
    other = torch.ones(count)
    release(other)
    assert node != "0" and all(
        line.split()[4] == node for line in Path("/proc/self/maps").read_text().splitlines()
        if int(line.split("-")[0], 16) <= other.data_ptr() < int(line.split("-")[1].split()[0], 16))
    restore(tensor, torch.full((count,), 2.0))
    assert tensor.sum() == 2 * count
