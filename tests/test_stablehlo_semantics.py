"""Operations of StableHLO at the ends of what they take: folded when compiling, and computed, to the same numbers."""
from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax import export, lax
from jax import numpy as jnp

import anyshape
from anyshape.base.errors import InputError, Unsupported

DRAW = np.random.default_rng(0)


def results(text: str, *arguments: Any) -> tuple[np.ndarray, ...]:
    found = anyshape.compile_stablehlo(text)(*arguments)
    return found if isinstance(found, tuple) else (found,)


def test_what_is_folded_gives_what_is_computed() -> None:
    """Sums that wrap, quotients of the lowest number, dims in another order, reductions of nothing, signs of bits."""
    add = """({ ^bb0(%x: tensor<i16>, %y: tensor<i16>): %o = stablehlo.add %x, %y : tensor<i16>
                stablehlo.return %o : tensor<i16> })"""
    text = f"""module {{ func.func @main() -> (tensor<i16>, tensor<2xi64>, tensor<3x2xi8>, tensor<0xi16>,
            tensor<2xui16>, tensor<2xi16>, tensor<0x2xbf16>, tensor<1x2xi8>, tensor<ui64>, tensor<1xi8>, tensor<ui16>,
            tensor<f32>) {{
      %a = stablehlo.constant dense<[32767, 32767, 5]> : tensor<3xi16>
      %zero = stablehlo.constant dense<0> : tensor<i16>
      %wrapped = "stablehlo.reduce"(%a, %zero) {add} {{dimensions = array<i64: 0>}}
          : (tensor<3xi16>, tensor<i16>) -> tensor<i16>
      %low = stablehlo.constant dense<[-9223372036854775808, -7]> : tensor<2xi64>
      %by = stablehlo.constant dense<[3, 2]> : tensor<2xi64>
      %quotient = stablehlo.divide %low, %by : tensor<2xi64>
      %m = stablehlo.constant dense<[[1, 2, 3], [4, 5, 6]]> : tensor<2x3xi8>
      %turned = stablehlo.broadcast_in_dim %m, dims = [1, 0] : (tensor<2x3xi8>) -> tensor<3x2xi8>
      %none = stablehlo.constant dense<> : tensor<3x0xi16>
      %nothing = "stablehlo.reduce"(%none, %zero) {add} {{dimensions = array<i64: 0>}}
          : (tensor<3x0xi16>, tensor<i16>) -> tensor<0xi16>
      %bits = stablehlo.constant dense<[65535, 4]> : tensor<2xui16>
      %one = stablehlo.constant dense<1> : tensor<2xui16>
      %shifted = stablehlo.shift_right_arithmetic %bits, %one : tensor<2xui16>
      %base = stablehlo.constant dense<[-1, 3]> : tensor<2xi16>
      %exponent = stablehlo.constant dense<[-3, 2]> : tensor<2xi16>
      %power = stablehlo.power %base, %exponent : tensor<2xi16>
      %empty = stablehlo.constant dense<> : tensor<0x2xbf16>
      %line = stablehlo.constant dense<[[1, 2]]> : tensor<1x2xi8>
      %flipped = stablehlo.reverse %line, dims = [0] : tensor<1x2xi8>
      %large = stablehlo.constant dense<1.0e+19> : tensor<f64>
      %whole = stablehlo.convert %large : (tensor<f64>) -> tensor<ui64>
      %five = stablehlo.constant dense<[5]> : tensor<1xi8>
      %places = stablehlo.constant dense<> : tensor<1x0xi8>
      %taken = "stablehlo.gather"(%five, %places) <{{dimension_numbers = #stablehlo.gather<collapsed_slice_dims = [0],
          index_vector_dim = 1>, slice_sizes = array<i64: 1>}}> : (tensor<1xi8>, tensor<1x0xi8>) -> tensor<1xi8>
      %one_bit = stablehlo.constant dense<1> : tensor<ui16>
      %seven = stablehlo.constant dense<7> : tensor<ui16>
      %masked = "stablehlo.reduce"(%seven, %one_bit) ({{ ^bb0(%x: tensor<ui16>, %y: tensor<ui16>):
          %o = stablehlo.and %x, %y : tensor<ui16> stablehlo.return %o : tensor<ui16> }}) {{dimensions = array<i64>}}
          : (tensor<ui16>, tensor<ui16>) -> tensor<ui16>
      %half = stablehlo.constant dense<0.5> : tensor<f32>
      %same = stablehlo.reverse %half, dims = [] : tensor<f32>
      return %wrapped, %quotient, %turned, %nothing, %shifted, %power, %empty, %flipped, %whole, %taken, %masked, %same
          : tensor<i16>, tensor<2xi64>, tensor<3x2xi8>, tensor<0xi16>, tensor<2xui16>, tensor<2xi16>, tensor<0x2xbf16>,
            tensor<1x2xi8>, tensor<ui64>, tensor<1xi8>, tensor<ui16>, tensor<f32> }} }}"""
    wanted = [3, [-3074457345618258602, -3], [[1, 4], [2, 5], [3, 6]], [], [65535, 2], [-1, 9], np.zeros((0, 2)),
              [[1, 2]], 10**19, [5], 1, 0.5]
    for found, want in zip(results(text), wanted, strict=True):
        np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize(("wide", "narrow"), (("ui64", "i8"), ("f32", "bf16"), ("i64", "f32"), ("ui32", "ui16")))
def test_bits_of_several_numbers_are_those_of_one(wide: str, narrow: str) -> None:
    name = {"ui64": "uint64", "i8": "int8", "f32": "float32", "bf16": "bfloat16", "i64": "int64", "ui32": "uint32",
            "ui16": "uint16"}
    whole = np.array([[0x0102F3C4F5867788, 0x3F81C2E3]], np.uint64).astype(f"u{jnp.dtype(name[wide]).itemsize}").view(
        jnp.dtype(name[wide]))
    parts = whole.view(jnp.dtype(name[narrow])).reshape(1, 2, -1)
    count = parts.shape[-1]
    text = f"""module {{ func.func @main(%a: tensor<1x?x{wide}>, %b: tensor<1x2x{count}x{narrow}>)
        -> (tensor<1x?x{count}x{narrow}>, tensor<1x2x{wide}>) {{
      %0 = stablehlo.bitcast_convert %a : (tensor<1x?x{wide}>) -> tensor<1x?x{count}x{narrow}>
      %1 = stablehlo.bitcast_convert %b : (tensor<1x2x{count}x{narrow}>) -> tensor<1x2x{wide}>
      return %0, %1 : tensor<1x?x{count}x{narrow}>, tensor<1x2x{wide}> }} }}"""
    for found, want in zip(results(text, whole, parts), (parts, whole), strict=True):
        np.testing.assert_array_equal(found.view(np.uint8), want.view(np.uint8))


def same(function: Any, *arguments: Any) -> None:
    """As XLA."""
    found = anyshape.jax.jit(function, strict=True)(*arguments)
    for have, want in zip(jax.tree.leaves(found), jax.tree.leaves(jax.jit(function)(*arguments)), strict=True):
        assert have.dtype == want.dtype
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5)


def test_complex_numbers_are_moved() -> None:
    def moved(x: Any, part: Any, at: Any) -> Any:
        turned = x.transpose(2, 1, 0).reshape(4, 6)
        return (turned @ turned.T, lax.pad(x, x[0, 0, 0], ((1, -1, 1), (0, 2, 0), (-1, 0, 0))),
                x.at[at, 1:].add(part[0]), lax.dynamic_update_slice(x, part, (at, 1, at)),
                lax.iota(jnp.complex64, 3), lax.sort((x.real, x), num_keys=1)[1])
    draw = (DRAW.normal(size=(2, 3, 4, 2)).astype("f4").view("c8"))[..., 0]
    same(moved, draw, draw[:1, :2], np.int32(1))


@pytest.mark.parametrize("dtype", ("complex64", "int8", "int32", "uint32"))
def test_convolutions_of_other_numbers(dtype: str) -> None:
    """Sums of whole numbers wrap."""
    kind = jnp.dtype(dtype)
    x, kernel = ((DRAW.integers(-2**31, 2**31, shape).astype(kind) if kind.kind in "iu" else DRAW.normal(
        size=(*shape, 2)).astype("f4").view(kind)[..., 0]) for shape in ((2, 4, 5, 6), (6, 2, 2, 3)))
    same(lambda x, k: lax.conv_general_dilated(x, k, (2, 1), ((1, 1), (2, -1)), (1, 2), (2, 1), feature_group_count=2),
         x, kernel)


def test_a_convolution_over_no_dims_is_a_product() -> None:
    same(lambda x, k: lax.conv_general_dilated(x, k, (), ()), *(DRAW.normal(size=shape).astype("f4")
                                                                for shape in ((3, 4), (5, 4))))


@pytest.mark.parametrize("bits", ((5, 10), (8, 7), (4, 3), (8, 2), (2, 30)))
def test_precision_is_reduced_as_by_xla(bits: tuple[int, int]) -> None:
    """What is below the smallest normal number is 0."""
    x = np.concatenate([DRAW.normal(size=64) * 2.0 ** DRAW.integers(-40, 40, 64), [
        np.nan, np.inf, -np.inf, 0.0, -0.0, 65519, 65520, 6e-5, 6.1e-5, 6.1035156e-5, -1e-8, 240, 248]]).astype("f4")
    found = anyshape.jax.jit(lambda x: lax.reduce_precision(x, *bits), strict=True)(x)
    np.testing.assert_array_equal(found, jax.jit(lambda x: lax.reduce_precision(x, *bits))(x))


@pytest.mark.parametrize("shape", [(7,), (4, 2, 3)])
def test_the_study_hands_bools_to_the_interpreter_as_they_are(shape: tuple[int, ...]) -> None:
    from jaxlib.mlir import ir

    from anyshape_bench.experiments.stablehlo_cases import attribute_of
    given = DRAW.integers(0, 2, shape).astype(bool)
    given.flat[:2] = True, False
    with ir.Context(), ir.Location.unknown():
        np.testing.assert_array_equal(np.array(attribute_of(given)), given)


@pytest.mark.parametrize("wide", ["f16", "f32", "f64"])
def test_floats_that_are_no_whole_numbers_of_a_dtype_become_the_nearest(wide: str) -> None:
    """As of XLA: the ends of the dtype, and 0 for what is no number, folded and computed."""
    given = [1e30, -1e30, np.inf, -np.inf, np.nan, 3e9, -3e9, 300.0, -300.0, 2.0**31, -2.0**31, 2.0**63, -2.0**63,
             1e19, 2.0**64, 255.9, -0.9, -1.0, 127.9]
    with np.errstate(over="ignore"):
        x = np.array(given, wide.replace("f", "float"))
    names = {f"{sign}int{bits}": f"{'ui' if sign else 'i'}{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
    bits = ", ".join(f"0x{one:0{x.itemsize * 2}X}" for one in x.view(f"u{x.itemsize}"))
    body, out = [f"%c = stablehlo.constant dense<[{bits}]> : tensor<{x.size}x{wide}>"], []
    for name, kind in names.items():
        for operand, dim in (("x", "?"), ("c", x.size)):
            out.append((f"%{operand}{name}", f"tensor<{dim}x{kind}>"))
            body.append(f"%{operand}{name} = stablehlo.convert %{operand} : (tensor<{dim}x{wide}>) -> {out[-1][1]}")
    kinds = ", ".join(kind for _, kind in out)
    lines = "\n".join(body)
    text = f"""module {{ func.func @main(%x: tensor<?x{wide}>) -> ({kinds}) {{ {lines}
      return {", ".join(value for value, _ in out)} : {kinds} }} }}"""
    found = iter(results(text, x))
    for name in names:
        info = np.iinfo(name)
        wanted = np.array([0 if one != one else info.min if one <= info.min else info.max if one >= info.max
                           else int(one) for one in x.astype("f8").tolist()], name)
        for _ in range(2):
            one = next(found)
            assert one.dtype == name
            np.testing.assert_array_equal(one, wanted)


def test_batch_norms_over_any_batch() -> None:
    """Against their formulas, of f64; one program for all sizes."""
    wide, row = "tensor<?x3x?xf64>", "tensor<3xf64>"
    at = "{epsilon = 1.0e-2 : f32, feature_index = 1 : i64}"
    run = anyshape.compile_stablehlo(f"""module {{
      func.func @main(%x: {wide}, %s: {row}, %o: {row}, %g: {wide}) -> ({wide}, {wide}, {wide}, {row}, {row}) {{
        %y:3 = "stablehlo.batch_norm_training"(%x, %s, %o) {at} : ({wide}, {row}, {row}) -> ({wide}, {row}, {row})
        %i = "stablehlo.batch_norm_inference"(%x, %s, %o, %y#1, %y#2) {at}
            : ({wide}, {row}, {row}, {row}, {row}) -> {wide}
        %d:3 = "stablehlo.batch_norm_grad"(%x, %s, %y#1, %y#2, %g) {at}
            : ({wide}, {row}, {row}, {row}, {wide}) -> ({wide}, {row}, {row})
        return %y#0, %i, %d#0, %d#1, %d#2 : {wide}, {wide}, {wide}, {row}, {row}
      }}
    }}""")
    draw = np.random.default_rng(0)
    for batch, length in ((4, 5), (1, 2), (7, 1)):
        x, scale, offset, g = (torch.from_numpy(draw.normal(size=shape)).requires_grad_() for shape in (
            (batch, 3, length), 3, 3, (batch, 3, length)))
        epsilon = float(np.float32(1e-2))
        y = torch.nn.functional.batch_norm(x, None, None, scale, offset, True, eps=epsilon)
        wanted = (y, y, *torch.autograd.grad(y, (x, scale, offset), g))
        found = run(*(one.detach().numpy() for one in (x, scale, offset, g)))
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b.detach().numpy(), rtol=1e-9, atol=1e-11)


def test_the_least_number_to_a_negative_power_is_0() -> None:
    least = np.array([np.iinfo(np.int64).min, -1, 1], np.int64)
    run = anyshape.compile_stablehlo("""func.func @main(%x: tensor<3xi64>, %y: tensor<3xi64>) -> tensor<3xi64> {
        %r = stablehlo.power %x, %y : tensor<3xi64>
        return %r : tensor<3xi64>
    }""")
    np.testing.assert_array_equal(run(least, np.array([-2, -3, -9], np.int64)), [0, -1, 1])


def test_a_sort_by_something_else_than_its_operands_is_refused() -> None:
    """Absolute values agree with the numbers themselves on 0 and 1."""
    text = """module { func.func @main(%a: tensor<4xi32>) -> tensor<4xi32> {
      %r = "stablehlo.sort"(%a) ({ ^bb0(%p: tensor<i32>, %q: tensor<i32>):
        %x = stablehlo.abs %p : tensor<i32>  %y = stablehlo.abs %q : tensor<i32>
        %o = stablehlo.compare LT, %x, %y : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %o : tensor<i1> }) : (tensor<4xi32>) -> tensor<4xi32>
      return %r : tensor<4xi32> } }"""
    with pytest.raises(Unsupported, match="sort") as refused:
        anyshape.compile_stablehlo(text)
    assert "something else than the operands" in refused.value.why


def test_complex_numbers_are_sorted_and_summed_by_their_parts() -> None:
    draw = (DRAW.integers(-2, 3, (2, 3, 9)) * 1.0).astype("f4")
    same(lambda x, k: (lax.sort((lax.complex(*x), k)), lax.sort((k, lax.complex(*x)), num_keys=2),
                       lax.bitcast_convert_type(lax.complex(*x), jnp.complex64),
                       lax.cumsum(lax.complex(*x), 1, reverse=True)),
         draw, DRAW.integers(0, 3, (3, 9), "i4"))


def test_operations_that_are_deprecated() -> None:
    text = """module { func.func @main(%a: tensor<?x3xf32>, %b: tensor<3x4xf32>, %c: tensor<2x?x3xf32>)
        -> (tensor<?x4xf32>, tensor<?x4x2xf32>, tensor<2x3x4xf32>) {
      %0 = stablehlo.dot %a, %b : (tensor<?x3xf32>, tensor<3x4xf32>) -> tensor<?x4xf32>
      %1 = stablehlo.einsum %c, %b, config = "bnk,km->nmb"
          : (tensor<2x?x3xf32>, tensor<3x4xf32>) -> tensor<?x4x2xf32>
      %2 = stablehlo.broadcast %b, sizes = [2] : (tensor<3x4xf32>) -> tensor<2x3x4xf32>
      return %0, %1, %2 : tensor<?x4xf32>, tensor<?x4x2xf32>, tensor<2x3x4xf32> } }"""
    a, b, more = (DRAW.normal(size=shape).astype("f4") for shape in ((5, 3), (3, 4), (2, 5, 3)))
    wanted = a @ b, np.einsum("bnk,km->nmb", more, b), np.broadcast_to(b, (2, 3, 4))
    for found, want in zip(results(text, a, b, more), wanted, strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)


def test_large_windows_go_dim_by_dim_and_padding_may_be_below_0() -> None:
    same(lambda x: (lax.reduce_window(x, 0.0, lax.add, (18, 20), (1, 3), "SAME"),
                    lax.reduce_window(x, -jnp.inf, lax.max, (18, 20), (2, 1), "VALID"),
                    lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 1), ((-1, 1), (-2, 0)))),
         DRAW.normal(size=(21, 23)).astype("f4"))


def test_an_exported_function_takes_what_numpy_makes_by_default() -> None:
    """Of 64 bits, as `Exported.call` does; and solves with halves."""
    size, = export.symbolic_shape("n")
    exported = export.export(jax.jit(lambda x, at: (x[at], lax.linalg.triangular_solve(
        jnp.eye(2, dtype=jnp.float16) * 2, x.astype(jnp.float16).reshape(2, -1), left_side=True))))(
        jax.ShapeDtypeStruct((4,), jnp.float32), jax.ShapeDtypeStruct((size,), jnp.int32))
    x, at = DRAW.normal(size=4), np.array([3, 0, 1])
    for found, want in zip(anyshape.compile_jax(exported)(x, at), exported.call(x, at), strict=True):
        assert found.dtype == want.dtype
        np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize(("algorithm", "state"), (
    ("THREE_FRY", (2**63 + 5, 2**64 - 1)), ("DEFAULT", (2**64 - 3, 2**64 - 1))))
def test_random_bits_are_those_of_xla(algorithm: str, state: tuple[int, ...]) -> None:
    """Of 32 and of 64 bits, an odd number of them, and with counters that overflow."""
    with jax.enable_x64(True):
        which = getattr(lax.RandomAlgorithm, f"RNG_{algorithm}")
        key = np.array(state, np.uint64)

        def bits(key: Any) -> Any:
            end, some = lax.rng_bit_generator(key, (3, 5), np.uint32, algorithm=which)
            end, more = lax.rng_bit_generator(end, (2, 3, 7), np.uint32, algorithm=which)
            return some, more, *lax.rng_bit_generator(end, (5,), np.uint64, algorithm=which)
        for have, want in zip(anyshape.jax.jit(bits, strict=True)(key), jax.jit(bits)(key), strict=True):
            assert have.dtype == want.dtype
            np.testing.assert_array_equal(have, want)


def test_random_bits_for_any_size() -> None:
    with jax.enable_x64(True):
        def bits(key: Any, x: Any) -> Any:
            return lax.rng_bit_generator(key, x.shape, np.uint32, algorithm=lax.RandomAlgorithm.RNG_PHILOX)[1]
        fast, key = anyshape.jax.jit(bits, strict=True), np.array([1, 2], np.uint64)
        for rows in (2, 5, 7):
            x = np.zeros((rows, 3), "f4")
            np.testing.assert_array_equal(fast(key, x), jax.jit(bits)(key, x))


def test_a_counter_of_128_bits() -> None:
    """The known answer of Random123's tests, and a counter that overflows."""
    text = """module { func.func @main(%state: tensor<3xui64>) -> (tensor<3xui64>, tensor<5xui32>) {
      %0, %1 = stablehlo.rng_bit_generator %state, algorithm = PHILOX
          : (tensor<3xui64>) -> (tensor<3xui64>, tensor<5xui32>)
      return %0, %1 : tensor<3xui64>, tensor<5xui32> } }"""
    run = anyshape.compile_stablehlo(text)
    _, words = run(np.zeros(3, np.uint64))
    np.testing.assert_array_equal(words[:4], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8])
    state, more = run(np.array([0, 2**64 - 1, 2**64 - 1], np.uint64))
    np.testing.assert_array_equal(state, [0, 1, 0])
    assert more[4] == words[0]


def of_windows(dtype: str, size: int, window: int, body: str, first: str, padding: str, stride: int = 1) -> str:
    count = (size + sum(map(int, padding.split(","))) - window) // stride + 1
    return f"""module {{ func.func @main(%x: tensor<{size}x{dtype}>) -> tensor<{count}x{dtype}> {{
      %i = stablehlo.constant dense<{first}> : tensor<{dtype}>
      %0 = "stablehlo.reduce_window"(%x, %i) <{{window_dimensions = array<i64: {window}>,
        window_strides = array<i64: {stride}>, padding = dense<[[{padding}]]> : tensor<1x2xi64>}}> ({{
        ^bb0(%a: tensor<{dtype}>, %b: tensor<{dtype}>): {body} stablehlo.return %o : tensor<{dtype}> }})
        : (tensor<{size}x{dtype}>, tensor<{dtype}>) -> tensor<{count}x{dtype}>
      return %0 : tensor<{count}x{dtype}> }} }}"""


# of the whole numbers a and b: (1 + a) (1 + b) - 1
GROWN = "%p = stablehlo.multiply %a, %b : tensor<i32> %q = stablehlo.add %a, %b : tensor<i32> " \
    "%o = stablehlo.add %p, %q : tensor<i32>"


@pytest.mark.parametrize(("size", "window", "padding", "stride"), ((9, 9, (8, 0), 1), (700, 301, (3, 5), 7)))
def test_padding_of_a_window_is_made_of_first_values(size: int, window: int, padding: tuple[int, int], stride: int
                                                     ) -> None:
    """That are not neutral, as the specification has it; of windows that are scans, and of large ones."""
    x = DRAW.integers(-50, 50, size).astype(np.int32)
    wide = np.pad(x, padding, constant_values=3).astype(np.int32)
    windows = np.lib.stride_tricks.sliding_window_view(wide, window)[::stride]
    low, high = padding
    for body, want in (("%o = stablehlo.add %a, %b : tensor<i32>", 3 + windows.sum(1)),
                       (GROWN, 4 * (windows + 1).prod(1, dtype=np.int32) - 1)):
        found, = results(of_windows("i32", size, window, body, "3", f"{low}, {high}", stride), x)
        np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("combine", ("add", "multiply", "maximum", "subtract"))
def test_what_is_selected_is_combined_by_any_body(combine: str) -> None:
    """And with a first value that is not neutral, once."""
    text = f"""module {{ func.func @main(%x: tensor<?xf32>, %s: tensor<?xf32>) -> tensor<?xf32> {{
      %i = stablehlo.constant dense<0.5> : tensor<f32>
      %0 = "stablehlo.select_and_scatter"(%x, %s, %i) ({{ ^bb0(%a: tensor<f32>, %b: tensor<f32>):
          %o = stablehlo.compare GE, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
          stablehlo.return %o : tensor<i1> }}, {{ ^bb0(%a: tensor<f32>, %b: tensor<f32>):
          %o = stablehlo.{combine} %a, %b : tensor<f32> stablehlo.return %o : tensor<f32> }})
        {{window_dimensions = array<i64: 3>, window_strides = array<i64: 1>,
          padding = dense<[[1, 0]]> : tensor<1x2xi64>}} : (tensor<?xf32>, tensor<?xf32>, tensor<f32>) -> tensor<?xf32>
      return %0 : tensor<?xf32> }} }}"""
    x, source = DRAW.normal(size=8).astype("f4"), DRAW.normal(size=7).astype("f4")
    want = np.full(8, 0.5, "f4")
    way: Any = getattr(np, combine)
    for place, one in enumerate(source):
        inside = list(range(max(place - 1, 0), place + 2))
        at = max(inside, key=lambda k: x[k])
        want[at] = way(want[at], one)
    np.testing.assert_allclose(results(text, x, source)[0], want, rtol=1e-5, atol=1e-6)


PLACES = np.array([[3], [1], [3], [7], [-1], [0], [3]], np.int32)
AT_ROWS = """{scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1], inserted_window_dims = [0],
    scatter_dims_to_operand_dims = [0], index_vector_dim = 1>}"""


@pytest.mark.parametrize(("dtype", "body"), (
    ("ui32", "%o = stablehlo.xor %a, %b : tensor<ui32>"), ("i8", "%o = stablehlo.and %a, %b : tensor<i8>"),
    ("f32", "%o = stablehlo.subtract %a, %b : tensor<f32>"), ("f32", "%o = stablehlo.subtract %b, %a : tensor<f32>"),
    ("complex<f32>", "%o = stablehlo.multiply %a, %b : tensor<complex<f32>>"),
    ("f32", "%p = stablehlo.multiply %a, %a : tensor<f32> %o = stablehlo.add %p, %a : tensor<f32>"),
    ("i32", GROWN), ("f32", "%o = stablehlo.constant dense<2.5> : tensor<f32>")))
def test_a_scatter_by_any_body(dtype: str, body: str) -> None:
    """Of which three updates reach one row: one after another, as XLA does it."""
    text = f"""module {{ func.func @main(%x: tensor<4x2x{dtype}>, %i: tensor<7x1xi32>, %u: tensor<7x2x{dtype}>)
        -> tensor<4x2x{dtype}> {{
      %0 = "stablehlo.scatter"(%x, %i, %u) ({{ ^bb0(%a: tensor<{dtype}>, %b: tensor<{dtype}>): {body}
          stablehlo.return %o : tensor<{dtype}> }}) {AT_ROWS}
        : (tensor<4x2x{dtype}>, tensor<7x1xi32>, tensor<7x2x{dtype}>) -> tensor<4x2x{dtype}>
      return %0 : tensor<4x2x{dtype}> }} }}"""
    kind = {"ui32": np.uint32, "i8": np.int8, "i32": np.int32, "f32": np.float32}.get(dtype, np.complex64)
    x, updates = (DRAW.integers(0, 100, (rows, 2)).astype(kind) if kind not in (np.float32, np.complex64) else
                  DRAW.normal(size=(rows, 4)).astype("f4").view("c8") if kind is np.complex64 else
                  DRAW.normal(size=(rows, 2)).astype("f4") for rows in (4, 7))
    ways: dict[str, Any] = {"xor": np.bitwise_xor, "and": np.bitwise_and, "%a, %b : tensor<f32>": np.subtract,
                            "%b, %a": lambda a, b: b - a, "multiply %a, %b : tensor<c": np.multiply,
                            "%a, %a": lambda a, b: a * a + a, "%q": lambda a, b: a * b + a + b,
                            "2.5": lambda a, b: np.full_like(a, 2.5)}
    way = next(way for words, way in ways.items() if words in body)
    want = x.copy()
    for (place,), update in zip(PLACES, updates, strict=True):
        if 0 <= place < 4:
            want[place] = way(want[place], update)
    np.testing.assert_allclose(results(text, x, PLACES, updates)[0], want, rtol=1e-5, atol=1e-6)


def test_a_scatter_into_several_tensors() -> None:
    """The largest of each place, with what lies beside it."""
    kinds = "tensor<?x2xf32>, tensor<?x2xi32>"
    text = f"""module {{ func.func @main(%x: tensor<?x2xf32>, %y: tensor<?x2xi32>, %i: tensor<7x1xi32>,
        %u: tensor<7x2xf32>, %v: tensor<7x2xi32>) -> ({kinds}) {{
      %0:2 = "stablehlo.scatter"(%x, %y, %i, %u, %v) ({{
        ^bb0(%a: tensor<f32>, %j: tensor<i32>, %b: tensor<f32>, %k: tensor<i32>):
          %c = stablehlo.compare GT, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
          %o = stablehlo.select %c, %a, %b : tensor<i1>, tensor<f32>
          %p = stablehlo.select %c, %j, %k : tensor<i1>, tensor<i32>
          stablehlo.return %o, %p : tensor<f32>, tensor<i32> }}) {AT_ROWS}
        : ({kinds}, tensor<7x1xi32>, tensor<7x2xf32>, tensor<7x2xi32>) -> ({kinds})
      return %0#0, %0#1 : {kinds} }} }}"""
    x, updates = (DRAW.normal(size=(rows, 2)).astype("f4") for rows in (4, 7))
    y, beside = (np.arange(2 * rows, dtype=np.int32).reshape(rows, 2) + rows for rows in (4, 7))
    most, place = results(text, x, y, PLACES, updates, beside)
    for (at,), update, number in zip(PLACES, updates, beside, strict=True):
        if 0 <= at < 4:
            y[at], x[at] = np.where(update >= x[at], number, y[at]), np.maximum(x[at], update)
    np.testing.assert_array_equal(most, x)
    np.testing.assert_array_equal(place, y)


@pytest.mark.parametrize("dtype", ("i64", "ui64", "i1"))
def test_convolutions_of_wide_numbers_and_bools(dtype: str) -> None:
    kind = {"i64": np.int64, "ui64": np.uint64, "i1": np.bool_}[dtype]
    x, kernel = (DRAW.integers(-2**63, 2**63, shape) for shape in ((2, 2, 9), (3, 2, 4)))
    x, kernel = (one < -2**62 if dtype == "i1" else one.astype(kind) for one in (x, kernel))
    text = f"""module {{ func.func @main(%x: tensor<?x2x9x{dtype}>, %k: tensor<3x2x4x{dtype}>)
        -> tensor<?x3x6x{dtype}> {{
      %0 = stablehlo.convolution(%x, %k) dim_numbers = [b, f, 0]x[o, i, 0]->[b, f, 0], window = {{}}
        {{batch_group_count = 1 : i64, feature_group_count = 1 : i64}}
        : (tensor<?x2x9x{dtype}>, tensor<3x2x4x{dtype}>) -> tensor<?x3x6x{dtype}>
      return %0 : tensor<?x3x6x{dtype}> }} }}"""
    windows = np.lib.stride_tricks.sliding_window_view(x, 4, axis=2)
    want = np.einsum("bfnk,ofk->bon", *(one.astype(np.int64) for one in (windows, kernel))).astype(kind)
    np.testing.assert_array_equal(results(text, x, kernel)[0], want)


@pytest.mark.parametrize("generator", ("threefry2x32", "rbg"))
def test_an_exported_function_of_keys(generator: str) -> None:
    """Keys come in and go out as JAX has them."""
    def drawn(key: Any, x: Any) -> Any:
        first, second = jax.random.split(key)
        return jax.random.uniform(first, x.shape), second
    key = jax.random.key(3, impl=generator)
    size, = export.symbolic_shape("n")
    exported = export.export(jax.jit(drawn))(jax.ShapeDtypeStruct((), key.dtype),
                                             jax.ShapeDtypeStruct((size, 2), jnp.float32))
    fast = anyshape.compile_jax(exported)
    for rows in (4, 7):
        x = np.zeros((rows, 2), "f4")
        (found, after), (want, wanted) = fast(key, x), drawn(key, x)
        np.testing.assert_array_equal(found, want)
        assert after.dtype == wanted.dtype
        np.testing.assert_array_equal(jax.random.key_data(after), jax.random.key_data(wanted))
    with pytest.raises(InputError):
        fast(np.zeros(2, np.uint32), x)
