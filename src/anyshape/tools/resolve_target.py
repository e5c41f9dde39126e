"""Functions of a user's own, by the name that he gives a command: `module:function` or `path.py:function`."""
from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from anyshape.base.errors import AnyShapeError, ConfigError


def find(name: str) -> Any:
    """What stands at `name`. The file's folder, or the current one, is where it imports from.

    Raises:
        ConfigError: there is no such module, file or function, or an error ended it while it was loaded.
    """
    place, colon, function = name.rpartition(":")
    if not colon or not place or not function:
        raise ConfigError(f"{name!r} names no function", do="write for example net:make or folder/net.py:make")
    try:
        return getattr(_module(place), function)
    except (ImportError, AttributeError, FileNotFoundError) as error:
        raise ConfigError(f"cannot load {name}", why=str(error), do="give module:function, importable from the "
                          "current folder, or path.py:function") from error
    except Exception as error:  # the border of a tool: what the user's own lines raise
        raise _ended(f"cannot load {name}", error) from error


def call(name: str, function: Any) -> Any:
    """What the function at `name`, which takes no arguments, returns.

    Raises:
        ConfigError: it raised an error. AnyShapeError: it raised one of ours.
    """
    try:
        return function()
    except AnyShapeError:
        raise
    except Exception as error:  # the border of a tool: what the user's own lines raise
        raise _ended(f"{name} ended in an error", error) from error


def _ended(what: str, error: Exception) -> ConfigError:
    """An error of the user's own lines, with the last of them."""
    if isinstance(error, SyntaxError):
        where = f"{error.filename}:{error.lineno}  {(error.text or '').strip()}"
    else:
        line = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{line.filename}:{line.lineno}  {line.line or ''}"
    return ConfigError(what, where=where.strip(), why=f"{type(error).__name__}: {error}", do="correct that line")


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
