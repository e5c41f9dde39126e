"""Golden files: `golden(name, text)` compares with tests/golden/<name>; `pytest --update` writes them.

Behind every piece of the arena that is handed out lies a guard, which is looked at when the piece comes back: code that
writes past its scratch fails the test that ran it.

Tests marked `full` take minutes, or are the rest of a sample (sampling.py), and run only when asked for:
`pytest -m full`. In CI a run has so many minutes (time_budget.py). Compiled code that tests make is kept in a folder of
the session, not in the user's cache, unless ANYSHAPE_CACHE_DIR says where.
"""
from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forked
import sampling
import starting_order
import time_budget
from anyshape.frontend.capture import frame_callback
from anyshape.runtime.memory.pools import Block, Pool

GOLDEN = Path(__file__).parent / "golden"
BEGAN = pytest.StashKey[float]()  # of a test: the processor time when it began
GUARD, BYTE = 64, 0xA5  # bytes behind a piece, and what is in them


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="write the golden files from what the code gives now")
    parser.addoption("--seconds", action="store_true",
                     help="write the processor time of each file to seconds.json (tests/starting_order.py)")
    parser.addoption("--fenced", action="store_true",
                     help="run compiled programs on memory between pages that nobody may touch (tests/fences.py)")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Fails when a text differs from its golden file, or when there is none."""
    update = request.config.getoption("--update")

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        assert path.exists(), f"{path.name} is missing; run pytest --update and look at it"
        assert text == path.read_text(encoding="utf-8"), f"{path.name} differs; run pytest --update, look"

    return check


@pytest.fixture(autouse=True)
def guarded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards behind the pieces of the arena, but in tests that count bytes or calls (`unguarded`)."""
    if request.node.get_closest_marker("unguarded"):
        return
    ends: dict[int, int] = {}
    take, give = Pool.take, Pool.give

    def take_guarded(pool: Pool, bytes_: int) -> Block:
        block = take(pool, bytes_ + GUARD if bytes_ else 0)
        if bytes_:
            block.tensor[bytes_:bytes_ + GUARD] = BYTE
            ends[id(block)] = bytes_
        return block

    def give_guarded(pool: Pool, block: Block) -> None:
        end = ends.pop(id(block), None)
        intact = end is None or bool((block.tensor[end:end + GUARD] == BYTE).all())
        give(pool, block)
        assert intact, f"{end} bytes of the arena were handed out, and more were written"

    monkeypatch.setattr(Pool, "take", take_guarded)
    monkeypatch.setattr(Pool, "give", give_guarded)


@pytest.fixture(scope="module")
def quick_collections() -> None:
    """For files whose tests collect garbage often: `gc.collect()` looks only at what has been made since, not at what
    the tests of before have left, which takes a second late in a run."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is imported by now stays: Python does not look through it for garbage, some 0.3 s each time and more late in
    a run, and looks less often."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    # it would count what is frozen after every trace
    frame_callback.age_trace_garbage = lambda: None
    leave_out_of_traces()


def leave_out_of_traces() -> None:
    """What torch does in every trace for nobody here: the text of each graph for its structured log, and states of a
    GPU's random numbers. 2 to 5 % of a small trace, and tracing is four fifths of the tests' processor time."""
    from torch._decomp.decompositions_for_rng import PhiloxStateTracker
    from torch._functorch._aot_autograd import graph_compile
    for name, nothing in (("_log_joint_graph", None), ("_log_fw_bw_graphs", (None, None))):
        if hasattr(graph_compile, name):
            setattr(graph_compile, name, lambda *_, nothing=nothing: nothing)
    PhiloxStateTracker.reset = classmethod(lambda _: None)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: takes minutes; run with -m full")
    config.addinivalue_line("markers", "unguarded: counts bytes of the arena, or calls; no guards behind its pieces")
    time_budget.begin()
    sampling.whole = "full" in config.getoption("-m")
    os.environ.setdefault("ANYSHAPE_DEFER", "0")  # tests of sizes of 1 want programs for them
    os.environ.setdefault("ANYSHAPE_CALIBRATE", "0")  # what is computed again is the same everywhere
    # several processes, each with threads that spin until there is work, take a third longer than ones that sleep; what
    # is said here holds for the processes that are started from here, pytest's own among them
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if "ANYSHAPE_CACHE_DIR" not in os.environ:
        folder = tempfile.mkdtemp(prefix="anyshape-tests-")
        os.environ["ANYSHAPE_CACHE_DIR"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    if config.getoption("--seconds") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Measured())
    if config.getoption("--fenced"):
        import fences
        fences.install()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[BEGAN] = processor_seconds()
    # what another test runs in a process of its own (interpreted_*.py and such) has begun in time
    if time_budget.is_spent() and item.path.stem.startswith("test_") and not starting_order.stands_in_for_a_gpu(item):
        pytest.skip(time_budget.REASON)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: Any = yield
    starting_order.check_not_skipped(item, report)
    if report.when == "teardown":
        report.user_properties.append(("seconds", processor_seconds() - item.stash[BEGAN]))
    return report


def processor_seconds() -> float:
    """Of this process and of those that it has waited for."""
    return sum(os.times()[:4]) + forked.seconds


class Measured:
    """A plugin that adds up the seconds of each file, and writes them to the table."""

    def __init__(self) -> None:
        self.files: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = Path(report.location[0]).stem.removeprefix("test_")
        self.files[file] = self.files.get(file, 0.0) + dict(report.user_properties).get("seconds", 0.0)

    def pytest_sessionfinish(self) -> None:
        starting_order.write_table(self.files)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    left_out = sum(time_budget.REASON in str(one.longrepr) for one in terminalreporter.stats.get("skipped", ()))
    if left_out:
        terminalreporter.write_line(f"{time_budget.REASON}: {left_out} tests were left out; without CI=true all run")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Under pytest-xdist each process takes its stretch of the tests (starting_order.py), and then of what another has
    left: tests of a file stay together, and what they share is made once."""
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import WorkStealingScheduling

    class Stretches(WorkStealingScheduling):
        """Begins with stretches that are not of one length."""

        lengths: tuple[int, ...] = ()

        def schedule(self) -> None:
            if self.collection is None:
                names = next(iter(self.node2collection.values()))
                self.lengths = tuple(starting_order.lengths(names, len(self.nodes)))
            super().schedule()

        def _send_tests(self, node: Any, num: int) -> None:
            count, *rest = self.lengths or (num,)
            self.lengths = tuple(rest)
            super()._send_tests(node, count)

    return Stretches(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    without = [] if "full" in config.getoption("-m") else ["full"]
    without += ["unguarded"] if config.getoption("--fenced") else []  # no two values share memory there
    left_out = [item for item in items if any(map(item.get_closest_marker, without))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    items[:] = starting_order.of(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
