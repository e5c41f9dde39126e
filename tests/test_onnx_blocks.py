"""ONNX weights of few bits, a scale for each block: results are onnxruntime's, by one program that holds the bytes."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import anyshape

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

node = helper.make_node
DRAW = np.random.default_rng(0)


def same(nodes: list[Any], inputs: list[Any], constants: dict[str, Any], feeds: list[dict[str, np.ndarray]],
         close: float = 1e-5) -> None:
    held = [one if isinstance(one, onnx.TensorProto) else numpy_helper.from_array(one, name)
            for name, one in constants.items()]
    graph = helper.make_graph(nodes, "blocks", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
                              held)
    made = helper.make_model(graph, ir_version=10, opset_imports=[
        helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]).SerializeToString()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session, before = onnxruntime.InferenceSession(made, options), anyshape.stats()["programs"]
    compiled = anyshape.compile_onnx(made)
    for feed in feeds:
        want, have = session.run(None, feed)[0], compiled(**feed)
        assert have.shape == want.shape and have.dtype == want.dtype
        np.testing.assert_allclose(have, want, close, close * np.abs(want).max())
    assert anyshape.stats()["programs"] == before + 1


@pytest.mark.parametrize(("bits", "inner", "block", "zeros"), [
    (4, 72, 16, "packed"), (4, 64, 32, ""), (4, 64, 32, "floats"), (4, 64, 32, "order"), (8, 72, 16, "packed"),
    (8, 64, 32, ""), (2, 64, 32, "packed")])
def test_products(bits: int, inner: int, block: int, zeros: str) -> None:
    columns, blocks = 5, -(-inner // block)
    constants: dict[str, Any] = {"b": DRAW.integers(0, 256, (columns, blocks, block * bits // 8)).astype(np.uint8),
                                 "s": DRAW.random((columns, blocks), np.float32),
                                 "bias": DRAW.random(columns, np.float32)}
    if zeros == "packed":
        constants["z"] = DRAW.integers(0, 256, (columns, -(-blocks * bits // 8))).astype(np.uint8)
    elif zeros == "floats":
        constants["z"] = DRAW.random((columns, blocks), np.float32) * 8
    elif zeros == "order":
        constants["g"] = DRAW.integers(0, blocks, inner).astype(np.int32)
    names = ["x", "b", "s", "z" if "z" in constants else "", "g" if "g" in constants else "", "bias"]
    made = node("MatMulNBits", names, ["y"], domain="com.microsoft", K=inner, N=columns, bits=bits, block_size=block)
    same([made], [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", "t", inner])], constants,
         [{"x": DRAW.standard_normal(shape).astype(np.float32)} for shape in ((1, 1, inner), (2, 3, inner))])


@pytest.mark.parametrize("kind", [0, 1])
def test_floats_of_four_bits(kind: int) -> None:
    inner, columns, block = 48, 5, 32
    made = node("MatMulBnb4", ["x", "b", "s"], ["y"], domain="com.microsoft", K=inner, N=columns, block_size=block,
                quant_type=kind)
    same([made], [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", "t", inner])],
         {"b": DRAW.integers(0, 256, inner * columns // 2).astype(np.uint8),
          "s": DRAW.random(-(-inner * columns // block), np.float32)},
         [{"x": DRAW.standard_normal(shape).astype(np.float32)} for shape in ((1, 1, inner), (2, 3, inner))])


def test_zero_points_in_an_order() -> None:
    """Weights in an order of groups, with zero points of their groups, by the definition: onnxruntime 1.32 takes no
    notice of packed zero points there, and does of the same in floats."""
    inner, columns, block = 64, 4, 16
    weights, zeros = DRAW.integers(0, 16, (columns, inner)), DRAW.integers(0, 16, (columns, inner // block))
    scales, groups = DRAW.random((columns, inner // block), np.float32), DRAW.integers(0, inner // block, inner)
    want = ((weights - zeros[:, groups]) * scales[:, groups]).astype(np.float32)
    for points in ((zeros[:, ::2] | zeros[:, 1::2] << 4).astype(np.uint8), zeros.astype(np.float32)):
        constants = {"b": (weights[:, ::2] | weights[:, 1::2] << 4).astype(np.uint8).reshape(columns, -1, block // 2),
                     "s": scales, "z": points, "g": groups.astype(np.int32)}
        made = node("MatMulNBits", ["x", *constants], ["y"], domain="com.microsoft", K=inner, N=columns, bits=4,
                    block_size=block)
        rows = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["t", inner])
        held = [numpy_helper.from_array(one, name) for name, one in constants.items()]
        graph = helper.make_graph([made], "blocks", [rows],
                                  [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], held)
        compiled = anyshape.compile_onnx(helper.make_model(graph, opset_imports=[
            helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)], ir_version=10))
        x = DRAW.standard_normal((3, inner)).astype(np.float32)
        np.testing.assert_allclose(compiled(x), x @ want.T, 1e-5, 1e-4)


@pytest.mark.parametrize(("kind", "bits", "zeros"), [
    ("bytes", 4, False), ("bytes", 4, True), ("bytes", 8, True), ("INT4", 4, False), ("UINT4", 4, True)])
def test_lookups(kind: str, bits: int, zeros: bool) -> None:
    constants: dict[str, Any] = {"s": DRAW.random((20, 3), np.float32)}
    for name, shape in (("d", (20, 48)), ("z", (20, 3)))[:1 + zeros]:
        if kind == "bytes":
            constants[name] = DRAW.integers(0, 256, (*shape[:-1], -(-shape[-1] * bits // 8))).astype(np.uint8)
        else:
            low = -8 if kind == "INT4" else 0
            numbers = DRAW.integers(low, low + 16, shape).reshape(-1)
            constants[name] = helper.make_tensor(name, getattr(TensorProto, kind), shape, numbers)
    made = node("GatherBlockQuantized", ["d", "i", "s", *["z"][:zeros]], ["y"], domain="com.microsoft", gather_axis=0,
                quantize_axis=1, block_size=16, bits=bits)
    same([made], [helper.make_tensor_value_info("i", TensorProto.INT64, ["b", "t"])], constants,
         [{"i": DRAW.integers(-20, 20, shape)} for shape in ((1, 1), (2, 5))])


def test_constants_of_four_bits() -> None:
    numbers = helper.make_tensor("d", TensorProto.INT4, (32, 6), DRAW.integers(-8, 8, 192))
    nodes = [node("DequantizeLinear", ["d", "s"], ["w"], axis=0, block_size=16), node("Neg", ["w"], ["n"]),
             node("MatMul", ["x", "n"], ["y"])]
    same(nodes, [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["t", 32])],
         {"d": numbers, "s": DRAW.random((2, 6), np.float32)},
         [{"x": DRAW.random((t, 32), np.float32)} for t in (1, 4)])
