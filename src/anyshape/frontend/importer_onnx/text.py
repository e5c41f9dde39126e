"""Operators that give text, as those that give numbers with an encoder behind them, which the host does.

    LinearClassifier(x, classlabels_strings=("a", "b"))
      -->  LabelEncoder(LinearClassifier(x, classlabels_ints=(0, 1)), keys_int64s=(0, 1), values_strings=("a", "b"))
"""
from __future__ import annotations

from anyshape.frontend.importer_onnx.model import CLASSICAL, OnnxNode

# classifier -> its attribute of labels that are numbers
NUMBERED = {"LinearClassifier": "classlabels_ints", "SVMClassifier": "classlabels_ints",
            "TreeEnsembleClassifier": "classlabels_int64s"}


def apart(node: OnnxNode, prefix: str) -> tuple[OnnxNode, ...] | None:
    """The nodes that a classifier with labels that are text stands for; None: it is none."""
    texts = node.attributes.get("classlabels_strings") or ()
    if node.domain != CLASSICAL or node.op not in NUMBERED or len(texts) < 2:
        return None
    kept = {name: value for name, value in node.attributes.items() if name != "classlabels_strings"}
    numbers = tuple(range(len(texts)))
    place = f"{prefix}label"
    return (OnnxNode(node.op, CLASSICAL, node.version, node.inputs, (place, *node.outputs[1:]),
                     kept | {NUMBERED[node.op]: numbers}, node.name),
            OnnxNode("LabelEncoder", CLASSICAL, 2, (place,), node.outputs[:1],
                     {"keys_int64s": numbers, "values_strings": texts}))
