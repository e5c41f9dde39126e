"""Rows that make a tensor from numbers: full, iota, random."""
from __future__ import annotations

from typing import Any

from anyshape.ir.graph import Node, Value
from anyshape.ir.op import Body, Index
from anyshape.ir.types import TensorType
from anyshape.ops.type_rules import (
    Attrs,
    Inputs,
    Types,
    add_row,
    check_scalar,
    device_of,
    dtype_of,
    fail,
    scalar,
    size,
    sizes,
    tensor,
)
from anyshape.sym.expr import Expr, Size, dense_strides


def _infer_full(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    dtype = dtype_of(name, attrs)
    if isinstance(inputs[0], Value):
        fail(name, f"the value {inputs[0]} is a tensor", "use broadcast")
    check_scalar(name, inputs[0], dtype)
    return (TensorType(dtype, sizes(name, attrs, "shape"), None, device_of(attrs)),)


def _full_body(body: Body[Any], node: Node, index: Index) -> object:
    return scalar(body, node.inputs[0], node.output.tensor.dtype)


def _infer_iota(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    dtype = dtype_of(name, attrs)
    if dtype == "bool":
        fail(name, "bool has no steps")
    check_scalar(name, attrs["start"], dtype)
    check_scalar(name, attrs["step"], dtype)
    return (TensorType(dtype, (size(name, attrs, "count"),), None, device_of(attrs)),)


def _iota_body(body: Body[Any], node: Node, index: Index) -> object:
    dtype = node.output.tensor.dtype
    start, step = node.attr("start"), node.attr("step")
    if isinstance(start, (int, Expr)) and isinstance(step, (int, Expr)):
        return scalar(body, start + index[0] * step, dtype)
    # PyTorch computes a float range in f64 and rounds once
    distance = body.apply("mul", scalar(body, index[0], "f64"), scalar(body, step, "f64"), dtype="f64")
    element = body.apply("add", scalar(body, start, "f64"), distance, dtype="f64")
    return element if dtype == "f64" else body.apply("cast", element, dtype=dtype)


def _infer_random(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    seed = tensor(name, inputs, 0)
    if seed.dtype != "i64" or seed.shape:
        fail(name, f"the seed is {seed}, not i64[]")
    return (TensorType("f32", sizes(name, attrs, "shape"), None, seed.device),)


def _random_body(body: Body[Any], node: Node, index: Index) -> object:
    counter: Size = 0
    for position, stride in zip(index, dense_strides(node.output.tensor.shape), strict=True):
        counter = counter + position * stride
    return body.apply("random", body.read(node.inputs[0], ()), body.index(counter), dtype="f32")


add_row("full", "index", "value | shape, dtype", _infer_full, optional=("device",), body=_full_body, cost=0)
add_row("iota", "index", "| count, start, step, dtype", _infer_iota, optional=("device",), body=_iota_body)
add_row("random", "index", "seed | shape", _infer_random, body=_random_body, cost=40, random=True)
