"""The ONNX front end: one program for all sizes, sizes that are data, control flow, quantised operators, bad files."""
from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

import anyshape
from anyshape.base.errors import AnyShapeError, InputError, Unsupported

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def model(nodes: list[Any], inputs: dict[str, Any], outputs: list[str], constants: dict[str, Any] | None = None,
          opset: int = 18, kinds: dict[str, int] | None = None, functions: Any = ()) -> Any:
    """A model; inputs are shapes, of floats where `kinds` says nothing else."""
    kinds = kinds or {}
    graph = helper.make_graph(
        nodes, "made", [helper.make_tensor_value_info(name, kinds.get(name, FLOAT), shape)
                        for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, kinds.get(name, FLOAT), None) for name in outputs],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in (constants or {}).items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10,
                             functions=list(functions))


def same(made: Any, compiled: Any, feed: dict[str, np.ndarray], close: float = 1e-5) -> None:
    """Our results are onnxruntime's."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    wanted = onnxruntime.InferenceSession(made.SerializeToString(), options).run(None, feed)
    found = compiled(**feed)
    found = found if isinstance(found, tuple) else (found,)
    for have, want in zip(found, wanted, strict=True):
        assert have.shape == want.shape and have.dtype == want.dtype
        np.testing.assert_allclose(have, want, close, close)


def encoder() -> Any:
    draw = np.random.default_rng(0)
    node = helper.make_node
    constants: dict[str, Any] = {f"w{name}": draw.standard_normal((32, 32)).astype(np.float32) * 0.1 for name in "qkvo"}
    constants |= {"heads": np.array([0, 0, 4, 8]), "flat": np.array([0, 0, -1]), "scale": np.float32(8**-0.5)}
    nodes = []
    for name in "qkv":
        nodes += [node("MatMul", ["x", f"w{name}"], [f"{name}0"]), node("Reshape", [f"{name}0", "heads"], [f"{name}1"]),
                  node("Transpose", [f"{name}1"], [name], perm=[0, 2, 3, 1] if name == "k" else [0, 2, 1, 3])]
    nodes += [node("MatMul", ["q", "k"], ["scores"]), node("Mul", ["scores", "scale"], ["scaled"]),
              node("Softmax", ["scaled"], ["weights"]), node("MatMul", ["weights", "v"], ["mixed"]),
              node("Transpose", ["mixed"], ["turned"], perm=[0, 2, 1, 3]),
              node("Reshape", ["turned", "flat"], ["rows"]),
              node("MatMul", ["rows", "wo"], ["out"]), node("Add", ["out", "x"], ["y"])]
    return model(nodes, {"x": ["batch", "time", 32]}, ["y"], constants)


def test_an_encoder_is_one_program_for_all_sizes():
    made = encoder()
    before = anyshape.stats()["programs"]
    compiled = anyshape.compile_onnx(made.SerializeToString())
    draw = np.random.default_rng(1)
    for batch, time in ((1, 1), (2, 7), (3, 33), (5, 1), (1, 64)):
        same(made, compiled, {"x": draw.standard_normal((batch, time, 32)).astype(np.float32)})
    assert anyshape.stats()["programs"] == before + 1
    assert compiled(np.zeros((0, 3, 32), np.float32)).shape == (0, 3, 32)
    assert "batch" in str(compiled.explain())


def test_torch_tensors_come_back_as_such():
    compiled = anyshape.compile_onnx(encoder())
    found = compiled(torch.ones(2, 3, 32))
    assert isinstance(found, torch.Tensor) and found.shape == (2, 3, 32)


def test_dims_that_broadcast_are_1_or_equal():
    made = model([helper.make_node("Add", ["a", "b"], ["y"])], {"a": [None, None], "b": [None, None]}, ["y"])
    compiled = anyshape.compile_onnx(made)
    draw = np.random.default_rng(2)
    for a, b in (((2, 3), (2, 3)), ((2, 1), (2, 3)), ((1, 3), (4, 1)), ((1, 1), (1, 1)), ((5, 3), (1, 3))):
        same(made, compiled, {"a": draw.random(a, np.float32), "b": draw.random(b, np.float32)})
    with pytest.raises(InputError):
        compiled(np.zeros((2, 3), np.float32), np.zeros((2, 4), np.float32))


def test_sizes_that_are_data_are_symbols():
    made = model([helper.make_node("Reshape", ["x", "shape"], ["y"])], {"x": ["n"], "shape": [2]}, ["y"],
                 kinds={"shape": INT64})
    before = anyshape.stats()["programs"]
    compiled = anyshape.compile_onnx(made)
    for shape in ((2, 3), (3, 4), (5, 7)):
        same(made, compiled, {"x": np.arange(shape[0] * shape[1], dtype=np.float32), "shape": np.array(shape)})
    assert anyshape.stats()["programs"] == before + 1
    same(made, compiled, {"x": np.arange(6, dtype=np.float32), "shape": np.array([-1, 2])})


def test_sizes_are_computed_from_shapes():
    node = helper.make_node
    nodes = [node("Shape", ["x"], ["s"]), node("Gather", ["s", "zero"], ["b"]), node("Gather", ["s", "one"], ["t"]),
             node("Mul", ["t", "two"], ["t2"]), node("Div", ["t2", "four"], ["half"]),
             node("Unsqueeze", ["b", "axis"], ["b1"]), node("Unsqueeze", ["half", "axis"], ["h1"]),
             node("Concat", ["b1", "h1", "two1"], ["to"], axis=0), node("Reshape", ["x", "to"], ["y"])]
    made = model(nodes, {"x": ["b", "t"]}, ["y"], {"zero": np.int64(0), "one": np.int64(1), "two": np.int64(2),
                                                   "four": np.int64(4), "axis": np.array([0]), "two1": np.array([2])})
    compiled = anyshape.compile_onnx(made)
    for shape in ((2, 6), (3, 8), (1, 2)):
        same(made, compiled, {"x": np.random.default_rng(3).random(shape, np.float32)})


def test_branches_and_loops_that_the_data_decide():
    branch = [helper.make_graph([helper.make_node(op, ["x", "x"], [op])], op, [],
                                [helper.make_tensor_value_info(op, FLOAT, None)]) for op in ("Add", "Mul")]
    body = helper.make_graph(
        [helper.make_node("Add", ["v", "x"], ["w"]), helper.make_node("Identity", ["go"], ["on"]),
         helper.make_node("Identity", ["w"], ["row"])], "body",
        [helper.make_tensor_value_info("i", INT64, []), helper.make_tensor_value_info("go", BOOL, []),
         helper.make_tensor_value_info("v", FLOAT, None)],
        [helper.make_tensor_value_info("on", BOOL, []), helper.make_tensor_value_info("w", FLOAT, None),
         helper.make_tensor_value_info("row", FLOAT, None)])
    nodes = [helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
             helper.make_node("Greater", ["sum", "zero"], ["c"]),
             helper.make_node("If", ["c"], ["y"], then_branch=branch[0], else_branch=branch[1]),
             helper.make_node("Loop", ["count", "", "y"], ["z", "rows"], body=body)]
    made = model(nodes, {"x": ["n"], "count": []}, ["y", "z", "rows"], {"zero": np.float32(0)}, kinds={"count": INT64})
    compiled = anyshape.compile_onnx(made)
    for x, count in (([1.0, 2.0], 3), ([-1.0, -2.0, 0.5], 2), ([3.0], 1)):
        same(made, compiled, {"x": np.array(x, np.float32), "count": np.array(count)})


def test_what_is_known_of_sizes_is_known_behind_a_loop_and_in_it():
    """A batch of 1 has no programs of its own, and a size that was computed before is one after."""
    body = helper.make_graph(
        [helper.make_node("Gather", ["mask", "i"], ["kept"]), helper.make_node("Mul", ["kept", "s"], ["s1"]),
         helper.make_node("Add", ["s1", "s"], ["s2"]), helper.make_node("Identity", ["go"], ["go1"])], "body",
        [helper.make_tensor_value_info("i", INT64, []), helper.make_tensor_value_info("go", BOOL, []),
         helper.make_tensor_value_info("s", FLOAT, None)],
        [helper.make_tensor_value_info("go1", BOOL, []), helper.make_tensor_value_info("s2", FLOAT, None)])
    nodes = [helper.make_node("Transpose", ["m"], ["turned"], perm=[1, 0]),
             helper.make_node("Unsqueeze", ["turned", "two"], ["mask"]), helper.make_node("Shape", ["m"], ["dims"]),
             helper.make_node("Loop", ["count", "", "x"], ["y"], body=body),
             helper.make_node("Expand", ["one", "dims"], ["ones"]), helper.make_node("Mul", ["ones", "m"], ["m1"]),
             helper.make_node("ReduceSum", ["m1", "last"], ["sums"]), helper.make_node("Mul", ["y", "sums"], ["z"])]
    made = model(nodes, {"x": ["b", 4], "m": ["b", "t"], "count": []}, ["z"],
                 {"two": np.array([2]), "one": np.float32(1), "last": np.array([1])}, kinds={"count": INT64})
    compiled = anyshape.compile_onnx(made.SerializeToString())
    before, draw = anyshape.stats()["programs"], np.random.default_rng(2)
    for batch, time in ((1, 5), (3, 2), (2, 1), (4, 7)):
        same(made, compiled, {"x": draw.random((batch, 4), np.float32), "m": draw.random((batch, time), np.float32),
                              "count": np.array(min(time, 3))})
    assert anyshape.stats()["programs"] - before <= 2, "the loop's body, and what is behind it"


def test_quantised_products_are_exact():
    draw = np.random.default_rng(4)
    nodes = [helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
             helper.make_node("MatMulInteger", ["q", "w", "z", "wz"], ["p"])]
    made = model(nodes, {"x": ["n", 300]}, ["p", "s"], {
        "w": draw.integers(-128, 127, (300, 20), np.int8), "wz": np.int8(3)}, kinds={"p": TensorProto.INT32})
    compiled = anyshape.compile_onnx(made)
    for rows in (1, 5):
        same(made, compiled, {"x": draw.standard_normal((rows, 300)).astype(np.float32)}, 0)


def test_a_result_whose_size_is_in_the_data_parts_the_program():
    nodes = [helper.make_node("NonZero", ["x"], ["places"]), helper.make_node("Cast", ["places"], ["f"], to=FLOAT),
             helper.make_node("ReduceSum", ["f", "axis"], ["y"], keepdims=0)]
    made = model(nodes, {"x": ["n", "m"]}, ["y"], {"axis": np.array([1])})
    compiled = anyshape.compile_onnx(made)
    for shape in ((2, 3), (4, 5)):
        same(made, compiled, {"x": (np.random.default_rng(6).random(shape) > 0.5).astype(np.float32)})
    assert "NonZero" in str(compiled.compilation.cuts)


def detector(classes: int) -> Any:
    """For each class the best boxes of those whose score is above a limit, as detectors are exported."""
    nodes, ends = [], []
    for kind in map(str, range(classes)):
        nodes += [helper.make_node("Gather", ["scores", "at" + kind], ["own" + kind], axis=1),
                  helper.make_node("Greater", ["own" + kind, "limit"], ["above" + kind])]
        for name, read in (("score", "own" + kind), ("box", "boxes")):
            nodes += [helper.make_node("NonZero", ["above" + kind], [f"{name}place{kind}"]),
                      helper.make_node("Transpose", [f"{name}place{kind}"], [f"{name}row{kind}"]),
                      helper.make_node("GatherND", [read, f"{name}row{kind}"], [name + kind])]
        nodes += [helper.make_node("Shape", ["score" + kind], ["many" + kind]),
                  helper.make_node("Concat", ["most", "many" + kind], ["both" + kind], axis=0),
                  helper.make_node("ReduceMin", ["both" + kind], ["count" + kind], keepdims=1),
                  helper.make_node("TopK", ["score" + kind, "count" + kind], ["best" + kind, "which" + kind]),
                  helper.make_node("Gather", ["box" + kind, "which" + kind], ["end" + kind])]
        ends.append("end" + kind)
    nodes.append(helper.make_node("Concat", ends, ["y"], axis=0))
    return model(nodes, {"scores": ["n", classes], "boxes": ["n", 4]}, ["y"], {
        "limit": np.float32(0.4), "most": np.array([3]), **{f"at{kind}": np.array(kind) for kind in range(classes)}})


def test_results_whose_size_is_in_the_data_part_a_model_once_not_once_for_each() -> None:
    """What does not read them is in the program before, all that are ready are done, and equal sizes are one symbol."""
    draw, made = np.random.default_rng(0), detector(3)
    compiled = anyshape.compile_onnx(made)
    for count in (9, 30, 2, 1):
        same(made, compiled, {name: draw.random((count, width), np.float32)
                              for name, width in (("scores", 3), ("boxes", 4))})
    assert len(compiled.compilation.programs) <= 3  # what is before, what is behind, and that for one box of a class


def test_a_size_that_is_one_by_a_formula_is_broadcast() -> None:
    """Half of a row of two is one number, which meets as many as there are."""
    nodes = [helper.make_node("Split", ["x"], ["first", "second"], num_outputs=2),
             helper.make_node("Add", ["z", "first"], ["y"])]
    made = model(nodes, {"x": ["n"], "z": ["m"]}, ["y"])
    compiled = anyshape.compile_onnx(made)
    for wide, count in ((6, 3), (2, 5), (2, 3), (8, 4), (9, 5)):
        same(made, compiled, {"x": np.arange(wide, dtype=np.float32), "z": np.arange(count, dtype=np.float32)})


def parts(error: AnyShapeError) -> bool:
    return bool(error.what and error.where and error.why and error.do)


def test_bad_calls_are_refused():
    compiled = anyshape.compile_onnx(encoder())
    for bad in ((np.zeros((2, 3, 31), np.float32),), (np.zeros((2, 32), np.float32),), (np.zeros((2, 3, 32)),), (),
                (np.zeros((2, 3, 32), np.float32), 1)):
        with pytest.raises(InputError) as refused:
            compiled(*bad)
        assert all((refused.value.what, refused.value.where, refused.value.why, refused.value.do))


def relu(name: str = "x", **more: Any) -> Any:
    return model([helper.make_node("Relu", [name], ["y"], **more)], {"x": ["n"]}, ["y"])


def nested(depth: int) -> bytes:
    """A model whose graph has a node with a graph that has a node with a graph ..."""
    def field(number: int, inside: bytes) -> bytes:
        size, length = len(inside), b""
        while size >= 128:
            length, size = length + bytes([size & 127 | 128]), size >> 7
        return bytes([number << 3 | 2]) + length + bytes([size]) + inside
    graph = b""
    for _ in range(depth):
        graph = field(1, field(5, field(6, graph)))
    return field(7, graph)


def hostile() -> dict[str, Any]:
    """Bytes and models that must be refused when they are compiled or first called."""
    huge = relu()
    huge.graph.initializer.append(TensorProto(name="w", data_type=FLOAT, dims=[1 << 40, 1 << 40]))
    short = relu()
    short.graph.initializer.append(TensorProto(name="w", data_type=FLOAT, dims=[1000], raw_data=b"abcd"))
    negative = relu()
    negative.graph.initializer.append(TensorProto(name="w", data_type=FLOAT, dims=[-4], raw_data=b""))
    odd = relu()
    odd.graph.initializer.append(TensorProto(name="w", data_type=99, dims=[1], raw_data=b"abcd"))
    twice = model([helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Neg", ["x"], ["y"])], {"x": ["n"]}, ["y"])
    loop = model([helper.make_node("Relu", ["z"], ["y"]), helper.make_node("Relu", ["y"], ["z"])], {"x": ["n"]}, ["y"])
    future = relu()
    future.opset_import[0].version = 99
    endless = helper.make_function("own", "f", ["a"], ["b"], [helper.make_node("f", ["a"], ["b"], domain="own")],
                                   [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)])
    recursive = model([helper.make_node("f", ["x"], ["y"], domain="own")], {"x": ["n"]}, ["y"], functions=[endless])
    recursive.opset_import.append(helper.make_opsetid("own", 1))
    return {
        "nothing": b"", "rubbish": b"\xff\xfe" * 100, "text": b"hello", "a number": 3, "no file": "/nowhere/m.onnx",
        "an unknown name": relu("nowhere"), "a huge tensor": huge, "a short tensor": short, "a negative dim": negative,
        "an unknown element type": odd, "a value made twice": twice, "a circle": loop, "a future operator set": future,
        "an unknown operator": model([helper.make_node("Evil", ["x"], ["y"])], {"x": ["n"]}, ["y"]),
        "a missing operand": model([helper.make_node("Add", ["x"], ["y"])], {"x": ["n"]}, ["y"]),
        "an axis outside": model([helper.make_node("Softmax", ["x"], ["y"], axis=7)], {"x": ["n"]}, ["y"]),
        "an attribute of another kind": model([helper.make_node("Transpose", ["x"], ["y"], perm="no")], {"x": ["n"]},
                                              ["y"]),
        "a huge range": model([helper.make_node("ConstantOfShape", ["s"], ["y"])], {"x": ["n"]}, ["y"],
                              {"s": np.array([1 << 62, 1 << 62])}),
        "deep nesting": nested(2_000), "a function that calls itself": recursive,
    }


HOSTILE = hostile()


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_a_hostile_model_is_refused_in_four_parts(name):
    with pytest.raises(AnyShapeError) as caught:
        anyshape.compile_onnx(HOSTILE[name])(np.ones(3, np.float32))
    assert parts(caught.value), str(caught.value)


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "link", "folder/../../secret", "", "missing", "."])
def test_external_data_is_read_by_safe_names_only(tmp_path, location):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(b"\0" * 64)
    os.symlink(tmp_path / "secret", folder / "link")
    made = relu()
    one = TensorProto(name="w", data_type=FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    one.external_data.add(key="location", value=location)
    made.graph.initializer.append(one)
    path = folder / "m.onnx"
    path.write_bytes(made.SerializeToString())
    with pytest.raises(InputError) as caught:
        anyshape.compile_onnx(path)
    assert parts(caught.value), str(caught.value)


@pytest.mark.parametrize("offset, length", [("0", "64"), ("60", "16"), ("-4", "16"), ("x", "16")])
def test_external_data_stays_inside_its_file(tmp_path, offset, length):
    one = TensorProto(name="w", data_type=FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "data"), ("offset", offset), ("length", length)):
        one.external_data.add(key=key, value=value)
    made = relu()
    made.graph.initializer.append(one)
    (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
    (tmp_path / "data").write_bytes(b"\0" * 64)
    with pytest.raises(InputError) as caught:
        anyshape.compile_onnx(tmp_path / "m.onnx")
    assert parts(caught.value)


def test_external_data_is_read(tmp_path):
    made = model([helper.make_node("Add", ["x", "w"], ["y"])], {"x": ["n", 4]}, ["y"],
                 {"w": np.arange(400, dtype=np.float32).reshape(100, 4)[:1]})
    onnx.save(made, tmp_path / "m.onnx", save_as_external_data=True, location="data", size_threshold=0)
    compiled = anyshape.compile_onnx(tmp_path / "m.onnx")
    assert np.array_equal(compiled(np.zeros((2, 4), np.float32)), [[0, 1, 2, 3]] * 2)


def test_a_model_is_compiled_to_a_file_and_loaded(tmp_path, capsys):
    from anyshape.tools.cli import main
    made = encoder()
    onnx.save(made, tmp_path / "m.onnx")
    assert main(["compile", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "m.any")]) == 0, capsys.readouterr()
    loaded = anyshape.load(tmp_path / "m.any", trust_native=True)
    compiled = anyshape.compile_onnx(made)
    for shape in ((2, 7, 32), (1, 1, 32)):
        x = np.random.default_rng(7).standard_normal(shape).astype(np.float32)
        np.testing.assert_allclose(np.asarray(loaded(x)), compiled(x), 1e-5, 1e-5)


def test_a_model_of_several_programs_is_not_saved(tmp_path):
    made = model([helper.make_node("NonZero", ["x"], ["y"])], {"x": ["n"]}, ["y"], kinds={"y": INT64})
    with pytest.raises(Unsupported) as caught:
        anyshape.save(anyshape.compile_onnx(made), tmp_path / "m.any")
    assert parts(caught.value) and not (tmp_path / "m.any").exists()


def test_an_operator_that_is_not_there_is_named():
    made = model([helper.make_node("Nothing", ["x"], ["y"])], {"x": ["n"]}, ["y"])
    with pytest.raises(Unsupported, match="Nothing"):
        anyshape.compile_onnx(made)(np.ones(2, np.float32))


def test_weights_that_a_model_cuts_and_joins_are_made_once():
    node = helper.make_node
    draw = np.random.default_rng(3)
    made = model([node("Split", ["w"], ["a", "b"], axis=0, num_outputs=2), node("Concat", ["b", "a"], ["c"], axis=0),
                  node("Slice", ["c", "from", "to", "axis"], ["d"]), node("Unsqueeze", ["d", "first"], ["e"]),
                  node("Squeeze", ["e", "first"], ["f"]), node("Reshape", ["f", "shape"], ["g"]),
                  node("MatMul", ["x", "g"], ["y"])], {"x": ["n", 96]}, ["y"],
                 {"w": draw.standard_normal((96, 100)).astype(np.float32), "from": np.array([3]), "to": np.array([99]),
                  "axis": np.array([1]), "first": np.array([0]), "shape": np.array([96, -1])})
    compiled = anyshape.compile_onnx(made)
    same(made, compiled, {"x": draw.standard_normal((5, 96)).astype(np.float32)}, 1e-4)
    (program,) = compiled.compilation.programs
    assert len(program.executable.plan.steps) == 1


def test_names_that_look_alike_are_names_of_their_own():
    made = model([helper.make_node("Sub", ["é.b", "é_b"], ["t"]), helper.make_node("MatMul", ["t", "n_1"], ["y"])],
                 {"é.b": ["n.1", 3], "é_b": ["n_1", 3], "n_1": [3, 2]}, ["y"])
    compiled = anyshape.compile_onnx(made)
    draw = np.random.default_rng(0)
    for first, second in ((3, 3), (5, 1), (1, 4)):
        feed = {"é.b": draw.random((first, 3), np.float32), "é_b": draw.random((second, 3), np.float32),
                "n_1": draw.random((3, 2), np.float32)}
        same(made, compiled, feed)


def test_a_file_of_names_that_look_alike_is_read_back(tmp_path):
    made = model([helper.make_node("Add", ["é", "n"], ["a b"])], {"é": ["n", "é"], "n": ["n", "é"]}, ["a b"])
    compiled = anyshape.compile_onnx(made)
    anyshape.save(compiled, tmp_path / "model.any")
    x = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(anyshape.load(tmp_path / "model.any")(x, x), compiled(x, x))


def test_functions_of_one_name_are_told_by_their_overload():
    def act(op: str, overload: str) -> Any:
        return helper.make_function("own", "Act", ["a"], ["c"], [helper.make_node(op, ["a"], ["c"])],
                                    [helper.make_opsetid("", 18)], overload=overload)
    nodes = [helper.make_node("Act", ["x"], ["t"], domain="own", overload="one"),
             helper.make_node("Act", ["t"], ["y"], domain="own", overload="two")]
    made = model(nodes, {"x": ["n"]}, ["y"], functions=[act("Relu", "one"), act("Neg", "two")])
    made.opset_import.append(helper.make_opsetid("own", 1))
    same(made, anyshape.compile_onnx(made), {"x": np.array([1, -2, 3], np.float32)})


def test_what_a_loop_without_a_turn_gathers_has_the_declared_type():
    flag, value = helper.make_tensor_value_info("go", BOOL, []), helper.make_tensor_value_info
    body = helper.make_graph([helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Identity", ["i"], ["o"]),
                              helper.make_node("Identity", ["x"], ["p"])], "body", [value("i", INT64, []), flag],
                             [value("on", BOOL, []), value("o", INT64, []), value("p", FLOAT, ["k", 3])])
    made = model([helper.make_node("Loop", ["n", ""], ["f", "g"], body=body)], {"n": [], "x": ["k", 3]}, ["f", "g"],
                 kinds={"n": INT64, "f": INT64})
    compiled = anyshape.compile_onnx(made)
    for turns in (0, 2):
        same(made, compiled, {"n": np.array(turns), "x": np.ones((2, 3), np.float32)})


def test_more_elements_than_there_are_and_text_are_refused_in_words():
    top = anyshape.compile_onnx(model([helper.make_node("TopK", ["x", "k"], ["v", "i"])], {"x": ["n"], "k": [1]},
                                      ["v", "i"], kinds={"k": INT64, "i": INT64}))
    with pytest.raises(AnyShapeError):
        top(np.ones(3, np.float32), np.array([4]))
    text = anyshape.compile_onnx(model([helper.make_node("Tile", ["x", "times"], ["y"])], {"x": ["n"]}, ["y"],
                                       {"times": np.array([2])}, kinds={"x": TensorProto.STRING}))
    with pytest.raises(Unsupported, match="text"):
        text(np.array(["a", "b"], object))


def test_numbers_as_text_are_written_as_onnxruntime_writes_them():
    made = model([helper.make_node("Cast", ["x"], ["y"], to=TensorProto.STRING)], {"x": ["n"]}, ["y"],
                 kinds={"y": TensorProto.STRING})
    x = np.array([1, 1 / 3, 1e20, 123456789, -0.0, 1e-5, np.inf, -np.inf, np.nan], np.float32)
    wanted = onnxruntime.InferenceSession(made.SerializeToString()).run(None, {"x": x})[0]
    assert anyshape.compile_onnx(made)(x).tolist() == wanted.tolist()


def test_a_resize_to_the_same_size_does_not_give_memory_that_is_used_again():
    node = helper.make_node
    made = model([node("Transpose", ["x"], ["a"], perm=[1, 0, 2, 3]),
                  node("Transpose", ["z"], ["c"], perm=[1, 0, 2, 3]),
                  node("Resize", ["a", "", "", "to"], ["ra"], mode="linear"),
                  node("Resize", ["c", "", "", "to"], ["rc"], mode="linear"),
                  node("Concat", ["ra", "rc"], ["y"], axis=1),
                  node("Conv", ["y", "w"], ["q"])],
                 {"x": ["c", "b", "h", "w"], "z": ["c", "b", "h", "w"], "to": [4]}, ["ra", "q"],
                 {"w": np.ones((1, 4, 1, 1), np.float32)}, kinds={"to": INT64})
    compiled = anyshape.compile_onnx(made)
    draw = np.random.default_rng(0)
    for to in ((3, 2, 8, 8), (3, 2, 8, 11)):
        same(made, compiled, {name: draw.random((2, 3, 8, 8), np.float32) for name in "xz"} | {"to": np.array(to)})


def test_sizes_that_are_divided_are_one_program_until_a_call_divides_a_negative_one():
    node = helper.make_node
    nodes = [node("Shape", ["x"], ["n"], start=0, end=1), node("Sub", ["n", "three"], ["less"]),
             node("Div", ["less", "two"], ["half"]), node("Add", ["half", "two"], ["rows"]),
             node("Concat", ["rows", "four"], ["shape"], axis=0), node("ConstantOfShape", ["shape"], ["zeros"]),
             node("Add", ["zeros", "y"], ["z"])]
    made = model(nodes, {"x": ["n"], "y": [1, 4]}, ["z"],
                 {"three": np.array([3]), "two": np.array([2]), "four": np.array([4])})
    compiled = anyshape.compile_onnx(made)
    before = anyshape.stats()["programs"]
    line = np.arange(4, dtype=np.float32)[None]
    for count in (7, 3, 4):
        same(made, compiled, {"x": np.zeros(count, np.float32), "y": line})
    assert anyshape.stats()["programs"] == before
    for count in (0, 2, 1, 9):  # of -3 / 2 onnxruntime has -1
        same(made, compiled, {"x": np.zeros(count, np.float32), "y": line})


def test_sizes_computed_in_floats_are_formulas():
    """As models do that scale an image: Cast, Mul by 1.5, Floor, Cast."""
    node = helper.make_node
    nodes = [node("Shape", ["x"], ["n"]), node("Cast", ["n"], ["f"], to=FLOAT), node("Mul", ["f", "c"], ["scaled"]),
             node("Floor", ["scaled"], ["low"]), node("Cast", ["low"], ["rows"], to=INT64),
             node("Div", ["f", "three"], ["third"]), node("Ceil", ["third"], ["high"]),
             node("Cast", ["high"], ["columns"], to=INT64), node("Sub", ["third", "c"], ["less"]),
             node("Cast", ["less"], ["toward_zero"], to=INT64), node("Concat", ["rows", "columns"], ["shape"], axis=0),
             node("ConstantOfShape", ["shape"], ["zeros"]), node("Greater", ["f", "three"], ["more"]),
             node("Concat", ["scaled", "less", "c"], ["floats"], axis=0)]
    made = model(nodes, {"x": ["n"]}, ["zeros", "floats", "toward_zero", "more"],
                 {"c": np.array([1.5], np.float32), "three": np.array([3], np.float32)},
                 kinds={"toward_zero": INT64, "more": BOOL})
    compiled = anyshape.compile_onnx(made)
    before = anyshape.stats()["programs"]
    for count in (7, 6, 31, 32, 33):
        same(made, compiled, {"x": np.zeros(count, np.float32)})
    assert anyshape.stats()["programs"] - before <= 2
    for count in (4, 3, 1, 0):  # the quotient below 0 rounds up
        same(made, compiled, {"x": np.zeros(count, np.float32)})


def test_slices_that_count_by_sizes_from_the_back():
    """x[-n:] as decoders have it, which is all of x where n is 0; and bounds of either sign."""
    node = helper.make_node
    nodes = [node("Shape", ["y"], ["n"]), node("Neg", ["n"], ["back"]), node("Sub", ["n", "three"], ["either"]),
             node("Slice", ["x", "back", "far", "zero"], ["tail"]),
             node("Slice", ["x", "zero", "back", "zero"], ["head"]),
             node("Slice", ["x", "either", "far", "zero"], ["part"])]
    made = model(nodes, {"x": ["m"], "y": ["n"]}, ["tail", "head", "part"],
                 {"three": np.array([3]), "far": np.array([2**63 - 1]), "zero": np.array([0])})
    compiled = anyshape.compile_onnx(made)
    before, x = anyshape.stats()["programs"], np.arange(7, dtype=np.float32)
    for count, whole in ((5, 7), (7, 7), (3, 3), (9, 7), (4, 1)):
        same(made, compiled, {"x": x[:whole], "y": np.zeros(count, np.float32)})
    assert anyshape.stats()["programs"] == before
    for count in (0, 2, 1, 4):
        same(made, compiled, {"x": x, "y": np.zeros(count, np.float32)})


def test_a_number_that_a_loop_counts_is_a_size_of_its_body():
    """A decoder that writes one row a turn, and counts turns in floats: not a program for each turn."""
    node = helper.make_node
    counts = [helper.make_tensor_value_info("i", INT64, []), helper.make_tensor_value_info("go", BOOL, []),
              helper.make_tensor_value_info("k", INT64, [])]
    body = helper.make_graph(
        [node("Cast", ["k"], ["f"], to=FLOAT), node("Add", ["f", "one"], ["g"]), node("Cast", ["g"], ["k1"], to=INT64),
         node("Unsqueeze", ["k", "axis"], ["from"]), node("Unsqueeze", ["from", "axis"], ["column"]),
         node("Expand", ["column", "ones"], ["place"]), node("Unsqueeze", ["k1", "axis"], ["to"]),
         node("Slice", ["x", "from", "to", "axis"], ["row"]), node("Mul", ["row", "row"], ["square"]),
         node("ScatterElements", ["t", "place", "square"], ["t1"], axis=0), node("Identity", ["go"], ["go1"])], "body",
        [*counts, helper.make_tensor_value_info("t", FLOAT, None)],
        [helper.make_tensor_value_info("go1", BOOL, []), helper.make_tensor_value_info("k1", INT64, []),
         helper.make_tensor_value_info("t1", FLOAT, None)])
    nodes = [node("Shape", ["x"], ["n"], start=0, end=1), node("Squeeze", ["n"], ["count"]),
             node("Loop", ["count", "", "zero", "x"], ["k9", "y"], body=body)]
    made = model(nodes, {"x": ["n", 3]}, ["y"], {"one": np.float32(1), "axis": np.array([0]), "zero": np.int64(0),
                                                 "ones": np.array([1, 3])})
    compiled = anyshape.compile_onnx(made)
    before = anyshape.stats()["programs"]
    for count in (9, 4, 17):
        same(made, compiled, {"x": np.random.default_rng(4).random((count, 3), np.float32)})
    assert anyshape.stats()["programs"] - before <= 5, "turns 0 and 1, and all others"


def test_a_model_that_does_not_take_small_sizes_is_loaded(tmp_path):
    node, draw = helper.make_node, np.random.default_rng(0)
    nodes = [node("Conv", ["x", "w"], ["a"], strides=[2]), node("Relu", ["a"], ["b"]),
             node("Conv", ["b", "v"], ["c"], strides=[2]), node("Softmax", ["c"], ["s"], axis=1),
             node("ReduceMax", ["s"], ["m"], axes=[2]), node("Sub", ["s", "m"], ["z"]),
             node("Transpose", ["z"], ["y"], perm=[0, 2, 1])]
    made = model(nodes, {"x": ["b", 1, "n"]}, ["y"], {"w": draw.random((4, 1, 150), np.float32),
                                                      "v": draw.random((4, 4, 5), np.float32)}, opset=17)
    compiled = anyshape.compile_onnx(made)
    x = draw.random((2, 1, 400), np.float32)
    with anyshape.load(anyshape.save(compiled, tmp_path / "small.any")) as loaded:
        np.testing.assert_array_equal(loaded(x), compiled(x))


def test_dims_of_one_are_squeezed_where_a_call_has_them():
    made = model([helper.make_node("Squeeze", ["x"], ["y"])], {"x": ["a", "b", 3]}, ["y"], opset=13)
    made.graph.output[0].ClearField("type")
    compiled, draw = anyshape.compile_onnx(made), np.random.default_rng(0)
    for shape in ((2, 4, 3), (2, 1, 3), (1, 5, 3), (0, 2, 3), (5, 2, 3)):
        x = draw.random(shape, np.float32)
        np.testing.assert_array_equal(compiled(x), np.squeeze(x))


def test_random_numbers_are_drawn_anew_at_each_operator_and_call():
    node = helper.make_node
    nodes = [node("RandomNormalLike", ["x"], ["a"], mean=5.0, scale=0.1), node("RandomUniformLike", ["x"], ["b"]),
             node("RandomUniformLike", ["x"], ["c"]), node("Sub", ["b", "c"], ["d"]),
             node("Bernoulli", ["b"], ["e"]), node("Multinomial", ["x"], ["f"], sample_size=50)]
    made = model(nodes, {"x": ["n", 4]}, ["a", "d", "e", "f"], opset=15)
    for one in made.graph.output:
        one.ClearField("type")
    compiled, before = anyshape.compile_onnx(made), anyshape.stats()["programs"]
    x = np.tile(np.log(np.array([0.5, 0.5, 1e-9, 1e-9], np.float32)), (200, 1))
    a, d, e, f = compiled(x)
    assert anyshape.stats()["programs"] == before
    assert abs(float(a.mean()) - 5) < 0.05 and abs(float(a.std()) - 0.1) < 0.02
    assert np.abs(d).max() > 0.5 and set(np.unique(e)) == {0.0, 1.0} and e.dtype == np.float32
    assert f.shape == (200, 50) and f.dtype == np.int32 and set(np.unique(f)) == {0, 1}
    assert not np.array_equal(a, compiled(x)[0]) and compiled(x[:3])[0].shape == (3, 4)


@pytest.mark.parametrize(("name", "numbers"), [("Relu", {}), ("LeakyRelu", {"activation_params": [0.2]}),
                                               ("Clip", {"activation_params": [-0.1, 0.3]}), ("Tanh", {})])
def test_convolutions_with_an_activation(name, numbers):
    draw = np.random.default_rng(0)
    node = helper.make_node("FusedConv", [*"xwbz"], ["y"], domain="com.microsoft", activation=name, **numbers)
    made = model([node], {"x": ["n", 2, "h", "w"], "z": ["n", 3, "h", "w"]}, ["y"], {
        "w": draw.standard_normal((3, 2, 1, 1)).astype(np.float32), "b": draw.random(3, np.float32)}, opset=17)
    made.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    shapes = {"x": (2, 2, 3, 4), "z": (2, 3, 3, 4)}
    same(made, anyshape.compile_onnx(made), {key: draw.standard_normal(shape).astype(np.float32)
                                             for key, shape in shapes.items()})


def test_nodes_come_in_any_order():
    node = helper.make_node
    nodes = [node("Add", ["b", "c"], ["y"]), node("Mul", ["a", "a"], ["b"]), node("Neg", ["x"], ["c"]),
             node("Abs", ["x"], ["a"])]
    made = model(nodes, {"x": ["n"]}, ["y"])
    same(made, anyshape.compile_onnx(made), {"x": np.arange(-3, 4, dtype=np.float32)})
    made.graph.node[3].input[0] = "y"
    with pytest.raises(AnyShapeError, match="is not there"):
        anyshape.compile_onnx(made)(np.ones(3, np.float32))


@pytest.mark.parametrize(("op", "opset", "more"), [
    ("MaxPool", 18, {}), ("MaxPool", 18, {"pads": [1, 0]}), ("AveragePool", 18, {}), ("LpPool", 18, {}),
    ("AveragePool", 18, {"count_include_pad": 1}), ("AveragePool", 19, {"count_include_pad": 1}),
    ("AveragePool", 19, {"count_include_pad": 1, "pads": [0, 1]})])
def test_a_pool_over_less_than_a_window_is_onnxruntimes(op, opset, more):
    """onnxruntime divides toward zero, so what is shorter than a window, by less than a stride, has one of what there
    is; an empty tensor of it would be NaN in a mean behind it, silently."""
    node = helper.make_node(op, ["x"], ["y"], kernel_shape=[3], strides=[3], **more)
    made = model([node], {"x": ["n", 2, "l"]}, ["y"], opset=opset)
    compiled = anyshape.compile_onnx(made)
    draw = np.random.default_rng(2)
    for length in (9, 1, 2, 3, 4, 5):
        same(made, compiled, {"x": draw.standard_normal((2, 2, length)).astype(np.float32)})


def test_a_convolution_over_less_than_a_window_is_refused_as_by_onnxruntime():
    made = model([helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 0])], {"x": ["n", 1, "l"]}, ["y"],
                 {"w": np.ones((2, 1, 4), np.float32)})
    compiled = anyshape.compile_onnx(made)
    for length in (3, 8):
        same(made, compiled, {"x": np.ones((2, 1, length), np.float32)})
    with pytest.raises(InputError, match="does not take these sizes"):
        compiled(np.ones((2, 1, 2), np.float32))


def test_results_in_a_file_have_the_models_names(tmp_path):
    """Clients of a server ask for outputs by the names that the ONNX model gives them."""
    from anyshape.artifact.check import check
    from anyshape.tools import cli
    made = model([helper.make_node("Relu", ["x"], ["file"]), helper.make_node("Neg", ["x"], ["model/scale_0.tmp_1"])],
                 {"x": ["n", 3]}, ["model/scale_0.tmp_1", "file"])
    path = anyshape.save(anyshape.compile_onnx(made), tmp_path / "model.any")
    assert "version 3" in str(check(path))
    x = np.array([[-1, 0, 2]], np.float32)
    with anyshape.load(path, trust_native=True) as run:
        assert [name for name, _ in run.signature.result_names()] == ["model/scale_0.tmp_1", "file"]
        assert isinstance(run(x), tuple)
    np.save(tmp_path / "x.npy", x)
    assert cli.main(["run", str(path), "--input", str(tmp_path / "x.npy"), "--output", str(tmp_path / "y.npz")]) == 0
    with np.load(tmp_path / "y.npz") as found:
        np.testing.assert_array_equal(found["file"], [[0, 0, 2]])
        np.testing.assert_array_equal(found["model/scale_0.tmp_1"], -x)


def test_crops_distances_and_inverses_of_onnxruntime():
    draw, own, node = np.random.default_rng(31), {"domain": "com.microsoft"}, helper.make_node
    nodes = [node("CropAndResize", ["x", "r", "at", "s"], ["y"], extrapolation_value=-2.0, **own),
             node("CropAndResize", ["x", "r", "at", "line"], ["z"], mode="nearest", **own),
             node("CDist", ["r", "q"], ["d"], metric="euclidean", **own), node("CDist", ["r", "q"], ["e"], **own),
             node("Inverse", ["m"], ["i"], **own)]
    made = model(nodes, {"x": ["n", 2, "h", "w"], "r": ["boxes", 4], "at": ["boxes"], "q": ["rows", 4],
                         "m": ["k", "k"]}, [*"yzdei"], {"s": np.array([3, 5], np.int32),
                                                        "line": np.array([1, 4], np.int32)},
                 opset=17, kinds={"at": TensorProto.INT32})
    made.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    compiled, before = anyshape.compile_onnx(made), anyshape.stats()["programs"]
    for count, height, width, boxes, rows in ((2, 9, 7, 5, 3), (1, 1, 4, 1, 8), (1, 5, 5, 0, 2)):
        feed = {"x": draw.standard_normal((count, 2, height, width)), "r": draw.uniform(-0.3, 1.3, (boxes, 4)),
                "q": draw.standard_normal((rows, 4)), "m": draw.standard_normal((rows, rows)) + 4 * np.eye(rows)}
        same(made, compiled, {**{name: one.astype(np.float32) for name, one in feed.items()},
                              "at": draw.integers(0, count, boxes).astype(np.int32)}, 1e-4)
    assert anyshape.stats()["programs"] == before


def test_the_last_of_a_dim_is_broadcast_and_a_dim_without_any_is_another_program():
    """x / x[-1:], as position embeddings are scaled: the length of x[-1:] is 1 by what is presumed, not by equality."""
    nodes = [helper.make_node("Slice", ["x", "last", "far", "zero"], ["end"]),
             helper.make_node("Div", ["x", "end"], ["y"])]
    made = model(nodes, {"x": ["n", 3]}, ["y"],
                 {"last": np.array([-1]), "far": np.array([2**63 - 1]), "zero": np.array([0])})
    compiled, before = anyshape.compile_onnx(made), anyshape.stats()["programs"]
    for count in (5, 1, 64):
        same(made, compiled, {"x": np.random.default_rng(count).random((count, 3), np.float32) + 1})
    assert anyshape.stats()["programs"] == before
    same(made, compiled, {"x": np.ones((0, 3), np.float32)})


def test_sizes_that_64_bits_do_not_hold_are_refused_in_words():
    made = model([helper.make_node("Expand", ["x", "s"], ["e"]), helper.make_node("ReduceSum", ["e"], ["y"])],
                 {"x": [1], "s": [2]}, ["y"], kinds={"s": INT64})
    compiled, x = anyshape.compile_onnx(made), np.ones(1, np.float32)
    assert compiled(x, np.array([2, 3])) == 6
    for huge in ((1 << 40, 1 << 40), (1 << 62, 4)):
        with pytest.raises(InputError, match="64 bits"):
            compiled(x, np.array(huge))


def test_a_result_that_is_named_twice_is_there_twice_in_a_file(tmp_path):
    made = model([helper.make_node("Neg", ["x"], ["y"])], {"x": ["n"]}, ["y", "y"])
    path = anyshape.save(anyshape.compile_onnx(made), tmp_path / "model.any")
    with anyshape.load(path, trust_native=True) as run:
        found = run(np.arange(3, dtype=np.float32))
    assert [one.tolist() for one in found] == [[0, -1, -2]] * 2


def test_whole_numbers_that_kernels_do_not_compute_on_are_moved():
    node = helper.make_node
    nodes = [node("Gather", ["w", "i"], ["a"]), node("Concat", ["x", "x"], ["b"], axis=1),
             node("Tile", ["x", "t"], ["c"]), node("Pad", ["x", "p"], ["d"]), node("Where", ["m", "x", "x"], ["e"]),
             node("GatherElements", ["x", "g"], ["f"]), node("GatherND", ["x", "k"], ["h"])]
    kind = TensorProto.UINT32
    draw = np.random.default_rng(0)
    made = model(nodes, {"x": ["n", 2], "i": ["k"], "m": [2]}, [*"abcdefh"], {
        "w": draw.integers(0, 1 << 32, (5, 3)).astype(np.uint32), "t": np.array([2, 1]), "p": np.array([1, 0, 0, 2]),
        "g": np.array([[0, 1], [1, 0]]), "k": np.array([[1], [0]])},
        kinds={**dict.fromkeys("xabcdefh", kind), "i": INT64, "m": BOOL})
    compiled, before = anyshape.compile_onnx(made), anyshape.stats()["programs"]
    for count in (2, 5):
        same(made, compiled, {"x": draw.integers(0, 1 << 32, (count, 2)).astype(np.uint32),
                              "i": draw.integers(-5, 5, count), "m": np.array([True, False])})
    assert anyshape.stats()["programs"] == before


def test_constants_among_the_outputs_are_in_the_file_and_new_in_each_call(tmp_path):
    node = helper.make_node
    made = model([node("Mul", ["x", "w"], ["y"]), node("Constant", [], ["c"], value_floats=[1.0, 2.0])],
                 {"x": ["n", 4]}, ["c", "y", "w"], {"w": np.arange(4, dtype=np.float32)})
    fast = anyshape.compile_onnx(made)
    anyshape.save(fast, tmp_path / "made.any")
    with anyshape.load(tmp_path / "made.any", trust_native=True) as loaded:
        for run in (fast, loaded):
            for rows in (3, 1, 3):
                c, y, w = run(np.ones((rows, 4), np.float32))
                np.testing.assert_array_equal(c, [1, 2])
                np.testing.assert_array_equal(w, np.arange(4))
                for one in (c, y, w):
                    one[...] = 7
    alone = anyshape.compile_onnx(model([node("Identity", ["w"], ["c"])], {"x": [2]}, ["c"], {"w": np.ones(2)}))
    for _ in range(2):
        found = alone(np.ones(2, np.float32))
        np.testing.assert_array_equal(found, [1, 1])
        found[:] = 7
    with pytest.raises(Unsupported, match="no program computes c"):
        anyshape.save(alone, tmp_path / "alone.any")


def test_a_call_may_bring_constants_that_are_inputs_too():
    node = helper.make_node
    body = helper.make_graph(
        [node("Add", ["a", "w"], ["b"]), node("Identity", ["go"], ["goes"])], "body",
        [helper.make_tensor_value_info(name, kind, shape) for name, kind, shape in
         (("i", INT64, []), ("go", BOOL, []), ("a", FLOAT, ["n", 4]))],
        [helper.make_tensor_value_info("goes", BOOL, []), helper.make_tensor_value_info("b", FLOAT, ["n", 4])])
    made = model([node("Mul", ["x", "w"], ["m"]), node("Loop", ["k", "", "m"], ["y"], body=body)],
                 {"x": ["n", 4], "w": [4], "k": []}, ["y"], {"w": np.arange(4, dtype=np.float32), "k": np.array(2)},
                 kinds={"k": INT64})
    fast = anyshape.compile_onnx(made)
    x, w = np.ones((3, 4), np.float32), np.full(4, 5, np.float32)
    more: tuple[dict[str, Any], ...] = ({}, {"w": w}, {"k": np.array(3)}, {"w": w, "k": np.array(0)}, {})
    for feed in ({"x": x, **one} for one in more):
        same(made, fast, feed)
    with pytest.raises(InputError, match="its inputs are x, w, k"):
        fast(x, z=w)
    with pytest.raises(InputError, match="the input 'w' is f64"):
        fast(x, w=w.astype(np.float64))


def test_calls_that_decide_a_comparison_keep_the_program_of_the_others(tmp_path):
    made = model([helper.make_node("Squeeze", ["x"], ["y"])], {"x": ["n", 1, 4]}, ["y"])
    fast, before = anyshape.compile_onnx(made), anyshape.stats()["programs"]
    for rows in (3, 1, 5, 1):
        same(made, fast, {"x": np.ones((rows, 1, 4), np.float32)})
    assert anyshape.stats()["programs"] == before + 1
    with pytest.raises(Unsupported, match="calls without n - 2 >= 0"):
        anyshape.save(fast, tmp_path / "made.any")


@pytest.mark.parametrize("half", [1, 0])
def test_frames_are_transformed_by_a_product_and_deployed(tmp_path, half):
    draw = np.random.default_rng(0)
    window = np.hanning(16).astype(np.float32)
    made = model([helper.make_node("STFT", ["x", "step", "window"], ["y"], onesided=half)], {"x": ["b", "n"]}, ["y"],
                 {"step": np.array(5), "window": window})
    fast = anyshape.compile_onnx(made)
    anyshape.save(fast, tmp_path / "made.any")
    with anyshape.load(tmp_path / "made.any", trust_native=True) as loaded:
        before = anyshape.stats()["programs"]
        for batch, samples in ((1, 16), (3, 47), (2, 20)):
            x = draw.standard_normal((batch, samples)).astype(np.float32)
            same(made, fast, {"x": x}, 1e-4)
            np.testing.assert_allclose(loaded(x), fast(x), 1e-5, 1e-5)
    assert anyshape.stats()["programs"] == before
    with pytest.raises(InputError):
        fast(np.ones((1, 15), np.float32))


def test_transforms_along_an_axis_are_products_and_deployed(tmp_path):
    def transform(name: str, inverse: int, half: int, axis: str, *length: str) -> Any:
        return helper.make_node("DFT", ["x", *(length or ("",)), axis], [name], inverse=inverse, onesided=half)

    nodes = [transform("whole", 0, 0, "rows"), transform("half", 0, 1, "rows"),
             transform("cut", 0, 0, "columns", "four"), transform("long", 1, 0, "columns", "nine"),
             helper.make_node("DFT", ["half", "", "rows"], ["back"], inverse=1, onesided=1)]
    constants = {"rows": np.array(1), "columns": np.array(-2), "four": np.array(4), "nine": np.array(9)}
    gives = ["whole", "half", "cut", "long", "back"]
    made = model(nodes, {"x": ["b", 8, 6, 1]}, gives, constants, opset=20)
    fast = anyshape.compile_onnx(made)
    anyshape.save(fast, tmp_path / "made.any")
    with anyshape.load(tmp_path / "made.any", trust_native=True) as loaded:
        for batch in (1, 3, 0):
            x = np.random.default_rng(0).standard_normal((batch, 8, 6, 1)).astype(np.float32)
            found = fast(x)
            for have, kept in zip(found, loaded(x), strict=True):
                np.testing.assert_allclose(kept, have, 1e-5, 1e-5)
            np.testing.assert_allclose(found[-1], x, 1e-5, 1e-5)
            for have, want in zip(found, (np.fft.fft(x[..., 0], axis=1), np.fft.rfft(x[..., 0], axis=1),
                                          np.fft.fft(x[..., 0], 4, 2), np.fft.ifft(x[..., 0], 9, 2)), strict=False):
                np.testing.assert_allclose(have[..., 0] + 1j * have[..., 1], want, 1e-5, 1e-5)


def test_names_inside_of_a_function_give_way_to_those_of_its_call():
    inner = [helper.make_graph([helper.make_node(op, ["a"], ["x"])], op, [],
                               [helper.make_tensor_value_info("x", FLOAT, None)]) for op in ("Identity", "Neg")]
    body = [helper.make_node("ReduceSum", ["a"], ["s"], keepdims=0), helper.make_node("Cast", ["s"], ["c"], to=9),
            helper.make_node("If", ["c"], ["r"], then_branch=inner[0], else_branch=inner[1])]
    chosen = helper.make_function("own", "chosen", ["a"], ["r"], body, [helper.make_opsetid("", 18)])
    made = model([helper.make_node("chosen", ["x"], ["y"], domain="own")], {"x": ["n"]}, ["y"], functions=[chosen])
    made.opset_import.append(helper.make_opsetid("own", 1))
    fast = anyshape.compile_onnx(made)
    for x in (np.ones(3, np.float32), np.array([2, -2], np.float32)):
        same(made, fast, {"x": x})


def test_a_file_in_onnxruntimes_own_format_is_named_as_such():
    with pytest.raises(InputError, match="onnxruntime's own format"):
        anyshape.compile_onnx(b"\x18\0\0\0ORTM" + bytes(64))
