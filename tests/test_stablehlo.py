"""The importers of StableHLO and of JAX's exported functions: one program for all sizes, with XLA's numbers."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax import export, lax
from jax import numpy as jnp

import anyshape
from anyshape.base.errors import InputError, Unsupported
from deploying import alone

DRAW = np.random.default_rng(0)
F32, I32 = jnp.float32, jnp.int32


def numbers(*shape: int) -> np.ndarray:
    return DRAW.normal(size=shape).astype(np.float32)


def specs(*kinds: tuple[str, Any]) -> list[Any]:
    """Shapes with symbolic sizes, of one scope."""
    scope = export.SymbolicScope()
    return [jax.ShapeDtypeStruct(export.symbolic_shape(shape, scope=scope), dtype) for shape, dtype in kinds]


def mlp(x: Any, w: Any) -> Any:
    return jax.nn.softmax(jax.nn.gelu(x @ w) @ w.T, -1)


def loss(w: Any, x: Any, y: Any) -> Any:
    return -(jax.nn.log_softmax(mlp(x, w))[jnp.arange(x.shape[0]), y]).mean()


def norm(x: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)


def scan(x: Any) -> Any:
    return lax.scan(lambda c, row: (jnp.tanh(c * 0.5 + row),) * 2, jnp.zeros(x.shape[1:]), x)


def pool(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")


def convolved(k: Any, x: Any) -> Any:
    return (lax.conv_general_dilated(x, k, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) ** 2).sum()


Case = tuple[Callable[..., Any], list[tuple[str, Any]], list[tuple[Any, ...]]]
CASES: dict[str, Case] = {
    "a network": (mlp, [("b, 8", F32), ("8, 16", F32)], [(numbers(b, 8), numbers(8, 16)) for b in (3, 1)]),
    "its gradient": (jax.grad(loss), [("8, 16", F32), ("b, 8", F32), ("b", I32)], [
        (numbers(8, 16), numbers(b, 8), np.arange(b, dtype=np.int32) % 8) for b in (3, 11)]),
    "attention": (lambda q, k: jax.nn.dot_product_attention(q, k, k, is_causal=True), [("b, t, 2, 4", F32)] * 2, [
        (numbers(2, 5, 2, 4),) * 2, (numbers(1, 1, 2, 4),) * 2]),
    "norms": (norm, [("b, n", F32)], [(numbers(2, 7),), (numbers(1, 3),)]),
    "a loop over time": (scan, [("t, b", F32)], [(numbers(5, 2),), (numbers(40, 3),)]),
    "a loop that data end": (lambda x, n: lax.fori_loop(0, n, lambda i, a: a * 1.1 + i, x), [("b", F32), ("", I32)], [
        (numbers(3), np.int32(4)), (numbers(2), np.int32(0))]),
    "a loop beside a function that is a composite": (
        lambda x, n: lax.fori_loop(0, n, lambda i, a: lax.erf(a) + i, lax.erf(x)), [("b", F32), ("", I32)], [
            (numbers(3), np.int32(4))]),
    "a branch": (lambda x: lax.cond(x.sum() > 0, lambda a: a * 2, lambda a: a - 1, x), [("b", F32)], [
        (numbers(3) + 9,), (numbers(4) - 9,)]),
    "a branch with a loop in it": (lambda x, n: lax.fori_loop(0, n, lambda i, a: lax.cond(
        i % 2 == 0, lambda a: lax.while_loop(lambda b: b.sum() < 50, lambda b: 2 * b + x, a), lambda a: a - 1, a), x), [
            ("b", F32), ("", I32)], [(abs(numbers(3)) + 1, np.int32(3)), (abs(numbers(5)) + 1, np.int32(0))]),
    "a branch of several with a loop": (lambda x, n: lax.switch(n, [jnp.sin, lambda a: lax.fori_loop(
        0, n + 1, lambda i, b: b + a, a), lambda a: a * x], x), [("b", F32), ("", I32)], [
            (numbers(3), np.int32(n)) for n in (-1, 0, 1, 2, 7)]),
    "rows of a table": (lambda t, i: t[i].sum(1), [("10, 4", F32), ("b, n", I32)], [
        (numbers(10, 4), DRAW.integers(-10, 10, (3, 6)).astype(np.int32))]),
    "gradient of a convolution": (jax.grad(convolved), [("3, 3, 3, 4", F32), ("b, 8, 9, 3", F32)], [
        (numbers(3, 3, 3, 4), numbers(2, 8, 9, 3))]),
    "pooling": (pool, [("b, h, w, 3", F32)], [(numbers(2, 9, 8, 3),), (numbers(1, 4, 4, 3),)]),
    "gradient of pooling": (jax.grad(lambda x: pool(x).sum()), [("b, 8, 6, 3", F32)], [(numbers(2, 8, 6, 3),)]),
    "sorted": (lambda x: (jnp.sort(x, -1), jnp.argsort(-x, -1), lax.top_k(x, 2)), [("b, 5", F32)], [
        (numbers(3, 5),), (numbers(1, 5),)]),
    "largest": (lambda x: (jnp.argmax(x, -1), jnp.argmin(x, 0), jnp.var(x, 0)), [("b, 6", F32)], [
        (numbers(3, 6),), (numbers(5, 6),)]),
    "scans": (lambda x: (jnp.cumsum(x, 0), jnp.cumprod(x, 1), lax.cummax(x, axis=0), lax.cumlogsumexp(
        jnp.where(x > 1, -jnp.inf, 99 * x), axis=0, reverse=True)), [("b, 6", F32)], [
            (numbers(3, 6),), (numbers(9, 6),)]),
    "half of it": (lambda x: (x[:x.shape[0] // 2] * 2, x.reshape(-1, 2).sum(1)), [("2*b", F32)], [
        (numbers(6),), (numbers(2),)]),
    "a window that begins behind its dim": (lambda x: x[2:, 300], [("b, b", F32)], [
        (numbers(9, 9),), (numbers(3, 3),)]),
    "random bits": (lambda k, x: jax.random.normal(k, (4, 5)) + x, [("2", jnp.uint32), ("4, 5", F32)], [
        (np.array([0, 7], np.uint32), numbers(4, 5))]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_function_of_jax(name: str) -> None:
    """One program for all sizes."""
    function, kinds, calls = CASES[name]
    fast = anyshape.compile_jax(export.export(jax.jit(function))(*specs(*kinds)))
    before = anyshape.stats()["programs"]
    for arguments in calls:
        wanted, found = jax.jit(function)(*arguments), fast(*arguments)
        assert jax.tree.structure(found) == jax.tree.structure(wanted)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            assert a.dtype == b.dtype and isinstance(a, np.ndarray)
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-4, atol=2e-5)
    assert anyshape.stats()["programs"] == before


def test_results_are_of_the_callers_kind() -> None:
    fast = anyshape.compile_jax(export.export(jax.jit(norm))(*specs(("b, n", F32))))
    x = numbers(3, 4)
    assert isinstance(fast(jnp.asarray(x)), jax.Array)
    assert isinstance(fast(x), np.ndarray)
    assert isinstance(fast(torch.from_numpy(x)), torch.Tensor)
    np.testing.assert_allclose(np.asarray(fast(jnp.asarray(x))), fast(x))


def module(body: str, signature: str = "(%a: tensor<?xui32>, %b: tensor<?xui32>) -> tensor<?xui32>") -> str:
    return f"module {{ func.func @main{signature} {{ {body} }} }}"


UNSIGNED: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "maximum": np.maximum, "minimum": np.minimum,
    "xor": np.bitwise_xor, "and": np.bitwise_and, "or": np.bitwise_or,
    "divide": lambda a, b: np.where(b == 0, np.iinfo(a.dtype).max, a // np.maximum(b, 1)),
    "remainder": lambda a, b: np.where(b == 0, a, a % np.maximum(b, 1)),
    "shift_left": lambda a, b: np.where(b < a.dtype.itemsize * 8, a << (b % (a.dtype.itemsize * 8)), 0),
    "shift_right_logical": lambda a, b: np.where(b < a.dtype.itemsize * 8, a >> (b % (a.dtype.itemsize * 8)), 0),
}


@pytest.mark.parametrize("bits", (8, 16, 32, 64))
def test_whole_numbers_without_sign(bits: int) -> None:
    """They wrap, are divided and shifted as such, at the ends of their range too."""
    dtype = np.dtype(f"uint{bits}")
    most = np.iinfo(dtype).max
    ends = np.array([0, 1, 2, 3, 7, bits - 1, bits, most // 2, most // 2 + 1, most - 1, most], dtype)
    a, b = (one.reshape(-1).copy() for one in np.meshgrid(ends, ends))
    kind = f"tensor<?xui{bits}>"
    names = list(UNSIGNED)
    body = "".join(f"%r{k} = stablehlo.{name} %a, %b : {kind} " for k, name in enumerate(names))
    results = ", ".join(f"%r{k}" for k in range(len(names)))
    kinds = ", ".join([kind] * len(names))
    run = anyshape.compile_stablehlo(module(f"{body} return {results} : {kinds}",
                                            f"(%a: {kind}, %b: {kind}) -> ({kinds})"))
    for name, found in zip(names, run(a, b), strict=True):
        np.testing.assert_array_equal(found, UNSIGNED[name](a, b).astype(dtype), err_msg=name)


def test_a_scatter_leaves_out_what_is_outside_and_a_gather_is_moved_inside() -> None:
    text = """module { func.func @main(%x: tensor<?x3xf32>, %i: tensor<?x1xi32>, %u: tensor<?x3xf32>)
        -> (tensor<?x3xf32>, tensor<?x3xf32>) {
      %s = "stablehlo.scatter"(%x, %i, %u) <{scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1],
          inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>}> ({
        ^bb0(%p: tensor<f32>, %q: tensor<f32>): %r = stablehlo.add %p, %q : tensor<f32>
          stablehlo.return %r : tensor<f32> }) : (tensor<?x3xf32>, tensor<?x1xi32>, tensor<?x3xf32>) -> tensor<?x3xf32>
      %g = "stablehlo.gather"(%x, %i) <{dimension_numbers = #stablehlo.gather<offset_dims = [1],
          collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, slice_sizes = array<i64: 1, 3>}>
          : (tensor<?x3xf32>, tensor<?x1xi32>) -> tensor<?x3xf32>
      return %s, %g : tensor<?x3xf32>, tensor<?x3xf32> } }"""
    run = anyshape.compile_stablehlo(text)
    for rows, places in ((4, [0, 3, 4, -1, 0]), (1, [0]), (2, [5, -7])):
        x, u = numbers(rows, 3), numbers(len(places), 3)
        wanted = x.copy()
        for place, row in zip(places, u, strict=True):
            if 0 <= place < rows:
                wanted[place] += row
        added, taken = run(x, np.array(places, np.int32)[:, None], u)
        np.testing.assert_allclose(added, wanted, rtol=1e-6)
        np.testing.assert_array_equal(taken, x[np.clip(places, 0, rows - 1)])


def test_what_a_module_says_of_its_sizes_is_asked() -> None:
    fast = anyshape.compile_jax(export.export(jax.jit(lambda a, b: a + b))(*specs(("n, 4", F32), ("n, 4", F32))))
    fast(numbers(3, 4), numbers(3, 4))
    for arguments, words in (((numbers(3, 4), numbers(2, 4)), "n"), ((numbers(3, 5), numbers(3, 4)), "takes 4"),
                             ((numbers(3, 4).astype(np.int32), numbers(3, 4)), "f32"), ((numbers(3, 4),), "nesting"),
                             ((numbers(0, 4), numbers(0, 4)), "n >= 1")):
        with pytest.raises(InputError) as found:
            fast(*arguments)
        assert words in str(found.value) and found.value.do


HOSTILE = {
    "bytes": b"\x00\xffML", "a cut artefact": b"ML\xefRStableHLO_v1.0.0\x00\x01", "text": "not a module",
    "brackets": "(" * 100_000, "no function": "module {}",
    "a call of itself": "module { func.func @main(%a: tensor<f32>) -> tensor<f32> { %0 = call @main(%a) "
                        ": (tensor<f32>) -> tensor<f32> return %0 : tensor<f32> } }",
    "a number": 7,
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_module_is_refused(name: str) -> None:
    with pytest.raises(InputError) as found:
        anyshape.compile_stablehlo(HOSTILE[name])
    assert found.value.what and found.value.why and found.value.do


def test_an_operation_that_is_not_carried_is_named() -> None:
    text = module("%r = stablehlo.custom_call @their_own(%a) : (tensor<?xui32>) -> tensor<?xui32> "
                  "return %r : tensor<?xui32>")
    with pytest.raises(Unsupported, match="their_own"):
        anyshape.compile_stablehlo(text)
    with pytest.raises(Unsupported, match="i4"):
        anyshape.compile_stablehlo(module("return %a : tensor<?xi4>", "(%a: tensor<?xi4>) -> tensor<?xi4>"))


def test_explain_and_memory() -> None:
    fast = anyshape.compile_jax(export.export(jax.jit(mlp))(*specs(("b, 8", F32), ("8, 16", F32))))
    fast(numbers(3, 8), numbers(8, 16))
    assert "program" in str(fast.explain()) and fast.memory(b=64).bytes > 0


def test_a_function_of_jax_is_saved_and_runs_where_there_is_only_numpy(tmp_path: Path) -> None:
    fast = anyshape.compile_jax(export.export(jax.jit(mlp))(*specs(("b, 8", F32), ("8, 16", F32))))
    path = anyshape.save(fast, tmp_path / "model.any")
    x, w = numbers(5, 8), numbers(8, 16)
    np.savez(tmp_path / "given.npz", x=x, w=w)
    alone("""
        import sys, numpy as np, anyshape
        given = np.load(sys.argv[2])
        np.save(sys.argv[3], anyshape.load(sys.argv[1], trust_native=True)(given["x"], given["w"]))
        """, path, tmp_path / "given.npz", tmp_path / "found.npy")
    np.testing.assert_allclose(np.load(tmp_path / "found.npy"), fast(x, w), rtol=1e-6)
    with pytest.raises(Unsupported, match="deployed"):
        anyshape.save(anyshape.compile_jax(export.export(jax.jit(scan))(*specs(("t, b", F32)))), tmp_path / "loop.any")


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_the_largest_go_by_the_total_order_of_floats(dtype: str) -> None:
    """XLA has -0 below 0 there and a negative NaN below -inf, and sorts without regard to either."""
    def largest(x: Any) -> Any:
        return lax.top_k(x, 5), jnp.sort(x, -1)

    fast = anyshape.compile_jax(export.export(jax.jit(largest))(*specs(("b, 8", jnp.dtype(dtype)))))
    x = np.array([[5, np.nan, np.inf, -np.nan, -np.inf, -3, -0.0, 0.0]]).astype(jnp.dtype(dtype))
    for found, wanted in zip(jax.tree.leaves(fast(x)), jax.tree.leaves(jax.jit(largest)(x)), strict=True):
        np.testing.assert_array_equal(*(np.asarray(one).view(np.uint8) for one in (found, wanted)))


def test_sizes_that_are_computed_before_a_loop_are_sizes_after_and_in_it() -> None:
    run = anyshape.compile_stablehlo("""
module {
  func.func @main(%x: tensor<?x4xf32>, %turns: tensor<i32>) -> tensor<?x4xf32> {
    %one = stablehlo.constant dense<1.0> : tensor<f32>
    %next = stablehlo.constant dense<1> : tensor<i32>
    %start = stablehlo.constant dense<0> : tensor<i32>
    %four = stablehlo.constant dense<4> : tensor<1xi32>
    %rows = stablehlo.get_dimension_size %x, dim = 0 : (tensor<?x4xf32>) -> tensor<i32>
    %row = stablehlo.reshape %rows : (tensor<i32>) -> tensor<1xi32>
    %shape = stablehlo.concatenate %row, %four, dim = 0 : (tensor<1xi32>, tensor<1xi32>) -> tensor<2xi32>
    %y:2 = stablehlo.while(%k = %start, %sum = %x) : tensor<i32>, tensor<?x4xf32>
      cond {
        %more = stablehlo.compare LT, %k, %turns : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %more : tensor<i1>
      } do {
        %inner = stablehlo.dynamic_broadcast_in_dim %one, %shape, dims = []
          : (tensor<f32>, tensor<2xi32>) -> tensor<?x4xf32>
        %k2 = stablehlo.add %k, %next : tensor<i32>
        %sum2 = stablehlo.add %sum, %inner : tensor<?x4xf32>
        stablehlo.return %k2, %sum2 : tensor<i32>, tensor<?x4xf32>
      }
    %ones = stablehlo.dynamic_broadcast_in_dim %one, %shape, dims = []
      : (tensor<f32>, tensor<2xi32>) -> tensor<?x4xf32>
    %z = stablehlo.add %y#1, %ones : tensor<?x4xf32>
    return %z : tensor<?x4xf32>
  }
}
""")
    for rows, turns in ((3, 2), (1, 0), (7, 40)):
        x = np.arange(4 * rows, dtype="f4").reshape(rows, 4)
        np.testing.assert_array_equal(run(x, np.int32(turns)), x + turns + 1)


def test_numbers_that_are_data_are_added_by_the_dialect_of_numbers() -> None:
    run = anyshape.compile_stablehlo("""
module {
  func.func @main(%x: tensor<4xi32>) -> tensor<4xi32> {
    %y = arith.addi %x, %x : tensor<4xi32>
    return %y : tensor<4xi32>
  }
}
""")
    np.testing.assert_array_equal(run(np.arange(4, dtype="i4")), 2 * np.arange(4))


def test_rows_of_many_tables_and_the_error_function_as_tensorflow_writes_them() -> None:
    run = anyshape.compile_stablehlo("""
module {
  func.func @main(%x: tensor<?x5xf32>, %at: tensor<?x2xi32>) -> (tensor<?x2xf32>, tensor<?x5xf32>) {
    %0 = "stablehlo.torch_index_select"(%x, %at) {dim = 1 : i64, batch_dims = 1 : i64}
      : (tensor<?x5xf32>, tensor<?x2xi32>) -> tensor<?x2xf32>
    %1 = stablehlo.custom_call @mhlo.erf(%x) {mhlo.attributes = {}, mhlo.version = 1 : i64}
      : (tensor<?x5xf32>) -> tensor<?x5xf32>
    return %0, %1 : tensor<?x2xf32>, tensor<?x5xf32>
  }
}""")
    for rows in (3, 1, 4):
        x = torch.randn(rows, 5)
        at = torch.randint(0, 5, (rows, 2), dtype=torch.int32)
        found, erf = run(x, at)
        torch.testing.assert_close(found, x.gather(1, at.long()))
        torch.testing.assert_close(erf, x.erf())
