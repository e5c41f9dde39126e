"""The node tests of the onnx wheel with symbolic dims: cases, and one case run."""
from __future__ import annotations

import functools
import re
import warnings
from typing import Any

import numpy as np

import anyshape

# what is out of scope: narrow dtypes, text, lists, classical machine learning, training
NARROW = re.compile(r"FLOAT8|FLOAT4|INT4|INT2|STRING")


@functools.cache
def cases() -> dict[str, Any]:
    """The cases by name."""
    from onnx.backend.test.loader import load_model_tests
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {case.name: case for case in load_model_tests(kind="node")}


def in_scope(case: Any) -> bool:
    """Tensors of dtypes that torch has, and operators of inference."""
    from onnx import TensorProto
    graph = case.model.graph
    if any(node.domain not in ("", "ai.onnx") for node in graph.node):
        return False
    for value in (*graph.input, *graph.output):
        if not value.type.HasField("tensor_type"):
            return False
        if NARROW.search(TensorProto.DataType.Name(value.type.tensor_type.elem_type)):
            return False
    return not any("Sequence" in node.op_type or "Optional" in node.op_type for node in graph.node)


def symbolic(case: Any) -> Any:
    """The model with a symbol in the place of every dim of its inputs."""
    import onnx
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    constants = {one.name for one in model.graph.initializer}
    for value in model.graph.input:
        if value.type.HasField("tensor_type") and value.name not in constants:
            for place, dim in enumerate(value.type.tensor_type.shape.dim):
                dim.dim_param = f"{value.name}_{place}"
    for value in model.graph.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    return model


def run_case(case: Any) -> str:
    """What is wrong with the results of a case; empty where all is right."""
    compiled = anyshape.compile_onnx(symbolic(case))
    for inputs, wanted in case.data_sets:
        found = compiled(*[_array(one) for one in inputs])
        found = found if isinstance(found, tuple) else (found,)
        for place, (have, want) in enumerate(zip(found, wanted, strict=True)):
            wrong = difference(have, _array(want), case.rtol, case.atol)
            if wrong:
                return f"output {place}: {wrong}"
    return ""


def _array(value: Any) -> Any:
    from onnx import TensorProto, numpy_helper
    if isinstance(value, TensorProto):
        return numpy_helper.to_array(value)
    return value if isinstance(value, (list, np.ndarray)) or value is None else np.asarray(value)


def difference(have: Any, want: Any, rtol: float, atol: float) -> str:
    """How two results differ, in words; empty where they are the same within the case's tolerance."""
    if isinstance(want, list):
        if not isinstance(have, list) or len(have) != len(want):
            return f"{type(have).__name__} in place of a list of {len(want)}"
        return next((text for one, other in zip(have, want, strict=True)
                     if (text := difference(one, other, rtol, atol))), "")
    if want is None:
        return "" if have is None else "there is a value"
    want, have = np.asarray(want), np.asarray(have)
    if have.shape != want.shape:
        return f"shape {have.shape}, not {want.shape}"
    if want.dtype.kind in "OUS" or have.dtype.kind in "OUS":
        return "" if have.astype(str).tolist() == want.astype(str).tolist() else "other text"
    if have.dtype != want.dtype:
        return f"dtype {have.dtype}, not {want.dtype}"
    if want.dtype.kind in "biu":
        return "" if np.array_equal(have, want) else f"{int((have != want).sum())} of {want.size} elements differ"
    if want.dtype.name == "bfloat16":
        rtol = max(rtol, 2**-6)  # two units in the last place, as onnx.backend.test.runner has it
    if want.dtype.kind == "V" or want.dtype.itemsize < 4:
        have, want = have.astype(np.float32), want.astype(np.float32)
    if np.allclose(have, want, rtol, atol, equal_nan=True):
        return ""
    with np.errstate(all="ignore"):
        return f"differs by {np.nanmax(np.abs(have.astype(np.float64) - want.astype(np.float64)))}"
