"""A folder of checkpoints: each is written under another name, and renamed when it is whole.

    run/.step-000000120.part/   being written; left there by a process that was killed, it is removed by the next save
    run/step-000000100/         whole: .metadata, and the files of each rank
"""
from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from anyshape.frontend.checkpoint.local_part import LocalPart

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

    @property
    def part(self) -> Path:
        """Where it is written."""
        return Path(self.path)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copies of all tensors: steps go on while these are written."""
        return {name: one.detach().cpu().clone() if isinstance(one, Tensor) else
                one.copied() if isinstance(one, LocalPart) else one for name, one in state_dict.items()}

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On one rank, after all have the folder and before one writes: what killed processes have left goes."""
        for path in self.folder.glob(".step-*.part"):
            if path != self.part:
                shutil.rmtree(path)
        for path in self.part.iterdir():
            path.unlink()
        return super().prepare_global_plan(plans)

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
            shutil.rmtree(path)

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
