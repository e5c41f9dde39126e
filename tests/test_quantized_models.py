"""Whole models that onnxruntime's tools have quantised, of float models made here: convolutions and an encoder,
in every form that the tools write, at new sizes, against onnxruntime's results for the nodes as they stand: its own
fusions are further away from those than ours (it reads a softmax from a table).

Where a number lies between two steps of its quantisation, the last bit of a float decides (of a residual, a softmax):
so results may be a step apart, and are no further from the float model's than onnxruntime's are.
"""
from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anyshape
from anyshape.plan.ir.program import ExternStep, LibraryStep

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
tools = pytest.importorskip("onnxruntime.quantization")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

node = helper.make_node
CHANNELS, WIDTH, HEADS, TOKENS = 8, 32, 2, 50


class Data(tools.CalibrationDataReader):  # type: ignore[misc]
    """What a model is calibrated on."""

    def __init__(self, given: list[np.ndarray]) -> None:
        self.given = iter([{"x": one} for one in given])

    def get_next(self) -> Any:
        return next(self.given, None)


def made(nodes: list[Any], x: Any, y: Any, constants: dict[str, np.ndarray]) -> Any:
    graph = helper.make_graph(nodes, "net", [x], [y],
                              [numpy_helper.from_array(array, name) for name, array in constants.items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def network(draw: np.random.Generator) -> Any:
    """Convolutions with residuals, a pool, a mean over pixels and a layer of their channels."""
    c = CHANNELS
    shapes = {"w0": (c, 3, 5, 5), "w1": (c, c, 3, 3), "w2": (2 * c, c, 3, 3), "w3": (2 * c, c, 1, 1), "w4": (2 * c, 10)}
    constants = {name: (draw.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)
                 for name, shape in shapes.items()}
    constants |= {f"b{i}": (draw.standard_normal(constants[f"w{i}"].shape[0]) * 0.1).astype(np.float32)
                  for i in range(4)}
    constants["b4"] = draw.standard_normal(10).astype(np.float32)
    same = {"pads": [1, 1, 1, 1]}
    nodes = [node("Conv", ["x", "w0", "b0"], ["c0"], strides=[2, 2], pads=[2, 2, 2, 2]), node("Relu", ["c0"], ["r0"]),
             node("MaxPool", ["r0"], ["p0"], kernel_shape=[2, 2], strides=[2, 2]),
             node("Conv", ["p0", "w1", "b1"], ["c1"], **same), node("Relu", ["c1"], ["r1"]),
             node("Add", ["r1", "p0"], ["s1"]), node("Conv", ["s1", "w2", "b2"], ["c2"], strides=[2, 2], **same),
             node("Conv", ["s1", "w3", "b3"], ["c3"], strides=[2, 2]), node("Add", ["c2", "c3"], ["s2"]),
             node("Relu", ["s2"], ["r2"]), node("GlobalAveragePool", ["r2"], ["g"]), node("Flatten", ["g"], ["f"]),
             node("Gemm", ["f", "w4", "b4"], ["y"])]
    return made(nodes, helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, "h", "w"]),
                helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 10]), constants)


def encoder(draw: np.random.Generator) -> Any:
    """A table of words, attention, and two layers."""
    d = WIDTH
    shapes = {"e": (TOKENS, d), "q": (d, d), "k": (d, d), "v": (d, d), "o": (d, d), "a": (d, 4 * d), "b": (4 * d, d)}
    constants = {name: (draw.standard_normal(shape) / np.sqrt(shape[0]) * 2).astype(np.float32)
                 for name, shape in shapes.items()}
    constants |= {"ab": draw.standard_normal(4 * d).astype(np.float32), "one": np.ones(d, np.float32),
                  "zero": np.zeros(d, np.float32), "root": np.float32((d // HEADS) ** -0.5),
                  "cut": np.array([0, 0, HEADS, d // HEADS]), "back": np.array([0, 0, d])}
    nodes = [node("Gather", ["e", "x"], ["h"])]
    for name, perm in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        nodes += [node("MatMul", ["h", name], [f"{name}m"]), node("Reshape", [f"{name}m", "cut"], [f"{name}r"]),
                  node("Transpose", [f"{name}r"], [f"{name}t"], perm=perm)]
    nodes += [node("MatMul", ["qt", "kt"], ["s"]), node("Mul", ["s", "root"], ["t"]),
              node("Softmax", ["t"], ["p"], axis=-1), node("MatMul", ["p", "vt"], ["u"]),
              node("Transpose", ["u"], ["ut"], perm=[0, 2, 1, 3]), node("Reshape", ["ut", "back"], ["ur"]),
              node("MatMul", ["ur", "o"], ["m"]), node("Add", ["m", "h"], ["r"]),
              node("LayerNormalization", ["r", "one", "zero"], ["l"]), node("MatMul", ["l", "a"], ["i"]),
              node("Add", ["i", "ab"], ["j"]), node("Relu", ["j"], ["jj"]), node("MatMul", ["jj", "b"], ["y"])]
    return made(nodes, helper.make_tensor_value_info("x", TensorProto.INT64, ["n", "t"]),
                helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", "t", d]), constants)


def quantized(model: Any, form: str, given: list[np.ndarray], folder: Path) -> str:
    """The path of the model as the tools quantise it."""
    logging.disable(logging.WARNING)
    source, target = str(folder / "float.onnx"), str(folder / f"{form}.onnx")
    onnx.save(model, source)
    try:
        if form == "dynamic":
            tools.quantize_dynamic(source, target, weight_type=tools.QuantType.QInt8)
        else:
            shape, _, channels = form.partition(" ")
            tools.quantize_static(
                source, target, Data(given), per_channel=channels == "channels", weight_type=tools.QuantType.QInt8,
                quant_format=tools.QuantFormat.QDQ if shape == "QDQ" else tools.QuantFormat.QOperator,
                activation_type=tools.QuantType.QInt8 if channels == "signed" else tools.QuantType.QUInt8)
    finally:
        logging.disable(logging.NOTSET)
    return target


@pytest.mark.parametrize("form", ["QDQ", "QDQ channels", "QDQ signed", "operators", "dynamic"])
@pytest.mark.parametrize("build", [network, encoder])
def test_results_are_those_of_onnxruntime(build: Any, form: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    shapes: Any = [(2, 3, 32, 32), (1, 3, 33, 47), (3, 3, 64, 20)] if build is network else [(2, 8), (1, 1), (3, 21)]

    def fed(shape: Any) -> np.ndarray:
        return (draw.standard_normal(shape).astype(np.float32) if build is network
                else draw.integers(0, TOKENS, shape))

    model = build(draw)
    path = quantized(model, form, [fed(shapes[0]) for _ in range(3)], tmp_path)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    reference, exact = (onnxruntime.InferenceSession(one, options) for one in (path, str(tmp_path / "float.onnx")))
    compiled = anyshape.compile_onnx(path)
    for shape in shapes:
        x = fed(shape)
        found, wanted, best = compiled(x), reference.run(None, {"x": x})[0], exact.run(None, {"x": x})[0]
        assert found.shape == wanted.shape and found.dtype == wanted.dtype
        error = np.sqrt(np.mean((wanted - best) ** 2))
        assert np.sqrt(np.mean((found - wanted) ** 2)) <= 0.35 * error, "further apart than their quantisation"
        assert np.sqrt(np.mean((found - best) ** 2)) <= 1.1 * error
    (program,) = compiled.compilation.programs
    products = [step.op for step in program.executable.plan.steps if isinstance(step, LibraryStep)]
    assert products and (form == "dynamic" or set(products) <= {"matmul_bytes", "conv_bytes"}), products
    assert not [step.target for step in program.executable.plan.steps
                if isinstance(step, ExternStep) and "convolution" in step.target]


def test_a_file_of_it_runs_without_torch(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    images = draw.standard_normal((2, 3, 32, 32)).astype(np.float32)
    compiled = anyshape.compile_onnx(quantized(network(draw), "QDQ", [images], tmp_path))
    x = draw.standard_normal((1, 3, 35, 40)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    anyshape.save(compiled, tmp_path / "net.any")
    code = f"""
import sys
sys.modules["torch"] = sys.modules["llvmlite"] = None
import numpy as np, anyshape
run = anyshape.load({str(tmp_path / "net.any")!r}, trust_native=True)
np.save({str(tmp_path / "y.npy")!r}, run(np.load({str(tmp_path / "x.npy")!r})))
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), compiled(x))
