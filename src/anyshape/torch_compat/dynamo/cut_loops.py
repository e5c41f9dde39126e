"""Graph breaks in loops, at FSDP2's hooks.

    for block in self.blocks:          the frame ends before each call of a block; a resumed one goes on behind it, with
        x = block(x)                   what is left of the loop as a tuple iterator
    return self.head(x)

Dynamo skips a frame with a graph break in a loop, for it could need a program for each iteration. A loop over modules
with hooks is as long as the model is deep, so there that is right.
"""
from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from anyshape import torch_compat as compat
from anyshape.torch_compat.dynamo.eager_frames import ends_at_sharding
from anyshape.torch_compat.tracing.fx_threads import put

TRANSLATOR = "torch._dynamo.symbolic_convert.InstructionTranslatorBase"
SKIP = f"{TRANSLATOR}.raise_loop_graph_break"
# what is left of a view of a dictionary, or of a zip; torch before 2.13 lacks some of these
_ITERATORS = [f"torch._dynamo.variables.{name}" for name in (
    "iter.DictViewIterator", "iter.ZipVariable", "functions.unpack_iterable", "ListIteratorVariable", "TupleVariable")]


@contextlib.contextmanager
def loops_cut_at_hooks() -> Iterator[None]:
    """Inside, Dynamo cuts loops where a hook of FSDP2 ends the graph. Without effect where torch's internals are not as
    expected: such frames run as PyTorch then, and are counted."""
    if not compat.has(SKIP, TRANSLATOR):
        yield
        return
    skip, translator = compat.need(SKIP), compat.need(TRANSLATOR)

    def skip_others(code: Any, error: BaseException) -> None:
        if not ends_at_sharding(getattr(error, "real_stack", None)):
            skip(code, error)

    with put(translator, "raise_loop_graph_break", staticmethod(skip_others)), _rest_of_iterators():
        yield


@contextlib.contextmanager
def _rest_of_iterators() -> Iterator[None]:
    """Inside, a resumed frame gets what is left of a view of a dictionary and of a zip, as of a list."""
    if not compat.has(*_ITERATORS):
        yield
        return
    Views, Zip, unpack, Items, Tuple = map(compat.need, _ITERATORS)

    def rest_of_view(self: Any, codegen: Any) -> None:
        rest = list(copy.copy(self._iter))  # the iterator itself stays where it is: bytecode may be made again
        if self.view_type != "values":
            rest = [one.vt if self.view_type == "keys" else Tuple([one[0].vt, one[1]]) for one in rest]
        Items(rest).reconstruct(codegen)

    rests: dict[int, tuple[Any, list[Any]]] = {}

    def rest_of_zip(self: Any, codegen: Any) -> None:
        if id(self) not in rests:
            rests[id(self)] = self, unpack(codegen.tx, self)
        Items(rests[id(self)][1]).reconstruct(codegen)

    with put(Views, "reconstruct", rest_of_view), put(Zip, "reconstruct", rest_of_zip):
        yield
