"""Translations of StableHLO's control flow, where what it depends on is known when compiling, and of custom calls.

    while (i < 4) { x = f(x); i = i + 1 }   -->   f(f(f(f(x))))
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from anyshape.frontend.aten.table import Decline
from anyshape.frontend.importer_stablehlo.elementwise import chosen
from anyshape.frontend.importer_stablehlo.lapack import LIBRARY, ROUTINES
from anyshape.frontend.importer_stablehlo.random_bits import generated
from anyshape.frontend.importer_stablehlo.reduce import largest, nearly_largest, sizes_of_window, windows
from anyshape.frontend.importer_stablehlo.table import ROWS, Call, translates
from anyshape.frontend.symbols.known import Comparison, Known

MOST_UNROLLED = 512  # operations of a loop that is unrolled
PASSED_ON = ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "annotate_device_placement", "MoveToHost",
             "MoveToDevice", "LayoutConstraint")


class RunTimeLoop(Exception):
    """A loop that is not unrolled: how often it runs is known at run time only, or it is too long."""


@translates("while")
def while_(c: Call) -> Any:
    condition, body = c.operation.regions
    now = tuple(c.inputs)
    for _ in range(max(MOST_UNROLLED // max(len(body.operations), 1), 2)):
        found = c.walk.run(condition, now)[0]
        if not isinstance(found, Known) or found.array.dtype == object:
            raise RunTimeLoop
        if not bool(found.array):
            return now
        now = c.walk.run(body, now)
    raise RunTimeLoop


@translates("case", "if")
def case(c: Call) -> Any:
    index, regions = c.inputs[0], c.operation.regions
    if not isinstance(index, Known) or index.array.dtype == object:
        return _selected(c)
    number = int(index.array)
    if c.name == "if":
        number = 0 if number else 1
    elif not 0 <= number < len(regions):
        number = len(regions) - 1
    return c.walk.run(regions[number], ())


def _selected(c: Call) -> Any:
    """All branches, and of their results those of the one that is taken: a program has no effects."""
    index = c.value(0)
    every = [[c.tensor(one) for one in c.walk.run(region, ())] for region in c.operation.regions]
    result = every[-1]
    for number in reversed(range(len(every) - 1)):
        taken = index if c.name == "if" else c.op("eq", index, number)
        taken_ones = []
        for a, b in zip(every[number], result, strict=True):
            a, b = c.same([a, b])
            wide = c.t.broadcast(c.t.reshape(taken, (1,) * a.tensor.rank), a.tensor.shape)
            taken_ones.append(chosen(c, wide, a, b))
        result = taken_ones
    return tuple(result)


@translates("custom_call")
def custom_call(c: Call) -> Any:
    name = c.attr("call_target_name")
    if name == "shape_assertion":
        return ()
    if name == "stablehlo.dynamic_reduce_window":
        return windows(c, c.walk.body(c.attr("called_computations")[0]), len(c.operation.outputs), sizes_of_window(c))
    if name == "stablehlo.dynamic_rng_bit_generator":
        return generated(c, c.sizes(1))
    if name == "mhlo.topk" and c.attr("mhlo.attributes", {}).get("largest"):
        return largest(c, c.attr("mhlo.attributes")["k"])
    plain = name.replace("mhlo.", "chlo.", 1)
    if plain != name and plain in ROWS and not c.attr("mhlo.attributes"):  # as TensorFlow's converter writes it
        return ROWS[plain](Call(replace(c.operation, name=plain), c.inputs, c.walk))
    settings = c.attr("mhlo.backend_config") or {}
    if name == "ApproxTopK" and settings.get("aggregate_to_topk") and len(c.operation.outputs) == 2:
        return nearly_largest(c, c.walk.body(c.attr("called_computations")[0]), settings["reduction_dim"],
                              settings["top_k"])
    if name in PASSED_ON:
        return tuple(c.inputs)
    library = LIBRARY.match(name)
    if library is not None and library["routine"] in ROUTINES:
        return ROUTINES[library["routine"]](c, settings)
    raise Decline(f"a call of {name}")


@translates("composite")
def composite(c: Call) -> Any:
    return c.walk.call(c.attr("decomposition"), c.inputs)


@translates("get_tuple_element")
def get_tuple_element(c: Call) -> Any:
    return c.inputs[c.attr("index")]


@translates("tuple")
def tuple_(c: Call) -> Any:
    raise Decline("tuples of tensors")


def asserted(one: Any) -> Comparison | None:
    """The comparison of sizes that an assertion is about."""
    if isinstance(one, Known) and one.array.dtype == object and isinstance(one.items()[0], Comparison):
        return one.items()[0]  # type: ignore[no-any-return]
    return None
