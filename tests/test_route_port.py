"""The example of a mixture of experts that is ported by hand: as it says, in ten lines, equal, and compiled once."""
from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "port_moe.py"


def test_a_mixture_of_experts_is_ported_in_ten_lines():
    spec = importlib.util.spec_from_file_location("port_moe", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    source = inspect.getsource(module.Routed)
    lines = [line for line in source.splitlines() if line.strip() and '"""' not in line]
    assert len(lines) <= 10
    found = module.main(["--experts", "4", "--width", "16", "--tokens", "32", "--steps", "20"])
    assert found["difference"] < 1e-5 and found["recompiled"] == 0 and found["last loss"] < found["first loss"]
