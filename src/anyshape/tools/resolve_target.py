"""Functions of a user's own, by the name that he gives a command: `module:function` or `path.py:function`."""
from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from anyshape.base.errors import ConfigError


def find(name: str) -> Any:
    """What stands at `name`. The file's folder, or the current one, is where it imports from.

    Raises:
        ConfigError: there is no such module, file or function.
    """
    place, colon, function = name.rpartition(":")
    if not colon or not place or not function:
        raise ConfigError(f"{name!r} names no function", do="write for example net:make or folder/net.py:make")
    try:
        return getattr(_module(place), function)
    except (ImportError, AttributeError, FileNotFoundError) as error:
        raise ConfigError(f"cannot load {name}", why=str(error), do="give module:function, importable from the "
                          "current folder, or path.py:function") from error


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        sys.path.insert(0, "")
        return importlib.import_module(place)
    path = Path(place).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    sys.path.insert(0, str(path.parent))  # so that it can import its neighbours
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
