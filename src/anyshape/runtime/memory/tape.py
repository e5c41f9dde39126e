"""The tape: everything that a compiled forward saves for its backward, as one object.

A forward graph ends in `make_tape(*saved)`; a backward graph takes the tape as its first input and reads it with
`tape_get(tape, index)`. Autograd sees one opaque object and no saved tensors, so what is kept, and where it lives,
is the compiled program's own affair. In exchange the tape does what autograd would have done for saved tensors: it
is emptied by the backward, it refuses a second backward, and it notices in-place changes of what users can see.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from anyshape.torch_compat import opaque
from anyshape.torch_compat.versions import api


class Owner(Protocol):
    """Whoever owns the memory that a tape's tensors live in."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in that memory."""

    def release(self) -> None:
        """Gives the memory back; called once."""


class Tape(opaque.OpaqueBase):
    """The saved values of one run of a forward.

    Args:
        values: tensors or numbers, in the order the backward reads them. Any Python objects may stand there.
        owner: released together with the tape; None when the values own their memory.
        checked: indices of the tensors that users can see too (inputs and outputs of the forward, and views of
            them). A change in place between forward and backward makes the backward raise, as in eager PyTorch.

    Visible tensors that autograd tracks are held detached: an output whose history holds this tape would be a cycle.
    """

    def __init__(self, values: Sequence[Any], owner: Owner | None = None, checked: Sequence[int] = ()) -> None:
        self.values: list[Any] = list(values)
        for index in checked:
            tensor = self.values[index]
            if not (tensor.requires_grad and tensor.is_leaf):
                self.values[index] = tensor.detach()
        self.owner = owner
        self.versions = tuple((index, api.version_of(self.values[index])) for index in checked)
        self.released = False
        self.once = False  # no backward comes after the first, whatever autograd says

    def open(self) -> list[Any]:
        """The values, after checking that they are still there and unchanged.

        Raises:
            RuntimeError: a second backward after the first released the tape, or a saved tensor was modified.
        """
        if self.released:
            raise RuntimeError(
                "Trying to backward through the graph a second time (or directly access saved tensors after they have "
                "already been freed). Saved intermediate values of the graph are freed when you call .backward() or "
                "autograd.grad(). Specify retain_graph=True if you need to backward through the graph a second time "
                "or if you need to access saved tensors after calling backward.")
        for index, version in self.versions:
            tensor = self.values[index]
            found = api.version_of(tensor)
            if found != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"[{tensor.type()} {list(tensor.shape)}], saved value {index} of a compiled forward, is at "
                    f"version {found}; expected version {version} instead.")
        return self.values

    def apart(self, result: Any) -> Any:
        """`result` of a backward, copied if it lies in the owner's memory, which the next call may take."""
        inside = self.owner is not None and isinstance(result, torch.Tensor) and self.owner.holds(result)
        return result.clone() if inside else result

    def close(self) -> None:
        """Ends one backward: releases the tape unless autograd was told to keep the graph."""
        if self.once or not api.keeps_graph():
            self.release()

    def release(self) -> None:
        """Drops the values and gives the owner's memory back. A second call does nothing."""
        if self.released:
            return
        self.released = True
        self.values = []
        self.versions = ()
        owner, self.owner = self.owner, None
        if owner is not None:
            owner.release()

    def __del__(self) -> None:
        if not getattr(self, "released", True):
            self.release()


opaque.register_reference_type(Tape)


def make_tape(*saved: Any, checked: tuple[int, ...] = ()) -> Tape:
    """The tape of one run; the last node of a forward graph."""
    return Tape(saved, checked=checked)


def tape_get(tape: Tape, index: int) -> Any:
    """One saved value, in a backward graph."""
    return tape.values[index]
