"""Rank consistency: before a step, all ranks compare what they are about to run, and on what.

Each rank sends a digest of its program, and its sizes. Where digests differ, the same error is raised on all ranks, and
nothing has run: ranks with other code, models or versions would wait for messages that never come. The exchange is one
small message a step.
"""
from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from anyshape.base.errors import AnyShapeError, LimitError, RankError
from anyshape.runtime.collectives.messages import by_torch
from anyshape.runtime.collectives.process_group import ProcessMesh

Error = TypeVar("Error", bound=AnyShapeError)
NUMBERS = 15  # sizes that travel with the digest
FAILED = "failed: "  # what a rank is about to run that has no program
BEFORE, SHOWN = 60, 200  # characters of texts that differ: before the difference, and all that are said


def digest(*texts: str) -> int:
    """A whole number of i64 that differs where a text differs."""
    found = hashlib.blake2b(digest_size=8)
    for text in texts:
        found.update(len(text).to_bytes(8, "little"))
        found.update(text.encode())
    return int.from_bytes(found.digest(), "little", signed=True)


def exchanged(mesh: ProcessMesh, program: int, own: Sequence[int], text: str) -> list[list[int]]:
    """The numbers of all ranks. program: the digest of `text`, what a rank is about to run; who runs the same has as
    many numbers.

    Raises:
        RankError: ranks run other programs, or one has failed to make its own; nothing has run. Or a step before has
            failed while messages were under way, here or on another rank.
    """
    if mesh.failure is not None:
        known = mesh.failure
        raise RankError(known.what, where=known.where, why=known.why, do=known.do)
    mesh.met += 1
    first = _gathered(mesh, [program, *own[:NUMBERS], *[0] * (NUMBERS - len(own))])
    differing = [rank for rank, one in enumerate(first) if one[0] != first[0][0]]
    if differing:
        words = said(mesh, text, len(text))
        failed = [rank for rank, one in enumerate(words) if one.startswith(FAILED)]
        if failed:
            raise refusal(mesh, f"rank {', '.join(map(str, failed[:8]))} failed before the step",
                          why=f"rank {failed[0]} said: {words[failed[0]].removeprefix(FAILED)[:SHOWN]}",
                          do="read what it has raised; no rank has run anything of the step, and all may take the next")
        here, there = around_difference(words[0], words[differing[0]])
        raise refusal(mesh, f"ranks run other programs than rank 0: {', '.join(map(str, differing[:8]))}",
                      why=f"rank 0 is about to run {here!r}, rank {differing[0]} {there!r}; graphs differ where code, "
                      "settings or the kind of a batch do",
                      do="start all ranks with the same code and settings, give batches of one kind, and call save, "
                      "load and whole on all ranks")
    found = [one[1:1 + len(own)] for one in first]
    if len(own) > NUMBERS:
        found = [[*one, *more] for one, more in zip(found, _gathered(mesh, own[NUMBERS:]), strict=True)]
    return found


def together(mesh: ProcessMesh, what: str) -> None:
    """All ranks do the same now, and know it: one that does something else would let the others wait.

    Raises:
        RankError: some do something else; nothing has been done.
    """
    exchanged(mesh, digest(what), [], what)


def fail_together(mesh: ProcessMesh, error: BaseException) -> None:
    """Says to ranks that wait to compare programs that this one has none: it failed before that. They raise RankError;
    whoever calls this raises its own error.

    Raises:
        AnyShapeError: all ranks failed alike, and this is not rank 0: one line of `error`.
    """
    words = (str(error).strip().splitlines() or [""])[0]
    try:
        together(mesh, f"{FAILED}{type(error).__name__}: {words}")
    except RuntimeError:  # others run something, or failed by something else, or have ended
        return
    short = told_once(mesh.rank, error) if isinstance(error, AnyShapeError) else error
    if short is not error:
        raise short from None


def _gathered(mesh: ProcessMesh, own: Sequence[int]) -> list[list[int]]:
    sent = torch.tensor(list(own), dtype=torch.int64)
    found = torch.empty(mesh.mesh.world * len(own), dtype=torch.int64)
    by_torch("all_gather_single")(found, sent, group=mesh.control)
    return found.view(mesh.mesh.world, len(own)).tolist()  # type: ignore[no-any-return]


def agree(mesh: ProcessMesh, own: dict[str, str]) -> None:
    """Compares named texts (versions, the model, the program) over all ranks.

    Raises:
        RankError: one differs; four parts on rank 0, one line elsewhere.
    """
    every: list[Any] = [None] * mesh.mesh.world
    dist.all_gather_object(every, {name: digest(text) for name, text in own.items()}, group=mesh.control)
    differing = [name for name in own if len({each.get(name) for each in every}) > 1]
    if differing:
        first = differing[0]
        others = [rank for rank, each in enumerate(every) if each.get(first) != every[0].get(first)]
        words = said(mesh, own[first], len(own[first]))
        here, there = around_difference(words[0], words[others[0]])
        raise refusal(mesh, f"ranks differ in {first}: {', '.join(map(str, others[:8]))} from rank 0",
                      why=f"rank 0 has {here!r}, rank {others[0]} has {there!r}",
                      do="start all ranks with the same code, model, settings and versions")


def around_difference(first: str, second: str) -> tuple[str, str]:
    """What two texts have where they begin to differ, and a bit before and after; of several lines, the first that
    differ."""
    lines = itertools.zip_longest(first.splitlines(), second.splitlines(), fillvalue="")
    first, second = next((pair for pair in lines if pair[0] != pair[1]), (first, second))
    place = next((place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
                 min(len(first), len(second)))
    begin = max(0, place - BEFORE)
    short = [("..." if begin else "") + one[begin:begin + SHOWN] + ("..." if len(one) > begin + SHOWN else "")
             for one in (first, second)]
    return short[0], short[1]


def said(mesh: ProcessMesh, own: str, most: int = 600) -> list[str]:
    """What each rank says, the first `most` characters of it."""
    found: list[Any] = [""] * mesh.mesh.world
    dist.all_gather_object(found, own[:most], group=mesh.control)
    return found


def refusal(mesh: ProcessMesh, what: str, *, why: str, do: str) -> RankError:
    """The error with its four parts on rank 0, and one line elsewhere."""
    return told_once(mesh.rank, RankError(what, where=f"{mesh.mesh}, found before the step", why=why, do=do))


def told_once(rank: int, error: Error) -> Error:
    """An error that all ranks have: as it is on rank 0, one line of it elsewhere."""
    if rank == 0 or error.what.startswith(f"rank {rank}: "):
        return error
    short = type(error)(f"rank {rank}: {error.what} (see rank 0)")
    if isinstance(short, LimitError):
        assert isinstance(error, LimitError)
        short.least = error.least
    return short
