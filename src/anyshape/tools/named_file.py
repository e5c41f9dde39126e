"""Words of a command line that name a file, or give it a name: FILE, or NAME=FILE, of which both may hold a =."""
from __future__ import annotations

from pathlib import Path


def named_file(word: str) -> tuple[str, str]:
    """The name, empty where there is none, and the file. A file that is there decides which = is the sign: the whole
    word first, then what stands behind the first =, behind the second. Where none is there, the first one is it."""
    signs = [place for place, letter in enumerate(word) if letter == "="]
    splits = [("", word), *((word[:place], word[place + 1:]) for place in signs)]
    found = next((one for one in splits if one[1] and Path(one[1]).exists()), None)
    return found or splits[min(len(signs), 1)]
