"""What the data decide and what torch's tracer refuses: programs in parts, frames that run as plain PyTorch."""
from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import anyshape
from anyshape import torch_compat as compat
from anyshape.base.errors import InputError
from anyshape.frontend.capture import frame_callback
from anyshape.frontend.capture.dynamo_backend import FallbackWarning
from anyshape.frontend.programs.eager_fallback import UNKNOWN
from anyshape.plan.ir.program import ExternStep
from sampling import crossed, rest


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def fallbacks(fast) -> list[tuple[str, str]]:
    return [(item.name, item.stage) for item in fast._anyshape.compilation.fallbacks]


def agree(function, fast, *inputs) -> None:
    """Values, and gradients of the first input, equal eager's, with the same random numbers."""
    results = []
    for call in (function, fast):
        torch.manual_seed(1)
        leaf = inputs[0].detach().clone().requires_grad_()
        result = call(leaf, *inputs[1:])
        results.append((result, torch.autograd.grad(result.sum(), leaf)[0] if result.requires_grad else None))
    (wanted, wanted_gradient), (found, found_gradient) = results
    torch.testing.assert_close(found, wanted, equal_nan=True)
    torch.testing.assert_close(found_gradient, wanted_gradient, equal_nan=True)


# ---- programs in parts


def test_one_program_where_the_data_decide_a_size():
    def function(x, mask):
        return ((x * 2)[mask] * 3 + 1).sin()
    fast = anyshape.compile(function)
    for count in (8, 5, 13, 40):
        x = torch.randn(count)
        agree(function, fast, x, x > x.median())
    assert fast._anyshape.compilation.graphs == 1
    assert {stage for _, stage in fallbacks(fast)} == {"split"}
    assert len([program for program in fast.programs if hasattr(program, "compiled")]) >= 3
    assert "only known from the data" in str(fast.explain())


@pytest.mark.parametrize("function", [
    lambda x, mask: (x * 2)[mask][3:].squeeze(0) + 1,
    lambda x, mask: (x * 2)[mask] + torch.ones(1),
    lambda x, mask: torch.zeros(mask.sum().item()) + x.sum(),
    lambda x, mask: x.sum() * mask.sum().item(),
    lambda x, mask: torch.bernoulli(torch.full_like(x, 0.5)).sum() + (x * mask)[mask].sum(),
    lambda x, mask: x * torch.nonzero(mask).sum(),
], ids=["squeeze", "broadcast", "number as size", "number", "random", "nonzero"])
def test_sizes_of_0_and_1_from_the_data(function):
    fast = anyshape.compile(function)
    for count in (9, 5, 7):
        for chosen in (3, 5, 1, 4, 0, 2):
            x = torch.randn(count)
            mask = torch.arange(count) < chosen
            try:
                function(x, mask)
            except (RuntimeError, IndexError):
                continue
            agree(function, fast, x, mask)


@pytest.mark.parametrize("function", [
    lambda x: torch.zeros_like(x).index_add(0, torch.where(x[:, 0] > 0)[0], x[x[:, 0] > 0]),
    lambda x: F.ctc_loss(x.reshape(12, -1, 1).expand(-1, -1, 4).log_softmax(-1), torch.ones(x.shape[1], 2).long(),
                         torch.full((x.shape[1],), 12), torch.full((x.shape[1],), 2)),
    lambda x: x * (1 + torch.bincount(x.detach().flatten().abs().long(), minlength=16).shape[0] // 99),
], ids=["experts", "ctc", "counts"])
def test_small_sizes_beside_what_the_data_decide(function):
    fast = anyshape.compile(function)
    for columns in (3, 1, 5):
        agree(function, fast, torch.arange(-6.0, 6.0)[:, None] * torch.rand(columns))
    assert fast._anyshape.compilation.graphs == 1
    assert {stage for _, stage in fallbacks(fast)} == {"split"}


def test_parts_without_a_way_back():
    def function(x, mask):
        return x[mask] * 2
    fast = anyshape.compile(function, fullgraph=True)
    for chosen in (3, 1, 0, 6):
        agree(function, fast, torch.randn(6), torch.arange(6) < chosen)


def test_a_backward_in_parts_after_a_whole_forward():
    def function(x, values, mask):
        return (x * 3).index_put((mask,), values.exp())
    fast = anyshape.compile(function)
    for count in (4, 7):
        x, values = torch.randn(count), torch.randn((), requires_grad=True)
        mask = torch.arange(count) < 3
        agree(function, fast, x, values, mask)
        for call in (function, fast):
            values.grad = None
            call(x, values, mask).sum().backward()
            torch.testing.assert_close(values.grad, 3 * values.exp().detach())


def test_truth_of_tensors():
    fast = anyshape.compile(lambda x, y: (torch.equal(x * 2, y), torch.allclose(x * 2, y, rtol=0.5)))
    for count in (4, 6, 1, 0):
        x = torch.rand(count) + 1
        assert fast(x, x * 2) == (True, True)
        assert fast(x, x * 2.2) == (count == 0, True)
    assert fast(torch.ones(3), torch.ones(1) * 2) == (False, True)
    assert fast.programs


def test_an_operator_with_effects_raises_as_in_eager():
    fast = anyshape.compile(lambda x: torch.linalg.inv(x) @ x)
    for size in (3, 5):
        torch.testing.assert_close(fast(torch.eye(size) * 2), torch.eye(size))
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        fast(torch.zeros(3, 3))
    torch.testing.assert_close(fast(torch.eye(4) * 2), torch.eye(4))
    assert not fallbacks(fast)


def test_operators_with_effects_in_parts():
    def function(x):
        lower = torch.linalg.cholesky(x @ x.mT + torch.eye(x.shape[0]))
        return torch.linalg.inv(lower).sum() + x[x[:, 0] > 0].exp().sum() + torch.linalg.solve(lower, x).sum()
    fast = anyshape.compile(function, strict=True)
    for count in (7, 9):
        x = torch.randn(count, 3)
        x[:3, 0] = 1.0
        agree(function, fast, x)
    assert [stage for _, stage in fallbacks(fast)] == ["split"] and fast._anyshape.compilation.graphs == 1
    with pytest.raises(torch.linalg.LinAlgError, match="not positive-definite"):
        fast(torch.full((7, 3), float("nan")))


def test_warnings_do_not_end_a_graph():
    def function(x):
        if x.shape[0] > 3:
            warnings.warn("a long one", stacklevel=1)
        return x * 2 + 1

    def outer(x):
        return function(x) - 1
    for call in (function, outer):
        fast = anyshape.compile(call, fullgraph=True)
        for count in (5, 5, 2, 6):
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                fast(torch.randn(count))
            assert [str(item.message) for item in told] == ["a long one"] * (count > 3)


# ---- what the tracer refuses


def test_statistics_of_one_number_run_as_plain_pytorch():
    def function(x):
        means, squares = x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
        return torch.native_batch_norm(x, None, None, means, squares, True, 0.1, 1e-5)[0]
    fast = anyshape.compile(function)
    agree(function, fast, torch.randn(3, 4))
    with pytest.warns(FallbackWarning, match="tracer refuses"):
        agree(function, fast, torch.randn(1, 1))
    assert "tracer refuses" in fast.explain().eager[0][0]
    programs = len(fast.programs)
    agree(function, fast, torch.randn(5, 2))
    assert len(fast.programs) == programs
    with pytest.raises(Exception, match="division by zero"):
        anyshape.compile(function, strict=True)(torch.randn(1, 1))


@pytest.mark.parametrize(("loss", "reduction"), crossed((F.mse_loss, F.huber_loss, F.smooth_l1_loss),
                                                        ("mean", "sum", "none")),
                         ids=lambda one: getattr(one, "__name__", one))
def test_losses_over_nothing(loss, reduction):
    def function(x, y):
        return loss(x, y, reduction=reduction)
    torch._dynamo.reset()
    fast = anyshape.compile(function, strict=True)
    for shape in ((0, 0), (0, 3), (3, 0), (4, 5)):
        agree(function, fast, torch.randn(shape), torch.randn(shape))


def test_group_norm_over_nothing():
    def function(x, weight):
        return F.group_norm(x, 2, weight) * weight.sum()
    fast = anyshape.compile(function, strict=True)
    for shape in ((0, 4, 3), (2, 4, 0), (2, 0, 3), (0, 4), (3, 4, 2)):
        agree(function, fast, torch.randn(shape), torch.randn(shape[1]))


# ---- functions that look at their data


@pytest.mark.parametrize("function", [
    pytest.param(lambda x: x.cov(), marks=pytest.mark.full),
    lambda x: torch.cov(x * 2, correction=0).sin(), lambda x: x.corrcoef() + 1,
    lambda x: torch.cov(x, fweights=torch.arange(x.shape[-1]) + 1, aweights=torch.arange(x.shape[-1]) * 0.5 + 1),
    pytest.param(lambda x: torch.cov(x, aweights=torch.arange(x.shape[-1]) * 0.5 + 1, correction=2),
                 marks=pytest.mark.full),
], ids=["method", "no correction", "correlation", "both weights", "weights"])
def test_covariances(function):
    fast = anyshape.compile(function, strict=True)
    for shape in ((3, 7), (4, 5), (1, 6), (2, 1), (8,), (1,)):
        told = []
        for call in (function, fast):
            with warnings.catch_warnings(record=True) as items:
                warnings.simplefilter("always")
                call(torch.ones(shape))
            told.append([item.category for item in items if "degrees of freedom" in str(item.message)])
            torch.manual_seed(0)
        assert told[0] == told[1] or "weights" in str(function.__code__.co_names + function.__code__.co_consts)
        if shape[-1] > 2:
            agree(function, fast, torch.randn(shape))
        else:
            torch.testing.assert_close(fast(torch.ones(shape)), function(torch.ones(shape)), equal_nan=True)
    assert {stage for _, stage in fallbacks(fast)} <= {"small sizes"}


def test_covariance_of_wrong_weights():
    fast = anyshape.compile(lambda x, *weights: torch.cov(x, fweights=weights[0], aweights=weights[1]))
    x, whole, real = torch.randn(3, 5), torch.arange(5), torch.arange(5.0)
    torch.testing.assert_close(fast(x, whole, real), torch.cov(x, fweights=whole, aweights=real))
    for weights, words in (((-whole, real), "fweights cannot be negative"), ((whole, -real), "aweights cannot be"),
                           ((whole * 0, real), "sum to zero"), ((real, real), "integral dtype"),
                           ((whole[1:], real), "same numel")):
        with pytest.raises(RuntimeError, match=words):
            fast(x, *weights)


def test_a_variance_that_is_negative():
    fast = anyshape.compile(F.gaussian_nll_loss)
    for shape in ((3, 5), (4, 2), (1, 6), (2, 0)):
        agree(F.gaussian_nll_loss, fast, torch.randn(shape), torch.randn(shape), torch.rand(shape))
    assert not fallbacks(fast)
    x = torch.randn(3, 5)
    for var in (torch.rand(3), torch.rand(3, 1), 0.5):
        agree(F.gaussian_nll_loss, fast, x, x + 1, var)
    for var in (torch.rand(3, 5) - 1.5, torch.rand(3, 1) - 2, -0.5):
        with pytest.raises(ValueError, match="negative"):
            fast(x, x, var)
    with pytest.raises(ValueError, match="incorrect size"):
        fast(x, x, torch.rand(2, 1))


def test_what_a_program_asserts():
    space: dict = {}  # pytest rewrites what this file asserts
    exec("def function(x):\n    assert (x > 0).all(), 'positive numbers only'\n    return x * 2", space)
    function = space["function"]
    fast = anyshape.compile(function, strict=True)
    torch.testing.assert_close(fast(torch.ones(4)), torch.full((4,), 2.0))
    for call in (function, fast):
        with pytest.raises(AssertionError, match="positive numbers only"):
            call(-torch.ones(5))
    assert len(fast.programs) == 1 and not fallbacks(fast)


def _with_a_message(x):
    torch._assert((x > 0).all(), "only positive")
    return x * 2


def _of_a_number(x):
    torch._check(x.sum().item() > 0, lambda: "only positive")
    return x * 2


def _of_a_truth(x):
    torch._check_value(bool((x > 0).all()), lambda: "only positive")
    return x * 2


def _of_a_size(x):
    rows = torch.nonzero(x > 0)
    torch._check(rows.shape[0] == 3, lambda: "only positive")
    return rows * 2


def _of_a_made_size(x):
    count = int(x.sum())
    torch._check(count == 3, lambda: "only positive")
    return x.new_ones(count)


exec("""
def _of_a_whole_number(x):
    assert int(x.sum()) == 3, "only positive"
    return x * 2

def _of_a_count(x):
    count = (x > 0).sum().item()
    assert count == x.shape[0], "only positive"
    return torch.cat([x, x.new_zeros(count)])

def _of_rows(x):
    assert torch.nonzero(x > 0).shape[0] == x.shape[0], "only positive"
    return x * 2
""", _asserting := {"torch": torch})  # statements that pytest does not rewrite


@pytest.mark.parametrize("function", [_with_a_message, _of_a_number, _of_a_truth, _of_a_size, _of_a_made_size,
                                      *(_asserting[name] for name in ("_of_a_whole_number", "_of_a_count",
                                                                      "_of_rows"))])
def test_what_is_asserted_of_data_is_checked_in_every_call(function):
    """The trace takes for true what is asserted, from there on: that is no proof of it."""
    fast = anyshape.compile(function)
    for x in (torch.ones(3), -torch.ones(5), torch.ones(3), -torch.ones(4)):
        if x[0] > 0:
            torch.testing.assert_close(fast(x), function(x), rtol=0, atol=0)
            continue
        for call in (function, fast):
            with pytest.raises((RuntimeError, AssertionError, ValueError)) as caught:
                call(x)
            assert str(caught.value) == "only positive"


def test_a_number_from_the_data_that_other_sizes_ask_for_is_checked():
    """The trace takes it for theirs, from there on. A 1 is broadcast, in a call of its own."""
    def function(x):
        return torch.zeros(x.max().item()) + x
    fast = anyshape.compile(function)
    for numbers in ([1, 2, 3], [0, 1, 0, -1], [1, 2, 0], [5, 4, 3, 2, 1]):
        x = torch.tensor(numbers)
        if numbers == [1, 2, 0]:
            for call in (function, fast):
                with pytest.raises(RuntimeError):
                    call(x)
        else:
            assert fast(x).equal(function(x))


def test_a_check_of_the_user_s_fails_in_the_first_call_as_in_eager():
    def function(x):
        torch._check(x.shape[0] > 3, lambda: "too few")
        return x * 2
    fast = anyshape.compile(function)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^too few$"):
            fast(torch.ones(2))
    torch.testing.assert_close(fast(torch.ones(4)), torch.full((4,), 2.0))


def test_parts_that_the_data_cut_are_of_any_length():
    def function(x, k):
        return x[k:k + 2]
    fast = anyshape.compile(function, strict=True)
    for count, place in ((5, 0), (7, 6), (7, 7), (6, 4)):
        x, k = torch.randn(count, 3), torch.tensor(place)
        found, wanted = fast(x, k), function(x, k)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        assert found.data_ptr() == wanted.data_ptr() and found.stride() == wanted.stride()
    assert fast._anyshape.compilation.graphs == 1


def test_a_reshape_to_the_root_of_a_size_is_a_view():
    def function(x):
        rows, length, width = x.shape
        side = int(length ** 0.5)
        return x.transpose(1, 2).reshape(rows, width, side, side)
    fast = anyshape.compile(function, strict=True)
    for side in (4, 3, 7):
        x = torch.randn(2, side * side, 5)
        found, wanted = fast(x), function(x)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        assert found.data_ptr() == x.data_ptr() and found.stride() == wanted.stride()
    assert fast._anyshape.compilation.graphs == 1


def test_complex_numbers_beside_sizes_are_one_program():
    def function(x):
        count = x.shape[1]
        spectrum = torch.fft.rfft(x, n=2 * count)
        mean = (spectrum * count - spectrum / count).mean(1, keepdim=True)
        return torch.fft.irfft(spectrum * mean, n=2 * count)[:, :count] + spectrum.mean().real
    fast = anyshape.compile(function, strict=True)
    for count in (5, 8, 3, 1):
        agree(function, fast, torch.randn(2, count))
    assert fast._anyshape.compilation.graphs == 1 and not fallbacks(fast)


def test_nothing_is_found_in_nothing():
    def function(x):
        return (x * 2).nonzero() + 1
    fast = anyshape.compile(function)
    for shape in ((0, 3), (5, 0), (4, 6), (0, 6), (3, 2)):
        x = torch.randn(shape)
        torch.testing.assert_close(fast(x), function(x))
    assert fast._anyshape.compilation.graphs == 3  # 0 rows, 0 columns, and all sizes


# of gelsd: test_least_squares_without_residuals
@pytest.mark.parametrize(("driver", "every"), [  # every shape with the usual driver, a batch of each with another
    (None, True), ("gels", False), *(pytest.param(name, True, marks=pytest.mark.full) for name in ("gels", "gelsd"))])
def test_least_squares(driver, every):
    def function(a, b):
        solution, residuals, rank, values = torch.linalg.lstsq(a * 2, b, driver=driver)
        return solution.sum() * 3 + residuals.square().sum() + rank.sum() + values.detach().sum()
    fast = anyshape.compile(function)
    for rows, columns, count in ((5, 3, 2), (3, 5, 4), (6, 4, 2)):
        for batch in ((), (2,)) if every else ((2,),):
            a, b = torch.randn(*batch, rows, columns), torch.randn(*batch, rows, count)
            agree(function, fast, a.double(), b.double())
    assert {stage for _, stage in fallbacks(fast)} <= {"split"}
    if not every:
        return
    for shape, other in (((2, 5, 3), (2, 5)), ((5, 3), (5,)), ((2, 5, 3), (1, 5, 4)), ((6, 3), (6, 1))):
        agree(function, fast, torch.randn(shape).double(), torch.randn(other).double())


@pytest.mark.parametrize("driver", ["gelss", "gelsd"])
def test_least_squares_without_residuals(driver):
    def function(a, b):
        return torch.linalg.lstsq(a * 2, b, driver=driver)
    fast = anyshape.compile(function)
    for batch in ((), (2,)):
        for columns in (3, 4, 3):
            for rank in (2, 3, 2):  # 2: eager gives residuals of another shape
                a, b = torch.randn(*batch, 6, columns), torch.randn(*batch, 6, 3)
                a[..., rank:] = a[..., :1]
                for found, wanted in zip(fast(a, b), function(a, b), strict=True):
                    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
                    assert found.stride() == wanted.stride()


def test_derivatives_of_least_squares():
    def function(a, b):
        solution = torch.linalg.lstsq(a, b).solution
        return torch.autograd.grad(solution.square().sum(), a, create_graph=True)[0] * b.sum()
    fast = anyshape.compile(function, strict=True)
    for rows in (5, 6):
        agree(function, fast, torch.randn(rows, 3, dtype=torch.float64), torch.randn(rows, 2, dtype=torch.float64))

    def of_both(a, b):
        return torch.linalg.lstsq(input=a * 2, b=b).solution.abs()
    fast = anyshape.compile(of_both)
    a, b = torch.randn(5, 3, dtype=torch.complex128), torch.randn(5, 2, dtype=torch.complex128)
    agree(of_both, fast, a, b)
    agree(lambda b: of_both(a, b), lambda b: fast(a, b), b)


@pytest.mark.parametrize("function", [
    lambda x: x.prod(1), lambda x: torch.prod(x.exp() - 1) * x, lambda x: x.prod(dim=-2, keepdim=True).sin(),
    lambda x: torch.masked.prod(x, 0, mask=x > -1), lambda x: x.prod(0, dtype=torch.float64),
], ids=["rows", "all", "columns", "masked", "wide"])
def test_gradients_of_products(function):
    fast = anyshape.compile(function, strict=True)
    for shape in ((3, 5), (6, 2), (1, 4), (5, 1), (0, 3)):
        for zeros in range(3):
            x = torch.randn(shape)
            x[:, :zeros] = 0
            x[1:, 1:] += 0.1
            agree(function, fast, x)
            agree(function, fast, x.t().contiguous().t())
    agree(function, fast, torch.tensor([[1e30, 1e30, 3.0], [2.0, float("inf"), 1.0]]))
    steps = [step for program in fast.programs for step in program.compiled.plan.steps]
    assert steps and not any(isinstance(step, ExternStep) for step in steps)


def test_second_derivatives_of_products():
    def function(x):
        return torch.autograd.grad(x.prod(1).sum(), x, create_graph=True)[0].square()
    fast = anyshape.compile(function, strict=True)
    for zeros in range(3):
        x = torch.randn(4, 3)
        x[:, :zeros] = 0
        agree(function, fast, x)


@pytest.mark.filterwarnings("ignore::anyshape.frontend.capture.dynamo_backend.FallbackWarning")
@pytest.mark.parametrize("views", [
    lambda y: (y.real, y.imag), lambda y: (y[:, y.shape[1] // 2:], y), lambda y: (y.conj().imag, y[:, 1:].mH)],
    ids=["parts", "rows", "conjugate"])
def test_views_of_complex_numbers_are_eagers(views):
    w = torch.randn(3, 3, dtype=torch.complex64, requires_grad=True)
    inputs, results = anyshape.compile(views), anyshape.compile(lambda x: views(x @ w))
    for count in (4, 7):
        x = torch.randn(2, count, 3, dtype=torch.complex64)
        torch.testing.assert_close(inputs(x), views(x))
        found, wanted = results(x), views(x @ w)
        torch.testing.assert_close(found, wanted)
        ours, theirs = (torch.autograd.grad(one[1].abs().sum(), w)[0] for one in (found, wanted))
        torch.testing.assert_close(ours, theirs)
    assert fallbacks(results)


def test_sizes_that_floats_round_up_are_one_program():
    def padded(n):  # as models of audio count their windows
        return (math.ceil((n - 4 + 2) / 3 + 1) - 1) * 3 + 2

    def function(x):
        n = padded(padded(x.shape[1]) + 1)
        return F.pad(x, (0, n - x.shape[1])), x.new_ones(math.floor(x.shape[1] / 4 + 3)), x.new_ones(
            math.ceil(x.shape[1] - 0.5))
    fast = anyshape.compile(function, strict=True)
    for count in (9, 10, 11, 35):
        x = torch.randn(2, count)
        torch.testing.assert_close(fast(x), function(x))
    assert fast._anyshape.compilation.graphs == 1


def test_first_calls_are_right_with_complex_numbers():
    a = torch.randn(5, 3, dtype=torch.complex128)

    def function(b):
        return (torch.linalg.pinv(a * 2) @ b).abs()
    agree(function, anyshape.compile(function), torch.randn(5, 2, dtype=torch.complex128))
    agree(function, torch.compile(function, backend="anyshape"), torch.randn(5, 2, dtype=torch.complex128))


# ---- what the tracer takes wrongly


def test_targets_end_at_the_first_minus_1():
    for reduction in ("none", "mean", "sum"):
        torch._dynamo.reset()

        def function(x, y, reduction=reduction):
            return F.multilabel_margin_loss(x, y, reduction=reduction)
        fast = anyshape.compile(function, strict=True)
        for rows, classes in ((6, 5), (3, 7), (1, 4)):
            target = torch.full((rows, classes), -1)
            target[:, 0], target[0, 1], target[0, 3] = torch.arange(rows) % classes, 2, 1
            agree(function, fast, torch.randn(rows, classes), target)
        with pytest.raises(InputError, match="inconsistent target size"):
            fast(torch.randn(3, 5), target)


def test_what_is_always_refused_is_not_traced_for_ever(monkeypatch):
    def function(x):
        return torch.func.jvp(lambda row: (row * row.shape[0]).sum(), (x[0],), (torch.ones_like(x[0]),))[1]
    monkeypatch.setattr(frame_callback, "PATIENCE", 2)
    fast = anyshape.compile(function)
    traces = []
    for way in (fast._anyshape.oblivious, fast._anyshape.ordinary):
        way.tracing.inner = lambda *rest, inner=way.tracing.inner: traces.append(1) or inner(*rest)
    counts = []
    for size in range(2, 7):  # a trace that ends inside of a transform leaves it: the plain call comes after it
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            agree(function, fast, torch.randn(3, size))
        counts.append(len(traces))
    assert counts[1] < counts[2] == counts[3] == counts[4], counts


def test_what_eager_refuses_too_is_an_error_in_words():
    fast = anyshape.compile(lambda x, y: x @ y)
    with pytest.raises(InputError, match="does not take these arguments"):
        fast(torch.randn(3, 4), torch.randn(5, 6))
    assert not fallbacks(fast)


# ---- sizes at which eager goes another way, inside of an operator


@pytest.mark.parametrize("function", [torch.trapezoid, lambda x: torch.trapezoid(x, dx=2.0) * 3],
                         ids=["alone", "inside"])
def test_an_integral_over_nothing(function):
    fast = anyshape.compile(function)
    for shape in ((5,), (7,), (0,), (1,), (2, 0), (3, 6), (0, 3), (0, 0)):
        agree(function, fast, torch.randn(shape))


def test_a_backward_that_does_not_fit_is_refused_before_the_forward():
    def function(x, mask, rows, columns, values):
        return torch.ops.aten._unsafe_masked_index_put_accumulate(x, mask, [rows, columns], values)
    fast = anyshape.compile(function)
    for wide in (False, True, False):
        mask, values = torch.rand(6, 6) > 0.5, torch.randn(6, 6)
        rows, columns = torch.randint(4, (6, 6 if wide else 1)), torch.randint(5, (6 if wide else 1, 6))
        agree(function, fast, torch.randn(4, 5), mask, rows, columns, values)


def test_storage_is_read_from_its_own_start():
    def function(x):
        return torch.as_strided_copy(x * 2, (2,), (1,), storage_offset=1).sin()
    fast = anyshape.compile(function, dynamic=False)
    agree(function, fast, torch.randn(4))


@pytest.mark.parametrize("scale", [0.6, 1.7, 0.3, 2.5, 1 / 3])
def test_sizes_scaled_by_floats(scale):
    def function(x):
        return F.interpolate(x, scale_factor=scale, mode="nearest") * 2
    fast = anyshape.compile(function)
    for size in (10, 5, 7, 30, 11, 100):
        agree(function, fast, torch.randn(1, 2, size))
    assert fast._anyshape.compilation.graphs == 1


@pytest.mark.parametrize("first", [0, 1])
def test_a_square_root_of_a_size(first):
    """As of positions on a grid: rows back in two dims, behind a token of the class or not."""
    def function(x):
        batch, count, width = x.shape
        side = int((count - first) ** 0.5)
        return x[:, first:].reshape(batch, side, side, width).exp().sum((1, 2))
    fast = anyshape.compile(function, strict=True)
    for shape in ((2, 16 + first, 3), (3, 25 + first, 5), (1, 9 + first, 4), (2, 49 + first, 1)):
        x, other = (torch.linspace(-1, 1, math.prod(shape)).reshape(shape).requires_grad_() for _ in range(2))
        found, wanted = fast(x), function(other)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(torch.autograd.grad(found.sum(), x), torch.autograd.grad(wanted.sum(), other))
    assert fast._anyshape.compilation.graphs == 1
    with pytest.raises(InputError):
        fast(torch.ones(2, 0 if first else 5, 3))


def test_the_greater_of_a_tensor_s_number_and_a_size_is_of_one_program():
    def function(x):
        most = x.max() + 1
        return x + max(most, x.shape[0]), x * min(x.shape[0], most)
    fast = anyshape.compile(function, strict=True)
    for count in (5, 2, 1, 9):
        x = torch.arange(count) % 4
        for found, wanted in zip(fast(x), function(x), strict=True):
            assert found.equal(wanted) and found.dtype == wanted.dtype
    assert fast._anyshape.compilation.graphs == 1


def test_rounded_square_roots_of_sizes():
    def function(x):
        count = x.shape[0]
        large = math.isqrt(2**80 - 1) - 2**40 + 1  # of no size
        return (x[:int(math.sqrt(count))].exp().sum(0), x[:math.isqrt(count + 3) + large].cos(),
                x.new_ones(math.ceil(count ** 0.5)) * x[0, 0], x.new_ones(round(math.sqrt(count))) * 5,
                x.view(-1).sin()[:int((2 * count) ** 0.5)] * 2)
    fast = anyshape.compile(function, strict=True)
    for count in (5, 16, 6, 7, 1, 2, 3, 4, 120, 121, 122):
        x = torch.randn(count, 2)
        torch.testing.assert_close(fast(x), function(x))
    assert fast._anyshape.compilation.graphs == 1


def test_classes_asked_for_as_in_scripts():
    """torch.jit.isinstance, which is in the way of spectrograms in torchaudio."""
    def function(x, scale):
        if torch.jit.isinstance(scale, str):
            return x.exp()
        return x.sin() * (scale if torch.jit.isinstance(scale, float) and torch.jit.isinstance(x, torch.Tensor) else 0)
    fast = anyshape.compile(function, strict=True)
    for count in (5, 2, 9):
        x = torch.randn(count)
        for scale in ("root", 0.5):
            torch.testing.assert_close(fast(x, scale), function(x, scale))
    parts = anyshape.compile(lambda x: x.sin() * torch.jit.isinstance([x], list[torch.Tensor]))
    with pytest.warns(FallbackWarning, match="in parts"):
        torch.testing.assert_close(parts(x), x.sin())


@pytest.mark.parametrize("mode", ["sum", "mean", "max", "weighted", "padded"])
def test_bags_of_one_length(mode):
    """Rows that are added up where they are read; what else there is stays PyTorch's operator."""
    more = {"padding_idx": 2} if mode == "padded" else {}
    bag = nn.EmbeddingBag(50, 24, mode="sum" if mode in ("weighted", "padded") else mode, **more)

    def function(index, weights):
        return bag(index, per_sample_weights=weights if mode == "weighted" else None)
    fast = anyshape.compile(function)
    for bags, places in ((5, 3), (2, 40), (1, 1), (300, 7), (0, 4)):  # eager refuses bags of length 0
        index = torch.randint(0, 50, (bags, places))
        given, other = (torch.randn(bags, places, generator=torch.Generator().manual_seed(1)).requires_grad_()
                        for _ in range(2))
        found, wanted = fast(index, given), function(index, other)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        leaves = (bag.weight, given) if mode == "weighted" else (bag.weight,)
        others = (bag.weight, other) if mode == "weighted" else (bag.weight,)
        for one, two in zip(torch.autograd.grad(found.sin().sum(), leaves),
                            torch.autograd.grad(wanted.sin().sum(), others), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    targets = [step.target for program in fast._anyshape.compilation.programs
               for step in program.compiled.plan.steps if isinstance(step, ExternStep)]
    assert any("embedding_bag" in target for target in targets) == (mode in ("max", "padded"))


@pytest.mark.parametrize("function", [
    lambda x: x * (((x.shape[1] - 4) % 3) / 2),
    lambda x: x * (abs(x.shape[1] - 5) / 7),
    lambda x: F.layer_norm(x.repeat(1, 4)[:, :8], (8,)),
    lambda x: torch.fft.irfft(torch.fft.rfft(x.repeat(1, 3), dim=1), n=3 * x.shape[1], dim=1),
    lambda x: x[:, : x.shape[1] - x.shape[1] // 2].exp(),
    lambda x: x[:, x.shape[1] // 2] + x[None, :, int(x.shape[1] * 0.3)] + x[..., -x.shape[1]],
    lambda x: x * torch.linspace(-1, x.shape[1] / 3, x.shape[1]) + torch.linspace(0, 1, x.shape[1] - 1).sum(),
    lambda x: torch.cat((F.max_pool1d(x[None], 2, padding=1)[0], F.max_pool1d(x[None], x.shape[1])[0]), 1),
    lambda x: F.avg_pool2d(x[None], x.shape) + F.max_pool2d(x[None], x.shape) * F.avg_pool1d(x[None], x.shape[1]),
    lambda x: (x.t() @ x).fill_diagonal_(2.0),
    lambda x: (x.t() @ x)[tuple(torch.tril_indices(x.shape[1], x.shape[1], -1))]
    * (x.t() @ x)[tuple(torch.triu_indices(x.shape[1], x.shape[1], 1))],
], ids=["remainder", "absolute", "least", "spectrum", "half", "element", "linspace", "pools", "whole", "diagonal",
        "triangles"])
def test_numbers_made_of_sizes(function):
    fast = anyshape.compile(function)
    for shape in ((3, 17), (2, 5), (5, 2), (1, 6), (4, 40)):
        agree(function, fast, torch.randn(shape))
    assert fast._anyshape.compilation.graphs <= 1
    assert not fallbacks(fast)


def test_sizes_in_a_correction_and_no_columns():
    for function, shapes in ((lambda x: x.var(1, correction=x.shape[0]), ((3, 8), (2, 9))),
                             (lambda x: x.t() * 2 + 1, ((3, 4), (3, 0), (1, 0), (5, 7), (2, 0)))):
        fast = anyshape.compile(function, strict=True)
        for shape in shapes:
            agree(function, fast, torch.randn(shape))
        assert not fallbacks(fast)


def test_positions_are_taken_by_their_sign():
    def attend(x, cache, position):
        keys = cache[:, :position + x.shape[1]]
        return torch.einsum("btd,bsd->bts", x, keys).softmax(-1)
    fast = anyshape.compile(attend)
    cache = torch.randn(2, 32, 4)
    for length, position in ((5, 3), (2, 0), (1, 8), (7, 11), (1, 31), (9, 30)):
        agree(attend, fast, torch.randn(2, length, 4), cache, position)
    assert fast._anyshape.compilation.graphs == 1
    assert not fallbacks(fast)


@pytest.mark.parametrize("function", [
    lambda x, n: x * n + torch.arange(3) * n,
    lambda x, n: x.roll(n, 0) - n // 2,
    lambda x, n: x[n:].exp(),
    lambda x, n: x[None, n] + x[..., n],
    lambda x, n: torch.cat((x[:, None], x.clone()[:, None]), 1).index_put((torch.tensor([1]),), x[n]).neg(),
], ids=["factor", "shift", "rest", "element", "put"])
def test_numbers_of_either_sign(function):
    fast = anyshape.compile(function, strict=True)
    for number in (2, 1, -3, 0, -1, -2):
        agree(function, fast, torch.randn(3), number)
    assert fast._anyshape.compilation.graphs <= 2


def test_positions_that_are_tensors_are_operands():
    """One program for all numbers, computed ones too; what sees that a part is no view is right as well."""
    def function(x, table, k):
        made, best = x * 2, x.detach()[:, 0].argmin()
        made[k] = x[k, :2].sum() * table[k - 1]
        made[:, k] = x[..., k].cos()
        made[best, 1:] = 3
        return made * x[best] + x[k, best % 4].exp()

    def seen(x, k):
        part = x[k]
        x[k] = 7
        x[k] += 1
        return part * 2, x

    fast, table = anyshape.compile(function), torch.randn(9)
    for rows, k in ((5, 3), (7, 0), (4, -2), (9, 1)):
        agree(function, fast, torch.randn(rows, 4), table, torch.tensor(k))
    assert fast._anyshape.compilation.graphs == 1 and not fallbacks(fast)
    with pytest.raises(IndexError):
        fast(torch.randn(5, 4), table, torch.tensor(4))
    selected = anyshape.compile(lambda x, k: x.select(-1, k) * torch.select(x, 0, k), strict=True)
    for rows, k in ((4, 3), (4, 0)):
        agree(lambda x, k: x.select(-1, k) * x.select(0, k), selected, torch.randn(rows, 4), torch.tensor(k))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.randn(5, 4)
        torch.testing.assert_close(anyshape.compile(seen)(x.clone(), torch.tensor(2)), seen(x, torch.tensor(2)))


def test_a_part_between_positions_may_have_one_element_or_none():
    """The program for all sizes may refuse such a call, and says why; it once ended in a TypeError of sympy."""
    fast = anyshape.compile(lambda x, k: x[k:k + 2] * 2, defer=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rows, k in ((5, 2), (3, 2), (3, 3), (8, 1), (1, 0)):
            agree(lambda x, k: x[k:k + 2] * 2, fast, torch.randn(rows, 4), torch.tensor(k))
    assert not any(UNKNOWN in reason for reason, _ in fast.explain().eager), fast.explain().eager


def test_elements_at_a_position_are_written():
    def write(cache, x, position):
        cache[:, position] = x
        cache[0, ..., position, 1:] = 7
        return cache.sum(1)
    fast = anyshape.compile(write, strict=True)
    wanted, found = torch.zeros(2, 8, 8), torch.zeros(2, 8, 8)
    for position in (3, 0, 1, 7, -2, -8):
        x = torch.randn(2, 8)
        torch.testing.assert_close(fast(found, x, position), write(wanted, x, position))
        torch.testing.assert_close(found, wanted)
    assert fast._anyshape.compilation.graphs == 2


def test_powers_of_whole_numbers():
    x = torch.tensor([-3, 0, 2, 7, 3_000_000_000])
    fast = anyshape.compile(lambda x, y: (x**5, x**2, x**63, x**y, 3**y))
    for found, wanted in zip(fast(x, x.abs() % 5), (x**5, x**2, x**63, x ** (x.abs() % 5), 3 ** (x.abs() % 5)),
                             strict=True):
        assert torch.equal(found, wanted)


def test_windows_that_overlap_keep_their_layout():
    def function(x):
        return (x * 2).unfold(0, 3, 1).sort(dim=-1).values + x[:1].expand(3)
    fast = anyshape.compile(function)
    for count in (8, 5, 3):
        agree(function, fast, torch.randn(count))


def test_a_size_1_that_is_broadcast_to_a_number():
    fast = anyshape.compile(lambda x: x.expand(10) * 2)
    for count in (1, 10, 1):
        x = torch.randn(count)
        assert torch.equal(fast(x), x.expand(10) * 2)
    with pytest.raises(InputError, match="does not take these arguments"):
        fast(torch.randn(12))


@pytest.mark.parametrize("mode", rest(["bicubic", "bilinear"], "bicubic"))
def test_numbers_that_an_operator_makes_of_a_size_of_1(mode):
    fast = anyshape.compile(lambda x: F.interpolate(x * 2, size=x.shape[2:], mode=mode, align_corners=True))
    for shape in ((4, 6), (2, 2), (1, 1), (1, 4), (3, 5)):
        x = torch.randn(1, 1, *shape)
        torch.testing.assert_close(fast(x), F.interpolate(x * 2, size=shape, mode=mode, align_corners=True))


DIVISIONS = {
    "floor": lambda a, d: a // d,
    "remainder": lambda a, d: (a % d).sum(-1),
    "fmod": lambda a, d: torch.fmod(a, d),
    "trunc": lambda a, d: torch.div(a, d, rounding_mode="trunc"),
    "where it is not chosen": lambda a, d: torch.where(d != 0, a // d, torch.zeros_like(a)),
    "where it is not read": lambda a, d: torch.cat([a, a % d])[:1],
    "several results": lambda a, d: (a + 1, a * 2 % d, (a - d).sum()),
    "of no dims": lambda a, d: a // d.min() if d.numel() else a,
    "stretched": lambda a, d: a // (d.prod(0) * d.shape[0]),
    "a number": lambda a, d: 3 % d,
}


@pytest.mark.parametrize("name", DIVISIONS)
def test_whole_numbers_are_not_divided_by_zero(name):
    """No element that is not there raises, none that is there is missed: tails of vectors, no rows, one row."""
    function = DIVISIONS[name]
    fast = anyshape.compile(function, strict=True)
    for shape in ((4, 6), (3, 37), (1, 1), (0, 5)):
        for dtype in (torch.int64, torch.uint8) if shape == (3, 37) else (torch.int64,):
            for zero in (None, 0, -1):
                a, d = torch.randint(1, 50, shape).to(dtype), torch.randint(1, 9, shape).to(dtype)
                if zero is not None and d.numel():
                    d.view(-1)[zero] = 0
                try:
                    expected = function(a, d)
                except RuntimeError as error:
                    assert str(error) == "ZeroDivisionError"
                    with pytest.raises(ZeroDivisionError, match=r"(?s)ZeroDivisionError.*test_data\.py.*divisor"):
                        fast(a, d)
                else:
                    torch.testing.assert_close(fast(a, d), expected)


def test_a_size_that_divides_is_not_zero():
    def parts(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x // y.shape[0], x % y.shape[0]

    fast = anyshape.compile(parts, strict=True)
    for count in (3, 2, 1):
        torch.testing.assert_close(fast(torch.arange(5), torch.ones(count)), parts(torch.arange(5), torch.ones(count)))
    with pytest.raises(ZeroDivisionError, match=r"test_data\.py"):
        fast(torch.arange(5), torch.ones(0))
    torch.testing.assert_close(fast(torch.arange(0), torch.ones(0)), (torch.arange(0), torch.arange(0)))
    always = anyshape.compile(lambda x: (x * 2) // 0, strict=True)
    with pytest.raises(ZeroDivisionError):
        always(torch.arange(4))
    assert always(torch.arange(0)).shape == (0,)


def test_nothing_is_written_when_a_divisor_is_zero():
    def step(a: torch.Tensor, d: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y.add_(1)
        w.index_add_(0, a % d, torch.ones(a.shape[0], 3))
        a.floor_divide_(d)
        return w @ w.t() + y.sum()

    fast = anyshape.compile(step, strict=True)
    for count in (5, 70):
        a, d, y, w = torch.arange(count), torch.full((count,), 4), torch.zeros(count), torch.zeros(4, 3)
        same = [one.clone() for one in (a, d, y, w)]
        torch.testing.assert_close(fast(a, d, y, w), step(*same))
        before = [one.clone() for one in (a, d, y, w)]
        d[-2] = before[1][-2] = 0
        with pytest.raises(ZeroDivisionError):
            fast(a, d, y, w)
        for one, other in zip((a, d, y, w), before, strict=True):
            assert torch.equal(one, other)


def test_what_divides_is_checked_only_where_it_may_be_zero():
    def parts(a: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return a // 7, a % torch.full((), 3), torch.fmod(a, -2), x // 0.0, x % x

    fast = anyshape.compile(parts, strict=True)
    a, x = torch.arange(40) - 20, torch.tensor([0.0, 1.0, -2.0])
    for found, wanted in zip(fast(a, x), parts(a, x), strict=True):
        torch.testing.assert_close(found, wanted, equal_nan=True)
    assert not any(getattr(step, "checks", ()) for step in fast.programs[0].compiled.plan.steps)


VALUES = {
    "a negative index": (lambda x, i: x.index_select(0, i), torch.tensor([0, -1]), torch.tensor([0, 2]), "out of r"),
    "a quantile": (torch.quantile, torch.tensor(1.5), torch.tensor(0.5), r"range \[0, 1\]"),
    "quantiles beside nan": (torch.nanquantile, torch.tensor([0.1, -0.5]), torch.tensor([0.1, 0.5]), r"range \[0, 1\]"),
    "an assertion": (lambda x, y: (torch._assert_async((y > 0).all()), x + y)[1], torch.zeros(4), torch.ones(4),
                     "got zero"),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_that_eager_refuses_are_refused(name):
    function, wrong, right, words = VALUES[name]
    # quantiles have no formula for sizes that are symbols before torch 2.12
    fast = anyshape.compile(function, strict="quantile" not in name or compat.version() >= (2, 12))
    for count in (4, 7):
        x = torch.rand(count) if name != "an assertion" else torch.rand(4)
        torch.testing.assert_close(fast(x, right), function(x, right))
        for call in (function, fast):
            with pytest.raises((RuntimeError, IndexError), match=words):
                call(x, wrong)


def test_a_quotient_of_numbers_of_tensors_is_a_number():
    """Torch's tracer takes an operator on two such numbers for the constant NaN."""
    def quotient(a: torch.Tensor, b: torch.Tensor) -> float:
        return float(torch.ops.aten.div(int(a), int(b)))

    fast = anyshape.compile(quotient)
    for a, b in ((7, 2), (9, 4), (-3, 2), (1, 0)):
        assert fast(torch.tensor(a), torch.tensor(b)) == quotient(torch.tensor(a), torch.tensor(b))


def test_a_selection_of_one_number_follows_eager():
    fast = anyshape.compile(torch.masked_select, strict=True)
    x = torch.tensor(2.5, requires_grad=True)
    for mask in (torch.tensor(True), torch.tensor(False)):
        results = [function(x, mask) for function in (torch.masked_select, fast)]
        torch.testing.assert_close(*results, rtol=0, atol=0)
        gradients = [torch.autograd.grad(result.sum(), x)[0] for result in results]
        torch.testing.assert_close(*gradients, rtol=0, atol=0)


# ---- operators of torch that know no symbols

SIZES = ((4, 6), (7, 3), (1, 2), (5, 5), (13, 29))
ONE_FOR_ALL = {
    "take_along_dim": lambda x: torch.take_along_dim(x, x.argsort(1)[:, :1], 1) + x.take_along_dim(x.argsort(0)[:1], 0),
    "take_along_dim of all": lambda x: torch.take_along_dim(x, x.flatten().argsort()),
    "pad_sequence": lambda x: nn.utils.rnn.pad_sequence([x, x[1:], x.mT[:, :1].expand(-1, x.shape[1])], True, 2.0),
    "pad_sequence on the left": lambda x: nn.utils.rnn.pad_sequence([x[:, 0], x[0]], padding_side="left"),
    "cross_entropy with weights and smoothing": lambda x: F.cross_entropy(
        x, x.argmin(1), x[0].detach().exp(), ignore_index=2, label_smoothing=0.1),
    "cross_entropy of probabilities with weights": lambda x: F.cross_entropy(
        x, x.softmax(1), x[0].detach().exp(), label_smoothing=0.1),
    "one_hot": lambda x: F.one_hot(x.argmax(1), x.shape[1]) * x,
    "one_hot of data": lambda x: F.one_hot(x.argmax(1)).sum() * x,
    "one_hot of classes from a tensor": lambda x: F.one_hot(x.argmax(1), x.argmax(1).max() + 2).sum(0).prod() * x,
    "one_hot of at least so many classes": lambda x: F.one_hot(
        x.argmax(1), max(x.argmax(1).max() + 1, x.shape[1]))[..., :x.shape[1]] * x,
    "kron": lambda x: torch.kron(x, x[0]),
    "as_tensor": lambda x: torch.as_tensor(torch.as_tensor(x), dtype=torch.float64) * torch.as_tensor(
        x.shape[0] / 4) + torch.as_tensor([x.shape[1], 3]).sum(),
    "masked_select": lambda x: torch.masked_select(x, x[:1] > 0).sum() + x.masked_select(x > 0).sin().sum(),
    "divergence": lambda x: torch.distributions.kl_divergence(
        torch.distributions.Independent(torch.distributions.Normal(x, 1.0), 1),
        torch.distributions.Independent(torch.distributions.Normal(0 * x, 2.0), 1)),
    "divergence of a base": lambda x: torch.distributions.kl_divergence(
        torch.distributions.Chi2(x.exp()), torch.distributions.Gamma(x.exp(), 1.0)),
    "gamma": lambda x: torch.distributions.Gamma(x.exp(), 1.0).rsample(),
    "dirichlet": lambda x: torch.distributions.Dirichlet(x.exp()).rsample(),
    "binomial": lambda x: torch.distributions.Binomial(5, logits=x.detach()).sample() * x,
    "fake_quantize": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, 0, 255),
    "fake_quantize by tensors": lambda x: torch.fake_quantize_per_tensor_affine(
        x, torch.tensor(0.1), torch.tensor(0), 0, 255),
    "fake_quantize by channels": lambda x: torch.fake_quantize_per_channel_affine(
        x, x[0].detach().abs() + 0.1, torch.zeros(x.shape[1], dtype=torch.int32), 1, -8, 7),
    "histogram": lambda x: torch.histogram(x.detach(), 5, range=(-1.0, 1.0))[0].sum() * x,
}


SELDOM = ("take_along_dim of all", "pad_sequence on the left", "divergence of a base", "fake_quantize by tensors",
          "histogram")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] if name in SELDOM else [])
                                  for name in ONE_FOR_ALL])
def test_operators_that_know_no_symbols_have_one_program_for_all_sizes(name):
    function = ONE_FOR_ALL[name]
    fast = anyshape.compile(lambda x: function(x), defer=False)
    anyshape.reset_stats()
    for shape in SIZES:
        agree(function, fast, torch.randn(shape))
    assert fast._anyshape.compilation.graphs == 1 and anyshape.stats()["eager_calls"] == 0, fast.explain()


@pytest.mark.parametrize("function", [
    lambda x: torch.linalg.multi_dot([x, x.mT, x]), lambda x: torch.linalg.multi_dot([x, x.mT, x, x.mT]),
    lambda x: torch.linalg.multi_dot([x[0], x.mT, x, x[0]])], ids=["three", "four", "vectors"])
def test_products_of_several_matrices_have_a_program_for_each_order(function):
    fast = anyshape.compile(lambda x: function(x), defer=False)
    anyshape.reset_stats()
    for shape in (*SIZES, (6, 4), (8, 3), (3, 5), (11, 12)):
        agree(function, fast, torch.randn(shape))
    assert fast._anyshape.compilation.graphs <= 3 and anyshape.stats()["eager_calls"] == 0


def test_an_einsum_of_several_operands_keeps_its_order():
    pytest.importorskip("opt_einsum")
    fast = anyshape.compile(lambda x: torch.einsum("ab,bc,cd->ad", x, x.mT, x), strict=True, defer=False)
    for shape in SIZES:
        x = torch.randn(shape)
        torch.testing.assert_close(fast(x), x @ x.mT @ x, rtol=1e-4, atol=1e-4)
    assert len(fast.programs) == 1


@pytest.mark.parametrize(("x", "classes"), [
    (torch.tensor([0, 5]), 5), (torch.tensor([0, -1]), 5), (torch.tensor([0, -2]), -1),
    (torch.tensor([0, 1], dtype=torch.int32), 5), (torch.tensor([0, 1]), 0), (torch.empty(0, dtype=torch.int64), -1)])
def test_one_hot_refuses_what_eager_refuses(x, classes):
    fast = anyshape.compile(F.one_hot, defer=False)
    with pytest.raises(RuntimeError) as wanted:
        F.one_hot(x, classes)
    for _ in range(2):
        with pytest.raises((RuntimeError, InputError)) as found:
            fast(x, classes)
    assert str(wanted.value).rstrip(".") in str(found.value)


@pytest.mark.parametrize("name", ["pixel_shuffle", "pixel_unshuffle"])
def test_pixels_that_are_rearranged_behind_a_convolution_have_channels_last(name):
    """The strides of what a convolution returns are formulas in a trace, where those of an input were numbers."""
    rearranged = {"pixel_shuffle": nn.PixelShuffle, "pixel_unshuffle": nn.PixelUnshuffle}[name](2)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), rearranged).to(memory_format=torch.channels_last)
    fast = anyshape.compile(model)
    for size in (8, 6, 4):
        x = torch.randn(2, 3, size, size).to(memory_format=torch.channels_last)
        assert fast(x).stride() == model(x).stride()


@pytest.mark.parametrize("segments", [1, 2, 3])
def test_checkpoints_in_sequence_are_part_of_one_program(segments):
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def function(x):
        return torch.utils.checkpoint.checkpoint_sequential(model, segments, x, use_reentrant=False)

    fast = anyshape.compile(function, strict=True, defer=False)
    for rows in (4, 1, 7):
        agree(function, fast, torch.randn(rows, 6))
    assert fast._anyshape.compilation.graphs == 1


class Experts(nn.Module):
    """A mixture of experts as it is often written, with a loop; asks: whether an expert without tokens is left out."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.gate, self.asks = nn.Linear(8, 3), asks
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        chosen = self.gate(x).topk(2).indices
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, _ = torch.where(chosen == number)
            if self.asks and rows.numel() == 0:
                continue
            result.index_add_(0, rows, expert(x[rows]))
        return result


def test_a_question_about_the_data_is_named_with_what_to_do():
    x = torch.randn(5, 8)
    asking, plain = Experts(True), Experts(False)
    fast = anyshape.compile(asking)
    with pytest.warns(FallbackWarning, match="leave the question out"):
        torch.testing.assert_close(fast(x), asking(x))
    fast = anyshape.compile(plain, defer=False)
    anyshape.reset_stats()
    for rows in (5, 1, 13):  # with one row an expert has none
        torch.testing.assert_close(fast(torch.ones(rows, 8)), plain(torch.ones(rows, 8)), rtol=1e-4, atol=1e-5)
    assert anyshape.stats()["eager_calls"] == 0


def test_a_question_that_known_sizes_decide():
    """Rows that the data choose and `more` known ones: none are left only where `more` is none."""
    def loops_removed(x: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        rows = torch.cat([x[x[:, 0] > 0], more])
        if rows.numel() == 0:
            return rows.sum(0) - 1
        return (rows * 2).sum(0)

    fast = anyshape.compile(loops_removed, defer=False)
    anyshape.reset_stats()
    for rows, more in ((5, 3), (7, 2), (4, 1), (0, 9)):
        x, y = torch.randn(rows, 4), torch.randn(more, 4)
        torch.testing.assert_close(fast(x, y), loops_removed(x, y))
    assert anyshape.stats()["eager_calls"] == 0
    for rows in (5, 0):
        x, y = -torch.rand(rows, 4), torch.randn(0, 4)
        torch.testing.assert_close(fast(x, y), loops_removed(x, y))


@pytest.mark.parametrize("way", ["compile", "train_step", "backend"])
def test_batch_norm_that_averages_over_all_batches(way: str) -> None:
    """`momentum=None`: the weight of a batch is one over their number, which a tensor counts."""
    mine, theirs = (nn.Sequential(nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 3)) for _ in range(2))
    theirs.load_state_dict(mine.state_dict())
    ours, eager = (torch.optim.SGD(one.parameters(), 0.1) for one in (mine, theirs))

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().sum()

    def step(model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        optimizer.zero_grad()
        found = loss(model, x)
        found.backward()
        optimizer.step()
        return found.detach()

    fast = {"compile": lambda: anyshape.compile(mine, strict=True),
                 "train_step": lambda: anyshape.train_step(mine, loss, ours, strict=True),
                 "backend": lambda: torch.compile(mine, backend="anyshape")}[way]()
    before = anyshape.stats()
    for rows in (5, 3, 8):
        x = torch.randn(rows, 4)
        found = fast(x) if way == "train_step" else step(fast, x, ours)
        torch.testing.assert_close(found, step(theirs, x, eager))
        torch.testing.assert_close(mine.state_dict(), theirs.state_dict())
    if way != "backend":
        after = anyshape.stats()
        assert (after["graphs"] - before["graphs"], after["eager_calls"] - before["eager_calls"]) == (1, 0)
    if way == "compile":
        mine.eval(), theirs.eval()
        torch.testing.assert_close(fast(x[:1]), theirs(x[:1]))


def test_what_overlaps_in_place_reads_what_was_there_before() -> None:
    """Eager PyTorch refuses two parts that are dense, and else reads what it has written just now, or not."""
    def shifted(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        y[:, 1:] += y[:, :-1]
        return y

    fast = anyshape.compile(shifted)
    for rows in (3, 1):
        x = torch.arange(rows * 4.0).reshape(rows, 4)
        assert torch.equal(fast(x), F.pad(x[:, :-1], (1, 0)) + x)
    with pytest.raises(RuntimeError, match="memory location"):
        shifted(x)
