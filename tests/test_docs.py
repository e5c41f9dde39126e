"""The documents are true: python blocks run, outputs that are shown are the real ones, what is named exists.

In README.md and docs/*.md every block opened by "```python" is executed, all of one document in one namespace, in
order. A block opened by "```text output" right after it must be what it printed. `pytest --update` writes those blocks,
and docs/settings.md, which is made from the code.
"""
from __future__ import annotations

import ast
import contextlib
import functools
import io
import json
import linecache
import os
import re
import subprocess
import sys
import tempfile
import traceback
import types
from dataclasses import dataclass, fields
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

import once_a_run

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "anyshape"
DOCUMENTS = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
DECISIONS = sorted((ROOT / "docs" / "adr").glob("*.md"))
OUTPUT = "text output"
_FENCE = re.compile(r"^```(.*)$")
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_TEST = re.compile(r"\]\(([^)#\s]*tests/\w+\.py)#(\w+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_FILE = re.compile(r"[\w./-]*\w\.(?:py|c|toml|txt|md)")
_MODULE = re.compile(r"anyshape(?:\.\w+)+")


@dataclass(frozen=True)
class Block:
    """A fenced block: its info string, its text, and the number of its first line in the document (from 1)."""

    info: str
    text: str
    line: int


def prose_of(path: Path) -> str:
    """A document without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


def blocks_of(text: str) -> list[Block]:
    """The fenced blocks of a document, in order."""
    found = []
    lines = text.split("\n")
    start: int | None = None
    info = ""
    for number, line in enumerate(lines):
        fence = _FENCE.match(line)
        if fence is None:
            continue
        if start is None:
            start, info = number + 1, fence.group(1).strip()
        else:
            found.append(Block(info, "".join(f"{item}\n" for item in lines[start:number]), start + 1))
            start = None
    assert start is None, f"the block at line {start} is not closed"
    return found


# ---- running a document, in a process of its own


def run_document(path: str) -> dict[str, Any]:
    """What each python block printed, by its line; and the error that ended the document, if any."""
    text = Path(path).read_text(encoding="utf-8")
    name = Path(path).name
    # the compiler cites the user's line: let it find the document's
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module  # guards of torch's tracer look names up there
    space = module.__dict__
    printed: dict[int, str] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for block in blocks_of(text):
            if block.info != "python":
                continue
            stream = io.StringIO()
            try:
                code = compile("\n" * (block.line - 1) + block.text, name, "exec")
                with contextlib.redirect_stdout(stream):
                    exec(code, space)
            except Exception:  # the document's own fault, told by the test
                return {"printed": printed, "error": traceback.format_exc()}
            printed[block.line] = stream.getvalue()
    return {"printed": printed, "error": ""}


def main(paths: list[str]) -> None:
    """Runs documents side by side, each in a fork of this process, so that torch is imported once."""
    import torch

    import anyshape
    from anyshape.base import counters
    from anyshape.frontend.capture import dynamo_backend

    if "anyshape" not in torch.compiler.list_backends():
        # what the entry point in pyproject.toml does where the package is installed
        torch._dynamo.register_backend(dynamo_backend.backend, name="anyshape")
    # what the first program of a process imports and makes, some 3 s, is made once, too
    anyshape.compile(lambda x: torch.softmax(x, -1))(torch.ones(2, 3))
    torch._dynamo.reset()
    anyshape.release()
    counters.reset()
    with get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        found = pool.map(run_document, paths, chunksize=1)
    print(json.dumps(dict(zip(paths, found, strict=True))))


# ---- the tests


RUNNABLE = [path for path in DOCUMENTS if any(block.info == "python" for block in blocks_of(path.read_text("utf-8")))]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of every document that has python blocks."""
    return once_a_run.made(tmp_path_factory, "documents", run_documents)  # type: ignore[no-any-return]


def run_documents() -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith("ANYSHAPE_") or name == "ANYSHAPE_CACHE_DIR"}
    environment["PYTHONPATH"] = str(ROOT / "src")
    done = subprocess.run([sys.executable, __file__, *map(str, RUNNABLE)], capture_output=True, text=True, timeout=900,
                          env=environment, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", RUNNABLE, ids=name_of)
def test_a_document_runs_and_shows_what_it_prints(path: Path, results: dict[str, Any],
                                                  request: pytest.FixtureRequest) -> None:
    result = results[str(path)]
    assert not result["error"], result["error"]
    text = path.read_text("utf-8")
    if request.config.getoption("--update"):
        path.write_text(with_outputs(text, result["printed"]), encoding="utf-8")
        return
    last = None
    for block in blocks_of(text):
        if block.info == OUTPUT:
            assert last is not None, f"{path.name}:{block.line} shows the output of no block"
            printed = result["printed"][str(last.line)]
            assert block.text == printed, f"{path.name}:{block.line} is out of date; run pytest --update"
        last = block if block.info == "python" else None


def with_outputs(text: str, printed: dict[str, str]) -> str:
    """The document with what its blocks print now."""
    lines = text.split("\n")
    blocks = blocks_of(text)
    for block, before in reversed(list(zip(blocks[1:], blocks, strict=False))):
        if block.info == OUTPUT:
            start = block.line - 1
            lines[start:start + block.text.count("\n")] = printed[str(before.line)].rstrip("\n").split("\n")
    return "\n".join(lines)


@pytest.mark.parametrize("path", [*DOCUMENTS, *DECISIONS], ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    for target in _LINK.findall(path.read_text("utf-8")):
        if not target.startswith(("http://", "https://")):
            assert (path.parent / target).exists(), f"{path.name} links to {target}, which is not there"


def test_tests_that_are_linked_exist() -> None:
    """A document shows that something is so by a link to a test: `[test](../tests/test_x.py#test_name)`."""
    for path in (*DOCUMENTS, *DECISIONS):
        for file, name in _TEST.findall(path.read_text("utf-8")):
            assert name in names_of_tests(path.parent / file), f"{path.name} links to {file}, which has no {name}"


@functools.cache
def names_of_tests(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)}


def test_most_limitations_are_shown_by_a_test() -> None:
    limitations = (ROOT / "docs" / "limitations.md").read_text("utf-8").split("## Open work")[0].split("\n- ")[1:]
    shown = [one for one in limitations if _TEST.search(one)]
    assert len(limitations) > 80 and len(shown) > 0.7 * len(limitations)


def test_every_block_of_the_walk_asserts_what_is_said_of_it() -> None:
    path = ROOT / "docs" / "walk.md"
    blocks = [block for block in blocks_of(path.read_text("utf-8")) if block.info == "python"]
    for block in blocks:
        assert "assert" in block.text, f"walk.md:{block.line} asserts nothing of what it prints"


@pytest.mark.parametrize("path", [*DOCUMENTS, *DECISIONS], ids=name_of)
def test_files_and_modules_that_are_named_exist(path: Path) -> None:
    for word in _CODE.findall(prose_of(path)):
        if _FILE.fullmatch(word):
            places = (path.parent / word, ROOT / word, SOURCE / word)
            assert any(place.exists() for place in places), f"{path.name} names {word}, which is not there"
        elif _MODULE.fullmatch(word):
            assert module_exists(word), f"{path.name} names {word}, which is not there"


def module_exists(name: str) -> bool:
    """Whether a dotted name is a module, or something that its module's text defines."""
    place = SOURCE
    for part in name.split(".")[1:]:
        if (place / part).is_dir():
            place = place / part
        elif (place / f"{part}.py").exists():
            place = place / f"{part}.py"
        else:
            text = (place if place.is_file() else place / "__init__.py").read_text("utf-8")
            return re.search(rf"^(?:class|def)? *{part}\b|^ +def {part}\b|\"{part}\"", text, re.MULTILINE) is not None
    return True


def test_the_architecture_names_every_package() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    for folder in sorted({path.parent.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py")} - {"."}):
        assert f"`{folder}/`" in text, f"ARCHITECTURE.md does not say what {folder}/ is"
    for path in sorted(SOURCE.glob("[a-z]*.py")):
        assert f"`{path.name}`" in text, f"ARCHITECTURE.md does not say what {path.name} is"


# what somebody who knows Inductor looks for, and a word that the file of that row has
SOUGHT = {
    "buffer liveness": "live range", "epilogue fusion": "matmul", "offload scheduling": "begin to copy",
    "AMX gemm": "unit for whole tiles", "guard translation": "guards", "recompute selection": "recompute",
    "horizontal fusion": "horizontal fusion", "disk cache and its key": "def object_key",
    "dtype promotion": "def promoted",
    "attention masks": "mask"}


@pytest.mark.parametrize("term", SOUGHT)
def test_the_architecture_leads_to_the_file_of(term: str) -> None:
    rows = [line for line in (ROOT / "ARCHITECTURE.md").read_text("utf-8").split("\n") if line.startswith("| ")]
    [row] = [line for line in rows if term in line.split("|")[1]]
    files = [SOURCE / name for name in re.findall(r"`([\w/]+\.py)`", row)]
    assert files and all(file.exists() for file in files)
    assert any(SOUGHT[term] in file.read_text("utf-8") for file in files)


def test_every_package_has_a_page_whose_files_exist() -> None:
    for folder in sorted(path.parent for path in SOURCE.glob("*/__init__.py")):
        text = (folder / "README.md").read_text("utf-8")
        for word in re.findall(r"`([\w./]+\.py)`", text):
            assert any((place / word).exists() for place in (folder, SOURCE, ROOT)) or any(folder.rglob(word)), \
                f"{folder.name}/README.md names {word}, which is not there"


def test_decisions_are_listed_and_their_evidence_exists() -> None:
    listed = _LINK.findall((ROOT / "docs" / "adr" / "README.md").read_text("utf-8"))
    assert listed == [path.name for path in DECISIONS if path.name != "README.md"]
    for path in DECISIONS:
        evidence = re.findall(r"tests/\w+\.py", path.read_text("utf-8"))
        missing = [name for name in evidence if not (ROOT / name).exists()]
        assert not missing, f"{path.name} names {missing} as evidence, which are not there"


def test_the_readme_leads_to_every_document() -> None:
    links = {ROOT / target for target in _LINK.findall((ROOT / "README.md").read_text("utf-8"))}
    assert ROOT / "docs" / "README.md" in links
    links |= {(ROOT / "docs" / target).resolve() for target in _LINK.findall(
        (ROOT / "docs" / "README.md").read_text("utf-8"))}
    for path in DOCUMENTS[1:]:
        assert path in links or path.name == "README.md", f"README.md does not lead to {name_of(path)}"


def test_the_readme_is_short() -> None:
    assert (ROOT / "README.md").read_text("utf-8").count("\n") <= 150


def settings_table() -> str:
    """The settings, in Markdown."""
    from anyshape.base.config import Config
    lines = ["| setting | default | what it does |", "|---|---|---|"]
    for knob in fields(Config):
        default = f'"{knob.default}"' if isinstance(knob.default, str) else str(knob.default)
        lines.append(f"| `{knob.name}` | `{default}` | {knob.metadata['help']} |")
    return "".join(f"{line}\n" for line in lines)


def test_the_table_of_settings_is_that_of_config(request: pytest.FixtureRequest) -> None:
    path = ROOT / "docs" / "settings.md"
    text = path.read_text("utf-8")
    part = re.compile(r"(?<=<!-- settings:begin -->\n).*?(?=<!-- settings:end -->)", re.DOTALL)
    assert len(part.findall(text)) == 1
    if request.config.getoption("--update"):
        path.write_text(part.sub(lambda _: settings_table(), text), encoding="utf-8")
        return
    assert part.findall(text) == [settings_table()], "docs/settings.md is out of date; run pytest --update"


def test_ci_runs_the_command_of_the_readme() -> None:
    lines = (ROOT / "README.md").read_text("utf-8").split("\n")
    commands = [line for line in lines if line.startswith("python3 -m venv") and "-m pytest" in line]
    assert len(commands) == 1
    assert "-c constraints.txt" in commands[0]
    pins = (ROOT / "constraints.txt").read_text("utf-8").split("\n")
    assert sum(line.startswith("torch==") for line in pins) == 1
    done = subprocess.run(["bash", str(ROOT / ".ci" / "run"), "--print"], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == commands[0], done.stderr


if __name__ == "__main__":
    main(sys.argv[1:])
