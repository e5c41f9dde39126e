"""Objects that cross from a forward to a backward graph as one value, where torch has such."""
from __future__ import annotations

from typing import Any

from anyshape.torch_compat.access import get, has

_BASE = "torch._opaque_base.OpaqueBase"
_REGISTER = "torch._library.opaque_object.register_opaque_type"
_NAME = "torch._library.opaque_object.get_opaque_type_name"
_FAKE = "torch._library.fake_class_registry.FakeScriptObject"


class _NoOpaqueBase:
    """Stands for torch's base class of opaque objects, which this torch does not have."""


OpaqueBase: Any = get(_BASE) or _NoOpaqueBase


def has_opaque() -> bool:
    """Whether objects of a subclass of OpaqueBase can cross."""
    return OpaqueBase is not _NoOpaqueBase and has(_BASE, _REGISTER, _NAME, _FAKE)


def register_reference_type(cls: type) -> None:
    """Lets objects of `cls` (a subclass of OpaqueBase) cross."""
    if has_opaque():
        get(_REGISTER)(cls, typ="reference")


def fake_opaque(cls: type) -> Any:
    """What stands for an object of `cls` in a traced graph's `meta["val"]`."""
    return get(_FAKE)(None, get(_NAME)(cls), None)
