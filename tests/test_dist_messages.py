"""What messages of collectives consist of: packed, exchanged by hand and unpacked, against the meaning of the ops."""
from __future__ import annotations

import threading
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
from anyshape.runtime.collectives.simulate import result_of


class Exchange:
    """torch.distributed of all ranks in one process: what was launched is exchanged when all have launched it."""

    ReduceOp = torch.distributed.ReduceOp

    def __init__(self) -> None:
        self.sent: list[tuple[str, Tensor, Tensor]] = []

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


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_messages_give_what_the_collective_means(op: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
        begun = [begin(Line(None, ranks, rank), op, given[rank], pieces[rank], "add", numbers[rank])
                 for rank in range(ranks)]
        sends = ranks > 1 and length > 0
        assert begun == ["work" if sends else None] * ranks
        assert len(exchange.sent) == (ranks if sends else 0)
        exchange.arrive()
        for rank in range(ranks):
            attrs = {"combine": "add", "into": into[rank]}
            wanted = [result_of(op, [one[place] for one in pieces], [one[place] for one in parts], attrs, rank)
                      for place in range(len(cuts))]
            found = [torch.full_like(one, float("nan")) for one in wanted]
            finish(Line(None, ranks, rank), op, given[rank], found, numbers[rank])
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
            process_group.wait([torch.zeros(3)], torch.zeros(3), "all_reduce", str(mesh), "data", [])
    finally:
        del process_group.MESHES[str(mesh)]
