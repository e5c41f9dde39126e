"""How fast the machine is: measured once, only where something has to be chosen, and remembered on disk."""
from __future__ import annotations

import math
from array import array

import pytest
import torch

import anyshape
from anyshape.backend.cpu.step_timer import durations
from anyshape.backend.targets import usual_target
from anyshape.base.disk_cache import DiskCache
from anyshape.ir.types import TensorType
from anyshape.kernel.schedule.hardware_params import Speeds
from anyshape.plan.ir.program import CopyStep, LibraryStep, Window
from anyshape.runtime.budget import calibration
from anyshape.runtime.budget.calibration import Calibration
from anyshape.runtime.cost.step_cost import Work
from anyshape.sym.expr import symbol
from limits import NO_LIMIT, limit_of, net, sizes, step

n = symbol("n")
USUAL = usual_target().hardware.speeds


def window(name, dtype, *shape):
    return Window(name, TensorType(dtype, shape))


def product_of(dtype):
    return LibraryStep("matmul", (window("a", dtype, n, 8), window("b", dtype, 8, 4)), (window("c", dtype, n, 4),))


@pytest.fixture
def measured(monkeypatch):
    """What was measured, in place of measuring it."""
    found: list[tuple[object, ...]] = []
    monkeypatch.setattr(calibration, "multiplied", lambda dtype, *_: found.append((dtype,)) or 5e9)
    monkeypatch.setattr(calibration, "copied", lambda threads, _: found.append(("copy", threads)) or 7e9 / threads)
    return found


def test_seconds_follow_from_speeds() -> None:
    speeds = Speeds({**USUAL.products, "f32": 1e9, "bf16": 4e9}, 2e9)
    copy = CopyStep(window("a", "f32", n), window("b", "f32", n))
    integers = product_of("i64")  # as f32, for want of better
    found = Work([product_of("f32"), product_of("bf16"), copy, None, integers], "test").seconds({"n": 10}, speeds)
    operations, elements = 2 * 10 * 8 * 4, 10 * 8 + 8 * 4 + 10 * 4
    assert found.tolist() == pytest.approx([operations / 1e9 + 4 * elements / 2e9,
                                            operations / 4e9 + 2 * elements / 2e9, 80 / 2e9, 0,
                                            operations / 1e9 + 8 * elements / 2e9])


def test_it_is_measured_once_for_a_dtype_and_a_number_of_threads(measured, tmp_path) -> None:
    cache = DiskCache(str(tmp_path))
    first = Calibration(cache, usual_target())
    for _ in range(2):
        assert first.speeds(["f32", "f32"], 1) == Speeds({**USUAL.products, "f32": 5e9}, 7e9)
    assert sorted(measured) == [("copy", 1), ("f32",)]
    speeds = Calibration(cache, usual_target()).speeds(["f32", "bf16"], 2)
    assert speeds == Speeds({**USUAL.products, "f32": 5e9, "bf16": 5e9}, 3.5e9)
    assert sorted(measured) == [("bf16",), ("copy", 1), ("copy", 2), ("f32",)]
    Calibration(cache, usual_target()).speeds(["f32", "bf16"], 2)
    assert len(measured) == 4
    Calibration(None, usual_target()).speeds(["f32"], 1)
    assert len(measured) == 6


def test_what_cannot_be_measured_is_as_usual_and_is_not_kept(measured, monkeypatch, tmp_path) -> None:
    def fails(_, __):
        raise RuntimeError("can't allocate memory")
    cache = DiskCache(str(tmp_path))
    monkeypatch.setattr(calibration, "copied", fails)
    assert Calibration(cache, usual_target()).speeds(["f32"], 1).bytes == USUAL.bytes
    for wrong in (math.inf, math.nan, 0.0):
        monkeypatch.setattr(calibration, "copied", lambda _, __, wrong=wrong: wrong)
        assert Calibration(cache, usual_target()).speeds(["f32"], 1).bytes == USUAL.bytes
    monkeypatch.setattr(calibration, "copied", lambda _, __: 9e9)
    assert Calibration(cache, usual_target()).speeds(["f32"], 1).bytes == 9e9


def test_the_real_thing() -> None:
    for dtype in ("f32", "f64", "bf16", "f16"):
        assert 1e6 < calibration.multiplied(dtype) < 1e14
    assert 1e6 < calibration.copied(1) < 1e13


def test_only_a_call_that_has_to_choose_measures(measured, tmp_path) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 32)
    settings = {"strict": True, "calibrate": True, "cache_dir": str(tmp_path)}
    module = net(count=2)
    free = anyshape.compile(module, memory_limit=NO_LIMIT, **settings)
    step(free, module, x)
    need = limit_of(free).least(sizes(free, x))  # which searches the whole tradeoff
    threads = torch.get_num_threads()
    assert sorted(measured) == [("copy", threads), ("f32",)]
    measured.clear()
    step(free, module, x[:40])
    assert not measured
    other = {**settings, "cache_dir": str(tmp_path / "other")}
    step(anyshape.compile(module, memory_limit=need, **{**other, "calibrate": False}), module, x)
    assert not measured
    tight = anyshape.compile(module, memory_limit=need, **other)
    step(tight, module, x)
    assert sorted(measured) == [("copy", threads), ("f32",)]
    limit = limit_of(tight)
    point = next(one for one in limit.tradeoff(sizes(tight, x)) if one.dropped)
    assert f"{limit.seconds(point) * threads:.6g}" == f"{point.seconds:.6g}"


def test_a_profile_of_a_young_thread_has_its_steps() -> None:
    """The clock of one that has used no whole second yet says 0 seconds."""
    clock = array("q", [0, 500, -1, 0, 800, 0, 1, 0, 1, 0, 0, 0])
    assert durations(clock, 2) == [(0, pytest.approx(3e-7)), (1, pytest.approx(1 - 8e-7))]
