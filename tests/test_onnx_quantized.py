"""Quantised operators of ONNX: results are onnxruntime's, bit by bit: rounding to even, saturation, zero points and
scales of channels, sums that f32 does not hold."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import anyshape
from anyshape.plan.ir.program import LibraryStep, touched

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

node = helper.make_node
KINDS = {"bool": TensorProto.BOOL, "uint8": TensorProto.UINT8, "int8": TensorProto.INT8, "int32": TensorProto.INT32,
         "float32": TensorProto.FLOAT}


def same(nodes: list[Any], feed: dict[str, np.ndarray], constants: dict[str, Any], kinds: dict[str, str],
         close: float = 0) -> Any:
    """Ours are onnxruntime's results, for all sizes of the first and, of images, the last dims; the compiled model."""
    inputs = [helper.make_tensor_value_info(name, KINDS[str(x.dtype)], [
        d if dim != 1 else x.shape[1] for dim, d in enumerate(("n", "c", "h", "w")[:x.ndim])])
        for name, x in feed.items()]
    graph = helper.make_graph(
        nodes, "quantized", inputs, [helper.make_tensor_value_info(name, KINDS[kind], None)
                                     for name, kind in kinds.items()],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9).SerializeToString()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session, compiled = onnxruntime.InferenceSession(made, options), anyshape.compile_onnx(made)
    for count in (len(next(iter(feed.values()))), 1):
        own = {name: x[:count] for name, x in feed.items()}
        found = compiled(**own)
        for have, want in zip(found if isinstance(found, tuple) else (found,), session.run(None, own), strict=True):
            assert have.dtype == want.dtype
            np.testing.assert_allclose(have, want, close, close)
    return compiled


def numbers(draw: np.random.Generator, dtype: str, *shape: int) -> np.ndarray:
    limits = np.iinfo(dtype)
    found = draw.integers(limits.min, limits.max + 1, shape).astype(dtype)
    found.reshape(-1)[:2] = limits.min, limits.max
    return found


@pytest.mark.parametrize(("left", "right"), [("uint8", "uint8"), ("uint8", "int8"), ("int8", "int8")])
def test_products(left: str, right: str) -> None:
    draw = np.random.default_rng(0)
    for rows, depth, columns, each in ((7, 13, 5, True), (3, 700, 17, False)):
        a, b = numbers(draw, left, rows, depth), numbers(draw, right, depth, columns)
        count = (columns,) if each else (2,)
        zero = {"az": numbers(draw, left, 2)[1], "bz": numbers(draw, right, *count) if each else b[0, 0]}
        scale = (draw.random(count if each else ()) * 0.01 + 0.001).astype(np.float32)
        constants = {"b": b, **zero, "as": np.float32(0.02), "bs": scale, "ys": np.float32(0.05 * depth**0.5)}
        same([node("MatMulInteger", ["a", "b", "az", "bz"], ["y"]),
              node("QLinearMatMul", ["a", "as", "az", "b", "bs", "bz", "ys", "az"], ["z"])],
             {"a": a}, constants, {"y": "int32", "z": left})


@pytest.mark.parametrize(("groups", "channels", "outs", "kernel", "stride"),
                         [(1, 3, 8, 3, 1), (6, 6, 6, 3, 2), (2, 8, 6, 2, 1), (1, 40, 4, 3, 1)])
def test_convolutions(groups: int, channels: int, outs: int, kernel: int, stride: int) -> None:
    draw = np.random.default_rng(0)
    x = numbers(draw, "uint8", 2, channels, 9, 7)
    w = numbers(draw, "int8", outs, channels // groups, kernel, kernel)
    given = {"group": groups, "strides": [stride] * 2, "pads": [kernel // 2] * 4}
    constants = {"w": w, "xz": np.uint8(117), "wz": np.int8(0), "wzs": np.zeros(outs, np.int8),
                 "xs": np.float32(0.03), "ws": (draw.random(outs) * 0.01 + 0.001).astype(np.float32),
                 "ys": np.float32(0.07), "yz": np.uint8(100), "b": draw.integers(-2000, 2000, outs).astype(np.int32)}
    same([node("ConvInteger", ["x", "w", "xz", "wz"], ["y"], **given),
          node("QLinearConv", ["x", "xs", "xz", "w", "ws", "wzs", "ys", "yz", "b"], ["z"], **given)],
         {"x": x}, constants, {"y": "int32", "z": "uint8"})


def test_quantization_by_range_and_by_constants() -> None:
    draw = np.random.default_rng(0)
    halves = np.arange(-40, 40, dtype=np.float32).reshape(8, 10) / 2  # which are rounded to even
    for x in (draw.standard_normal((5, 7)).astype(np.float32), np.zeros((2, 3), np.float32), halves * 1e4,
              -np.ones((3, 1), np.float32)):
        same([node("DynamicQuantizeLinear", ["x"], ["y", "s", "z"])], {"x": x}, {},
             {"y": "uint8", "s": "float32", "z": "uint8"})
    for zero in (np.uint8(3), np.int8(-5)):
        same([node("QuantizeLinear", ["x", "s", "z"], ["q"]), node("DequantizeLinear", ["q", "s", "z"], ["v"])],
             {"x": halves}, {"s": np.float32(1), "z": zero}, {"q": str(zero.dtype), "v": "float32"})


def test_sums_that_f32_does_not_hold_are_exact_and_wrap_around_as_i32() -> None:
    ones = np.full((2, 70000), 255, np.uint8)
    same([node("MatMulInteger", ["a", "b"], ["y"])], {"a": ones},
                    {"b": np.full((70000, 1), 127, np.int8) - (np.arange(70000) % 2).astype(np.int8)[:, None]},
                    {"y": "int32"})


# ---- DequantizeLinear -> an operator -> QuantizeLinear


def between(operator: list[Any], draw: np.random.Generator, kind: str, x: np.ndarray, weight: np.ndarray, axis: int,
            **more: Any) -> Any:
    """A quantised operator of x and weights (and a bias, where it takes "b") as quantisers write it; what they give."""
    outs = weight.shape[axis]
    scales = (draw.random(outs) * 0.01 + 0.001).astype(np.float32)
    constants = {"w": weight, "xs": np.float32(0.03), "xz": np.array(5, kind), "ws": scales,
                 "wz": np.zeros(outs, weight.dtype), "b": draw.integers(-900, 900, outs).astype(np.int32),
                 "bs": np.float32(0.03) * scales, "bz": np.zeros(outs, np.int32), "ys": np.float32(0.05),
                 "yz": np.array(np.iinfo(kind).min, kind)} | more
    nodes = [node("QuantizeLinear", ["x", "xs", "xz"], ["q"]), node("DequantizeLinear", ["q", "xs", "xz"], ["dx"]),
             node("DequantizeLinear", ["w", "ws", "wz"], ["dw"], axis=axis),
             node("DequantizeLinear", ["b", "bs", "bz"], ["db"], axis=0), *operator,
             node("QuantizeLinear", ["m", "ys", "yz"], ["qm"]), node("DequantizeLinear", ["qm", "ys", "yz"], ["y"])]
    used = {name for one in nodes for name in one.input}
    return same(nodes, {"x": x}, {name: array for name, array in constants.items() if name in used}, {"y": "float32"})


def by_bytes(compiled: Any) -> None:
    """It is products of bytes: nothing of its weights is ever a float, and no step is PyTorch's."""
    text = str(compiled.explain())
    assert "_bytes" in text and "aten" not in text
    (program,) = compiled.compilation.programs
    plan = program.executable.plan
    assert {step.op for step in plan.steps if isinstance(step, LibraryStep)} <= {"matmul_bytes", "conv_bytes"}
    read = {window.buffer for step in plan.steps for window in touched(step)}
    weights = [one for one in plan.buffers if one.is_input and one.name in read and one.name.startswith("constant")]
    whole = [one for one in program.constants if one.dtype == torch.int8 and one.dim() != 4]
    assert weights and not whole  # there are panels only


@pytest.mark.parametrize("kind", ["uint8", "int8"])
def test_products_between_quantised_tensors(kind: str) -> None:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((7, 37)).astype(np.float32)
    for op in ([node("MatMul", ["dx", "dw"], ["m"])], [node("Gemm", ["dx", "dw", "db"], ["m"])],
               [node("MatMul", ["dx", "dw"], ["t"]), node("Relu", ["t"], ["m"])]):
        by_bytes(between(op, draw, kind, x, numbers(draw, "int8", 37, 35), 1))
    by_bytes(between([node("Gemm", ["dx", "dw", "db"], ["m"], transB=1)], draw, kind, x, numbers(draw, "int8", 6, 37),
                     0))


@pytest.mark.parametrize(("channels", "outs", "kernel", "settings"), [
    (3, 8, (3, 3), {"pads": [1, 1, 1, 1]}), (5, 33, (1, 1), {}),
    (4, 6, (3, 2), {"strides": [2, 1], "pads": [1, 0, 2, 1]}), (150, 7, (3, 3), {"pads": [1, 1, 1, 1]}),
    (4, 6, (3, 3), {"dilations": [2, 1], "pads": [2, 1, 2, 1]}), (8, 4, (5, 5), {"auto_pad": "SAME_UPPER"})])
def test_convolutions_between_quantised_tensors(channels: int, outs: int, kernel: tuple[int, int],
                                                settings: dict[str, Any]) -> None:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((2, channels, 9, 11)).astype(np.float32)
    for kind, last in (("uint8", [node("Relu", ["t"], ["m"])]), ("int8", [node("Identity", ["t"], ["m"])])):
        by_bytes(between([node("Conv", ["dx", "dw", "db"], ["t"], **settings), *last], draw, kind, x,
                         numbers(draw, "int8", outs, channels, *kernel), 0))


def test_convolutions_of_one_dim_and_of_a_zero_point_that_a_call_finds() -> None:
    draw = np.random.default_rng(0)
    w = numbers(draw, "int8", 6, 4, 3)
    x = draw.standard_normal((3, 4, 12)).astype(np.float32)
    same([node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
          node("ConvInteger", ["q", "w", "z"], ["y"], pads=[1, 1])], {"x": x}, {"w": w}, {"y": "int32"})


def test_what_moves_elements_moves_the_whole_numbers() -> None:
    """Transposed weights and activations, and a table of which rows are taken: nothing is dequantised before."""
    draw = np.random.default_rng(0)
    x = draw.standard_normal((7, 37)).astype(np.float32)
    moved = [node("Transpose", ["dw"], ["wt"]), node("Transpose", ["dx"], ["xt"], perm=[1, 0]),
             node("Transpose", ["xt"], ["xx"], perm=[1, 0]), node("MatMul", ["xx", "wt"], ["m"])]
    by_bytes(between(moved, draw, "uint8", x, numbers(draw, "int8", 6, 37), 0))
    table = numbers(draw, "int8", 50, 8)
    constants = {"w": table, "s": np.float32(0.1), "z": np.int8(0), "i": np.array([49])}
    nodes = [node("DequantizeLinear", ["w", "s", "z"], ["d"]), node("Gather", ["d", "i"], ["g"]),
             node("Mul", ["g", "x"], ["y"])]
    compiled = same(nodes, {"x": draw.standard_normal((3, 8)).astype(np.float32)}, constants, {"y": "float32"})
    assert "400" not in str(compiled.explain())  # elements of the table


def test_floats_that_somebody_else_reads_are_there() -> None:
    """A result that is quantised and an output as well; a bias of floats; a scale that the bias does not have."""
    draw = np.random.default_rng(0)
    x, w = draw.standard_normal((5, 12)).astype(np.float32), numbers(draw, "int8", 12, 6)
    made = [node("QuantizeLinear", ["x", "s", "z"], ["q"]), node("DequantizeLinear", ["q", "s", "z"], ["dx"]),
            node("DequantizeLinear", ["w", "s", "wz"], ["dw"]), node("Gemm", ["dx", "dw", "b"], ["m"]),
            node("QuantizeLinear", ["m", "s", "z"], ["y"])]
    constants = {"w": w, "s": np.float32(0.02), "z": np.uint8(128), "wz": np.int8(0),
                 "b": draw.standard_normal(6).astype(np.float32)}
    graph = helper.make_graph(
        made, "floats", [helper.make_tensor_value_info("x", 1, ["n", 12])],
        [helper.make_tensor_value_info("m", 1, None), helper.make_tensor_value_info("y", 2, None)],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    sums, rounded = anyshape.compile_onnx(model.SerializeToString())(x)
    q = np.clip(np.rint(x / np.float32(0.02)) + 128, 0, 255)
    exact = ((q - 128) * np.float64(np.float32(0.02))) @ (w * np.float64(np.float32(0.02))) + constants["b"]
    np.testing.assert_allclose(sums, exact, rtol=1e-5, atol=1e-5)
    wanted = np.clip(np.rint(exact / np.float32(0.02)) + 128, 0, 255)
    assert np.abs(rounded.astype(int) - wanted).max() <= 1


def test_embeddings_of_bytes_and_choices_between_them() -> None:
    draw = np.random.default_rng(0)
    tables = {name: numbers(draw, "uint8", *shape) for name, shape in (
        ("w", (9, 16)), ("p", (7, 16)), ("s", (2, 16)), ("g", (16,)), ("b", (16,)))}
    scales = {f"{name}s": np.float32(0.01 + 0.01 * place) for place, name in enumerate(tables)}
    zeros = {f"{name}z": np.uint8(100 + place) for place, name in enumerate(tables)}
    feed = {"i": np.array([[1, 2, 3], [0, 5, 6]], np.int32), "k": np.array([[0, 1, 1], [0, 0, 1]], np.int32)}
    names = ["i", "k", *tables, "", *scales, *zeros]
    same([node("QEmbedLayerNormalization", names, ["y", "n"], domain="com.microsoft")], feed,
         {**tables, **scales, **zeros}, {"y": "float32", "n": "int32"}, 1e-5)
    given = {"c": draw.random((3, 4)) > 0.5, "a": numbers(draw, "uint8", 3, 4), "b": numbers(draw, "uint8", 3, 4)}
    same([node("QLinearWhere", ["c", "a", "s", "z", "b", "t", "z", "t", "z"], ["y"], domain="com.microsoft")], given,
         {"s": np.float32(0.02), "t": np.float32(0.05), "z": np.uint8(100)}, {"y": "uint8"})


@pytest.mark.parametrize("last", [True, False])
def test_images_with_channels_last_as_onnxruntime_writes_them(last: bool) -> None:
    draw = np.random.default_rng(30)
    constants = {"xs": np.float32(0.0213), "xz": np.uint8(120), "ys": np.float32(0.31), "yz": np.uint8(128),
                 "w": numbers(draw, "int8", 6, 4, 3, 2), "ws": np.full(6, 0.01, np.float32), "wz": np.zeros(6, np.int8)}
    x, own = numbers(draw, "uint8", 2, 4, 6, 4), {"domain": "com.microsoft"}
    nodes = [node("QLinearConv", ["x", "xs", "xz", "w", "ws", "wz", "ys", "yz"], ["c"], kernel_shape=[3, 2],
                  pads=[1, 0, 1, 1], channels_last=int(last), **own),
             node("QLinearGlobalAveragePool", ["c", "ys", "yz", "xs", "xz"], ["g"], channels_last=int(last), **own),
             node("QLinearAveragePool", ["c", "ys", "yz", "ys", "yz"], ["a"], kernel_shape=[2, 2],
                  channels_last=int(last), **own)]
    if last:
        nodes.append(node("NhwcMaxPool", ["c"], ["m"], kernel_shape=[3, 2], pads=[1, 1, 1, 0], strides=[2, 1], **own))
    same(nodes, {"x": x}, constants, dict.fromkeys("cgam" if last else "cga", "uint8"))


def test_a_file_with_channels_in_blocks_is_refused_in_words() -> None:
    graph = helper.make_graph([node("ReorderInput", ["x"], ["y"], domain="com.microsoft.nchwc")], "blocks", [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 16, "h", "w"])], [
        helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    with pytest.raises(anyshape.AnyShapeError, match="ORT_ENABLE_EXTENDED"):
        anyshape.compile_onnx(helper.make_model(graph).SerializeToString())
