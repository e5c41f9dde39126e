"""`anyshape.save` of what was compiled as it is: exported as it was called, with free sizes."""
from __future__ import annotations

import functools
import json
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import anyshape
from anyshape.artifact.check import check
from anyshape.artifact.format import safetensors
from anyshape.base.errors import ArtifactError, ConfigError, InputError, Unsupported
from deploying import alone, members_of, with_members

RUN = """
    import sys, numpy as np, anyshape
    with np.load(sys.argv[2]) as given, anyshape.load(sys.argv[1], trust_native=True) as run:
        for i in range(len(given.files) // 2):
            np.testing.assert_allclose(run(given[f"x{i}"]), given[f"y{i}"], rtol=1e-4, atol=1e-5)
    assert "torch" not in sys.modules
    print("same")
    """


def pooled() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()


@pytest.mark.parametrize("gradients", [False, True])
def test_a_module_is_saved_after_calls(tmp_path: Path, gradients: bool) -> None:
    """Called with batches of 1 alone in one case; loaded at others, 1 among them."""
    torch.manual_seed(0)
    model = pooled()
    fast = anyshape.compile(model)
    with torch.set_grad_enabled(gradients):
        for batch, side in ((1, 16), (5 if gradients else 1, 9)):
            found = fast(torch.randn(batch, 3, side, side + 1))
            if gradients:
                found.sum().backward()
    with torch.no_grad():
        model[0].bias.add_(1)  # what is saved are the weights of now
        xs = [torch.randn(*sizes) for sizes in ((4, 3, 8, 7), (1, 3, 16, 17), (3, 3, 20, 5))]
        np.savez(tmp_path / "data.npz", **{f"x{i}": x.numpy() for i, x in enumerate(xs)},
                 **{f"y{i}": model(x).numpy() for i, x in enumerate(xs)})
    anyshape.save(fast, tmp_path / "model.any")
    assert alone(RUN, tmp_path / "model.any", tmp_path / "data.npz").strip() == "same"


def scaled(batch: dict[str, Any], power: int = 2, *, shift: torch.Tensor | None = None) -> dict[str, Any]:
    y = batch["x"] * batch["more"][0].unsqueeze(-1) ** power
    return {"y": y if shift is None else y + shift, "all": [y.sum()]}


def test_names_and_nesting_are_those_of_the_call(tmp_path: Path) -> None:
    def batch(*sizes: int) -> dict[str, Any]:
        return {"x": torch.randn(*sizes, 4), "more": [torch.rand(sizes)]}

    fast = anyshape.compile(scaled)
    with pytest.raises(ConfigError, match="was not called"):
        anyshape.save(fast, tmp_path / "f.any")
    fast(batch(5, 5), shift=torch.ones(4), power=3)
    anyshape.save(fast, tmp_path / "f.any")
    with anyshape.load(tmp_path / "f.any", trust_native=True) as run:
        assert "batch_x: f32[" in run.describe() and "power: a whole number" in run.describe()
        given, shift = batch(3, 7), torch.randn(4)
        torch.testing.assert_close(run(given, power=2, shift=shift), scaled(given, 2, shift=shift))
        with pytest.raises(InputError, match="batch_x_0, batch_x_1"):
            run({**given, "more": [torch.rand(2, 7)]}, 2, shift=shift)
    fast(batch(5, 5), power=3)
    with pytest.raises(ConfigError, match="which program to save") as error:
        anyshape.save(fast, tmp_path / "f.any")
    assert "shift=float32[4]" in error.value.why and "call it in one way" in error.value.do


class ByBatch(nn.Module):
    """A batch of 1 is another program: in Python, and in a shape."""

    def __init__(self, python: bool) -> None:
        super().__init__()
        self.python = python

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.python:
            return x * 2 if x.shape[0] != 1 else x * 3
        return x.squeeze(0).sum(0)


@pytest.mark.parametrize("python", [False, True])
def test_a_size_of_1_that_is_another_program(tmp_path: Path, python: bool) -> None:
    module = ByBatch(python)
    fast = anyshape.compile(module)
    fast(torch.randn(4, 3, 2))
    anyshape.save(fast, tmp_path / "f.any")
    with anyshape.load(tmp_path / "f.any", trust_native=True) as run:
        for sizes in ((5, 1, 3), (2, 7, 1), (1, 3, 2), (1, 1, 5)):
            x = torch.randn(sizes)
            torch.testing.assert_close(run(x), module(x))


def test_tied_weights_take_a_batch_of_one(tmp_path: Path) -> None:
    """The trace has them twice, in the same memory."""
    layer = nn.Linear(4, 4)
    tied = nn.Sequential(layer, nn.ReLU(), layer).eval()
    fast = anyshape.compile(tied)
    with torch.no_grad():
        fast(torch.randn(3, 4))
    with anyshape.load(anyshape.save(fast, tmp_path / "f.any"), trust_native=True) as run:
        for rows in (1, 5):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(run(x), tied(x))


def test_what_cannot_be_exported_says_what_to_do(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    fast = anyshape.compile(model)
    fast(torch.randn(3, 4))
    with pytest.raises(Unsupported) as error:
        anyshape.save(fast, tmp_path / "f.any")
    assert "training mode: model.eval()" in error.value.do
    fast = anyshape.compile(lambda x: x * 2 if x.sum().item() > 0 else x)
    fast(torch.ones(3, 4))
    with pytest.raises(Unsupported, match=r"torch\.export does not take it") as error:
        anyshape.save(fast, tmp_path / "f.any")
    assert "data-dependent" in error.value.why
    fast = anyshape.compile(lambda x: x * len(f"{x.shape[0]}"))
    fast(torch.ones(3, 4))
    with pytest.raises(Unsupported, match="a text of a size"):
        anyshape.save(fast, tmp_path / "f.any")
    fast = anyshape.compile(lambda x: x * 2)
    with torch.autocast("cpu", torch.bfloat16):
        fast(torch.ones(3, 4))
    with pytest.raises(Unsupported, match=r"inside of torch\.autocast"):
        anyshape.save(fast, tmp_path / "f.any")
    assert not list(tmp_path.iterdir())


def guarded(kind: str, x: torch.Tensor) -> torch.Tensor:
    n, k = x.shape
    if {"remainder": n % 3 == 1, "quotient": n // 3 == 3, "other": n != 12, "of both": n // k == 2,
            "float": n * 0.3 < 5, "half": n / 2 >= 4.5, "root": n**0.5 > 3, "rounded": math.ceil(n * 0.3) % 2 == 0,
            "ratio": n / k > 1.5, "difference": n % (2 * k - 5) == 1, "floats of both": n * 0.3 < k * 0.9}[kind]:
        return x * 2
    return x + 1


@pytest.mark.parametrize("kind, taken", [
    ("remainder", {4, 7, 10, 13, 100}), ("difference", {4, 7, 10, 13, 100}), ("quotient", {9, 10, 11}),
    ("other", {4, 7, 9, 10, 11, 13, 17, 100}),
    ("of both", {9, 10, 11}), ("float", {4, 7, 9, 10, 11, 12, 13}), ("half", {9, 10, 11, 12, 13, 17, 100}),
    ("root", {10, 11, 12, 13, 17, 100}), ("rounded", {7, 9, 10}), ("ratio", {7, 9, 10, 11, 12, 13, 17, 100}),
    ("floats of both", {10})])
def test_a_file_asks_the_guards_of_its_trace(kind: str, taken: set[int], tmp_path: Path) -> None:
    fast = anyshape.compile(functools.partial(guarded, kind))
    fast(torch.ones(10, 4))
    anyshape.save(fast, tmp_path / "f.any", native=False)
    found = set()
    with anyshape.load(tmp_path / "f.any") as run:
        for n in (4, 7, 9, 10, 11, 12, 13, 17, 100):
            x = torch.full((n, 4), 3.0)
            try:
                torch.testing.assert_close(run(x), guarded(kind, x))
            except InputError:
                continue
            found.add(n)
    assert found == taken


def test_a_function_of_c_is_saved(tmp_path: Path) -> None:
    fast, x = anyshape.compile(torch.sigmoid), torch.randn(3, 5)
    fast(x)
    anyshape.save(fast, tmp_path / "f.any", native=False)
    with anyshape.load(tmp_path / "f.any") as run:
        torch.testing.assert_close(run(x[:2, :3]), torch.sigmoid(x[:2, :3]))


class Last(nn.Module):
    """Its result lies with channels last, and with those first where there is one image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, side, _, channels = x.shape
        return self.conv(x.reshape(n, side * side, channels).permute(0, 2, 1).reshape(n, channels, side, side))


def test_a_file_takes_sizes_at_which_a_result_lies_otherwise(tmp_path: Path) -> None:
    model = Last().eval()
    fast = anyshape.compile(model)
    with torch.no_grad():
        fast(torch.randn(2, 5, 5, 6))
        anyshape.save(fast, tmp_path / "f.any", native=False)
        with anyshape.load(tmp_path / "f.any") as run:
            for n in (1, 3):
                x = torch.randn(n, 4, 4, 6)
                torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)


class InPython(nn.Module):
    """Numbers of Python's made of sizes, which a trace by running the module fixes."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(int(x.shape[1])).expand(len(lengths), x.shape[1]) < lengths[:, None] * float(x.shape[1])
        y = torch.addcdiv(self.into(x), x, x.exp() + 1, value=0.5)  # which Dynamo alone computes otherwise
        return y / math.sqrt(x.shape[1]) * mask[:, :, None]


def test_sizes_that_become_numbers_of_python_are_free_in_a_file(tmp_path: Path):
    model = InPython().eval()
    fast = anyshape.compile(model)
    with torch.no_grad():
        fast(torch.randn(3, 5, 4), torch.rand(3))
        with anyshape.load(anyshape.save(fast, tmp_path / "f.any"), trust_native=True) as run:
            for batch, length in ((3, 5), (7, 2), (1, 11), (2, 1), (0, 3)):
                x, lengths = torch.randn(batch, length, 4), torch.rand(batch)
                torch.testing.assert_close(run(x, lengths), model(x, lengths))


class Asks(nn.Module):
    """A size of 1 is another program, in each of two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.into(x)
        if x.shape[0] != 1:
            y = y * 2
        return y.cumsum(1) if x.shape[1] > 1 else y - 3


def test_sizes_of_1_that_are_programs_of_their_own(tmp_path: Path) -> None:
    model = Asks().eval()
    fast = anyshape.compile(model)
    data = {}
    with torch.no_grad():
        fast(torch.randn(3, 5, 4))
        path = anyshape.save(fast, tmp_path / "f.any", tests=[(np.ones((1, 3, 4), "f4"),), (np.ones((2, 3, 4), "f4"),)])
        for number, sizes in enumerate([(3, 5), (1, 5), (3, 1), (1, 1), (7, 2)]):
            x = torch.randn(*sizes, 4)
            data |= {f"x{number}": x.numpy(), f"y{number}": model(x).numpy()}
    np.savez(tmp_path / "f.npz", **data)
    assert alone(RUN, path, tmp_path / "f.npz").startswith("same")
    with anyshape.load(path) as run:
        for number in range(len(data) // 2):
            np.testing.assert_allclose(run(data[f"x{number}"]), data[f"y{number}"], rtol=1e-5, atol=1e-6)
        with pytest.raises(InputError, match="does not take these sizes"):
            run(np.ones((0, 5, 4), "f4"))
        assert run.bytes_of([data["x3"]]) < run.bytes_of([data["x0"]])
        assert "or dim 0 of x is 1, dim 1 of x is 1" in run.describe()
    members = members_of(path)
    assert members.keys() >= {"graph.3.txt", "plan.3.txt", "kernels.3.txt"} and "graph.4.txt" not in members
    assert len(safetensors.decode(memoryview(members["weights.safetensors"]), "")) == 2
    assert json.loads(members["format.json"])["version"] == 4
    assert "where dim 0 of x is 1, dim 1 of x is 1" in str(check(path))


def test_a_stranger_s_programs_for_sizes(tmp_path: Path) -> None:
    fast = anyshape.compile(Asks().eval())
    with torch.no_grad():
        fast(torch.randn(3, 5, 4))
        members = members_of(anyshape.save(fast, tmp_path / "f.any", native=False))
    head = json.loads(members["format.json"])
    first, *_ = head["special"]
    other = {**first["signature"], "args": ["tuple", [0, 0]]}
    for special in ("none", [1], [first] * 8, [{**first, "sizes": []}], [{**first, "sizes": [[1, 0, 1]]}],
                    [{**first, "sizes": [[0, 0]]}], [{**first, "sizes": [[0, 0, -1]]}], [{**first, "signature": other}],
                    [{**first, "weights": [[0, "nowhere"]]}], [{"sizes": first["sizes"]}]):
        text = json.dumps({**head, "special": special}).encode()
        with pytest.raises(ArtifactError):
            anyshape.load(with_members(tmp_path / "g.any", {**members, "format.json": text}))
    missing = {name: data for name, data in members.items() if name != "graph.1.txt"}
    with anyshape.load(with_members(tmp_path / "h.any", missing)) as run:
        run(np.ones((3, 5, 4), "f4"))
        with pytest.raises(ArtifactError, match=r"graph\.1\.txt is missing"):
            run(np.ones((1, 1, 4), "f4"))
    swapped = {**members, "graph.1.txt": members["graph.txt"]}  # whose program does not take that size
    with anyshape.load(with_members(tmp_path / "i.any", swapped)) as run, pytest.raises(InputError):
        run(np.ones((1, 1, 4), "f4"))
def test_sizes_that_are_rounded_are_free_in_a_file(tmp_path: Path) -> None:
    def rounded(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        n, m = x.shape
        padded = F.pad(x, (0, int(math.ceil(m / 4) * 4 - m)))
        smaller = F.interpolate(padded[None, None], size=[int(n * 0.5), m])
        return (smaller, F.interpolate(x[None, None], scale_factor=0.5), x[:int(n / 2)], x[:round(n / 2)],
                x[round(m / 3):], torch.arange(0, n, 2.5), torch.arange(0, n / 2), x[:int(n // 1.5)])

    fast = anyshape.compile(rounded)
    fast(torch.randn(4, 6))
    anyshape.save(fast, tmp_path / "f.any", native=False)
    with anyshape.load(tmp_path / "f.any") as run:
        for sizes in ((4, 6), (5, 7), (6, 11), (7, 5), (101, 33)):
            x = torch.randn(sizes)
            torch.testing.assert_close(run(x), rounded(x))


LOCK = threading.Lock()


class Prepared(nn.Module):
    """Its first call sets something up behind a lock, which Dynamo does not trace, as models of transformers do."""

    ready = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            with LOCK:
                self.ready = True
        return x * 2


def test_a_first_call_that_sets_something_up(tmp_path: Path) -> None:
    fast = anyshape.compile(Prepared().eval())
    with pytest.raises(ConfigError, match="not called since"):
        anyshape.save(fast, tmp_path / "f.any")
    x = torch.ones(3, 4)
    fast(x)
    with pytest.raises(ConfigError, match="call it once more") as error:
        anyshape.save(fast, tmp_path / "f.any")
    assert "lock" in error.value.why
    fast(x)
    anyshape.save(fast, tmp_path / "f.any", native=False)


def test_a_file_takes_the_call_that_it_was_made_from(tmp_path: Path) -> None:
    fast = anyshape.compile(lambda x: x * 2 if x.shape[0] == 1 else x + 1)
    x = torch.ones(1, 4)
    fast(x)
    anyshape.save(fast, tmp_path / "f.any", native=False)
    with anyshape.load(tmp_path / "f.any") as run:
        torch.testing.assert_close(run(x), x * 2)
        torch.testing.assert_close(run(torch.ones(2, 4)), torch.full((2, 4), 2.0))
