"""`anyshape.jax.jit`: a function of JAX as one program for all sizes, alone and inside of JAX's transforms."""
from __future__ import annotations

import threading
from typing import Any

import jax
import numpy as np
import pytest
from jax import export, lax
from jax import numpy as jnp

import anyshape
from anyshape.base.errors import ConfigError, InputError, Unsupported
from anyshape.frontend.jax_jit import ffi_handler, flat_function

DRAW = np.random.default_rng(0)
W = {"w": DRAW.normal(size=(6, 4)).astype(np.float32)}


def layer(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["w"]), x.sum()


def loss(params: Any, x: Any) -> Any:
    return (layer(params, x)[0] ** 2).mean()


@pytest.fixture(scope="module")
def fast() -> Any:
    return anyshape.jax.jit(layer, strict=True)


def numbers(*shape: int) -> np.ndarray:
    return DRAW.normal(size=shape).astype(np.float32)


def same(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert isinstance(a, jax.Array) and a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def grown(before: dict[str, Any], name: str) -> Any:
    return anyshape.stats()[name] - before[name]


def test_one_program_for_all_sizes(fast: Any) -> None:
    before = anyshape.stats()
    for shape in ((3, 5, 6), (1, 1, 6), (6, 6, 6), (2, 31, 6)):
        x = numbers(*shape)
        for given in (x, jnp.asarray(x)):
            same(fast(W, given), layer(W, given))
    assert grown(before, "programs") == 1 and grown(before, "eager_calls") == 0
    assert "x_0 (dim 0 of argument 1)" in str(fast.explain()) and "\n" in str(fast.memory())


def test_inside_of_transforms(fast: Any) -> None:
    """Each is one program, of all sizes."""
    x, xs = numbers(3, 5, 6), numbers(4, 3, 5, 6)

    def ours(params: Any, x: Any) -> Any:
        return (fast(params, x)[0] ** 2).mean()

    for wrap in (lambda f: f, jax.jit):
        same(wrap(lambda x: fast(W, x * 2)[0] + 1)(x), layer(W, x * 2)[0] + 1)
        same(wrap(jax.grad(ours))(W, x), jax.grad(loss)(W, x))
        same(wrap(jax.vmap(fast, (None, 0)))(W, xs), jax.vmap(layer, (None, 0))(W, xs))
    before = anyshape.stats()
    same(jax.jit(jax.grad(ours))(W, x[:, :2]), jax.grad(loss)(W, x[:, :2]))
    same(jax.jit(lambda xs: lax.map(lambda x: fast(W, x)[0], xs))(xs), layer(W, xs)[0])
    assert grown(before, "programs") == 0
    same(jax.jit(jax.vmap(jax.grad(ours), (None, 0)))(W, xs), jax.vmap(jax.grad(loss), (None, 0))(W, xs))


def test_a_new_shape_in_a_trace_is_one_operation_whose_results_are_known(
        fast: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sizes are formulas of the arguments': JAX traces nothing of the program again."""
    told = anyshape.jax.jit(lambda x: jnp.concatenate([x, x[1:]]).T, shapes=("n, m",), constraints=("m <= 40",))
    told(numbers(3, 2))
    fast(W, numbers(3, 5, 6))
    monkeypatch.setattr(jax, "eval_shape", lambda *_: pytest.fail("traced again"))
    for n in (4, 23, 1):
        text = str(jax.make_jaxpr(lambda x: fast(W, x))(numbers(n, 7, 6)))
        assert text.count("anyshape_program") == 1 and "custom_vmap" not in text and f"f32[{n},7,4]" in text
    for n, m in ((5, 2), (1, 40), (9, 7)):
        assert jax.make_jaxpr(told)(numbers(n, m)).out_avals[0].shape == (m, 2 * n - 1)
    with pytest.raises(pytest.fail.Exception, match="traced again"):  # JAX says what is wrong
        jax.make_jaxpr(told)(numbers(5, 41))


@pytest.mark.parametrize("checked", [True, False])
def test_gradients_over_a_mesh(fast: Any, checked: bool) -> None:
    """Those of what all devices share are sums over them, as of any operation of JAX."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("i",))
    rows = jax.sharding.PartitionSpec("i")

    def ours(call: Any) -> Any:
        inner = jax.shard_map(lambda w, x: call({"w": w}, x)[0], mesh=mesh, check_vma=checked, out_specs=rows,
                              in_specs=(jax.sharding.PartitionSpec(), rows))
        return jax.jit(jax.grad(lambda w, x: (inner(w, x) ** 2).sum(), (0, 1)))
    x = numbers(3, 5, 6)
    same(ours(fast)(W["w"], x), ours(layer)(W["w"], x))


def test_an_export_with_symbolic_sizes_calls_the_program(fast: Any) -> None:
    """Sizes are read at run time."""
    shape = export.symbolic_shape("b, t, 6")
    whole = export.export(jax.jit(lambda x: fast(W, x)[0] + 1), disabled_checks=[
        export.DisabledSafetyCheck.custom_call(ffi_handler.TARGET)])(jax.ShapeDtypeStruct(shape, jnp.float32))
    for sizes in ((3, 5, 6), (2, 1, 6)):
        x = numbers(*sizes)
        same(jax.jit(whole.call)(x), layer(W, x)[0] + 1)


def test_sizes_that_were_equal_are_told_apart_once_they_differ() -> None:
    fast = anyshape.jax.jit(lambda a, b: a @ b, strict=True)
    before = anyshape.stats()
    for m, k, n in ((4, 4, 4), (3, 4, 5), (4, 4, 4), (7, 2, 9), (5, 5, 5)):
        a, b = numbers(m, k), numbers(k, n)
        same(fast(a, b), jnp.asarray(a @ b))
    assert grown(before, "programs") == 2
    assert fast(numbers(0, 4), numbers(4, 5)).shape == (0, 5)


def test_a_size_that_jax_refuses_is_a_number() -> None:
    fast = anyshape.jax.jit(lambda x: x.reshape(x.shape[0], 2, -1).sum(1), strict=True)
    before = anyshape.stats()
    for rows in (3, 5, 2):
        x = numbers(rows, 6)
        same(fast(x), jnp.asarray(x.reshape(rows, 2, 3).sum(1)))
    assert grown(before, "programs") == 1
    assert "the size x_1 is the number 6" in str(fast.explain())


def test_how_sizes_compare_is_what_a_program_is_for() -> None:
    def f(cache: Any, new: Any, at: Any) -> Any:
        cache = jax.lax.dynamic_update_slice(cache, new, (at, 0))
        return cache, jax.lax.top_k(cache, 2)

    fast = anyshape.jax.jit(f, strict=True)
    before = anyshape.stats()
    for sizes, at in (((9, 3, 5), 2), ((4, 4, 2), 0), ((7, 1, 11), 6)):
        cache, new = numbers(sizes[0], sizes[2]), numbers(sizes[1], sizes[2])
        found, wanted = (jax.tree.leaves(one(cache, new, at)) for one in (fast, f))
        for a, b in zip(found, wanted, strict=True):
            same(a, b)
    assert grown(before, "programs") == 1
    either = anyshape.jax.jit(lambda x: x[:2] if x.shape[0] > 2 else x * 2, strict=True)
    for rows in (5, 3, 2, 1, 7):
        x = numbers(rows, 3)
        same(either(x), x[:2] if rows > 2 else x * 2)
    assert grown(before, "programs") == 3
    cut = anyshape.jax.jit(lambda table, x: x + table[:x.shape[0]], strict=True)
    for rows in (3, 8, 1):  # JAX takes the smaller of 8 rows and those of x
        table, x = numbers(8, 5), numbers(rows, 5)
        same(cut(table, x), x + table[:rows])
    assert grown(before, "programs") == 4
    with pytest.raises(TypeError):  # of JAX: there are fewer rows than are written
        fast(numbers(3, 5), numbers(4, 5), 0)


def halves(x: Any) -> Any:
    return x.reshape(x.shape[0], x.shape[1] // 4, 4).sum(1) if x.shape[1] % 4 == 0 else x * 2


ASKED = {
    "a remainder": (halves, [(2, 8), (2, 7), (2, 12), (2, 9), (2, 4)], 2),
    "dims that are equal": (lambda x: x * 2 if x.shape[0] == x.shape[1] else x, [(3, 5), (4, 4), (1, 3), (7, 7)], 3),
    "a number": (lambda x: x[:4] if x.shape[0] in (8, 9) else x + 1, [(5, 3), (8, 3), (7, 3), (8, 2)], 2),
    "another shape": (lambda x: x if x.shape != (2, 3) else x * 2, [(2, 3), (4, 3), (2, 5)], 3),
    "whether it is odd": (lambda x: x[1:] if x.shape[0] % 2 else x, [(6, 3), (5, 3), (8, 3), (7, 3)], 2),
}


@pytest.mark.parametrize("said", [False, True])
@pytest.mark.parametrize("name", ASKED)
def test_what_a_function_asks_of_sizes_is_what_a_program_is_for(name: str, said: bool) -> None:
    """JAX says that sizes differ where it cannot tell."""
    function, shapes, most = ASKED[name]
    fast = anyshape.jax.jit(function, strict=True, shapes=("a, b",) if said else None)
    before = anyshape.stats()
    for shape in shapes:
        x = numbers(*shape)
        same(fast(x), jax.jit(function)(x))
        same(jax.jit(lambda x: fast(x))(x), jax.jit(function)(x))
    assert grown(before, "programs") <= most


@pytest.mark.parametrize("function, rows", [
    (lambda x: x.reshape(-1, 4).sum(1), (8, 12, 4, 36)),
    (lambda x: jnp.pad(x, (0, -x.shape[0] % 4)).reshape(-1, 4).sum(1), (6, 5, 8, 1)),
    (lambda x: x.reshape(x.shape[0] // 4, 4, -1).sum(1), (8, 12, 4, 36)),
    (lambda x: (sum(jnp.split(x, 4)), jax.nn.glu(x)), (8, 12, 4, 36))])  # JAX asks itself, and raises errors of its own
def test_a_size_that_has_to_divide_is_left_open(function: Any, rows: tuple[int, ...]) -> None:
    """The program is for sizes that do; others raise as JAX does."""
    fast = anyshape.jax.jit(function, strict=True)
    before = anyshape.stats()
    for n in rows:
        x = numbers(n)
        same(fast(x), jax.jit(function)(x))
        same(jax.jit(lambda x: fast(x))(x), jax.jit(function)(x))
    assert grown(before, "programs") == 1
    with pytest.raises(TypeError, match="reshape"):
        anyshape.jax.jit(lambda x: x.reshape(-1, 4))(numbers(7))


def test_comparisons_that_leave_one_size_make_it_a_number() -> None:
    """jnp.linspace asks whether it is above 1, then whether it is 1, then takes it for 0."""
    fast = anyshape.jax.jit(lambda x: jnp.linspace(0, 1, x.shape[0]) + x, strict=True)
    before = anyshape.stats()
    for rows in (3, 1, 7, 1, 2):
        x = numbers(rows)
        same(fast(x), jnp.linspace(0, 1, rows) + x)
    assert grown(before, "programs") == 2


def test_what_is_asked_of_a_size_that_was_guessed_to_be_a_number_does_not_keep_it_one() -> None:
    """The first call has one size by chance, and the error does not name the dim that it is about."""
    def step(params: Any, cache: Any, x: Any) -> Any:
        heads = np.ones(params["w"].shape[0], np.float32)  # has to be a number
        if cache["k"].shape[0] != x.shape[0]:
            raise ValueError("another batch")
        return cache["k"] + x[:, None] * heads[0] + params["w"].sum()

    fast = anyshape.jax.jit(step, strict=True)
    before = anyshape.stats()
    w = {"w": numbers(2, 3)}
    for batch, length in ((2, 8), (3, 9), (5, 7), (4, 13), (7, 2)):
        cache, x = {"k": numbers(batch, length)}, numbers(batch)
        same(fast(w, cache, x), step(w, cache, x))
    assert grown(before, "programs") == 2


def test_nearly_largest_elements_are_the_largest() -> None:
    fast = anyshape.jax.jit(lambda x: (jax.lax.approx_max_k(x, 2), jax.lax.approx_min_k(x, 1, reduction_dimension=0)),
                            strict=True)
    before = anyshape.stats()
    for rows, width in ((3, 5), (1, 2), (4, 31)):
        x = numbers(rows, width)
        for found, wanted in zip(jax.tree.leaves(fast(x)), (*jax.lax.top_k(x, 2), x.min(0, keepdims=True),
                                                            x.argmin(0, keepdims=True)), strict=True):
            np.testing.assert_array_equal(found, wanted)
    assert grown(before, "programs") == 1


def test_what_is_equal_by_chance_does_not_become_a_number() -> None:
    def f(params: Any, key: Any, x: Any, y: Any) -> Any:
        if params["w"].shape[0] != 2 or not isinstance(params["w"].shape[0], int):
            raise ValueError(f"weights are (2, 4), not {params['w'].shape}")
        return x @ params["w"] + y + jax.random.uniform(key, x.shape).sum()

    fast = anyshape.jax.jit(f, strict=True)
    before = anyshape.stats()
    params = {"w": numbers(2, 4), "b": numbers(2)}
    for rows in (2, 5, 1):
        given = params, jax.random.key(rows), numbers(rows, 2), numbers(rows, 1)
        same(fast(*given), f(*given))
    assert grown(before, "programs") <= 2
    attention = anyshape.jax.jit(lambda x: jax.nn.dot_product_attention(x, x, x, is_causal=True), strict=True)
    before = anyshape.stats()
    for batch, time in ((3, 5), (2, 7), (1, 1)):
        x = numbers(batch, time, 3, 4)
        same(attention(x), jax.nn.dot_product_attention(x, x, x, is_causal=True))
    assert grown(before, "programs") <= 2
    assert [one.reason.split(":")[0] for one in attention.explain().fallbacks] == ["the size x_3 is the number 4"]


def test_the_user_says_which_dims_are_symbolic() -> None:
    fast = anyshape.jax.jit(lambda x, y: x + y, shapes=("n, _", None), constraints=("n <= 8",), strict=True)
    y = numbers(3)
    for n in (2, 8):
        same(fast(numbers(n, 3) * 0, y), jnp.zeros((n, 3)) + y)
    for call in (fast, jax.jit(lambda x, y: fast(x, y))):
        with pytest.raises((InputError, ValueError, jax.errors.JaxRuntimeError), match="n"):
            jax.block_until_ready(call(numbers(9, 3), y))
    assert anyshape.jax.jit(lambda: jnp.ones(2))().shape == (2,)


def test_static_arguments_numbers_and_keywords() -> None:
    @anyshape.jax.jit(static_argnames="kind", strict=True)
    def f(x: Any, scale: Any = 1.0, *, kind: str = "sum") -> Any:
        return {"all": getattr(jnp, kind)(x, 0) * scale, "none": None}

    for x in (numbers(3, 4), numbers(5, 4).astype(np.float64), np.arange(8).reshape(2, 4)):
        for kind, scale in (("sum", 2), ("max", 0.5)):
            wanted = {"all": getattr(jnp, kind)(jnp.asarray(x), 0) * scale, "none": None}
            same(f(x, scale, kind=kind), wanted)
    with pytest.raises(InputError, match="cannot be hashed"):
        f(numbers(2, 2), kind=["sum"])
    with pytest.raises(ConfigError, match="given a int"):
        anyshape.jax.jit(3)


def test_keys_of_random_numbers_are_arguments_and_results() -> None:
    """Typed keys, alone, in a trace, in `jax.vmap` and beside what is differentiated."""
    def drawn(key: Any, x: Any) -> Any:
        return jax.random.fold_in(key, 3), (x * jax.random.uniform(key, x.shape)).sum()

    fast = anyshape.jax.jit(drawn, strict=True)
    keys, x = jax.random.split(jax.random.key(1), 2), numbers(5)
    for call in (fast, jax.jit(lambda key, x: fast(key, x))):
        (key, found), (wanted_key, wanted) = call(keys[0], x), drawn(keys[0], x)
        assert key.dtype == wanted_key.dtype
        same((jax.random.key_data(key), found), (jax.random.key_data(wanted_key), wanted))
    same(jax.vmap(fast, (0, None))(keys, x)[1], jax.vmap(drawn, (0, None))(keys, x)[1])
    same(jax.grad(lambda x: fast(keys[0], x)[1])(x), jax.grad(lambda x: drawn(keys[0], x)[1])(x))
    shaped = anyshape.jax.jit(drawn, shapes=(None, "7"), strict=True)
    same(shaped(keys[0], numbers(7) * 0)[1], jnp.zeros(()))


def test_settings_of_jax_that_decide_dtypes_have_programs_of_their_own() -> None:
    fast = anyshape.jax.jit(lambda x: x * jnp.arange(3) + jnp.ones(3), strict=True, donate_argnums=0)
    x = numbers(3)
    wanted = x * np.arange(3, dtype=np.float32) + 1
    for wide in (False, True, False):
        with jax.enable_x64(wide):
            found = fast(x)
            assert found.dtype == (np.float64 if wide else np.float32)
            np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_what_cannot_be_compiled_runs_as_jax_runs_it() -> None:
    def printed(x: Any) -> Any:
        return jax.pure_callback(lambda a: np.asarray(a) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    fast = anyshape.jax.jit(printed)
    before = anyshape.stats()
    x = numbers(3)
    same(fast(x), jnp.asarray(x * 2))
    same(jax.jit(lambda x: fast(x) + 1)(x), jnp.asarray(x * 2 + 1))
    assert grown(before, "eager_calls") == 2 and grown(before, "programs") == 0
    assert "callback" in str(fast.explain())
    with pytest.raises(Unsupported, match="printed cannot be compiled"):
        anyshape.jax.jit(printed, strict=True)(x)
    with pytest.raises(TypeError, match="incompatible shapes"):
        anyshape.jax.jit(lambda a, b: a + b)(numbers(3), numbers(4))


def test_numbers_that_are_taken_for_sizes_may_be_negative() -> None:
    fast = anyshape.jax.jit(lambda x, k: jnp.roll(x, k))
    before = anyshape.stats()
    x = numbers(7)
    for k in (2, 0, -1, 9):
        same(fast(x, k), jnp.roll(jnp.asarray(x), k))
    assert grown(before, "eager_calls") == 1 and "takes for a size" in str(fast.explain())
    same(jax.jit(lambda x, k: fast(x, k))(x, -3), jnp.roll(jnp.asarray(x), -3))
    strict = anyshape.jax.jit(lambda x, k: jnp.roll(x, k), strict=True)
    same(strict(x, 3), jnp.roll(jnp.asarray(x), 3))
    with pytest.raises(Unsupported, match="negative"):
        strict(x, -3)


def test_other_dtypes_and_loops_run_inside_of_xla() -> None:
    """Some of their steps are no native code, or their values are held in other dtypes: these run on copies."""
    def f(key: Any, x: Any, n: Any) -> Any:
        bits = jax.random.bits(key, (3,), jnp.uint32)
        turned = lax.fori_loop(0, n, lambda i, a: a * 1.5, x)
        return bits, turned.astype(jnp.bfloat16), x > 0, x

    key, x = np.array([0, 7], np.uint32), numbers(5)
    fast = anyshape.jax.jit(f, strict=True)
    for n in (2, 0):
        for call in (fast, jax.jit(lambda *given: fast(*given))):
            same(call(key, x, n), f(key, jnp.asarray(x), n))


def test_errors_come_through_xla_with_our_words() -> None:
    fast = anyshape.jax.jit(lambda x: x * 2, strict=True)
    called = jax.jit(lambda x: jax.ffi.ffi_call(ffi_handler.TARGET, jax.ShapeDtypeStruct(x.shape, x.dtype))(
        x, program=np.int64(12345)))
    assert jax.jit(lambda x: fast(x))(numbers(2)).shape == (2,)  # makes the handler
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT: XLA calls a program that this process"):
        called(numbers(3)).block_until_ready()


def test_a_program_is_called_from_threads_and_outlives_its_function() -> None:
    def inner(x: Any) -> Any:
        return jnp.cumsum(x * 2, 0)

    whole = jax.jit(lambda x: anyshape.jax.jit(inner, strict=True)(x) + 1)
    inputs = [numbers(n, 4) for n in (2, 3, 2, 5)]
    wrong: list[int] = []

    def work(x: np.ndarray) -> None:
        for _ in range(20):
            if not np.allclose(whole(x), np.cumsum(x * 2, 0) + 1, rtol=1e-4, atol=1e-5):
                wrong.append(len(x))

    threads = [threading.Thread(target=work, args=(x,)) for x in inputs]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong


def test_compiled_functions_within_one_are_a_part_of_it(fast: Any) -> None:
    outer = anyshape.jax.jit(lambda x: fast(W, x)[0] * 3, strict=True)
    before = anyshape.stats()
    x = numbers(3, 5, 6)
    same(outer(x), layer(W, x)[0] * 3)
    assert grown(before, "programs") == 1


def test_arrays_on_several_devices(fast: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results lie where the arguments were put; where that is several places, JAX runs the call."""
    x, (device,) = jnp.asarray(numbers(3, 6)), jax.devices()[:1]
    monkeypatch.setattr(flat_function, "_several_devices", lambda: True)
    assert flat_function._devices([x, W["w"]]) == set()
    assert flat_function._devices([x, jax.device_put(x, device)]) == {device}
    same(fast(W, jax.device_put(x, device)), layer(W, x))
    monkeypatch.setattr(flat_function, "_devices", lambda leaves: {0, 1})
    with pytest.raises(Unsupported, match="several devices"):
        fast(W, x)
    before = anyshape.stats()
    same(anyshape.jax.jit(layer)(W, x), layer(W, x))
    assert grown(before, "eager_calls") == 1


def test_what_jax_has_and_this_has_not(fast: Any) -> None:
    x = numbers(3, 5, 6)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: fast(W, x)[0], (x,), (x,))
