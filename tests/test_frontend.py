"""The doors from PyTorch: whatever goes through them gives eager PyTorch's values, gradients, aliases and errors."""
from __future__ import annotations

import collections
import copy
import gc
import pickle
import subprocess
import sys
import types
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import anyshape
from anyshape import torch_compat
from anyshape.base.errors import ConfigError, InputError, Unsupported
from anyshape.frontend.capture import dynamo_backend, small_size_guard
from anyshape.frontend.capture.dynamo_backend import FallbackWarning
from anyshape.frontend.programs.compile_program import compile_program
from anyshape.frontend.programs.session import Compilation
from anyshape.plan.ir.home import Output, Temp
from anyshape.runtime.memory.tape import Tape
from roads import compilation_of
from sampling import rest


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def graphs(fast) -> int:
    return fast._anyshape.compilation.graphs


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def close(found, wanted, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


def check(function, *shapes: tuple[int, ...], fast=None, **settings):
    """Compiles `function` once; values, strides and gradients of float inputs equal eager's at each shape."""
    fast = fast or anyshape.compile(function, **settings)
    for shape in shapes:
        x = leaf(*shape)
        y = x.detach().clone().requires_grad_()
        wanted, found = function(x), fast(y)
        close(found, wanted)
        if wanted.numel():
            assert found.stride() == wanted.stride()
        close(torch.autograd.grad(found.sum(), y), torch.autograd.grad(wanted.sum(), x))
    return fast


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def test_one_program_for_all_sizes():
    block = Block()
    fast = anyshape.compile(block)
    for shape in [(3, 5, 8), (5, 1, 8), (1, 20, 8), (1, 1, 8), (0, 4, 8), (7, 2, 8)]:
        x = torch.randn(*shape)
        close(fast(x), block(x))
        close(torch.autograd.grad(fast(x).sum(), list(block.parameters())),
              torch.autograd.grad(block(x).sum(), list(block.parameters())))
    assert graphs(fast) == 1


def test_first_call_with_size_one_serves_all():
    fast = check(Block(), (1, 1, 8), (5, 3, 8), (1, 4, 8), (2, 1, 8))
    assert graphs(fast) == 1


def test_squeeze_of_a_size_one_is_not_the_general_program():
    def f(x):
        return x.squeeze(0) + 1
    fast = check(f, (3, 5), (1, 5), (1, 1), (5, 1), (4, 4))
    assert "squeeze has shape" in str(fast.explain())


def test_squeeze_of_a_size_that_becomes_one():
    check(lambda x: nn.functional.avg_pool2d(x, 2).squeeze(-1) + 1, (2, 3, 8, 8), (2, 3, 2, 3), (2, 3, 5, 2))
    check(lambda x: x[:, 1:].squeeze(1) * 2, (3, 5), (3, 2), (4, 3))
    fast = check(lambda x: x[:, ::2].squeeze() * 2, (3, 5), (3, 2), (2, 2), (2, 7))
    assert "squeeze has shape" in str(fast.explain())


def test_results_share_memory_with_inputs_as_in_eager():
    def f(x):
        return x.transpose(0, 1).contiguous()

    def g(x):
        y = x.transpose(0, 1).reshape(-1)
        y.add_(1)
        return x.sum() + y
    first, second = anyshape.compile(f), anyshape.compile(g)
    for shape in [(3, 4), (1, 4), (4, 1), (1, 1)]:
        x = torch.randn(shape)
        assert (first(x).data_ptr() == x.data_ptr()) == (1 in shape)
        y = x.clone()
        close(second(y), g(x))
        close(y, x)


def test_an_einsum_of_three_fixes_no_size():
    """Also where opt_einsum is there, which asks torch for the sizes as numbers."""
    torch.manual_seed(0)
    weights = torch.randn(3, 4, 6)
    fast = check(lambda x: torch.einsum("btef,efd,bte->btd", x, weights, x.sum(-1)), (7, 5, 3, 4), (1, 9, 3, 4),
                 (0, 2, 3, 4), (2, 1, 3, 4), strict=True)
    assert compilation_of(fast).graphs == 1


class Heads(nn.Module):
    """Attention by matmul, folding of heads, an einsum, a recurrent cell, cut weights: operators that ask for 1."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 24)
        self.cell = nn.LSTMCell(8, 8)
        self.places = nn.Parameter(torch.randn(9, 9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, _ = x.shape
        q, k, v = self.mix(x).view(batch, time, 3, 2, 4).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) + self.places[:time, :time]
        y = torch.einsum("bhts,bhsd->bthd", scores.softmax(-1), v).reshape(batch, time, 8)
        state, _ = self.cell(y.mean(1))
        return y + state[:, None]


@pytest.mark.parametrize("first", rest([(3, 5, 8), (1, 5, 8), (3, 1, 8)], (3, 5, 8), (3, 1, 8)))
def test_operators_that_ask_for_one(first):
    fast = check(Heads(), first, (1, 1, 8), (2, 9, 8), (1, 4, 8), (5, 1, 8), (0, 3, 8), (4, 4, 8))
    assert graphs(fast) == 1 and not fast._anyshape.compilation.fallbacks


def test_convolutions_of_any_batch():
    fast = check(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 3, 2, 1)), (3, 3, 5, 5), (1, 3, 4, 7), (17, 3, 3, 3),
                 (2, 3, 1, 1))
    assert graphs(fast) == 1


def test_a_condition_given_as_a_flag():
    def f(x):
        causal = x.shape[-2] > 1 and x.shape[-1] == 4
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=causal)
    fast = check(f, (2, 5, 4), (2, 1, 4), (3, 7, 4), (1, 1, 4))
    assert not fast._anyshape.compilation.fallbacks


@pytest.mark.parametrize("f", [
    lambda x: (lambda skip: x * 2 if skip else x * 3)(x.dim() == 2 and not (True and x.shape[1] == 1)),
    lambda x: x * int(x.shape[1] == 1),
    lambda x: x.sum(1, keepdim=not (True and x.shape[1] == 1)),
    lambda x: x.sum(1, x.shape[0] > 0 and x.shape[1] == 1),
    lambda x: nn.functional.max_pool1d(input=x[None], kernel_size=x.shape[1], ceil_mode=x.shape[1] == 1),
], ids=["negation", "number", "keyword", "argument", "pool"])
def test_a_condition_that_is_kept(f):
    check(f, (3, 7), (2, 1), (1, 4), (1, 1), (5, 4))


def test_every_broadcast():
    def f(x, y):
        return x * y
    fast = anyshape.compile(f)
    for one, other in [((3, 5), (3, 5)), ((3, 1), (3, 5)), ((1, 5), (3, 5)), ((1, 1), (4, 4)), ((4, 4), (1, 1)),
                       ((2, 2), (2, 1)), ((7, 1), (7, 1)), ((0, 3), (1, 3)), ((1, 3), (1, 3))]:
        x, y = torch.randn(one), torch.randn(other)
        close(fast(x, y), f(x, y))


def test_python_branch_on_a_size():
    def f(x):
        return x * 2 if x.shape[0] == 1 else x.sum(0)
    check(f, (3, 4), (1, 4), (5, 1), (1, 1))


@pytest.mark.parametrize("f", [
    lambda x: x.sum() + 5 if x.shape[0] == 0 else x.sum(),
    lambda x: x.sum() + 5 if not x.shape[0] * x.shape[1] else x.sum(),
    lambda x: x.sum() + 5 if x.numel() == 0 else x.sum(),
    lambda x: x.sum() + 5 if not len(x) else x.sum(),
    lambda x: x.sum() + 5 if x.shape[0] > 0 else x.sum(),
    lambda x: x.sum() / max(x.shape[0], 1),
])
def test_python_branch_on_no_elements(f):
    fast = anyshape.compile(f)
    for shape in [(3, 4), (0, 4), (1, 4), (2, 0), (5, 2)]:
        close(fast(torch.ones(shape)), f(torch.ones(shape)))


def test_wrong_shapes_raise_as_in_eager():
    fast = anyshape.compile(lambda x, y: x @ y)
    with pytest.raises(Exception, match="shape"):
        fast(torch.randn(3, 4), torch.randn(5, 6))
    close(fast(torch.eye(2), torch.eye(2)), torch.eye(2))
    close(fast(torch.ones(1, 1), torch.ones(1, 3)), torch.ones(1, 3))
    assert graphs(fast) == 1
    assert "fallback" not in str(fast.explain())


def test_settings_are_restored():
    check(lambda x: x.sin(), (3, 4))
    import torch.fx.experimental._config as symbolic_config
    assert symbolic_config.use_duck_shape and not symbolic_config.backed_size_oblivious


def test_buffers_are_mutated():
    class Count(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(4))
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            self.seen.add_(x.detach().sum(0))
            return x * self.weight + self.seen
    eager, other = Count(), Count()
    fast = anyshape.compile(other)
    for rows in (3, 1, 5):
        x = torch.randn(rows, 4)
        close(fast(x), eager(x))
        close(other.seen, eager.seen)
        close(torch.autograd.grad(fast(x).sum(), other.weight), torch.autograd.grad(eager(x).sum(), eager.weight))
        close(other.seen, eager.seen)


def test_batch_norm_statistics():
    eager = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    other = copy.deepcopy(eager)
    fast = anyshape.compile(other)
    for shape in [(2, 3, 8, 8), (3, 3, 7, 9)]:
        x = torch.randn(shape)
        close(fast(x), eager(x))
        close(other[1].running_var, eager[1].running_var)
    fast.eval()
    eager.eval()
    close(fast(x), eager(x))
    assert other[1].num_batches_tracked == 2


@pytest.mark.parametrize("tracked", [False, True])
def test_inputs_are_mutated(tracked):
    def f(x, y):
        x.mul_(y)
        x[:, 0].zero_()
        return x.sum() * y
    fast = anyshape.compile(f)
    for rows in (3, 1, 4):
        y = leaf(rows, 4)
        base = torch.randn(rows, 4, requires_grad=tracked)
        one, two = base * 1, base * 1
        wanted, found = f(one, y), fast(two, y)
        close(found, wanted)
        close(two, one)
        close(torch.autograd.grad(found.sum(), y), torch.autograd.grad(wanted.sum(), y))


def test_sin_in_place_keeps_the_old_value():
    def f(x):
        return x.sin_()
    fast = anyshape.compile(f)
    x = leaf(3, 4)
    wanted, = torch.autograd.grad(f(x * 1).sum(), x)
    found, = torch.autograd.grad(fast(x * 1).sum(), x)
    close(found, wanted)


def test_outputs_that_alias():
    def f(x):
        y = x + 1
        return x.view(-1), x, y, y[0], y.t()
    fast = anyshape.compile(f)
    for shape in [(3, 4), (1, 4), (2, 1)]:
        x = torch.randn(shape)
        found = fast(x)
        close(found, f(x))
        assert found[0].data_ptr() == x.data_ptr()
        assert found[1] is x
        assert found[3].untyped_storage().data_ptr() == found[2].untyped_storage().data_ptr()
        assert [part.stride() for part in found] == [part.stride() for part in f(x)]


def test_strides_of_inputs():
    def f(x):
        return x.transpose(0, 1) * 2 + x.sum()
    fast = anyshape.compile(f)
    wide = torch.randn(8, 10)
    for x in (wide, wide.t(), wide[::2, 1::3], wide[:1].expand(5, 10), torch.randn(1, 6), torch.randn(6, 1).t()):
        close(fast(x), f(x))
        assert fast(x).stride() == f(x).stride()


@pytest.mark.parametrize("rank", (4, 5))
def test_what_is_stacked_lies_as_eagers(rank):
    def function(x):
        return [torch.stack([x + 1, x * 2], dim) for dim in range(rank + 1)]
    fast = anyshape.compile(function)
    last = torch.channels_last if rank == 4 else torch.channels_last_3d
    for count in (2, 5):
        x = torch.randn((count, *range(3, 2 + rank))).to(memory_format=last)
        for found, wanted in zip(fast(x), function(x), strict=True):
            assert torch.equal(found, wanted) and found.stride() == wanted.stride()


def test_channels_last():
    block = nn.Conv2d(3, 6, 3, padding=1)
    fast = anyshape.compile(block)
    for shape in [(2, 3, 8, 8), (1, 3, 5, 7)]:
        x = torch.randn(shape).to(memory_format=torch.channels_last)
        close(fast(x), block(x))


def test_tied_weights():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, 8)
            self.head = nn.Linear(8, 11, bias=False)
            self.head.weight = self.table.weight

        def forward(self, index):
            return self.head(self.table(index))
    model = Tied()
    fast = anyshape.compile(model)
    for shape in [(2, 3), (1, 7), (4, 1)]:
        index = torch.randint(0, 11, shape)
        close(torch.autograd.grad(fast(index).sin().sum(), model.table.weight),
              torch.autograd.grad(model(index).sin().sum(), model.table.weight))
    assert len(list(fast.parameters())) == 1


def test_autocast():
    block = Block()

    def f(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = block.up(x)
        return block.down(y.float()) + x
    converted = anyshape.compile(f)
    for shape in [(3, 8), (1, 8), (9, 8)]:
        x = torch.randn(shape)
        close(converted(x), f(x), 2e-2)
    fast = anyshape.compile(block)
    x = torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, wanted = fast(x), block(x)
    assert found.dtype == wanted.dtype
    close(found, wanted, 2e-2)


def test_refused_call_leaves_no_autocast_behind():
    def f(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (x @ x.t()).squeeze(0)
    fast = anyshape.compile(f)
    for shape in [(3, 8), (1, 8)]:
        x = torch.randn(shape)
        close(fast(x), f(x), 2e-2)
        assert not torch.is_autocast_enabled("cpu")
    assert "squeeze has shape" in str(fast.explain())


def test_functional_gradients_take_sizes_of_one():
    head = nn.Linear(4, 1)
    weights = {name: one.detach() for name, one in head.named_parameters()}

    def of_each_row(x):
        def loss(weights, row):
            return torch.func.functional_call(head, weights, (row,)).square().sum()
        return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
    fast = anyshape.compile(of_each_row, strict=True)
    for shape in [(3, 4), (1, 4), (2, 4)]:
        x = torch.randn(shape)
        close(list(fast(x).values()), list(of_each_row(x).values()))
    assert fast._anyshape.compilation.graphs == 1

    def squeezed(x):
        return torch.func.grad(lambda z: z.sin().squeeze(0).square().sum())(x)
    fast = anyshape.compile(squeezed)
    for shape in [(3, 4), (1, 4), (2, 4)]:
        x = torch.randn(shape)
        close(fast(x), squeezed(x))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):  # nothing has stayed that forbids them
        head(torch.randn(2, 4))


def test_a_hook_on_a_gradient_is_there_at_sizes_of_one():
    def f(x):
        y = x * 2
        y.register_hook(lambda gradient: gradient * 3)
        return y.sin()
    fast = anyshape.compile(f, strict=True)
    for shape in [(3, 4), (1, 4), (5, 1)]:
        x = torch.randn(shape, requires_grad=True)
        close(torch.autograd.grad(fast(x).sum(), x), torch.autograd.grad(f(x).sum(), x))
    assert fast._anyshape.compilation.graphs == 1


def test_vmap_and_functional_gradients():
    def f(x):
        return torch.func.vmap(lambda row: row.sin().sum())(x) + torch.func.grad(lambda z: (z ** 2).sum())(x).sum()
    fast = anyshape.compile(f)
    for shape in [(3, 4), (1, 4), (5, 1)]:
        x = torch.randn(shape)
        close(fast(x), f(x))


def test_data_dependent_sizes():
    def f(x):
        kept = x[x > 0]
        return kept * 2, int(x.argmax()) + x.sum()
    fast = anyshape.compile(f)
    for shape in [(3, 4), (1, 4), (5, 7)]:
        x = torch.randn(shape)
        close(fast(x), f(x))


def test_dropout_follows_the_seed():
    block = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 8))
    fast = anyshape.compile(block)
    for rows in (3, 1, 6):
        x = torch.randn(rows, 8)
        torch.manual_seed(7)
        wanted = torch.autograd.grad(block(x).sum(), block[0].weight)
        torch.manual_seed(7)
        found = torch.autograd.grad(fast(x).sum(), block[0].weight)
        close(found, wanted)


def test_mixed_requires_grad():
    def f(x, y, z):
        return (x * y).sum() + (y * z).exp().sum()
    fast = anyshape.compile(f)
    x, y, z = leaf(3, 4), torch.randn(3, 4), leaf(3, 4)
    close(torch.autograd.grad(fast(x, y, z), (x, z)), torch.autograd.grad(f(x, y, z), (x, z)))
    y.requires_grad_()
    close(torch.autograd.grad(fast(x, y, z), y), torch.autograd.grad(f(x, y, z), y))
    assert not fast(x.detach(), y.detach(), z.detach()).requires_grad


def test_outputs_without_gradients():
    def f(x):
        return x.exp(), x.argmax(-1), x.detach() * 2, None, 3
    fast = anyshape.compile(f)
    x = leaf(3, 4)
    found = fast(x)
    close(found[:3], f(x)[:3])
    assert found[3:] == (None, 3)
    assert [part.requires_grad for part in found[:3]] == [True, False, False]


def test_several_forwards_before_a_backward():
    block = Block()
    fast = anyshape.compile(block)
    inputs = [leaf(rows, 8) for rows in (3, 5, 1, 7)]
    losses = [fast(x).sin().sum() for x in inputs]
    for x, loss in reversed(list(zip(inputs, losses, strict=True))):
        close(torch.autograd.grad(loss, x), torch.autograd.grad(block(x).sin().sum(), x))


def test_gradients_accumulate():
    eager = Block()
    other = copy.deepcopy(eager)
    fast = anyshape.compile(other)
    for rows in (3, 5):
        x = torch.randn(rows, 8)
        fast(x).sum().backward()
        eager(x).sum().backward()
    for one, two in zip(other.parameters(), eager.parameters(), strict=True):
        close(one.grad, two.grad)


def test_retain_graph():
    fast = anyshape.compile(Block())
    x = leaf(3, 8)
    loss = fast(x).sum()
    first, = torch.autograd.grad(loss, x, retain_graph=True)
    second, = torch.autograd.grad(loss, x)
    close(first, second)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, x)


def test_change_in_place_before_backward_raises():
    fast = anyshape.compile(lambda x, y: x * y)
    x, y = leaf(3, 4), torch.randn(3, 4)
    out = fast(x, y)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    out = anyshape.compile(lambda x: x.exp())(x)
    out.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_tape_is_dropped_with_its_output():
    fast = anyshape.compile(lambda x: x.exp())
    gc.disable()
    try:
        out = fast(leaf(3, 4))
        tape = weakref.ref(out.grad_fn.opaque_objects[0])
        assert isinstance(tape(), Tape)
        assert not tape().released
        del out
        assert tape() is None
    finally:
        gc.enable()


def test_tape_releases_its_owner_once():
    class Owner:
        count = 0

        def release(self) -> None:
            self.count += 1
    owner = Owner()
    tape = Tape([torch.ones(2), 5], owner=owner)
    assert tape.open()[1] == 5
    tape.close()
    assert owner.count == 0
    tape.release()
    tape.release()
    del tape
    assert owner.count == 1
    Tape([1], owner=owner)
    assert owner.count == 2


@pytest.mark.parametrize("mode", [torch.no_grad, pytest.param(torch.inference_mode, marks=pytest.mark.skipif(
    torch_compat.version() < (2, 13), reason="AOTAutograd before torch 2.13 fails there, in torch's backends too"))])
def test_functions_that_switch_gradients_off_are_one_program(mode):
    class Scores(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 6)

        @mode()
        def forward(self, x):
            return self.linear(x).sin().softmax(-1).unsqueeze(0)

    for target in (Scores(), mode()(lambda x: x.sin() * 2 + x.sum(-1, keepdim=True))):
        fast = anyshape.compile(target, strict=True)
        for rows in (3, 4, 5):
            x = torch.randn(rows, 4)
            found, wanted = fast(x), target(x)
            close(found, wanted)
            assert not found.requires_grad
        assert len(fast.programs) == 1


def test_no_grad_and_inference_mode():
    block = Block()
    fast = anyshape.compile(block)
    x = torch.randn(3, 8)
    with torch.no_grad():
        assert not fast(x).requires_grad
    assert fast(x).requires_grad
    with torch.inference_mode():
        close(fast(torch.randn(3, 8) * 0 + x), block(x))


def test_graph_breaks():
    def f(x):
        y = x.sin()
        torch._dynamo.graph_break()
        return y * y.shape[0]
    fast = check(f, (3, 4), (1, 4), (6, 1))
    assert graphs(fast) >= 2
    with pytest.raises(Exception, match="graph_break"):
        anyshape.compile(f, fullgraph=True)(torch.randn(3, 4))


def mark(*values) -> None:
    print(end="")  # torch's tracer cuts a program here


class Cut(nn.Module):
    """A convolution, cut in its middle, that is called by a module that is cut too, and gives an object back."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        y = self.inner(x.relu())
        mark()
        return y.sigmoid() * x


@pytest.mark.skipif(not torch_compat.has("torch._dynamo.variables.builtin.GetAttrBuiltinVariable"),
                    reason="torch 2.13 brought it")
def test_names_of_torchs_classes_and_functions_end_no_graph():
    linear = nn.Linear(4, 4)

    def forward(x):
        kind = type(linear.weight)
        if kind.__module__.startswith("torch.") and "Param" in kind.__name__:
            return linear(x) * len(kind.__qualname__) + len(torch.sin.__name__)
        return x

    fast = anyshape.compile(forward, strict=True)
    for n in (3, 1, 5):
        x = torch.randn(n, 4)
        close(fast(x), forward(x))
    assert graphs(fast) == 1


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cut, self.norm = Cut(), nn.GroupNorm(1, 3)

    def forward(self, x):
        y = self.norm(self.cut(x))
        holder = types.SimpleNamespace(y=y, n=x.shape[0])
        mark()
        holder.y = holder.y * holder.n
        mark()
        return holder.y.flatten(1).mean(1)


def test_parts_between_graph_breaks_are_one_program_each_for_all_sizes():
    model = Outer()
    fast = anyshape.compile(copy.deepcopy(model), defer=False)
    for shape in ((4, 3, 6, 5), (1, 3, 6, 5), (0, 3, 6, 5), (7, 3, 11, 2), (1, 3, 1, 9), (2, 3, 1, 1)):
        x = leaf(*shape)
        y = x.detach().clone().requires_grad_()
        wanted, found = model(x), fast(y)
        close(found, wanted, 1e-4)
        found.square().sum().backward(), wanted.square().sum().backward()
        close(y.grad, x.grad, 1e-4)
        assert graphs(fast) == 5, fast.explain()
    for mine, theirs in zip(fast.parameters(), model.parameters(), strict=True):
        close(mine.grad, theirs.grad, 1e-3)


def test_a_part_that_other_sizes_make_another_program_is_refused_by_its_guards():
    def squeezes(x):
        y = x.sin()
        mark()
        return y.squeeze(0) * x.shape[0]

    def shares(x):  # a copy, but where a size is 1
        y = x.t()
        mark()
        y.reshape(-1).add_(1)
        mark()
        return y * 2

    for function, parts, others in ((squeezes, 2, 1), (shares, 3, 2)):
        fast = anyshape.compile(function, defer=False)
        for rows, more in ((4, 0), (1, 1), (0, others), (5, others), (1, others), (2, others)):
            x = torch.randn(rows, 3)
            y = x.clone()
            close(fast(y), function(x))
            close(y, x)
            assert graphs(fast) <= parts + more, fast.explain()
        assert "dim" in fast.explain().fallbacks[-1].reason


def test_a_part_that_cannot_be_traced_for_all_sizes_is_traced_as_before(monkeypatch):
    from anyshape.frontend.capture import frame_callback

    def f(x):
        y = x.exp()
        mark()
        return y * x.shape[0]

    def fail(*arguments):
        raise RuntimeError("no coverage, on purpose")

    monkeypatch.setattr(frame_callback, "PartCoverage", fail)
    fast = anyshape.compile(f, defer=False)
    for rows in (4, 1, 5):
        x = torch.randn(rows, 3)
        close(fast(x), f(x))
    assert graphs(fast) == 4 and "on purpose" in str(fast.explain())
    assert [one.stage for one in fast.explain().fallbacks].count("a part for all sizes") == 2


def test_fullgraph():
    check(Block(), (3, 8), (5, 8), fullgraph=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int32,
                                   torch.int64, torch.uint8, torch.bool])
def test_dtypes(dtype):
    def f(x):
        return (x + x) * x, x.sum(0), x.t()
    fast = anyshape.compile(f)
    for shape in [(3, 4), (1, 4)]:
        x = (torch.randn(shape) * 3).abs().to(dtype)
        found = fast(x)
        close(found, f(x))
        assert [part.dtype for part in found] == [part.dtype for part in f(x)]


def test_numbers_as_inputs():
    def f(x, scale, count):
        return x * scale + count
    fast = anyshape.compile(f)
    for scale, count in [(0.5, 1), (2.0, 3), (0.5, 0), (1.0, 1)]:
        x = torch.randn(3, 4)
        close(fast(x, scale, count), f(x, scale, count))


def test_saved_sizes():
    def f(x):
        return x.mean(0) * x.shape[1] + x.new_ones(x.shape[1])
    check(f, (3, 4), (5, 7), (2, 1), (1, 3))


def test_attention():
    def f(x):
        q = x.view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).reshape(x.shape)
    check(f, (2, 5, 8), (3, 7, 8), (1, 6, 8), (2, 1, 8))


def test_cross_entropy_and_embedding():
    table = nn.Embedding(9, 4)

    def f(index):
        return nn.functional.cross_entropy(table(index), index % 4)
    fast = anyshape.compile(f)
    for count in (5, 1, 8):
        index = torch.randint(0, 9, (count,))
        close(fast(index), f(index))
        close(torch.autograd.grad(fast(index), table.weight), torch.autograd.grad(f(index), table.weight))


def test_module_wrapper_is_the_module():
    block = Block()
    fast = anyshape.compile(block)
    assert isinstance(fast, Block)
    assert list(fast.state_dict()) == list(block.state_dict())
    fast.eval()
    assert not block.training
    fast.extra = 3
    assert block.extra == 3
    assert type(pickle.loads(pickle.dumps(fast))) is Block
    twin = copy.deepcopy(fast)
    x = torch.randn(2, 8)
    close(twin(x), block(x))
    assert twin.up.weight is not block.up.weight
    fast.double()
    assert block.up.weight.dtype == torch.float64
    seen = []
    block.register_forward_hook(lambda module, inputs, output: seen.append(1))
    close(fast(x.double()), block(x.double()))
    assert len(seen) == 2


def test_decorator_on_function_and_method():
    @anyshape.compile(check=1)
    def f(x):
        """Doubles."""
        return x * 2
    assert f.__doc__ == "Doubles."
    assert f.__name__ == "f"
    close(f(torch.ones(3)), torch.full((3,), 2.0))

    class Scale:
        factor = 3

        @anyshape.compile
        def run(self, x):
            return x * self.factor
    close(Scale().run(torch.ones(2)), torch.full((2,), 3.0))
    assert f.programs
    assert "1 program" in str(f.explain())


def test_unknown_setting_and_target():
    with pytest.raises(ConfigError, match="unknown setting"):
        anyshape.compile(Block(), speed=11)
    with pytest.raises(ConfigError, match="cannot compile a int"):
        anyshape.compile(3)


def broken(request):
    raise ValueError("no such op")


def compiled_by(compiler, strict: bool):
    compilation = Compilation(anyshape.Config.make(strict=strict), compiler)
    fast = torch.compile(
        Block(), dynamic=True,
        backend=lambda gm, inputs: dynamo_backend.compile_fx(gm, inputs, compilation=compilation))
    return fast, compilation


def test_failure_inside_the_compiler_falls_back():
    fast, compilation = compiled_by(broken, strict=False)
    x = leaf(3, 8)
    with pytest.warns(dynamo_backend.FallbackWarning, match="no such op"):
        loss = fast(x).sum()
    with pytest.warns(dynamo_backend.FallbackWarning, match="no such op"):
        loss.backward()
    wanted = torch.autograd.grad(fast._orig_mod(x).sum(), x)[0]
    close(x.grad, wanted)
    assert [one.name.split(".")[1] for one in compilation.fallbacks] == ["forward", "backward"]


def test_compiler_cannot_add_guards():
    def compiler(request):
        first = next(node for node in request.gm.graph.nodes if isinstance(node.meta.get("val"), torch.SymInt))
        assert first.meta["val"] > 2
        return compile_program(request)
    fast, compilation = compiled_by(compiler, strict=False)
    with pytest.warns(dynamo_backend.FallbackWarning):
        fast(torch.randn(3, 8))
    assert len(compilation.fallbacks) == 1


def test_other_compilations_do_not_count_for_the_limit_on_programs(monkeypatch):
    from anyshape.torch_compat.tracing import settings as torch_trace
    monkeypatch.setitem(torch_trace.DYNAMO_SETTINGS, "recompile_limit", 2)

    def f(x):
        return x.exp() * 2
    compiled = [anyshape.compile(f, strict=True) for _ in range(4)]
    for fast in compiled:
        close(fast(torch.ones(3)), f(torch.ones(3)))
    assert [len(fast.programs) for fast in compiled] == [1, 1, 1, 1]


def test_failure_of_the_backward_only():
    def compiler(request):
        return broken(request) if request.role == "backward" else compile_program(request)
    fast, compilation = compiled_by(compiler, strict=False)
    x = leaf(3, 8)
    with pytest.warns(dynamo_backend.FallbackWarning):
        fast(x).sum().backward()
    close(x.grad, torch.autograd.grad(fast._orig_mod(x).sum(), x)[0])
    assert [one.name.split(".")[1] for one in compilation.fallbacks] == ["backward"]


class SavedAsGradient(torch.autograd.Function):
    """Its gradients are what it saved, as it is and turned."""

    @staticmethod
    def forward(ctx, x, w):
        product = x @ w
        ctx.save_for_backward(product)
        return product.sin()

    @staticmethod
    def backward(ctx, gradient):
        (product,) = ctx.saved_tensors
        return product, product.t()


@pytest.mark.parametrize("fails", [False, True])
def test_gradients_never_lie_in_memory_that_the_next_call_takes(fails):
    def compiler(request):
        return broken(request) if fails and request.role == "backward" else compile_program(request)
    fast = anyshape.compile(lambda x, w: SavedAsGradient.apply(x, w), strict=False)
    fast._anyshape.compilation.compiler = compiler
    x, w = leaf(4, 4), leaf(4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dynamo_backend.FallbackWarning)
        found = torch.autograd.grad(fast(x, w).sum(), (x, w))
    later = fast(leaf(4, 4), w)
    wanted = (x @ w).detach()
    close(found[0], wanted)
    close(found[1], wanted.t())
    del later


def test_strict_raises(monkeypatch):
    from anyshape.frontend.callables import compiled_callable
    monkeypatch.setattr(compiled_callable, "compile_program", broken)
    with pytest.raises(anyshape.AnyShapeError, match="no such op"):
        anyshape.compile(Block(), strict=True)(torch.randn(3, 8))


def test_backend_of_torch_compile():
    block = Block()
    fast = torch.compile(block, backend=dynamo_backend.backend, dynamic=True, options={"check": 1})
    x = torch.randn(3, 8)
    close(fast(x), block(x))
    with pytest.raises(Exception, match="unknown setting"):
        torch.compile(Block(), backend=dynamo_backend.backend, options={"speed": 1})(x)


def test_request_describes_the_tape():
    seen = {}

    def compiler(request):
        seen[request.role] = request
        return compile_program(request)
    fast, _ = compiled_by(compiler, strict=True)
    fast(leaf(3, 8)).sum().backward()
    forward, backward = seen["forward"], seen["backward"]
    tape = forward.gm.graph.output_node().args[0][-1]
    assert tape.name == "tape"
    assert len(tape.args) == forward.tape.size == backward.tape.size
    assert set(forward.tape.borrowed) <= set(range(forward.tape.size))
    first = next(iter(backward.gm.graph.nodes))
    assert (first.op, first.target) == ("placeholder", "tape")
    assert forward.partner is not None
    assert forward.static_inputs


@pytest.mark.filterwarnings("ignore::anyshape.torch_compat.TorchVersionWarning")
def test_plain_saved_tensors_where_torch_has_no_opaque_objects():
    with torch_compat.pretending("torch._opaque_base.OpaqueBase"):
        fast = check(Block(), (3, 8), (1, 8), (5, 8))
        assert graphs(fast) == 1


def test_small_sizes_are_checked_once_per_pattern_and_ones_beforehand(monkeypatch):
    calls = []
    original = small_size_guard.PredictedShapes.differs

    def counted(self, inputs, strides):
        calls.append(tuple(inputs[-1].shape))
        return original(self, inputs, strides)
    monkeypatch.setattr(small_size_guard.PredictedShapes, "differs", counted)
    fast = anyshape.compile(lambda x: x + 1)
    for shape in [(3, 4), (1, 4), (1, 9), (1, 1), (1, 1), (5, 1), (0, 4), (0, 5)]:
        fast(torch.randn(shape))
    assert calls == [(0, 4)]
    calls.clear()
    fast = anyshape.compile(lambda *given: sum(x.sum() for x in given))  # too many sizes for all combinations
    for shape in [(3, 4), (1, 4), (5, 1), (1, 1)]:
        fast(torch.randn(shape), torch.randn(5, 6))
    assert calls == [(5, 6)]
    calls.clear()
    fast = anyshape.compile(lambda x: x.squeeze(0) + 1)  # another program where the size is 1, foreseen or not
    for shape in [(3, 4), (5, 1), (1, 4)]:
        torch.testing.assert_close(fast(x := torch.randn(shape)), x.squeeze(0) + 1)
    assert calls == [(1, 4)]
    calls.clear()
    windows = anyshape.compile(lambda x: x.reshape(x.shape[0], x.shape[1] // 4, 4, x.shape[2] // 2, 2).sum((2, 4)))
    for shape in [(3, 12, 8), (3, 4, 8), (5, 8, 2), (5, 4, 2), (1, 4, 6), (1, 4, 2)]:  # one window, by its pixels
        x = torch.randn(shape)
        torch.testing.assert_close(windows(x), x.unflatten(2, (-1, 2)).unflatten(1, (-1, 4)).sum((2, 4)))
    assert not calls
    pairs = anyshape.compile(lambda x: (x.reshape(x.shape[0] // 2, 2).squeeze(0) + 1, None)[0])  # foreseen to differ
    for shape in [(8,), (2,), (6,)]:
        x = torch.randn(shape)
        torch.testing.assert_close(pairs(x), x.reshape(-1, 2).squeeze(0) + 1)
    assert calls == [(2,)]
    assert "squeeze has shape [2]" in pairs.explain().to_dict()["fallbacks"][0]["reason"]
    assert "squeeze has shape [4]" in fast.explain().to_dict()["fallbacks"][0]["reason"]


class Exported(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, x, options):
        self.seen.add_(1)
        return {"y": self.linear(x) * options["scale"] + self.scratch, "count": self.seen * 1}


def exported():
    model = Exported().eval()
    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(model, (torch.randn(5, 4), {"scale": torch.ones(5, 1)}),
                                  dynamic_shapes=({0: rows}, {"scale": {0: rows}}))
    return model, anyshape.compile(program, strict=True)


def test_exported_program():
    model, fast = exported()
    for index, rows in enumerate((5, 9, 64)):
        x, scale = torch.randn(rows, 4), torch.randn(rows, 1)
        found = fast(x, {"scale": scale})
        assert set(found) == {"y", "count"}
        close(found["y"], model.linear(x) * scale + 1)
        assert found["count"] == index + 1


@pytest.mark.parametrize(("x", "scale", "words"), [
    (torch.randn(5, 4).double(), torch.ones(5, 1), "has dtype torch.float64"),
    (torch.randn(5, 4, 1), torch.ones(5, 1), "has 3 dimensions"),
    (torch.randn(5, 3), torch.ones(5, 1), "dimension 1, is 3"),
    (torch.randn(5, 4), torch.ones(6, 1), "dimension 0, is 6"),
    (torch.randn(65, 4), torch.ones(65, 1), "is 65"),
    (3, torch.ones(5, 1), "is a int"),
])
def test_exported_program_refuses(x, scale, words):
    _, fast = exported()
    with pytest.raises(InputError, match=words) as caught:
        fast(x, {"scale": scale})
    assert "do:" in str(caught.value)
    assert float(fast.state[-1].sum() if fast.state[-1].dim() == 0 else 0) == 0


def test_exported_program_wrong_number_of_arguments():
    _, fast = exported()
    with pytest.raises(InputError, match="nesting"):
        fast(torch.randn(5, 4))


def test_exported_program_writes_its_input():
    class Writes(nn.Module):
        def forward(self, x, y):
            x.add_(y)
            return x * 2
    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(Writes(), (torch.zeros(3, 2), torch.ones(3, 2)),
                                  dynamic_shapes=({0: rows}, {0: rows}))
    fast = anyshape.compile(program)
    x = torch.zeros(5, 2)
    close(fast(x, torch.ones(5, 2)), torch.full((5, 2), 2.0))
    close(x, torch.ones(5, 2))


def test_import_is_light():
    code = "import sys, anyshape; assert 'torch' not in sys.modules; assert anyshape.compile and anyshape.Config"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_warning_free():
    with warnings.catch_warnings():
        warnings.simplefilter("error", dynamo_backend.FallbackWarning)
        check(Block(), (3, 8))


def homes(fast):
    """Home -> names of buffers of the only program."""
    (program,) = fast.programs
    found = collections.defaultdict(set)
    for buffer in program.compiled.plan.buffers:
        found[type(buffer.home)].add(buffer.name)
    return found


def test_values_lie_in_the_result_before_it_is_written():
    fast = anyshape.compile(lambda x, w: x @ w @ w @ w)
    for rows in (300, 5, 1, 0):
        x, w = torch.randn(rows, 64), torch.randn(64, 64) / 8
        torch.testing.assert_close(fast(x, w), x @ w @ w @ w, rtol=1e-4, atol=1e-5)
    used = homes(fast)
    assert (len(used[Output]), len(used[Temp])) == (1, 1), used  # the first product lies in the result


def test_kernels_write_over_what_pytorch_made_and_over_nothing_else():
    conv = torch.nn.Conv2d(3, 8, 3, padding=1)

    def images(x):
        return torch.relu(conv(torch.relu(conv(x)[:, :3] * 2))) + 1
    fast = anyshape.compile(images)
    with torch.no_grad():
        for size in (8, 13, 1):
            x = torch.randn(2, 3, size, size + 1)
            torch.testing.assert_close(fast(x), images(x), rtol=1e-4, atol=1e-5)


def test_what_a_custom_operator_keeps_is_not_written():
    kept = torch.arange(12.0).reshape(3, 4)

    @torch.library.custom_op("anyshape_test::kept_table", mutates_args=())
    def kept_table(x: torch.Tensor) -> torch.Tensor:
        return kept

    @kept_table.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    fast = anyshape.compile(lambda x: (torch.exp(kept_table(x)) @ x.T).sum(0))
    x = torch.ones(3, 4)
    for _ in range(2):
        torch.testing.assert_close(fast(x), (torch.exp(torch.arange(12.0).reshape(3, 4)) @ x.T).sum(0))
    assert torch.equal(kept, torch.arange(12.0).reshape(3, 4))


@torch.library.custom_op("anyshape_tests::scaled_by_rows", mutates_args=())
def scaled_by_rows(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    SEEN.append((x.stride(), x.data_ptr()))
    return x.contiguous() * scale


@scaled_by_rows.register_fake
def _(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape)


SEEN: list[Any] = []


def test_a_custom_operator_gets_operands_as_they_were_traced():
    weight = torch.randn(6, 4)

    def function(x):
        return scaled_by_rows(weight.t(), x[0] + 1) + scaled_by_rows(x[:, ::2].contiguous(), x[0, 0])[0, 0]

    fast = anyshape.compile(function, strict=True)
    for rows in (3, 1, 5):
        x = torch.randn(rows, 6)
        SEEN.clear()
        torch.testing.assert_close(fast(x), function(x))
        (view, where), (dense, _) = SEEN[:2] if SEEN[0][0] == (1, 4) else SEEN[1::-1]
        assert view == (1, 4) and where == weight.data_ptr(), "a transposed operand is not copied"
        assert rows == 1 or dense == (3, 1), "one that was dense in the trace is dense"


class Remembers(nn.Module):
    """Attention to all it has seen, which is in buffers that grow."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 24)
        self.register_buffer("keys", torch.zeros(1, 0, 8))
        self.register_buffer("values", torch.zeros(1, 0, 8))

    def forward(self, x):
        queries, keys, values = self.project(x).chunk(3, -1)
        self.keys, self.values = torch.cat([self.keys, keys], 1), torch.cat([self.values, values], 1)
        return nn.functional.scaled_dot_product_attention(queries, self.keys, self.values)


def test_buffers_that_grow_need_no_program_for_each_size():
    """torch takes sizes of buffers as numbers, as those of parameters."""
    module = nn.ModuleList([Remembers(), Remembers()])
    module.forward = lambda x: module[1](module[0](x))
    plain = copy.deepcopy(module)
    plain.forward = lambda x: plain[1](plain[0](x))
    fast = anyshape.compile(module, strict=True, defer=False)
    with torch.no_grad():
        for length in (5, 1, 1, 3, 1, 7, 1):
            x = torch.randn(1, length, 8)
            close(fast(x), plain(x))
    assert graphs(fast) == 2
    assert "was 0, now 5" in str(fast.explain())


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_run_as_pytorch(layout):
    """Also where other calls are compiled, of which Dynamo's guards ask what a nested tensor with strides has not."""
    net = nn.Linear(3, 3)
    ragged = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(1, 3)], layout=layout)
    fast = anyshape.compile(lambda x: torch.relu(net(x)))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", FallbackWarning)
        warnings.filterwarnings("ignore", "Guards may run slower")  # torch's, of Python 3.13.0
        for x in (ragged, torch.randn(4, 3), ragged, torch.randn(1, 3), torch.randn(0, 3), ragged):
            found, wanted = fast(x), torch.relu(net(x))
            close(found.unbind(), wanted.unbind()) if x.is_nested else close(found, wanted)
    assert [one.category for one in said] == [FallbackWarning]
    assert "nested tensor" in str(said[0].message)
    with pytest.raises(Unsupported, match="nested tensor"):
        anyshape.compile(lambda x: net(x) * 2, strict=True)(ragged)


def test_attention_over_nothing_is_zero():
    """PyTorch's fused kernel divides by the lengths; eager PyTorch does not call it at such sizes."""
    def attend(x, y):
        queries, keys = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (x, y))
        return torch.nn.functional.scaled_dot_product_attention(queries, keys, keys)

    fast = anyshape.compile(attend, strict=True)
    for batch, own, other in ((2, 3, 5), (2, 0, 5), (2, 3, 0), (0, 3, 5), (2, 0, 0), (2, 4, 6)):
        pairs = []
        for function in (fast, attend):
            torch.manual_seed(0)
            x, y = (torch.randn(batch, n, 8, requires_grad=True) for n in (own, other))
            result = function(x, y)
            result.sum().backward()
            pairs.append((result, x.grad, y.grad))
        for found, wanted in zip(*pairs, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_size_of_0_is_not_traced_for_all_sizes():
    """The backward of cumprod takes another path there, which PyTorch chooses by the number."""
    fast = anyshape.compile(lambda x: x.cumprod(1), strict=True)
    for shape in ((2, 3, 4), (2, 0, 3), (0, 0, 0), (3, 5, 2)):
        x = torch.randn(shape, requires_grad=True)
        torch.testing.assert_close(fast(x), x.cumprod(1))
        (found,), (wanted,) = (torch.autograd.grad(function(x).sum(), x) for function in (fast, lambda x: x.cumprod(1)))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


# ---- holders of values, and graphs that break


class Named(types.SimpleNamespace):
    @property
    def total(self):
        return self.loss + self.out.sum()


class Plain:
    def __init__(self, loss, out):
        self.loss, self.out = loss, out


HOLDERS = {
    "namespace": lambda loss, out, given: types.SimpleNamespace(loss=loss, out=out),
    "made by names": lambda loss, out, given: types.SimpleNamespace(**dict(zip("ba", (loss, out), strict=True))),
    "nested": lambda loss, out, given: types.SimpleNamespace(a=[types.SimpleNamespace(loss=loss)], c={"x": out}),
    "changed": lambda loss, out, given: setattr(given, "count", given.count + 1) or setattr(given, "w", loss) or given,
    "a subclass": lambda loss, out, given: Named(loss=Named(loss=loss, out=out).total, out=out * given.count),
    "attributes": lambda loss, out, given: vars(types.SimpleNamespace(loss=loss, out=out)),
    "attributes of an object": lambda loss, out, given: Plain(loss, out).__dict__,
}


def flat(value, place=""):
    """What is in holders, in order: the place, the class, and the value where it is a tensor."""
    inner = vars(value) if isinstance(value, types.SimpleNamespace) else value
    yield place, type(value), value if isinstance(value, torch.Tensor) else None
    if isinstance(inner, (dict, list, tuple)):
        for name, one in inner.items() if isinstance(inner, dict) else enumerate(inner):
            yield from flat(one, f"{place}/{name}")


@pytest.mark.skipif(not torch_compat.has("torch._dynamo.variables.DunderDictVariable"), reason="torch 2.12 brought it")
@pytest.mark.parametrize("name", HOLDERS)
def test_holders_of_values_end_no_graph(name):
    def forward(x, given):
        out = torch.relu(x * 2 - 1)
        return HOLDERS[name](out.sum(), out, given)

    fast = anyshape.compile(forward, strict=True)
    for n in (3, 1, 5):
        x, given, other = torch.randn(n, 4), *(types.SimpleNamespace(w=torch.ones(()), count=2) for _ in range(2))
        found, wanted = list(flat([fast(x, given), given])), list(flat([forward(x, other), other]))
        assert [one[:2] for one in found] == [one[:2] for one in wanted]
        close([one[2] for one in found if one[2] is not None], [one[2] for one in wanted if one[2] is not None])
    assert graphs(fast) == 1
