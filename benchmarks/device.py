"""The measurements of a lent GPU, at most 30 minutes in calls of at most 8: `python benchmarks/device.py PART`.

    models      train steps of a Llama in bfloat16 at changing shapes: eager, Inductor static and dynamic, ours
    paper       Llama-2-7B cut to 4 layers at changing lengths: ours, and static programs at padded ones
    limits      the step of `models` under limits: bytes counted, values moved out on side streams
    bandwidth   kernels bound by memory at widths that 8 divides, and at others, as a part of a copy
    products    relu(x @ w + b) in bfloat16: eager, Inductor, ours with the library's product, with our own
    launch      what a launch costs the host, with a driver that does nothing and with the device's own

Without PART all of them run in this order: what no device has measured comes first. Each has an equal share of the
time that is left when it begins, and one that fails is a row, behind which the next one runs. Each row is written to
FILE as JSON when it is there, so that a call that is cut off loses nothing. `--dry` runs the same script on the fake
driver of the tests, where its numbers mean nothing. What is expected is written down first, in `PREDICTIONS`.
"""
from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import platform
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import anyshape
from anyshape.backend import targets
from anyshape.backend.cpu.llvm import jit
from anyshape.backend.cpu.native.compiler import translate
from anyshape.backend.targets import host_routines, target_of
from anyshape.backend.triton import launch_loop as loop
from anyshape.backend.triton.driver.functions import SIGNATURES
from anyshape.backend.triton.runner import launches
from anyshape.base.config import Config
from anyshape.tools.demo.model import DemoConfig, DemoLlama
from anyshape.torch_compat.versions import api

PREDICTIONS = {
    "launch: ns beyond the driver": "at most 50",
    "launch: us a call of one kernel, Python included": "at most 25",
    "bandwidth: softmax at a width that 8 does not divide, of a copy": "at least 0.85",
    "bandwidth: persistent rows against looped ones, 4096 to 16384": "1.5 times",
    "models: tokens a second, new shapes, against eager": "at least 1.15",
    "models: peak against Inductor's": "at most 0.8",
    "paper: tokens a second at batch 18, against the best of padded static programs": "at least 1.11",
    "limits: bytes counted beyond what was predicted": "0",
}
WIDTHS = (1000, 1024, 4096, 4099, 4104, 32000, 32003, 128256)
PRODUCTS = ((4096, 512, 4096), (8192, 1024, 4096), (8191, 1024, 4096), (16384, 2048, 8192), (64, 1024, 4096))
MINUTES = 8.0
TURNS = 20


class Bench:
    """A device to measure on. dry: the fake driver's, on the host's memory."""

    def __init__(self, out: Path, minutes: float, dry: bool) -> None:
        self.out = out
        self.dry = dry
        self.end = time.monotonic() + 60 * minutes
        self.device = torch.device("cpu" if dry else "cuda:0")
        self.rows: list[dict[str, Any]] = []
        self.fake: Any = _fake() if dry else None
        self.about = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "dry": dry,
                      "device": "fake" if dry else torch.cuda.get_device_name(0), "torch": torch.__version__,
                      "python": platform.python_version(), "predictions": PREDICTIONS}

    def row(self, part: str, name: str, **values: Any) -> None:
        """One more result."""
        self.rows.append({"part": part, "name": name, **values})
        print(json.dumps(self.rows[-1]), flush=True)
        self.out.write_text(json.dumps({**self.about, "rows": self.rows}, indent=1) + "\n")

    def while_time(self, what: list[Any]) -> Iterator[Any]:
        """The things, as long as there is time; a row says what was left out."""
        for number, one in enumerate(what):
            if time.monotonic() > self.end:
                self.row("time", "left out", things=[str(left) for left in what[number:]])
                return
            yield one

    def synchronize(self) -> None:
        """Returns when the device has done everything."""
        if self.dry:
            self.fake.everything()
        else:
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], Any], turns: int = TURNS) -> float:
        """The median time of a run on the device."""
        for _ in range(3):
            run()
        self.synchronize()
        found = []
        for _ in range(2 if self.dry else turns):
            if self.dry:
                begin = time.perf_counter()
                run()
                self.synchronize()
                found.append(time.perf_counter() - begin)
                continue
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            run()
            events[1].record()
            events[1].synchronize()
            found.append(events[0].elapsed_time(events[1]) / 1e3)
        return statistics.median(found)

    def peak(self, run: Callable[[], Any]) -> int:
        """The most bytes that a run takes beyond what is there."""
        self.synchronize()
        if self.dry:
            before = self.fake.peak = self.fake.live
            run()
            return int(self.fake.peak - before)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        self.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Numbers on the device."""
        return torch.randn(*shape, device=self.device).to(dtype)


def _fake() -> Any:
    """The fake driver, behind which programs run from now on."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    import fake_device
    import fake_driver
    targets.TARGETS["fake"] = fake_device.__name__
    targets.DEFAULT = "fake"
    fake = fake_driver.FakeDriver()
    fake_device.DEVICE[:] = [fake]
    return fake


def _host_reads(bench: Bench) -> None:
    """On the fake, PyTorch's own operators run at once: what they read has to be done."""
    if bench.dry:
        bench.fake.reads = True


# ---- launches

def nothing(function: int, x: int, y: int, z: int, threads: int, second: int, third: int, shared: int, stream: int,
            places: int, extra: int) -> int:
    """A launch that does nothing: the driver's functions have this form."""
    return 0


def pushed(context: int) -> int:
    """A call with one argument that does nothing."""
    return 0


def measure_launch(bench: Bench) -> None:
    """What the launch loop takes for each launch, and what a call takes, beyond the driver."""
    def chain(x: torch.Tensor, count: int) -> torch.Tensor:
        for _ in range(count):
            x = torch.softmax(x, 1) + x.sum(0)
        return x

    target: Any = target_of(Config.make(), "" if bench.dry else str(bench.device))
    machine = target.loop
    text = f'target triple = "{jit.llvm.get_process_triple()}"\n{translate(nothing, pushed)}'
    host: Any = host_routines()
    loaded = jit.load(text, ("nothing", "pushed"), host.machine)
    found: dict[int, tuple[float, float, float]] = {}
    x = bench.random(16, 32)
    for count in (1, 60):
        fast = anyshape.compile(lambda one, count=count: chain(one, count), strict=True)
        fast(x)
        bench.synchronize()
        program = fast.programs[0].executable
        record = next(iter(program.specializations.values()))
        runner, number = program.runner, sum(1 for _ in launches(record.payload.words))
        own = bench.seconds(lambda fast=fast: fast(x))
        with _without_driver(target, program, loaded.address):
            frame = runner.frame(record.payload, [1 << 12] * _brought(runner), 1 << 12, 1 << 12, 0, 1)
            address = frame.block.buffer_info()[0]
            times = []
            for _ in range(200):
                begin = time.perf_counter_ns()
                machine.run(address)
                times.append(time.perf_counter_ns() - begin)
            calls = []
            for _ in range(200):
                begin = time.perf_counter_ns()
                fast(x)
                calls.append(time.perf_counter_ns() - begin)
        found[number] = statistics.median(times), statistics.median(calls) / 1e3, own * 1e6
    (few, first), (many, last) = sorted(found.items())
    bench.row("launch", "launch loop", ns_a_launch=round((last[0] - first[0]) / (many - few), 2),
              us_a_call=round(first[1], 1), launches=many, us_with_driver=round(last[2], 1))


@contextlib.contextmanager
def _without_driver(target: Any, program: Any, addresses: dict[str, int]) -> Iterator[None]:
    """Inside, the driver's functions do nothing, and results are memory of the host."""
    driver, words = target.loop.driver, list(target.loop.functions)
    functions, allocate, current = dict(driver._functions), program.allocate, program.streams.current
    names = [name for name in loop.Functions.fields if name != "clock"]
    for number, name in enumerate(names):
        target.loop.functions[number] = addresses["nothing" if name == "launch" else "pushed"]
    for name in ("record_event", "query_event", "push_context", "pop_context", "wait_event"):
        driver._functions[name] = ctypes.CFUNCTYPE(ctypes.c_int, *SIGNATURES[name].arguments)(addresses["pushed"])
    program.allocate, program.streams.current = api.allocator(), lambda: 0
    try:
        yield
    finally:
        target.loop.functions[:] = words
        driver._functions.update(functions)
        program.allocate, program.streams.current = allocate, current


def _brought(runner: Any) -> int:
    placed = set(runner.sizes.placed)
    return sum((b.is_parameter or b.is_output) and b.name not in placed for b in runner.plan.buffers)


# ---- bandwidth

def measure_bandwidth(bench: Bench) -> None:
    """Softmax and a normalisation, bytes read and written in a second as a part of a copy's."""
    _host_reads(bench)
    total = 1 << (16 if bench.dry else 30)  # bytes of the operand
    source = torch.empty(total, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    copy = 2 * total / bench.seconds(lambda: target.copy_(source))
    bench.row("bandwidth", "copy", tb_a_second=copy / 1e12)
    names: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "softmax": lambda x: torch.softmax(x, -1),
        "norm": lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:])}
    for name, function in names.items():
        ways: dict[str, Any] = {"eager": function, "ours": anyshape.compile(function, strict=True)}
        if not bench.dry:
            ways["inductor dynamic"] = torch.compile(function, dynamic=True)
        for width in bench.while_time(list(WIDTHS[:2] if bench.dry else WIDTHS)):
            rows = max(total // 2 // width, 1)
            x = bench.random(rows, width, dtype=torch.bfloat16)
            static = {} if bench.dry else {"inductor static": torch.compile(lambda one, f=function: f(one),
                                                                            dynamic=False)}
            times = {way: bench.seconds(lambda run=run, x=x: run(x)) for way, run in (ways | static).items()}
            exact = function(x.double())
            error = float((ways["ours"](x).double() - exact).norm() / exact.norm())
            bench.row("bandwidth", f"{name} {rows}x{width}", error=error,
                      **{way: round(4 * rows * width / seconds / copy, 3) for way, seconds in times.items()})


# ---- products

def measure_products(bench: Bench) -> None:
    """A product and what follows it, by the library and a kernel behind it, or by one kernel of our own."""
    _host_reads(bench)
    dtype = torch.float32 if bench.dry else torch.bfloat16

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w + b)

    ways: dict[str, Any] = {"eager": function, "ours": anyshape.compile(function, strict=True),
                            "ours, own products": anyshape.compile(function, strict=True, products="own")}
    if not bench.dry:
        ways["inductor dynamic"] = torch.compile(function, dynamic=True)
    for rows, inner, columns in bench.while_time([(32, 16, 64)] if bench.dry else list(PRODUCTS)):
        x, w, b = (bench.random(*shape, dtype=dtype) for shape in ((rows, inner), (inner, columns), (columns,)))
        exact = function(x.double(), w.double(), b.double())
        errors = {way: float((run(x, w, b).double() - exact).norm() / exact.norm()) for way, run in ways.items()}
        del exact
        times = {way: bench.seconds(lambda run=run, x=x, w=w, b=b: run(x, w, b)) for way, run in ways.items()}
        bench.row("products", f"{rows}x{inner}x{columns}", errors=errors, tflops={
            way: round(2 * rows * inner * columns / seconds / 1e12, 1) for way, seconds in times.items()})


# ---- models

USUAL = DemoConfig(32000, 1024, 2752, 16, 16)  # 340 million weights
CUT = DemoConfig(32000, 4096, 11008, 4, 32)  # Llama-2-7B with 4 of its layers


def model(bench: Bench, dtype: torch.dtype, sizes: DemoConfig = USUAL) -> DemoLlama:
    """A Llama of these sizes, or a very small one."""
    torch.manual_seed(0)
    return DemoLlama(DemoConfig(64, 16, 32, 2, 2) if bench.dry else sizes).to(bench.device, dtype)


def batch(bench: Bench, rows: int, length: int, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets."""
    tokens = torch.randint(0, most, (rows, length), device=bench.device)
    return tokens, tokens.roll(-1, 1)


def measure_models(bench: Bench) -> None:
    """Forward, backward and update at new shapes and at those again."""
    _host_reads(bench)
    lengths = (5, 7, 9) if bench.dry else (317, 512, 641, 1003, 768, 255, 900, 1024)
    rows, most = (2, 64) if bench.dry else (8, 32000)
    dtype = torch.float32 if bench.dry else torch.bfloat16
    ways: dict[str, Callable[[Any], Any]] = {"eager": lambda one: one,
                                             "ours": lambda one: anyshape.compile(one, strict=True)}
    if not bench.dry:
        ways["inductor dynamic"] = lambda one: torch.compile(one, dynamic=True)
        ways["inductor static"] = lambda one: torch.compile(one, dynamic=False)
    for way in bench.while_time(list(ways)):
        torch._dynamo.reset()
        plain = model(bench, dtype)
        run = ways[way](plain)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=not bench.dry)

        def step(tokens: torch.Tensor, targets: torch.Tensor, run: Any = run, optimizer: Any = optimizer) -> None:
            run(tokens, targets).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        times: dict[str, list[float]] = {"new": [], "again": []}
        peaks = []
        seen = lengths[:3] if way == "inductor static" else lengths  # each of which takes it a compilation
        for kind in times:
            for length in seen:
                given = batch(bench, rows, length, most)
                bench.synchronize()
                begin = time.perf_counter()
                peaks.append(bench.peak(lambda given=given: step(*given)))
                bench.synchronize()
                times[kind].append(time.perf_counter() - begin)
        bench.row("models", f"llama {way}", peak=max(peaks), first_seconds=times["new"][0], **{
            f"{kind}_tokens_a_second": rows * sum(seen[1:]) / sum(found[1:]) for kind, found in times.items()})


def measure_paper(bench: Bench) -> None:
    """The figure of BladeDISC++: Llama-2-7B cut to 4 layers, batches of texts of 100 to 3,000 characters, as long as
    the longest one of a batch, or padded to a power of two for static programs. Counted are tokens of texts alone."""
    _host_reads(bench)
    draw = random.Random(0)
    count, longest, most = (2, 12, 64) if bench.dry else (12, 857, 32000)  # 3.5 characters a token
    dtype = torch.float32 if bench.dry else torch.bfloat16
    ways: dict[str, Callable[[Any], Any]] = {"ours": lambda one: anyshape.compile(one, strict=True)}
    if not bench.dry:
        ways |= {"inductor static, padded": lambda one: torch.compile(one, dynamic=False), "eager": lambda one: one}
    texts = {rows: [[draw.randint(max(longest // 30, 2), longest) for _ in range(rows)] for _ in range(count)]
             for rows in ((2,) if bench.dry else (14, 18))}
    for way, rows in bench.while_time([(way, rows) for way in ways for rows in texts]):
        torch._dynamo.reset()
        plain = model(bench, dtype, CUT)
        run = ways[way](plain)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=not bench.dry)
        tokens, seconds, peaks = 0, 0.0, []
        padded = [1 << (max(one) - 1).bit_length() if "padded" in way else max(one) for one in texts[rows]]

        def step(length: int, rows: int = rows, run: Any = run, optimizer: Any = optimizer) -> None:
            run(*batch(bench, rows, length, most)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        for length in dict.fromkeys(padded if "padded" in way else padded[:2]):  # compilations are not counted
            step(length)
        for length, lengths in zip(padded, texts[rows], strict=True):
            bench.synchronize()
            begin = time.perf_counter()
            peaks.append(bench.peak(lambda step=step, length=length: step(length)))
            bench.synchronize()
            seconds += time.perf_counter() - begin
            tokens += sum(lengths)
        bench.row("paper", f"batch {rows} {way}", tokens_a_second=tokens / seconds, peak=max(peaks))


def measure_limits(bench: Bench) -> None:
    """The step under limits, from all that it takes to the least that works."""
    _host_reads(bench)
    rows, length, most = (2, 9, 64) if bench.dry else (8, 768, 32000)
    dtype = torch.float32 if bench.dry else torch.bfloat16
    plain = model(bench, dtype)
    given = batch(bench, rows, length, most)
    torch._dynamo.reset()
    run = anyshape.compile(plain, memory_limit="64GB", strict=True)
    limit = next(one.executable.limit if hasattr(one, "executable") else one.limit for one in run.programs
                 if "forward" in one.name) if run.programs else None
    for part in bench.while_time([1.0, 0.75, 0.5, 0.0]):
        def step() -> None:
            plain.zero_grad(set_to_none=True)
            run(*given).backward()

        step()
        if limit is None:
            limit = next(one.executable.limit if hasattr(one, "executable") else one.limit for one in run.programs
                         if "forward" in one.name)
        values = dict(next(iter(limit.program.specializations.values())).values)
        everything = limit.needed(values, limit.choose(values))
        bytes_ = max(int(everything * part), limit.least(values))
        limit.move(bytes_)
        seconds = bench.seconds(step, 5)
        plain.zero_grad(set_to_none=True)
        limit.program.context.release()
        counted = bench.peak(step)
        bench.row("limits", f"{part:.0%}", bytes=bytes_, counted=counted, seconds=seconds,
                  moved=limit.store.moved if limit.store is not None else 0)
        limit.move(1 << 50)


PARTS: dict[str, Callable[[Bench], None]] = {
    "models": measure_models, "paper": measure_paper, "limits": measure_limits, "bandwidth": measure_bandwidth,
    "products": measure_products, "launch": measure_launch}


def measure(bench: Bench, parts: list[str]) -> int:
    """Runs parts; how many of them failed."""
    end, failed = bench.end, 0
    for number, part in enumerate(parts):
        now = time.monotonic()
        bench.end = now + (end - now) / (len(parts) - number)
        try:
            PARTS[part](bench)
        except Exception as error:  # device time is short: the other parts still run
            failed += 1
            bench.row(part, "failed", error=repr(error)[:400], trace=traceback.format_exc()[-2000:])
    return failed


def main(arguments: list[str] | None = None) -> int:
    """Runs parts; how many of them failed."""
    parser = argparse.ArgumentParser("device", description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", choices=PARTS, help="all of them where none is given")
    parser.add_argument("--out", type=Path, default=Path("device.json"))
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--dry", action="store_true", help="on the fake driver")
    given = parser.parse_args(arguments)
    bench = Bench(given.out, given.minutes, given.dry)
    torch._dynamo.config.recompile_limit = 1000  # or Inductor's static programs become eager after eight sizes
    return measure(bench, given.parts or list(PARTS))


if __name__ == "__main__":
    sys.exit(main())
