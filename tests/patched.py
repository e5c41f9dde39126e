"""What of torch is changed meanwhile: functions, methods and their code, by name."""
from __future__ import annotations

import sys
import types
from typing import Any

Found = dict[str, tuple[Any, Any]]


def functions_of_torch() -> Found:
    """Each callable that modules and classes of torch hold, with its code, by its owner and its name there."""
    found: Found = {}
    for module, one in list(sys.modules.items()):
        if not isinstance(one, types.ModuleType) or module.split(".")[0] != "torch":
            continue
        for name, value in list(vars(one).items()):
            if callable(value) or name == "default_generator":
                found[f"{module}.{name}"] = value, getattr(value, "__code__", None)
            if isinstance(value, type) and value.__module__ == module:
                for method, function in list(vars(value).items()):
                    plain = getattr(function, "__func__", function)
                    if callable(plain):
                        found[f"{module}.{value.__qualname__}.{method}"] = plain, getattr(plain, "__code__", None)
    return found


def changed(before: Found, after: Found) -> set[str]:
    """Names that stand for something else now, or for a function with other code (by its first name); and what a class
    has more, or less."""
    kinds = {name.rpartition(".")[0] for name in before} - set(sys.modules)
    found = {name for name in before.keys() ^ after.keys() if name.rpartition(".")[0] in kinds}
    for name in before.keys() & after.keys():
        (one, code), (other, new_code) = before[name], after[name]
        first = f"{getattr(one, '__module__', '')}.{getattr(one, '__qualname__', '')}"
        if one is not other or (code is not new_code and first == name):
            found.add(name)
    return found
