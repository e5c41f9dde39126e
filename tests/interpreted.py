"""A pytest plugin for a process with TRITON_INTERPRET=1: kernels of the Triton backend, interpreted, take the place of
the CPU's in the tests of loop programs (test_backend.py) and behind the backend interface (test_seam.py's models)."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from anyshape.backend import targets
from anyshape.backend.cpu.llvm.jit import LoadedKernel
from anyshape.backend.cpu.target import CpuTarget
from anyshape.backend.triton import target as triton_target
from anyshape.backend.triton.interpret import LoadedInterpreted
from anyshape.backend.triton.schedule import emit
from anyshape.kernel.loop_ir.program import LoopProgram

kernels = LoadedInterpreted()


class InterpretedTarget(CpuTarget):
    """The CPU with a GPU's kernels, interpreted: what fuses, and which versions there are, is as on the GPU."""

    hardware = triton_target.HARDWARE

    @property
    def unsupported(self) -> frozenset[str]:
        return triton_target.unsupported()

    def emit(self, program: LoopProgram) -> str:
        return emit(program)

    def build(self, texts: Sequence[str]) -> list[LoadedKernel]:
        return kernels.build(texts)


def target_of(cache: Any, products: str) -> InterpretedTarget:
    cpu = targets._module(targets.TARGETS["cpu"]).target_of(cache, products)
    return InterpretedTarget(cpu.machine, cpu.native, cpu.autotune)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import test_backend
    monkeypatch.setattr(test_backend, "compiled", lambda program: kernels.build([emit(program)])[0])
    monkeypatch.setattr(test_backend, "SIZES", (0, 1, 3, 65))
    monkeypatch.setitem(targets.TARGETS, "interpreted", __name__)
    monkeypatch.setattr(targets, "DEFAULT", "interpreted")
    kernels.errors.clear()
    yield
    assert not kernels.errors, "\n".join(kernels.errors[:3])
