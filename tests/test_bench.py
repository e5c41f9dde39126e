"""The benchmark: its shapes, its counter of memory, its arithmetic, and one small run from end to end."""
from __future__ import annotations

import dataclasses
import importlib
import json
import mmap
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch._subclasses.fake_tensor import FakeTensorMode

import anyshape
from anyshape.base.errors import AnyShapeError
from anyshape.tools import cli
from anyshape_bench.experiments.ablation import experiment as ablation
from anyshape_bench.experiments.ablation import results as techniques
from anyshape_bench.experiments.roofline import report as roofline_report
from anyshape_bench.experiments.roofline import results as roofline_results
from anyshape_bench.experiments.roofline import worker as roofline
from anyshape_bench.experiments.roofline.functions import FUNCTIONS, LEAST, Function
from anyshape_bench.experiments.speed import charts, report, targets, worker
from anyshape_bench.experiments.speed.experiment import Speed
from anyshape_bench.experiments.speed.results import Record, Results, cell, single_gap, speedup
from anyshape_bench.harness import driver, runner, tables
from anyshape_bench.harness import worker as process
from anyshape_bench.measure import compiler, launch_count, memory_counter, static_shape_baseline, statistics
from anyshape_bench.models import bench_models, custom_model, dlrm, padding, suite

pytestmark = pytest.mark.usefixtures("quick_collections")

SOURCES = os.pathsep.join(runner.ROOTS)


# ---- shapes ----

def columns(entry: suite.Entry) -> list[tuple[int, ...]]:
    return list(zip(*entry.shapes, strict=True))


@pytest.mark.parametrize("name", [name for name in suite.SUITE if name != "mlp"])
def test_shapes_cover_their_range(name: str) -> None:
    entry = suite.SUITE[name]
    assert len(entry.shapes) == len(set(entry.shapes)) == suite.FULL_SHAPES
    assert all(size > 1 for shape in entry.shapes[:suite.WARM_UP_CALLS] for size in shape)
    rest = entry.shapes[suite.WARM_UP_CALLS:]
    least = [min(size for size in column if size > 1) for column in columns(entry)]
    assert all(found in (1, size) for found, size in zip(rest[0], least, strict=True))
    assert rest[-1] == tuple(map(max, columns(entry)))
    primes = set(suite.primes(2, 500))
    assert any(all(size in primes for size in shape) for shape in rest)
    if len(rest[0]) > 1:  # each size is also at its greatest by itself
        assert all(end in {shape[place] for shape in rest[1:-1]} for place, end in enumerate(rest[-1]))


def test_ranges_are_those_of_the_suite() -> None:
    ranges = {name: list(zip(entry.shapes[2], entry.shapes[-1], strict=True)) for name, entry in suite.SUITE.items()
              if len(entry.shapes) > 2}
    assert ranges["llama"] == [(2, 6), (48, 256)]
    assert ranges["bert"] == [(1, 8), (16, 320)]
    assert ranges["gpt2-decode"] == [(1, 400)]
    assert ranges["resnet"] == [(1, 4), (96, 320), (96, 320)]


def test_a_size_of_1_is_among_the_shapes_wherever_a_model_can_run_it() -> None:
    ones = {name: [place for place, column in enumerate(zip(*entry.shapes, *entry.apart, strict=True)) if 1 in column]
            for name, entry in suite.SUITE.items()}
    # an image of fewer than 16 pixels has no patch; a loss over the words after the first needs two
    assert ones == {"llama": [0], "bert": [0, 1], "gpt2-decode": [0], "resnet": [0, 1, 2], "mlp": [0], "vit": [0],
                    "conformer": [0, 1], "t5": [0, 1, 2], "dlrm": [0, 1], "mixtral": [0, 1], "demo-llama": [0],
                    "llama-12": [0], "t5-train": [0], "unet": [0], "llama-small": [0], "llama-32": [0],
                    "llama-1b-like": [0], "bert-train": [0], "vit-train": [0]}


@pytest.mark.parametrize("ranges", [((1, 1),), ((1, 2),), ((1, 8),), ((24, 28),), ((3, 3), (1, 40)), ((1, 3), (1, 3))])
def test_small_ranges_have_shapes(ranges: tuple[tuple[int, int], ...]) -> None:
    found = suite.spread(ranges, "own")
    room = 1
    for low, high in ranges:
        room *= high - low + 1
    assert len(found) == len(set(found)) == min(room, suite.FULL_SHAPES)
    assert all(low <= size <= high for shape in found for size, (low, high) in zip(shape, ranges, strict=True))
    assert found[-1] == tuple(high for _, high in ranges) and tuple(low for low, _ in ranges) in found


def test_shapes_are_the_same_in_every_process() -> None:
    text = "from anyshape_bench.models import suite; print(" \
           "suite.SUITE['bert'].shapes)"
    answers = {subprocess.run([sys.executable, "-c", text], env=os.environ | {"PYTHONPATH": SOURCES,
               "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True).stdout for seed in "12"}
    assert answers == {f"{suite.SUITE['bert'].shapes}\n"}


def test_pick_keeps_warm_up_least_and_greatest() -> None:
    shapes = suite.SUITE["bert"].shapes
    for number in (3, 4, 8, 39, 40, 100):
        few = suite.pick(shapes, number)
        assert len(few) == len(set(few)) == min(number, 40)
        assert few[:2] == shapes[:2]
        assert few[2] == shapes[2]
        assert number == 3 or few[-1] == shapes[-1]
        assert number < 6 or (any(map(suite.of_primes, few[2:])) and any(map(suite.has_one, few[2:])))
        assert list(few) == [shape for shape in shapes if shape in few]


def test_decoding_grows() -> None:
    sizes = [size for (size,) in suite.SUITE["gpt2-decode"].shapes[2:]]
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, 400)


# ---- the counter ----

RANDOM_CALLS = """
import ctypes, mmap, random, sys
c = ctypes.CDLL(None)
for name in ("malloc", "calloc", "realloc", "memalign", "aligned_alloc", "mmap"):
    getattr(c, name).restype = ctypes.c_void_p
for name in ("live", "peak", "held", "lost"):
    getattr(c, "heapcount_" + name).restype = ctypes.c_long
size, pointer, LEAST = ctypes.c_size_t, ctypes.c_void_p, 1 << 16
draw, blocks = random.Random(int(sys.argv[1])), {}

def take(kind, n):
    if kind == "malloc":
        return c.malloc(size(n))
    if kind == "calloc":
        return c.calloc(size(n // 8), size(8))
    if kind == "posix_memalign":
        out = pointer()
        assert c.posix_memalign(ctypes.byref(out), size(64), size(n)) == 0
        return out.value
    return getattr(c, kind)(size(64), size(n))

start, start_held = c.heapcount_live(), c.heapcount_held()
c.heapcount_reset()
live = peak = held = 0
KINDS = ("malloc", "calloc", "posix_memalign", "memalign", "aligned_alloc")
for _ in range(4000):
    if blocks and draw.random() < 0.48:
        at = draw.choice(list(blocks))
        n, aligned = blocks.pop(at)
        if draw.random() < 0.3:
            m = draw.choice((100, LEAST - 8, LEAST, 3 * LEAST, 1 << 20))
            at = c.realloc(pointer(at), size(m))
            # a block that was not counted has no kind to keep
            blocks[at] = (m, aligned and n >= LEAST)
        else:
            c.free(pointer(at))
    else:
        kind = draw.choice(KINDS)
        n = 64 * draw.choice((1, 1023, 1024, 1025, 5000))
        blocks[take(kind, n)] = (n, kind not in ("malloc", "calloc"))
    live = sum(n for n, _ in blocks.values() if n >= LEAST)
    held = sum(n for n, aligned in blocks.values() if n >= LEAST and aligned)
    peak = max(peak, live)
    assert c.heapcount_live() - start == live, (c.heapcount_live() - start, live)
    assert c.heapcount_held() - start_held == held
assert c.heapcount_peak() - start == peak, (c.heapcount_peak() - start, peak)
c.heapcount_reset()
assert c.heapcount_peak() == c.heapcount_live()

before = c.heapcount_live()
at = c.mmap(None, size(1 << 20), 3, 0x22, -1, ctypes.c_long(0))
assert c.heapcount_live() - before == 1 << 20
c.munmap(pointer(at + (1 << 18)), size(1 << 18))
assert c.heapcount_live() - before == 3 << 18
c.munmap(pointer(at), size(1 << 20))
assert c.heapcount_live() == before
area = mmap.mmap(-1, 1 << 21)
assert c.heapcount_live() - before == 1 << 21
area.close()
assert c.heapcount_live() == before
assert c.heapcount_lost() == 0
print("counted")
"""


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library, why = memory_counter.build_counter(tmp_path_factory.mktemp("counter"))
    if library is None:
        pytest.skip(why)
    return library


@pytest.mark.parametrize("seed", ["1", "2"])
def test_counter_agrees_with_a_model_of_the_heap(counter: Path, seed: str) -> None:
    done = subprocess.run([sys.executable, "-c", RANDOM_CALLS, seed], env=os.environ | {"LD_PRELOAD": str(counter)},
                          capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout == "counted\n", done.stderr


def test_counter_survives_threads_and_forks(counter: Path) -> None:
    text = """
        import ctypes, os, threading
        stop = False
        def work():
            while not stop:
                bytearray(1 << 20)
        threads = [threading.Thread(target=work) for _ in range(3)]
        [t.start() for t in threads]
        for _ in range(20):
            child = os.fork()
            if child == 0:
                bytearray(1 << 20)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        stop = True
        [t.join() for t in threads]
        print("alive")
    """
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(text)],
                          env=os.environ | {"LD_PRELOAD": str(counter)}, capture_output=True, text=True, check=False,
                          timeout=300)
    assert done.stdout == "alive\n", done.stderr


def test_without_a_compiler_resident_memory_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    library, why = memory_counter.build_counter(tmp_path)
    assert library is None
    assert "compiler" in why
    meter = memory_counter.ResidentMeter()
    meter.reset()
    before = meter.live()
    # pages of its own: what malloc gives may be resident already
    with mmap.mmap(-1, 1 << 25) as block:
        block.write(os.urandom(1 << 16) * 512)
        assert meter.peak() - before > 30e6
    assert "resident" in report.document(Results(options={"memory_note": why}))


# ---- comparing with eager ----

def test_differences_are_found_and_told() -> None:
    right = {"y": torch.tensor([1.0, 2.0, 0.0, float("nan")])}
    assert worker.differences({"y": right["y"] * (1 + 1e-5)}, right, (4,)) == []
    assert "1 of 4" in worker.differences({"y": torch.tensor([1.0, 2.1, 0.0, float("nan")])}, right, (4,))[0]
    assert "1 of 4" in worker.differences({"y": torch.tensor([1.0, 2.0, 0.0, 0.0])}, right, (4,))[0]
    assert "float64" in worker.differences({"y": right["y"].double()}, right, (4,))[0]
    assert worker.differences({}, right, (4,)) == ["y is missing at (4,)"]


@pytest.mark.parametrize("name", ["demo-llama", "bert", "mixtral"])
def test_padding_into_a_bucket_changes_no_result(name: str) -> None:
    model = bench_models.load(name)
    step, padded = model.make(lambda module: module), worker.Padded(model.make(lambda module: module), model)
    shape = (3, 17)
    inputs = model.inputs(shape)
    assert padded.pad(inputs)[0].shape == (4, 128)
    wanted, found = step.check(inputs), padded.check(inputs)
    cut = {name: value[tuple(map(slice, wanted[name].shape))] for name, value in found.items()}
    assert worker.differences(cut, wanted, shape) == []


def test_buckets() -> None:
    dims = ("batch", "length")
    assert [padding.bucket(shape, dims) for shape in ((1, 1), (2, 128), (3, 129), (5, 256))] == [
        (1, 128), (2, 128), (4, 256), (8, 256)]
    with pytest.raises(AnyShapeError, match="no buckets"):
        padding.bucket((1, 224, 224), ("batch", "height", "width"))
    record = process.run(worker, {"model": "resnet", "backend": padding.BACKEND, "number": 0, "mode": "time",
                                  "shapes": 2, "repeats": 0, "threads": 0, "autocast": ""})
    assert "padding would change its results" in record["error"]


def test_lower_precision_is_held_to_eagers_own_error() -> None:
    exact = {"y": torch.randn(1000, generator=torch.Generator().manual_seed(0))}
    wanted = {"y": exact["y"].bfloat16()}
    own = wanted["y"].float() - exact["y"]
    assert worker.noisier({"y": (exact["y"] - own).bfloat16()}, wanted, exact, (1000,)) == []
    assert "error" in worker.noisier({"y": (exact["y"] + 4 * own).bfloat16()}, wanted, exact, (1000,))[0]
    assert "error" in worker.noisier({"y": wanted["y"] * float("nan")}, wanted, exact, (1000,))[0]
    assert "float32" in worker.noisier({"y": exact["y"]}, wanted, exact, (1000,))[0]
    assert worker.noisier({}, wanted, exact, (1000,)) == ["y is missing at (1000,)"]


def test_making_moments_moves_no_parameter() -> None:
    linear = torch.nn.Linear(8, 8)
    before = linear.weight.detach().clone()
    optimizer = torch.optim.AdamW(linear.parameters(), lr=0.1, weight_decay=0.1, fused=True)
    bench_models.make_moments(optimizer)
    assert torch.equal(linear.weight, before)
    assert linear.weight.grad is None
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert not optimizer.state[linear.weight]["exp_avg"].any()


def test_train_step_checks_gradients_and_updates() -> None:
    model = bench_models.load("demo-llama")
    step = model.make(lambda module: module)
    inputs = model.inputs((2, 7))
    found = step.check(inputs)
    assert {"loss", "gradient of lm_head.weight"} <= set(found)
    before = step.state()
    assert worker.differences(step.check(inputs), found, (2, 7)) == []
    step(inputs)
    assert not torch.equal(step.state()["lm_head.weight"], before["lm_head.weight"])


def test_decoding_gives_a_longer_cache() -> None:
    model = bench_models.load("gpt2-decode")
    logits, keys, values = model.make(lambda module: module)(model.inputs((5,)))
    assert logits.shape == (1, 1, 8192)
    assert keys.shape == values.shape == (6, 1, 8, 6, 64)


@pytest.mark.parametrize(("name", "shape", "wanted"), [
    ("vit", (2, 64, 100), [(2, 100)]),
    ("conformer", (2, 37), [(2, 10, 256)]),
    ("t5", (2, 5, 3), [(2, 3, 8192), (2, 5, 384)]),
    ("dlrm", (7, 2), [(7,)]),
    ("mixtral", (2, 5), [(2, 5, 8192)]),
])
def test_networks_give_what_they_say(name: str, shape: suite.Shape, wanted: list[tuple[int, ...]]) -> None:
    model = bench_models.load(name)
    assert len(model.dims) == len(shape)
    found = bench_models.flatten(model.make(lambda module: module)(model.inputs(shape)))
    assert [tuple(tensor.shape) for tensor in found] == wanted
    assert all(bool(tensor.isfinite().all()) for tensor in found)


def test_a_conformer_hears_each_example_alone() -> None:
    model = bench_models.load("conformer")
    step = model.make(lambda module: module)
    (spectrum,) = model.inputs((3, 41))
    whole, alone = step((spectrum,)), step((spectrum[1:2],))
    torch.testing.assert_close(whole[1:2], alone, rtol=1e-4, atol=1e-4)  # type: ignore[index]


def test_dlrm_sums_bags_and_takes_each_product_once() -> None:
    net = dlrm.DLRM()
    dense, chosen = torch.randn(4, dlrm.DENSE), torch.randint(0, dlrm.ROWS, (dlrm.TABLES, 4, 3))
    x = net.bottom(dense)
    vectors = [x, *(table.weight[chosen[i]].sum(1) for i, table in enumerate(net.tables))]
    products = [(vectors[i] * vectors[j]).sum(1) for i in range(len(vectors)) for j in range(i)]
    wanted = torch.sigmoid(net.top(torch.cat([x, torch.stack(products, 1)], 1))).squeeze(1)
    torch.testing.assert_close(net(dense, chosen), wanted, rtol=1e-4, atol=1e-5)


# ---- arithmetic ----

def record(backend: str, number: int, mode: str = "time", **found: object) -> dict[str, object]:
    empty = Record("bert", backend, number, mode, threads=1)
    return dataclasses.asdict(empty) | {"shapes": [[2, 3], [4, 5], [1, 1]]} | found


def synthetic() -> Results:
    timed = {"p50": 0.1, "p99": 0.2}
    return Results({"processor": "test", "cores": 2, "memory_bytes": 8e9}, {"rounds": 3}, [
        record("eager", 0, first_step=0.1, fresh=[1.0, 3.0], repeated=[1.0, 1.0, 2.0], **timed),
        record("anyshape", 0, first_step=9.0, fresh=[1.0, 1.0], repeated=[1.0, 0.5, 0.5], programs=2, **timed),
        record("anyshape", 1, first_step=3.0, fresh=[0.5, 0.5], repeated=[2.0, 2.0, 4.0], **timed),
        record("eager", 1, first_step=0.1, fresh=[1.0, 3.0], repeated=[1.0, 1.0, 2.0], **timed),
        record("eager", 2, first_step=0.1, fresh=[1.0, 3.0], repeated=[3.0, 1.0, 2.0], **timed),
        record("anyshape", 2, first_step=5.0, fresh=[1.0, 1.0], repeated=[1.0, 1.0, 2.0], **timed),
        record("eager", 3, "memory", memory=[100, 4000], memory_method="heap", checked=[[1, 1]]),
        record("anyshape", 3, "memory", memory=[1000, 500], memory_method="heap", checked=[[1, 1]],
               arena=[[[2, 3], "0.forward", 128, 128], [[4, 5], "0.forward", 2000000, 2000000]]),
    ])


def test_ratios_are_medians_over_rounds() -> None:
    summary = cell(synthetic(), "bert", "anyshape")
    assert summary.cold == 9.0
    assert summary.warm == 4.0
    assert summary.fresh == 2.0
    assert summary.fresh_warm == 3.0
    assert summary.repeated == 1.5
    assert (summary.peak, summary.peak_ratio, summary.programs) == (1000, 0.25, 2)
    assert (summary.arena, summary.arena_wrong) == (2000000, "")
    assert report.arena(summary) == "2.0 MB ="
    assert not report.problems(synthetic())


def test_a_wrong_prediction_is_shown_and_fails_the_run() -> None:
    results = synthetic()
    results.records[-1]["arena"][0][3] = 192
    assert report.problems(results) == [
        "WRONG PREDICTION: bert on anyshape: 0.forward at 2x3: 128 B predicted, 192 B counted"]
    assert "| 0.forward at 2x3: 128 B predicted, 192 B counted |" in report.markdown(results)


def test_a_broken_round_is_left_out_and_fails_the_run() -> None:
    results = synthetic()
    results.records[0] |= {"error": "died", "first_step": None, "fresh": [], "repeated": []}
    results.records[-1]["mismatches"] = ["output 0 at (1, 1) differs"]
    assert cell(results, "bert", "anyshape").fresh is None
    assert cell(results, "bert", "anyshape").repeated == 0.5 * (0.5 + 1.5)
    assert report.problems(results) == ["FAILED: bert on eager: died",
                                        "WRONG RESULT: bert on anyshape: output 0 at (1, 1) differs"]
    assert "| WRONG |" in report.markdown(results)


def test_geometric_mean() -> None:
    assert statistics.geometric_mean([2.0, 8.0, None]) == pytest.approx(4.0)
    assert statistics.geometric_mean([None]) is None


def test_numbers_in_words() -> None:
    assert [tables.seconds(s) for s in (None, 2.5, 0.0123, 4e-6)] == ["-", "2.5 s", "12.3 ms", "4 us"]
    assert statistics.quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.0
    assert statistics.quantile([float(i) for i in range(1, 101)], 0.99) == 99.0
    assert statistics.median([3.0, 1.0, 2.0]) == 2.0


def test_document_names_the_machine_and_every_model(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    synthetic().save(folder)
    results = Results.load(folder)
    assert results == Results.load(folder / "results.json")
    text = report.document(results)
    assert "processor: test" in text
    assert "| bert | anyshape | 9 s | 4 s | 2.00x | 1.50x |" in text
    assert "size 0 1-4, size 1 1-5; 3 shapes, with sizes of 1" in text
    assert "| 2 / 3 |" in text


def test_charts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = synthetic()
    for entry in results.records:
        entry["fresh"] = entry["fresh"][:1]
    written = charts.charts(results, tmp_path)
    assert {path.name for path in written} == {"new_shapes.png", "seen_shapes.png", "cold_first_step.png",
                                               "warm_first_step.png", "peak_memory.png", "steps_bert.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_one_chart_beside_stored_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    synthetic().save(tmp_path / "run")
    assert cli.main(["bench", "--show", str(tmp_path / "run"), "--chart", "both.png"]) == 0
    assert (tmp_path / "run" / "both.png").read_bytes().startswith(b"\x89PNG")
    alone = synthetic()
    alone.records = [r for r in alone.records if r["backend"] == "anyshape"]
    assert charts.chart(alone, tmp_path / "alone.png") is None


def test_a_chart_without_matplotlib_is_refused_before_anything_runs(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["bench", "mlp", "--out", str(tmp_path / "run"), "--chart", "c.png"]) == 2
    assert "--chart needs the package matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_stored_results_of_another_format_are_refused(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text('{"format": 0}')
    with pytest.raises(AnyShapeError, match="cannot read"):
        Results.load(tmp_path)


# ---- processes ----

OPTIONS = {"models": ["own_model:model"], "backends": ["eager"], "rounds": 1, "shapes": 0, "repeats": 0, "threads": 0,
           "autocast": "", "memory": False}


def test_backends_alternate() -> None:
    jobs = list(Speed().jobs(OPTIONS | {"models": ["mlp"], "backends": ["eager", "inductor", "anyshape"], "rounds": 2,
                                        "memory": True}, Results(), Path()))
    assert [j["backend"] for j in jobs] == ["eager", "inductor", "anyshape", "inductor", "anyshape", "eager",
                                            "eager", "inductor", "anyshape"]
    assert [j["mode"] for j in jobs] == ["time"] * 6 + ["memory"] * 3


OWN = """
import time, torch
from anyshape_bench.models.bench_models import BenchModel, InferenceStep

class Net(torch.nn.Module):
    calls = 0
    def forward(self, x):
        {body}

def model():
    return BenchModel("own", lambda compile_module: InferenceStep(Net(), compile_module),
                      lambda shape: (torch.ones(shape),), ((3, 30000), (4, 30000), (1, 30000), (8, 30000)))
"""


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
          capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Results, str]]:
    """Runs the command, whose processes are fresh ones, on a user's own model whose forward is `body`."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(body: str, *options: str) -> tuple[int, Results, str]:
        (tmp_path / "own_model.py").write_text(OWN.format(body=body))
        status = cli.main(["bench", f"{tmp_path / 'own_model.py'}:model", "--rounds", "1", "--out",
                           str(tmp_path / "out"), *options])
        said = capsys.readouterr()
        return status, Results.load(tmp_path / "out"), said.out + said.err

    return run


@pytest.fixture
def without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the processes of a command would find, in this one: each would import torch and the package anew."""
    def run(self: runner.Runner, job: dict, tell: object) -> dict:
        return process.run(importlib.import_module(self.module), job, self.answer(job))

    monkeypatch.setattr(runner.Runner, "run", run)


def test_end_to_end_with_counted_memory(bench: Callable[..., tuple[int, Results, str]], counter: Path) -> None:
    status, results, said = bench("return (x + 1) * 2", "--threads", "1", "--backends", "eager", "--markdown")
    assert status == 0, said
    timed, counted = results.records
    assert len(timed["fresh"]) == 2
    assert len(timed["repeated"]) == 4
    assert timed["first_step"] > 0
    assert counted["memory_method"] == "heap"
    # x + 1 and its double live together at the end
    assert counted["memory"] == [2 * 4 * rows * 30000 for rows in (3, 4, 1, 8)]
    assert counted["idle"] == 0
    assert counted["checked"] == [[1, 30000], [8, 30000]]
    assert "own_model.py:model | eager |" in said


TAGGER = """
import torch
from torch import nn

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 8)
        self.tags = nn.Linear(8, 5)

    def forward(self, words, tags):
        return nn.functional.cross_entropy(self.tags(torch.tanh(self.words(words))).flatten(0, 1), tags.flatten())

def tagger():
    def inputs(batch, length):
        return torch.randint(0, 50, (batch, length)), torch.randint(0, 5, (batch, length))
    return Tagger(), inputs, {"batch": (1, 4), "length": (1, 70)}, "train"

def softmax():
    return torch.softmax, lambda rows: (torch.randn(rows, 7), -1), {"rows": (1, 3)}

def wrong():
    return {wrong}
"""


@pytest.mark.full
def test_a_users_own_model_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine.py").write_text(TAGGER.replace("{wrong}", "None"))
    done = subprocess.run(
        [sys.executable, "-m", "anyshape_bench", "folder/mine.py:tagger", "--threads", "1", "--rounds", "1",
         "--shapes", "5", "--backends", "eager,anyshape", "--out", "out", "--markdown"], cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": SOURCES, "COLUMNS": "200"}, capture_output=True, text=True, check=False,
        timeout=240)
    results = Results.load(tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    timed = next(r for r in results.records if r["backend"] == "anyshape" and r["mode"] == "time")
    assert timed["trains"] and timed["dims"] == ["batch", "length"] and [1, 1] in timed["shapes"]
    # both programs at every shape, and the greatest one takes some memory
    assert len(timed["arena"]) == 2 * len(timed["shapes"]) == 10
    assert {name for _, name, _, _ in timed["arena"]} >= {"0.forward", "0.backward"}
    assert all(predicted == counted for _, _, predicted, counted in timed["arena"])
    assert max(counted for _, _, _, counted in timed["arena"]) >= 4 * 70 * 5 * 4
    assert " = | yes |" in done.stdout
    assert "batch 1-4, length 1-70; 5 shapes" in report.describe(results, "folder/mine.py:tagger")


def test_a_function_is_a_model_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plain.py").write_text(TAGGER.replace("{wrong}", "None"))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    model = custom_model.load("plain:softmax")
    assert model.shapes == ((2,), (1,), (3,)) and not model.trains
    again = custom_model.load("plain:softmax")
    assert torch.equal(model.inputs((3,))[0], again.inputs((3,))[0])
    step = model.make(lambda module: module)
    assert step(model.inputs((3,))).shape == (3, 7)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("returned", "why"), [
    ("Tagger()", "it returned a Tagger"),
    ("(Tagger(), 3, {'n': (1, 2)})", "the model and the function that makes its inputs are called"),
    ("(Tagger(), print, {})", "the third thing is {}"),
    ("(Tagger(), print, {'n': (0, 2)})", "two whole numbers from 1 on"),
    ("(Tagger(), print, {'n': (1, 2)}, 'trains')", "it returned 4 things"),
    ("(torch.softmax, print, {'n': (1, 2)}, 'train')", "its model is no nn.Module"),
])
def test_an_own_model_that_breaks_the_contract_is_told(tmp_path: Path, returned: str, why: str) -> None:
    path = tmp_path / "wrong_model.py"
    path.write_text(TAGGER.replace("{wrong}", returned))
    with pytest.raises(AnyShapeError) as caught:
        custom_model.load(f"{path}:wrong")
    assert why in str(caught.value) and "do:" in str(caught.value)
    for name in (f"{path}:absent", f"{tmp_path / 'absent.py'}:model", "no_such_module:model"):
        with pytest.raises(AnyShapeError, match="cannot load"):
            custom_model.load(name)


@pytest.mark.usefixtures("without_processes")
def test_wrong_results_fail_loudly(bench: Callable[..., tuple[int, Results, str]]) -> None:
    body = "Net.calls += 1; return x * Net.calls"
    status, results, said = bench(body, "--backends", "eager")
    assert status == 1
    assert "WRONG RESULT" in said
    assert results.records[1]["mismatches"]


@pytest.mark.full
def test_a_dead_process_is_recorded_and_the_rest_goes_on(bench: Callable[..., tuple[int, Results, str]]) -> None:
    body = "import os; os._exit(7) if x.shape[0] == 1 else None; return x"
    status, results, said = bench(body, "--threads", "1", "--backends", "eager")
    assert status == 1
    assert [("status 7" in r["error"]) for r in results.records] == [True, True]
    assert "FAILED" in said


def test_interrupt_keeps_what_finished_and_ends_the_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_model.py").write_text(OWN.format(body="time.sleep(1000)"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def stop(self: runner.Runner, job: dict, files: list, log: object, progress: object) -> object:
        def tell(event: str, done: int, total: int) -> None:
            assert event == "compiling"
            raise KeyboardInterrupt

        return watch(self, job, files, log, tell)

    watch = runner.Runner._watch
    monkeypatch.setattr(runner.Runner, "_watch", stop)
    begun = time.monotonic()
    results, finished = driver.measure(Speed(), OPTIONS, tmp_path / "out", 900.0, Console(quiet=True))
    assert not finished and time.monotonic() - begun < 60
    stored = Results.load(tmp_path / "out")
    assert not stored.records and stored == results
    assert stored.options["interrupted"] is True


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_a_signal_ends_the_command_and_its_child(tmp_path: Path, number: int) -> None:
    body = "import os; open('pid', 'w').write(f'{os.getpid()} '); time.sleep(1000)"
    (tmp_path / "own_model.py").write_text(OWN.format(body=body))
    command = subprocess.Popen([sys.executable, "-m", "anyshape_bench", "own_model:model", "--backends", "eager",
                                "--out", "out"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": SOURCES},
                               stdout=subprocess.DEVNULL,
                               # where the tests run in the background, SIGINT is ignored, and children inherit that
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    until = time.monotonic() + 60
    pid_file = tmp_path / "pid"
    while not (pid_file.exists() and pid_file.read_text().endswith(" ")) and time.monotonic() < until:
        time.sleep(0.05)
    child = int(pid_file.read_text())
    command.send_signal(number)
    assert command.wait(timeout=30) == 130
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert Results.load(tmp_path / "out").options["interrupted"] is True


@pytest.mark.full
def test_a_process_over_its_limit_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_model.py").write_text(OWN.format(body="time.sleep(1000)"))
    monkeypatch.chdir(tmp_path)
    results, finished = driver.measure(Speed(), OPTIONS, tmp_path / "out", 5.0, Console(quiet=True))
    assert finished
    assert "longer than 5 s" in results.records[0]["error"]


@pytest.mark.parametrize("arguments", [["nonsense"], ["mlp", "--backends", ""], ["--show", "no-such-folder"]])
def test_wrong_arguments_are_explained(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", *arguments]) == 2
    assert "do:" in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_records_are_plain_json() -> None:
    value = {"a": (1, 2.5, {"b": torch.Size([2])}), 3: None}
    assert json.loads(json.dumps(compiler.plain(value))) == {"a": [1, 2.5, {"b": [2]}], "3": None}


# ---- launches ----

WRAPPER = '''
cpp_fused_add_0 = async_compile.cpp_pybinding(["float*"], """kernel""")
extern_kernels = object()
class Runner:
    def call(self, args):
        primals_1, primals_2 = args
        assert_size_stride(primals_2, (s0, 64), (64, 1))
        buf0 = empty_strided_cpu((s0, 64), (64, 1), torch.float32)
        extern_kernels.mm(reinterpret_tensor(primals_2, (s0, 64), (64, 1), 0), buf0, out=buf0)
        cpp_fused_add_0(buf0, s0)
        buf1 = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(buf0, buf0, buf0)
        assert_alignment(buf1, 16, "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default")
        buf2 = torch.ops.aten.cumsum.default(buf0, dim=-1)
        buf3 = torch.ops.aten.view.dtype(buf2, torch.int32)
        buf4 = aten.empty_like(buf3)
        torch.ops.aten.copy_.default(buf4, buf3)
        cpp_fused_add_0(buf4, s0)
        return (buf4,)
def benchmark_compiled_module():
    cpp_fused_add_0(None, 1)
'''


def test_launches_of_inductors_code() -> None:
    assert launch_count.in_wrapper(WRAPPER) == launch_count.Launches(kernels=2, products=2, calls=1, copies=1)


@pytest.mark.full
def test_launches_of_inductor_are_counted_forward_and_backward() -> None:
    x, w = torch.randn(5, 7, requires_grad=True), torch.randn(7, 3, requires_grad=True)
    fast = torch.compile(lambda x, w: torch.relu(x @ w).cumsum(0), dynamic=True)
    found = launch_count.of_step("inductor", None, lambda: fast(x, w).sum().backward())
    # a product, relu, cumsum, which is PyTorch's; backward a flip, cumsum, a flip with relu's mask, two products
    assert found == {"kernels": 3, "products": 3, "calls": 2, "copies": 0}


def test_our_launches_are_those_that_ran() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (torch.relu(x @ w) + 1).logcumsumexp(0)

    x, w = torch.randn(5, 7), torch.randn(7, 3)
    one, two = anyshape.compile(program), anyshape.compile(lambda x, w: x @ w)
    with torch.no_grad():
        one(x, w), two(x, w)
        with launch_count.counted([*one.programs, *two.programs]) as seen:
            one(x, w), one(x[:2], w)
        alone = launch_count.of_step("anyshape", two, lambda: two(x, w))
        with launch_count.counted(one.programs, apart=True) as apart:
            one(x, w)
    assert seen == {"0.inference": launch_count.Launches(products=2, calls=2)}  # kernels run with products
    assert apart == {"0.inference": launch_count.Launches(kernels=1, products=1, calls=1)}
    assert alone == {"kernels": 0, "products": 1, "calls": 0, "copies": 0}
    assert all(program.executable.context.profiler.runs is None for program in one.programs)
    assert launch_count.of_step("eager", None, lambda: None) is None


def test_launches_of_training_are_of_both_programs() -> None:
    fast = anyshape.compile(lambda x, w: torch.relu(x @ w).sum())
    x, w = torch.randn(5, 7, requires_grad=True), torch.randn(7, 3, requires_grad=True)
    found = launch_count.of_step("anyshape", fast, lambda: fast(x, w).backward(), apart=True)
    assert found is not None and found["products"] == 3 and found["kernels"] >= 2 and found["calls"] == 0


# ---- the program for one shape ----

def test_single_has_a_program_of_numbers_for_each_shape() -> None:
    linear = torch.nn.Linear(8, 4)
    one = static_shape_baseline.Single(linear)
    with torch.no_grad():
        for rows in (3, 5, 3):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(one(x), linear(x))
    assert len(one.programs) == 2
    shapes = {program.executable.plan.inputs[0].shape for program in one.programs} | {
        program.executable.plan.outputs[0].type.shape for program in one.programs}
    assert {(3, 4), (5, 4)} <= shapes and all(isinstance(size, int) for shape in shapes for size in shape)


def test_the_gap_is_between_one_program_and_several() -> None:
    model = bench_models.load("mlp")
    step = model.make(static_shape_baseline.Single)
    done: list[int] = []
    shapes = [(3,), (5,)]
    rows = static_shape_baseline.gap(model, step, lambda call: call, shapes, 1, lambda number, _: done.append(number))
    assert [row[0] for row in rows] == [[3], [5]] and done == [1, 2]
    assert all(0 < seconds < 60 for row in rows for seconds in row[1:])


def test_ratios_are_over_the_shapes_that_both_ran() -> None:
    results = synthetic()
    results.records = [
        record("eager", 0, repeated=[1.0, 1.0, 2.0], fresh=[7.0]),
        record("anyshape-single", 0, repeated=[0.5, 0.25], gap=[[[2, 3], 0.6, 0.5], [[4, 5], 0.3, 0.25]])
        | {"shapes": [[2, 3], [4, 5]]}]
    assert speedup(results, "bert", "anyshape-single", "eager", "repeated") == pytest.approx(2 / 0.75)
    assert speedup(results, "bert", "anyshape-single", "eager", "fresh") is None
    assert single_gap(results, "bert") == pytest.approx(1.2)


# ---- what is aimed at ----

def reached(results: Results, lines: roofline_results.Roofline | None = None) -> dict[tuple[str, str], str]:
    return {(one.name, one.note): one.verdict() for one in targets.measures(results, lines)}


def test_what_is_short_is_said() -> None:
    results = synthetic()
    timed = {"p50": 0.1, "p99": 0.2}
    results.records += [
        record("inductor", 0, first_step=30.0, fresh=[10.0, 10.0], repeated=[1.0, 1.0, 2.0], **timed),
        record("inductor", 3, "memory", memory=[900, 100], memory_method="heap",
               launches={"kernels": 6, "products": 4, "calls": 0, "copies": 0})]
    results.records[7] |= {"launches": {"kernels": 3, "products": 4, "calls": 1, "copies": 0}}
    found = {(one.name, one.note): one for one in targets.measures(results)}
    mean, worst, least = "geometric mean of 1 model", "the greatest: `bert`", "the least: `bert`"
    assert found["cold first step, of Inductor's", mean].value == pytest.approx(0.3)
    assert found["cold first step, of Inductor's", mean].verdict() == "short"
    assert found["new shapes, against Inductor", mean].value == pytest.approx(10.0)
    assert found["seen shapes, against the better of eager and Inductor", least].value == pytest.approx(1.5)
    assert found["peak memory, of Inductor's", worst].value == pytest.approx(1000 / 900)
    assert found["peak memory, of Inductor's", worst].verdict() == "short"
    assert found["launches of a step, of Inductor's", mean].value == pytest.approx(0.8)
    assert found["new shapes, against Inductor with padding into buckets", ""].verdict() == "not measured"
    assert found["a call from Python to Python (p50)", "`mlp`"].cells()[1:3] == ("at most 25.0 us", "-")
    text = report.document(results)
    assert "| launches of a step, of Inductor's | at most 0.70x | 0.80x | geometric mean of 1 model | short |" in text
    assert "| bert | anyshape | 9 s | 4 s | 2.00x | 1.50x | - | 100 ms | 200 ms | 2 / 3 | 8 (0.80x) |" in text


def test_half_precision_has_aims_of_its_own() -> None:
    results = synthetic()
    for entry in results.records:
        entry["model"] = "llama"
    results.options["autocast"] = "bfloat16"
    results.records += [record("inductor", 0, fresh=[3.0], repeated=[1.0]) | {"model": "llama", "shapes": [[9, 9]]}]
    found = reached(results)
    assert found["llama, new shapes, against Inductor", "`llama`"] == "not measured"  # other shapes
    results.records[-1] |= {"shapes": [[2, 3], [4, 5], [1, 1]], "fresh": [3.0, 3.0], "repeated": [1.0, 1.0, 1.0]}
    found = reached(results)
    assert found["llama, new shapes, against Inductor", "`llama`"] == "reached"
    assert found["llama, seen shapes, against Inductor", "`llama`"] == "reached"
    assert "new shapes, against the better of eager and Inductor" not in {name for name, _ in found}


def test_results_of_before_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = synthetic()
    for entry in results.records:
        for field in ("launches", "gap"):
            del entry[field]
    results.save(tmp_path)
    assert cli.main(["bench", "--show", str(tmp_path), "--markdown"]) == 0
    assert "| 2 / 3 | - | 0.0 MB |" in capsys.readouterr().out
    assert reached(Results.load(tmp_path))["launches of a step, of Inductor's", ""] == "not measured"


# ---- the roofline ----

@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_functions_of_the_roofline_move_more_than_caches_hold(name: str) -> None:
    one = FUNCTIONS[name]
    assert len(one.small) == len(one.large)
    # a size that stays is one that a model fixes: of a head, of a hidden layer
    assert sum(a != b for a, b in zip(one.small, one.large, strict=True)) >= 2
    torch.manual_seed(0)
    if name == "embedding":
        inputs = one.inputs(*one.large)
        results = bench_models.flatten(one.call(*inputs))
    else:
        with FakeTensorMode():
            inputs = one.inputs(*one.large)
            results = bench_models.flatten(one.call(*inputs))
    assert one.moved(inputs, results, ()) >= LEAST
    asking = [value for value in inputs if value.requires_grad]
    assert bool(asking) == one.backward or name == "embedding"
    if one.backward:
        assert one.moved_back(inputs, asking, results) >= LEAST


TINY = Function("tiny", lambda x, w: torch.relu(x) * w, lambda n, m: (torch.randn(n, m, requires_grad=True),
                                                                       torch.randn(m)), (3, 5), (40, 50), backward=True)


def test_a_line_of_the_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, backward = roofline.lines_of(TINY, 4, roofline.Copy(1 << 16))
    assert (forward.way, backward.way, forward.wrong, forward.error) == ("forward", "backward", "", "")
    assert forward.moved == 4 * (40 * 50 + 50 + 40 * 50) and backward.moved == 4 * (3 * 40 * 50 + 50)
    assert forward.rounds == 4 and forward.copied == 2 << 16
    assert forward.launches == {"kernels": 1, "products": 0, "calls": 0, "copies": 0} == backward.launches
    forward.ours, forward.copy = 0.002, 0.001
    assert forward.share() == pytest.approx(forward.moved / 2 / (2 << 16))
    monkeypatch.setattr(anyshape, "compile", lambda call: Wrong(call))
    assert "off by" in roofline.lines_of(TINY, 3, roofline.Copy(1 << 16))[0].wrong
    monkeypatch.setattr(anyshape, "compile", lambda call: None)
    assert "TypeError" in roofline.lines_of(TINY, 3, roofline.Copy(1 << 16))[1].error


class Wrong:
    """A compiler whose programs are off."""

    programs: tuple[object, ...] = ()

    def __init__(self, call: object) -> None:
        self.call = call

    def __call__(self, *arguments: torch.Tensor) -> torch.Tensor:
        return self.call(*arguments) * 1.01  # type: ignore[operator]


def test_an_interrupted_roofline_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    def stop(self: runner.Runner, job: dict, tell: object) -> dict:
        monkeypatch.setitem(FUNCTIONS, "tiny", TINY)

        def interrupt(module: object, one: str, *rest: object) -> list:
            if len(done) == 1:
                raise KeyboardInterrupt
            done.append(one)
            return lines_of(TINY, 3, roofline.Copy(1 << 16))

        lines_of = roofline.lines_of
        monkeypatch.setattr(roofline, "lines_of", lambda *some: interrupt(roofline, *some))
        process.run(roofline, job | {"functions": ["tiny", "tiny"]}, self.answer(job))
        raise AssertionError

    done: list[str] = []
    monkeypatch.setattr(roofline, "COPIED", 1 << 16)
    monkeypatch.setattr(roofline, "keep_freed", lambda: False)
    monkeypatch.setattr(runner.Runner, "run", stop)
    assert cli.main(["bench", "--roofline", "--threads", "1", "--out", str(tmp_path)]) == 130
    capsys.readouterr()
    found = roofline_results.Roofline.load(tmp_path)
    assert [line.name for line in found.lines] == ["tiny", "tiny"]
    assert cli.main(["bench", "--roofline", "--show", str(tmp_path), "--markdown", "--write-document",
                     str(tmp_path / "roofline.md")]) == 0
    said = capsys.readouterr().out
    assert "Interrupted" in said and "| tiny | backward | 40 x 50 | 0 MB |" in said
    assert "The run was interrupted" in (tmp_path / "roofline.md").read_text()
    found.lines[0].wrong = "result 0 is off by 1"
    found.save(tmp_path)
    assert cli.main(["bench", "--roofline", "--show", str(tmp_path)]) == 1
    assert roofline_results.beside(tmp_path) == found and roofline_results.beside(tmp_path / "none") is None


def test_the_roofline_says_how_many_are_short() -> None:
    lines = [roofline_results.Line(name, "forward", [8], [4], moved=80, copied=100, ours=ours, eager=1.0, copy=1.0)
             for name, ours in (("near", 0.8), ("half", 1.2), ("far", 2.0))]
    found = roofline_results.Roofline({}, {"threads": 1, "rounds": 3, "kept": True}, lines)
    said = roofline_report.summary(found)
    assert "1 of 3 lines reach 80 % of it; 1 are under 50 %: far forward." in said
    assert [roofline_report.reached(line) for line in lines] == ["reached", "short", "short, under the least"]
    measure = "kernels bound by memory, of a copy's speed"
    assert reached(Results(), found)[measure, "the least: `far forward`"] == "short"


@pytest.mark.parametrize("arguments", [["--roofline", "nonsense"], ["--techniques"], ["--techniques", "nonsense"],
                                       ["--roofline", "--show", "no-such-folder"]])
def test_wrong_arguments_of_tables_are_explained(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", *arguments]) == 2
    assert "do:" in capsys.readouterr().err and list(tmp_path.iterdir()) == []


# ---- techniques ----

@pytest.mark.usefixtures("without_processes")
def test_techniques_are_left_out_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(TAGGER.replace("{wrong}", "None"))
    kept = {name: techniques.TECHNIQUES[name] for name in ("fuse", "fast_dispatch", "channels_last")}
    monkeypatch.setattr(ablation, "TECHNIQUES", kept)
    name = f"{tmp_path / 'mine.py'}:tagger"
    status = cli.main(["bench", "--techniques", name, "--rounds", "2", "--shapes", "2", "--out",
                       str(tmp_path / "out"), "--write-document", str(tmp_path / "techniques.md")])
    assert status == 0, capsys.readouterr()
    found = techniques.Techniques.load(tmp_path / "out")
    rows = {row.name: row for row in found.rows}
    assert set(rows) == {techniques.EAGER, techniques.ALL, techniques.AGAIN, *kept}
    assert not rows["channels_last"].part and rows["fast_dispatch"].part and rows["fuse"].part
    assert rows["fuse"].launches > rows[techniques.ALL].launches > 0  # type: ignore[operator]
    assert all(len(row.times) == 2 and min(row.times) > 0 for row in rows.values() if row.part)
    assert techniques.slower(rows[techniques.ALL], rows[techniques.ALL]) == 1.0
    text = (tmp_path / "techniques.md").read_text()
    assert "| nothing |  | 1.00x |" in text
    assert "| `channels_last` | convolutions with channels last | no part in it |" in text


def test_techniques_are_names_that_the_compiler_knows() -> None:
    for settings, _ in techniques.TECHNIQUES.values():
        anyshape.compile(torch.relu, **settings)
