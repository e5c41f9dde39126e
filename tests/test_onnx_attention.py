"""onnxruntime's fused operators of transformers give its results at all sizes."""
from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import anyshape

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

DRAW = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return (DRAW.standard_normal(shape) * 0.5).astype(np.float32)


def checked(op: str, operands: list[str], inputs: dict[str, Any], outputs: list[str], constants: dict[str, Any],
            feeds: list[dict[str, np.ndarray]], before: Any = (), **attributes: Any) -> None:
    kinds = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in feeds[0].items()}
    node = helper.make_node(op, operands, outputs, domain="com.microsoft", **attributes)
    graph = helper.make_graph(
        [*before, node], "made",
        [helper.make_tensor_value_info(name, kinds[name], shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs if name],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()])
    sets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    made = helper.make_model(graph, opset_imports=sets, ir_version=8)
    session = onnxruntime.InferenceSession(made.SerializeToString())
    programs = anyshape.stats()["programs"]
    compiled = anyshape.compile_onnx(made)
    for feed in feeds:
        found = compiled(**feed)
        for have, want in zip(found if isinstance(found, tuple) else (found,), session.run(None, feed), strict=True):
            assert have.shape == want.shape
            np.testing.assert_allclose(have, want, 1e-4, 1e-5)
    assert anyshape.stats()["programs"] <= programs + 2  # a length of 1 that meets another has its own


@pytest.mark.parametrize("flags", [2, 5, 12, 15])
def test_products_of_operands_that_are_turned_as_they_are_read(flags):
    trans_a, trans_b, batch_a, batch_b = (flags >> place & 1 for place in range(4))

    def shape(rows: Any, columns: Any, batch: Any, turned: int, moved: int) -> list[Any]:
        rows, columns = (columns, rows) if turned else (rows, columns)
        return [rows, *batch, columns] if moved else [*batch, rows, columns]

    def shapes(b: Any, m: Any) -> dict[str, Any]:
        return {"x": shape(m, 4, [b, 2], trans_a, batch_a), "y": shape(4, 6, [b, 2], trans_b, batch_b)}

    checked("FusedMatMul", ["x", "y"], shapes("b", "m"), ["z"], {},
            [{name: floats(*dims) for name, dims in shapes(b, m).items()} for b, m in ((3, 5), (1, 2))],
            transA=trans_a, transB=trans_b, transBatchA=batch_a, transBatchB=batch_b, alpha=0.5)


def test_attention_with_masks_and_a_past():
    feeds = [{"x": floats(b, s, 8), "m": np.tri(b, s + p, s + p - 1, dtype=np.int32), "p": floats(2, b, 2, p, 4)}
             for b, s, p in ((2, 5, 3), (1, 1, 1), (3, 7, 0))]
    checked("Attention", ["x", "w", "b", "m", "p"], {"x": ["b", "s", 8], "m": ["b", "t"], "p": [2, "b", 2, "p", 4]},
            ["y", "q"], {"w": floats(8, 24), "b": floats(24)}, feeds, num_heads=2, unidirectional=1)


def test_multi_head_attention_of_other_keys():
    feeds = [{"q": floats(b, s, 8), "k": floats(b, t, 8), "v": floats(b, t, 12), "m": np.tri(b, t, 1, dtype=np.int32)}
             for b, s, t in ((2, 5, 3), (1, 1, 1), (3, 7, 11))]
    checked("MultiHeadAttention", ["q", "k", "v", "b", "m"],
            {"q": ["b", "s", 8], "k": ["b", "t", 8], "v": ["b", "t", 12], "m": ["b", "t"]}, ["y"], {"b": floats(28)},
            feeds, num_heads=2)


def test_group_query_attention_turns_and_appends():
    angles = np.arange(32)[:, None] / 10.0 ** (np.arange(8) / 8)
    before = [helper.make_node("Shape", ["am"], ["sh"]), helper.make_node("Gather", ["sh", "one"], ["total"]),
              helper.make_node("Cast", ["total"], ["ti"], to=TensorProto.INT32)]
    feeds = [{"x": floats(b, s, 64), "k": floats(b, s, 32), "v": floats(b, s, 32), "pk": floats(b, 2, p, 16),
              "pv": floats(b, 2, p, 16), "sl": np.full(b, p + s - 1, np.int32), "am": np.ones((b, p + s), np.int64)}
             for b, s, p in ((2, 1, 3), (1, 1, 1), (3, 7, 0))]
    checked("GroupQueryAttention", ["x", "k", "v", "pk", "pv", "sl", "ti", "cos", "sin"],
            {"x": ["b", "s", 64], "k": ["b", "s", 32], "v": ["b", "s", 32], "pk": ["b", 2, "p", 16],
             "pv": ["b", 2, "p", 16], "sl": ["b"], "am": ["b", "t"]}, ["y", "ok", "ov"],
            {"one": np.array(1), "cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)},
            feeds, before, num_heads=4, kv_num_heads=2, do_rotary=1, local_window_size=3)


def test_norms_of_sums():
    feeds = [{"x": floats(b, s, 8), "k": floats(b, s, 8)} for b, s in ((2, 5), (1, 1))]
    checked("SkipSimplifiedLayerNormalization", ["x", "k", "g"], {"x": ["b", "s", 8], "k": ["b", "s", 8]},
            ["y", "", "", "sum"], {"g": floats(8)}, feeds)


def test_attention_of_bytes_and_masks_of_lengths():
    """QAttention, a scale a column; a mask whose length is the batch, though the model gives it a name of its own."""
    constants = {"w": DRAW.integers(-127, 127, (16, 48)).astype(np.int8), "b": floats(48), "xs": np.float32(0.02),
                 "ws": floats(48) ** 2 + np.float32(0.001), "xz": np.uint8(120), "wz": np.zeros(48, np.int8)}
    feeds = [{"x": DRAW.integers(0, 255, (batch, 5, 16)).astype(np.uint8), "m": np.array(ends, np.int32)}
             for batch, ends in ((2, [5, 3]), (3, [1, 4, 2]))]
    checked("QAttention", ["x", "w", "b", "xs", "ws", "m", "xz", "wz"], {"x": ["b", "s", 16], "m": ["m"]}, ["y"],
            constants, feeds, num_heads=4, unidirectional=1)


def test_widths_without_a_number_and_a_key_more():
    """A hidden size that a call says is a number of its program; smooth_softmax has a key of score 0."""
    feeds = [{"q": floats(2, s, 16), "k": floats(2, s + 2, 16)} for s in (5, 1)]
    checked("MultiHeadAttention", ["q", "k", "k"], {"q": ["b", "s", "w"], "k": ["b", "t", "v"]}, ["y"], {}, feeds,
            num_heads=4)
    feeds = [{"q": floats(2, s, 64), "k": floats(2, s, 32), "past": floats(2, 2, 0, 16),
              "ends": np.array([s - 1] * 2, np.int32), "total": np.array(s, np.int32)} for s in (5, 2)]
    checked("GroupQueryAttention", ["q", "k", "k", "past", "past", "ends", "total"], {
        "q": ["b", "s", 64], "k": ["b", "s", 32], "past": ["b", 2, "p", 16], "ends": ["b"], "total": []},
        ["y", "keys", "values"], {}, feeds, num_heads=4, kv_num_heads=2, smooth_softmax=1)


@pytest.mark.parametrize("guarded", [False, True])
def test_attention_that_is_written_out_is_one_op(guarded):
    """Rows without a key are NaN, or 0 where the export asks for that (IsNaN); NaN of queries counts as that too."""
    node = helper.make_node
    nodes = [node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]), node("MatMul", ["q", "kt"], ["s"]),
             node("Div", ["s", "c"], ["d"]), node("Add", ["d", "m"], ["a"]), node("Softmax", ["a"], ["p"], axis=-1),
             node("IsNaN", ["p"], ["n"]), node("Where", ["n", "o", "p"], ["w"]),
             node("MatMul", ["w" if guarded else "p", "v"], ["y"])]
    nodes = nodes if guarded else [one for one in nodes if one.op_type not in ("IsNaN", "Where")]
    given = {"q": ["b", 2, "s", 8], "k": ["b", 2, "t", 8], "v": ["b", 2, "t", 8], "m": ["b", 1, "s", "t"]}
    made = helper.make_model(helper.make_graph(
        nodes, "made", [helper.make_tensor_value_info(name, 1, shape) for name, shape in given.items()],
        [helper.make_tensor_value_info("y", 1, None)],
        [numpy_helper.from_array(np.float32(number), name) for name, number in (("c", 3.0), ("o", 0.0))]),
        opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = onnxruntime.InferenceSession(made.SerializeToString())
    compiled = anyshape.compile_onnx(made)
    for b, s, t in ((2, 5, 7), (1, 1, 1), (3, 2, 31), (2, 3, 0), (0, 3, 4)):
        feed = {name: floats(*(dict(b=b, s=s, t=t).get(n, n) for n in shape)) for name, shape in given.items()}
        feed["m"] = np.where(feed["m"] < 0.4, 0.0, -np.inf).astype(np.float32)
        feed["m"][:1, :, :1] = -np.inf
        feed["q"][:1, :1, -1:, 0] = np.nan
        np.testing.assert_allclose(compiled(**feed), session.run(None, feed)[0], 1e-4, 1e-5)
    assert [one.what for one in compiled.explain().attentions] == ["one call, with a mask"]


def test_counts_behind_embeddings_are_of_ones():
    tables = {"words": floats(20, 8), "places": floats(16, 8), "scale": floats(8), "shift": floats(8)}
    before = [helper.make_node("EmbedLayerNormalization", ["ids", "", "words", "places", "", "scale", "shift", "mask"],
                               ["e", "counts"], domain="com.microsoft")]
    feeds = [{name: DRAW.integers(0, most, shape).astype(np.int32) for name, most in (("ids", 20), ("mask", 3))}
             for shape in ((3, 7), (1, 5))]
    checked("Attention", ["e", "w", "wb", "counts"], {"ids": ["b", "n"], "mask": ["b", "n"]}, ["y"],
            {**tables, "w": floats(8, 24), "wb": floats(24)}, feeds, before, num_heads=2)


def fused(op: str, operands: dict[str, Any], constants: dict[str, np.ndarray], outputs: int = 1, **attributes: Any
          ) -> Any:
    """An operator that onnxruntime has for GPUs alone, compiled."""
    names = [f"y{place}" for place in range(outputs)]
    node = helper.make_node(op, [*operands, *constants], names, domain="com.microsoft", **attributes)
    graph = helper.make_graph([node], "made", [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
                                               for name, shape in operands.items()],
                              [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names],
                              [numpy_helper.from_array(array, name) for name, array in constants.items()])
    return anyshape.compile_onnx(helper.make_model(graph, ir_version=8, opset_imports=[
        helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]))


def test_operators_of_diffusion_models_are_their_definitions():
    scale, shift, bias, more, kernel = floats(8), floats(8), floats(8), floats(2, 8), floats(4, 3, 3, 8)
    norm = fused("SkipGroupNorm", {"x": [2, "h", "w", 8]}, {"g": scale, "o": shift, "s": more, "a": bias}, 2, groups=2,
                 activation=1)
    conv = fused("NhwcConv", {"x": ["b", "h", "w", 8]}, {"k": kernel, "a": bias[:4]}, pads=[1, 1, 1, 1])
    gate = fused("BiasSplitGelu", {"x": ["b", "n", 8]}, {"a": bias})
    total = fused("BiasAdd", {"x": ["b", "n", 8]}, {"a": bias, "s": scale.reshape(1, 1, 8)})
    for n in (5, 1):
        x = floats(2, n, 3, 8)
        added = x + more[:, None, None] + bias
        groups = added.reshape(2, n * 3, 2, 4)
        spread = groups - groups.mean((1, 3), keepdims=True)
        y = (spread / np.sqrt((spread ** 2).mean((1, 3), keepdims=True) + 1e-5)).reshape(x.shape) * scale + shift
        for have, want in zip(norm(x), (y / (1 + np.exp(-y)), added), strict=True):
            np.testing.assert_allclose(have, want, 1e-4, 1e-5)
        wide = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        want = sum(wide[:, i:i + n, j:j + 3] @ kernel[:, i, j].T for i in range(3) for j in range(3)) + bias[:4]
        np.testing.assert_allclose(conv(x), want, 1e-4, 1e-4)
        x = x[:, 0]
        np.testing.assert_allclose(total(x), x + bias + scale, 1e-5, 1e-5)
        z = x + bias
        erf = np.vectorize(math.erf)(z[..., 4:] / math.sqrt(2))
        np.testing.assert_allclose(gate(x), z[..., :4] * z[..., 4:] * 0.5 * (1 + erf), 1e-5, 1e-5)


def test_queries_keys_and_values_may_lie_beside_each_other():
    three = fused("MultiHeadAttention", {"q": ["b", "n", 2, 3, 4]}, {}, num_heads=2)
    two = fused("MultiHeadAttention", {"q": ["b", "m", 8], "k": ["b", "n", 2, 2, 4]}, {}, num_heads=2)
    for b, n in ((2, 5), (1, 1)):
        x = floats(b, n, 2, 3, 4)
        q, k, v = np.moveaxis(x, 3, 0)
        scores = np.exp(np.einsum("bqhd,bkhd->bhqk", q, k) / 2)
        want = np.einsum("bhqk,bkhd->bqhd", scores / scores.sum(-1, keepdims=True), v).reshape(b, n, 8)
        np.testing.assert_allclose(three(x), want, 1e-4, 1e-5)
        np.testing.assert_allclose(two(q.reshape(b, n, 8), np.ascontiguousarray(x[..., 1:, :])), want, 1e-4, 1e-5)


@pytest.mark.parametrize("both", [0, 1])
def test_biases_of_distances_are_those_of_t5(both):
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    table = floats(32, 4)
    nodes = [helper.make_node("Shape", ["x"], [name], start=place, end=place + 1)
             for place, name in enumerate(("q", "k"))]
    nodes.append(helper.make_node("RelativePositionBias", ["t", "q", "k"], ["y"], domain="com.microsoft",
                                  max_distance=50, is_bidirectional=both))
    graph = helper.make_graph(nodes, "made", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["q", "k"])],
                              [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
                              [numpy_helper.from_array(table, "t")])
    compiled = anyshape.compile_onnx(helper.make_model(graph, ir_version=8, opset_imports=[
        helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]))
    for q, k in ((70, 70), (3, 90), (1, 1)):
        away = torch.arange(k)[None] - torch.arange(q)[:, None]
        at = modeling.T5Attention._relative_position_bucket(away, bool(both), 32, 50)
        want = table[at.numpy()].transpose(2, 0, 1)[None]
        np.testing.assert_array_equal(compiled(np.zeros((q, k), np.float32)), want)
