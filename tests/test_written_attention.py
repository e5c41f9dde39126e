"""Attention that a model writes out becomes one operator, wherever that gives the same numbers; else it is left."""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anyshape
import sampling
from anyshape.base import counters
from anyshape.base.errors import ConfigError
from comparing import differs, no_worse
from roads import compilation_of
from sampling import rest, some

HEADS, SIZE = 4, 8
LEAST = torch.finfo(torch.float32).min
INFINITE = float("-inf")


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


class Attend(nn.Module):
    """Queries of `x` [batch, length, 32] and keys and values of `y`, by a form of attention, and a product after it.

    The heads come as [batch, 4, length, 8], and go as the form gives them: [batch, length, 32].
    """

    def __init__(self, form: Callable[..., Any]) -> None:
        super().__init__()
        width = HEADS * SIZE
        # a bias of keys adds the same to all scores of a row: its gradient is 0, and all that is found are roundings
        self.query, self.keys = nn.Linear(width, width), nn.Linear(width, 2 * width, bias=False)
        self.bias = nn.Parameter(torch.randn(HEADS, 1, 1))
        self.register_buffer("left", torch.tril(torch.ones(80, 80)).view(1, 1, 80, 80))
        self.form = form

    def forward(self, x, y, mask=None):
        k, v = self.keys(y).chunk(2, -1)
        q, k, v = (one.view(one.shape[0], one.shape[1], HEADS, SIZE).transpose(1, 2) for one in (self.query(x), k, v))
        return self.form(self, q, k, v, mask)


def joined(y):
    """[batch, heads, length, size] to [batch, length, width]."""
    return y.transpose(1, 2).contiguous().view(y.shape[0], y.shape[2], HEADS * SIZE)


def plain(self, q, k, v, mask):
    return joined(F.softmax(q @ k.transpose(-2, -1) / math.sqrt(SIZE), dim=-1) @ v)


def gpt(self, q, k, v, mask):
    length = q.shape[2]
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    scores = scores.masked_fill(self.left[:, :, :length, :length] == 0, INFINITE)
    return joined(F.dropout(F.softmax(scores, dim=-1), 0.0, self.training) @ v)


def gpt_older(self, q, k, v, mask):
    length = q.shape[-2]
    scores = torch.matmul(q, k.transpose(-1, -2)) / (v.size(-1) ** 0.5)
    scores = torch.where(self.left[:, :, :length, :length].bool(), scores, torch.full([], LEAST, dtype=scores.dtype))
    return joined(torch.matmul(nn.functional.softmax(scores, dim=-1).type(v.dtype), v))


def bert(self, q, k, v, mask):
    scores = torch.matmul(q, k.transpose(2, 3)) * SIZE**-0.5
    scores = scores + (1.0 - mask[:, None, None, :].to(q.dtype)) * torch.finfo(q.dtype).min
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return joined(nn.functional.dropout(weights, p=0.1, training=False) @ v)


def padded(self, q, k, v, mask):
    scores = (q / math.sqrt(SIZE)) @ k.mT
    scores.masked_fill_(mask[:, None, None, :] == 0, -1e9)
    return joined(scores.softmax(-1) @ v)


def padded_infinite(self, q, k, v, mask):
    scores = q @ (k * SIZE**-0.5).permute(0, 1, 3, 2)
    scores = scores.masked_fill(mask[:, None, None, :] == 0, INFINITE)
    return joined(torch.softmax(scores, 3) @ v)


def added_infinite(self, q, k, v, mask):
    bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask == 0, INFINITE)
    return joined((q @ k.mT * 0.5 + bias[:, None, None, :]).softmax(-1) @ v)


def triangle(self, q, k, v, mask):
    length = q.shape[2]
    above = torch.triu(torch.full((length, length), INFINITE, dtype=q.dtype), diagonal=1)
    return joined(F.softmax(q @ k.transpose(-1, -2) * 0.3 + above, -1) @ v)


def compared(self, q, k, v, mask):
    places = torch.arange(q.shape[2])
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * 0.3
    scores = torch.where(places[None, :] <= places[:, None], scores, INFINITE)
    return torch.einsum("bhqk,bhkd->bqhd", scores.softmax(-1), v).flatten(2)


def both(self, q, k, v, mask):
    left = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    scores = q @ k.mT * 0.3
    scores = scores.masked_fill(~left, INFINITE).masked_fill(mask[:, None, None, :] == 0, INFINITE)
    return joined(scores.softmax(-1) @ v)


def both_finite(self, q, k, v, mask):
    left = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    seen = left & (mask != 0)[:, None, None, :]
    return joined((q @ k.mT * 0.3).masked_fill(seen.logical_not(), torch.finfo(q.dtype).min).softmax(-1) @ v)


def einsum_lengths_first(self, q, k, v, mask):
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k).mul(0.3).softmax(dim=-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).reshape(q.shape[0], q.shape[1], HEADS * SIZE)


def einsum_dots(self, q, k, v, mask):
    weights = torch.einsum("...qd,...kd->...qk", q * 0.3, k).softmax(dim=-1)
    return joined(torch.einsum("...qk,...kd->...qd", weights, v))


def one_key_head(self, q, k, v, mask):
    weights = torch.einsum("bhqd,bkd->bhqk", q, k[:, 0]).div(3.0).softmax(-1)
    return joined(torch.einsum("bhqk,bkd->bhqd", weights, v[:, 0]))


def grouped(self, q, k, v, mask):
    k, v = (one[:, :2, None].expand(-1, -1, 2, -1, -1).reshape(*q.shape[:2], -1, SIZE) for one in (k, v))
    return joined((q @ k.transpose(2, 3) * 0.3).softmax(-1) @ v)


def repeated(self, q, k, v, mask):
    k, v = (one[:, :2].repeat_interleave(2, dim=1) for one in (k, v))
    return joined((q @ k.transpose(2, 3) * 0.3).softmax(-1) @ v)


def bmm(self, q, k, v, mask):
    rows = q.shape[0] * HEADS
    q, k, v = (one.reshape(rows, -1, SIZE) for one in (q, k, v))
    y = torch.bmm(torch.softmax(torch.bmm(q * 0.3, k.transpose(1, 2)), dim=-1), v)
    return joined(y.view(-1, HEADS, y.shape[1], SIZE))


def bloom(self, q, k, v, mask):
    batch, length = q.shape[0], q.shape[2]
    q, k, v = (one.reshape(batch * HEADS, -1, SIZE) for one in (q, k, v))
    slopes = torch.arange(1, HEADS + 1, dtype=q.dtype).repeat(batch)[:, None, None]
    slopes = slopes * torch.arange(k.shape[1], dtype=q.dtype)
    scores = slopes.baddbmm(batch1=q, batch2=k.transpose(1, 2), beta=1.0, alpha=0.3)
    scores = scores.view(batch, HEADS, length, -1).to(torch.float)
    scores = scores + ((mask - 1.0) * 1e9)[:, None, None, :]
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype).view(batch * HEADS, length, -1)
    return joined(torch.bmm(weights, v).view(batch, HEADS, length, SIZE))


def t5(self, q, k, v, mask):
    scores = torch.matmul(q, k.transpose(3, 2))
    scores += self.bias * torch.arange(k.shape[2], dtype=q.dtype)
    return joined(torch.matmul(F.softmax(scores.float(), dim=-1).type_as(scores), v))


def temperature(self, q, k, v, mask):
    return joined((q @ k.mT * self.bias.abs()).softmax(-1) @ v)


def windows(self, q, k, v, mask):
    q, k, v = (one.unsqueeze(1).expand(-1, 3, -1, -1, -1).contiguous() for one in (q, k, v))
    return joined(((q @ k.transpose(-2, -1)) * 0.3).softmax(-1).matmul(v).sum(1))


def returned(self, q, k, v, mask):
    weights = (q @ k.mT * 0.3).softmax(-1)
    return joined(weights @ v), weights


def dropped(self, q, k, v, mask):
    return joined(F.dropout((q @ k.mT * 0.3).softmax(-1), 0.5) @ v)


def capped(self, q, k, v, mask):
    return joined((torch.tanh(q @ k.mT / 5.0) * 5.0).softmax(-1) @ v)


def near_fill(self, q, k, v, mask):
    return joined((q @ k.mT).masked_fill(mask[:, None, None, :] == 0, -3.0).softmax(-1) @ v)


def narrow_values(self, q, k, v, mask):
    y = (q @ k.mT).softmax(-1) @ v[..., :4]
    return y.transpose(1, 2).flatten(2)


def over_heads(self, q, k, v, mask):
    return joined((q @ k.mT).softmax(1) @ v)


def kept_scores(self, q, k, v, mask):
    scores = q @ k.mT
    return joined(scores.softmax(-1) @ v) + scores.sum()


def changed_on_the_way(self, q, k, v, mask):
    q = q * 0.5
    scores = q @ k.mT
    q.add_(1.0)
    return joined(scores.softmax(-1) @ v + q)


def stopped(self, q, k, v, mask):
    with torch.no_grad():
        weights = (q @ k.mT).softmax(-1)
    return joined(weights @ v)


@dataclass(frozen=True)
class Form:
    """A way to write attention. cross: queries and keys may differ in length. masked: it takes a mask.

    trained: the reason, where it is not fused in training. refused: where it never is.
    """

    function: Callable[..., Any]
    cross: bool = True
    masked: bool = False
    trained: str = ""
    refused: str = ""
    eager_trains: bool = True

    def __str__(self) -> str:
        return self.function.__name__


FORMS = (
    Form(plain), Form(gpt, cross=False), Form(gpt_older, cross=False), Form(bert, masked=True),
    Form(padded, masked=True), Form(padded_infinite, masked=True), Form(added_infinite, masked=True),
    Form(triangle, cross=False), Form(compared, cross=False), Form(both, masked=True), Form(both_finite, masked=True),
    Form(einsum_lengths_first), Form(einsum_dots), Form(one_key_head), Form(grouped), Form(repeated), Form(bmm),
    Form(bloom, masked=True), Form(temperature), Form(windows),
    Form(t5, trained="needs a gradient"),
    Form(stopped, trained="gradients are stopped"),
    Form(returned, refused="its probabilities are used elsewhere too, by what is returned"),
    Form(dropped, refused="dropout"), Form(capped, refused="a step between the product and the softmax"),
    Form(near_fill, masked=True, refused="a number that scores may reach"),
    Form(narrow_values, refused="head sizes are 8"),
    Form(over_heads, refused="not over the last dim"), Form(kept_scores, refused="its scores are used elsewhere"),
    Form(changed_on_the_way, refused="changed in place", eager_trains=False),
)
FUSED = tuple(form for form in FORMS if not form.refused)
SHAPES = ((2, 7, 7), (1, 5, 5), (2, 70, 70))
CROSS = ((1, 13, 2), (2, 5, 67))


def inputs_of(form: Form, shape: tuple[int, int, int], dtype: torch.dtype, lost: bool = False) -> list[Any]:
    """x, y and a mask of 0 and 1; `lost`: one that leaves the first of the batch no key."""
    batch, queries, keys = shape
    inputs: list[Any] = [torch.randn(batch, n, HEADS * SIZE, dtype=dtype) for n in (queries, keys)]
    if form.masked:
        mask = (torch.rand(batch, keys) > 0.3).to(dtype)
        mask[:, :1] = 1.0
        if lost:
            mask[:1] = 0.0
        inputs.append(mask)
    return inputs


def results_of(model: Any, inputs: list[Any], training: bool) -> list[Any]:
    """Results, and in training the gradients of inputs and parameters."""
    if not training:
        with torch.no_grad():
            found = model(*inputs)
        return list(found) if isinstance(found, tuple) else [found]
    given = [one.clone().requires_grad_() if at < 2 else one for at, one in enumerate(inputs)]
    found = model(*given)
    results = list(found) if isinstance(found, tuple) else [found]
    weight = torch.linspace(0.5, 1.5, results[0].numel(), dtype=results[0].dtype).view(results[0].shape)
    (results[0] * weight).sum().backward()
    found = [one.detach() for one in results] + [one.grad for one in given[:2]] + [
        p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def notes_of(fast: Any) -> list[Any]:
    """What was found in the graphs so far."""
    return [note for notes in compilation_of(fast).attentions.values() for note in notes]


def near(found: Any, wanted: Any, exact: Any) -> bool:
    """As eager's result, or as near to that in float64: at its worst place, or in half precision, where the places of
    the errors are chance, over all."""
    if not differs(found, wanted) or no_worse(found, wanted, exact):
        return True
    finite = exact.isfinite() & wanted.isfinite()
    same = torch.equal(found[~finite].nan_to_num(), wanted[~finite].nan_to_num())
    own, allowed = ((one.double() - exact)[finite].square().mean().sqrt() for one in (found, wanted))
    return same and bool(own <= 1.5 * allowed) and bool(allowed > 1e-4 * exact[finite].square().mean().sqrt())


def is_fused(fast: Any) -> bool:
    """Whether programs call the operator, ours or PyTorch's."""
    return any("attention" in call.target for one in fast.explain().programs for call in (*one.libraries, *one.externs))


def check(fast: Any, model: Any, inputs: list[Any], training: bool) -> None:
    """Results and gradients are eager's, or as near to those in float64."""
    wanted = results_of(model, inputs, training)
    exact = None
    for number, (one, other) in enumerate(zip(results_of(fast, inputs, training), wanted, strict=True)):
        reason = differs(one, other)
        if reason:
            if exact is None:
                exact = results_of(model.double(), [value.double() for value in inputs], training)
                model.to(inputs[0].dtype)
            assert near(one, other, exact[number]), (number, [list(value.shape) for value in inputs], reason)


@pytest.mark.parametrize(("training", "form"), [  # results in training are looked at too
    pytest.param(training, form, id=f"{form} {'training' if training else 'inference'}",
                 marks=() if training or i % 3 == 0 or not form.eager_trains else pytest.mark.full)
    for training in (False, True) for i, form in enumerate(FORMS)])
def test_forms(form, training):
    if training and not form.eager_trains:
        pytest.skip("eager PyTorch refuses it too")
    model = Attend(form.function)
    fast = anyshape.compile(model, strict=True)
    reason = form.refused or (form.trained if training else "")
    for shape in SHAPES + (CROSS if form.cross else ()):
        if form.function is dropped:
            with torch.no_grad():
                fast(*inputs_of(form, shape, torch.float32))
        else:
            check(fast, model, inputs_of(form, shape, torch.float32), training)
    notes = notes_of(fast)
    assert notes and all(note.taken == (not reason) and reason in note.what for note in notes), notes
    assert compilation_of(fast).graphs == 1 or form.function is gpt
    text = str(fast.explain())
    left = reason and (training or form.eager_trains)  # a graph of ours has no changes in place, and its pass fuses it
    assert ("left as it is: " if left else "fused: one call") in text
    assert is_fused(fast) == (not left)


# the form says what is matched, the dtype what runs it: each of both, and masks whose number is the dtype's
QUICK = {plain: (torch.float64,), bert: (torch.bfloat16,), triangle: (torch.float16,)}


@pytest.mark.parametrize(("form", "dtype"), [
    pytest.param(one, dtype, marks=() if dtype in QUICK.get(one.function, ()) else pytest.mark.full,
                 id=f"{one} {dtype}")
    for one in FUSED if one.function is not bloom for dtype in (torch.float64, torch.bfloat16, torch.float16)])
def test_dtypes(form, dtype):
    if dtype == torch.float16 and form.function in (gpt_older, bert, both_finite, padded):
        pytest.skip("float16 cannot hold the number of its mask")
    model = Attend(form.function).to(dtype)
    fast = anyshape.compile(model, strict=True)
    for shape in ((2, 7, 7), (1, 33, 33)):
        for training in (False, True) if sampling.whole or form.function is bert else (True,):
            check(fast, model, inputs_of(form, shape, dtype), training)


@pytest.mark.parametrize("form", rest([plain, gpt, bert, padded_infinite, einsum_lengths_first, grouped, bmm],
                                      bert, einsum_lengths_first, grouped), ids=lambda form: form.__name__)
def test_autocast(form):
    row = next(one for one in FORMS if one.function is form)
    model = Attend(form)
    fast = anyshape.compile(model, strict=True)
    for shape in ((2, 7, 7), (1, 33, 33)):
        inputs = inputs_of(row, shape, torch.float32)
        exact = results_of(model.double(), [one.double() for one in inputs], True)
        model.float()
        with torch.autocast("cpu", torch.bfloat16):
            wanted, found = results_of(model, inputs, True), results_of(fast, inputs, True)
        for one, other, best in zip(found, wanted, exact, strict=True):
            assert near(one, other, best)
    assert all(note.taken for note in notes_of(fast))


@pytest.mark.parametrize("training", rest([False, True], True), ids=["inference", "training"])
@pytest.mark.parametrize(("form", "dtype"), [  # in half precision a mask with a finite number, and one with an infinite
    pytest.param(one, dtype, id=f"{one} {dtype}", marks=() if dtype == torch.float32 or (
        dtype == torch.bfloat16 and one.function in (bert, padded_infinite)) else pytest.mark.full)
    for one in FUSED if one.masked and one.function is not bloom
    for dtype in (torch.float32, torch.float64, torch.bfloat16)])
def test_rows_without_a_key(form, dtype, training):
    """NaN where the program has NaN, in gradients too; the mean of the values, and no gradient of the scores, where it
    masks with a finite number."""
    model = Attend(form.function).to(dtype)
    fast = anyshape.compile(model, strict=True)
    for shape in ((2, 7, 7), (3, 40, 40), (1, 4, 4)):
        inputs = inputs_of(form, shape, dtype, lost=True)
        wanted, found = results_of(model, inputs, training), results_of(fast, inputs, training)
        exact = results_of(model.double(), [one.double() for one in inputs], training)
        model.to(dtype)
        for number, (one, other, best) in enumerate(zip(found, wanted, exact, strict=True)):
            assert torch.equal(one.isnan(), other.isnan()), (number, shape)
            assert near(one, other, best), (number, shape, differs(one, other))
    assert all(note.taken for note in notes_of(fast))


@pytest.mark.parametrize("form", rest([plain, gpt, bert, padded_infinite, triangle], bert, triangle),
                         ids=lambda form: form.__name__)
def test_what_is_no_number_goes_where_it_went(form):
    """In queries and in keys, by the same two programs, which know no values."""
    row = next(one for one in FORMS if one.function is form)
    model = Attend(form)
    fast = anyshape.compile(model, strict=True)
    for training, place, value in product((False, True), (0, 1), (float("nan"), float("inf"))):
        inputs = inputs_of(row, (2, 9, 9), torch.float32)
        inputs[place][0, 0] = value
        for one, other in zip(results_of(fast, inputs, training), results_of(model, inputs, training), strict=True):
            assert torch.equal(one.isnan(), other.isnan()), (training, place, value)


def test_sizes_of_nothing():
    for form in (triangle, padded_infinite):
        row = next(one for one in FORMS if one.function is form)
        model = Attend(form)
        fast = anyshape.compile(model)
        check(fast, model, inputs_of(row, (2, 5, 5), torch.float32), True)
        assert notes_of(fast)[0].taken
        for shape in ((0, 5, 5), (2, 0, 0), *(((2, 3, 0), (2, 0, 3)) if row.cross else ())):
            check(fast, model, inputs_of(row, shape, torch.float32), True)


def test_masks_that_leave_every_row_a_key_need_nothing_more():
    for form, wanted in ((compared, True), (padded_infinite, False)):
        row = next(one for one in FORMS if one.function is form)
        fast = anyshape.compile(Attend(form), strict=True)
        results_of(fast, inputs_of(row, (2, 7, 7), torch.float32), True)
        assert ("rows without a key" not in notes_of(fast)[0].what) == wanted, form


@pytest.mark.parametrize("make", some([
    lambda n: torch.ones(n, n).tril(-1), lambda n: torch.ones(n, n).tril()[1:], lambda n: torch.ones(n, n).triu(),
    lambda n: (torch.arange(n)[None, :] < torch.arange(n)[:, None]).float(),
    lambda n: (torch.arange(n)[:, None] <= torch.arange(n)[None, :]).float(),
    lambda n: torch.ones(n, n).tril() * 0.0, lambda n: torch.full((n, n), 0.5).tril().int()], 3, 1),
    ids=["below", "cut", "upper", "less", "exchanged", "times", "whole"])
def test_masks_that_look_like_triangles(make):
    """Each has rows without a key (or may have), which are NaN."""
    def form(self, q, k, v, mask):
        seen = make(q.shape[2])
        return joined((q[:, :, :seen.shape[0]] @ k.mT).masked_fill(seen == 0, INFINITE).softmax(-1) @ v)

    model = Attend(form)
    fast = anyshape.compile(model, strict=True)
    for training in (False, True) if sampling.whole else (True,):  # what training gives has the results, too
        inputs = inputs_of(FORMS[0], (2, 6, 6), torch.float32)
        for one, other in zip(results_of(fast, inputs, training), results_of(model, inputs, training), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert notes_of(fast)


def test_masks_that_fill_and_add_together():
    def form(self, q, k, v, mask):
        scores = (q @ k.mT).masked_fill(~torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(), LEAST)
        return joined((scores + mask[:, None, None, :]).softmax(-1) @ v)

    model = Attend(form)
    fast = anyshape.compile(model, strict=True)
    x = torch.randn(2, 6, 32)
    mask = torch.tensor([[LEAST, LEAST, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, INFINITE, LEAST, -1.0]])
    check(fast, model, [x, x, mask], False)
    check(fast, model, [x, x, mask], True)
    assert [note.taken for note in notes_of(fast)] == [True, False]
    assert "whose gradients differ" in notes_of(fast)[1].what


def test_memory_is_linear_in_the_length():
    model = Attend(gpt)
    model.left = torch.tril(torch.ones(512, 512)).view(1, 1, 512, 512)
    scores = 4 * HEADS * 512 * 512 * 4
    x = torch.randn(2, 7, 32)
    held = []
    for disable in ("", "attention"):
        torch._dynamo.reset()
        fast = anyshape.compile(model, strict=True, disable=disable)
        fast(x, x).sum().backward()
        held.append(fast.memory(y=(4, 512, 32)).bytes)
    assert held[0] < scores / 3 and held[1] > scores
    counters.reset()


def test_it_is_switched_off_by_name():
    for settings in ({"disable": "attention"}, {"disable": "cse, attention"}):
        fast = anyshape.compile(Attend(plain), strict=True, **settings)
        inputs = inputs_of(FORMS[0], (2, 7, 7), torch.float32)
        fast(*inputs)
        assert not notes_of(fast) and not is_fused(fast)
        torch._dynamo.reset()
    with pytest.raises(ConfigError, match="attentions"):
        anyshape.compile(Attend(plain), disable="attentions")


def test_torch_compile_goes_the_same_way():
    model = Attend(bert)
    fast = torch.compile(model, backend="anyshape", dynamic=True, options={"strict": True})
    row = next(one for one in FORMS if one.function is bert)
    before = anyshape.stats().get("calls", 0)
    check(fast, model, inputs_of(row, (2, 7, 7), torch.float32), True)
    check(fast, model, inputs_of(row, (3, 9, 9), torch.float32), False)
    assert anyshape.stats().get("calls", 0) >= before


def test_the_dials_of_a_compilation(tmp_path):
    model = Attend(gpt)
    inputs = inputs_of(FORMS[0], (2, 7, 7), torch.float32)
    fast = anyshape.compile(model, strict=True, check=2, dump=str(tmp_path))
    results_of(fast, inputs, True)
    text = (tmp_path / "0_forward" / "00_capture.txt").read_text()
    assert "attention(" in text
    torch._dynamo.reset()
    again = anyshape.compile(model, strict=True, edit=str(tmp_path))
    for one, other in zip(results_of(again, inputs, True), results_of(model, inputs, True), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_what_writes_into_other_tensors_is_left():
    def into_the_mask(q, k, v, mask):
        mask += q @ k.mT
        return mask.softmax(-1) @ v

    def into_a_view(q, k, v, mask):
        scores = q @ k.mT
        first = scores[:, :, :1]
        scores.masked_fill_(mask < 0, INFINITE)
        return scores.softmax(-1) @ v, first

    for form in (into_the_mask, into_a_view):
        torch._dynamo.reset()

        def run(x, mask, form=form):
            heads = x.view(x.shape[0], x.shape[1], HEADS, SIZE).transpose(1, 2)
            return form(heads, heads, heads, mask)

        fast = anyshape.compile(run, strict=True)
        x, mask = torch.randn(2, 6, 32), torch.randn(2, HEADS, 6, 6)
        mask[..., 0] = 1.0
        masks = mask.clone(), mask.clone()
        torch.testing.assert_close(fast(x, masks[0]), run(x, masks[1]), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(masks[0], masks[1])
        assert not any(note.taken for note in notes_of(fast))


def test_sums_are_multiplied_as_scores_are():
    def form(self, q, k, v, mask):
        return joined(((q @ k.mT + mask[:, None, None, :]) * 0.25 - mask[:, None, :, None] * 2.0).softmax(-1) @ v)

    def by_tensors(self, q, k, v, mask):
        return joined(((q @ k.mT + mask[:, None, None, :]) * self.bias).softmax(-1) @ v)

    for one, taken in ((form, True), (by_tensors, False)):
        torch._dynamo.reset()
        model = Attend(one)
        fast = anyshape.compile(model, strict=True)
        for length in (6, 9):
            x = torch.randn(2, length, 32)
            check(fast, model, [x, x, torch.randn(2, length) * 3], True)
        assert [note.taken for note in notes_of(fast)] == [taken]


def test_sizes_from_the_data_are_left():
    def form(x, seen):
        x = x[seen].view(-1, HEADS, SIZE).transpose(0, 1)
        return (x @ x.mT * 0.3).softmax(-1) @ x

    fast = anyshape.compile(form)
    for count in (7, 9):
        x, seen = torch.randn(count, 32), torch.arange(count) % 3 != 1
        torch.testing.assert_close(fast(x, seen), form(x, seen), rtol=1e-4, atol=1e-5)
    assert not any(note.taken for note in notes_of(fast))


def test_a_failure_of_the_search_costs_no_run(monkeypatch):
    def fails(gm, config):
        raise RuntimeError("no such luck")

    monkeypatch.setattr("anyshape.frontend.capture.dynamo_backend.attention", fails)
    model = Attend(plain)
    fast = anyshape.compile(model)
    check(fast, model, inputs_of(FORMS[0], (2, 7, 7), torch.float32), False)
    assert fast.explain().fallbacks[0].reason == "RuntimeError: no such luck"


def test_transforms_are_left():
    def one(x):
        return (x @ x.mT).softmax(-1) @ x

    fast = anyshape.compile(lambda x: torch.vmap(one)(x))
    x = torch.randn(3, 5, 8)
    torch.testing.assert_close(fast(x), torch.vmap(one)(x), rtol=1e-4, atol=1e-5)
    assert not notes_of(fast)
