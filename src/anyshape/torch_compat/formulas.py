"""The functions that sizes of a trace are made of, which sympy lacks."""
from __future__ import annotations

from typing import Any

from anyshape.torch_compat.access import absent, need

is_infinite: Any = need("torch.utils._sympy.numbers.is_infinite")


class _Functions:
    """torch's functions by name; one that torch lacks is absent (see `Absent`): no size is made of it."""

    def __init__(self, room: Any) -> None:
        self._room = room

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._room, name, None)
        return absent(f"torch.utils._sympy.functions.{name}") if found is None else found


functions: Any = _Functions(need("torch.utils._sympy.functions"))
