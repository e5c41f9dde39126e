"""The call path: how many functions a reader follows through a warm call, and down the road of a first call.

Counted by `sys.setprofile`, in functions and files of src/anyshape; generated code belongs to the file that makes it.
The numbers are limits that may fall, and may rise only with a reason. They are what is reached, not what was asked for:
both paths are longer than was asked for (docs/adr/030-call-path.md).
"""
from __future__ import annotations

from typing import Any

import torch

import anyshape
from counting import Function, entered

WARM = (16, 9)  # functions, files. Asked for: (15, 8)
# the same on the road of a first call; a program that runs without PyTorch, too, is a file more. Asked for: (45, 25)
# (one of them looks for a program again where a thread waited for another one that made it; what is compiled, its
# callable and its ways of tracing are a file each: one more on a warm call, two on the road)
ROAD = (54, 30)
# The floors of the road (ARCHITECTURE.md), each by the function that one enters it by. A first call enters over a
# thousand functions, for a compiler has many passes; nobody follows these. What a reader follows is the way from the
# entrance to each floor: the functions on the stack there, and this is what is counted. It leaves out helpers that have
# returned by then, so the number is a lower bound, and not to be compared with the 70 in 39 that were once counted by
# hand.
FLOORS = (
    ("frontend/importer/fx_to_graph.py", "to_graph"),
    ("passes/driver/pipeline.py", "run"),
    ("kernel/fusion/vertical.py", "fuse"),
    ("kernel/lowering/lower.py", "lower"),
    ("backend/cpu/codegen/kernel.py", "emit"),
    ("backend/cpu/llvm/jit.py", "build"),
    ("compiler/build_plan.py", "assemble"),
    ("plan/driver/pipeline.py", "PlanPasses.apply"),
    ("runtime/call/executable.py", "Executable.__init__"),
    ("runtime/specialize/specialization.py", "Specializer.make"),
    ("backend/cpu/plan_runner.py", "CpuPlanRunner.run"),
)


def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x @ w, -1)


def files(functions: Any) -> set[str]:
    return {file for file, _ in functions}


def told(functions: Any) -> str:
    return "\n".join(f"{file} {name}" for file, name in functions)


def test_a_warm_call_goes_through_few_functions() -> None:
    fast = anyshape.compile(model)
    w = torch.randn(8, 6)
    with torch.no_grad():
        for rows in (5, 6, 7, 6, 7):
            fast(torch.randn(rows, 8), w)
        x = torch.randn(6, 8)
        anyshape.release()  # of several free blocks, which other tests have left, the smallest would be looked for
        # of several calls: in some, garbage goes or a pool is trimmed, once in 256 calls or a minute
        path = min((entered(lambda: fast(x, w)) for _ in range(5)), key=len)
    assert ("runtime/call/program.py", "Program.__call__") in named(path), told(path)
    assert len(path) <= WARM[0], told(path)
    assert len(files(path)) <= WARM[1], told(path)


def named(functions: Any) -> dict[Function, Function]:
    """By the name without its line."""
    return {(file, name.rsplit(":", 1)[0]): (file, name) for file, name in functions}


def test_the_road_of_a_first_call_is_short() -> None:
    fast = anyshape.compile(model)
    w, x = torch.randn(8, 6), torch.randn(5, 8)
    with torch.no_grad():
        first = entered(lambda: fast(x, w))
    names = named(first)
    missing = [floor for floor in FLOORS if floor not in names]
    assert not missing, f"a first call does not come by {missing}"
    road = {one for floor in FLOORS for one in first[names[floor]][0]}
    assert len(road) <= ROAD[0], told(sorted(road))
    assert len(files(road)) <= ROAD[1], told(sorted(road))
