"""A folder of checkpoints: each is written under another name, and renamed when it is whole.

    run/.step-000000120.part/   being written, or removed; left there by a process that was killed, the next save
                                removes it
    run/step-000000100/         whole: .metadata, and the files of each rank with their checksums
"""
from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from anyshape.frontend.checkpoint.checksums import write_checksum
from anyshape.frontend.checkpoint.local_part import LocalPart

try:
    import fcntl
except ImportError:  # a system that has none
    fcntl = None  # type: ignore[assignment]

NO_LOCKS = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)  # of disks on a network
_NAME = re.compile(r"step-(\d{9,})(?:\.(\d+))?")


def checkpoints(folder: Path) -> list[Path]:
    """The whole ones, those of fewest steps first; of as many steps, in the order in which they were saved."""
    found = [path for path in (folder.iterdir() if folder.is_dir() else ())
             if _NAME.fullmatch(path.name) and (path / ".metadata").is_file()]
    return sorted(found, key=_order)


def _order(path: Path) -> tuple[int, int]:
    """Steps made, and which of the checkpoints at this step it is."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


class StepWriter(FileSystemWriter):
    """Writes a checkpoint that counts when it is whole.

    Args:
        folder: of the checkpoints.
        count: steps made. keep: how many whole ones stay.
    """

    def __init__(self, folder: Path, count: int, keep: int) -> None:
        super().__init__(folder / f".step-{count:09d}.part", overwrite=True)
        self.folder = folder
        self.count = count
        self.keep = keep
        self.lock: int | None = None

    @property
    def part(self) -> Path:
        """Where it is written."""
        return Path(self.path)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copies of all tensors: steps go on while these are written."""
        return {name: one.detach().cpu().clone() if isinstance(one, Tensor) else
                one.copied() if isinstance(one, LocalPart) else one for name, one in state_dict.items()}

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """On one rank, before all begin: of those who save into a folder, one goes on. Locks end with their process.

        Raises:
            BlockingIOError: another save is writing into this folder.
        """
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if not is_coordinator or fcntl is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(error.errno, "another save is writing into this folder") from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise

    def release(self) -> None:
        """Others may save into the folder."""
        lock, self.lock = self.lock, None
        if lock is not None:
            os.close(lock)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On one rank, after all have the folder and before one writes: what killed processes have left goes."""
        for path in self.folder.glob(".step-*.part"):
            if path != self.part:
                shutil.rmtree(path)
        for path in self.part.iterdir():
            path.unlink()
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """On each rank, its files, and their checksums."""
        written = super().write_data(plan, planner)
        for name in sorted({one.storage_data.relative_path for one in written.wait()}):
            write_checksum(self.part / name)
        return written

    def finish(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> None:
        """On one rank, after all have written: the checkpoint counts from its rename on."""
        super().finish(metadata, results)  # type: ignore[arg-type]
        _flush(self.part)
        others = checkpoints(self.folder)
        # saved before at this step: the number after the last one's, for the first ones may be gone
        numbers = [number for count, number in map(_order, others) if count == self.count]
        whole = self.folder / (f"step-{self.count:09d}" + (f".{max(numbers) + 1}" if numbers else ""))
        self.part.rename(whole)
        _flush(self.folder)
        for path in others[:max(len(others) + 1 - self.keep, 0)]:
            gone = self.folder / f".{path.name}.part"
            path.rename(gone)  # it does not count any more, however much of it is still there
            shutil.rmtree(gone)

    def abandon(self) -> None:
        """Removes what was written of one that cannot be finished."""
        shutil.rmtree(self.part, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Names in a folder reach the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
