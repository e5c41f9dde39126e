"""The step profiler: `anyshape.profile()` of compiled objects and of loaded files, and `anyshape run --profile`."""
from __future__ import annotations

import gc
import json
import threading
import weakref

import numpy as np
import pytest
import torch

import anyshape
from anyshape.runtime.context.profiling import PROCESS
from anyshape.tools.cli import main

K, N = 64, 48


def test_steps_of_a_compiled_object_and_of_its_backward(tmp_path) -> None:
    layer = torch.nn.Linear(K, N)
    fast = anyshape.compile(lambda x: torch.softmax(layer(x), -1))
    x = torch.randn(5, K, requires_grad=True)
    wanted = fast(x)
    with anyshape.profile() as outer:
        with anyshape.profile() as profile:
            torch.testing.assert_close(fast(x), wanted, rtol=0, atol=0)
            fast(torch.randn(7, K, requires_grad=True)).sum().backward()
        fast(x)
    assert PROCESS.runs is None and len(outer.runs) == len(profile.runs) + 1 == 4
    fast(x)
    assert len(profile.runs) == 3
    steps = profile.steps()
    assert sorted(steps, key=lambda one: -one.seconds) == list(steps)
    product, = (one for one in steps if "forward" in one.program and one.operations)
    assert product.runs == 2 and product.operations == 2 * (5 + 7) * K * N and product.seconds > 0
    assert product.bytes >= 4 * 2 * K * N and "test_profile.py" in product.where
    times = [seconds for run in profile.runs for _, seconds in run.steps]
    assert sum(one.seconds for one in steps) == pytest.approx(sum(times))
    text = str(profile)
    assert text.startswith("3 runs of 2 programs") and "GFLOP/s" in text and "matmul" in text
    profile.export_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(one["cat"] == "program" for one in events) == 3
    assert [one["args"]["operations"] for one in events if one["args"].get("operations")][:1] == [2 * 5 * K * N]
    with pytest.raises(anyshape.AnyShapeError, match="cannot be written"):
        profile.export_chrome_trace(tmp_path / "nowhere" / "trace.json")


def test_runs_of_all_threads_are_recorded_and_none_before_or_after() -> None:
    fast = anyshape.compile(lambda x: x.exp().sum(-1))
    fast(torch.randn(3, 4))
    with anyshape.profile() as profile:
        threads = [threading.Thread(target=lambda: [fast(torch.randn(3, 4)) for _ in range(20)]) for _ in range(3)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert len(profile.runs) == 60 and len({run.thread for run in profile.runs}) <= 3
    assert str(profile).splitlines()[1] == "kernel 100%"
    with anyshape.profile() as nothing:
        pass
    assert str(nothing).startswith("0 runs of 0 programs") and nothing.steps() == ()


def test_a_profile_keeps_no_program_alive() -> None:
    fast = anyshape.compile(lambda x: x.exp().sum(-1))
    fast(torch.randn(3, 4))
    program = weakref.ref(fast.programs[0].executable)
    with anyshape.profile() as profile:
        fast(torch.randn(3, 4))
        assert len(profile.runs) == 1
    del fast
    gc.collect()
    assert program() is None and str(profile).startswith("1 run of 1 program")


def test_an_error_in_between_ends_the_record() -> None:
    with pytest.raises(KeyError), anyshape.profile():
        raise KeyError
    assert PROCESS.runs is None


def test_a_loaded_file(tmp_path, capsys) -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(K, N), torch.nn.GELU()).eval()
    fast = anyshape.compile(layer)
    with torch.no_grad():
        fast(torch.randn(5, K))
    path = anyshape.save(fast, tmp_path / "layer.any")
    x = np.ones((9, K), np.float32)
    with anyshape.load(path, trust_native=True) as run:
        wanted = run(x)
        with anyshape.profile() as profile:
            np.testing.assert_array_equal(run(x), wanted)
    assert sum(one.operations for one in profile.steps()) == 2 * 9 * K * N
    np.save(tmp_path / "x.npy", x)
    assert main(["run", str(path), "--input", str(tmp_path / "x.npy"), "--trust-native", "--profile"]) == 0
    assert "1 run of 1 program: " in capsys.readouterr().out
