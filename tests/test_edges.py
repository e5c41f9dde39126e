"""Pointwise operators at the edges of their dtypes, forward and backward, against eager PyTorch: one table.

Values are infinities, NaN, both zeros, subnormals, the greatest numbers, ones, halves and large arguments. NaN,
infinities and the sign of zeros must be eager's, other numbers near it. Eager has several answers of its own where its
vectors and what is left over behind them do not agree (`gelu(inf)` is NaN in a dense vector of float32, by oneDNN, and
inf as one element, with strides, and in float64): each of them counts. So does what float32 gives, rounded, of
functions of several steps in half precision, for between steps nothing is rounded, and what is no further from the
float64 result than eager's.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import anyshape
import sampling
from sampling import rest

INF, NAN = math.inf, math.nan
DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}
NEAR = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2**-7, torch.float16: 2**-9}
HALVES = (torch.bfloat16, torch.float16)
Function = Callable[..., torch.Tensor]


def _of(module: Any, names: str) -> dict[str, Function]:
    return {f"{'F.' if module is F else ''}{name}": getattr(module, name) for name in names.split()}


UNARY: dict[str, Function] = {
    **_of(torch, """exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan tanh sigmoid erfc asin
          acos atan sinh cosh asinh acosh atanh lgamma digamma erfinv floor ceil trunc round neg abs sign square frac
          isnan isinf isfinite signbit isposinf isneginf relu nan_to_num logit sinc deg2rad logical_not"""),
    **_of(torch.special, "entr i0e expit erf"),
    **_of(F, """relu6 elu selu celu gelu silu mish hardtanh hardsigmoid hardswish softplus logsigmoid leaky_relu
          softsign hardshrink softshrink"""),
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "elu 2": lambda x: F.elu(x, 2.0), "leaky_relu -0.5": lambda x: F.leaky_relu(x, -0.5),
    "softplus 2 5": lambda x: F.softplus(x, 2.0, 5.0), "hardtanh -0.0 2": lambda x: F.hardtanh(x, -0.0, 2.0),
    "threshold": lambda x: F.threshold(x, 0.5, -0.0), "threshold 0": lambda x: F.threshold(x, 0.0, 3.0),
    "clamp min 0": lambda x: x.clamp(min=0), "clamp min -0.0": lambda x: x.clamp(min=-0.0),
    "clamp max 0": lambda x: x.clamp(max=0), "clamp max -0.0": lambda x: x.clamp(max=-0.0),
    "clamp 1 -1": lambda x: x.clamp(1, -1), "clamp nan": lambda x: x.clamp(min=NAN),
    "clamp max nan": lambda x: x.clamp(max=NAN), "clamp nan 1": lambda x: x.clamp(NAN, 1),
    "clamp_min nan": lambda x: torch.clamp_min(x, NAN), "clamp_max nan": lambda x: torch.clamp_max(x, NAN),
    "clamp_min": lambda x: torch.clamp_min(x, 0), "clamp_max": lambda x: torch.clamp_max(x, 0),
    "logit 1e-6": lambda x: torch.logit(x, 1e-6), "logit 0": lambda x: torch.logit(x, 0.0),
    **{f"pow {power}": lambda x, power=power: x**power
       for power in (0.5, -0.5, 0, 1, 2, 3, 4, 5, -1, -2, -3, 1.5, 1 / 3, INF, -INF, NAN)},
    "2 pow": lambda x: 2**x, "0 pow": lambda x: 0.0**x, "-1 pow": lambda x: torch.pow(-1.0, x),
    "add 0.0": lambda x: x + 0.0, "add -0.0": lambda x: x + -0.0, "sub 0.0": lambda x: x - 0.0,
    "sub -0.0": lambda x: x - -0.0, "mul 0": lambda x: x * 0, "mul -1": lambda x: x * -1, "div 0.0": lambda x: x / 0.0,
    "div -0.0": lambda x: x / -0.0, "1 div": lambda x: 1 / x, "0 sub": lambda x: 0.0 - x,
    "remainder": lambda x: x % 2, "remainder -2.5": lambda x: x % -2.5, "remainder 0.0": lambda x: x % 0.0,
    "fmod": lambda x: torch.fmod(x, 2), "floor_divide": lambda x: x // 2, "floor_divide 0.0": lambda x: x // 0.0,
    "div trunc": lambda x: torch.div(x, 2, rounding_mode="trunc"), "remainder inf": lambda x: x % INF,
    "where -0.0": lambda x: torch.where(x > 0, x, -0.0), "masked_fill -0.0": lambda x: x.masked_fill(x > 1, -0.0),
    "nan_to_num": lambda x: torch.nan_to_num(x, 1.0, 2.0, 3.0), "to bool": lambda x: x.bool(),
    "to f32": lambda x: x.float(), "to bf16": lambda x: x.bfloat16(), "to f16": lambda x: x.half(),
    "xlogy": lambda x: torch.xlogy(x, 2.0), "0 xlogy": lambda x: torch.xlogy(0.0, x),
    "cumsum of one": lambda x: x[:, None].cumsum(1), "sum of one": lambda x: x[:, None].sum(1),
    "amax of one": lambda x: x[:, None].amax(1), "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
}  # fmt: skip
BINARY: dict[str, Function] = {
    **_of(torch, """add sub mul div atan2 hypot nextafter copysign fmod remainder floor_divide maximum minimum fmax fmin
          pow eq lt ge xlogy logaddexp heaviside max min"""),
    "div floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "div trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "clamp min": lambda x, y: torch.clamp(x, min=y), "clamp max": lambda x, y: torch.clamp(x, max=y),
    "where": lambda x, y: torch.where(x > y, x, y), "addcmul": lambda x, y: torch.addcmul(x, x, y, value=2.0),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y, value=2.0), "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "smooth_l1_loss": lambda x, y: F.smooth_l1_loss(x, y, reduction="none"),
    "huber_loss": lambda x, y: F.huber_loss(x, y, reduction="none"),
    "mse_loss": lambda x, y: F.mse_loss(x, y, reduction="none"),
}  # fmt: skip


def specials(dtype: torch.dtype) -> torch.Tensor:
    info = torch.finfo(dtype)
    values = [0.0, 1.0, 0.5, 0.25, 2.0, 3.0, 1.5, 2.5, INF, NAN, info.max, info.tiny, info.tiny / 2, info.tiny / 8,
              info.eps, 1 - info.eps / 2, 1 + info.eps, 6.0, 20.5, 88.9, 709.9, 1000.0, 1e5, 3e7, 1e20, 1e-3, 1e-10,
              4.0, math.pi, math.pi / 2, 0.3, 104.5, 0.9]
    there = torch.tensor(values, dtype=torch.float64)
    return torch.cat([there, -there]).to(dtype)


def pairs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    info = torch.finfo(dtype)
    values = [0.0, 1.0, 0.5, 2.0, 3.0, INF, NAN, info.max, info.tiny / 4, 2.5]
    there = torch.tensor([*values, *(-x for x in values)], dtype=torch.float64).to(dtype)
    a, b = torch.meshgrid(there, there, indexing="ij")
    return a.reshape(-1), b.reshape(-1)


def each(x: torch.Tensor) -> torch.Tensor:
    """Every value so often that vectors are of one value."""
    return x.repeat_interleave(64, 0)


def answers(function: Function, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Eager's: of a dense vector, with strides, of vectors of one value each."""
    return [function(*given), function(*[torch.stack([x, x], -1)[:, 0] for x in given]),
            function(*[each(x) for x in given])[::64]]


def exact(function: Function, given: Sequence[torch.Tensor], rounded: bool) -> list[torch.Tensor]:
    """In float64, and where `rounded`, half precision in float32."""
    kinds = [torch.float64] + [torch.float32] * (rounded and given[0].dtype in HALVES)
    return [function(*[x.to(kind) for x in given]) for kind in kinds]


def is_one_of(found: torch.Tensor, answers: list[torch.Tensor], exact: list[torch.Tensor]) -> torch.Tensor:
    assert {(found.dtype, found.shape)} == {(one.dtype, one.shape) for one in answers}
    right = torch.zeros_like(found, dtype=torch.bool)
    if not found.is_floating_point():
        return sum((found == one for one in answers), right)
    info, own = torch.finfo(found.dtype), found.double()
    for one in [*answers, *(one.to(found.dtype) for one in exact)]:
        wanted = one.double()
        sign = torch.signbit(own) == torch.signbit(wanted)
        near = (own - wanted).abs() <= NEAR[found.dtype] * wanted.abs()
        right |= (own.isnan() & wanted.isnan()) | ((own == wanted) & sign) | (own.isfinite() & (own != 0) & near)
        right |= sign & ((own - wanted).abs() <= 4 * info.tiny * info.eps)
    for true in exact:
        for one in answers:
            right |= own.isfinite() & ((own - true.double()).abs() <= 1.5 * (one.double() - true.double()).abs())
    return right


def wrong(name: str, found: torch.Tensor, function: Function, given: Sequence[torch.Tensor],
          steps: bool) -> list[str]:
    """Of what arguments a function is not eager's; `steps`: it is made of several."""
    wanted = answers(function, given)
    right = is_one_of(found, wanted, exact(function, given, True) if steps else [])
    places = (~right.reshape(len(given[0]), -1).all(1)).nonzero()[:, 0].tolist()
    return [f"{name}({', '.join(str(x[k].item()) for x in given)}) = {found[k].tolist()}, eager "
            f"{[one[k].tolist() for one in wanted]}" for k in places]


def compiled(functions: Sequence[Function], count: int, leaves: bool = False) -> Any:
    """One program of all the functions, each of the same arguments, or of ones of its own."""
    torch._dynamo.reset()
    if leaves:
        return anyshape.compile(lambda *x: [f(*x[k * count:(k + 1) * count]) for k, f in enumerate(functions)],
                                strict=True)
    return anyshape.compile(lambda *x: [f(*x) for f in functions], strict=True)


# functions of several steps; what they subtract from each other may be nearly equal
STEPS = frozenset(("F.softsign", "sinc", "F.selu", "F.celu", "F.mish", "addcmul", "lerp", "logaddexp", "xlogy",
                   "0 xlogy", "entr", "deg2rad", "huber_loss", "smooth_l1_loss", "mse_loss",
                   "erf"))  # of subnormal numbers, which are 0 in eager's bfloat16
SLOW = [pytest.param(name, marks=pytest.mark.full) for name in ("f64", "f16")]


def forward(table: dict[str, Function], given: Sequence[torch.Tensor]) -> list[str]:
    names = [name for name, function in table.items() if not refuses(function, given)]
    fast = compiled([table[name] for name in names], len(given))
    found = []
    for results in (fast(*given), [one[::64] for one in fast(*[each(x) for x in given])]):
        for name, result in zip(names, results, strict=True):
            found += wrong(name, result, table[name], given, name in STEPS)
    return found


def refuses(function: Function, given: Sequence[torch.Tensor]) -> bool:
    """Eager PyTorch has no such operator in this dtype."""
    try:
        function(*given)
    except RuntimeError:
        return True
    return False


@pytest.mark.parametrize("kind", ["f32", "bf16", *SLOW])
def test_of_one(kind: str) -> None:
    assert not forward(UNARY, (specials(DTYPES[kind]),))


@pytest.mark.parametrize("kind", ["f32", "bf16", *SLOW])
def test_of_two(kind: str) -> None:
    assert not forward(BINARY, pairs(DTYPES[kind]))


def gradient(function: Function, number: int) -> Function:
    def derivative(gradients: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        leaves = [x.detach().requires_grad_() for x in given]
        result = function(*leaves)
        return torch.autograd.grad(result, leaves, gradients.to(result.dtype).reshape(
            [-1] + [1] * (result.dim() - 1)).expand(result.shape))[number]

    return derivative


# 2.13's eager hardsigmoid has the sixth of float32 in float64 too
NOT_BACKWARD = frozenset(("F.hardsigmoid", "to bool"))


@pytest.mark.parametrize("table", [UNARY, BINARY], ids=["of one", "of two"])
@pytest.mark.parametrize("kind", ["f32", pytest.param("bf16", marks=pytest.mark.full), *SLOW])
def test_gradients(kind: str, table: dict[str, Function]) -> None:
    """Incoming gradients are ones, both zeros, infinite and NaN."""
    dtype = DTYPES[kind]
    given = pairs(dtype) if table is BINARY else (specials(dtype),)
    incoming = torch.tensor([1.0, -2.0, 0.0, -0.0, INF, NAN], dtype=dtype)
    gradients, given = incoming.repeat(len(given[0])), [x.repeat_interleave(len(incoming)) for x in given]
    share = 1 if sampling.whole or table is BINARY else 2
    names = [name for name, f in [*table.items()][::share]
             if name not in NOT_BACKWARD and not refuses(gradient(f, 0), [gradients, *given])]
    functions, count = [table[name] for name in names], len(given)
    leaves = [x.clone().requires_grad_() for _ in names for x in given]
    results = compiled(functions, count, leaves=True)(*leaves)
    told = [gradients.to(one.dtype).reshape([-1] + [1] * (one.dim() - 1)).expand(one.shape) for one in results]
    found, bad = torch.autograd.grad(results, leaves, told), []
    for place, result in enumerate(found):
        derivative = gradient(functions[place // count], place % count)
        bad += wrong(f"d {names[place // count]}", result, derivative, [gradients, *given], True)
    assert not bad


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32], ids=str)
def test_whole_numbers(dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    there = sorted({0, 1, 2, 3, 7, 31, 63, 100, info.max, info.max - 1, info.min, info.min + 1})
    x = torch.tensor(there, dtype=dtype)
    names = [name for name, function in UNARY.items() if not refuses(function, [x])]
    found = compiled([UNARY[name] for name in names], 1)(x)
    for name, one in zip(names, found, strict=True):
        assert not wrong(name, one, UNARY[name], [x], True)


def test_zeros_of_both_signs_are_two_constants() -> None:
    """-0.0 and 0.0 are equal, and the gradient of what is filled with -0.0 is 0.0."""
    x = torch.tensor([2.0, -2.0] * 9, requires_grad=True)
    fast = anyshape.compile(lambda x: x.masked_fill(x > 1, -0.0))
    (found,) = torch.autograd.grad(fast(x).sum(), x)
    assert found.tolist() == [0.0, 1.0] * 9 and not torch.signbit(found).any()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_numbers_beside_half_precision(dtype: torch.dtype) -> None:
    """Most operators round a number to the dtype first; products and quotients by it, and thresholds, do not."""
    near = [torch.tensor(s, dtype=dtype) for s in (0.1, 0.3, 0.7, 1 / 3)]
    x = torch.stack([one.view(torch.int16) + k for one in near for k in (-1, 0, 1)]).view(dtype)
    x = torch.cat([x, -x, 7 * x])
    table: dict[str, Function] = {
        "add": lambda x: x + 0.1, "sub": lambda x: x - 0.1, "rsub": lambda x: 0.1 - x, "mul": lambda x: x * 0.3,
        "div": lambda x: x / 0.3, "remainder": lambda x: x % 0.1, "fmod": lambda x: torch.fmod(x, 0.1),
        "rremainder": lambda x: torch.remainder(0.7, x), "floor": lambda x: x // 0.7,
        "clamp": lambda x: x.clamp(0.1, 0.3),
        "threshold": lambda x: F.threshold(x, 0.1, 0.3), "softshrink": lambda x: F.softshrink(x, 0.1),
        "hardshrink": lambda x: F.hardshrink(x, 0.1), "hardtanh": lambda x: F.hardtanh(x, -0.1, 0.3),
        "lt": lambda x: x < 0.7, "eq": lambda x: x == 0.1, "pow": lambda x: x.abs()**(1 / 3), "rpow": lambda x: 0.3**x,
        "logit": lambda x: torch.logit(x, 1 / 3), "masked_fill": lambda x: x.masked_fill(x > 0.1, 0.3),
        "mul rank 0": lambda x: x * torch.tensor(0.3), "div rank 0": lambda x: x / torch.tensor(0.3),
        "add rank 0": lambda x: x + torch.tensor(0.1), "floor rank 0": lambda x: x // torch.tensor(0.7),
    }  # fmt: skip
    found = compiled(list(table.values()), 1)(x)
    for (name, function), one in zip(table.items(), found, strict=True):
        wanted = function(x)
        bound = torch.finfo(dtype).eps / 2 if name in ("pow", "rpow", "logit") else 0
        assert one.dtype == wanted.dtype
        close = (one.double() - wanted.double()).abs() <= bound * wanted.double().abs()
        assert close.all(), (name, x[~close].tolist(), one[~close].tolist(), wanted[~close].tolist())


@pytest.mark.parametrize("incoming", rest([torch.int64, torch.float32, torch.bfloat16], torch.bfloat16), ids=str)
def test_dtypes_of_gradients_of_mixed_dtypes(incoming: torch.dtype) -> None:
    """Of operators that are called with a gradient of another dtype than the input's, in one program."""
    aten = torch.ops.aten
    table = {
        "threshold": lambda g, x: aten.threshold_backward(g, x, 0.5), "mish": lambda g, x: aten.mish_backward(g, x),
        "mse": lambda g, x: aten.mse_loss_backward(g, x, x * 2, 0),
        "smooth_l1": lambda g, x: aten.smooth_l1_loss_backward(g, x, x * 2, 0, 1.0),
        "soft_margin": lambda g, x: aten.soft_margin_loss_backward(g, x, x.sign(), 0),
    }
    for dtype in (torch.float32, torch.float16):
        given = (torch.tensor([1, 2, 3, 0]).to(incoming), torch.tensor([0.0, 1.0, -1.0, 2.0], dtype=dtype))
        names = [name for name, function in table.items() if not refuses(function, given)]
        for name, one in zip(names, compiled([table[name] for name in names], 2)(*given), strict=True):
            torch.testing.assert_close(one, table[name](*given), rtol=1e-2, atol=1e-3)


# ---- where torch's decompositions differ from the operators


def permuted(*sizes: int) -> torch.Tensor:
    """With the strides of dims in the other order."""
    return torch.rand(*reversed(sizes)).permute(*reversed(range(len(sizes))))


def test_results_lie_as_the_operators_lay_them_out() -> None:
    """Decompositions lay a result out by the strides of one operand."""
    rows, images = permuted(5, 3, 4), torch.rand(2, 4, 6, 6).to(memory_format=torch.channels_last)
    wide, flat, cube = torch.rand(5, 1, 10).transpose(0, 2), torch.rand(5, 10).t(), torch.rand(5, 10, 5)
    pooled, places = F.max_pool2d(images, 2, return_indices=True)
    statistics = [torch.rand(3) for _ in range(4)]
    table: list[tuple[Function, tuple[torch.Tensor, ...]]] = [
        *((function, (wide, flat)) for function in (torch.logaddexp, torch.logaddexp2, torch.heaviside, torch.add)),
        (torch.xlogy, (cube, flat)), (torch.special.xlog1py, (cube, flat)),
        *((F.logsigmoid, (x,)) for x in (rows, images)),
        *((lambda x, m, v, a, b, training=training: F.batch_norm(x, m, v, a, b, training), (rows, *statistics))
          for training in (True, False)),
        (lambda x, *s: F.batch_norm(x.transpose(1, 2), *s).view(-1), (torch.rand(5, 4, 3), *statistics)),
        (lambda x: F.batch_norm(x, None, None, training=True), (images,)),
        (lambda x: F.batch_norm(x, None, None, training=True), (permuted(2, 3, 4, 5),)),
        (lambda x, index: F.max_unpool2d(x, index, 2), (pooled, places)),
        (lambda x: F.channel_shuffle(x, 2), (images,)),
        *((lambda x, mode=mode: F.interpolate(x, 7, mode=mode), (rows,)) for mode in ("nearest", "nearest-exact")),
        (lambda x: F.one_hot(x, 10), ((permuted(4, 3, 2) * 9).long(),)),
    ]  # fmt: skip
    torch._dynamo.reset()
    fast = anyshape.compile(lambda cases: [f(*given) for (f, _), given in zip(table, cases, strict=True)], strict=True)

    def copies() -> list[tuple[torch.Tensor, ...]]:
        return [tuple(x.clone(memory_format=torch.preserve_format) for x in given) for _, given in table]

    for number, (one, (function, _), given) in enumerate(zip(fast(copies()), table, copies(), strict=True)):
        wanted = function(*given)
        torch.testing.assert_close(one, wanted, msg=lambda text, number=number: f"{number}: {text}")
        assert one.stride() == wanted.stride(), number


def test_margin_losses_leave_out_what_is_nan() -> None:
    x = torch.tensor([[0.1, NAN, 0.3], [NAN, 1.0, 0.2], [1.0, 0.4, 0.0]])
    one, many = torch.tensor([0, 0, 1]), torch.tensor([[0, -1, 1], [1, 2, -1], [2, 0, -1]])
    table: list[Function] = [
        *(lambda x, p=p, r=r: F.multi_margin_loss(x, one, p=p, margin=0.5, weight=x.new_tensor([1.0, 2.0, 3.0]),
                                                  reduction=r)
          for p in (1, 2) for r in ("none", "mean", "sum")),
        lambda x: F.multi_margin_loss(x[2], one[2], reduction="none"),
        *(lambda x, r=r: F.multilabel_margin_loss(x, many, reduction=r) for r in ("none", "mean", "sum")),
    ]  # fmt: skip
    leaf = x.clone().requires_grad_()
    results = compiled(table, 1)(leaf)
    for function, result in zip(table, results, strict=True):
        other = x.clone().requires_grad_()
        wanted = function(other)
        torch.testing.assert_close(result, wanted, equal_nan=True)
        torch.testing.assert_close(torch.autograd.grad(result.nansum(), leaf, retain_graph=True),
                                   torch.autograd.grad(wanted.nansum(), other), equal_nan=True)
    assert results[1].isfinite()  # the mean


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1e30, 1e-30], ids=str)
def test_deviations_of_numbers_whose_squares_are_not_in_float32(dtype: torch.dtype, scale: float) -> None:
    x = (torch.randn(30, 4) * scale).to(dtype)
    table: list[Function] = [torch.std, lambda x: x.std(0), lambda x: torch.stack(torch.std_mean(x, 1)),
                             lambda x: x.std(1, correction=0)]
    for function, one in zip(table, compiled(table, 1)(x), strict=True):
        wanted = function(x)
        assert one.isfinite().all() and (one != 0).all()
        torch.testing.assert_close(one / scale, wanted / scale)


def test_what_eager_refuses_of_data_and_sizes_is_refused() -> None:
    torch._dynamo.reset()
    loss = anyshape.compile(F.binary_cross_entropy)
    x, target = torch.rand(3, 4, requires_grad=True), torch.rand(3, 4)
    torch.testing.assert_close(loss(x, target), F.binary_cross_entropy(x, target))
    torch.testing.assert_close(torch.autograd.grad(loss(x, target), x),
                               torch.autograd.grad(F.binary_cross_entropy(x, target), x))
    assert loss(torch.rand(0, 4), torch.rand(0, 4)).isnan()
    for bad in (1.5, -0.1, NAN):
        with pytest.raises(RuntimeError, match="all elements of input should be between 0 and 1"):
            loss(torch.tensor([[0.5, bad]]), torch.tensor([[0.5, 0.5]]))
    scatter = anyshape.compile(lambda x: torch.select_scatter(x, x[:, 0], 1, 2))
    for n in (4, 3, 5):
        x = torch.randn(3, n)
        assert torch.equal(scatter(x), torch.select_scatter(x, x[:, 0], 1, 2))
    for n in (2, 1):
        with pytest.raises(IndexError):
            scatter(torch.randn(3, n))


@pytest.mark.parametrize("function", [
    lambda x: torch.full(x.shape, x.shape[0] * 2**62), lambda x: torch.arange(x.shape[0]) - x.shape[0] * 2**62,
    lambda x: x.long().clamp(max=x.shape[0] * 2**62)], ids=["filled", "subtracted", "clamped"])
@pytest.mark.parametrize("limit", [{}, {"memory_limit": "50MB"}], ids=["free", "limited"])
def test_a_number_made_of_sizes_that_does_not_fit_is_refused(function, limit):
    """Eager raises an OverflowError of some kind; the kernels would wrap around in silence."""
    fast = anyshape.compile(function, strict=True, **limit)
    torch.testing.assert_close(fast(torch.ones(1)), function(torch.ones(1)))
    for rows in (4, 5):
        with pytest.raises((OverflowError, RuntimeError)):
            function(torch.ones(rows))
        with pytest.raises(anyshape.AnyShapeError, match="64 bits") as told:
            fast(torch.ones(rows))
        assert "4611686018427387904" in str(told.value)


@pytest.mark.parametrize("function", [
    lambda x: x.expand(4, x.shape[1]).unfold(0, 2, 2).unfold(1, 2, 2),
    lambda x: (x.expand(4, x.shape[1]).unfold(0, 2, 2) + 1, x.t().expand(-1, 3).unfold(0, 3, 1))],
    ids=["returned", "used"])
def test_windows_of_what_is_expanded(function):
    """What PyTorch is given is no view of the operand's one row, and its result is laid out as if it were."""
    fast = anyshape.compile(function)
    for n in (6, 4, 7):
        x = torch.randn(1, n)
        for have, want in zip(fast(x), function(x), strict=True):
            assert torch.equal(have, want) and have.stride() == want.stride()
