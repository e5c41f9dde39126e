"""A rank that is lost in a step, a program or a save: what the others say of it, in place of gloo's or NCCL's words.

Processes that end close their connections, so whoever waits for one of them hears of it at once. Which rank it was, is
found where it can be: by the words that a failing rank leaves in torch's store, and by the processes of this machine
that are not there any more. Every step of a program that is a collective ends here when it fails
(runtime/call/call_frame.py), and so do saves, loads, and what is agreed on before a step.
"""
from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from traceback import clear_frames
from typing import Any

import torch.distributed as dist

from anyshape import torch_compat as compat
from anyshape.base.errors import RankError
from anyshape.runtime.collectives.process_group import ProcessMesh, close

# what gloo, NCCL and their connections say where the other side is not there any more
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused",
        "Timed out waiting", "Application timeout", "ncclRemoteError", "remote process exited", "Socket closed")
SOONEST = 20  # times that are looked for who it was
DO = ("read what the lost rank has said last; torchrun --max-restarts starts all ranks again, and "
      "step.load(folder, missing_ok=True) goes on from the last checkpoint, as a new step in the same processes does "
      "where all of them are left (docs/distributed.md)")


@dataclass(frozen=True, slots=True)
class Peer:
    """A process of a rank."""

    machine: str
    process: int

    def is_gone(self) -> bool:
        """True where it ran on this machine, and does not any more."""
        if self.machine != socket.gethostname():
            return False
        status = Path(f"/proc/{self.process}/stat")
        if Path("/proc/self/stat").exists():
            try:  # a zombie has ended, and nobody has asked for it yet
                return status.read_text(errors="replace").rpartition(")")[2].split()[0] in ("Z", "X")
            except OSError:
                return True
        try:
            os.kill(self.process, 0)
        except OSError:
            return True
        return False


KNOWN: dict[int, Peer] = {}  # the processes of ranks, by rank; a group that begins anew has its own


def meet_peers(mesh: ProcessMesh) -> None:
    """Notes the processes of all ranks, and forgets what they said of steps before; all call this."""
    store = _store()
    if store is not None:
        _set(store, _key("lost", mesh.rank), "")
    every: list[Any] = [None] * mesh.mesh.world
    dist.all_gather_object(every, (socket.gethostname(), os.getpid()), group=mesh.control)
    KNOWN.clear()
    KNOWN.update({rank: Peer(*one) for rank, one in enumerate(every)})


def announce() -> None:
    """Leaves in torch's store which process this rank is: a program with collectives was made, and ranks do not meet
    for that."""
    store = _store()
    if store is not None:
        _set(store, _key("process", dist.get_rank()), f"{os.getpid()} {socket.gethostname()}")


def _peers() -> dict[int, Peer]:
    """The processes that are known."""
    found = {}
    for rank in range(dist.get_world_size()):
        process, _, machine = _get(_key("process", rank)).partition(" ")
        if process:
            found[rank] = Peer(machine, int(process))
    return {**KNOWN, **found}


def leave_words(error: BaseException) -> None:
    """What ends this rank, for the others."""
    store = _store()
    if store is not None:
        _set(store, _key("lost", dist.get_rank()), f"{os.getpid()} {_words(error)}")


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def leave(mesh: ProcessMesh, error: BaseException) -> None:
    """A step has failed on this rank where others may wait for its messages: they hear of it at once, and who it was.
    error: RankError where it has failed because of another rank."""
    if isinstance(error, RankError):
        failure = error
    else:
        leave_words(error)
        failure = RankError(f"rank {mesh.rank} has failed in a step before", where=str(mesh.mesh), why=_words(error),
                            do=DO)
    clear_frames(error.__traceback__)  # which may hold a group: it is closed when nobody does
    close(mesh, failure)


@contextmanager
def told_of_lost_ranks() -> Iterator[None]:
    """Inside, what gloo or NCCL say where a rank is lost is raised as what `lost` makes of it."""
    try:
        yield
    except RuntimeError as error:
        found = lost(error)
        if found is None:
            raise
        raise found from error


def lost(error: BaseException) -> RankError | None:
    """The error of a call in which another rank was lost: four parts on the first rank that is left, one line
    elsewhere; None where `error` is of another kind."""
    words = str(error)
    if isinstance(error, RankError) or not dist.is_initialized() or not any(one in words for one in LOST):
        return None
    here, known = dist.get_rank(), _peers()
    others = [rank for rank in range(dist.get_world_size()) if rank != here]
    for _ in range(SOONEST):
        found = {rank: said for rank in others if (said := _said(rank, known))}
        gone = [rank for rank in others if rank in found or (rank in known and known[rank].is_gone())]
        if gone:
            break
        time.sleep(0.05)  # a process closes its connections a moment before it has ended
    what = f"rank {', '.join(map(str, gone))} is lost" if gone else "another rank is lost"
    first = min(rank for rank in range(dist.get_world_size()) if rank not in gone)
    if here != first:
        return RankError(f"rank {here}: {what} (see rank {first})")
    why = "; ".join(f"rank {rank} said: {said}" for rank, said in found.items()) or (
        "its process has ended without a word, as where it had fewer batches, or the system has killed it" if gone
        else "its connection is closed; its process is not known, or ran on another machine")
    where = ", ".join(f"process {known[rank].process} on {known[rank].machine}" for rank in gone if rank in known)
    return RankError(what, where=f"{where or 'a collective'}, found while waiting for it", why=why, do=DO)


def _key(what: str, rank: int) -> str:
    return f"anyshape/{what}/{rank}"


def _said(rank: int, known: dict[int, Peer]) -> str:
    """What a rank has said last; not what the process said that was this rank before torchrun started all again."""
    process, _, words = _get(_key("lost", rank)).partition(" ")
    return words if process and (rank not in known or known[rank].process == int(process)) else ""


def _get(key: str) -> str:
    store = _store()
    try:
        return store.get(key).decode() if store is not None and store.check([key]) else ""
    except RuntimeError:  # it was of a process that is lost
        return ""


def _set(store: Any, key: str, value: str) -> None:
    try:
        store.set(key, value)
    except RuntimeError:  # the store's own process is lost: nobody can read it
        return


def _store() -> Any:
    """What all processes of torch.distributed share; None where this version does not give it."""
    get = compat.get("torch.distributed.distributed_c10d._get_default_store")
    return None if get is None or not dist.is_initialized() else get()
