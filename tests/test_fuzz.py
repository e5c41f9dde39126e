"""Random graphs run natively against the reference interpreter, graphs that once failed, and memory over many calls.

A new failure is shrunk and written to tests/corpus/ as text; from then on `test_corpus` runs it.
"""
from __future__ import annotations

import gc
import json
import os
import random
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import forked
import fuzzing
from anyshape.base.config import Config
from anyshape.ir.parse import parse
from anyshape.runtime.call.program import RECORDS
from anyshape.runtime.context.process_context import shared_context
from roads import compiled

pytestmark = pytest.mark.usefixtures("quick_collections")

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
CRASHED = "the process ended with code"


def run_seeds(first: int, count: int, shapes: int) -> list[dict[str, Any]]:
    """The outcome of every seed, from worker processes: a crash is the outcome of its seed."""
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    found: list[dict[str, Any]] = []
    while len(found) < count:
        start = first + len(found)
        left = count - len(found)
        with tempfile.TemporaryDirectory() as folder:
            done = forked.Run(HERE / "fuzzing.py", [str(start), str(left), str(shapes)], environment,
                              Path(folder)).done(300 + 10 * left)
        told = [json.loads(line) for line in done.stdout.splitlines()]
        ended = [item for item in told if "seed" in item]
        if len(ended) < left:
            assert told, done.stderr
            ended.append({"seed": start + len(ended), "reason": f"{CRASHED} {done.returncode}"})
        found += ended
    return found


def check_seeds(first: int, count: int, shapes: int) -> None:
    failures = [told for told in run_seeds(first, count, shapes) if "reason" in told]
    for told in failures:
        if "text" in told:
            sizes = " ".join(f"{name}={size}" for name, size in told["sizes"].items())
            path = CORPUS / f"fuzz_{told['seed']}.txt"
            path.write_text(f"# sizes {sizes}; {told['reason'].splitlines()[0]}\n{told['text']}", encoding="utf-8")
    assert not failures, "\n".join(f"seed {told['seed']}: {told['reason']}" for told in failures)


def test_random_graphs():
    check_seeds(1000, 25, 5)


@pytest.mark.full
def test_many_random_graphs():
    check_seeds(2000, 300, 5)


def test_the_fuzzer_sees_wrong_numbers():
    """A graph in which two operands are exchanged is found, and shrunk to the one equation."""
    graph = parse("""
    graph g(x: f32[a], y: f32[a], a: size) where 1 <= a <= 5
      d = sub(x, y)   f32[a]
      e = tanh(d)     f32[a]
      f = add(e, x)   f32[a]
      return f
    """)
    executable = fuzzing.compile_graph(parse(
        "graph g(x: f32[a], y: f32[a], a: size) where 1 <= a <= 5\n"
        "  d = sub(y, x)  f32[a]\n  e = tanh(d)  f32[a]\n  f = add(e, x)  f32[a]\n  return f\n"),
        Config.make()).executable
    inputs = fuzzing.make_inputs(graph, {"a": 4}, 0)
    assert "error" in fuzzing.differs(graph, executable, fuzzing.in_double(graph), inputs)


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.txt")), ids=lambda path: path.stem)
def test_corpus(path: Path):
    text = path.read_text(encoding="utf-8")
    graph = parse(text)
    named = {name: int(size) for name, size in re.findall(r"(\w+)=(\d+)", text.split(";")[0])}
    sizes = [named] if named else []
    for seed in range(3):
        draw = random.Random(seed)
        sizes.append({name: draw.randint(low, 6 if high is None else high) for name, low, high in graph.facts.ranges})
    failure = fuzzing.attempt(graph, sizes, 0, Config.make())
    assert failure is None, f"{failure.reason} at {failure.sizes}"


# ---- memory


def resident() -> int:
    """Bytes of memory that this process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)
        self.up = torch.nn.Linear(16, 48)
        self.down = torch.nn.Linear(48, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return torch.softmax(y @ y.transpose(-1, -2), -1) @ y


def check_memory(calls: int, columns: int) -> None:
    """Random shapes: neither resident memory nor the arenas grow, once every shape has been seen."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    block = Block()
    fast = compiled(block, strict=True)
    shapes = [(k, n) for k in range(1, 5) for n in range(1, columns + 1)]
    random.Random(0).shuffle(shapes)

    def step(rows: int, length: int) -> None:
        fast(torch.randn(rows, length, 16)).sum().backward()
        block.zero_grad()

    for shape in [*shapes, *shapes[:100]]:
        step(*shape)
    gc.collect()
    context = shared_context()
    held = context.temporary.held + context.kept.held
    before = resident()
    for k in range(calls):
        step(*shapes[k % len(shapes)])
    gc.collect()
    assert context.temporary.held + context.kept.held <= held
    assert resident() - before < 2 << 20
    assert not context.host.running


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="resident memory is read from /proc")
def test_memory_of_many_calls():
    check_memory(500, 30)


@pytest.mark.full
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="resident memory is read from /proc")
def test_memory_of_thousands_of_calls():
    check_memory(5000, 30)


@pytest.mark.full
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="resident memory is read from /proc")
def test_memory_of_more_shapes_than_a_program_remembers():
    assert 3 * RECORDS < 4 * 400
    check_memory(3200, 400)
