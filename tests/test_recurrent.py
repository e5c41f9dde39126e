"""Recurrent layers (LSTM, GRU, RNN): the op against its meaning, ONNX models against onnxruntime, deployed files."""
from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import anyshape
from anyshape.base.config import Config
from anyshape.base.errors import IndexRangeError, VerifyError
from anyshape.compiler.driver import compile_graph
from anyshape.ir.parse import parse
from anyshape.ir.verify import verify
from anyshape.ops.recurrence import CELLS, blocks, words
from anyshape.runtime.torch_ops.reference_interpreter import interpret


def graph(cell: str, hidden: int, reverse: bool, lengths: bool) -> Any:
    count, n, more, before = CELLS[cell], blocks(hidden), cell == "lstm", cell == "gru_before"
    names = f"y, last{', c_1' * more}"
    return parse(f"""
graph example(x: f32[t, b, {count * hidden}], w: f32[{n}, {hidden}, {count}, 16], bias: f32[{n}, {count}, 16],
              h: f32[b, {hidden}]{f', c: f32[b, {hidden}]' * more}{', lengths: i64[b]' * lengths})
  {names}{', aside' * before} = recurrence(x, w, bias, h{', c' * more}{', lengths' * lengths} | cell="{cell}", """
                 f"reverse={reverse})  f32[t, b, {hidden}], f32[b, {hidden}]{f', f32[b, {hidden}]' * more}"
                 f"{f', f32[2, b, {hidden}]' * before}\n  return {names}\n")


@pytest.mark.parametrize("cell", CELLS)
def test_the_routine_is_what_the_op_means(cell):
    for hidden, reverse, lengths in ((1, False, False), (16, True, True), (37, True, False), (21, False, True)):
        made = graph(cell, hidden, reverse, lengths)
        program = compile_graph(made, Config()).executable
        for time, batch in ((5, 3), (1, 1), (0, 2), (3, 0), (7, 13)):
            shapes = [tuple({"t": time, "b": batch}.get(str(size), size) for size in one.tensor.shape)
                      for one in made.inputs]
            inputs = [torch.randn(shape) * (0.3 if place == 1 else 1) / (hidden ** 0.5 if place == 1 else 1)
                      for place, shape in enumerate(shapes)]
            if lengths:
                inputs[-1] = torch.randint(0, time + 1, (batch,))
            wanted, _, _ = interpret(made, inputs)
            torch.testing.assert_close(list(program(list(inputs))), wanted, rtol=1e-5, atol=1e-5)


def test_operands_that_do_not_fit_are_refused():
    text = """
graph example(x: f32[t, b, 12], w: f32[1, 3, 4, 16], bias: f32[1, 4, 16], h: f32[b, 3], c: f32[b, 3])
  y, last, c_1 = recurrence(x, w, bias, h, c | cell="lstm", reverse=False)  f32[t, b, 3], f32[b, 3], f32[b, 3]
  return y, last, c_1
"""
    verify(parse(text))
    for old, new in (("3, 4, 16]", "3, 4, 8]"), ('"lstm"', '"peephole"'), ("c: f32[b, 3]", "c: f32[b, 4]"),
                     ("reverse=False", "reverse=2"), ('"lstm"', '"gru"'), ("h: f32[b, 3]", "h: i64[b]")):
        with pytest.raises(VerifyError):
            verify(parse(text.replace(old, new)))


def test_a_quantised_state_is_what_the_op_means():
    for hidden, reverse in ((1, False), (16, True), (37, True)):
        n, word = blocks(hidden), words(hidden)
        made = parse(f"""
graph example(x: f32[t, b, {4 * hidden}], w: i8[{n}, {word}, 4, 16, 4], sums: i32[{n}, 4, 16],
              scales: f32[{n}, 4, 16], h: f32[b, {hidden}], c: f32[b, {hidden}])
  y, last, c_1, bytes = recurrence_bytes(x, w, sums, scales, h, c | reverse={reverse})  f32[t, b, {hidden}], """
                     f"f32[b, {hidden}], f32[b, {hidden}], u8[b, {4 * word}]\n  return y, last, c_1\n")
        program = compile_graph(made, Config()).executable
        w = torch.randint(-127, 128, (n, word, 4, 16, 4), dtype=torch.int8)
        w[:, -1, ..., hidden - 4 * (word - 1):] = 0
        numbers = [w, w.sum((1, 4), dtype=torch.int32), torch.rand(n, 4, 16) / (60 * hidden ** 0.5)]
        for time, batch in ((5, 3), (1, 1), (0, 2), (3, 0), (7, 13)):
            inputs = [torch.randn(time, batch, 4 * hidden), *numbers, torch.randn(batch, hidden) / 3,
                      torch.randn(batch, hidden)]
            wanted, _, _ = interpret(made, inputs)
            torch.testing.assert_close(list(program(list(inputs))), wanted, rtol=1e-5, atol=1e-5)
        inputs[4][0, 0] = torch.nan  # its range is none, and so is no state of any row
        assert program(list(inputs))[0].isnan().all()


def model(op: str, direction: str = "forward", hidden: int = 21, given: bool = False, lengths: bool = False,
          **attrs: Any) -> Any:
    """An ONNX model of one layer; `given`: first states and weights are inputs. With its constants."""
    draw = np.random.default_rng(0)
    gates, count = {"LSTM": 4, "GRU": 3, "RNN": 1}[op], 2 if direction == "bidirectional" else 1
    constants = {name: draw.standard_normal(shape).astype(np.float32) * 0.3 for name, shape in (
        ("w", (count, gates * hidden, 6)), ("r", (count, gates * hidden, hidden)), ("b", (count, 2 * gates * hidden)))}
    inputs = {"x": ["t", "n", 6]}
    states = ["h0", "c0"][:1 + (op == "LSTM")] if given else []
    inputs |= {name: [count, "n", hidden] for name in states}
    inputs |= {name: list(constants[name].shape) for name in ("w", "r") if given}
    inputs |= {"lengths": ["n"]} if lengths else {}
    results = ["y", "h", "c"][:2 + (op == "LSTM")]
    node = helper.make_node(op, ["x", "w", "r", "b", "lengths" * lengths, *states], results, hidden_size=hidden,
                            direction=direction, **attrs)
    kinds = [helper.make_tensor_value_info(name, TensorProto.INT32 if name == "lengths" else TensorProto.FLOAT, shape)
             for name, shape in inputs.items()]
    made = helper.make_graph([node], "layer", kinds,
                             [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in results],
                             [numpy_helper.from_array(a, name) for name, a in constants.items() if name not in inputs])
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 14)], ir_version=8), constants, inputs


@pytest.mark.parametrize("op, attrs", [("LSTM", {}), ("GRU", {"linear_before_reset": 1}), ("GRU", {}), ("RNN", {}),
                                       ("RNN", {"activations": ["Relu"] * 2})])
def test_onnx_layers_are_recurrences(op, attrs):
    session = pytest.importorskip("onnxruntime").InferenceSession
    draw = np.random.default_rng(1)
    for given, lengths, direction in ((False, True, "bidirectional"), (True, False, "reverse")):
        own = {name: value[:1] if direction == "reverse" and name == "activations" else value
               for name, value in attrs.items()}
        made, constants, inputs = model(op, direction, given=given, lengths=lengths, **own)
        run, theirs = anyshape.compile_onnx(made), session(made.SerializeToString())
        for time, batch in ((5, 3), (1, 1), (9, 4)):
            feed = {name: constants.get(name, draw.standard_normal(
                [{"t": time, "n": batch}.get(size, size) for size in shape]).astype(np.float32))
                for name, shape in inputs.items()}
            if lengths:
                feed["lengths"] = draw.integers(1, time + 1, batch).astype(np.int32)
            for a, b in zip(run(**feed), theirs.run(None, feed), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        assert "onnx." not in str(run.explain())
        if lengths:
            for wrong in (-1, 10):
                with pytest.raises(IndexRangeError, match="a sequence is longer"):
                    run(**feed | {"lengths": np.array([9, 1, wrong, 9], np.int32)})


@pytest.mark.parametrize("unsigned, direction", [(False, "bidirectional"), (True, "reverse")])
def test_quantised_lstms_are_recurrences_of_bytes(unsigned, direction):
    """The routine beside the step that does it time by time, which lengths ask for."""
    draw, hidden, count = np.random.default_rng(0), 21, 2 if direction == "bidirectional" else 1
    kind, zero = (np.uint8, 128) if unsigned else (np.int8, 0)
    constants = {
        "w": draw.integers(-127, 128, (count, 6, 4 * hidden)),
        "r": draw.integers(-127, 128, (count, hidden, 4 * hidden)),
        "w_scale": draw.random((count, 4 * hidden)) / 300, "r_scale": draw.random(count) / 300,
        "w_zero": np.full((count, 4 * hidden), zero), "r_zero": np.full(count, zero),
        "b": draw.standard_normal((count, 8 * hidden)) * 0.3}
    made = {name: (value + (zero if name in ("w", "r") else 0)).astype(
        kind if name in ("w", "r", "w_zero", "r_zero") else np.float32) for name, value in constants.items()}
    inputs = {"x": ["t", "n", 6], "h0": [count, "n", hidden], "c0": [count, "n", hidden], "lengths": ["n"]}

    def layer(lengths):
        node = helper.make_node(
            "DynamicQuantizeLSTM",
            ["x", "w", "r", "b", lengths, "h0", "c0", "", "w_scale", "w_zero", "r_scale", "r_zero"],
            ["y", "h", "c"], hidden_size=hidden, direction=direction, domain="com.microsoft")
        graph = helper.make_graph(
            [node], "layer", [helper.make_tensor_value_info(
                name, TensorProto.INT32 if name == "lengths" else TensorProto.FLOAT, shape)
                for name, shape in inputs.items() if name != "lengths" or lengths],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("y", "h", "c")],
            [numpy_helper.from_array(array, name) for name, array in made.items()])
        return anyshape.compile_onnx(helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", 14), helper.make_opsetid("com.microsoft", 1)], ir_version=8))

    run, by_time = layer(""), layer("lengths")
    for time, batch in ((5, 3), (1, 1), (9, 4)):
        feed = {name: draw.standard_normal(
            [{"t": time, "n": batch}.get(size, size) for size in shape]).astype(np.float32)
            for name, shape in inputs.items() if name != "lengths"}
        wanted = by_time(**feed, lengths=np.full(batch, time, np.int32))
        for a, b in zip(run(**feed), wanted, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
    assert "onnx.lstm" not in str(run.explain()) and "onnx.lstm" in str(by_time.explain())


def test_a_recurrent_model_is_deployed_without_torch(tmp_path):
    made, *_ = model("LSTM", "bidirectional")
    run = anyshape.compile_onnx(made)
    x = np.random.default_rng(2).standard_normal((7, 3, 6)).astype(np.float32)
    wanted = run(x)
    file = tmp_path / "layer.any"
    anyshape.save(run, str(file))
    np.save(tmp_path / "x.npy", x)
    code = f"""
import sys
sys.modules["torch"] = sys.modules["llvmlite"] = None
import numpy as np, anyshape
with anyshape.load({str(file)!r}, trust_native=True) as run:
    x = np.load({str(tmp_path / "x.npy")!r})
    np.savez({str(tmp_path / "y.npz")!r}, *run(x), run(x[:0])[1], run(x[:1, :1])[0])
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    found = list(np.load(tmp_path / "y.npz").values())
    for a, b in zip(found, wanted):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    assert not found[3].any() and found[4].shape == (1, 2, 1, 21)


LAYERS = ((torch.nn.LSTM, {}), (torch.nn.GRU, {}), (torch.nn.RNN, {}), (torch.nn.RNN, {"nonlinearity": "relu"}),
          (torch.nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
          (torch.nn.GRU, {"num_layers": 2, "bidirectional": True, "bias": False, "batch_first": True}))


def results(found: Any) -> list[torch.Tensor]:
    y, last = found
    return [y, *(last if isinstance(last, tuple) else (last,))]


@pytest.mark.parametrize("kind, settings", LAYERS)
def test_modules_are_one_program_for_all_lengths(kind, settings):
    module = kind(6, 21, **settings)
    fast = anyshape.compile(module, strict=True)
    anyshape.reset_stats()
    with torch.no_grad():
        for time, batch in ((5, 3), (7, 2), (1, 4), (6, 1), (1, 1)):
            x = torch.randn(time, batch, 6)
            torch.testing.assert_close(results(fast(x)), results(module(x)), rtol=1e-5, atol=1e-5)
    stats = anyshape.stats()
    assert (stats["programs"], stats["eager_calls"]) == (1, 0)
    assert "anyshape_recurrent" not in str(fast.explain())


@pytest.mark.parametrize("kind, settings", LAYERS[1:5:2] + LAYERS[4:5])
def test_modules_train_in_one_program_for_all_lengths(kind, settings):
    module = kind(6, 11, **settings)
    fast = anyshape.compile(module, strict=True)
    anyshape.reset_stats()

    def gradients(run: Any, x: torch.Tensor) -> list[torch.Tensor]:
        y, *last = results(run(x))
        weights = torch.arange(float(y.numel())).reshape(y.shape).sin()
        loss = (y * weights).sum() + sum((one * one).sum() for one in last)
        return list(torch.autograd.grad(loss, [x, *module.parameters()]))

    for time, batch in ((5, 3), (7, 2), (1, 4)):
        x = torch.randn(time, batch, 6, requires_grad=True)
        torch.testing.assert_close(gradients(fast, x), gradients(module, x), rtol=1e-5, atol=1e-5)
    stats = anyshape.stats()
    assert (stats["programs"], stats["eager_calls"]) == (2, 0)


def test_dropout_between_layers_draws_as_eager_pytorch_does():
    module = torch.nn.LSTM(6, 9, num_layers=3, dropout=0.4)
    fast = anyshape.compile(module, strict=True)
    for time in (5, 8):
        found = []
        for run in (fast, module):
            torch.manual_seed(3)
            found.append(run(torch.ones(time, 2, 6))[0])
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.full
def test_other_dtypes_and_first_states():
    module = torch.nn.LSTM(6, 9).double()
    fast = anyshape.compile(module, strict=True)
    for time in (5, 8):
        x, h, c = (torch.randn(*shape, dtype=torch.float64) for shape in ((time, 2, 6), (1, 2, 9), (1, 2, 9)))
        with torch.no_grad():
            torch.testing.assert_close(results(fast(x, (h, c))), results(module(x, (h, c))))


@pytest.mark.filterwarnings("ignore")
def test_an_export_is_of_one_length():
    free = torch.export.Dim.DYNAMIC
    with pytest.raises(torch._dynamo.exc.UserError, match="specialized"):
        torch.export.export(torch.nn.LSTM(4, 5), (torch.randn(7, 3, 4),), dynamic_shapes=({0: free, 1: free},))
