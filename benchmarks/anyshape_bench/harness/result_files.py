"""Results in a folder: one JSON file per kind of run, written whole, and read with words for what is wrong."""
from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from anyshape.base.errors import InputError

FORMAT = 1
Found = TypeVar("Found")


def write(found: Any, folder: Path, name: str) -> Path:
    """Writes a dataclass to the file `name` of a folder; another process never sees half a file."""
    folder.mkdir(parents=True, exist_ok=True)
    path, half = folder / name, folder / f"{name}.part"
    half.write_text(json.dumps({"format": FORMAT} | asdict(found), indent=1) + "\n")
    half.replace(path)
    return path


def read(path: Path, name: str, make: Callable[[dict[str, Any]], Found], what: str, command: str) -> Found:
    """Reads what `write` wrote, from the folder or the file.

    Args:
        make: what the fields become.
        what: is read, in words; command: what writes it.

    Raises:
        InputError: there is no such file, or it is another one.
    """
    file = path / name if path.is_dir() else path
    try:
        data = json.loads(file.read_text())
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}, expected {FORMAT}")
        return make(data)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"cannot read {what} from {file}", why=f"{type(error).__name__}: {error}",
                         do=f"give a folder written by `{command} --out FOLDER`") from error
