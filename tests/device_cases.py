"""What a real GPU has to do: `pytest tests/device_cases.py` on a machine with one; with ANYSHAPE_TEST_DEVICE=fake or
=interpreted behind the fake driver. Models, train steps, limits, graphs, streams and threads against eager on the same
device."""
from __future__ import annotations

import copy
import dataclasses
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import anyshape
import test_models
from anyshape.backend import targets
from anyshape.base.errors import IndexRangeError
from anyshape.runtime.call.unread_status import settle
from models import ZOO, Case
from roads import compilation_of

FAKE = os.environ.get("ANYSHAPE_TEST_DEVICE", "cuda:0") in ("fake", "interpreted")
INTERPRETED = os.environ.get("ANYSHAPE_TEST_DEVICE") == "interpreted"  # with TRITON_INTERPRET=1
DEVICE = torch.device("cpu" if FAKE else "cuda:0")

pytestmark = [pytest.mark.filterwarnings("ignore"),
              pytest.mark.skipif(not FAKE and not torch.cuda.is_available(), reason="there is no GPU")]


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The fake driver, or None."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    if not FAKE:
        torch.backends.cudnn.allow_tf32 = False
        yield None
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:  # nothing can be done in this process any more
            print(f"{request.node.name}: {error}", file=sys.__stderr__, flush=True)
            os._exit(70)
        return
    import fake_device
    import fake_driver
    monkeypatch.setitem(targets.TARGETS, "fake", fake_device.__name__)
    monkeypatch.setattr(targets, "DEFAULT", "fake")
    if INTERPRETED:
        import interpreted_device
        monkeypatch.setattr(fake_device, "Target", interpreted_device.Target)
    found = fake_driver.FakeDriver()
    found.reads = True
    monkeypatch.setattr(fake_device, "DEVICE", [found])
    yield found
    assert not found.alarms


def done(device: Any) -> None:
    """Returns when the device has done everything."""
    if device is None:
        torch.cuda.synchronize()
    else:
        device.everything()


def here(case: Case) -> Case:
    """A model of the zoo whose weights and inputs are on the device."""
    return dataclasses.replace(
        case, build=lambda: case.build().to(DEVICE),
        inputs=lambda shape, generator: tuple(x.to(DEVICE) for x in case.inputs(shape, generator)))


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


# ---- models

@pytest.mark.parametrize("name", ZOO)
def test_equals_eager(name: str) -> None:
    case = here(ZOO[name])
    test_models.check_shapes(case, case.shapes(6))


@pytest.mark.parametrize("name", ZOO)
def test_train_steps(name: str) -> None:
    test_models.check_train_steps(here(ZOO[name]))


@pytest.mark.parametrize("name", [name for name, case in ZOO.items() if case.half])
def test_bfloat16(name: str) -> None:
    test_models.check_half(here(ZOO[name]), 2)


# ---- functions

FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "softmax": lambda x: torch.softmax(x, -1),
    "softmax of columns": lambda x: torch.softmax(x, 0),
    "norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "sums": lambda x: (x.sum(), x.sum(0), x.sum(1), x.mean(), x.var(1)),
    "extremes": lambda x: (x.amax(1), x.argmax(0), x.max(1).indices),
    "scan": lambda x: (x.cumsum(0), x.cumsum(1)),
    "transpose": lambda x: x.t().contiguous() + 1,
    "gather": lambda x: x[torch.arange(x.shape[0], device=x.device).flip(0)],
    "concatenate": lambda x: torch.cat([x, x.exp(), x[:, :1]], 1),
    "pad": lambda x: F.pad(x, (1, 2, 3, 0)),
    "triangle": lambda x: x.tril() - x.triu(1),
    "sort": lambda x: x.sort(1),
    "topk": lambda x: x.topk(1, 1),
    "where": lambda x: torch.where(x > 0, x, x.sin() * 3),
    "functions": lambda x: (x.sigmoid(), x.tanh(), F.gelu(x), F.silu(x), x.abs().log1p(), x.erf(), x.abs().sqrt()),
    "product": lambda x: F.relu(x @ x.t() + 1),
    "double": lambda x: (x.double() ** 2).mean(1),
    "numbers": lambda x: (x.float() * 10).long() // 3 % 5,
    "one hot": lambda x: F.one_hot(x.argmax(1), x.shape[1]),
    "scatter": lambda x: torch.zeros_like(x).index_add_(0, torch.zeros_like(x[:, 0]).long(), x),
    "draw": lambda x: (x + torch.rand_like(x), F.dropout(x, 0.3), torch.randn_like(x)),
}
SHAPES = ((3, 5), (1, 1), (17, 1023), (1024, 16), (5003, 7), (2, 40000), (8192, 1024), (1, 70001))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name: str, dtype: torch.dtype, device: Any) -> None:
    function = FUNCTIONS[name]
    fast = anyshape.compile(function, strict=True)
    for shape in SHAPES[:4] if FAKE else SHAPES:
        if name == "product" and shape[0] > 5000:
            continue
        x = numbers(*shape, dtype=dtype)
        torch.manual_seed(1)
        found = fast(x)
        done(device)
        torch.manual_seed(1)
        wanted = function(x)
        loose = {"rtol": 3e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-3}
        if name in ("scan", "scatter"):  # eager rounds each of their sums in between
            wanted = pytree.tree_map(lambda one: one.to(dtype), function(x.double()))
        torch.testing.assert_close(found, wanted, equal_nan=True, **loose)
    assert len(compilation_of(fast).programs) <= 3


def test_attention(device: Any) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True) * 2

    fast = anyshape.compile(function, strict=True)
    for length in (1, 7, 128, 301):
        given = [numbers(2, 4, length, 64, dtype=torch.bfloat16 if not FAKE else torch.float32).requires_grad_()
                 for _ in range(3)]
        found, wanted = fast(*given), function(*given)
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
        ours = torch.autograd.grad(found.float().square().sum(), given)
        theirs = torch.autograd.grad(wanted.float().square().sum(), given)
        torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=5e-2)


def test_convolution(device: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2))
    model.to(DEVICE)
    plain = copy.deepcopy(model)
    fast = anyshape.compile(model, strict=True)
    for size in ((1, 8, 8), (2, 9, 17), (5, 32, 31)):
        x = numbers(size[0], 3, *size[1:])
        for one in (fast, plain):
            one(x).square().mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4)


# ---- doors

def perceptron() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(33, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 10)).to(DEVICE)


@pytest.mark.parametrize("fused", [False, True])
def test_train_step(fused: bool, device: Any) -> None:
    """A whole step is one program."""
    if FAKE and fused:
        pytest.skip("the CPU's own fused optimiser is another test's")
    model, plain = perceptron(), perceptron()
    ours = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=fused)
    step = anyshape.train_step(model, lambda model, x, y: F.cross_entropy(model(x), y), ours, strict=True)
    for rows in (4, 7, 1, 64, 7):
        x, y = numbers(rows, 33), torch.randint(0, 10, (rows,), device=DEVICE)
        found = step(x, y)
        wanted = F.cross_entropy(plain(x), y)
        wanted.backward()
        theirs.step()
        theirs.zero_grad()
        done(device)
        torch.testing.assert_close(torch.as_tensor(found).to(DEVICE), wanted.detach(), rtol=1e-4, atol=1e-4)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_torch_compile(device: Any) -> None:
    model, plain = perceptron(), perceptron()
    fast = torch.compile(model, backend="anyshape", dynamic=True)
    for rows in (4, 7, 1, 64):
        x = numbers(rows, 33)
        for one in (fast, plain):
            one(x).square().mean().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(FAKE, reason="autocast of the device")
def test_autocast(device: Any) -> None:
    model, plain = perceptron(), perceptron()
    fast = anyshape.compile(model, strict=True)
    for rows in (4, 7, 64):
        x = numbers(rows, 33)
        for one in (fast, plain):
            with torch.autocast("cuda", torch.bfloat16):
                loss = one(x).float().square().mean()
            loss.backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=3e-2, atol=3e-2)


def deep(width: int = 256) -> nn.Module:
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(6)]
    return nn.Sequential(*blocks).to(DEVICE)


@pytest.mark.parametrize("part", [0.7, 0.0])
def test_memory_limit(part: float, device: Any) -> None:
    """Values are recomputed or moved out, and no more bytes are taken than were allowed."""
    model, plain = deep(), deep()
    fast = anyshape.compile(model, memory_limit="4GB", strict=True)
    x = numbers(512, 256)
    fast(x).square().mean().backward()
    limit = next(one.executable.limit for one in fast.programs if "forward" in one.name)
    values = dict(next(iter(limit.program.specializations.values())).values)
    limit.move(max(int(part * limit.needed(values, limit.choose(values))), limit.least(values)))
    for rows in (512, 300, 512):
        for one in (model, plain):
            one.zero_grad()
        fast(x[:rows]).square().mean().backward()
        plain(x[:rows]).square().mean().backward()
    done(device)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.skipif(FAKE, reason="products are PyTorch's own on the fake")
def test_device_graphs(device: Any) -> None:
    model, plain = deep(), deep()
    fast = anyshape.compile(model, strict=True, device_graphs=1)
    with torch.no_grad():
        for _ in range(6):
            for rows in (64, 33):
                x = numbers(rows, 256)
                torch.testing.assert_close(fast(x), plain(x), rtol=1e-3, atol=1e-4)


# ---- errors, streams, threads, memory

def test_an_index_out_of_range(device: Any) -> None:
    fast = anyshape.compile(lambda x, i: (x[i] * 2).cumsum(0), strict=True)
    x = numbers(5)
    good, bad = torch.tensor([1, 2], device=DEVICE), torch.tensor([1, 7], device=DEVICE)
    torch.testing.assert_close(fast(x, good), (x[good] * 2).cumsum(0))
    with pytest.raises(IndexRangeError):
        fast(x, bad)
        settle(fast.programs[0].executable.context.unread, wait=True)
    done(device)
    torch.testing.assert_close(fast(x, good), (x[good] * 2).cumsum(0))


@pytest.mark.skipif(FAKE, reason="streams of torch.cuda")
def test_streams_and_threads(device: Any) -> None:
    def function(x: Tensor) -> Tensor:
        for _ in range(8):
            x = torch.softmax(x @ x.t(), 1) @ x
        return x

    fast = anyshape.compile(function, strict=True)
    fast(numbers(64, 32))
    wrong: list[Any] = []

    def work(number: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for turn in range(20):
                x = numbers(50 + 7 * number + turn, 32)
                found, wanted = fast(x), function(x)
                stream.synchronize()
                if not torch.allclose(found, wanted, rtol=1e-3, atol=1e-4):
                    wrong.append((number, turn, float((found - wanted).abs().max())))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong


@pytest.mark.skipif(FAKE, reason="bytes of torch.cuda")
def test_memory_is_given_back(device: Any) -> None:
    x = numbers(1024, 1024)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    fast = anyshape.compile(lambda x: torch.softmax(x @ x, 1).cumsum(0) @ x, strict=True)
    for rows in (1024, 512, 1024):
        fast(x[:rows, :rows].contiguous())
    torch.cuda.synchronize()
    del fast
    torch._dynamo.reset()
    gc.collect()
    left = torch.cuda.memory_allocated() - before
    assert left <= 64 << 20, left  # PyTorch's workspaces of cuBLAS


@pytest.mark.skipif(FAKE, reason="the demo wants a real device")
def test_demo(tmp_path: Path, device: Any) -> None:
    done_ = subprocess.run([sys.executable, "-m", "anyshape", "demo", "--device", "cuda", "--steps", "30", "--out",
                            str(tmp_path)], capture_output=True, text=True, check=False, timeout=200)
    print(done_.stdout[-3000:], done_.stderr[-3000:])
    assert done_.returncode == 0
