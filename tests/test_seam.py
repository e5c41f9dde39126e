"""The backend interface: a second runner of plans, in plain Python, gives eager's numbers behind the same compiler and
runtime, and nothing outside of `backend` knows how the CPU runs a plan."""
from __future__ import annotations

import re

import pytest
import torch

import anyshape
import plan_interpreter
from anyshape.backend import targets
from limits import net, step
from models import ZOO
from sampling import rest
from test_house import FILES, imports, name_of
from test_models import check_half, check_shapes, check_train_steps

QUICK = 3  # shapes per model
USUAL = ("mixer", "conformer", "clicks", "autoencoder")
MEASURE = ("tools/machine.py",)  # prints what the CPU's routines were measured to do
SEARCH = ("runtime/budget/greedy_search.py",)  # fills the records of the host's own search


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    monkeypatch.setitem(targets.TARGETS, "plain Python", plan_interpreter.__name__)
    monkeypatch.setattr(targets, "DEFAULT", "plain Python")


def test_nothing_outside_imports_a_backend() -> None:
    mentions = [path for path in FILES if "backend" in path.read_text("utf-8")]
    found = {f"{name_of(path)}: {module}" for path in mentions for module, _ in imports(path)
             if re.match(r"anyshape\.backend\.\w+\.", module) and not name_of(path).startswith("backend/")
             and name_of(path) not in MEASURE + SEARCH}
    assert not found


def test_the_processor_is_asked_for_where_a_target_is_made() -> None:
    """What encodes, compiles and measures is given the machine: code for another one is made in the same process."""
    asked = {name_of(path): len(re.findall(r"(?<!def )(?<![\w.])host\(\)", path.read_text()))
             for path in FILES if name_of(path).startswith(("backend/", "tools/", "runtime/", "compiler/"))}
    assert {name: count for name, count in asked.items() if count} == {"backend/cpu/native_routines.py": 1}


def test_it_runs(second: None) -> None:
    fast = anyshape.compile(lambda x, y: (torch.softmax(x @ y, -1), x.sort()[0]), strict=True)
    for rows in (5, 1, 0, 33):
        x, y = torch.randn(rows, 7), torch.randn(7, 3)
        torch.testing.assert_close(fast(x, y)[0], torch.softmax(x @ y, -1))
    assert isinstance(fast.programs[0].executable.runner, plan_interpreter.Runner)


@pytest.mark.parametrize("name", rest(USUAL, "mixer", "clicks"))
def test_models(second: None, name: str) -> None:
    check_shapes(ZOO[name], ZOO[name].shapes(QUICK))


@pytest.mark.full
@pytest.mark.parametrize("name", ZOO)
def test_every_model(second: None, name: str) -> None:
    check_shapes(ZOO[name], ZOO[name].shapes(6), strict=True)
    check_train_steps(ZOO[name])
    if ZOO[name].half:
        check_half(ZOO[name], 2)


def check_limits() -> None:
    """Recomputation, values in chunks, and offloading are the runtime's, whatever runs the steps."""
    own, x = net(), torch.randn(48, 32)
    wanted = step(own, own, x)
    free = anyshape.compile(own, strict=True, memory_limit="1GB")
    for found, value in zip(step(free, own, x), wanted, strict=True):
        torch.testing.assert_close(found, value)
    tight = anyshape.compile(own, strict=True, memory_limit=420_000)
    for found, value in zip(step(tight, own, x), wanted, strict=True):
        torch.testing.assert_close(found, value)


def test_limits(second: None) -> None:
    check_limits()


def check_train_step() -> None:
    own = net()
    other = net()
    # a larger eps: the first step of a weight whose gradient is rounding alone would be of the size of the others
    optimizers = [torch.optim.AdamW(one.parameters(), eps=1e-3, fused=True) for one in (own, other)]
    fast = anyshape.train_step(own, lambda one, x: one(x).square().mean(), optimizers[0])
    for rows in (6, 9):
        x = torch.randn(rows, 32)
        fast(x)
        other(x).square().mean().backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    for found, wanted in zip(own.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)


def test_train_steps(second: None) -> None:
    check_train_step()


def test_a_failed_check_is_an_error(second: None) -> None:
    fast = anyshape.compile(lambda x, i: x[i] * 2, strict=True)
    x = torch.randn(5)
    torch.testing.assert_close(fast(x, torch.tensor([1, 2])), x[[1, 2]] * 2)
    with pytest.raises(IndexError):
        fast(x, torch.tensor([1, 7]))
