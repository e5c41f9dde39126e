"""Steps of the host between programs: control flow that the data decide, lists, text, results whose size is data."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from anyshape.base.errors import Unsupported
from anyshape.frontend.importer_onnx.model import OnnxNode

HOST: dict[str, Callable[..., Any]] = {}


def run(node: OnnxNode, values: Mapping[str, Any], shared: Any, stage: Any) -> dict[str, Any]:
    """The results of a node by name.

    Raises:
        Unsupported: an operator that is not there.
    """
    function = HOST.get(f"{node.domain}:{node.op}" if node.domain else node.op)
    if function is None:
        raise Unsupported(f"the operator {node} cannot run", where=str(node), why="AnyShape has no translation of it",
                          do="export the model without it")
    raise NotImplementedError(torch.__version__)
