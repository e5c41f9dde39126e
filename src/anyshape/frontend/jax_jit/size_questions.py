"""Guards on symbolic sizes of JAX: what a function asks of sizes while JAX exports it.

    if x.shape[0] % 4 == 0:    JAX cannot tell, and says no  -->  ("mod(x_0, 4)", "0")

A symbolic size of JAX that is not known to be another one, or 0, is unequal to it, which is wrong for some sizes. So
what code asks that is not JAX's is written down: a program is for calls that have the same answers. JAX's own code asks
as well, but takes a "no" for "it may be"; or it refuses the function, for what it asked last.
"""
from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from anyshape.base.optional_packages import needed_by

with needed_by("anyshape.jax.jit"):
    import jax
    from jax import export

Question = tuple[str, str]  # two sizes, as JAX writes them, that JAX took for unequal
OF_JAX = os.path.dirname(jax.__file__) + os.sep


@dataclass(slots=True)
class Questions:
    """What was asked in a trace. asked: by the function, each once, in order. last: by JAX's own code, at the end."""

    asked: dict[Question, None] = field(default_factory=dict)
    last: Question | None = None


class _Listening(threading.local):
    """Where questions go; None: nobody listens."""

    questions: Questions | None = None


_listening = _Listening()


@contextlib.contextmanager
def listening(questions: Questions) -> Iterator[None]:
    """Writes down what is asked of sizes in this thread."""
    _install()
    before, _listening.questions = _listening.questions, questions
    try:
        yield
    finally:
        _listening.questions = before


@functools.cache
def _install() -> None:
    """Sizes of JAX tell what they are asked: they have no other place to listen at."""
    kind: Any = type(export.symbolic_shape("size")[0])
    plain, true = kind.__eq__, getattr(kind, "__bool__", lambda self: True)

    @functools.wraps(plain)
    def equal(self: Any, other: Any) -> Any:
        answer = plain(self, other)
        questions = _listening.questions
        if not answer and questions is not None and _is_size(other, kind):
            if _asked_by_jax(sys._getframe(1)):
                questions.last = str(self), str(other)
            else:
                questions.asked[str(self), str(other)] = None
        return answer

    def unequal_to_0(self: Any) -> Any:
        questions = _listening.questions
        if questions is not None and not _asked_by_jax(sys._getframe(1)):
            questions.asked[str(self), "0"] = None
        return true(self)
    kind.__eq__, kind.__bool__ = equal, unequal_to_0


def _is_size(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) or (hasattr(value, "__index__") and getattr(value, "shape", ()) == ())


def _asked_by_jax(frame: Any) -> bool:
    if frame.f_code.co_name == "__ne__":  # asks whether they are equal
        frame = frame.f_back
    return frame is None or frame.f_code.co_filename.startswith(OF_JAX)
