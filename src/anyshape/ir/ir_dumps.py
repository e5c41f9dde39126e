"""Stages as text: shown, written to a folder, and read from one after a person has edited them.

    dump="folder"  writes  folder/0_forward/05_dce.txt, ...; the first line of each says what it holds:
        # stage 3f2a19c04d5e of dump=; once changed, edit= puts it in place of the computed one
    edit="folder"  takes the files whose text is another now; later stages are computed from them, and are not taken
                   from files that nobody has touched
"""
from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from anyshape.base.config import Config
from anyshape.base.errors import AnyShapeError, ConfigError, EditError

READ_ONLY = {"llvm": "its text is made for people and LLVM"}
_MARK = re.compile(r"\A[#;] stage ([0-9a-f]{12}) [^\n]*\n")
_NOTE = "of dump=; once changed, edit= puts it in place of the computed one"


@dataclass(frozen=True, slots=True)
class Edited:
    """The text of a stage that a person has changed; its lines are those of the file."""

    path: str
    text: str

    def refuse(self, error: AnyShapeError) -> NoReturn:
        """Raises EditError for an error in this text."""
        where = f"{self.path}, {error.where}" if error.where else self.path
        raise EditError("an edited stage cannot be put back", where=where, why=error.why or error.what,
                        do=error.do) from error


Edits = Mapping[str, Edited]


def publish(config: Config, graph_name: str, number: int, stage: str, text: Callable[[], str]) -> None:
    """Print a stage to stderr when `config.show` asks for it, write it to `config.dump` as
    `<graph>/<number>_<stage>.txt`. `text` is called only when needed.

    Raises:
        ConfigError: the file cannot be written.
    """
    wanted = {word.strip() for word in config.show.split(",")}
    if stage in wanted or "all" in wanted:
        print(f"# {graph_name}: {stage}\n{text()}", file=sys.stderr)
    if config.dump:
        body = text()
        sign = ";" if stage == "llvm" else "#"
        path = _folder(config.dump, graph_name) / _file(number, stage)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{sign} stage {_digest(body)} {_NOTE}\n{body}", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"dump cannot write {path}", why=error.strerror or str(error),
                              do="name a folder that can be written, or leave dump out") from error


def edits(config: Config, graph_name: str, stages: Sequence[tuple[int, str]]) -> Edits:
    """The edited stages of a graph by name. `stages`: number and name of those that will be computed.

    Raises:
        EditError: a file has been changed that is no such stage, or that cannot be put back.
    """
    if not config.edit:
        return {}
    names = {_file(number, stage): stage for number, stage in stages}
    found: dict[str, Edited] = {}
    for path in sorted(_folder(config.edit, graph_name).glob("*.txt")):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise EditError("an edited stage cannot be read", where=str(path), why=str(error),
                            do="make it a text file") from error
        mark = _MARK.match(text)
        if mark is not None and _digest(text[mark.end():]) == mark[1]:
            continue
        stage = names.get(path.name)
        name = path.stem.partition("_")[2]
        if stage is None or name in READ_ONLY:
            why = READ_ONLY.get(name, f"{graph_name} has the stages {', '.join(names)}")
            raise EditError("this file cannot be put back as a stage", where=str(path), why=why,
                            do="edit one of the graphs, the kernels or the plans, and remove this file")
        found[stage] = Edited(str(path), text)
    return found


def check_edit(config: Config) -> None:
    """Raises ConfigError when `config.edit` is no folder, or the one that `config.dump` would write over."""
    if config.edit and not Path(config.edit).is_dir():
        raise ConfigError(f"edit names no folder: {config.edit}", why="it takes a folder that dump= has written",
                          do="compile with dump= first, and edit what it writes")
    if config.edit and config.dump and Path(config.edit).resolve() == Path(config.dump).resolve():
        raise ConfigError(f"edit and dump name the same folder: {config.edit}",
                          why="dump would write over what was edited", do="give dump another folder, or leave it out")


def _folder(root: str, graph_name: str) -> Path:
    return Path(root) / graph_name.replace("/", "_")


def _file(number: int, stage: str) -> str:
    return f"{number:02d}_{stage}.txt"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
