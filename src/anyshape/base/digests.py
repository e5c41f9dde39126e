"""Digests (SHA-256, BLAKE2) by modules of Python's own. `hashlib` loads OpenSSL, which is faster, and 4 MB and some
milliseconds of a process that only loads a file; it takes these modules where there is no OpenSSL.
"""
from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any


def _found(name: str, *modules: str) -> Callable[..., Any]:
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]
        except (ImportError, AttributeError):  # they are Python's affair
            pass
    return getattr(importlib.import_module("hashlib"), name)  # type: ignore[no-any-return]


_sha256 = _found("sha256", "_sha2", "_sha256")  # since Python 3.12, and before
blake2b = _found("blake2b", "_blake2")


def sha256(data: bytes | memoryview) -> Any:
    """The digest of some bytes, as `hashlib` gives it; by OpenSSL where the process has that already."""
    loaded = sys.modules.get("hashlib")
    return _sha256(data) if loaded is None else loaded.sha256(data)
