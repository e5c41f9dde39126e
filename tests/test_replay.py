"""Kernels and plans of recorded graphs come out byte for byte as before, unless a change means to change them.

Where this fails and should not: `python tests/recorded.py texts FOLDER` on both revisions, and a diff of the folders.
"""
from __future__ import annotations

from collections.abc import Callable

import pytest

from recorded import FOLDER, MODELS, digests


@pytest.mark.parametrize("model", MODELS)
def test_replay(model: str, golden: Callable[[str, str], None]) -> None:
    found = digests(model)
    assert " plan  " in found and " avx512  " in found and " avx2  " in found
    golden(f"replay/{model}.txt", found)


def test_every_recorded_graph_is_replayed() -> None:
    assert {path.name.split(".")[0] for path in FOLDER.glob("*.txt.xz")} == set(MODELS)
