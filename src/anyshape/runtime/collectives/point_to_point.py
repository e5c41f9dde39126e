"""Point to point messages of a pipeline by torch.distributed: sends go on their own, receives wait.

    rank 0: send(h, 1, tag 7)      rank 1: receive(like h, 0, tag 7)

Both sides know shape, dtype and tag, so nothing travels but the numbers. A tensor without elements is not sent.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anyshape.base import counters
from anyshape.runtime.collectives.process_group import ProcessMesh


@dataclass(slots=True)
class ProcessTransport:
    """Messages along one axis of a mesh whose ranks are processes."""

    mesh: ProcessMesh
    axis: str
    sent: list[tuple[Any, Tensor]] = field(default_factory=list)  # with their memory, until they have gone

    def send(self, tensor: Tensor, to: int, tag: int) -> None:
        """Begins to send; the tensor must not change until `settle`."""
        if tensor.numel():
            counters.count("collectives")
            message = _bytes(tensor.detach().contiguous())
            work = dist.isend(message, self._rank(to), group=self.mesh.groups[self.axis], tag=tag)
            self.sent.append((work, message))
            self.sent = [(one, memory) for one, memory in self.sent if not one.is_completed()]

    def receive(self, like: Tensor, source: int, tag: int) -> Tensor | None:
        """Waits for a message, and fills `like` with it."""
        if like.numel():
            dist.recv(_bytes(like), self._rank(source), group=self.mesh.groups[self.axis], tag=tag)
        return like

    def settle(self) -> None:
        """Waits until all that was sent has gone."""
        while self.sent:
            work, _ = self.sent.pop()
            work.wait()

    def _rank(self, place: int) -> int:
        return self.mesh.mesh.rank({**self.mesh.coordinates, self.axis: place})


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
