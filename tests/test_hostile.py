"""Promises to users, tried with hostile use: nothing is wrong, nothing is silent, nothing is left behind."""
from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import pickle
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.device_mesh
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

import anyshape
from anyshape import torch_compat
from anyshape.backend.cpu.machine.target import host
from anyshape.base.errors import AnyShapeError
from anyshape.torch_compat.versions.symbolic_functions import traced_values
from sampling import crossed


@pytest.fixture
def one_process() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_user_can_assert_that_nothing_ran_eagerly() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    fast = anyshape.compile(model)
    anyshape.reset_stats()
    for rows in (3, 5, 1):
        fast(torch.randn(rows, 8)).sum().backward()
    assert anyshape.stats()["eager_calls"] == 0


def test_calls_are_compiled_while_another_thread_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch then says to all threads that it compiles."""
    def softmax(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 2, -1)

    def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    fast = anyshape.compile(softmax, strict=True)
    ours, theirs = nn.Linear(4, 2), nn.Linear(4, 2)
    theirs.load_state_dict(ours.state_dict())
    rates = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs)]
    step = anyshape.train_step(ours, mean_square, rates[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rows in (3, 5, 7, 9):
            if rows == 7:
                monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
            anyshape.reset_stats()
            fast(torch.randn(rows, 4))
            assert (anyshape.stats()["runs"], anyshape.stats()["eager_calls"]) == (1, 0)
            x = torch.randn(rows, 4)
            with FlopCounterMode(display=False) if rows == 9 else contextlib.nullcontext():  # it runs as PyTorch then
                step(x)
            rates[1].zero_grad()
            mean_square(theirs, x).backward()
            rates[1].step()
            torch.testing.assert_close(ours.weight, theirs.weight)


class Halves(nn.Module):
    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.halves = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "loop":
            for half in self.halves:
                x = half(x).sin()
            return x
        if self.kind == "try":
            try:
                return self.halves[0](x).sin()
            finally:
                self.kind = "try"
        return self.halves[1](self.halves[0](x).sin()).cos()


def test_what_works_with_other_processes_is_compiled_or_says_why_not(one_process: None) -> None:
    def sharded(kind: str = "") -> nn.Module:
        model, mesh = Halves(kind), torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        for part in (*model.halves, model):
            torch.distributed.fsdp.fully_shard(part, mesh=mesh)
        return model

    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    wrapped = DistributedDataParallel(net)
    outside = anyshape.compile(wrapped, strict=True)
    assert list(outside.state_dict()) == list(wrapped.state_dict()) and type(wrapped.module) is nn.Sequential
    for model, compiled in ((wrapped, outside), (wrapped, DistributedDataParallel(anyshape.compile(net, strict=True))),
                            *((one, anyshape.compile(one, strict=True)) for one in (sharded(), sharded("loop")))):
        anyshape.reset_stats()
        for rows in (3, 1, 0):
            x, both = torch.randn(rows, 8), []
            for one in (model, compiled):
                one.zero_grad()
                y = one(x)
                y.square().sum().backward()
                both.append([y.detach(), *(weight.grad.clone() for weight in one.parameters())])
            torch.testing.assert_close(*both)
        assert anyshape.stats()["eager_calls"] == 0 and anyshape.stats()["runs"]
    model = sharded("try")
    with pytest.raises(AnyShapeError, match="what calls parts where a frame cannot be cut") as refused:
        anyshape.compile(model, strict=True)(torch.randn(3, 8))
    assert "fully_shard(anyshape.compile(block))" in str(refused.value)
    fast = anyshape.compile(model)
    with pytest.warns(UserWarning, match="cannot be cut"):
        fast(torch.randn(3, 8)).sum().backward()
    assert anyshape.stats()["eager_calls"] == 1 and "fully_shard" in str(fast.explain())
    part = nn.Sequential(wrapped)
    with pytest.raises(AnyShapeError, match="put DistributedDataParallel around all of it"):
        anyshape.compile(part, strict=True)(torch.randn(3, 8))


def test_machine_code_that_somebody_else_may_have_written_is_not_run(tmp_path):
    """A cache folder that anybody can write to is not read and not written, and one warning says so."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    x = torch.randn(3, 7)
    fast = anyshape.compile(lambda x: torch.softmax(x * 3, -1), strict=True, cache_dir=str(tmp_path / "cache"))
    with pytest.warns(RuntimeWarning, match="somebody else may have written it"):
        torch.testing.assert_close(fast(x), torch.softmax(x * 3, -1))
    assert list(Path(tmp_path / "cache").iterdir()) == []


def test_which_routine_multiplies_does_not_hang_on_the_name_of_the_processor(monkeypatch: pytest.MonkeyPatch,
                                                                             tmp_path: Path) -> None:
    """What was measured on this machine decides, in both directions; the numbers are right either way."""
    from anyshape.backend.cpu import autotune
    from anyshape.backend.cpu.bytecode import format
    from anyshape.backend.cpu.target import target_of
    from anyshape.backend.measurements import Measurements
    from anyshape.base.disk_cache import DiskCache

    x, w = torch.randn(64, 256), torch.randn(256, 128)
    for gain, op in ((3.0, format.PRODUCT), (0.3, format.MATMUL)):
        kept = Measurements(DiskCache(str(tmp_path / str(gain))), autotune.machine_key(host()))
        monkeypatch.setattr(autotune, "measured", lambda *_, gain=gain: gain)
        monkeypatch.setattr(autotune, "_measurements", lambda _, kept=kept: kept)
        target_of.cache_clear()
        try:
            fast = anyshape.compile(torch.matmul, strict=True, calibrate=True)
            exact = x.double() @ w.double()
            assert (fast(x, w) - exact).abs().max() <= 2 * (x @ w - exact).abs().max()
            (record,) = fast.programs[0].executable.specializations.values()
            assert record.payload.words[record.payload.words[format.HEAD_FIRST]] == op
        finally:
            target_of.cache_clear()


def test_a_tensor_means_what_its_bits_say_and_one_without_memory_is_refused() -> None:
    """The memory of a tensor with the negative bit holds the opposite numbers; one of zeros may have no memory."""
    model = nn.Linear(6, 3)
    for fast in (anyshape.compile(model, strict=True), torch.compile(model, backend="anyshape")):
        turned = torch.randn(4, 6, dtype=torch.complex64).conj().imag
        assert turned.is_neg()
        torch.testing.assert_close(fast(turned), model(turned))
        zeros = torch._efficientzerotensor((4, 6))
        torch.testing.assert_close(fast(zeros), model(zeros))
        nothing = torch.randn(4, 6)
        nothing.untyped_storage().resize_(0)
        with pytest.raises(AnyShapeError, match="no memory"):  # eager PyTorch ends the process
            fast(nothing)


def test_whole_numbers_divided_by_zero_are_an_error_and_nothing_is_written() -> None:
    def share(total: torch.Tensor, people: torch.Tensor) -> torch.Tensor:
        total.floor_divide_(people)
        return torch.where(people != 0, total % people, -1)

    fast = anyshape.compile(share, strict=True)
    torch.testing.assert_close(fast(torch.tensor([7, 8]), torch.tensor([2, 3])), torch.tensor([1, 2]))
    total = torch.tensor([7, 8, 9])
    with pytest.raises(ZeroDivisionError, match=r"test_hostile\.py"):
        fast(total, torch.tensor([2, 0, 3]))
    assert total.tolist() == [7, 8, 9]


def test_what_was_compiled_goes_with_its_object() -> None:
    def one() -> list[weakref.ref[object]]:
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        fast = anyshape.compile(model)
        for rows in (3, 5):
            fast(torch.randn(rows, 8)).sum().backward()
        return [weakref.ref(model), weakref.ref(model[0].weight.grad), *map(weakref.ref, fast.programs)]

    gone = [ref for _ in range(3) for ref in one()]
    gc.collect()
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)


def test_the_same_seed_gives_the_random_numbers_of_eager_pytorch() -> None:
    """Whatever is fused with what, numbers are drawn in the order in which the program draws them."""
    def draws(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * 2, torch.randn_like(x), nn.functional.dropout(x, 0.4), torch.rand(3)

    fast = anyshape.compile(draws, strict=True)
    for rows in (5, 1, 32):
        x = torch.ones(rows, 7)
        torch.manual_seed(rows)
        wanted, state = draws(x), torch.get_rng_state()
        torch.manual_seed(rows)
        for found, eager in zip(fast(x), wanted, strict=True):
            torch.testing.assert_close(found, eager, rtol=0, atol=0)
        assert torch.equal(torch.get_rng_state(), state)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.mT.contiguous().mT,
    "turned round": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
}
DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout in place": lambda x: nn.functional.dropout(x * 2, 0.4, inplace=True),
    "alpha dropout": lambda x: nn.functional.alpha_dropout(x, 0.4, True),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.4),
    "bernoulli_ by a tensor": lambda x: torch.empty_like(x).bernoulli_(x.sigmoid()),
    "bernoulli of bools": lambda x: torch.bernoulli(x > 0, 0.4),
    "uniform_": lambda x: (x * 2).uniform_(),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "rand_like": lambda x: torch.rand_like(x * 2),
    "randn_like of a part": lambda x: torch.randn_like(x[:, :, 1:]),
    "uniform_ of a part": lambda x: x.clone()[:, 1:].mT.uniform_(),
    "uniform_ and a sum": lambda x: (x * 2).uniform_().cumsum(0)[-1].sum(0),
    "multinomial": lambda x: torch.multinomial(x[0, 0].abs() * 2, 1),
}  # fmt: skip


@pytest.mark.parametrize(("name", "layout"), crossed(DRAWS, LAYOUTS))
def test_numbers_are_drawn_in_the_order_of_memory_as_eager_pytorch_draws_them(name: str, layout: str) -> None:
    draw = DRAWS[name]
    fast = anyshape.compile(lambda x: draw(x), strict=True, defer=False)
    for shape in ((2, 4, 6, 8), (3, 2, 5, 4)):
        x = LAYOUTS[layout](torch.randn(shape))
        torch.manual_seed(1)
        wanted, state = draw(x), torch.get_rng_state()
        torch.manual_seed(1)
        found = fast(x)
        torch.testing.assert_close(found, wanted)
        assert found.stride() == wanted.stride() and torch.equal(torch.get_rng_state(), state)


LAID_OUT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "batch_norm": lambda x: nn.functional.batch_norm(x, None, None, training=True),
    "convolution and norm": nn.Sequential(nn.Conv2d(4, 5, 3), nn.ReLU(), nn.BatchNorm2d(5)).eval(),
    "group_norm": lambda x: nn.functional.group_norm(x, 2),
    "reflection": lambda x: nn.functional.pad(x, (1, 2, 1, 0), mode="reflect"),
    "replication": lambda x: nn.functional.pad(x, (1, 2, 1, 0), mode="replicate"),
    "roll": lambda x: x.roll(1, 2) * 2,
    "roll of all": lambda x: x.roll(3),
    "poisson": lambda x: torch.poisson(x.abs()),
    "normal": lambda x: torch.normal(x, x.abs()),
    "max_unpool2d": lambda x: nn.functional.max_unpool2d(*nn.functional.max_pool2d(x, 2, return_indices=True), 2),
}  # fmt: skip


@pytest.mark.parametrize(("name", "first"), crossed(LAID_OUT, [True, False], one_in=3))
def test_results_lie_in_memory_as_eager_pytorch_lays_them_out(name: str, first: bool) -> None:
    """Whether the first call has channels last, or a later one."""
    function = LAID_OUT[name]
    fast = anyshape.compile(lambda x: function(x), strict=True, defer=False)
    for lay in (*(() if first else (torch.clone,)), *LAYOUTS.values()):
        x = lay(torch.randn(2, 4, 6, 8))
        torch.manual_seed(1)
        wanted = function(x)
        torch.manual_seed(1)
        found = fast(x)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        assert found.stride() == wanted.stride()


def test_a_torch_without_a_private_name_is_told_and_gives_the_same_numbers() -> None:
    """A later torch may lack what is not public: calls are slower then, or run as PyTorch, and one warning says it."""
    model, x = nn.Linear(6, 3), torch.randn(4, 6)
    for name in ("torch._functorch.aot_autograd.aot_module_simplified", "torch._C._dynamo.guards.TensorGuards"):
        with torch_compat.pretending(name), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            fast = anyshape.compile(model)
            for _ in range(3):
                torch.testing.assert_close(fast(x), model(x))
        assert len([one for one in said if name in str(one.message) and torch.__version__ in str(one.message)]) == 1


class Tagged:
    def __init_subclass__(cls, *, tag: str) -> None:
        cls.tag = tag


class Model(nn.Linear, Tagged, tag="of its author"):
    pass


@anyshape.compile
def decorated(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def plain(x: torch.Tensor) -> torch.Tensor:
    return x * 3


MISUSE: dict[str, Callable[[], Any]] = {
    r"compile\(Linear\(\.\.\.\)\)": lambda: anyshape.compile(nn.Linear),
    "cannot compile a NoneType": lambda: anyshape.compile(None),
    "settings are passed by name": lambda: anyshape.compile(plain, True),
    "it is torch.compile's": lambda: anyshape.compile(plain, mode="max-autotune"),
    "perhaps memory_limit": lambda: anyshape.compile(plain, memory_limt=1),
    "memory_limit is nan": lambda: anyshape.compile(plain, memory_limit=float("nan")),
    "memory_limit is True": lambda: anyshape.compile(plain, memory_limit=True),
    "memory_limit is 0.5": lambda: anyshape.compile(plain, memory_limit=0.5),
    "no name leads to it": lambda: pickle.dumps(anyshape.compile(lambda x: x)),
    "lambda model, x, y": lambda: anyshape.train_step(
        Model(2, 2), nn.CrossEntropyLoss(), torch.optim.SGD(Model(2, 2).parameters())),
}


@pytest.mark.parametrize("words", MISUSE)
def test_misuse_is_refused_with_what_to_do(words: str) -> None:
    with pytest.raises(AnyShapeError, match=words) as raised:
        MISUSE[words]()
    assert raised.value.what and raised.value.why and raised.value.do


def test_a_misspelt_variable_of_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYSHAPE_MEMORY_LIMT", "12GiB")
    with pytest.warns(UserWarning, match="perhaps ANYSHAPE_MEMORY_LIMIT is meant"):
        anyshape.compile(plain)


def test_compiled_objects_are_sliced_copied_and_pickled_as_what_they_are() -> None:
    x = torch.randn(3, 8)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    fast = anyshape.compile(model, memory_limit=1.5e9)
    torch.testing.assert_close(fast(x), model(x))
    torch.testing.assert_close(fast[:2](x), model[:2](x))
    for again in (copy.copy(fast), copy.deepcopy(fast)):
        torch.testing.assert_close(again(x), model(x))
        assert again.programs and again._anyshape is not fast._anyshape
    assert copy.copy(fast)[0] is model[0]
    torch.testing.assert_close(pickle.loads(pickle.dumps(fast))(x), model(x))
    tagged = Model(8, 4)
    torch.testing.assert_close(anyshape.compile(tagged)(x), tagged(x))
    once = anyshape.compile(plain, strict=True)
    for function in (decorated, once):
        wanted = function(x)
        for again in (copy.copy(function), copy.deepcopy(function), pickle.loads(pickle.dumps(function))):
            torch.testing.assert_close(again(x), wanted)
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    assert pickle.loads(pickle.dumps(once))._anyshape.compilation.config.strict


def test_what_eager_refuses_of_a_loss_is_refused_and_what_it_takes_is_taken() -> None:
    """torch's own traces of these are not what its operators do."""
    loss = anyshape.compile(torch.nn.BCELoss())
    assert loss(torch.tensor([0.5, 1.0]), torch.tensor([1.0, 1.0])).isfinite()
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        loss(torch.tensor([0.5, 1.5]), torch.tensor([1.0, 1.0]))
    norm = torch.nn.BatchNorm1d(3)
    flat = anyshape.compile(lambda x: norm(x.transpose(1, 2)).view(x.shape[0], -1), strict=True)
    for n in (4, 7):
        assert flat(torch.rand(n, 5, 3)).shape == (n, 15)


class Cut(nn.Module):
    """A model that says how far it is, which PyTorch's tracer cuts in parts there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> types.SimpleNamespace:
        hidden = self.norm(self.first(x)).relu()
        print(end="")
        holder = types.SimpleNamespace(hidden=hidden, rows=x.shape[0])
        print(end="")
        return types.SimpleNamespace(out=self.last(holder.hidden) * holder.rows, rows=holder.rows)


def test_a_graph_break_costs_no_program_for_a_batch_of_one() -> None:
    model = Cut()
    fast = anyshape.compile(copy.deepcopy(model), defer=False)
    for rows in (1, 4, 0, 7, 1, 13):
        x = torch.randn(rows, 8)
        wanted, found = model(x), fast(x)
        wanted.out.sum().backward(), found.out.sum().backward()
        torch.testing.assert_close(found.out, wanted.out, rtol=1e-4, atol=1e-4)
        assert found.rows == rows
        for mine, theirs in zip(fast.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-3)
        assert sum(program.name.endswith("forward") for program in fast.programs) == 2, fast.explain()


def test_an_empty_batch_leaves_the_statistics_of_a_batch_norm() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    fast = anyshape.compile(copy.deepcopy(model), defer=False)
    for rows in (4, 0, 5):
        x = torch.randn(rows, 4)
        for one in (model, fast):
            one.zero_grad()
            one(x).square().sum().backward()
        torch.testing.assert_close(fast[1].running_var, model[1].running_var)
        torch.testing.assert_close(fast[1].weight.grad, model[1].weight.grad, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_compiled_says_so_and_runs_as_it_is() -> None:
    """TorchScript, generators and `async` functions run as they are, are counted, and are refused under `strict`."""
    async def waits(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def yields(x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield x * 2

    x = torch.ones(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted, traced = torch.jit.script(nn.Linear(4, 2)), torch.jit.trace(nn.Linear(4, 2), (x,))
    kinds = {waits: "`async`", yields: "generator", scripted: "TorchScript", traced: "TorchScript"}
    for target, words in kinds.items():
        with pytest.raises(AnyShapeError, match=words):
            anyshape.compile(target, strict=True)(x)
        fast = anyshape.compile(target)
        anyshape.reset_stats()
        with pytest.warns(UserWarning, match=words):
            found, wanted = fast(x), target(x)
        assert anyshape.stats()["eager_calls"] == 1
        if target is waits:
            found, wanted = asyncio.run(found), asyncio.run(wanted)
        elif target is yields:
            found, wanted = next(found), next(wanted)
        torch.testing.assert_close(found, wanted)


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).mT


@pytest.mark.parametrize("whose", ["compiled", "module"])
def test_a_parametrisation_is_seen_by_the_module_and_by_the_compiled_one(whose: str) -> None:
    module, x = nn.Linear(4, 4), torch.randn(3, 4)
    fast = anyshape.compile(module)
    changed = fast if whose == "compiled" else module
    nn.utils.parametrize.register_parametrization(changed, "weight", Symmetric())
    assert torch.equal(fast.weight, fast.weight.mT)
    torch.testing.assert_close(fast(x), nn.functional.linear(x, fast.weight, fast.bias))
    torch.testing.assert_close(module(x), fast(x))
    nn.utils.parametrize.remove_parametrizations(changed, "weight")
    torch.testing.assert_close(module(x), fast(x))
    assert isinstance(fast.weight, nn.Parameter) and fast.weight is module.weight


def test_an_object_that_is_called_keeps_its_attributes() -> None:
    class Scale:
        def __init__(self) -> None:
            self.by = 2.0

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.by

    scale, x = Scale(), torch.ones(3)
    fast = anyshape.compile(scale)
    for by in (2.0, 3.0):
        scale.by = by
        assert fast.by == by and torch.equal(fast(x), x * by)
    fast.by = 4.0
    assert scale.by == 4.0 and torch.equal(fast(x), x * 4)


def test_exported_programs_are_copied_and_pickled() -> None:
    model, x = nn.Linear(8, 4), torch.randn(3, 8)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=1, max=64)},))
    fast = anyshape.compile(exported)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, of its own trees
        for other in (copy.copy(fast), copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
            torch.testing.assert_close(other(x[:2]), model(x[:2]))


def test_a_loop_body_with_its_backward_is_compiled_by_torch_compile_for_a_batch_of_one_too() -> None:
    """Its graph ends at `backward`, and Dynamo would trace every frame that runs inside of that."""
    torch._dynamo.reset()
    model = nn.Linear(3, 2)

    def body(x: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach() * 2

    fast = torch.compile(body, backend="anyshape", dynamic=True)
    for rows in (3, 5, 1, 1, 7):
        x = torch.randn(rows, 3)
        loss, found = fast(x), model.weight.grad
        torch.testing.assert_close(loss, body(x))
        torch.testing.assert_close(found, model.weight.grad)


def index_or_all(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    try:
        return (x * 2)[at]
    except IndexError:
        return x * 7


def looked_up(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(at, x) * 2


def lookup_or_sum(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    try:
        return looked_up(y, at)
    except (RuntimeError, LookupError):
        return x.sum()


def factor_or_double(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    square = x[:3, :3] @ x[:3, :3].T if at.sum() is None else x[:3, :3]
    with contextlib.suppress(torch.linalg.LinAlgError):
        square = torch.linalg.cholesky(square)
    return square * 2


def row_or_sum(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    try:
        return x[6] * 2
    except IndexError:
        return x.sum()


@pytest.mark.parametrize("door, function", (
    *((door, one) for door in ("anyshape", "torch") for one in (index_or_all, lookup_or_sum, factor_or_double)),
    ("anyshape", row_or_sum)))  # Dynamo raises the error of a size that it meets in a trace, whatever the backend
def test_an_except_of_the_code_sees_the_errors_of_operators(door: str, function: Callable[..., torch.Tensor]) -> None:
    """Those that only values or sizes show. A graph has no `try`: the function is left to PyTorch, counted."""
    torch.compiler.reset()
    ours = door == "anyshape"
    fast = anyshape.compile(function, defer=False) if ours else torch.compile(function, backend="anyshape")
    anyshape.reset_stats()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rows in (5, 7, 4, 9):
            for at in (torch.tensor([0, 2]), torch.tensor([0, 8])):
                x = torch.randn(rows, 3)
                torch.testing.assert_close(fast(x, at), function(x, at))
    assert function is row_or_sum or anyshape.stats()["eager_calls"] == (8 if ours else 1)
    # what such a function calls is compiled
    assert (anyshape.stats()["programs"] > 0) == (function in (lookup_or_sum, row_or_sum))


def halves(x: torch.Tensor) -> torch.Tensor:
    try:
        columns = x.shape[1] // 2
    except TypeError:
        columns = 0
    return x * columns


def halves_or_words(x: torch.Tensor) -> torch.Tensor:
    try:
        return halves(x)
    except BufferError as error:  # as einops says more of an error
        raise BufferError("no halves") from error


def test_what_a_handler_raises_is_not_seen_by_one_inside_of_its_block() -> None:
    fast = anyshape.compile(halves_or_words, strict=True)
    for shape in ((3, 6), (5, 9), (2, 5)):
        x = torch.randn(shape)
        torch.testing.assert_close(fast(x), halves(x))
    assert len(fast.programs) == 1


def test_a_function_that_catches_errors_of_operators_is_refused_by_strict() -> None:
    with pytest.raises(anyshape.AnyShapeError, match="caught by an `except`") as caught:
        anyshape.compile(index_or_all, strict=True)(torch.randn(3, 3), torch.tensor([1]))
    assert "test_hostile.py" in str(caught.value)


def test_a_finally_is_no_except() -> None:
    def indexed(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        done = []
        try:
            return x[at]
        finally:
            done.append(1)

    def parsed(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        try:
            return x[at]
        except (ImportError, KeyError):
            return x

    def explained(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        try:
            return x[at]
        except IndexError as error:
            if at.numel() > 3:
                raise ValueError("too many") from error
            raise

    for function in (indexed, parsed, explained):
        fast = anyshape.compile(function, strict=True)
        with pytest.raises(IndexError):
            fast(torch.randn(3, 3), torch.tensor([8]))
        torch.testing.assert_close(fast(torch.eye(4), torch.tensor([1, 2])), torch.eye(4)[1:3])


def test_an_error_that_a_handler_raises_instead_is_seen_by_another() -> None:
    def function(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        try:
            try:
                return x[at]
            except IndexError as error:
                raise ValueError("no such row") from error
        except ValueError:
            return x.sum(0, keepdim=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fast = anyshape.compile(function)
        for at in (torch.tensor([1]), torch.tensor([8])):
            torch.testing.assert_close(fast(torch.eye(3), at), function(torch.eye(3), at))


@pytest.mark.parametrize("before", (True, False))
def test_a_kernel_of_pytorch_that_a_user_replaces_is_called(before: bool) -> None:
    """Also one that is replaced after a program was made; taken away, compiled code runs again."""
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + 1

    x = torch.randn(4, 3)
    fast = anyshape.compile(function)
    if not before:
        torch.testing.assert_close(fast(x), function(x))
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("relu", lambda x: x * 0 + 5, "CPU")
        try:
            anyshape.reset_stats()
            assert fast(x).eq(6).all()
            assert torch.compile(function, backend="anyshape")(x).eq(6).all()
            assert anyshape.stats()["eager_calls"] == 2
            assert "aten::relu (CPU)" in str(fast.explain())
            with pytest.raises(AnyShapeError, match="aten::relu"):
                anyshape.compile(function, strict=True)(x)
        finally:
            library._destroy()
    anyshape.reset_stats()
    torch.testing.assert_close(fast(x), function(x))
    assert anyshape.stats()["eager_calls"] == 0


def test_nothing_that_torch_deprecates_is_asked_for() -> None:
    """A trace without a size that changes has no values of symbols, under the new name; the old one warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert not traced_values(ShapeEnv())
        x = torch.randn(3, 4)
        torch.testing.assert_close(anyshape.compile(lambda t: t.sin() * 2, strict=True, dynamic=False)(x), x.sin() * 2)


@pytest.mark.parametrize("function", (
    lambda x: torch.masked_select(x, torch.ones(7) > 0), lambda x: torch.linalg.multi_dot([x, x, x]),
    lambda x: torch.take_along_dim(x, torch.full((1, 1), 9), 1),
    lambda x: nn.functional.cross_entropy(x, torch.full((x.shape[0],), 9))))
def test_an_error_names_the_line_of_the_user(function: Callable[..., torch.Tensor]) -> None:
    """Not that of ours which is traced in place of torch's function."""
    with pytest.raises(AnyShapeError) as caught:
        anyshape.compile(function)(torch.rand(4, 5))
    assert "where: test_hostile.py" in str(caught.value)


def test_a_program_with_vmap_serves_sizes_of_1() -> None:
    """Shapes inside of it are judged as others are; where a size of 1 stretches, another program serves that."""
    def quarters(x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: row[:row.shape[0] // 4].exp() * 2)(x)

    def halves(x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: row[:row.shape[0] // 2] + row[:(row.shape[0] + 1) // 2])(x)

    fast = anyshape.compile(quarters, defer=False)
    for sizes in ((3, 5), (3, 12), (1, 9), (2, 7), (1, 1), (4, 3)):
        x = torch.randn(sizes)
        torch.testing.assert_close(fast(x), quarters(x))
    assert len(fast.programs) == 1
    stretched = anyshape.compile(halves, defer=False)
    for sizes in ((3, 8), (3, 2), (2, 3), (1, 6), (2, 1)):
        x = torch.randn(sizes)
        torch.testing.assert_close(stretched(x), halves(x))
    assert torch._C._functorch.maybe_current_level() is None


@pytest.mark.parametrize("defer", (True, False))
def test_threads_that_need_another_program_at_once_make_it_once(defer: bool) -> None:
    """A program is there; then six threads come with another dtype, with sizes that the code asks about."""
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return (y.sin() if x.shape[0] > 6 else y).softmax(-1)

    fast = anyshape.compile(function, defer=defer)
    fast(torch.randn(5, 4))
    anyshape.reset_stats()
    together, wrong = threading.Barrier(6), []

    def calls(number: int) -> None:
        together.wait()
        for rows in (8, 9, 11, 3):
            x = torch.randn(rows, 4, dtype=(torch.float32, torch.float64)[number % 2])
            if not torch.allclose(fast(x), function(x)):
                wrong.append((number, rows))

    threads = [threading.Thread(target=calls, args=(number,)) for number in range(6)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    programs, eager = anyshape.stats()["programs"], anyshape.stats()["eager_calls"]
    assert programs <= 3 and (eager > 0 or programs == 3)  # f32 above 6 rows, f64 above, f64 below
    assert (eager == 0) or defer


@pytest.mark.filterwarnings("ignore")
def test_gradients_are_computed_after_a_trace_in_a_transform_has_failed() -> None:
    """What such a trace leaves to the garbage collector changes nothing when it is collected."""
    def curvature(x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(torch.func.hessian(lambda row: (row.sin() * row).sum()))(x)

    fast, x = anyshape.compile(curvature), torch.randn(3, 4)
    torch.testing.assert_close(fast(x), curvature(x))
    gc.collect()
    assert (torch.ones(2, requires_grad=True) * 2).requires_grad


class Bag:
    """A node of pytrees that cannot be flattened before it is made."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        torch._dynamo.graph_break()
        self.values = dict(values)


def test_a_node_of_pytrees_that_is_made_in_a_frame_of_its_own() -> None:
    pytree.register_pytree_node(Bag, lambda bag: ([*bag.values.values()], [*bag.values]),
                                lambda values, names: Bag(dict(zip(names, values, strict=True))))

    def f(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        bag = Bag({"a": x.relu(), "b": x + 1})
        return bag.values["a"] * bag.values["b"]

    fast = anyshape.compile(f)
    for rows in (3, 5, 1):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(fast(x), f(x))
    assert fast.programs
