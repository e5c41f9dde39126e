"""Random numbers in deployed files: PyTorch's distributions, drawn by numpy, from a seed."""
from __future__ import annotations

import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import anyshape
from anyshape.artifact.check import check
from anyshape.artifact.test_vectors import run as run_vectors
from anyshape.base.errors import ConfigError, InputError
from anyshape.dist.data_parallel import parallel_size
from anyshape.runtime.numpy_ops.random_numbers import OPERATORS

ROWS = 4000
CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rand": lambda x: torch.rand(x.shape), "rand_like": torch.rand_like, "randn": lambda x: torch.randn(x.shape),
    "rand of f16": lambda x: torch.rand(x.shape, dtype=torch.float16).float(),
    "rand of f64": lambda x: torch.rand(x.shape, dtype=torch.float64), "rand_like of bf16": lambda x: torch.rand_like(
        x.bfloat16()).float(), "randn of f64": lambda x: torch.randn(x.shape, dtype=torch.float64),
    "randn_like": torch.randn_like, "randint of u8": lambda x: torch.randint(0, 9, x.shape, dtype=torch.uint8),
    "randperm of i32": lambda x: torch.randperm(x.shape[0], dtype=torch.int32),
    "normal_ by name": lambda x: torch.empty_like(x).normal_(mean=1, std=2),
    "randint": lambda x: torch.randint(2, 7, x.shape),
    "randint_like": lambda x: torch.randint_like(x, 5), "randperm": lambda x: x[torch.randperm(x.shape[0])],
    "bernoulli": lambda x: torch.bernoulli(x), "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "multinomial": lambda x: torch.multinomial(x, 2), "with replacement": lambda x: torch.multinomial(x, 6, True),
    "uniform_": lambda x: torch.empty_like(x).uniform_(1, 3), "normal_": lambda x: torch.empty_like(x).normal_(1, 2),
    "normal": lambda x: torch.normal(x, x), "normal_sized": lambda x: torch.normal(1.0, 2.0, x.shape),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.4), "poisson": lambda x: torch.poisson(x),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(0.5, 0.25).log(),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(1.0, 2.0).atan(), "gumbel": F.gumbel_softmax,
    "dropout": lambda x: F.dropout(x, 0.3, True), "rrelu": lambda x: F.rrelu(x - 0.5, training=True),
}


class All(nn.Module):
    """One program of all cases."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [case(x) for case in CASES.values()]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fast = anyshape.compile(All().eval())
    x = torch.rand(7, 3)
    with torch.no_grad():
        fast(x)
    return anyshape.save(fast, tmp_path_factory.mktemp("random") / "all.any", tests=[(x,)])


def test_the_distributions_are_those_of_pytorch(file: Path) -> None:
    x = np.random.default_rng(0).random((ROWS, 3), np.float32)
    torch.manual_seed(0)
    with anyshape.load(file, trust_native=True, threads=1, seed=5) as run:
        found, wanted = run(x), All()(torch.from_numpy(x))
    for name, ours, theirs in zip(CASES, found, wanted, strict=True):
        theirs = theirs.numpy()
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, name
        levels = np.linspace(0.05, 0.95, 10)
        ends = [np.quantile(one.reshape(-1).astype("f8"), levels) for one in (ours, theirs)]
        # a quantile's error, in probability, is below 1.5 percent of these many; whole numbers step by one
        spread = np.quantile(theirs.astype("f8"), levels + 0.03) - np.quantile(theirs.astype("f8"), levels - 0.03)
        assert (abs(ends[0] - ends[1]) <= spread + 1e-6).all(), name
        if ours.dtype.kind == "f":
            assert np.isclose(ours.mean(), theirs.mean(), atol=6 * theirs.std() / ROWS ** 0.5), name
    with_none = found[list(CASES).index("multinomial")]
    assert (with_none[:, 0] != with_none[:, 1]).all()
    (kept,) = np.unique(np.round(found[list(CASES).index("dropout")][x > 0] / x[x > 0], 3)).reshape(1, -1)
    np.testing.assert_allclose(kept, [0, 1 / 0.7], rtol=1e-3)


def test_a_seed_gives_the_same_calls_again(file: Path) -> None:
    x = np.random.default_rng(0).random((5, 3), np.float32)

    def calls(run: Callable[[np.ndarray], list[np.ndarray]]) -> list[bytes]:
        return [one.tobytes() for _ in range(2) for one in run(x)]

    with anyshape.load(file, trust_native=True, seed=3) as run, anyshape.load(file) as compiled:
        first = calls(run)
        assert calls(run) != first and first[:len(CASES)] != first[len(CASES):]
        for one in (run, compiled):  # the text compiled again draws in the same order
            one.seed(3)
            assert calls(one) == first
        with pickle.loads(pickle.dumps(run)) as other:
            assert calls(other) != first
        with ThreadPoolExecutor(4) as pool:  # each draw has one thread
            run.seed(None)
            assert len(set(pool.map(lambda _: run(x)[0].tobytes(), range(40)))) == 40
        assert parallel_size(check(file).graph) is None  # so that requests to a server do not share draws
        for wrong in (-1, 1.5, True, "1"):
            with pytest.raises(ConfigError):
                run.seed(wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError):
        run.seed(1)


def test_a_file_says_that_it_draws_and_keeps_its_test_vectors(file: Path) -> None:
    assert "  draws    random numbers: aten.rand.default" in str(check(file))
    assert run_vectors(file, trust_native=True) == 1


def test_a_module_in_training_mode_is_warned_of(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    for training in (True, False):
        fast = anyshape.compile(model.train(training))
        with torch.no_grad():
            fast(torch.ones(2, 3))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            anyshape.save(fast, tmp_path / "model.any")
        assert [str(one.message) for one in said if "draws random numbers" in str(one.message)] != [] or not training
        assert "draws" not in str(check(tmp_path / "model.any")) or training


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64"])
def test_numbers_below_one_stay_below_one(dtype: str) -> None:
    class Ones(np.random.Generator):
        def random(self, shape: object, dtype: type = np.float64) -> np.ndarray:  # type: ignore[override]
            return np.full(shape, np.nextafter(dtype(1), dtype(0)))  # type: ignore[call-overload]

    found = OPERATORS["aten.rand.default"](Ones(np.random.PCG64()), dtype, (2, 0, 3)), OPERATORS["aten.rand.default"](
        Ones(np.random.PCG64()), dtype, (3,))
    kinds = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}
    assert found[0].size == 0 and (torch.from_numpy(found[1]).to(kinds[dtype]) < 1).all()


@pytest.mark.parametrize("name, arguments", [
    ("aten.bernoulli.default", [np.array([0.5, 1.5])]), ("aten.bernoulli.default", [np.array([np.nan])]),
    ("aten.multinomial.default", [np.zeros((2, 3)), 1]), ("aten.multinomial.default", [np.array([1, -1.0]), 1]),
    ("aten.multinomial.default", [np.ones(3), 4]), ("aten.randint.low", [3, 3, (2,)]),
    ("aten.normal.Tensor_Tensor", [np.ones(2), -np.ones(2)]), ("aten.poisson.default", [-np.ones(2)]),
    ("aten.exponential.default", [np.ones(2), 0.0]), ("aten.geometric.default", [np.ones(2), 0.0])])
def test_data_without_a_distribution_are_refused(name: str, arguments: list[object]) -> None:
    with pytest.raises(InputError) as caught:
        OPERATORS[name](np.random.default_rng(0), "f32", *arguments)
    assert caught.value.why and caught.value.do


def test_programs_that_draw_nothing_do_without_numpy_s_generators() -> None:
    code = "import sys, anyshape.runtime.numpy_ops.calls; sys.exit('numpy.random' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
