"""A rank that is lost in a step: what the others say of it, in place of what gloo or NCCL say of a connection.

Processes that end close their connections, so whoever waits for one of them hears of it at once. Which rank it was, is
found where it can be: by the words that a failing rank leaves in torch's store, and by the processes of this machine
that are not there any more.
"""
from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from anyshape import torch_compat as compat
from anyshape.runtime.collectives.agreement import RankError
from anyshape.runtime.collectives.process_group import ProcessMesh

# what gloo, NCCL and their connections say where the other side is not there any more
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused",
        "Timed out waiting", "Application timeout", "ncclRemoteError", "remote process exited", "Socket closed")
SOONEST = 20  # times that are looked for who it was
DO = ("read what the lost rank has said last; torchrun --max-restarts=3 starts all ranks again, and "
      "step.load(folder, missing_ok=True) goes on from the last checkpoint")


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


def peers(mesh: ProcessMesh) -> tuple[Peer, ...]:
    """The processes of all ranks; all call this."""
    every: list[Any] = [None] * mesh.mesh.world
    dist.all_gather_object(every, (socket.gethostname(), os.getpid()), group=mesh.control)
    return tuple(Peer(*one) for one in every)


def leave_words(error: BaseException) -> None:
    """What ends this rank, for the others."""
    store = _store()
    if store is not None:
        words = (str(error).strip().splitlines() or [""])[0]
        try:
            store.set(_key(dist.get_rank()), f"{type(error).__name__}: {words}")
        except RuntimeError:  # the store's own process is lost: nobody can read it
            return


def lost(error: BaseException, known: Sequence[Peer]) -> RankError | None:
    """The error of a step in which another rank was lost: four parts on rank 0, one line elsewhere; None where `error`
    is of another kind."""
    words = str(error)
    if not any(one in words for one in LOST):
        return None
    here = dist.get_rank()
    for _ in range(SOONEST):
        found = {rank: said for rank in range(len(known)) if rank != here and (said := _said(rank))}
        gone = [rank for rank, one in enumerate(known) if rank != here and (rank in found or one.is_gone())]
        if gone:
            break
        time.sleep(0.05)  # a process closes its connections a moment before it has ended
    if gone:
        what = f"rank {', '.join(map(str, gone))} is lost"
    else:
        what = "another rank is lost"
    if here:
        return RankError(f"rank {here}: {what}")
    why = "; ".join(f"rank {rank} said: {said}" for rank, said in found.items()) or (
        "its process has ended without a word, as where the system has killed it" if gone
        else "its connection is closed, and it ran on another machine")
    where = ", ".join(f"process {known[rank].process} on {known[rank].machine}" for rank in gone)
    return RankError(what, where=f"{where or 'in a step'}, found while waiting for it", why=why, do=DO)


def _key(rank: int) -> str:
    return f"anyshape/lost/{rank}"  # torchrun's store begins anew when ranks start again


def _said(rank: int) -> str:
    store = _store()
    try:
        return store.get(_key(rank)).decode() if store is not None and store.check([_key(rank)]) else ""
    except RuntimeError:  # it was of a process that is lost
        return ""


def _store() -> Any:
    """What all processes of torch.distributed share; None where this version does not give it."""
    get = compat.get("torch.distributed.distributed_c10d._get_default_store")
    return None if get is None or not dist.is_initialized() else get()
