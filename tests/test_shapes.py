"""Calls on shapes alone: what they give has the shape, strides and memory of what the processor gives."""
from __future__ import annotations

import itertools
import operator
import warnings

import pytest
import torch
from torch.nn import functional
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo import core
from torch.utils import _pytree as pytree

import anyshape
from anyshape.frontend.capture.meta_kernels import rules
from anyshape.torch_compat.tracing import shape_propagation
from anyshape.torch_compat.tracing.shape_propagation import ANYWHERE, ANYWHERE_NAMES, shapes_only
from anyshape.torch_compat.versions.symbolic_functions import embedding_bag

ROOMS = (torch, functional, torch._C._nn)
OPS = [op for op in op_db if op.name.split(".")[-1] in ANYWHERE_NAMES and "embedding" not in op.name
       and not op.name.startswith(("masked.", "sparse.")) and op.variant_test_name not in ("complex", "without_cudnn")]
SAMPLES = 12


def tensors(value):
    return [one for one in pytree.tree_leaves(value) if isinstance(one, torch.Tensor)]


def facts(result, operands):
    """All that can be seen of a result but its numbers; a stride counts where there is something to step over."""
    memory = [one.untyped_storage()._cdata for one in operands]
    found = []
    for one in pytree.tree_leaves(result):
        if isinstance(one, torch.Tensor):
            pairs = zip(one.shape, one.stride(), strict=True)
            strides = [stride for size, stride in pairs if size != 1 and one.numel()]
            own = one.untyped_storage()._cdata
            found.append((one.shape, one.dtype, strides, [place for place, other in enumerate(memory) if other == own]))
        else:
            found.append(one)
    return found


def compare(function, arguments, keywords):
    """Whether a call was the same on shapes alone, twice (the second time it is remembered); False for one that the
    processor refuses, or whose result depends on the data."""
    known = shape_propagation.unknown_results()
    with shapes_only(rules()) as shapes, torch.inference_mode(False):
        given = pytree.tree_map_only(torch.Tensor, shapes.of, (arguments, keywords))
        versions = [one._version for one in tensors((arguments, keywords))]
        try:
            wanted = shape_propagation._applied(function, arguments, keywords)
        except (RuntimeError, TypeError, ValueError, IndexError):
            return False
        changed = [one._version != before for one, before in zip(tensors((arguments, keywords)), versions, strict=True)]
        for _ in range(2):
            try:
                found, told = shapes.call(function, *given)
            except known:
                return False
            assert facts(found, tensors(given)) == facts(wanted, tensors((arguments, keywords))), (function, arguments)
            assert [any(one is other for other in told) for one in tensors(given)] == changed
    return True


@pytest.mark.parametrize("op", OPS, ids=lambda op: f"{op.name}.{op.variant_test_name}".rstrip("."))
def test_operators_give_what_the_processor_gives(op, monkeypatch):
    # to name the test that asks for samples, torch reads the source of the whole stack: most of the time
    for module in (common_utils, core):
        monkeypatch.setattr(module, "extract_test_fn", lambda: None)
    name = op.name.split(".")[-1]
    rooms = [getattr(room, name, None) for room in ROOMS]
    functions = [name, *(one for one in rooms if callable(one) and one in ANYWHERE)]
    if f"{name}_" in ANYWHERE_NAMES:
        functions.append(f"{name}_")
    compared = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in {torch.float32, torch.int64} & op.dtypes:
            for sample in itertools.islice(op.sample_inputs("cpu", dtype), SAMPLES):
                compared += sum(compare(function, (sample.input, *sample.args), sample.kwargs) for function in functions
                                if not isinstance(function, str) or hasattr(sample.input, function))
    assert compared


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (3, 1), (0, 4), (2, 3)], ids=str)
def test_methods_give_what_the_processor_gives(shape):
    x = torch.randn(shape)
    for y in (x, x.t(), x[:, :1], x.expand(2, *shape)):
        for name, arguments in (("detach", ()), ("type_as", (x,)), ("type_as", (torch.ones(1, dtype=torch.int32),)),
                                ("size", ()), ("dim", ()), ("numel", ()), ("stride", ()), ("is_contiguous", ()),
                                ("swapaxes", (0, 1)), ("to", (torch.device("cpu"),)), ("to", ("cpu",)),
                                ("contiguous", ()), ("reshape", (-1, 1)), ("clone", ())):
            assert compare(name, (y, *arguments), {})
        assert compare(functional.dropout, (y, 0.5), {}) and compare(functional.dropout, (y, 0.5, False), {})
        assert compare(operator.getitem, (y, (slice(None), None, 0)), {}) == bool(y.shape[1])
        assert compare("index_fill", (y, 0, torch.tensor([], dtype=torch.int64), 1), {})  # no name of ANYWHERE_NAMES
    for name in ("fill_", "masked_fill_"):
        assert compare(name, (x, *([x > 0] if name == "masked_fill_" else []), 2), {})
    assert compare("copy_", (x, torch.ones(shape)), {}) and compare("unsqueeze", (x, 0), {})
    assert compare(torch.concat, ([x, x],), {}) and compare(torch.arange, (shape[0],), {})
    index = torch.zeros(shape, dtype=torch.int64)
    for lookup in (functional.embedding, embedding_bag):
        assert compare(lookup, (index, torch.ones(5, 6)), {})
    statistics = torch.ones(shape[1]), torch.ones(shape[1])
    if shape[0] > 1:
        assert compare(functional.batch_norm, (x, *statistics), {"training": True})
    assert compare(torch.conv2d, (torch.randn(1, 2, *shape), torch.randn(3, 2, 1, 1)), {}) == (0 not in shape)


def test_views_of_one_memory_stay_views_of_one_memory():
    x = torch.randn(4, 5)
    with shapes_only(rules()) as shapes:
        whole, part, other = shapes.of(x), shapes.of(x[1:, 2:]), shapes.of(torch.randn(4, 5))
        keys = [one.untyped_storage()._cdata for one in (whole, part, other)]
        assert keys[0] == keys[1] != keys[2] and part.storage_offset() == 7
        added, changed = shapes.call("erfinv_", (part,), {})  # through a fake tensor
        assert [one is part for one in changed] == [True] and added.untyped_storage()._cdata == keys[0]
        with pytest.raises(NotImplementedError, match="another shape in place"):
            shapes.call("squeeze_", (shapes.of(torch.randn(1, 2)), 0), {})


def test_what_repeats_is_asked_once(monkeypatch):
    asked = []
    original = shape_propagation.Shapes._found
    monkeypatch.setattr(shape_propagation.Shapes, "_found",
                        lambda self, function, *more: asked.append(function) or original(self, function, *more))
    with shapes_only(rules()) as shapes:
        x, y = (shapes.of(torch.randn(3, 4)) for _ in range(2))
        for one, keywords in ((x, {}), (y, {}), (x.t(), {}), (x, {"memory_format": torch.preserve_format}), (y, {})):
            shapes.call("clone", (one,), keywords)
        assert len(asked) == 3
        for _ in range(2):  # a change of an operand is no result to be remembered
            assert [one is x for one in shapes.call("erfinv_", (x,), {})[1]] == [True]
        assert len(asked) == 5


@pytest.mark.parametrize("p, training", [(0.1, False), (0.0, True)])
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_a_dropout_that_drops_nothing_hands_on_its_operand(monkeypatch, p, training, needs_gradient):
    monkeypatch.setenv("ANYSHAPE_DEFER", "0")

    def function(x):
        first = x.sin()
        second = functional.dropout(first, p, training)
        first += 1
        third = second[:, 1:]
        third *= 2
        return first * 2, second * 3

    fast = anyshape.compile(function)
    for rows in (5, 3, 1):
        x = torch.randn(rows, 4, requires_grad=needs_gradient)
        torch.testing.assert_close(fast(x), function(x))
    assert not fast.explain().fallbacks and fast.explain().graphs == 1
    through_torch = torch.compile(function, backend="anyshape", dynamic=True)
    torch.testing.assert_close(through_torch(x), function(x))
