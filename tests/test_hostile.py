"""Promises to users, tried with hostile use: each test is one, and reads without knowing how AnyShape works."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch

import anyshape


def test_machine_code_that_somebody_else_may_have_written_is_not_run(tmp_path):
    """A cache folder that anybody can write to is not read and not written, and one warning says so."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    x = torch.randn(3, 7)
    fast = anyshape.compile(lambda x: torch.softmax(x * 3, -1), strict=True, cache_dir=str(tmp_path / "cache"))
    with pytest.warns(RuntimeWarning, match="somebody else may have written it"):
        torch.testing.assert_close(fast(x), torch.softmax(x * 3, -1))
    assert list(Path(tmp_path / "cache").iterdir()) == []
