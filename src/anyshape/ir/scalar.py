"""Scalar instructions: what kernels compute an element by: a row each, with everything that holds on every target.

A body (`Body` in ir/op.py) applies them, a loop program consists of them, and a target has an emitter for each, or
leaves to PyTorch what it has none for. All operands have one dtype, which is the result's too, but for what is said at
a row. An instruction with `kinds` is a pointwise op of the same name as well (ops/pointwise.py).
"""
from __future__ import annotations

from dataclasses import dataclass

FLOAT = ("float",)
NUMBER = ("float", "int", "uint")
INTEGER = ("int", "uint")
BITS = ("int", "uint", "bool")
ANY = ("float", "int", "uint", "bool")

Ranges = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Scalar:
    """One row.

    name: the word in loop programs.
    arity: the number of operands.
    kinds: of dtypes (`kind_of`), or dtypes, on which there is a pointwise op of this name; () where there is none.
    cost: in additions; weighs computing again against storing.
    torch: the function of torch that gives its meaning; "" for one of the same name, None where there is none:
        runtime/torch_ops/reference_interpreter.py says it.
    test: the result is bool.
    commutes: the operands may change places.
    divides: on whole numbers, by the last operand: 0 there is an error of the caller.
    ranges: of each operand, [low, high): where tests draw values; () for some around 0.
    """

    name: str
    arity: int
    kinds: tuple[str, ...] = ()
    cost: int = 1
    torch: str | None = ""
    test: bool = False
    commutes: bool = False
    divides: bool = False
    ranges: Ranges = ()

    @property
    def meaning(self) -> str:
        """The name of the function in torch; "" for none."""
        return "" if self.torch is None else self.torch or self.name


_DIVISION: Ranges = ((-3, 4), (1, 6))
_SHIFT: Ranges = ((-3, 4), (0, 4))
_UNIT: Ranges = ((-2, 1),)

SCALAR: dict[str, Scalar] = {row.name: row for row in (
    Scalar("add", 2, NUMBER, commutes=True), Scalar("sub", 2, NUMBER), Scalar("mul", 2, NUMBER, commutes=True),
    Scalar("div", 2, FLOAT, 4),  # of floats; whole numbers have floor_div and trunc_div, which never trap
    Scalar("floor_div", 2, NUMBER, 8, "floor_divide", divides=True, ranges=_DIVISION),
    Scalar("trunc_div", 2, NUMBER, 8, None, divides=True, ranges=_DIVISION),
    Scalar("remainder", 2, NUMBER, 8, divides=True, ranges=_DIVISION),
    Scalar("fmod", 2, NUMBER, 12, divides=True, ranges=_DIVISION),
    Scalar("maximum", 2, NUMBER, commutes=True), Scalar("minimum", 2, NUMBER, commutes=True),  # a NaN operand gives NaN
    Scalar("pow", 2, FLOAT, 24, ranges=((0, 4), (0, 4))), Scalar("atan2", 2, FLOAT, 24), Scalar("copysign", 2, FLOAT),
    Scalar("hypot", 2, FLOAT, 8, commutes=True),
    Scalar("nextafter", 2, ("f32", "f64"), 6),  # the neighbour of a bf16 is not that of the f32 register that holds it

    Scalar("neg", 1, NUMBER), Scalar("abs", 1, NUMBER), Scalar("sign", 1, NUMBER, 2),
    Scalar("floor", 1, FLOAT), Scalar("ceil", 1, FLOAT), Scalar("round", 1, FLOAT), Scalar("trunc", 1, FLOAT),
    Scalar("exp", 1, FLOAT, 8), Scalar("exp2", 1, FLOAT, 8), Scalar("expm1", 1, FLOAT, 12),
    Scalar("log", 1, FLOAT, 10), Scalar("log2", 1, FLOAT, 10), Scalar("log10", 1, FLOAT, 10),
    Scalar("log1p", 1, FLOAT, 12), Scalar("sqrt", 1, FLOAT, 4), Scalar("rsqrt", 1, FLOAT, 6),
    Scalar("reciprocal", 1, FLOAT, 4), Scalar("sin", 1, FLOAT, 14), Scalar("cos", 1, FLOAT, 14),
    Scalar("tan", 1, FLOAT, 20), Scalar("tanh", 1, FLOAT, 14), Scalar("sigmoid", 1, FLOAT, 12),
    Scalar("erf", 1, FLOAT, 20), Scalar("erfc", 1, FLOAT, 24), Scalar("asin", 1, FLOAT, 16, ranges=_UNIT),
    Scalar("acos", 1, FLOAT, 16, ranges=_UNIT), Scalar("atan", 1, FLOAT, 16), Scalar("sinh", 1, FLOAT, 16),
    Scalar("cosh", 1, FLOAT, 16), Scalar("asinh", 1, FLOAT, 20), Scalar("acosh", 1, FLOAT, 20, ranges=((1, 3),)),
    Scalar("atanh", 1, FLOAT, 20), Scalar("lgamma", 1, FLOAT, 60), Scalar("digamma", 1, FLOAT, 60),
    Scalar("erfinv", 1, FLOAT, 40, ranges=_UNIT),

    Scalar("eq", 2, ANY, test=True, commutes=True), Scalar("ne", 2, ANY, test=True, commutes=True),
    Scalar("lt", 2, ANY, test=True), Scalar("le", 2, ANY, test=True), Scalar("gt", 2, ANY, test=True),
    Scalar("ge", 2, ANY, test=True), Scalar("isnan", 1, FLOAT, test=True), Scalar("isinf", 1, FLOAT, test=True),
    Scalar("signbit", 1, NUMBER, test=True),

    # on bool and whole numbers; as ops of a graph they have other names
    Scalar("and", 2, torch="bitwise_and", commutes=True), Scalar("or", 2, torch="bitwise_or", commutes=True),
    Scalar("xor", 2, torch="bitwise_xor", commutes=True), Scalar("not", 1, torch="bitwise_not"),
    Scalar("shift_left", 2, INTEGER, torch="bitwise_left_shift", ranges=_SHIFT),
    Scalar("shift_right", 2, INTEGER, torch="bitwise_right_shift", ranges=_SHIFT),

    Scalar("where", 3),  # bool, then two of the result dtype
    Scalar("cast", 1, torch=None),  # to the result's dtype; from float to int truncates; to bool is "not 0"
    # i64 seed, i64 counter -> uniform [0, 1) in f32: SplitMix64, the same bits on every target
    Scalar("random", 2, cost=40, torch=None),
    # an f32 register rounded (to nearest even) to what the narrow dtype can hold, still an f32 register. A cast that
    # the program writes rounds; what kernels compute between is not rounded.
    Scalar("to_bf16", 1, torch=None), Scalar("to_f16", 1, torch=None),
)}  # fmt: skip


def define_scalar(row: Scalar) -> Scalar:
    """Add a row to the table; a second row of the same name is a bug."""
    assert row.name not in SCALAR, row.name
    SCALAR[row.name] = row
    return row
