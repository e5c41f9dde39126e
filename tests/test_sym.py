"""Sizes: the normal form, its identities against brute force, proofs that are never wrong."""
from __future__ import annotations

import itertools
import math
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyshape.base.errors import ParseError
from anyshape.sym.counterexamples import allowed_points, signs
from anyshape.sym.expr import (
    Size,
    ceildiv,
    coefficient_of,
    divide,
    evaluate,
    evaluate_all,
    floordiv,
    maximum,
    minimum,
    mod,
    product,
    root,
    scaled,
    substitute,
    symbol,
    symbols_of,
)
from anyshape.sym.facts import Facts
from anyshape.sym.pairwise_order import compared
from anyshape.sym.parse import parse
from anyshape.sym.polynomial_sign import nonnegative
from anyshape.sym.prover import bounds, divides, prove_at_most, prove_equal, prove_nonnegative
from anyshape.sym.python_codegen import Formulas, SizesFunction
from counting import calls
from sampling import examples

NAMES = ("a", "b", "n")
A, B, N = (symbol(name) for name in NAMES)
POINTS = [dict(zip(NAMES, point)) for point in itertools.product((0, 1, 2, 3, 5, 8, 13), repeat=3)]

# a tree that gives both a size and the Python number it must have
Tree = tuple


def trees(divisors: bool = True) -> st.SearchStrategy[Tree]:
    leaves = st.one_of(st.integers(-6, 9).map(lambda v: ("number", v)),
                       st.sampled_from(NAMES).map(lambda name: ("symbol", name)))

    def grow(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
        choices = [st.tuples(st.sampled_from(("add", "sub", "mul", "max", "min")), inner, inner),
                   st.tuples(st.just("root"), inner)]
        if divisors:
            positive = st.one_of(st.integers(1, 6).map(lambda v: ("number", v)),
                                 st.sampled_from(NAMES).map(lambda x: ("add", ("symbol", x), ("number", 1))))
            choices.append(st.tuples(st.sampled_from(("floordiv", "mod")), inner, positive))
        return st.one_of(choices)

    return st.recursive(leaves, grow, max_leaves=8)


def build(tree: Tree) -> Size:
    if tree[0] == "number":
        return tree[1]
    if tree[0] == "symbol":
        return symbol(tree[1])
    if tree[0] == "root":
        return root(maximum(build(tree[1]), 0))
    x, y = build(tree[1]), build(tree[2])
    operations = {"add": lambda: x + y, "sub": lambda: x - y, "mul": lambda: x * y, "max": lambda: maximum(x, y),
                  "min": lambda: minimum(x, y), "floordiv": lambda: floordiv(x, y), "mod": lambda: mod(x, y)}
    return operations[tree[0]]()


def number(tree: Tree, values: dict[str, int]) -> int:
    if tree[0] == "number":
        return tree[1]
    if tree[0] == "symbol":
        return values[tree[1]]
    if tree[0] == "root":
        return math.isqrt(max(number(tree[1], values), 0))
    x, y = number(tree[1], values), number(tree[2], values)
    return {"add": lambda: x + y, "sub": lambda: x - y, "mul": lambda: x * y, "max": lambda: max(x, y),
            "min": lambda: min(x, y), "floordiv": lambda: x // y, "mod": lambda: x % y}[tree[0]]()


def test_what_sums_divide_is_computed_once() -> None:
    n, m = symbol("n"), symbol("m")
    blocks = floordiv(n + 3, 4)
    formulas = Formulas()
    text = formulas.tuple_of([n, blocks, m * blocks, 8 * blocks + m * blocks + 1, floordiv(n, m)])
    assert [line.strip() for line in formulas.lines] == [
        "v0 = s_n + 3", "v1 = v0 // 4", "v2 = s_m*v1", "v3 = s_m*v1 + 8*v1 + 1", "v4 = s_n // (s_m or 1)"]
    assert text == "(s_n, v1, v2, v3, v4, )" and formulas.symbols == {"n", "m"}


@settings(max_examples=examples(300), deadline=None)
@given(trees(), st.sampled_from(POINTS))
def test_a_size_has_the_value_of_its_formula(tree: Tree, values: dict[str, int]) -> None:
    size = build(tree)
    assert evaluate(size, values) == number(tree, values)
    assert substitute(size, values) == number(tree, values)
    assert SizesFunction([size, size + 1], "size")(values) == (number(tree, values), number(tree, values) + 1)


@settings(max_examples=examples(300), deadline=None)
@given(trees())
def test_text_reads_back(tree: Tree) -> None:
    size = build(tree)
    assert parse(str(size)) == size
    assert isinstance(size, int) or symbols_of(size)


@settings(max_examples=examples(150), deadline=None)
@given(trees(), trees(), st.sampled_from(NAMES), st.sampled_from(POINTS))
def test_substitute_is_evaluate_in_two_steps(outer: Tree, inner: Tree, name: str, values: dict[str, int]) -> None:
    moved = {**values, name: number(inner, values)}
    if moved[name] < 0:
        return  # sizes are not negative, so a divisor of the outer formula is positive
    replaced = substitute(build(outer), {name: build(inner)})
    wanted = number(outer, moved)
    assert evaluate(replaced, values) == wanted


@settings(max_examples=examples(200), deadline=None)
@given(trees(divisors=False), trees(divisors=False))
def test_equal_polynomials_are_equal(first: Tree, second: Tree) -> None:
    x, y = build(first), build(second)
    assert (x + y) - y == x
    assert (x + y) * (x + y) == x * x + 2 * x * y + y * y
    if x == y:
        assert hash(x) == hash(y) and str(x) == str(y)
    elif isinstance(x - y, int):
        assert x - y != 0


@pytest.mark.parametrize(("left", "right"), [
    (floordiv(5 * N, 4), N + floordiv(N, 4)),
    (floordiv(floordiv(N, 3), 5), floordiv(N, 15)),
    (floordiv(floordiv(N, 3) + 2, 5), floordiv(N + 6, 15)),
    (floordiv(4 * N + 3, 8), floordiv(N, 2)),
    (floordiv(6 * N * A, 4 * N), floordiv(3 * A, 2)),
    (floordiv(N * A + A, N + 1), A),
    (ceildiv(N, 4), -floordiv(-N, 4)),
    (mod(mod(N, 4), 4), mod(N, 4)),
    (4 * floordiv(N, 4) + mod(N, 4), N),
    (mod(N + 8, 4), mod(N, 4)),
    (maximum(N + 3, A + 3), maximum(A, N) + 3),
    (maximum(A, maximum(B, N)), maximum(maximum(A, B), N)),
    (maximum(2 * N, 2 * A), 2 * maximum(N, A)),
    (minimum(N + 5, N + 2), N + 2),
    (product((A, B, A)), A * A * B),
])
def test_normal_form_is_unique(left: Size, right: Size) -> None:
    assert left == right and str(left) == str(right)


def test_floor_of_negatives_is_pythons() -> None:
    for scale, offset, divisor in itertools.product((-5, -4, -1, 1, 3, 7), (-9, -1, 0, 2, 5), (1, 2, 3, 4, 6)):
        size = floordiv(scale * N + offset, divisor)
        rest = mod(scale * N + offset, divisor)
        for n in range(12):
            assert evaluate(size, {"n": n}) == (scale * n + offset) // divisor, (scale, offset, divisor, n)
            assert evaluate(rest, {"n": n}) == (scale * n + offset) % divisor


@settings(max_examples=examples(200), deadline=None)
@given(trees(divisors=False), trees(divisors=False))
def test_divide_leaves_a_remainder_that_fits(first: Tree, second: Tree) -> None:
    x, y = build(first), build(second)
    q, r = divide(x, y)
    assert q * y + r == x


def test_coefficient_of() -> None:
    assert coefficient_of(3 * A * N + B + 2, "n") == (3 * A, B + 2)
    assert coefficient_of(N * N, "n") is None
    assert coefficient_of(A * floordiv(N, 2), "n") is None
    assert coefficient_of(7, "n") == (0, 7)


def test_a_size_survives_pickling_and_has_no_truth() -> None:
    size = A * floordiv(N, 2) + 1
    assert pickle.loads(pickle.dumps(size)) == size
    with pytest.raises(TypeError, match="no truth value"):
        bool(size)


@pytest.mark.parametrize("factor", [0.6, 0.7, 0.1, 1.7, 1 / 3, 2.5, 1e-05, 3.0])
def test_a_size_times_a_float_is_what_floats_give(factor: float) -> None:
    size = scaled(N, factor) + 2 * A
    assert parse(str(size)) == size and pickle.loads(pickle.dumps(size)) == size
    known = Facts((("n", 3, 1000), ("a", 0, 0)))
    for n in (0, 1, 5, 7, 10, 999, 12345):
        assert evaluate(size, {"n": n, "a": 4}) == int(n * factor) + 8 == substitute(size, {"n": n, "a": 4})
        assert SizesFunction([size], "size")({"n": n, "a": 4}) == (int(n * factor) + 8,)
    assert bounds(known, size) == (int(3 * factor), int(1000 * factor))


def test_a_whole_square_root_is_what_floats_give() -> None:
    size = root(N) * A - root(2 * N + 1)
    assert parse(str(size)) == size and pickle.loads(pickle.dumps(size)) == size
    places = [k * k + d for k in (1, 2, 3, 31, 1000, 46341, 2**25, 2**26 - 1) for d in (-1, 0, 1)]
    for n in (*range(40), *places):
        assert evaluate(root(N), {"n": n}) == substitute(root(N), {"n": n}) == int(math.sqrt(n)) == int(n**0.5)
        wanted = 4 * math.isqrt(n) - math.isqrt(2 * n + 1)
        assert evaluate(size, {"n": n, "a": 4}) == substitute(size, {"n": n, "a": 4}) == wanted
        assert SizesFunction([size], "size")({"n": n, "a": 4}) == (wanted,)


def test_what_is_known_of_square_roots() -> None:
    facts = Facts((("n", 0, None), ("a", 0, None)))
    assert bounds(facts, root(N)) == (0, None)
    assert bounds(Facts((("n", 10, 1000),)), root(N)) == (3, 31)
    assert prove_at_most(facts, root(N), N) and prove_at_most(facts, A * root(N) * root(N), A * N)
    assert prove_at_most(facts, N, root(N) * root(N)) is None and prove_at_most(facts, N, root(N)) is None
    square = Facts((("n", 0, None),), known=(N - root(N) * root(N), root(N) * root(N) - N))
    assert prove_equal(square, N, root(N) * root(N))


@pytest.mark.parametrize("text", ["", "n +", "(n", "n n", "n // 0", "n ** x", "4 $ n", "max(n)", ")", "scaled(n)",
                                  "scaled(n, a)"])
def test_wrong_sizes_are_refused(text: str) -> None:
    with pytest.raises(ParseError):
        parse(text)


def test_parts_of_texts_are_read_once_and_count_each_time() -> None:
    deep = "(" * 40 + "n + 7" + ")" * 40
    assert parse(f"{deep} + 1") == parse("n + 8")
    with pytest.raises(ParseError, match="nested"):
        parse("(" * 30 + deep + ")" * 30)
    wide = "(" + "*".join(["(" + " + ".join("abcdefgh") + ")"] * 4) + ")"
    assert parse(f"{wide} + 1") == parse(wide) + 1
    with pytest.raises(ParseError, match="too many terms"):
        parse(f"{wide} + {' + '.join([wide] * 20)} + 3")
    with pytest.raises(ParseError, match="found 34"):
        parse("(12 34) + n")


# ---- facts

LIMITS = {"a": (0, 3), "b": (1, 4), "n": (2, 9)}
FACTS = Facts(ranges=tuple((name, low, high) for name, (low, high) in LIMITS.items()))
IN_RANGE = [dict(zip(LIMITS, point)) for point in
            itertools.product(*(range(low, high + 1) for low, high in LIMITS.values()))]
HALF_OPEN = Facts(ranges=(("a", 0, None), ("b", 1, 4), ("n", 2, None)))


def test_quotients_by_sizes_have_bounds() -> None:
    """A divisor that may be 0 by its range is not: nothing is divided by 0."""
    rows, per_window = symbol("rows"), floordiv(symbol("h") * symbol("w"), 16)
    facts = Facts(ranges=(("rows", 0, None), ("h", 0, 64), ("w", 0, 64)))
    assert bounds(facts, floordiv(rows, per_window)) == (0, None)
    assert prove_nonnegative(facts, floordiv(rows * per_window + 1, per_window) - rows) is True
    assert bounds(facts, floordiv(rows, symbol("h") - 3)) == (None, None)


@settings(max_examples=examples(400), deadline=None)
@given(trees(), trees())
def test_proofs_are_never_wrong(first: Tree, second: Tree) -> None:
    x, y = build(first), build(second)
    at_most = [evaluate(x, values) <= evaluate(y, values) for values in IN_RANGE]
    for facts in (FACTS, HALF_OPEN):
        answer = prove_at_most(facts, x, y)
        assert answer is None or all(truth is answer for truth in at_most), (str(x), str(y), answer)
        equal = prove_equal(facts, x, y)
        assert equal is None or all((evaluate(x, v) == evaluate(y, v)) is equal for v in IN_RANGE)
        low, high = bounds(facts, x)
        numbers = [evaluate(x, values) for values in IN_RANGE]
        assert (low is None or low <= min(numbers)) and (high is None or high >= max(numbers))
        for k in (2, 3, 4):
            whole = divides(facts, x, k)
            assert whole is None or all((number % k == 0) is whole for number in numbers)


@settings(max_examples=examples(200), deadline=None)
@given(trees(), trees())
def test_proofs_with_divisibility_and_inequalities(first: Tree, second: Tree) -> None:
    facts = Facts(ranges=FACTS.ranges, divisible=((N, 4), (A + B, 2)), known=(N - 2 * B,))
    points = [v for v in IN_RANGE if v["n"] % 4 == 0 and (v["a"] + v["b"]) % 2 == 0 and v["n"] >= 2 * v["b"]]
    x, y = build(first), build(second)
    answer = prove_at_most(facts, x, y)
    assert answer is None or all((evaluate(x, v) <= evaluate(y, v)) is answer for v in points)
    equal = prove_equal(facts, x, y)
    assert equal is None or all((evaluate(x, v) == evaluate(y, v)) is equal for v in points)
    whole = divides(facts, x, 4)
    assert whole is None or all((evaluate(x, v) % 4 == 0) is whole for v in points)


@pytest.mark.parametrize(("left", "right"), [
    ("n", "n*m"), ("n*m", "4096*m"), ("mod(n, 4)", "3"), ("0", "mod(n, 4)"), ("min(n, m)", "n"), ("max(n, m)", "n + m"),
    ("4*(n//4)", "n"), ("n//m", "n"), ("m*(n//m)", "n"), ("n - m*(n//m)", "m - 1"), ("max(n - 5, 0)", "n"),
    ("8", "m"), ("3*k", "m"), ("n*k", "7*4096"), ("b*n", "2*n"), ("k*n + k", "7*n + 7"), ("n + 1", "n*m + m"),
    ("4*b*n + 8", "8*n + 8*m"), ("(n + 3)//4*4", "n + 3"), ("m*n*n", "4096*m*n"), ("4*m*n", "m*n*n + 5*m"),
    ("10*m*k", "m*k*k + 25*m"), ("m*n*k*k", "7*m*n*k"), ("n*(n//4)", "n*n"), ("6*m*n", "m*m*n + 9*n"),
    ("n*((m + 3)//4)", "n*((m + 1)//2)"), ("min((m*x + 31)//32, 32)", "m*x"), ("(x + 15)//16", "(x + 7)//8"),
    ("x*((y + 3)//4) + x", "x*((y + 1)//2) + 2*x"),
])
def test_what_can_be_proved(left: str, right: str) -> None:
    facts = Facts(ranges=(("n", 1, 4096), ("m", 1, None), ("k", 0, 7), ("b", 2, 2)), divisible=((symbol("m"), 8),),
                  known=(symbol("m") - 3 * symbol("k"),))
    assert prove_at_most(facts, parse(left), parse(right)) is True


@settings(max_examples=examples(300), deadline=None)
@given(st.dictionaries(st.tuples(*[st.integers(0, 3)] * 2), st.integers(-30, 30), min_size=1, max_size=6),
       st.tuples(*[st.tuples(st.integers(-2, 3), st.integers(0, 9) | st.none())] * 2))
def test_a_polynomial_that_is_shown_to_be_at_least_0_is(poly, ends) -> None:
    box = tuple((low, None if width is None else low + width) for low, width in ends)
    if nonnegative(poly, box):
        for x, y in itertools.product(*(range(low, low + 25 if high is None else high + 1) for low, high in box)):
            assert sum(c * x**i * y**j for (i, j), c in poly.items()) >= 0


def test_squares_are_at_least_0() -> None:
    """What only cutting shows."""
    for zero in (1, 3, 10, 77):
        for high in (None, 200):
            assert nonnegative({(2,): 1, (1,): -2 * zero, (0,): zero * zero + 1}, ((0, high),))
            assert not nonnegative({(2,): 1, (1,): -2 * zero, (0,): zero * zero - 1}, ((0, high),))


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(trees(), min_size=2, max_size=5))
def test_compared_is_never_wrong(several: list[Tree]) -> None:
    sizes = [build(tree) for tree in several]
    facts = Facts(ranges=FACTS.ranges, divisible=((N, 4),))
    points = [v for v in IN_RANGE if v["n"] % 4 == 0]
    found = compared(sizes, facts)
    assert found.equal + found.ordered + found.either + sum(times for *_, times in found.undecided) == found.pairs
    for x, y in itertools.combinations(dict.fromkeys(sizes), 2):
        one = compared([x, y], facts)
        signs = {evaluate(x, v) <= evaluate(y, v) for v in points}, {evaluate(x, v) >= evaluate(y, v) for v in points}
        assert not one.ordered or {True} in signs
        assert not one.either or {True} not in signs


def test_what_is_known_of_a_call() -> None:
    facts = Facts(ranges=(("n", 16, None), ("b", 0, None)), known=(32 - floordiv(N, 16),))
    assert prove_at_most(facts, 1024 * floordiv(N, 16), 1 << 15) is True
    assert prove_at_most(facts, B * floordiv(N, 16), 32 * B) is True
    assert prove_at_most(facts, 1024 * floordiv(N, 16), (1 << 15) - 1) is None
    assert compared([1024 * floordiv(N, 16), 1 << 15, 2000], facts).undecided == ()


def test_points_are_what_facts_allow() -> None:
    facts = Facts(ranges=(("n", 3, 100), ("m", 1, None)), divisible=((N, 8),), known=(symbol("m") - N,))
    points = allowed_points(facts, ["n", "m"])
    assert points and all(p["n"] % 8 == 0 and 3 <= p["n"] <= 100 and p["m"] >= p["n"] for p in points)


def test_what_points_disagree_about_costs_no_proof() -> None:
    """Bounds are looked for on the side alone that the points leave open."""
    rows, chunks = symbol("rows"), floordiv(N + 7, 8)
    facts = Facts(ranges=(("n", 2, None), ("rows", 0, None)), known=(8 * chunks - N - 1, 32 * rows * chunks - 2))
    either = 16 * maximum(8 * rows * chunks, N) - 256 * minimum(floordiv(N * rows + 31, 32), 32)
    assert signs(either, allowed_points(facts, ["n", "rows"])) == (True, True)
    assert prove_nonnegative(facts, either) is None and not facts.memo.proofs.lows
    never = N * rows - 16 * rows * chunks
    assert prove_nonnegative(facts, never) is None and prove_nonnegative(facts, -never) is True
    assert (never, 2) not in facts.memo.proofs.lows and (-never, 2) in facts.memo.proofs.lows


def test_unknown_is_unknown() -> None:
    facts = Facts()
    assert prove_at_most(facts, A, B) is None
    assert prove_at_most(facts, A + 1, A) is False
    assert prove_at_most(facts, N, N * A) is None  # a may be 0
    assert prove_equal(facts, 4 * floordiv(N, 4), N) is None
    assert prove_equal(Facts(divisible=((N, 4),)), 4 * floordiv(N, 4), N) is True
    assert divides(facts, 2 * N, 4) is None and divides(facts, 4 * N + 2, 4) is False


def test_hints_rank_only() -> None:
    facts = Facts(ranges=(("a", 1, 10), ("b", 1, None)), hints=(("b", 512),))
    assert facts.hint(A * B) == 10 * 512
    assert prove_at_most(facts, B, 512) is None


def test_ten_thousand_comparisons_are_little_work_and_remembered() -> None:
    names = [symbol(f"s{i}") for i in range(8)]
    facts = Facts(ranges=tuple((f"s{i}", 1, 4096 if i % 2 else None) for i in range(8)))
    sizes = [4 * (i % 5 + 1) * names[i % 8] * names[(3 * i + 1) % 8] + i % 3 * names[5 * i % 8] for i in range(100)]

    def compare() -> None:
        for x, y in itertools.product(sizes, sizes):
            prove_at_most(facts, x, y)

    first, again = calls(compare), calls(compare)
    assert first < 6_000_000  # about a second
    assert again < first / 3, "answers are remembered"


def test_sizes_that_hold_each_other_are_evaluated_together():
    n, m = symbol("n"), symbol("m")
    half = floordiv(n * m + 3, 2)
    sizes = [half, maximum(half * 3, m), 7, maximum(half * 3, m) + half, minimum(n, 5) * half]
    for n_, m_ in ((0, 1), (7, 5), (1 << 20, 3)):
        values = {"n": n_, "m": m_}
        assert evaluate_all(sizes, values) == [evaluate(size, values) for size in sizes]


def test_chains_of_maxima_are_read_as_they_stand():
    a, b, c, d = map(symbol, "abcd")
    for text, wanted in (
            ("max(a, max(b, max(c, d)))", maximum(a, maximum(b, maximum(c, d)))),
            ("max(a, max(b, c) + 1)", maximum(a, maximum(b, c) + 1)),
            ("max(max(a, b), max(c, min(d, min(a, b))) * 2)", maximum(
                maximum(a, b), maximum(c, minimum(d, minimum(a, b))) * 2)),
            ("min(a, min(b, a + 1))", minimum(a, b)), ("max(1, max(3, 2))", 3), ("max(a, max(a + 2, a + 1))", a + 2),
            ("floordiv(a + 3, 4) + mod(b, 3)", floordiv(a + 3, 4) + mod(b, 3))):
        assert parse(text) == wanted, text
    for text in ("max(a, max(b, c)", "max(a, max(b))", "max(a, max(b, c)))", "max(a)", "mod(a, 0)", "floordiv(a, 0)",
                 "a//0", "max(a, " * 70 + "b" + ")" * 70):
        with pytest.raises(ParseError):
            parse(text)
