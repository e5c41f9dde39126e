"""A part of a document that is written by a program: what stands between its two marks."""
from __future__ import annotations

from pathlib import Path


def write_part(path: Path, mark: str, text: str) -> None:
    """Puts a text between the marks `<!-- mark:begin -->` and `<!-- mark:end -->` of a document."""
    begin, end = f"<!-- {mark}:begin -->", f"<!-- {mark}:end -->"
    head, _, rest = path.read_text(encoding="utf-8").partition(begin)
    _, found, tail = rest.partition(end)
    assert found, f"{path} has no marks {begin} and {end}"
    path.write_text(f"{head}{begin}\n\n{text}\n{end}{tail}", encoding="utf-8")


def show_stored(results: Path, page: str, mark: str, text: str) -> None:
    """Shows results on their page where they are stored: of docs/results/NAME/FILE, a page of docs."""
    folder = results.resolve().parents[1]
    if folder.name == "results" and (folder.parent / page).exists():
        write_part(folder.parent / page, mark, text)
