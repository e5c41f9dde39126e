"""Quick tracing: the same numbers, one graph past a message, no duplicates saved, nothing left changed in torch."""
from __future__ import annotations

import copy
import logging
import os

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import anyshape
import forked
from anyshape.frontend.autograd.joint_graph_cse import remove_duplicates
from anyshape.torch_compat.tracing import fake_tensor_cache
from anyshape.torch_compat.tracing.symint_cache import BINARY, general_tracing, quick_tracing
from anyshape.torch_compat.versions.backports import newer_rules
from sampling import rest


def methods() -> list[object]:
    from torch._dynamo import guards, symbolic_convert, utils
    from torch._dynamo.variables.misc import LoggingLoggerVariable
    from torch._functorch import aot_autograd
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental import symbolic_shapes
    from torch.fx.experimental.sym_node import SymNode
    from torch.fx.experimental.symbolic_shapes import PropagateUnbackedSymInts
    return [FakeTensorMode._dispatch_impl, symbolic_shapes._guard_or, symbolic_shapes._static_eval_sym_bool,
            *[getattr(SymNode, name) for name in (*BINARY, "wrap_int", "maybe_as_int", "guard_bool", "expect_true")],
            utils.run_node, aot_autograd.aot_module_simplified, torch._C._select_conv_backend,
            PropagateUnbackedSymInts.run, symbolic_convert.get_funcname, guards.profile_guard_manager,
            LoggingLoggerVariable.call_method]


def test_torch_is_as_before_afterwards():
    before = methods()
    with pytest.raises(KeyError), quick_tracing(), general_tracing():
        inside = methods()
        raise KeyError
    assert methods() == before
    assert all(one is not other for one, other in zip(inside, before, strict=True))


def test_rules_are_as_before_afterwards():
    import torch._meta_registrations as registrations
    import torch._subclasses.fake_impls as rules

    def now() -> tuple[object, ...]:
        return (rules._compute_slice_index, rules.op_implementations_dict[torch.ops.aten.slice.Tensor],
                registrations.div_rtn)
    before = now()
    with newer_rules(), newer_rules():
        assert "sym_min" in rules._compute_slice_index.__code__.co_names
        assert "bool" not in registrations.div_rtn.__code__.co_names
        for x in range(-9, 10):
            assert [registrations.div_rtn(x, y) for y in (-3, -2, 1, 2)] == [x // y for y in (-3, -2, 1, 2)]
    assert now() == before


def test_slices_clip_in_one_program():
    def f(x, table):
        return x + table[:x.shape[0]] + table[-x.shape[0]:], table[x.shape[0]:]
    fast = anyshape.compile(f, strict=True)
    table = torch.randn(16, 4)
    for size in (3, 16, 1, 7):
        x = torch.randn(size, 4)
        torch.testing.assert_close(fast(x, table), f(x, table))
    assert len(fast.programs) == 1


@pytest.mark.parametrize("make", [lambda: nn.Conv2d(3, 4, 3), lambda: nn.Conv1d(3, 4, 3), lambda: nn.Conv2d(3, 4, 1),
                                  lambda: nn.ConvTranspose2d(3, 4, 2, 2)], ids=["2d", "1d", "1x1", "transposed"])
def test_one_program_for_batches_of_convolutions(make):
    eager = make()
    fast = anyshape.compile(copy.deepcopy(eager), strict=True)
    for batch, size in [(3, 8), (1, 5), (2, 40)]:
        x = torch.randn(batch, 3, *[size] * (eager.weight.dim() - 2))
        torch.testing.assert_close(fast(x), eager(x), rtol=1e-4, atol=1e-5)
    assert len(fast.programs) == 1


def test_layout_of_convolutions_in_channels_last():
    eager = nn.Conv2d(3, 4, 3)
    fast = anyshape.compile(copy.deepcopy(eager), strict=True)
    for batch in (3, 1, 2):
        x = torch.randn(batch, 3, 8, 8).to(memory_format=torch.channels_last)
        found, wanted = fast(x), eager(x)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        assert found.stride() == wanted.stride()


def test_forward_does_not_read_the_tangents():
    # The count of the convolution's elements equals the tangent's; the statistics must use the former.
    eager = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    fast = anyshape.compile(copy.deepcopy(eager), strict=True)
    for shape in [(2, 3, 8, 8), (3, 3, 7, 9)]:
        x = torch.randn(shape)
        eager(x).sum().backward()
        fast(x).sum().backward()
        torch.testing.assert_close(fast[1].running_var, eager[1].running_var)
    torch.testing.assert_close(fast[0].weight.grad, eager[0].weight.grad, rtol=1e-4, atol=1e-4)


def test_a_message_does_not_cut_the_program(monkeypatch):
    said = []
    monkeypatch.setattr(logging.Logger, "warning_once", lambda self, text: said.append(text), raising=False)
    logger = logging.getLogger("test_quick")

    def f(x):
        y = x.exp()
        logger.warning_once("small steps")
        return y * 2

    fast = anyshape.compile(f, fullgraph=True)
    x = torch.randn(3, 5)
    torch.testing.assert_close(fast(x), x.exp() * 2)
    assert said == ["small steps"] and len(fast.programs) == 1


def test_duplicates():
    def f(x):
        return x.sin() + x.sin(), torch.rand_like(x) + torch.rand_like(x), x.cos(), x.cos()
    gm = torch.fx.experimental.proxy_tensor.make_fx(f, tracing_mode="fake")(torch.randn(4))
    assert remove_duplicates(gm.graph) == 1
    names = [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]
    assert names.count("aten.sin.default") == 1
    assert names.count("aten.cos.default") == 2
    assert sum("rand" in name for name in names) == 2


def test_inductor_is_not_loaded(tmp_path):
    program = ("import sys, torch, anyshape\nf = anyshape.compile(lambda x: (x.exp() * 2).sum(), strict=True)\n"
               "f(torch.randn(3, 4, requires_grad=True)).backward()\n"
               "print([one for one in ('lowering', 'compile_fx') if f'torch._inductor.{one}' in sys.modules])")
    (tmp_path / "program.py").write_text(program)
    done = forked.Run(tmp_path / "program.py", [], os.environ, tmp_path).done(300)
    assert done.stdout.strip() == "[]", done.stderr


def sliced(x, tags):
    column = x.gather(1, tags[:, 1:2]).squeeze(1) + x[:, 2:3].squeeze(1)
    return column.sum() + (x[:, 2:3] * tags[:, :1] + x[:, -2:]).sum()


def sliced_at(x, position):
    return x[:, position:position + 1].squeeze(1) * 2, x[:, position - 1:position + 1].sum(1)


def test_slices_of_length_1():
    """How long `x[:, 2:3]` is follows from the length of x; squeeze and broadcasting take it as it is."""
    fast, at = anyshape.compile(sliced, strict=True), anyshape.compile(sliced_at, strict=True)
    for rows, length in ((3, 5), (2, 4), (1, 7), (5, 3)):
        x, tags = torch.randn(rows, length), torch.arange(rows * length).reshape(rows, length) % length
        torch.testing.assert_close(fast(x, tags), sliced(x, tags))
        torch.testing.assert_close(at(x, length - 2), sliced_at(x, length - 2))
    assert len(fast.programs) == 1 and len(at.programs) == 1
    x = torch.randn(4, 2)
    tags = torch.tensor([[0, 1]] * 4)
    with pytest.raises(RuntimeError):
        sliced(x, tags)
    with pytest.raises(RuntimeError):
        fast(x, tags)


def windows(x, size: int = 4):
    batch, height, width, channels = x.shape
    y = x.view(batch, height // size, size, width // size, size, channels)
    y = y.permute(0, 1, 3, 2, 4, 5).reshape(-1, size, size, channels) * 2
    batch = y.shape[0] // (height * width // size // size)
    y = y.view(batch, height // size, width // size, size, size, -1)
    return y.permute(0, 1, 3, 2, 4, 5).reshape(batch, height, width, -1)


def test_a_batch_found_by_dividing_sizes():
    fast = anyshape.compile(windows, strict=True)
    for batch, height, width in ((2, 8, 12), (3, 12, 8), (1, 8, 8), (5, 16, 12)):
        x = torch.randn(batch, height, width, 3)
        torch.testing.assert_close(fast(x), windows(x))
    assert len(fast.programs) == 1


@pytest.mark.parametrize("corners", rest([True, False], True))
def test_grids_of_every_size(corners):
    def transform(theta, x):
        grid = nn.functional.affine_grid(theta, x.size(), align_corners=corners)
        return nn.functional.grid_sample(x, grid, align_corners=corners)
    fast = anyshape.compile(transform, strict=True)
    for shape in ((2, 3, 5, 6), (3, 3, 7, 2), (1, 3, 1, 4), (2, 3, 1, 1)):
        theta, x = torch.randn(shape[0], 2, 3), torch.randn(shape)
        results = []
        for call in (transform, fast):
            leaf = theta.clone().requires_grad_()
            y = call(leaf, x)
            results.append((y.detach(), torch.autograd.grad(y.square().sum(), leaf)[0]))
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    assert fast._anyshape.compilation.graphs == 1


def test_gradients_inside_of_a_program():
    """The penalty of WGAN-GP: a gradient of a gradient, taken inside of what is compiled."""
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def penalty(x):
        x = x.detach().requires_grad_()
        gradient, = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return ((gradient.norm(dim=1) - 1) ** 2).mean()
    fast = anyshape.compile(penalty)  # in parts: torch's tracer ends a graph that returns what such a tensor leads to
    weights = [model[0].weight, model[0].bias, model[2].weight]
    for rows in (4, 7, 1):
        x = torch.randn(rows, 3)
        found, wanted = fast(x), penalty(x)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(torch.autograd.grad(found, weights), torch.autograd.grad(wanted, weights))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = (one.view(*x.shape[:2], 4, 4).transpose(1, 2) for one in self.mix(self.norm(x)).chunk(3, -1))
        weights = (q @ k.mT + torch.ones(x.shape[1], x.shape[1]).tril().log()).softmax(-1)
        y = torch.cat((weights @ v, v), -1)[..., :4].transpose(1, 2).reshape(x.shape)
        y[:, 1:] += x[:, :-1]
        return x + nn.functional.dropout(self.out(y), 0.1, False)


def traced(layers, monkeypatch, check):
    """Compiles and trains `layers` blocks once; how often torch looked for the shape of an operator's result, and the
    operators whose shape was remembered."""
    found, again = [0, []], []
    remembering, renew = fake_tensor_cache._remembering, fake_tensor_cache._again
    monkeypatch.setattr(fake_tensor_cache, "_again", lambda *more: again.append(1) or renew(*more))

    def watched(dispatch, memory):
        def counted(*arguments):
            found[0] += 1
            return dispatch(*arguments)
        remembered = remembering(counted, memory)

        def run(mode, op, types, arguments, keywords):
            again.clear()
            result = remembered(mode, op, types, arguments, keywords)
            if again and check and found[1] is not None:
                listed, found[1] = found[1], None  # torch asks for shapes inside, which are not to be looked at
                check(op, (arguments, keywords), result, dispatch(mode, op, types, arguments, keywords))
                found[1] = [*listed, op]
            return result
        return run

    monkeypatch.setattr(fake_tensor_cache, "_remembering", watched)
    model = nn.Sequential(*[Block() for _ in range(layers)])
    fast = anyshape.compile(model, strict=True)
    x = torch.randn(3, 5, 16)
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
    fast(x).sum().backward()
    monkeypatch.undo()
    return found


def same_description(op, arguments, result, wanted):
    operands = [one for one in pytree.tree_leaves(arguments) if isinstance(one, torch.Tensor)]

    def number(size):
        return size if isinstance(size, int) else size.node.expr

    def described(one):
        memory = one.untyped_storage()
        return ([number(size) for size in (*one.shape, *one.stride(), one.storage_offset(), memory.nbytes())],
                one.dtype, one.device, one.requires_grad, one._version, str(torch._C._dispatch_keys(one)),
                [memory._cdata == other.untyped_storage()._cdata for other in operands])

    results, others = pytree.tree_leaves(result), pytree.tree_leaves(wanted)
    assert [described(one) for one in results] == [described(one) for one in others], op
    assert len({one.untyped_storage()._cdata for one in results}) == len({one.untyped_storage()._cdata
                                                                          for one in others}), op


def test_remembered_shapes_are_those_of_torch(monkeypatch):
    _, remembered = traced(3, monkeypatch, same_description)
    names = {op._schema.name.partition("::")[2] for op in remembered}
    assert {"mm", "view", "transpose", "add", "mul", "cat", "slice", "split"} & names >= {"view", "add", "mul"}
    assert len(remembered) > 100


def test_further_layers_find_few_shapes(monkeypatch):
    two, _ = traced(2, monkeypatch, None)
    four, _ = traced(4, monkeypatch, None)
    assert four < 1.25 * two


def asks_for_one(x, y):
    z = x.float().mean(1, keepdim=True) if x.shape[1] > 1 else x
    return nn.functional.dropout(z + y[:1], 0.1, False) * 2


def test_a_size_of_1_that_a_program_refuses_is_a_number_in_the_next():
    fast = anyshape.compile(asks_for_one, strict=True)
    for rows, columns in ((3, 5), (4, 1), (1, 1), (7, 1), (1, 6)):
        x, y = torch.randn(rows, columns, 3), torch.randn(max(rows, 2), 1, 3)
        torch.testing.assert_close(fast(x, y), asks_for_one(x, y))
    compilation = fast._anyshape.compilation
    assert compilation.graphs == 2 and not compilation.fallbacks
    assert {capture.way for capture in compilation.captures} == {"all sizes"}


def above_ten(x):
    return x * 2 if x.shape[0] >= 10 else x - 1


def test_a_bound_is_no_size_of_1():
    fast = anyshape.compile(above_ten, strict=True)
    for rows in (12, 1, 5, 40, 9):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(fast(x), above_ten(x))
    assert fast._anyshape.compilation.graphs == 2


def changed_inside(x):
    count = torch.zeros(x.shape[1])
    count += x.shape[0]
    return nn.functional.dropout(x.transpose(0, 1).contiguous() * count[:, None], 0.1, False)


def test_hidden_values_may_share_memory():
    """At sizes of 1 `contiguous` and `dropout` hand on what they get, beside a change of something else in place."""
    fast = anyshape.compile(changed_inside, strict=True)
    for shape in ((4, 3), (1, 3), (4, 1), (1, 1)):
        x = torch.randn(shape)
        torch.testing.assert_close(fast(x), changed_inside(x))
    assert fast._anyshape.compilation.graphs == 1 and not fast._anyshape.compilation.fallbacks
