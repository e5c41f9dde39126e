"""Results in a folder: one JSON file per experiment, written whole, and read with words for what is wrong."""
from __future__ import annotations

import json
import typing
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from anyshape.base.errors import InputError

FORMAT = 1


@dataclass(slots=True)
class StoredRun:
    """A run of an experiment: where it ran and how; an experiment adds its rows.

    Attributes:
        FILE: the name of its file; WHAT: what is in it, in words; COMMAND: what writes it.
    """

    FILE: ClassVar[str]
    WHAT: ClassVar[str]
    COMMAND: ClassVar[str]
    machine: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> Path:
        """Writes the file; another process never sees half of it."""
        folder.mkdir(parents=True, exist_ok=True)
        path, half = folder / self.FILE, folder / f"{self.FILE}.part"
        half.write_text(json.dumps({"format": FORMAT} | asdict(self), indent=1) + "\n")
        half.replace(path)
        return path

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads what `save` wrote, from the folder or the file.

        Raises:
            InputError: there is no such file, or it is another one.
        """
        file = path / cls.FILE if path.is_dir() else path
        try:
            data = json.loads(file.read_text())
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']}, expected {FORMAT}")
            return made(cls, {one.name: data[one.name] for one in fields(cls)})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"cannot read {cls.WHAT} from {file}", why=f"{type(error).__name__}: {error}",
                             do=f"give a folder written by `{cls.COMMAND} --out FOLDER`") from error


def made(kind: Any, value: Any) -> Any:
    """What JSON stands for where a value of this type is: a dataclass by its fields, lists of them one by one."""
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{name: made(hints[name], one) for name, one in value.items()})  # type: ignore[operator]
    if typing.get_origin(kind) is list:
        [of] = typing.get_args(kind)
        return [made(of, one) for one in value]
    return value
