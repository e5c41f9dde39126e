"""The call of an operator by its PyTorch name: what has no row of its own runs through it, as PyTorch would.

attributes:
    target    the overload, e.g. "aten.convolution.default"
    template  (("args", t, ...), ("kwargs", (name, t), ...)), the call's arguments, with t one of
              ("operand", i) | ("list", t, ...) | ("none",) | ("int", n) | ("float", x) | ("bool", b) | ("str", s) |
              ("complex", x, y) | ("dtype", "f32") | ("device", "cpu") | ("layout", "strided") |
              ("memory_format", "contiguous_format") | ("permuted", i, *dims), operand i permuted | ("result", i), the
              memory of result i, which the operator writes (ir/asynchronous.py)
    effect    its place, from 1, among the calls that do more than give their results (draw random numbers, or do what
              is not known): these are never merged, dropped or reordered; 0 or False: it is none of them
    strides   optional, of a custom operator: per operand, the strides that it had in the trace, None where it was dense
The result types are those that were traced; no rule here can know them.
"""
from __future__ import annotations

from anyshape.base.errors import VerifyError
from anyshape.ir.graph import Attr
from anyshape.ops.type_rules import Attrs, Inputs, Types, add_row, fail

# tag of a template entry -> type of what follows it
_LEAVES: dict[str, type] = {
    "operand": int, "int": int, "float": float, "bool": bool, "str": str, "dtype": str, "device": str, "layout": str,
    "memory_format": str, "result": int,
}  # fmt: skip


def _check_entry(name: str, entry: Attr, operands: int) -> None:
    if not isinstance(entry, tuple) or not entry or not isinstance(entry[0], str):
        fail(name, f"the template entry {entry!r} has no tag")
    tag = entry[0]
    if tag == "list":
        for item in entry[1:]:
            _check_entry(name, item, operands)
        return
    if tag == "permuted":
        numbers = [one for one in entry[1:] if isinstance(one, int)]
        if len(numbers) != len(entry) - 1 or not 0 <= numbers[0] < operands or sorted(numbers[1:]) != list(
                range(len(numbers) - 1)):
            fail(name, f"the template entry {entry!r} is no permuted operand")
        return
    if tag == "complex" and [type(part) for part in entry[1:]] == [float, float]:
        return
    if tag == "none" and len(entry) == 1:
        return
    if tag not in _LEAVES or len(entry) != 2 or type(entry[1]) is not _LEAVES[tag]:
        fail(name, f"the template entry {entry!r} is none that is known")
    if tag == "operand" and not 0 <= entry[1] < operands:  # type: ignore[operator]
        fail(name, f"the template names operand {entry[1]} of {operands}")


def check_template(template: Attr, operands: int) -> None:
    """Raises VerifyError unless `template` is well formed over that many operands."""
    parts = template if isinstance(template, tuple) else ()
    if [part[:1] if isinstance(part, tuple) else part for part in parts] != [("args",), ("kwargs",)]:
        fail("extern", f"the template {template!r} is not (args, kwargs)")
    arguments, keywords = parts
    assert isinstance(arguments, tuple) and isinstance(keywords, tuple)
    for entry in arguments[1:]:
        _check_entry("extern", entry, operands)
    for pair in keywords[1:]:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            fail("extern", f"the keyword {pair!r} is not (name, entry)")
        _check_entry("extern", pair[1], operands)


def _infer(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    check_template(attrs["template"], len(inputs))
    raise VerifyError("extern has no type rule", why="its result types are those that were traced",
                      do="give types= to Builder.multi")


add_row("extern", "extern", "... | target, template, effect", _infer, optional=("strides",))
