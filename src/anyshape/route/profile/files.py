"""Files of profiles: arrays in NumPy's format (.npz) and one JSON text; reading a stranger's file runs no code."""
from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyshape.base.errors import InputError, OutputError
from anyshape.base.files import write_atomically
from anyshape.route.profile.histogram import BUCKETS
from anyshape.route.profile.profile import Profile, ProfileView, RouterProfile

FORMAT = "anyshape-route-profile-1"
ARRAYS = ("totals", "histogram", "loads", "cells", "numbers")


def save_profile(profile: ProfileView, path: str | Path, beside: dict[str, Any] | None = None) -> None:
    """Writes a profile; the file is whole or not there.

    Args:
        beside: of numbers, texts, lists and dicts; read_profile gives it back.

    Raises:
        OutputError: the disk does not take it.
    """
    taken, file = profile.taken(), Path(path)
    arrays: dict[str, NDArray[Any]] = {}
    routers = []
    for number, name in enumerate(taken.routers):
        own = taken.of(name)
        routers.append({"name": name, "branches": own.branches, "choices": own.choices, "calls": own.calls,
                        "lost": own.lost})
        arrays |= {f"{number}.{word}": getattr(own, word) for word in ARRAYS}
        arrays[f"{number}.decided"] = np.array([(call, *ids.shape) for call, ids in own.decided],
                                               np.int64).reshape(-1, 3)
        arrays[f"{number}.ids"] = np.concatenate([ids.reshape(-1) for _, ids in own.decided] or [np.zeros(0, np.int16)])
    head = {"format": FORMAT, "model": taken.model, "routers": routers, "overhead": taken.overhead,
            "beside": beside}
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, head=np.frombuffer(json.dumps(head).encode(), np.uint8), **arrays)
    try:
        write_atomically(file, content.getvalue())
    except OSError as error:
        raise OutputError(f"the profile could not be written to {file.name}", why=f"{error.strerror or error}",
                          do="give a folder that is there and has space") from error


def load_profile(path: str | Path) -> Profile:
    """Reads what save_profile wrote.

    Raises:
        InputError: the file is not there, or is no whole profile.
    """
    return read_profile(path)[0]


def read_profile(path: str | Path) -> tuple[Profile, dict[str, Any] | None]:
    """Reads what save_profile wrote, and what it was given beside.

    Raises:
        InputError: the file is not there, or is no whole profile.
    """
    file = Path(path)
    try:
        with np.load(file, allow_pickle=False) as content:
            head = json.loads(bytes(content["head"]).decode())
            if head["format"] != FORMAT:
                raise ValueError(f"its format is {head['format']!r:.40}")
            records = {one["name"]: _record(number, one, content) for number, one in enumerate(head["routers"])}
        model = tuple((str(name), int(branches)) for name, branches in head["model"])
        if model != tuple((name, own.branches) for name, own in records.items()):
            raise ValueError("its routers are not those of its model")
        overhead = tuple(map(float, head["overhead"])) if head["overhead"] else None
    except (OSError, KeyError, ValueError, TypeError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise InputError(f"{file.name} is no profile", why=f"{error}",
                         do="give a file that route.save_profile wrote") from error
    return Profile(model, records, overhead), head.get("beside")  # type: ignore[arg-type]


def _record(number: int, head: dict[str, Any], content: Any) -> RouterProfile:
    """Raises ValueError where arrays do not fit each other."""
    branches, choices, calls, lost = (int(head[word]) for word in ("branches", "choices", "calls", "lost"))
    found = {word: np.asarray(content[f"{number}.{word}"]).astype(np.int64, casting="safe") for word in ARRAYS}
    samples = len(found["loads"])
    shapes = {"totals": (branches,), "histogram": (branches, BUCKETS), "loads": (samples, branches),
              "cells": (samples,), "numbers": (samples,)}
    for word, shape in shapes.items():
        if found[word].shape != shape:
            raise ValueError(f"{word} of router {head['name']!r:.40} has shape {found[word].shape}, not {shape}")
    ids, decided, begin = np.asarray(content[f"{number}.ids"]).astype(np.int16, casting="safe"), [], 0
    if ids.size and not (ids.min() >= -1 and ids.max() < branches):
        raise ValueError(f"decisions of router {head['name']!r:.40} are for branches that it does not have")
    for call, cells, own in content[f"{number}.decided"].tolist():
        if cells < 0 or own < 0 or begin + cells * own > ids.size:
            raise ValueError(f"decisions of router {head['name']!r:.40} are cut off")
        decided.append((call, ids[begin:begin + cells * own].reshape(cells, own)))
        begin += cells * own
    return RouterProfile(branches, choices, calls, lost, decided=tuple(decided), **found)
