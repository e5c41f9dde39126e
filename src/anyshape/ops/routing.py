"""Routing of cells (mixture of experts): top-k, the route plan, and the group of each row, by routines of the host.

    topk(x | k)                  [*, E] -> [*, k], [*, k] i64: the largest elements of each line, in descending order,
        and where they are; a NaN is larger than numbers; among equal ones the choice is that of PyTorch
    route_plan(ids | branches)   [N, k] i64 -> order, inverse [N * k] i64, ends [branches] i32: a counting sort of the
        choices by branch, stable; order: choice at each place; inverse: place of each choice; ends: where each branch's
        places end. A choice of -1 is dropped: it stands behind all others. Others outside of [0, branches) fail
    segment_ids(ends | size)     [E] -> [size] i64: the group that each row is in; E behind the last

The ends of groups are what those of `grouped` are (ops/matmul.py).
"""
from __future__ import annotations

from anyshape.ir.types import TensorType
from anyshape.ops.type_rules import Attrs, Inputs, Types, add_row, fail, native, size, tensor
from anyshape.sym.expr import product

ROUTING = ("topk", "route_plan", "segment_ids")


def _infer_topk(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    x = tensor(name, inputs, 0)
    native(name, x.dtype)
    k = _count(name, attrs, "k")
    if x.dtype == "bool" or not x.rank:
        fail(name, f"{x} has no lines of numbers")
    if isinstance(x.shape[-1], int) and k > x.shape[-1]:
        fail(name, f"lines of {x} have less than {k} elements")
    shape = (*x.shape[:-1], k)
    return TensorType(x.dtype, shape, None, x.device), TensorType("i64", shape, None, x.device)


def _infer_plan(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    ids = tensor(name, inputs, 0)
    if ids.dtype != "i64" or ids.rank != 2:
        fail(name, f"{ids} are no ids of branches", "give i64 of rank 2")
    places = TensorType("i64", (product(ids.shape),), None, ids.device)
    return places, places, TensorType("i32", (_count(name, attrs, "branches"),), None, ids.device)


def _infer_segments(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    ends = tensor(name, inputs, 0)
    if ends.dtype not in ("i32", "i64") or ends.rank != 1:
        fail(name, f"{ends} are no ends of groups", "give i32 or i64 of rank 1")
    return (TensorType("i64", (size(name, attrs, "size"),), None, ends.device),)


def _count(name: str, attrs: Attrs, key: str) -> int:
    """An attribute that is a number, at least 1."""
    value = attrs[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        fail(name, f"{key} is {value!r}, not a positive number")
    return value


add_row("topk", "library", "x | k", _infer_topk)
add_row("route_plan", "library", "ids | branches", _infer_plan, checks=True)
add_row("segment_ids", "library", "ends | size", _infer_segments)
