"""Looks up private names of torch, once each, and says what torch lacks.

A name is found by its path: modules along it are imported, the rest are attributes. What is looked up must be in
`names.NAMES`, which says what the name is for and what is done without it.
"""
from __future__ import annotations

import contextlib
import functools
import importlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from anyshape.torch_compat.names import NAMES

_MISSING = object()
_found: dict[str, Any] = {}
_warned: set[str] = set()
_pretended: tuple[str, ...] = ()
_bound: list[Callable[[], None]] = []
_refusals: list[str | None] = []


class TorchVersionWarning(UserWarning):
    """This torch lacks a private name; what is done without it takes longer, or serves fewer programs."""


class _AbsentKind(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{cls.__name__}.{name}")

    def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
        raise AttributeError(f"torch {torch.__version__} has no {cls.__name__}")


class Absent(Exception, metaclass=_AbsentKind):
    """Stands for what torch lacks: a class of which there are no objects, so that `isinstance` is false, no graph
    holds it, nothing raises it, and its attributes are absent too. A call raises AttributeError."""


@functools.cache
def absent(path: str) -> Any:
    return _AbsentKind(path, (Absent,), {})


def is_there(value: Any) -> bool:
    """False for what stands for an absent name."""
    return not isinstance(value, _AbsentKind)


def version() -> tuple[int, int]:
    """Major and minor number of torch's version."""
    major, minor = re.findall(r"\d+", torch.__version__)[:2]
    return int(major), int(minor)


def get(path: str) -> Any:
    """The object at `path` when it was first looked up, or None; where torch should have it and does not, one warning
    says what is done without. What changes, or is patched, is read from its owner.

    Raises:
        KeyError: the path is not in NAMES.
    """
    try:
        found = _found[path]
    except KeyError:
        found = _found[path] = _looked_up(path)
        if found is _MISSING:
            _warn(path)
    return None if found is _MISSING else found


def has(*paths: str) -> bool:
    """Whether torch has all of these."""
    return None not in [get(path) for path in paths]


def need(path: str) -> Any:
    """The object at `path`, or what stands for an absent one: for names without which nothing is compiled."""
    found = get(path)
    return absent(path) if found is None else found


def bind(names: dict[str, Any], name: str, value: Callable[[], Any]) -> Any:
    """`value()`, for a global `name` of a module (with the globals `names`) that is looked up when the module loads: it
    is set again when other names are found (see `pretending`)."""
    def again() -> None:
        names[name] = value()

    _bound.append(again)
    return value()


def refusal() -> str | None:
    """The first name that torch lacks without which nothing can be compiled; None when all are there."""
    if not _refusals:
        _refusals.append(next((path for path, name in NAMES.items() if not name.without and get(path) is None), None))
    return _refusals[0]


def lack() -> str:
    """Why nothing can be compiled with this torch; empty where it can."""
    path = refusal()
    return "" if path is None else f"torch {torch.__version__} has no {path} ({NAMES[path].use})"


def lacking() -> dict[str, str]:
    """What torch was found to lack, against expectation, that there is another way for, and that way."""
    return {path: NAMES[path].without for path, found in list(_found.items())
            if found is _MISSING and NAMES[path].without and not NAMES[path].quiet}


@contextlib.contextmanager
def pretending(*missing: str) -> Iterator[None]:
    """Inside, torch seems to lack these names, and all that lies below them. For tests."""
    global _pretended
    before, _pretended = _pretended, missing
    _look_again(())
    try:
        yield
    finally:
        _pretended = before
        _look_again(missing)


def _look_again(forget: Iterable[str]) -> None:
    _found.clear()
    _refusals.clear()
    _warned.difference_update(forget)
    for again in _bound:
        again()


def _looked_up(path: str) -> Any:
    NAMES[path]  # whoever asks for a name says in the list what it is for
    if any(path == one or path.startswith(f"{one}.") for one in _pretended):
        return _MISSING
    parts = path.split(".")
    found: Any = torch
    for count, part in enumerate(parts[1:], 2):
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(".".join(parts[:count]))
            except ImportError:
                return _MISSING
    return found


def _warn(path: str) -> None:
    if path in _warned or not NAMES[path].without or NAMES[path].quiet:
        return
    if any(path.startswith(f"{one}.") and get(one) is None for one in NAMES):  # that says it
        return
    _warned.add(path)
    warnings.warn(f"torch {torch.__version__} has no {path}, which AnyShape uses.\n  why: {NAMES[path].use}\n"
                  f"  so:  {NAMES[path].without}", TorchVersionWarning, stacklevel=3)
