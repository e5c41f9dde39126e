"""The direct door serves exactly the calls that Dynamo would serve from its cache, and lets all others by."""
from __future__ import annotations

import gc
import signal
import threading

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import anyshape
from anyshape.base.errors import InputError
from anyshape.frontend.capture.fast_dispatch import frame_locals
from anyshape.frontend.capture.frame_callback import MadeMeanwhile
from anyshape.runtime.context.process_context import shared_context
from anyshape.runtime.specialize.shape_binding import Binder
from anyshape.torch_compat.dynamo import internals
from anyshape.torch_compat.dynamo.internals import add_guard
from counting import calls


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)
        self.scale = 2.0

    def forward(self, x, mask=None, *, shift=0.0):
        y = self.drop(torch.relu(self.up(x))) * self.scale + shift
        return y if mask is None else y * mask


class Watch:
    """Counts the calls that do not go through the door."""

    def __init__(self, fast) -> None:
        self.calls = 0
        for way in (fast._anyshape.oblivious, fast._anyshape.ordinary):
            way.call = self.counted(way.call)

    def counted(self, call):
        def counting(*arguments, **keywords):
            self.calls += 1
            try:
                return call(*arguments, **keywords)
            except MadeMeanwhile:  # the same call looks again
                self.calls -= 1
                raise

        return counting


def opened(target, *arguments, **keywords):
    """A compiled `target` whose door is open for calls like this one, and its watch."""
    fast = anyshape.compile(target)
    with torch.no_grad():
        fast(*arguments, **keywords)
    ways = (fast._anyshape.oblivious, fast._anyshape.ordinary)
    assert any(way.dispatch is not None for way in ways)
    return fast, Watch(fast)


def same(found, wanted) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_serves_modules_at_every_size():
    net = Net().eval()
    fast, watch = opened(net, torch.randn(3, 8))
    with torch.no_grad():
        for rows in (3, 7, 1, 64):
            x = torch.randn(rows, 8)
            same(fast(x), net(x))
    assert watch.calls == 0


def test_serves_containers_functions_and_methods():
    stack = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    for target in (stack, lambda x: torch.relu(x) * 2, Net().eval().forward):
        fast, watch = opened(target, torch.randn(3, 8))
        with torch.no_grad():
            x = torch.randn(5, 8)
            same(fast(x), target(x))
        assert watch.calls == 0


def test_serves_programs_of_the_ordinary_way():
    net = Net().eval()
    fast, watch = opened(net, torch.randn(3, 8), torch.ones(3, 1))
    assert fast._anyshape.ordinary.dispatch is not None
    with torch.no_grad():
        x = torch.randn(5, 8)
        same(fast(x, torch.ones(5, 1)), net(x, torch.ones(5, 1)))
        assert watch.calls == 0
        same(fast(x, torch.ones(8)), net(x, torch.ones(8)))
        assert watch.calls > 0


def test_small_sizes_go_to_their_own_program():
    def squeezed(x):
        return x.squeeze(0) + 1

    fast, watch = opened(squeezed, torch.randn(3, 4))
    with torch.no_grad():
        same(fast(torch.ones(1, 4)), torch.full((4,), 2.0))
        before = watch.calls
        same(fast(torch.ones(1, 4)), torch.full((4,), 2.0))
        same(fast(torch.ones(5, 4)), torch.full((5, 4), 2.0))
    assert watch.calls == before


def test_serves_training_calls():
    net = Net().eval()
    fast = anyshape.compile(net)
    fast(torch.randn(3, 8)).sum().backward()
    watch = Watch(fast)
    net.zero_grad()
    x = torch.randn(5, 8)
    fast(x).sum().backward()
    assert watch.calls == 0
    found = net.up.weight.grad
    net.zero_grad()
    net(x).sum().backward()
    same(found, net.up.weight.grad)


def test_sees_parameters_that_were_replaced():
    net = Net().eval()
    fast, _ = opened(net, torch.randn(3, 8))
    x = torch.randn(5, 8)
    with torch.no_grad():
        net.up.weight = nn.Parameter(torch.randn(8, 8))
        same(fast(x), net(x))
        net.up.bias.add_(1)
        same(fast(x), net(x))
        net.up = nn.Linear(8, 8).double()
        same(fast(x.double()), net(x.double()))


def test_sees_attributes_and_modes_that_changed():
    net = Net().eval()
    fast, watch = opened(net, torch.randn(3, 8))
    x = torch.randn(5, 8)
    with torch.no_grad():
        net.scale = 3.0
        same(fast(x), net(x))
        assert watch.calls == 1
        net.train()
        assert (fast(torch.ones(50, 8)) == 0).any()
        assert watch.calls == 2
        net.eval()
        same(fast(x), net(x))
    assert fast(x).requires_grad
    with torch.inference_mode():
        assert fast(x).is_inference()


def test_sees_parameters_whose_data_were_replaced():
    """The object stays, so that Dynamo may not look at it again; what it holds is looked at by the program."""
    net = Net().eval()
    fast, _ = opened(net, torch.randn(3, 8))
    x = torch.randn(5, 8)
    with torch.no_grad():
        for weight in (torch.randn(8, 8), torch.randn(8, 8).t(), torch.randn(16, 16)[::2, ::2]):
            net.up.weight.data = weight
            same(fast(x), net(x))
            same(fast(x), net(x))
        net.double()
        same(fast(x.double()), net(x.double()))
        net.float()
        same(fast(x), net(x))
        net.up.weight.data = torch.randn(4, 8)
        net.up.bias.data = torch.randn(4)
        if torch.__version__ >= (2, 12):
            same(fast(x), net(x))
        else:  # Dynamo does not look, and the program refuses
            with pytest.raises(InputError):
                fast(x)


def test_sees_what_is_set_for_the_whole_process():
    def filled(x):
        return x + torch.ones(3)

    fast, watch = opened(filled, torch.randn(3, dtype=torch.float32))
    x = torch.randn(3)
    with torch.no_grad():
        same(fast(x), filled(x))
        assert watch.calls == 0
        torch.set_default_dtype(torch.float64)
        try:
            assert fast(x).dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        assert watch.calls > 0 and fast(x).dtype == torch.float32
        for change in (torch.use_deterministic_algorithms, torch.set_grad_enabled):
            before = watch.calls
            change(True)
            same(fast(x), filled(x))
            assert watch.calls > before
            change(False)
        before = watch.calls
        with torch.device("meta"):
            assert fast(torch.ones(3)).device.type == "meta"
        same(fast(x), filled(x))
    with torch.inference_mode():
        assert fast(x).is_inference()


class Doubled(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        return result + result if function is torch.relu else result


def test_function_modes_are_seen():
    net = Net().eval()
    fast, _ = opened(net, torch.randn(3, 8))
    x = torch.randn(4, 8)
    with torch.no_grad():
        with Doubled():
            wanted = net(x)
            same(fast(x), wanted)
        assert not torch.allclose(wanted, net(x))
        same(fast(x), net(x))


def test_profiles_show_the_frame_and_nothing_stays_of_it():
    net = Net().eval()
    fast, watch = opened(net, torch.randn(3, 8))
    x = torch.randn(5, 8)
    with torch.no_grad():
        fast(x)
        with torch.profiler.profile() as profile:
            fast(x)
        assert any(event.key == "Pregraph bytecode" for event in profile.key_averages())
        same(fast(x), net(x))
    assert watch.calls == 1  # the one in the profile


def test_a_call_is_short():
    """Functions called, Dynamo's guards among them; they were 103, and 158 with an operator of PyTorch's.
    One of them asks whether the input is what it was (`akin` in runtime/call/dispatch_codegen.py), in place of
    questions without a call; four make the frame of a call and run it (`PlanRunner` in backend/interface.py)."""
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    fast, _ = opened(net, torch.randn(3, 8))
    running, _ = opened(lambda x: torch.logcumsumexp(x, 0), torch.randn(3, 8))
    x = torch.randn(3, 8)
    with torch.no_grad():
        for call, most in ((fast, 68), (running, 111)):
            shared_context().temporary.release_idle()  # a search among blocks of other programs counts too
            call(x)
            assert calls(lambda call=call: call(x)) < most


def test_sizes_of_tensors_are_not_asked_whether_they_are_below_zero():
    fast, _ = opened(lambda x, y: x @ y, torch.randn(3, 4), torch.randn(4, 5))
    ways = (fast._anyshape.oblivious, fast._anyshape.ordinary)
    texts = [str(guards) for way in ways if way.dispatch for guards, _, _ in way.dispatch.programs]
    assert texts and not any("0 <= L[" in text for text in texts)
    with torch.no_grad():
        for m, k, n in ((3, 4, 5), (2, 3, 4), (1, 2, 0), (2, 0, 3)):
            x, y = torch.randn(m, k), torch.randn(k, n)
            same(fast(x, y), x @ y)
        with pytest.raises((RuntimeError, InputError)):
            fast(torch.randn(3, 4), torch.randn(5, 4))


def test_other_inputs_go_the_ordinary_way():
    net = Net().eval()
    fast, _ = opened(net, torch.randn(3, 8))
    with torch.no_grad():
        x = torch.randn(8, 5).t()
        same(fast(x), net(x))
        x = torch.randn(2, 3, 8)
        same(fast(x), net(x))
        x = torch.randn(3, 8)
        same(fast(x, mask=torch.ones(8)), net(x, mask=torch.ones(8)))
        same(fast(x, shift=2.0), net(x, shift=2.0))
        same(fast(x=x), net(x))
        with torch.autocast("cpu", torch.bfloat16):
            assert fast(x).dtype == net(x).dtype
        with pytest.raises(TypeError):
            fast()
        with pytest.raises(TypeError):
            fast(x, shift=1.0, other=2)
        with pytest.raises(RuntimeError):
            fast(torch.randn(3, 9))


@pytest.mark.parametrize("where", ["module", "inner", "global"])
def test_hooks_run(where):
    net = Net().eval()
    fast, _ = opened(net, torch.randn(3, 8))
    x = torch.randn(5, 8)

    def hook(module, arguments, result):
        return result + 1 if isinstance(module, nn.Linear) or where == "module" else None

    if where == "global":
        handle = nn.modules.module.register_module_forward_hook(hook)
    else:
        handle = (net if where == "module" else net.up).register_forward_hook(hook)
    try:
        with torch.no_grad():
            watch = Watch(fast)
            same(fast(x), net(x))
        assert watch.calls == (0 if where == "global" else 1)
    finally:
        handle.remove()
    with torch.no_grad():
        same(fast(x), net(x))


@pytest.mark.parametrize("place", ["", "0"])
def test_hooks_in_modules_of_torch_run(place):
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    fast, _ = opened(net, torch.randn(3, 8))
    x = torch.randn(5, 8)
    for register in ("register_forward_hook", "register_forward_pre_hook"):
        handle = getattr(net.get_submodule(place), register)(lambda module, arguments, *result: arguments[0] + 1)
        for _ in range(2):
            with torch.no_grad():
                same(fast(x), net(x))
            handle.remove()


def test_forward_that_was_overridden():
    net = Net().eval()
    fast, _ = opened(net, torch.randn(3, 8))
    net.forward = lambda x: x + 1
    with torch.no_grad():
        same(fast(torch.zeros(2, 8)), torch.ones(2, 8))


def test_closures_and_globals_are_read_anew():
    factor = 2.0

    def scaled(x):
        return x * factor

    fast, _ = opened(scaled, torch.randn(3))
    factor = 3.0
    same(fast(torch.ones(4)), torch.full((4,), 3.0))


def test_stances_reset_and_subclasses():
    net = Net().eval()
    fast, watch = opened(net, torch.randn(3, 8))
    x = torch.randn(5, 8)
    with torch.no_grad():
        with torch.compiler.set_stance("force_eager"):
            same(fast(x), net(x))
            assert watch.calls == 0
        torch._dynamo.reset()
        same(fast(x), net(x))
        assert watch.calls == 1

        class Marked(torch.Tensor):
            pass

        assert isinstance(fast(x.as_subclass(Marked)), Marked)


def test_transforms_see_through_the_door():
    def square(x):
        return (x * x).sum()

    fast, _ = opened(square, torch.randn(3))
    x = torch.randn(4)
    same(torch.func.grad(fast)(x), 2 * x)
    same(torch.vmap(fast)(torch.ones(2, 3)), torch.tensor([3.0, 3.0]))


def test_inference_mode_has_one_program():
    """Sizes 0 and 1 are judged on shapes, for tensors too that do not count their changes."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.GELU())
    fast = anyshape.compile(model, strict=True)
    with torch.inference_mode():
        for shape in ((2, 5, 3), (1, 5, 3), (1, 1, 3), (3, 1, 3), (1, 9, 3)):
            x = torch.randn(shape)
            same(fast(x), model(x))
    assert len(fast.programs) == 1 and not fast._anyshape.compilation.fallbacks


def test_transforms_of_what_is_not_compiled_yet():
    """They run the function itself, and spoil nothing for the calls that come without them."""
    fast = anyshape.compile(lambda x: (x * x).sum(-1))
    x, direction = torch.randn(4), torch.randn(4)
    same(torch.func.grad(fast)(x), 2 * x)
    same(torch.func.jvp(fast, (x,), (direction,))[1], (2 * x * direction).sum())
    with torch.autograd.forward_ad.dual_level():
        dual = fast(torch.autograd.forward_ad.make_dual(x, direction))
        same(torch.autograd.forward_ad.unpack_dual(dual).tangent, (2 * x * direction).sum())
    for size in (3, 1, 5):
        same(fast(torch.ones(size)), torch.tensor(float(size)))
    assert len(fast.programs) == 1 and not fast._anyshape.compilation.fallbacks


def test_calls_on_shapes_alone():
    net = Net().eval()
    fast, _ = opened(net, torch.randn(3, 8))
    with torch.no_grad():
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = mode.from_tensor(torch.randn(5, 8))
            assert type(fast(fake)) is FakeTensor and fast(fake).shape == (5, 8)
        assert type(fast(fake)) is FakeTensor
        with FlopCounterMode(display=False) as counter:
            fast(torch.randn(5, 8))
        assert counter.get_total_flops() > 0
        x = torch.randn(5, 8)
        same(fast(x), net(x))
    double, _ = opened(lambda x: x * 2, torch.randn(3))
    assert double(torch.empty(5, device="meta")).shape == (5,)


def test_threads():
    net = Net().eval()
    fast, _ = opened(net, torch.randn(3, 8))
    wrong = []

    def work(rows):
        with torch.no_grad():
            for _ in range(20):
                x = torch.randn(rows, 8)
                if not torch.allclose(fast(x), net(x), atol=1e-5):
                    wrong.append(rows)

    threads = [threading.Thread(target=work, args=(rows,)) for rows in (2, 3, 5, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_leaves_nothing_behind():
    def double(x):
        return x * 2

    before = set(double.__globals__)
    fast, watch = opened(double, torch.randn(3))
    names = [name for name in set(double.__globals__) - before if name.startswith("__anyshape_")]
    assert names
    torch._dynamo.reset()
    del fast, watch
    gc.collect()
    assert not [name for name in double.__globals__ if name in names]


def test_frame_locals_binds_like_python():
    cell = 5

    def function(a, b=2, *rest, c, d=4, **more):
        return cell

    bind = frame_locals(function)
    assert bind(1, c=3) == {"a": 1, "b": 2, "rest": (), "c": 3, "d": 4, "more": {}, "cell": 5}
    assert bind(1, 2, 7, c=3, e=9)["more"] == {"e": 9}
    with pytest.raises(TypeError):
        bind(1)

    def positional(a, /, b):
        return a

    assert frame_locals(positional)(1, b=2) == {"a": 1, "b": 2}
    with pytest.raises(TypeError):
        frame_locals(positional)(a=1, b=2)


def test_a_shape_never_seen_does_not_have_the_parameters_looked_at_again(monkeypatch):
    """However many there were: torch is asked in one call whether they are what they were."""
    looked = []
    bind = Binder.bind

    def counting(binder, arguments, known, same=False):
        looked.append(not same)
        return bind(binder, arguments, known, same)

    monkeypatch.setattr(Binder, "bind", counting)
    fast = anyshape.compile(Net().eval())
    with torch.no_grad():
        for rows in range(2, 32):
            fast(torch.randn(rows, 8))
    assert len(looked) >= 30 and sum(looked) <= 2


def test_an_interrupt_that_comes_in_a_guard_is_not_lost():
    """torch's C++ clears what a guard that is written in Python raises: the call went on as if nobody had asked."""
    net, x = Net().eval(), torch.randn(3, 8)
    fast, watch = opened(net, x)
    dispatch = fast._anyshape.oblivious.dispatch
    given: list[type[BaseException]] = []

    def holds(values):
        if given:
            raise given.pop()
        return True

    add_guard(dispatch.programs[0][0], holds, "a guard written in Python")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with torch.no_grad():
            same(fast(x), net(x))
            given.append(KeyboardInterrupt)
            with pytest.raises(KeyboardInterrupt, match="guards were checked"):
                fast(x)
            same(fast(x), net(x))
            same(fast(torch.randn(5, 8)).shape, (5, 8))
            assert watch.calls == 0
            signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C raises nothing: another fault
            given.append(ValueError)
            same(fast(x), net(x))
            assert watch.calls == 1
    finally:
        signal.signal(signal.SIGINT, before)


class Parts(Net):
    """A graph break: torch's C++ checks the guards of its parts, at every call."""

    def forward(self, x):
        y = super().forward(x)
        torch._dynamo.graph_break()
        return y * 2


@pytest.mark.parametrize("kind, way", [
    (Parts, anyshape.compile), (Net, lambda net: torch.compile(net, backend="anyshape"))])
def test_an_interrupt_that_comes_in_a_guard_that_torch_checks_is_not_lost(monkeypatch, kind, way):
    torch._dynamo.reset()
    net, x = kind().eval(), torch.randn(3, 8)
    fast = way(net)
    given: list[type[BaseException]] = []

    def holds(values):
        if given:
            raise given.pop()
        return True

    monkeypatch.setattr(threading, "enumerate", lambda: [threading.current_thread()])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with torch.no_grad():
            same(fast(x), net(x))
            code = fast._anyshape.ordinary.tracing.codes[0] if kind is Parts else kind.forward.__code__
            programs = internals.cached_programs(code)
            assert programs
            for guards, _ in programs:
                add_guard(guards, holds, "a guard written in Python")
            given.append(KeyboardInterrupt)
            with pytest.raises(KeyboardInterrupt, match="guards were checked"):
                fast(x)
            same(fast(x), net(x))
            assert len(internals.cached_programs(code)) == len(programs)
    finally:
        signal.signal(signal.SIGINT, before)
