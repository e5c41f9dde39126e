"""Classical machine learning in ONNX (ai.onnx.ml): linear models, trees, support vectors, scalers, encoders; against
plain numpy that reads the same attributes, and what onnxruntime gave where the standard is silent."""
from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("onnx")

from onnx import TensorProto, helper  # noqa: E402

import anyshape  # noqa: E402
from anyshape.runtime.numpy_ops.pairwise import coupled  # noqa: E402

FLOAT, DOUBLE, INT64 = TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT64


def model(op, outputs=(FLOAT,), dtype=FLOAT, width=4, version=3, more=(), **attributes):
    names = [f"y{place}" for place in range(len(outputs))]
    nodes = [helper.make_node(op, ["x"], names, domain="ai.onnx.ml", **attributes), *more]
    made = {name for node in nodes for name in node.output} - {name for node in nodes for name in node.input}
    graph = helper.make_graph(nodes, "m", [helper.make_tensor_value_info("x", dtype, ["n", width])], [
        helper.make_tensor_value_info(name, kind, None) for name, kind in zip(names, outputs, strict=True)
        if name in made] + [helper.make_tensor_value_info(name, FLOAT, None) for name in sorted(made - set(names))])
    return helper.make_model(graph, ir_version=9, opset_imports=[
        helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", version)])


def samples(count=9, width=4, dtype=np.float32):
    return np.random.default_rng(count).integers(-3, 4, (count, width)).astype(dtype)


# ---- trees

HOLDS = {"BRANCH_LEQ": np.less_equal, "BRANCH_LT": np.less, "BRANCH_GTE": np.greater_equal, "BRANCH_GT": np.greater,
         "BRANCH_EQ": np.equal, "BRANCH_NEQ": np.not_equal}


def forest(seed, trees, targets, modes, depth=3, positive=False):
    """Lists of nodes and of weights (tree, node, target, weight) of random trees; every leaf has one of each target."""
    draw = np.random.default_rng(seed)
    nodes, weights = [], []
    for tree in range(trees):
        waiting, count = [(0, depth)], 1
        while waiting:
            node, left = waiting.pop()
            if not left or (left < depth and draw.random() < 0.2):
                nodes.append((tree, node, 0, "LEAF", 0.0, 0, 0, 0))
                weights += [(tree, node, target, draw.uniform(0 if positive else -1, 1) / trees)
                            for target in range(targets)]
                continue
            nodes.append((tree, node, int(draw.integers(4)), str(draw.choice(modes)), float(draw.integers(-2, 3)),
                          count, count + 1, int(draw.integers(2))))
            waiting += [(count, left - 1), (count + 1, left - 1)]
            count += 2
    nodes.sort(key=lambda row: row[:2])
    return nodes, weights


def attributes(nodes, weights, kind):
    names = ("treeids", "nodeids", "featureids", "modes", "values", "truenodeids", "falsenodeids",
             "missing_value_tracks_true")
    made = {f"nodes_{name}": list(column) for name, column in zip(names, zip(*nodes, strict=True), strict=True)}
    columns = zip(*weights, strict=True)
    return made | {f"{kind}_{name}": list(column)
                   for name, column in zip(("treeids", "nodeids", "ids", "weights"), columns, strict=True)}


def totals(nodes, weights, x, targets):
    """[samples, trees, targets]: what each tree adds, by a plain walk."""
    table = {row[:2]: row[2:] for row in nodes}
    trees = sorted({row[0] for row in nodes})
    found = np.zeros((len(x), len(trees), targets))
    for place, sample in enumerate(x):
        for tree in trees:
            at = 0
            while table[tree, at][1] != "LEAF":
                feature, mode, split, yes, no, tracks = table[tree, at]
                holds = HOLDS[mode](sample[feature], split) or (tracks and math.isnan(sample[feature]))
                at = yes if holds else no
            for one in weights:
                if one[:2] == (tree, at):
                    found[place, tree, one[2]] += one[3]
    return found


@pytest.mark.parametrize(("how", "modes"), [("SUM", ["BRANCH_LEQ"]), ("AVERAGE", ["BRANCH_LT", "BRANCH_GTE"]),
                                            ("MIN", list(HOLDS)), ("MAX", ["BRANCH_GT"])])
def test_trees_give_what_a_plain_walk_of_them_gives(how, modes):
    targets = 2
    nodes, weights = forest(len(modes), 3, targets, modes, 2)
    run = anyshape.compile_onnx(model("TreeEnsembleRegressor", n_targets=targets, aggregate_function=how,
                                      base_values=[0.5, -0.25], **attributes(nodes, weights, "target")))
    before = anyshape.stats()["programs"]
    for count in (9, 1, 4, 0):
        x = samples(count)
        x[x == 3] = np.nan
        each = totals(nodes, weights, x, targets)
        combined = {"SUM": each.sum, "AVERAGE": each.mean, "MIN": each.min, "MAX": each.max}[how](1)
        np.testing.assert_allclose(run(x), combined + [0.5, -0.25], rtol=1e-5, atol=1e-6)
    assert anyshape.stats()["programs"] == before


def test_trees_of_one_target_each_lie_side_by_side():
    """Boosted trees of many classes: weights are one number for each node; what is missing is filled up."""
    nodes, weights = forest(3, 7, 1, ["BRANCH_LEQ"], 2)
    weights = [(tree, node, tree % 3, weight) for tree, node, _, weight in weights]
    run = anyshape.compile_onnx(model("TreeEnsembleClassifier", (INT64, FLOAT), classlabels_int64s=[5, 3, 9],
                                      post_transform="SOFTMAX", **attributes(nodes, weights, "class")))
    x = samples(11)
    total = totals(nodes, weights, x, 3).sum(1)
    label, scores = run(x)
    np.testing.assert_array_equal(label, np.array([5, 3, 9])[total.argmax(1)])
    np.testing.assert_allclose(scores, np.exp(total) / np.exp(total).sum(1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize(("positive", "how", "want"), [
    (True, "NONE", lambda p: (p > 0.5, 1 - p, p)), (False, "NONE", lambda p: (p > 0, -p, p)),
    (False, "LOGISTIC", lambda p: (p > 0, 1 / (1 + np.exp(p)), 1 / (1 + np.exp(-p))))])
def test_scores_of_two_classes_are_made_of_one_as_onnxruntime_does_it(positive, how, want):
    nodes, weights = forest(1, 3, 1, ["BRANCH_LT"], 2, positive)
    run = anyshape.compile_onnx(model("TreeEnsembleClassifier", (INT64, FLOAT), classlabels_int64s=[0, 1],
                                      post_transform=how, **attributes(nodes, weights, "class")))
    x = samples(8)
    holds, first, second = want(totals(nodes, weights, x, 1).sum((1, 2)))
    label, scores = run(x)
    np.testing.assert_array_equal(label, holds.astype(np.int64))
    np.testing.assert_allclose(scores, np.stack((first, second), 1), rtol=1e-5, atol=1e-6)


def test_thresholds_of_f64_are_compared_in_f64():
    nodes = [(0, 0, 0, "BRANCH_LEQ", 0.0, 1, 2, 0), (0, 1, 0, "LEAF", 0, 0, 0, 0), (0, 2, 0, "LEAF", 0, 0, 0, 0)]
    made = attributes(nodes, [(0, 1, 0, 1.0), (0, 2, 0, 2.0)], "target")
    del made["nodes_values"]
    split = 1 + 1e-12
    run = anyshape.compile_onnx(model("TreeEnsembleRegressor", dtype=DOUBLE, n_targets=1, nodes_values_as_tensor=helper.
                                      make_tensor("v", DOUBLE, [3], [split, 0, 0]), **made))
    np.testing.assert_array_equal(run(np.array([[1.0] * 4, [split] * 4, [1 + 2e-12] * 4])), [[1], [1], [2]])


@pytest.mark.parametrize("change", [
    {"nodes_truenodeids": [0, 0, 0]}, {"nodes_truenodeids": [7, 0, 0]}, {"nodes_modes": [b"X", b"LEAF", b"LEAF"]},
    {"nodes_values": [1.0]}, {"nodes_featureids": [9, 0, 0]}, {"nodes_featureids": [-1, 0, 0]},
    {"nodes_nodeids": [0, 1, 1]}, {"target_nodeids": [1, 5]}, {"target_ids": [0, 4]}, {"target_weights": [1.0]},
    {"nodes_treeids": [-1, 0, 0]}], ids=lambda change: f"{next(iter(change))}")
def test_trees_that_are_none_are_refused(change):
    nodes = [(0, 0, 0, "BRANCH_LEQ", 0.0, 1, 2, 0), (0, 1, 0, "LEAF", 0, 0, 0, 0), (0, 2, 0, "LEAF", 0, 0, 0, 0)]
    made = attributes(nodes, [(0, 1, 0, 1.0), (0, 2, 0, 2.0)], "target") | change
    with pytest.raises(anyshape.AnyShapeError) as found:
        anyshape.compile_onnx(model("TreeEnsembleRegressor", n_targets=1, **made))(samples())
    assert found.value.what and found.value.why and found.value.do


# ---- linear models, support vectors


def test_linear_models_are_products():
    draw = np.random.default_rng(0)
    weights, added, x = draw.random((3, 4), np.float32), draw.random(3, np.float32), samples(6)
    total = x @ weights.T + added
    given = {"coefficients": weights.ravel().tolist(), "intercepts": added.tolist()}
    np.testing.assert_allclose(anyshape.compile_onnx(model("LinearRegressor", targets=3, **given))(x), total, rtol=1e-5)
    label, scores = anyshape.compile_onnx(model("LinearClassifier", (INT64, FLOAT), classlabels_ints=[4, 2, 7],
                                                post_transform="LOGISTIC", **given))(x)
    np.testing.assert_array_equal(label, np.array([4, 2, 7])[total.argmax(1)])
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-total)), rtol=1e-4, atol=1e-6)


def test_one_row_of_coefficients_decides_between_two_labels():
    x = samples(6)
    label, scores = anyshape.compile_onnx(model("LinearClassifier", (INT64, FLOAT), classlabels_ints=[3, 8],
                                                coefficients=[1.0, -1.0, 0.5, 0.0], intercepts=[0.25]))(x)
    total = x @ np.array([1, -1, 0.5, 0], np.float32) + 0.25
    np.testing.assert_array_equal(label, np.where(total > 0, 8, 3))
    np.testing.assert_allclose(scores, np.stack((1 - total, total), 1), rtol=1e-5)


@pytest.mark.parametrize("kernel", ["LINEAR", "RBF", "POLY", "SIGMOID"])
def test_support_vectors_vote_by_pairs(kernel):
    draw = np.random.default_rng(0)
    vectors, x = draw.standard_normal((6, 4)).astype(np.float32), samples(7)
    weights, rho, per = draw.standard_normal((2, 6)).astype(np.float32), [0.1, -0.2, 0.3], [1, 2, 3]
    gamma, bias, degree = 0.3, 0.5, 2.0
    near = {"LINEAR": lambda: x @ vectors.T, "POLY": lambda: (gamma * x @ vectors.T + bias) ** degree,
            "RBF": lambda: np.exp(-gamma * ((x[:, None] - vectors) ** 2).sum(2)),
            "SIGMOID": lambda: np.tanh(gamma * x @ vectors.T + bias)}[kernel]()
    first, votes, scores = np.cumsum([0, *per]), np.zeros((7, 3)), []
    for place, (i, j) in enumerate(((0, 1), (0, 2), (1, 2))):
        total = rho[place] + sum(near[:, first[a]:first[a + 1]] @ weights[b, first[a]:first[a + 1]]
                                 for a, b in ((i, j - 1), (j, i)))
        scores.append(total)
        votes[np.arange(7), np.where(total > 0, i, j)] += 1
    label, found = anyshape.compile_onnx(model(
        "SVMClassifier", (INT64, FLOAT), classlabels_ints=[1, 5, 6], vectors_per_class=per, kernel_type=kernel, rho=rho,
        kernel_params=[gamma, bias, degree], coefficients=weights.ravel().tolist(),
        support_vectors=vectors.ravel().tolist()))(x)
    np.testing.assert_array_equal(label, np.array([1, 5, 6])[votes.argmax(1)])
    np.testing.assert_allclose(found, np.stack(scores, 1), rtol=1e-4, atol=1e-4)
    one = anyshape.compile_onnx(model("SVMRegressor", n_supports=6, kernel_type=kernel, rho=[0.5], coefficients=weights[
        0].tolist(), kernel_params=[gamma, bias, degree], support_vectors=vectors.ravel().tolist()))(x)
    np.testing.assert_allclose(one, near @ weights[:1].T + 0.5, rtol=1e-4, atol=1e-4)


def test_probabilities_of_classes_are_coupled_out_of_those_of_pairs():
    """Pairs that agree are those of one line of probabilities; the others are onnxruntime's."""
    onnxruntime = pytest.importorskip("onnxruntime")
    draw = np.random.default_rng(0)
    wanted = draw.dirichlet(np.ones(4), 5)
    first, second = np.triu_indices(4, 1)
    pairs = wanted[:, first] / (wanted[:, first] + wanted[:, second])
    np.testing.assert_allclose(coupled(pairs), wanted, atol=0.02)
    np.testing.assert_allclose(coupled(np.array([[0.9], [0.25]])), [[0.9, 0.1], [0.25, 0.75]], atol=1e-4)
    with pytest.raises(ValueError, match="no pairs of classes"):
        coupled(np.ones((2, 2)))
    for per in ([2, 3], [1, 2, 3]):
        kinds, vectors = len(per), draw.standard_normal((sum(per), 4)).astype(np.float32)
        made = model(
            "SVMClassifier", (INT64, FLOAT), classlabels_ints=[1, 5, 6][:kinds], vectors_per_class=per,
            kernel_type="RBF", rho=[0.1, -0.2, 0.3][:kinds * (kinds - 1) // 2], kernel_params=[0.3, 0.0, 0.0],
            prob_a=[-1.5, -2.0, -0.5][:kinds * (kinds - 1) // 2], prob_b=[0.1, 0.2, -0.3][:kinds * (kinds - 1) // 2],
            coefficients=draw.standard_normal((kinds - 1) * sum(per)).tolist(),
            support_vectors=vectors.ravel().tolist())
        session, compiled = onnxruntime.InferenceSession(made.SerializeToString()), anyshape.compile_onnx(made)
        before = anyshape.stats()["programs"]
        for count in (7, 1, 0):
            x = draw.standard_normal((count, 4)).astype(np.float32)
            for have, want in zip(compiled(x), session.run(None, {"x": x}), strict=True):
                assert have.dtype == want.dtype
                np.testing.assert_allclose(have, want, 1e-4, 1e-5)
        assert anyshape.stats()["programs"] == before


# ---- scalers and encoders

NAN = float("nan")


@pytest.mark.parametrize(("op", "dtype", "given", "want"), [
    ("Scaler", np.float32, {"offset": [1.0, 2, 3, 4], "scale": [2.0]}, lambda x: (x - [1, 2, 3, 4]) * 2),
    ("Scaler", np.int64, {"offset": [1.0], "scale": [0.5]}, lambda x: ((x - 1) * 0.5).astype(np.float32)),
    ("Normalizer", np.float32, {"norm": "L1"}, lambda x: x / np.maximum(np.abs(x).sum(1)[:, None], 1e-30)),
    ("Normalizer", np.float32, {"norm": "L2"}, lambda x: x / np.maximum(np.sqrt((x * x).sum(1))[:, None], 1e-30)),
    ("Binarizer", np.float32, {"threshold": 0.5}, lambda x: (x > 0.5).astype(np.float32)),
    ("Imputer", np.float32, {"imputed_value_floats": [7.0], "replaced_value_float": 2.0},
     lambda x: np.where(x == 2, 7, x)),
    ("Imputer", np.int64, {"imputed_value_int64s": [7, 8, 9, 10], "replaced_value_int64": 2},
     lambda x: np.where(x == 2, [7, 8, 9, 10], x)),
    ("OneHotEncoder", np.int64, {"cats_int64s": [1, -2, 3], "zeros": 1},
     lambda x: (x[..., None] == np.array([1, -2, 3])).astype(np.float32)),
    ("LabelEncoder", np.int64, {"keys_int64s": [2, -1, 0, 2], "values_int64s": [5, 6, 7, 8], "default_int64": -9},
     lambda x: np.select([x == 2, x == -1, x == 0], [5, 6, 7], -9)),
    ("LabelEncoder", np.float32, {"version": 4, "keys_floats": [1.0, NAN, -3.0], "values_floats": [0.5, 0.25, 4.0]},
     lambda x: np.select([x == 1, np.isnan(x), x == -3], [0.5, 0.25, 4.0], 0.0).astype(np.float32)),
    ("FeatureVectorizer", np.int64, {"inputdimensions": [4]}, lambda x: x.astype(np.float32)),
], ids=lambda one: one if isinstance(one, str) else "")
def test_scalers_and_encoders(op, dtype, given, want):
    run = anyshape.compile_onnx(model(op, dtype={np.float32: FLOAT, np.int64: INT64}[dtype], **given))
    for count in (7, 1, 3):
        x = samples(count, dtype=dtype)
        if op == "LabelEncoder" and dtype == np.float32:
            x[0, 0] = np.nan
        found = run(x)
        assert found.dtype == want(x).dtype or found.dtype == dtype
        np.testing.assert_allclose(found, want(x), rtol=1e-6)


def test_a_result_of_dicts_is_the_host_s_behind_one_program():
    zipped = helper.make_node("ZipMap", ["y1"], ["z"], domain="ai.onnx.ml", classlabels_int64s=[3, 8])
    late = helper.make_node("Neg", ["y0"], ["w"])  # stands behind it and does not read it
    made = model("LinearClassifier", (INT64, FLOAT), classlabels_ints=[3, 8], coefficients=[1.0, -1.0, 0.5, 0.0],
                 intercepts=[0.25], more=(zipped, late))
    before = anyshape.stats()["programs"]
    run = anyshape.compile_onnx(made)
    for count in (2, 5):
        found = dict(zip([one.name for one in run.outputs], run(samples(count)), strict=True))
        assert len(found["z"]) == count and list(found["z"][0]) == [3, 8] and found["w"].shape == (count,)
    assert anyshape.stats()["programs"] == before + 1


def test_labels_that_are_text():
    made = model("LinearClassifier", (TensorProto.STRING, FLOAT), classlabels_strings=["no", "yes"],
                 coefficients=[1.0, -1.0, 0.5, 0.0], intercepts=[0.25])
    compiled = anyshape.compile_onnx(made)
    for count in (9, 1, 0):
        x = samples(count)
        label, scores = compiled(x)
        score = x @ np.array([1.0, -1.0, 0.5, 0.0], np.float32) + 0.25
        assert label.dtype == object and label.tolist() == np.where(score > 0, "yes", "no").tolist()
        np.testing.assert_allclose(scores[:, 1], score, 1e-6, 1e-6)
    assert anyshape.stats()["eager_calls"] == 0


def test_columns_of_text_are_encoded_by_the_host():
    """What skl2onnx makes of ColumnTransformer: columns of text as numbers, or lines of zeros and ones."""
    nodes = [helper.make_node("Gather", ["x", "one"], ["colour"], axis=1),
             helper.make_node("ArrayFeatureExtractor", ["x", "zero"], ["kind"], domain="ai.onnx.ml"),
             helper.make_node("OneHotEncoder", ["colour"], ["lines"], domain="ai.onnx.ml", cats_strings=["red", "blue"],
                              zeros=1),
             helper.make_node("LabelEncoder", ["kind"], ["number"], domain="ai.onnx.ml", keys_strings=["a", "b"],
                              values_floats=[0.5, 2.0], default_float=-1.0),
             helper.make_node("Reshape", ["lines", "flat"], ["wide"]),
             helper.make_node("Concat", ["wide", "number"], ["all"], axis=1),
             helper.make_node("Scaler", ["all"], ["y"], domain="ai.onnx.ml", offset=[0.0], scale=[2.0])]
    graph = helper.make_graph(nodes, "m", [helper.make_tensor_value_info("x", TensorProto.STRING, ["n", 2])], [
        helper.make_tensor_value_info("y", FLOAT, None)], [
        helper.make_tensor(name, INT64, [len(items)], items) for name, items in (
            ("one", [1]), ("zero", [0]), ("flat", [-1, 2]))])
    compiled = anyshape.compile_onnx(helper.make_model(graph, ir_version=9, opset_imports=[
        helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", 3)]))
    for x, want in (([["a", "red"], ["c", "blue"], ["b", "green"]], [[2, 0, 1], [0, 2, -2], [0, 0, 4]]),
                    ([["b", "blue"]], [[0, 2, 4]])):
        for held in (np.array(x, object), np.array(x)):
            np.testing.assert_array_equal(compiled(held), np.array(want, np.float32))
