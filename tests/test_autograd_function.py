"""A compiled forward and backward as one function of autograd (frontend/capture/autograd_function.py) do what torch's
wrapper did."""
from __future__ import annotations

import contextvars
import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn

import anyshape
from anyshape.base.errors import Unsupported
from anyshape.frontend.capture import autograd_function
from anyshape.frontend.programs import double_backward
from anyshape.runtime.context.process_context import shared_context
from anyshape.torch_compat.versions.autocast import casting, casts
from counting import calls

pytestmark = pytest.mark.usefixtures("quick_collections")


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def trained(target, *inputs):
    """A compiled `target` whose backward has run, so that torch has compiled it."""
    fast = anyshape.compile(target, strict=True)
    sum(value.sum() for value in results_of(fast(*inputs)) if value.requires_grad).backward()
    for value in inputs:
        value.grad = None
    if isinstance(target, nn.Module):
        target.zero_grad()
    return fast


def results_of(returned):
    return returned if isinstance(returned, tuple) else (returned,)


def is_ours(result) -> bool:
    return type(result.grad_fn)._forward_cls.__module__ == autograd_function.__name__


def gradients(module, x):
    module.zero_grad()
    y = module(x)
    y.square().sum().backward()
    found = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    return [y.detach(), *found]


def same(found, wanted) -> None:
    for one, other in zip(found, wanted, strict=True):
        if one is None or other is None:
            assert one is other
        else:
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_gradients_are_eagers_at_every_size():
    net = perceptron()
    fast = trained(net, torch.randn(3, 8))
    assert is_ours(fast(torch.randn(3, 8)))
    for rows in (3, 1, 17, 4):
        x = torch.randn(rows, 8)
        same(gradients(fast, x), gradients(net, x))
    assert len(fast.programs) == 2


def test_until_the_first_backward_torch_has_the_call():
    net = perceptron()
    fast = anyshape.compile(net, strict=True)
    first, second = fast(torch.ones(3, 8)), fast(torch.ones(2, 8))
    assert not is_ours(first) and not is_ours(second)
    second.sum().backward()
    first.sum().backward()
    assert is_ours(fast(torch.ones(3, 8)))


def test_parameters_that_are_frozen_or_replaced():
    net = perceptron()
    fast = trained(net, torch.randn(3, 8))
    x = torch.randn(4, 8)
    net[0].weight.requires_grad_(False)
    same(gradients(fast, x), gradients(net, x))
    net[0].weight.requires_grad_(True)
    same(gradients(fast, x), gradients(net, x))
    net[2].weight = nn.Parameter(torch.randn(8, 8))
    same(gradients(fast, x), gradients(net, x))
    net[2].weight.data = torch.randn(8, 8).t()
    same(gradients(fast, x), gradients(net, x))


def test_no_grad_and_inference_mode_inside_of_training():
    net = perceptron()
    fast = trained(net, torch.randn(3, 8))
    x = torch.randn(4, 8)
    with torch.no_grad():
        assert not fast(x).requires_grad
    with torch.inference_mode():
        assert fast(x).is_inference()
    assert is_ours(fast(x))


def test_a_graph_is_kept_or_spent():
    net = perceptron()
    fast = trained(net, torch.randn(3, 8))
    x = torch.randn(4, 8)
    y = fast(x).sum()
    first = torch.autograd.grad(y, list(net.parameters()), retain_graph=True)
    same(torch.autograd.grad(y, list(net.parameters())), first)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()
    y = fast(x)
    with torch.no_grad():
        net[2].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def second_derivatives(run, net, x):
    """Of a penalty on the gradient, and a product of the Hessian with a vector; of which the weights get theirs too."""
    net.zero_grad()
    slope, = torch.autograd.grad(run(x).sum(), x, create_graph=True)
    (slope.norm(dim=1) - 1).square().mean().backward()
    weight = net[0].weight
    first, = torch.autograd.grad(run(x).square().sum(), weight, create_graph=True)
    second, = torch.autograd.grad((first * weight.detach().cos()).sum(), weight, create_graph=True)
    third, = torch.autograd.grad(second.square().sum(), weight)
    return [slope, *(p.grad for p in net.parameters()), first, second, third]


@pytest.mark.parametrize("kind", ["plain", "batch", "dropout", "inplace", "made of another"])
def test_second_derivatives_are_eagers(kind):
    between = {"batch": nn.BatchNorm1d(8), "dropout": nn.Dropout(0.3)}.get(kind, nn.Softplus())
    net = nn.Sequential(nn.Linear(8, 8), between, nn.Tanh(), nn.Linear(8, 1)).double()
    own = copy.deepcopy(net)

    def of(net):
        def run(x, y):
            if kind == "inplace":
                x = x.sin()
                x.mul_(x + 1)
            return net(x + y)
        return run

    fast, slow = anyshape.compile(of(own)), of(net)
    for rows in (5, 3, 1 if kind == "plain" else 4):
        x = torch.randn(rows, 8, dtype=torch.float64, requires_grad=True)
        results = []
        for run, module in ((fast, own), (slow, net)):
            torch.manual_seed(rows)
            other = (lambda x: x.cos()) if kind == "made of another" else torch.ones_like
            results.append(second_derivatives(lambda x, run=run, other=other: run(x, other(x)), module, x))
            results[-1] += [torch.random.get_rng_state(), *module.buffers()]
        same(*results)
    assert sum(fast._anyshape.compilation.eager.values()) > 0 and "create_graph" in str(fast.explain())
    assert len(fast.programs) == 2


def test_a_second_derivative_is_refused_where_calls_may_not_run_as_pytorch():
    net = perceptron()
    fast = trained(net, torch.randn(3, 8))
    found = torch.autograd.grad(fast(torch.ones(2, 8)).sum(), list(net.parameters()), create_graph=True)
    assert all(one.requires_grad for one in found)
    same([one.detach() for one in found],
         torch.autograd.grad(net(torch.ones(2, 8)).sum(), list(net.parameters())))
    with pytest.raises(Unsupported, match="differentiated again"):
        found[0].sum().backward()


def test_what_a_second_derivative_needs_must_not_change():
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    fast = anyshape.compile(net)
    x = torch.randn(3, 8, requires_grad=True)
    for _ in range(2):  # by torch's wrapper, and without
        slope, = torch.autograd.grad(fast(x).sum(), x, create_graph=True)
        with torch.no_grad():
            net[0].weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            slope.sum().backward()


def test_an_old_value_that_is_too_large_to_keep_has_later_calls_run_as_pytorch(monkeypatch):
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("state", torch.ones(8))

        def forward(self, x):
            self.state.mul_(0.5)
            return (x * self.state).sin().sum()

    def twice(run, x):
        slope, = torch.autograd.grad(run(x), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), x)[0]

    x = torch.randn(3, 8, requires_grad=True)
    fast, slow = anyshape.compile(Steps()), Steps()
    same([twice(fast, x), fast.state], [twice(slow, x), slow.state])
    monkeypatch.setattr(double_backward, "MOST_COPIED", 0)
    with pytest.raises(Unsupported, match="from now on its calls run as PyTorch"):
        twice(fast, x)
    slow(x)
    same([twice(fast, x), fast.state], [twice(slow, x), slow.state])


@pytest.mark.parametrize("between", [nn.Tanh, lambda: nn.BatchNorm1d(8)])
def test_a_call_that_is_not_differentiated_twice_keeps_nothing(between):
    net = nn.Sequential(nn.Linear(8, 8), between(), nn.Linear(8, 8))
    fast = anyshape.compile(net)
    results = []
    for again in (False, False, True):
        base = torch.randn(4, 8, requires_grad=True)
        x = base * 2
        seen = weakref.ref(x)
        result = fast(x)
        results.append(result)  # with its history
        if again:
            slope, = torch.autograd.grad(result.sum(), base, create_graph=True)
            slope.square().sum().backward()
            del slope, result, x, base
            results.clear()
            net.zero_grad()
            gc.collect()  # torch makes a class for such a backward, which is a circle
        else:
            del x
            result.sum().backward()
        assert seen() is None


def several(x, w):
    y = x @ w
    return y, (y > 0), y.sum(0).detach(), (y * 2).view(-1, 2), y.exp()


def test_outputs_of_all_kinds():
    x, w = torch.randn(4, 6), torch.randn(6, 8, requires_grad=True)
    fast = trained(lambda x, w: several(x, w)[3:], x, w)
    assert is_ours(fast(x, w)[0])
    fast = trained(several, x, w)
    found, wanted = fast(x, w), several(x, w)
    same([one.detach() for one in found], [one.detach() for one in wanted])
    assert [one.requires_grad for one in found] == [one.requires_grad for one in wanted]
    for pick in (0, 3, 4):
        one, = torch.autograd.grad(fast(x, w)[pick].sum(), w)
        other, = torch.autograd.grad(several(x, w)[pick].sum(), w)
        same([one], [other])
    fast(x, w)[3].mul_(2).sum().backward()  # a view that may be changed in place


def test_gradients_that_come_in_any_layout():
    net = perceptron()
    fast = trained(net, torch.randn(3, 8))
    x = torch.randn(4, 8)
    for gradient in (torch.randn(8, 4).t(), torch.ones(1, 1).expand(4, 8), torch.randn(4, 16)[:, ::2]):
        found = torch.autograd.grad(fast(x), list(net.parameters()), gradient)
        same(found, torch.autograd.grad(net(x), list(net.parameters()), gradient))


def test_hooks_and_inputs_with_gradients():
    net = perceptron()
    x = torch.randn(3, 8, requires_grad=True)
    fast = trained(net, x)
    seen = []
    y = fast(x)
    assert is_ours(y)
    y.register_hook(lambda gradient: seen.append("result") or gradient * 2)
    x.register_hook(lambda gradient: seen.append("input"))
    handle = net[0].weight.register_hook(lambda gradient: seen.append("parameter"))
    y.sum().backward()
    handle.remove()
    assert sorted(seen) == ["input", "parameter", "result"]
    found = x.grad.clone()
    x.grad = None
    (net(x).sum() * 2).backward()
    same([found], [x.grad])


def test_inputs_with_a_history_that_need_no_gradient_here():
    """Their history may be gone by the time of a later backward: autograd must not walk it."""
    def one_of_two(x, y):
        return x.detach() * 2, y * 3

    x, y = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    fast = anyshape.compile(one_of_two, strict=True)
    for _ in range(3):
        z = x.exp()
        z.sum().backward()
        fast(z, y)[1].sum().backward()
    same([y.grad], [torch.full((4,), 9.0)])


def test_deterministic_algorithms_asked_for_between_forward_and_backward():
    net = perceptron()
    fast = trained(net, torch.randn(3, 8))
    y = fast(torch.randn(3, 8))
    assert is_ours(y)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="use_deterministic_algorithms"):
            y.sum().backward()
        x = torch.randn(3, 8)
        same(gradients(fast, x), gradients(net, x))
    finally:
        torch.use_deterministic_algorithms(False)


def test_autocast_and_hooks_on_saved_tensors():
    net = perceptron()
    fast = trained(net, torch.randn(3, 8))
    x = torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert fast(x).dtype == net(x).dtype
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda value: packed.append(1) or value, lambda value: value):
        same(gradients(fast, x), gradients(net, x))
    same(gradients(fast, x), gradients(net, x))


def test_a_second_derivative_has_the_autocast_of_its_call_on_every_device():
    """What PyTorch runs again in the backward, outside of the region, runs as the call did."""
    seen = []

    @torch.library.custom_op("anyshape_tests::casting", mutates_args=())
    def told(x: torch.Tensor) -> torch.Tensor:
        seen.append(casts())
        return x.clone()

    told.register_fake(torch.empty_like)
    told.register_autograd(lambda ctx, gradient: gradient)
    fast = anyshape.compile(lambda x: told(x).sin().sum())
    x = torch.randn(4, 8, requires_grad=True)
    wanted = (("cuda", torch.bfloat16), ("privateuseone", torch.float16))
    with casting(wanted):
        found = fast(x)
    assert casts() == ()
    slope, = torch.autograd.grad(found, x, create_graph=True)
    count = len(seen)
    slope.sum().backward()
    assert len(seen) > count and set(seen[count:]) == {wanted} and casts() == ()
    same(x.grad, -x.detach().sin())


def test_context_variables_reach_an_operator_of_the_backward():
    variable = contextvars.ContextVar("variable", default="unset")
    seen = []

    @torch.library.custom_op("anyshape_tests::told", mutates_args=())
    def told(x: torch.Tensor) -> torch.Tensor:
        seen.append(variable.get())
        return x.clone()

    told.register_fake(torch.empty_like)
    told.register_autograd(lambda ctx, gradient: told(gradient) * 2)
    x = torch.randn(3, requires_grad=True)
    fast = trained(lambda x: told(x * 2), x)
    seen.clear()
    variable.set("set")
    y = fast(x)
    assert is_ours(y)
    y.sum().backward()
    assert seen == ["set", "set"]


def test_several_threads_and_forwards_in_flight():
    net = perceptron()
    fast = trained(net, torch.randn(3, 8))
    wrong = []

    def work(rows):
        for _ in range(20):
            xs = [torch.randn(rows + i, 8, requires_grad=True) for i in range(3)]
            ys = [fast(x) for x in xs]
            for x, y in reversed(list(zip(xs, ys, strict=True))):
                found, = torch.autograd.grad(y.sum(), x)
                wanted, = torch.autograd.grad(net(x).sum(), x)
                if not torch.allclose(found, wanted, atol=1e-5):
                    wrong.append(rows)

    trained(net, torch.randn(3, 8, requires_grad=True))
    threads = [threading.Thread(target=work, args=(rows,)) for rows in (2, 5, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.unguarded
def test_a_training_call_is_short():
    """Functions called, guards and autograd's own among them; through AOTAutograd's wrapper they were 250 and 198."""
    net = perceptron()
    fast = trained(net, torch.randn(3, 8))
    x = torch.randn(3, 8)
    for pool in (shared_context().kept, shared_context().temporary):
        pool.release_idle()  # a search among blocks of other programs counts too
    fast(x).sum().backward()  # which takes new blocks
    assert calls(lambda: fast(x)) < 106
    y = fast(x).sum()
    assert calls(y.backward) < 123
