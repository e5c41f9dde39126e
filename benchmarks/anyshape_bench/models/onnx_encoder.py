"""A transformer encoder as an ONNX model, for runtimes that read ONNX: ids i64[batch, time] --> f32[batch, width].

Embedding, layers of attention and MLP with norms before them, the mean over time. Dims by name: one program for all.
"""
from __future__ import annotations

from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper


class _Writer:
    """Nodes and weights of the model, in order."""

    def __init__(self, seed: int) -> None:
        self.nodes: list[Any] = []
        self.weights: list[Any] = []
        self.draw = np.random.default_rng(seed)

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def constant(self, array: Any) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def normal(self, *shape: int) -> str:
        return self.constant((self.draw.standard_normal(shape) * shape[0] ** -0.5).astype(np.float32))

    def norm(self, x: str, width: int) -> str:
        scale, bias = self.constant(np.ones(width, np.float32)), self.constant(np.zeros(width, np.float32))
        return self.op("LayerNormalization", x, scale, bias, axis=-1)

    def linear(self, x: str, width: int, out: int) -> str:
        return self.op("Add", self.op("MatMul", x, self.normal(width, out)), self.constant(np.zeros(out, np.float32)))

    def heads(self, x: str, heads: int, width: int, order: tuple[int, ...]) -> str:
        split = self.op("Reshape", x, self.constant(np.array([0, 0, heads, width // heads])))
        return self.op("Transpose", split, perm=order)


def encoder(layers: int = 4, width: int = 256, heads: int = 4, words: int = 1000, seed: int = 0) -> ModelProto:
    """The model with random weights."""
    w = _Writer(seed)
    x = w.op("Gather", w.constant(w.draw.standard_normal((words, width)).astype(np.float32)), "ids")
    for _ in range(layers):
        h = w.norm(x, width)
        q = w.heads(w.linear(h, width, width), heads, width, (0, 2, 1, 3))
        k = w.heads(w.linear(h, width, width), heads, width, (0, 2, 3, 1))
        v = w.heads(w.linear(h, width, width), heads, width, (0, 2, 1, 3))
        scale = w.constant(np.array((width // heads) ** -0.5, np.float32))
        scores = w.op("Softmax", w.op("Mul", w.op("MatMul", q, k), scale), axis=-1)
        mixed = w.op("Transpose", w.op("MatMul", scores, v), perm=(0, 2, 1, 3))
        mixed = w.op("Reshape", mixed, w.constant(np.array([0, 0, width])))
        x = w.op("Add", x, w.linear(mixed, width, width))
        h = w.op("Gelu", w.linear(w.norm(x, width), width, 4 * width))
        x = w.op("Add", x, w.linear(h, 4 * width, width))
    w.nodes.append(helper.make_node("ReduceMean", [w.norm(x, width), w.constant(np.array([1]))], ["y"], keepdims=0))
    graph = helper.make_graph(
        w.nodes, "encoder", [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "time"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", width])], w.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
