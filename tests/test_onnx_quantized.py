"""Quantised operators of ONNX: results are onnxruntime's, bit by bit: rounding to even, saturation, zero points and
scales of channels, sums that f32 does not hold."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import anyshape

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

node = helper.make_node
KINDS = {"uint8": TensorProto.UINT8, "int8": TensorProto.INT8, "int32": TensorProto.INT32, "float32": TensorProto.FLOAT}


def same(nodes: list[Any], feed: dict[str, np.ndarray], constants: dict[str, Any], kinds: dict[str, str]) -> Any:
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
            np.testing.assert_array_equal(have, want)
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
