"""Writes down an error inside the compiler so that it can be run again elsewhere: `anyshape repro FILE`.

The file is the graph in its text form, under comment lines that hold everything else as JSON:

    # anyshape repro 1
    # error: "VerifyError: ..."
    # stage: "kernel/fusion/vertical.py, place"
    # config: {"check": 0, ...}
    # sizes: {"s27": 7}
    # inputs: [["primals_1", "f32", [16, 16], [16, 1]], ...]
    # versions: {"anyshape": "0.1.0", ...}
    # traceback: ["Traceback ...", ...]
    graph 0_forward(...)
"""
from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import os
import platform
import stat
import sys
import tempfile
import time
import traceback
from typing import Any

from anyshape.base.config import Config
from anyshape.base.errors import ParseError
from anyshape.frontend.programs.compile_program import graph_of
from anyshape.frontend.programs.session import ProgramRequest
from anyshape.ir.graph import Graph
from anyshape.ir.parse import parse
from anyshape.ir.show import show
from anyshape.ir.types import TensorType
from anyshape.sym.expr import evaluate, symbols_of

MARK = "# anyshape repro 1"
MOST_FILES = 32  # of one user, in the folder for temporary files
OLDEST_DAYS = 30
LIKELY = 7  # for a size that the trace had no value for


@dataclasses.dataclass(frozen=True, slots=True)
class Repro:
    """What a file holds. graph: None when the failure came before there was one."""

    error: str
    stage: str
    config: Config
    sizes: dict[str, int]
    versions: dict[str, str]
    traceback: tuple[str, ...]
    graph: Graph | None


def write(request: ProgramRequest, error: BaseException) -> str:
    """The path of the file written for `error`; empty when no file could be written."""
    try:
        graph = graph_of(request)[0]
    except Exception:  # the graph is what failed; the traceback says so
        graph = None
    lines = [MARK, _line("error", f"{type(error).__name__}: {error}"), _line("stage", stage_of(error)),
             _line("config", dataclasses.asdict(request.config)), _line("versions", versions()),
             _line("traceback", "".join(traceback.format_exception(error)).split("\n"))]
    if graph is not None:
        sizes = likely_sizes(graph)
        inputs = [[value.name, value.type.dtype, [evaluate(size, sizes) for size in value.type.shape],
                   [evaluate(stride, sizes) for stride in value.type.layout()]]
                  for value in graph.inputs if isinstance(value.type, TensorType)]
        lines += [_line("sizes", sizes), _line("inputs", inputs), show(graph)]
    else:
        code = request.gm.print_readable(print_output=False)
        lines += [f"# fx  {line}" for line in code.split("\n")]
    return _save(request, "\n".join(lines) + "\n")


def _save(request: ProgramRequest, text: str) -> str:
    try:
        if request.config.dump:
            os.makedirs(request.config.dump, exist_ok=True)
        else:
            _make_room(tempfile.gettempdir())
        handle, path = tempfile.mkstemp(prefix=f"anyshape-{request.name}-", suffix=".repro",
                                        dir=request.config.dump or None)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        return ""
    return path


def _make_room(folder: str) -> None:
    """Deletes files of errors that are old, and the oldest where there would be too many. Those of a folder that the
    user has named (`dump`) stay."""
    found = []
    for path in glob.glob(os.path.join(glob.escape(folder), "anyshape-*.repro")):
        with contextlib.suppress(OSError):  # another process was quicker
            about = os.lstat(path)
            if stat.S_ISREG(about.st_mode) and about.st_uid == os.getuid():
                found.append((about.st_mtime, path))
    found.sort(reverse=True)
    last = time.time() - OLDEST_DAYS * 86400
    for number, (changed, path) in enumerate(found):
        if number >= MOST_FILES - 1 or changed < last:
            with contextlib.suppress(OSError):
                os.remove(path)


def read(text: str) -> Repro:
    """What `write` wrote.

    Raises:
        ParseError: this is no such file, or it is damaged.
    """
    if not text.startswith(MARK):
        raise ParseError("this is no repro file", why=f"it does not begin with {MARK!r}",
                         do="pass a file that a warning of AnyShape named")
    found: dict[str, Any] = {}
    body: list[str] = []
    for line in text.split("\n")[1:]:
        name, colon, value = line[2:].partition(": ")
        if line.startswith("# ") and colon and name.isidentifier() and not body:
            try:
                found[name] = json.loads(value)
            except ValueError as error:
                raise ParseError("the repro file is damaged", where=f"the line of {name}", why=str(error)) from None
        elif not line.startswith("# fx"):
            body.append(line)
    graph_text = "\n".join(body).strip()
    known = {field.name for field in dataclasses.fields(Config)}
    config = {name: value for name, value in found.get("config", {}).items() if name in known}
    return Repro(found.get("error", ""), found.get("stage", ""), Config.make(**config), found.get("sizes", {}),
                 found.get("versions", {}), tuple(found.get("traceback", ())),
                 parse(graph_text) if graph_text else None)


def likely_sizes(graph: Graph) -> dict[str, int]:
    """A number for every symbol of the inputs: what the trace saw, else a small one in range."""
    names: set[str] = set()
    for value in graph.inputs:
        if isinstance(value.type, TensorType):
            for size in (*value.type.shape, *value.type.layout()):
                names |= symbols_of(size)
        else:
            names.add(value.name)
    hints = dict(graph.facts.hints)
    sizes = {}
    for name in sorted(names):
        low, high = graph.facts.range_of(name)
        likely = max(low, hints.get(name, LIKELY))
        sizes[name] = likely if high is None else min(high, likely)
    return sizes


def stage_of(error: BaseException) -> str:
    """The innermost function of this package that the error passed through, as "room/file.py, function"."""
    stage = ""
    for frame in traceback.extract_tb(error.__traceback__):
        path = frame.filename.replace(os.sep, "/")
        if "/anyshape/" in path:
            stage = f"{path.rsplit('/anyshape/', 1)[1]}, {frame.name}"
    return stage


def versions() -> dict[str, str]:
    """Versions of what a result depends on."""
    import llvmlite
    import torch
    return {"anyshape": vars(sys.modules["anyshape"])["__version__"], "torch": torch.__version__,
            "llvmlite": llvmlite.__version__, "python": sys.version.split()[0],
            "system": f"{platform.system()} {platform.machine()}"}


def _line(name: str, value: Any) -> str:
    return f"# {name}: {json.dumps(value)}"
