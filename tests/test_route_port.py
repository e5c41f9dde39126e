"""The example of a mixture of experts that is ported by hand: as it says, in ten lines, equal, and compiled once."""
from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "port_moe.py"


def test_a_mixture_of_experts_is_ported_in_ten_lines():
    spec = importlib.util.spec_from_file_location("port_moe", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = EXAMPLE.read_text("utf-8")
    [port] = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == "Routed"]
    lines = text.splitlines()[port.lineno - 1:port.end_lineno]
    assert len([line for line in lines if line.strip() and '"""' not in line]) <= 10
    found = module.main(["--experts", "4", "--width", "16", "--tokens", "32", "--steps", "20"])
    assert found["difference"] < 1e-5 and found["recompiled"] == 0 and found["last loss"] < found["first loss"]
