"""Limitations of docs/limitations.md that no other test shows: each test fails once its limitation is gone."""
from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anyshape
from anyshape import torch_compat as compat
from anyshape.backend.cpu.bytecode import format as bytecode
from anyshape.base.errors import AnyShapeError, InputError
from anyshape.ir.show import show as show_graph
from anyshape.plan.ir.program import ExternStep


def programs(function: Callable[..., Any], *calls: tuple[Any, ...]) -> tuple[int, int]:
    """How many programs the calls have, and how many calls ran as eager PyTorch."""
    fast = anyshape.compile(function, defer=False)
    anyshape.reset_stats()
    for arguments in calls:
        fast(*arguments)
    return len(fast.programs), anyshape.stats()["eager_calls"]


def plan_of(function: Callable[..., Any], *arguments: Tensor) -> Any:
    fast = anyshape.compile(function)
    fast(*arguments)
    return fast.programs[0].compiled.plan


# ---- capture


@pytest.mark.parametrize("function", [
    lambda x: x * torch.hann_window(x.shape[0]), lambda x: torch.vander(x, 3), lambda x: torch.gradient(x)[0]])
def test_operators_that_take_a_size_as_a_number_have_a_program_for_each(function: Callable[[Tensor], Tensor]) -> None:
    assert programs(function, *((torch.arange(float(n)),) for n in (4, 5, 6))) == (3, 0)


@pytest.mark.filterwarnings("ignore")
def test_a_view_at_a_position_that_is_a_tensor_is_not_compiled() -> None:
    def grown(x: Tensor, i: Tensor) -> Tensor:
        x[i] += 1
        return x

    assert programs(lambda x, i: x[i], (torch.ones(5, 3), torch.tensor(1))) == (0, 1)
    assert programs(grown, (torch.ones(5, 3), torch.tensor(1))) == (0, 1)


@pytest.mark.filterwarnings("ignore")
def test_some_recurrent_modules_and_backward_hooks_are_not_compiled() -> None:
    narrow, plain, hooked = nn.LSTM(4, 4, proj_size=2), nn.LSTM(4, 4), nn.Sequential(nn.Linear(4, 4))
    hooked[0].register_full_backward_hook(lambda *_: None)
    assert programs(lambda x: narrow(x)[0] + 1, (torch.ones(5, 2, 4),)) == (0, 1)
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 4), torch.ones(2, 4)])
    assert programs(lambda x: plain(x)[0].data + 1, (packed,))[1] == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert programs(lambda x: plain(x)[0] + 1, (torch.ones(5, 2, 4),)) == (0, 1)
    assert programs(hooked, (torch.ones(5, 4),)) == (0, 1)


@pytest.mark.filterwarnings("ignore")
def test_a_graph_break_in_a_loop_is_not_compiled() -> None:
    def loop(x: Tensor) -> Tensor:
        for _ in range(2):
            x = x * 2
            print(end="")
        return x

    assert programs(loop, (torch.ones(3),)) == (0, 1)


@pytest.mark.filterwarnings("ignore")
def test_a_number_from_the_data_is_a_constant_behind_a_graph_break() -> None:
    def scaled(x: Tensor) -> Tensor:
        total = x.sum().item()
        print(end="")
        return x * total

    assert programs(scaled, *((torch.ones(3) * n,) for n in (1, 2, 3)))[0] > 3


def test_a_dim_of_no_elements_behind_the_first_has_a_program_of_its_own() -> None:
    assert programs(lambda x: x + 1, (torch.ones(5, 3),), (torch.ones(0, 3),)) == (1, 0)
    assert programs(lambda x: x + 1, (torch.ones(5, 3),), (torch.ones(5, 0),)) == (2, 0)


def test_torch_compile_takes_the_first_size_for_a_constant() -> None:
    fast = torch.compile(lambda x: x + 1, backend="anyshape")
    anyshape.reset_stats()
    made = [(fast(torch.ones(n)), anyshape.stats()["programs"])[1] for n in (3, 4, 5, 1)]
    assert made == [1, 2, 2, 3]


def test_inputs_that_overlap_are_taken_as_apart_where_they_were() -> None:
    def shifted(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x * 2 + y

    fast = anyshape.compile(shifted)
    fast(torch.ones(4), torch.ones(4))
    ours, theirs = torch.ones(6), torch.ones(6)
    assert fast(ours[:4], ours[1:5]).tolist() != shifted(theirs[:4], theirs[1:5]).tolist()


@pytest.mark.filterwarnings("ignore")
def test_sparse_tensors_and_changes_of_a_storage_run_as_pytorch() -> None:
    assert programs(lambda x: torch.sparse.mm(x, torch.ones(3, 2)), (torch.eye(3).to_sparse(),)) == (0, 1)
    assert programs(lambda x: x.clone().resize_(2) + 1, (torch.ones(6),))[1] == 1


@pytest.mark.filterwarnings("ignore")
def test_what_torch_compile_leaves_out_is_not_counted() -> None:
    recurrent = nn.LSTM(3, 3)
    anyshape.reset_stats()
    torch.compile(lambda x: recurrent(x)[0], backend="anyshape")(torch.ones(2, 1, 3))
    assert anyshape.stats()["eager_calls"] == 0


def test_a_comparison_of_a_size_is_no_bool_while_tracing() -> None:
    fast = anyshape.compile(lambda x: x * (2 if (x.shape[0] == 1) is True else 3))
    assert fast(torch.ones(1)).item() == 3


def test_a_first_call_under_a_lock_is_refused_under_strict() -> None:
    lock, linear, done = threading.Lock(), nn.Linear(3, 3), []

    class SetUp(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not done:
                with lock:
                    done.append(True)
            return linear(x)  # type: ignore[no-any-return]

    model = SetUp()
    with pytest.raises(AnyShapeError, match="under a lock"):
        anyshape.compile(model, strict=True)(torch.ones(2, 3))


def test_a_method_named_explain_is_hidden() -> None:
    class Model(nn.Linear):
        def explain(self) -> str:
            return "the model's own"

    assert anyshape.compile(Model(2, 2)).explain() != "the model's own"


def test_a_tensor_on_another_device_runs_as_pytorch() -> None:
    fast = anyshape.compile(lambda x: x + 1)
    anyshape.reset_stats()
    with pytest.warns(UserWarning):
        fast(torch.ones(3, device="meta"))
    assert anyshape.stats()["eager_calls"] == 1 and not fast.programs


# ---- numbers


def test_kernels_do_not_round_to_half_precision_between_their_steps() -> None:
    x = torch.full((4,), 60000.0, dtype=torch.float16)
    assert anyshape.compile(lambda x: x * 2 / 2)(x).tolist() == x.tolist() and (x * 2 / 2).isinf().all()


def test_of_zeros_of_both_signs_the_largest_may_be_the_other() -> None:
    fast = anyshape.compile(lambda x: x.amax(1))
    rows = [torch.tensor([[a, -a] * 9]) for a in (0.0, -0.0)]
    assert any(bool(fast(row).signbit()) != bool(row.amax(1).signbit()) for row in rows)


def test_linear_interpolation_beside_infinity_is_nan() -> None:
    x = torch.tensor([[[1.0, math.inf, 2.0]]])
    fast = anyshape.compile(lambda x: F.interpolate(x, scale_factor=2, mode="linear"))
    assert fast(x).isnan().sum() > F.interpolate(x, scale_factor=2, mode="linear").isnan().sum()


def test_a_group_norm_of_any_strides_is_taken() -> None:
    def norm(x: Tensor) -> Tensor:
        return torch.native_group_norm(x, None, None, 2, 4, 25, 2, 1e-5)[0]

    x = torch.randn(2, 8, 5, 5)[:, ::2]
    with pytest.raises(RuntimeError, match="is_contiguous"):
        norm(x)
    torch.testing.assert_close(anyshape.compile(norm)(x), norm(x.contiguous()))


def test_whole_numbers_are_divided_by_zero_where_nobody_looks_and_the_least_wraps() -> None:
    def unread(x: Tensor, y: Tensor) -> Tensor:
        _ = x // y
        return x + 1

    assert anyshape.compile(unread)(torch.tensor([1]), torch.tensor([0])).item() == 2
    least = torch.iinfo(torch.int64).min
    assert anyshape.compile(lambda x, y: x // y)(torch.tensor([least]), torch.tensor([-1])).item() == least


def test_a_wrong_argument_of_dropout_is_an_error_of_ours() -> None:
    with pytest.raises(InputError, match="between 0 and 1"):
        anyshape.compile(lambda x: F.dropout(x, 1.5))(torch.ones(3))


# ---- training


@pytest.mark.filterwarnings("ignore")
def test_gradients_of_parts_that_nobody_used_are_zeros_behind_a_graph_break() -> None:
    used, unused = nn.Linear(3, 3), nn.Linear(3, 3)

    def cut(x: Tensor) -> tuple[Tensor, Tensor]:
        one, other = used(x), unused(x)
        print(end="")
        return one * 2, other * 2

    anyshape.compile(cut)(torch.ones(2, 3))[0].sum().backward()
    assert unused.weight.grad is not None and not unused.weight.grad.any()


def test_a_float_that_changes_costs_a_train_step_a_program() -> None:
    model = nn.Linear(3, 3)
    step = anyshape.train_step(model, lambda model, x, weight: model(x).sum() * weight,
                               torch.optim.SGD(model.parameters()), defer=False)
    made = [(step(torch.ones(2, 3), weight), len(step.programs))[1] for weight in (0.5, 0.25, 0.125)]
    assert made == [2, 4, 6]


# ---- kernels and steps


@pytest.mark.parametrize("function", [
    lambda x: x.cummax(1).values, lambda x: x.logcumsumexp(1), lambda x: x.sort(1).values, lambda x: x.median(1).values,
    lambda x: torch.fft.rfft(x).abs(), lambda x: F.conv1d(x[None], torch.ones(5, 5, 1)),
    lambda x: x.masked_scatter(x > 0, x),
    lambda x: F.max_pool1d(x[None], 2, return_indices=True)[1]])
def test_operators_that_are_steps_by_pytorch(function: Callable[[Tensor], Tensor]) -> None:
    assert any(isinstance(step, ExternStep) for step in plan_of(function, torch.randn(5, 5)).steps)


def test_a_scan_is_stored() -> None:
    assert len(plan_of(lambda x: x.cumsum(1) + 1, torch.randn(5, 9)).steps) == 2


def test_attention_of_unrelated_head_sizes_stays_written_out() -> None:
    fast = anyshape.compile(lambda q, k, v: torch.softmax(q @ k.mT / 8, -1) @ v)
    fast(*(torch.randn(2, 4, 10, 16) for _ in range(3)))
    assert "attention(" not in show_graph(fast.programs[0].compiled.graph)


def test_biases_are_cast_by_kernels_under_autocast() -> None:
    linear = nn.Linear(8, 4)

    def cast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            return linear(x)  # type: ignore[no-any-return]

    fast = anyshape.compile(cast)
    fast(torch.randn(5, 8))
    assert "cast(" in show_graph(fast.programs[0].compiled.graph)


def test_strided_products_of_double_precision_are_steps_by_pytorch() -> None:
    fast = anyshape.compile(torch.matmul)
    fast(torch.randn(8, 6, dtype=torch.float64)[:, ::2], torch.randn(6, 9, dtype=torch.float64)[::2])
    (record,) = fast.programs[0].executable.specializations.values()
    assert record.payload.words[record.payload.words[bytecode.HEAD_FIRST]] == bytecode.CALL


# ---- diagnostics


def test_an_update_has_the_shape_of_its_weight_for_a_source() -> None:
    model = nn.Linear(3, 3)
    step = anyshape.train_step(model, lambda model, x: model(x).sum(), torch.optim.SGD(model.parameters()))
    step(torch.ones(2, 3))
    assert "update of a weight" in " ".join(str(step.explain()).split())


@pytest.mark.parametrize("name", ["partial_reduction", "launch_grouping", "gemm_consumer_tiling"])
def test_techniques_without_a_name_are_not_disabled(name: str) -> None:
    with pytest.raises(AnyShapeError, match="names no pass"):
        anyshape.compile(torch.relu, disable=name)


def test_what_is_compiled_again_is_traced_again() -> None:
    model = nn.Linear(3, 3)
    for _ in range(2):
        torch._dynamo.reset()
        anyshape.reset_stats()
        anyshape.compile(model)(torch.ones(2, 3))
        assert anyshape.stats()["programs"] == 1


@pytest.mark.parametrize(("function", "x"), [
    (torch.nn.functional.rrelu, torch.randn(3, 5, 4).mT),
    (lambda x: torch.nn.functional.max_pool1d(x, 2), torch.randn(2, 6, 4).mT),
    pytest.param(lambda x: torch.nn.functional.conv3d(x, torch.ones(5, 4, 2, 2, 2)),
                 torch.randn(2, 4, 4, 6, 5).to(memory_format=torch.channels_last_3d), marks=pytest.mark.skipif(
                     compat.version() < (2, 12), reason="by the rule of torch 2.11 it lies as eager's does")),
], ids=["rrelu", "max_pool1d", "conv3d"])
def test_results_that_lie_otherwise_than_eager_s(function, x):
    found, wanted = anyshape.compile(lambda x: function(x), strict=True)(x), function(x)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert found.stride() != wanted.stride()


def test_strides_of_dims_of_size_1_may_be_other_ones():
    def function(x):
        rows, length, width = x.shape
        side = int(length ** 0.5)
        return x.transpose(1, 2).reshape(rows, width, side, side) * 2

    fast = anyshape.compile(function, strict=True)
    for rows in (2, 1):
        x = torch.randn(rows, 9, 5)
        found, wanted = fast(x), function(x)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        assert found.stride()[1:] == wanted.stride()[1:] and (found.stride(0) == wanted.stride(0)) == (rows > 1)
