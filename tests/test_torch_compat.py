"""Private names of torch: without any one of them a user's call gives the same numbers, with one warning."""
from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import anyshape
from anyshape import torch_compat as compat
from anyshape.frontend.capture.dynamo_backend import FallbackWarning
from anyshape.torch_compat import replaced_kernels as replaced
from anyshape.torch_compat.names import NAMES, NEEDED

SOURCE = Path(anyshape.__file__).parent
OPTIONAL = sorted(NAMES.keys() - NEEDED.keys())
# one name for each way of doing without; the others with -m full
FIRST = {name.without: path for path, name in reversed(NAMES.items()) if name.without}


class Small(nn.Module):
    """A few kernels and a library call; a size in Python; a result that is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = nn.functional.dropout(self.linear(x).sigmoid(), 0.5, self.training) * x.shape[0]
        return y.softmax(-1), y[:, 1:]


def agrees(model: nn.Module, fast: nn.Module, sizes: tuple[int, ...]) -> None:
    for n in sizes:
        x, y = (torch.arange(4.0 * n).reshape(n, 4).div(n).requires_grad_() for _ in range(2))
        expected, found = model(x), fast(y)
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(other, one)
        sum(one.square().sum() for one in expected).backward()
        sum(one.square().sum() for one in found).backward()
        torch.testing.assert_close(y.grad, x.grad)


def said_without(name: str) -> tuple[list[str], anyshape.Explanation]:
    """What is warned of when a small program runs on a torch without `name`, and its explanation."""
    model = Small().eval()
    with warnings.catch_warnings(record=True) as caught, compat.pretending(name):
        warnings.simplefilter("always")
        fast = anyshape.compile(copy.deepcopy(model))
        agrees(model, fast, (3, 2, 1))
        told = fast.explain()
    return [str(one.message) for one in caught
            if issubclass(one.category, (compat.TorchVersionWarning, FallbackWarning))], told


def test_all_names_are_there() -> None:
    assert compat.refusal() is None and not compat.lacking()
    if compat.version() >= (2, 13):
        of_gpus = () if torch.backends.cuda.is_built() else ("torch._C._cuda_getCurrentRawStream",)
        assert [name for name in NAMES if compat.get(name) is None] == [*of_gpus]


def test_kernels_that_torch_registers_itself_are_no_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.13 replaces kernels itself, of CUDA in a build for it; a user's may have the same operator elsewhere."""
    torch_own = {"aten/_foreach_mm/CUDA", "_native/_foreach_mm_native_1/CUDA", "aten/bmm/CUDA",
                 "_native/bmm_triton_0/CUDA", "_native/bmm_triton_0/Meta", "aten/scatter_add_/CUDA",
                 "_native/scatter_add__cutedsl_2/CUDA", "aten/index_add.out/CUDA",
                 "_native/index_add_out_triton_3/CUDA"}
    monkeypatch.setattr(replaced, "last", replaced.last)
    monkeypatch.setattr(replaced, "count", -1)
    monkeypatch.setattr(replaced, "registered", torch_own)
    assert replaced.replaced_kernels() == ()
    torch_own |= {"aten/bmm/CPU", "aten/_foreach_add.List/CUDA"}
    assert replaced.replaced_kernels() == ("aten::_foreach_add.List (CUDA)", "aten::bmm (CPU)")


@pytest.mark.parametrize("name", sorted(NEEDED))
def test_without_a_name_that_is_needed_all_runs_as_pytorch(name: str) -> None:
    said, told = said_without(name)
    assert len(said) == 1 and name in said[0] and torch.__version__ in said[0]
    assert not told.programs and name in str(told)


def test_the_list_has_what_is_used_and_no_more() -> None:
    words = " ".join(path.read_text() for path in sorted(SOURCE.rglob("*.py")) if path.name != "names.py")
    together = {*compat.ALL_SIZES, *compat.PYTHON_KERNELS, *compat.TRAIN_STEP}  # asked for as one
    for name in NAMES.keys() - together:
        assert name.rsplit(".", 1)[-1] in words, f"{name} is not used"


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in FIRST.values() else pytest.mark.full)
                                  for name in OPTIONAL])
def test_without_another_name_it_is_compiled_all_the_same(name: str) -> None:
    said, told = said_without(name)
    assert all(name in one and torch.__version__ in one for one in said), said
    assert len(said) <= 1
    assert told.programs
    assert not said or name in [one.stage for one in told.fallbacks]


def test_under_strict_what_torch_lacks_is_said_in_four_parts() -> None:
    with compat.pretending("torch._functorch.aot_autograd.aot_module_simplified"):
        fast = anyshape.compile(Small(), strict=True)
        with pytest.raises(anyshape.AnyShapeError, match="aot_module_simplified") as raised:
            fast(torch.ones(2, 4))
        assert torch.__version__ in raised.value.why and raised.value.do
        with pytest.warns(FallbackWarning, match="aot_module_simplified"):
            torch.compile(Small(), backend="anyshape")(torch.ones(2, 4))


def test_a_train_step_without_what_it_needs_is_the_users_own_step() -> None:
    for name in ("torch._guards.tracing", "torch._guards.TracingContext"):
        with warnings.catch_warnings(), compat.pretending(name):
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            model = nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            step = anyshape.train_step(model, lambda m, x: m(x).square().mean(), optimizer)
            losses = [float(step(torch.ones(3, 4))) for _ in range(3)]
        assert losses[2] < losses[0]


PRIVATE_OPERATORS = sorted({name for path in SOURCE.rglob("*.py")
                            for name in re.findall(r"\baten\.(_[a-z]\w+)", path.read_text())})


def run_python(program: str, *arguments: str) -> str:
    paths = os.pathsep.join((str(SOURCE.parent), str(Path(__file__).parent)))
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.full
def test_without_private_operators_programs_are_compiled_all_the_same() -> None:
    assert len(PRIVATE_OPERATORS) > 20
    assert "compiled" in run_python("""
import sys
from anyshape.torch_compat import objects
objects.pretended_operators.update(sys.argv[1:])
import anyshape
from test_torch_compat import Small, agrees
model = Small().eval()
fast = anyshape.compile(model)
agrees(model, fast, (3, 2))
print("compiled" if fast.programs else "")
""", *PRIVATE_OPERATORS)


# each name in a process of its own, where it is deleted from torch before AnyShape is loaded
DELETED = """
import importlib, json, os, sys, traceback, warnings
import torch, torch._dynamo, torch._functorch.aot_autograd, torch._inductor  # what each process would load
for name in json.loads(sys.argv[1]):
    child = os.fork()
    if child:
        print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    owner, _, last = name.rpartition(".")
    try:
        room = torch
        for part in owner.split(".")[1:]:
            try:
                room = getattr(room, part)
            except AttributeError:
                room = importlib.import_module(f"{room.__name__}.{part}")
        getattr(room, last, None)
        delattr(room, last)
        sys.modules[name] = None
        torch.manual_seed(0)
        plain = torch.compile(torch.nn.Linear(2, 2), backend="aot_eager")
        plain(torch.ones(3, 2)).sum().backward()
    except BaseException:
        os._exit(77)  # this torch does not do without it, or it cannot be deleted
    try:
        import anyshape
        from test_torch_compat import Small, agrees
        warnings.simplefilter("ignore")
        model = Small().eval()
        agrees(model, anyshape.compile(model), (3, 2, 1))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
"""


@pytest.mark.full
def test_each_name_can_be_deleted_from_torch() -> None:
    told = dict(line.rsplit(" ", 1) for line in run_python(DELETED, json.dumps(sorted(NAMES))).splitlines() if line)
    assert told.keys() == NAMES.keys()
    assert [name for name, code in told.items() if code not in ("0", "77")] == []
    assert sum(code == "0" for code in told.values()) > 30
