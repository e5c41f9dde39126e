"""Warm start: a second process takes captured programs from the cache, with their guards, and never a wrong one."""
from __future__ import annotations

import ast
import gc
import os
import subprocess
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import anyshape
import forked
from anyshape.base.config import Config
from anyshape.base.disk_cache import cache_of
from anyshape.frontend.aten.table import TABLE, Decline
from anyshape.frontend.programs.eager_fallback import FallbackWarning
from anyshape.frontend.warm_start.identity import ObjectIdentities
from anyshape.torch_compat.dynamo.guard_record import NotRecorded, can_record, without_object
from roads import compilation_of

pytestmark = pytest.mark.skipif(not can_record(), reason="this torch lacks a part")
SOURCE = Path(anyshape.__file__).parents[1]
SCALE = 2.0


class Layer(nn.Module):
    """A layer with a function of its module, a number, a buffer and a method of its own."""

    def __init__(self, width: int = 8, eps: float = 1e-5) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.eps = eps
        self.register_buffer("shift", torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scaled(self.inner(x)) + self.eps

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.norm(self.linear(x))) + self.shift


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


@pytest.fixture
def compiled(tmp_path: Path) -> Callable[..., nn.Module]:
    """Compiles with a cache of the test's own, as each process of one user does."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)

    def make(target: nn.Module, **settings: object) -> nn.Module:
        anyshape.stats(reset=True)
        fast: nn.Module = anyshape.compile(target, cache_dir=str(folder), warm_start=True, **settings)
        return fast

    return make


def check(fast: nn.Module, module: nn.Module, warm: int, refused: int = 0,
          shapes: tuple[tuple[int, ...], ...] = ((3, 8), (1, 8), (5, 8))) -> None:
    """Compares at several sizes, and says how often a program came from the cache."""
    with torch.no_grad():
        for shape in shapes:
            x = torch.randn(shape)
            torch.testing.assert_close(fast(x), module(x))
    stats = anyshape.stats()
    assert (stats["warm_starts"], stats["warm_refusals"]) == (warm, refused)


def test_a_second_compilation_takes_the_program_and_its_own_weights(compiled: Callable[..., nn.Module]) -> None:
    first, second = Layer(), Layer()
    check(compiled(first), first, 0)
    check(compiled(second), second, 1)
    assert anyshape.stats()["programs"] == 1


@pytest.mark.parametrize("asked, shown", [
    ("___check_obj_id(G['F'].gelu.__code__, 140131)", ", type=<code object gelu at 0x7f73, file \"a.py\", line 3>"),
    ("___check_obj_id(G['F'], 140131), type=<class 'module'>", ""), ("L['x'] == 3", "")])
def test_a_guard_names_no_place_of_the_object_that_it_asks_for(asked: str, shown: str) -> None:
    assert without_object(asked + shown) == asked


def declined(*operands: object, **more: object) -> None:
    raise Decline("it is the user's")


CHANGES: dict[str, Callable[[pytest.MonkeyPatch, Layer], object]] = {
    "a method of the class": lambda patch, _: patch.setattr(Layer, "inner", lambda self, x: self.linear(x)),
    "a function of the module": lambda patch, _: patch.setattr(sys.modules[__name__], "scaled", lambda x: x - 1),
    "a global number": lambda patch, _: patch.setattr(sys.modules[__name__], "SCALE", 3.0),
    "a number of the object": lambda _, layer: setattr(layer, "eps", 0.5),
    "a function of torch's": lambda patch, _: patch.setattr(F, "gelu", lambda x: x * x),
    "a method of torch's class": lambda patch, _: patch.setattr(nn.Linear, "forward", lambda self, x: x + 1),
    "forward of one object": lambda _, layer: setattr(
        layer, "inner", types.MethodType(lambda self, x: self.linear(x) * 5, layer)),
    "a hook": lambda _, layer: layer.linear.register_forward_hook(lambda module, inputs, output: output * 2),
    "a child": lambda _, layer: setattr(layer, "linear", nn.Sequential(nn.Linear(8, 8), nn.ReLU())),
    "weights without gradients": lambda _, layer: layer.requires_grad_(False),
    "a translation that the user has": lambda patch, _: patch.setitem(TABLE, torch.ops.aten.gelu.default, declined),
    "the dtype of weights": lambda _, layer: layer.double(),
}


@pytest.mark.parametrize("change", [name if name in ("a method of the class", "a global number", "a hook",
                                                          "a translation that the user has") else
                                    pytest.param(name, marks=pytest.mark.full) for name in CHANGES])
def test_what_is_not_as_it_was_is_traced(compiled: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch,
                                         change: str) -> None:
    first = Layer()
    check(compiled(first), first, 0, shapes=((3, 8),))
    second = Layer()
    CHANGES[change](monkeypatch, second)
    fast = compiled(second)
    x = torch.randn(4, 8, dtype=second.shift.dtype)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), second(x))
    assert anyshape.stats()["warm_starts"] == 0


class Scaled(nn.Module):
    """Multiplies by numbers of a dictionary, in its order."""

    def __init__(self, numbers: dict[str, float]) -> None:
        super().__init__()
        self.numbers = numbers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.numbers.values():
            x = x * number + 1
        return x


def test_the_order_of_a_dictionary_counts(compiled: Callable[..., nn.Module]) -> None:
    numbers = {"a": 2.0, "b": 3.0}
    first = Scaled(numbers)
    fast = compiled(first)
    check(fast, first, 0, shapes=((3, 8),))
    again = Scaled(dict(numbers))
    check(compiled(again), again, 1, shapes=((3, 8),))  # beside the first one, which is alive
    other = Scaled({"b": 3.0, "a": 2.0})
    check(compiled(other), other, 0, 1, shapes=((3, 8),))


@torch.compiler.assume_constant_result
def assumed() -> float:
    return 2.0


@torch.compiler.allow_in_graph
def untraced(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("anyshape_test_warm::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x, x))


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((2 * x.shape[0], *x.shape[1:]))


@pytest.mark.parametrize(("function", "said"), [
    pytest.param(lambda x: x * assumed(), "assumed to be constant", id="constant"),
    pytest.param(lambda x: untraced(x) + 1, "untraced as it is", id="function"),
    pytest.param(lambda x: twice(x) + 1, "the operator anyshape_test_warm", id="operator")])
def test_what_no_guard_knows_is_traced_in_every_process(compiled: Callable[..., nn.Module], said: str,
                                                        function: Callable[..., torch.Tensor]) -> None:
    fast = compiled(function)
    x = torch.randn(3, 8)
    torch.testing.assert_close(fast(x), function(x))
    # not the sum of `stats()`, in which objects of other tests count that were not collected yet
    assert anyshape.stats()["warm_not_kept"] == 1 and not compilation_of(fast).fallbacks, fast.explain()
    assert said in str(fast.explain())
    compilation = weakref.ref(compilation_of(fast))
    del fast
    gc.collect()
    gc.collect()
    assert compilation() is None  # nothing is left behind


def test_ranks_of_a_group_trace(compiled: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer()
    check(compiled(layer), layer, 0, shapes=((3, 8),))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    fast: nn.Module = compiled(layer)
    assert fast._anyshape.oblivious.tracing.warm is None


def test_settings_and_modes_have_records_of_their_own(compiled: Callable[..., nn.Module]) -> None:
    layer = Layer()
    check(compiled(layer), layer, 0, shapes=((3, 8),))
    x = torch.randn(2, 8)
    with torch.no_grad():
        compiled(layer, fuse=False)(x)
    assert anyshape.stats()["warm_starts"] == 0
    fast = compiled(layer)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert fast(x).dtype == layer(x).dtype
    assert anyshape.stats()["warm_starts"] == 0
    with torch.no_grad():
        anyshape.compile(layer, warm_start=False)(x)
    assert anyshape.stats()["warm_starts"] == 0


def test_a_damaged_or_foreign_record_is_not_used(compiled: Callable[..., nn.Module], tmp_path: Path) -> None:
    layer = Layer()
    check(compiled(layer), layer, 0, shapes=((3, 8),))
    cache = cache_of(Config.make(cache_dir=str(tmp_path / "cache")))
    assert cache is not None
    for entry in list(cache.entries()):
        data = Path(entry.path).read_bytes()
        if b"ProgramRecord" in data:
            key = Path(entry.path).parent.name + Path(entry.path).name
            cache.put(key, b"no pickle at all")
    check(compiled(layer), layer, 0, 1, shapes=((3, 8),))
    check(compiled(layer), layer, 1, 1)
    for entry in list(cache.entries()):
        os.chmod(entry.path, 0o666)  # noqa: S103  # anybody may have written it
    with pytest.warns(RuntimeWarning, match="somebody else may have"):
        check(compiled(layer), layer, 0, shapes=((3, 8),))


def test_descriptions_tell_objects_apart() -> None:
    said = ObjectIdentities().describe
    assert said(F.gelu) == ObjectIdentities().describe(F.gelu)
    assert said(scaled) != said(check)
    assert said(Layer) != said(nn.Linear)
    assert said(lambda x: x + 1) != said(lambda x: x + 2)
    with pytest.raises(NotRecorded, match="asks for one object"):
        said(object())


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, anyshape, network
torch.set_num_threads(1)  # of which a guard asks; a process that is forked has the number of the one it is forked from
torch.manual_seed(0)
module = network.Network()
fast = anyshape.compile(module)
with torch.no_grad():
    for rows in (3, 1, 7):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(fast(x), module(x))
stats = anyshape.stats()
print(stats["warm_starts"], stats["graphs"], stats["fallbacks"], stats["warm_not_kept"])
"""
NETWORK = """
import torch
class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
    def forward(self, x):
        return helper(self.linear(x))
def helper(x):
    return torch.relu(x) + {number}
"""


def written(path: Path, text: str) -> Path:
    """A file that was there before the process was that scripts are forked from: a source which is younger than its
    process is in no record."""
    path.write_text(text)
    os.utime(path, (1e9, 1e9))
    return path


def environment_of(folder: Path) -> dict[str, str]:
    """Of processes with a cache of their own."""
    cache = folder / "cache"
    cache.mkdir(mode=0o700, exist_ok=True)
    return {**os.environ, "ANYSHAPE_CACHE_DIR": str(cache), "ANYSHAPE_WARM_START": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def test_a_second_process_does_not_trace_and_changed_source_is_seen(tmp_path: Path) -> None:
    source = written(tmp_path / "network.py", NETWORK.format(number=1))
    script, environment = written(tmp_path / "script.py", SCRIPT), environment_of(tmp_path)

    def run(new: bool = False) -> list[int]:
        """`new`: a process that is forked from none: its strings have other hashes, its objects other addresses."""
        if new:
            done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True,
                                  timeout=300, check=False, env={**environment, "PYTHONPATH": str(SOURCE)})
        else:
            done = forked.Run(script, [str(tmp_path)], environment, tmp_path).done(300)
        assert done.returncode == 0, done.stderr
        return [int(number) for number in done.stdout.split()]

    assert run() == [0, 1, 0, 0]
    assert run(new=True) == [1, 1, 0, 0]
    written(source, NETWORK.format(number=25))
    assert run() == [0, 1, 0, 0]


PROCESSES = """
import os, shutil, sys, threading
sys.path.insert(0, sys.argv[1])
import torch, anyshape, network

def work(rows):
    torch.manual_seed(0)
    module = network.Network()
    fast = anyshape.compile(module)
    with torch.no_grad():
        for count in (3, 1, rows):
            x = torch.randn(count, 8)
            torch.testing.assert_close(fast(x), module(x))
    return anyshape.stats()["warm_starts"], anyshape.stats()["fallbacks"]

if __name__ == "__main__":
    way = sys.argv[2]
    if way == "emptied":
        found = [work(8)]
        shutil.rmtree(os.environ["ANYSHAPE_CACHE_DIR"])
        found.append(work(9))
    elif way == "threads":
        found = []
        threads = [threading.Thread(target=lambda rows=rows: found.append(work(rows))) for rows in range(8, 12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    else:
        found = [work(8)]
    print(sorted(found))
"""


def test_processes_threads_and_a_cache_that_goes_away(tmp_path: Path) -> None:
    written(tmp_path / "network.py", NETWORK.format(number=1))
    script = written(tmp_path / "script.py", PROCESSES)
    # how often programs came from the cache so far, and fall backs: by each call of `work`
    for ways, wanted in ((["first"], [(0, 0)]), (["one", "two"], [(1, 0)]), (["threads"], None),
                         (["emptied"], [(1, 0), (1, 0)]), (["written again"], [(1, 0)])):
        environment = environment_of(tmp_path)
        runs = [forked.Run(script, [str(tmp_path), way], environment, tmp_path) for way in ways]
        for way, done in zip(ways, forked.run_all(runs, 300), strict=True):
            assert done.returncode == 0 and not done.stderr, (way, done.stderr)
            found = ast.literal_eval(done.stdout)
            if wanted is None:  # threads count together, in any order
                assert len(found) == 4 and max(found)[0] >= 1 and all(fallbacks == 0 for _, fallbacks in found)
            else:
                assert found == wanted, way


class Trained(nn.Module):
    """Two layers with a tied weight and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((self.second(torch.tanh(self.first(x))) - y) ** 2).mean()


def steps(fast: nn.Module, module: nn.Module) -> None:
    """Compares losses and gradients at several sizes."""
    for rows in (3, 2, 6):
        x, y = torch.randn(rows, 8, requires_grad=True), torch.randn(rows, 8)
        losses = []
        for one in (fast, module):
            module.zero_grad()
            loss = one(x, y)
            loss.backward()
            losses.append((loss.detach(), [weight.grad for weight in module.parameters()], x.grad))
            x.grad = None
        torch.testing.assert_close(losses[0], losses[1])


def test_a_second_compilation_takes_forward_and_backward(compiled: Callable[..., nn.Module]) -> None:
    first, second = Trained(), Trained()
    steps(compiled(first), first)
    assert anyshape.stats()["warm_not_kept"] == 0
    fast = compiled(second)
    steps(fast, second)
    stats = anyshape.stats()
    assert (stats["warm_starts"], stats["graphs"] > 0, stats["warm_refusals"]) == (1, True, 0)
    assert "taken from the cache" in str(fast.explain())
    x, y = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    (gradient,) = torch.autograd.grad(fast(x, y), x, create_graph=True)  # from the graph in the record
    (expected,) = torch.autograd.grad(second(x, y), x, create_graph=True)
    with pytest.warns(FallbackWarning, match="differentiated again"):
        (found,) = torch.autograd.grad(gradient.pow(2).sum(), x)
    torch.testing.assert_close(found, torch.autograd.grad(expected.pow(2).sum(), x)[0])
    with torch.no_grad():  # another program, by its guards
        torch.testing.assert_close(fast(x, y), second(x, y))
