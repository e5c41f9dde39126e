"""Code objects are shared by all objects of a class and all functions of a decorator. What Dynamo keeps with them for
one compilation, such as that a frame is never traced again, changes nothing for another: neither theirs for ours, nor
ours for theirs, nor ours for ours."""
from __future__ import annotations

import copy
import functools
import gc
import traceback
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anyshape
from anyshape import torch_compat as compat
from anyshape.base.errors import InputError


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    anyshape.stats(reset=True)


class Layers(nn.Module):
    """A loop of layers, with a graph break in each or without."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.breaks = breaks
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        for layer in self.layers:
            if self.breaks:
                torch._dynamo.graph_break()
            x = torch.relu(layer(x)) * scale
        return x


class Called(Layers):
    def __call__(self, x: Tensor) -> Tensor:
        for _ in range(2):
            if self.breaks:
                torch._dynamo.graph_break()
            x = super().__call__(x) + 1
        return x


class Plain:
    """No module: a loop in a method, and in what is called."""

    def __init__(self, breaks: bool) -> None:
        self.breaks = breaks

    def method(self, x: Tensor) -> Tensor:
        for number in range(3):
            if self.breaks:
                torch._dynamo.graph_break()
            x = torch.sin(x) * number
        return x

    def __call__(self, x: Tensor) -> Tensor:
        return self.method(x)


def repeated(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    @functools.wraps(function)
    def wrapper(x: Tensor) -> Tensor:
        for _ in range(3):
            x = function(x)
        return x

    return wrapper


@repeated
def sine_in_parts(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return torch.sin(x)


@repeated
def cosine(x: Tensor) -> Tensor:
    return torch.cos(x)


def hooked(breaks: bool) -> Layers:
    model = Layers(breaks)
    model.register_forward_hook(lambda module, inputs, output: None)
    return model


def patched(breaks: bool) -> Layers:
    model = Layers(breaks)
    model.forward = types.MethodType(Layers.forward, model)  # type: ignore[method-assign]
    return model


TARGETS: dict[str, Callable[[bool], Any]] = {
    "module": Layers, "own __call__": Called, "hooks": hooked, "forward of the object": patched,
    "method": lambda breaks: Plain(breaks).method, "callable": Plain,
    "partial": lambda breaks: functools.partial(Plain.method, Plain(breaks)),
    "decorated": lambda breaks: sine_in_parts if breaks else cosine,
}


def graphs_of_theirs(target: Any) -> list[int]:
    """How many operators each graph has that `torch.compile` makes of the target."""
    found: list[int] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append(sum(node.op.startswith("call") for node in gm.graph.nodes))
        return gm.forward

    compiled = torch.compile(target, backend=backend, dynamic=True)
    for rows in (3, 4, 5):
        compiled(torch.randn(rows, 8))
    return found


def in_parts(target: Any) -> None:
    """Compiles, with this compiler, what is not one program."""
    fast = anyshape.compile(target)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rows in (3, 4):
            fast(torch.randn(rows, 8))
    assert anyshape.stats(reset=True)["eager_calls"] == 2


def check_one_program(target: Any) -> None:
    """Nothing of the compiled target runs as PyTorch, and it is one program."""
    fast = anyshape.compile(target, strict=True)
    for rows in (3, 4, 5):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(fast(x), target(x), atol=1e-5, rtol=1e-5)
    found = anyshape.stats()
    assert (found["programs"], found["runs"], found["eager_calls"]) == (1, 3, 0)


@pytest.mark.parametrize("kind", TARGETS)
def test_graph_breaks_of_theirs_do_not_end_our_program(kind: str) -> None:
    graphs_of_theirs(TARGETS[kind](True))
    with torch.no_grad():
        check_one_program(TARGETS[kind](False))


@pytest.mark.parametrize("kind", TARGETS)
def test_graph_breaks_of_ours_do_not_end_our_other_program(kind: str) -> None:
    in_parts(TARGETS[kind](True))
    with torch.no_grad():
        check_one_program(TARGETS[kind](False))


@pytest.mark.parametrize("kind", TARGETS)
def test_graph_breaks_of_ours_do_not_cut_theirs(kind: str) -> None:
    wanted = graphs_of_theirs(TARGETS[kind](False))
    torch._dynamo.reset()
    in_parts(TARGETS[kind](True))
    assert graphs_of_theirs(TARGETS[kind](False)) == wanted


def test_theirs_after_ours_runs_while_ours_stays_one_program() -> None:
    """A compiled object that has traced is not touched by what is compiled later, at sizes that need a trace too."""
    fast = anyshape.compile(Layers(False), strict=True)
    with torch.no_grad():
        fast(torch.randn(3, 8))
        graphs_of_theirs(Layers(True))
        fast(torch.randn(4, 8))
        fast(torch.randn(4, 8).double().float(), scale=3.0)
    found = anyshape.stats()
    assert found["eager_calls"] == 0 and found["runs"] == 3


class Switched(nn.Module):
    def __init__(self, on: bool) -> None:
        super().__init__()
        self.on = on

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) + 1 if self.on else x


def test_an_object_that_computes_nothing_leaves_others_alone() -> None:
    graphs_of_theirs(Switched(False))
    check_one_program(Switched(True))


def test_what_theirs_left_behind_our_graph_break_is_counted() -> None:
    inner = Layers(False).requires_grad_(False)

    def cut(x: Tensor) -> Tensor:
        x = x * 2
        torch._dynamo.graph_break()
        return inner(x) + 1

    graphs_of_theirs(Layers(True))
    fast, x = anyshape.compile(cut), torch.randn(4, 8)
    with pytest.warns(UserWarning, match="cut in parts"):
        torch.testing.assert_close(fast(x), cut(x), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(fast(x), cut(x), atol=1e-5, rtol=1e-5)
    assert anyshape.stats()["eager_calls"] == 2


def test_many_objects_of_one_class_have_a_program_each() -> None:
    """More than Dynamo makes of one code object."""
    for _ in range(12):
        fast = anyshape.compile(Layers(False).requires_grad_(False), strict=True)
        fast(torch.randn(3, 8))
        assert len(fast.programs) == 1


# ---- the copy is the function

def scaled(x: Tensor, by: float = 2.0, *, shift: float = 0.0) -> Tensor:
    return torch.sin(x) * by + shift


def test_what_is_set_of_a_function_later_holds() -> None:
    function = types.FunctionType(scaled.__code__, scaled.__globals__, "scaled", (2.0,))
    function.__kwdefaults__ = {"shift": 0.0}
    fast, x = anyshape.compile(function), torch.randn(4, 8)
    for change in (lambda: None, lambda: setattr(function, "__defaults__", (3.0,)),
                   lambda: setattr(function, "__kwdefaults__", {"shift": 1.0}),
                   lambda: function.__kwdefaults__.update(shift=2.0),
                   lambda: setattr(function, "__code__", (lambda x, by, *, shift: torch.cos(x) * by).__code__)):
        change()
        torch.testing.assert_close(fast(x), function(x))
        torch.testing.assert_close(fast(x), function(x))


class Child(Layers):
    def forward(self, x: Tensor, scale: float = 1.5) -> Tensor:
        return super().forward(x, scale) - __class__.SHIFT

    SHIFT = 0.5


def test_a_forward_that_is_changed_later_runs() -> None:
    model, x = Child(False).requires_grad_(False), torch.randn(4, 8)
    fast = anyshape.compile(model, strict=True)
    usual = Child.forward
    replaced = [
        lambda: None, lambda: setattr(Child, "forward", lambda self, x: torch.cos(Layers.forward(self, x))),
        lambda: setattr(model, "forward", lambda x: torch.sin(usual(model, x))),
        lambda: setattr(model, "forward", types.MethodType(lambda self, x: self.layers[0](x), model)),
        lambda: delattr(model, "forward"), lambda: setattr(Child, "forward", usual),
        lambda: setattr(model, "__class__", Layers)]
    try:
        for change in replaced:
            change()
            for _ in range(2):
                torch.testing.assert_close(fast(x), model(x), atol=1e-5, rtol=1e-5)
    finally:
        Child.forward = usual  # type: ignore[method-assign]


def test_hooks_see_the_module_once_and_in_order() -> None:
    model, seen = Layers(False), list[Any]()

    def before(module: nn.Module, inputs: tuple[Tensor, ...], keywords: dict[str, Any]) -> Any:
        seen.append(("before", module, keywords))
        return (inputs[0] * 2,), {"scale": 1.0}

    def after(module: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> Any:
        seen.append(("after", module))
        return None if output is None else output + 1

    x = torch.randn(4, 8)
    fast = anyshape.compile(model)
    plain = fast(x)
    handles = [model.register_forward_pre_hook(before, with_kwargs=True),
               model.register_forward_hook(after, always_call=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(fast(x, scale=5.0), model(x), atol=1e-5, rtol=1e-5)
    assert [one[0] for one in seen] == ["before", "after"] * 2 and all(one[1] is model for one in seen)
    assert seen[0][2] == {"scale": 5.0}
    seen.clear()
    with pytest.raises(Exception), warnings.catch_warnings():  # noqa: B017  whatever PyTorch says of the sizes
        warnings.simplefilter("ignore")
        fast(torch.randn(4, 7))
    assert ("after", model) in seen
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(fast(x), plain)


def test_a_disabled_forward_is_left_to_pytorch() -> None:
    class Disabled(Layers):
        forward = torch.compiler.disable(Layers.forward)  # type: ignore[assignment]

    model, x = Disabled(False), torch.randn(4, 8)
    fast = anyshape.compile(model)
    with pytest.warns(UserWarning, match="disable"):
        torch.testing.assert_close(fast(x), model(x))
    assert anyshape.stats()["eager_calls"] == 1 and not fast.programs


def failing(x: Tensor) -> Tensor:
    y = torch.sin(x)
    torch._dynamo.graph_break()
    raise KeyError(float(y.sum()))  # the line that a traceback shows


def test_lines_and_names_are_the_users() -> None:
    fast = anyshape.compile(failing)
    with pytest.raises(KeyError) as error, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fast(torch.randn(4, 8))
    last = traceback.extract_tb(error.value.__traceback__)[-1]
    assert last.filename == __file__ and last.line is not None and last.line.startswith("raise KeyError")
    model = anyshape.compile(Layers(False))
    model(torch.randn(3, 8))
    text = str(model.explain())
    assert f"forward, test_shared_code.py:{Layers.forward.__code__.co_firstlineno}" in text
    assert "x = torch.relu(layer(x)) * scale" in text


def test_arguments_that_do_not_fit_are_refused_as_python_does() -> None:
    fast = anyshape.compile(Layers(False))
    with pytest.raises((TypeError, InputError), match="scal"):
        fast(torch.randn(3, 8), scal=1.0)


def test_copies_are_compiled_anew_and_go_with_their_object() -> None:
    model = Layers(False)
    fast = anyshape.compile(model)
    fast(torch.randn(3, 8))
    other = copy.deepcopy(fast)
    x = torch.randn(4, 8)
    torch.testing.assert_close(other(x), fast(x))
    codes = [pair[1] for one in (fast, other) for pair in one._anyshape.oblivious.copied._copies.values()]
    assert len({id(code) for code in codes}) == 2 and all(code is not Layers.forward.__code__ for code in codes)
    watched = [weakref.ref(code) for code in codes]
    del fast, other, codes
    gc.collect()
    assert [one() for one in watched] == [None, None]


@pytest.mark.parametrize("name", ["torch.nn.Module._call_impl",
                                  "torch._dynamo.eval_frame.always_optimize_code_objects"])
def test_without_the_names_of_torch_code_is_shared(name: str) -> None:
    with compat.pretending(name), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in ("module", "callable"):
            check = anyshape.compile(TARGETS[kind](False))
            check(torch.randn(3, 8))
            assert len(check.programs) == 1
