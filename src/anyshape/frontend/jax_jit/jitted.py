"""What `anyshape.jax.jit` returns: the function of JAX, with trees of arrays and static arguments."""
from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from anyshape.base.config import Config
from anyshape.base.errors import ConfigError, InputError
from anyshape.base.optional_packages import needed_by
from anyshape.frontend.diagnostics.explain import explain
from anyshape.frontend.diagnostics.explain_text import Explanation
from anyshape.frontend.diagnostics.memory import memory
from anyshape.frontend.diagnostics.memory_text import MemoryNote
from anyshape.frontend.jax_jit.flat_function import FlatFunction
from anyshape.frontend.programs.compile_program import check_stages, compile_program
from anyshape.frontend.programs.session import Compilation

with needed_by("anyshape.jax.jit"):
    import jax
    from jax import export, tree_util
    from jax.extend import source_info_util

source_info_util.register_exclusion(__file__)


# settings of JAX that decide what a trace gives
SETTINGS = ("jax_enable_x64", "jax_numpy_dtype_promotion", "jax_numpy_rank_promotion", "jax_default_matmul_precision",
            "jax_default_prng_impl", "jax_threefry_partitionable", "jax_random_seed_offset")


def _is_key(value: Any) -> bool:
    """Whether an array or its type holds keys of random numbers, which are no numbers to XLA and to us."""
    return bool(jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key))


@dataclass(slots=True, eq=False)
class _Kind:
    """What serves the calls of one kind: of nesting, dtypes, static arguments. keys: places of leaves that are keys of
    random numbers; the flat function takes their words. out: nesting of the results, and the generators of those that
    are keys, by place; known once the function has been traced."""

    flat: FlatFunction
    keys: tuple[int, ...]
    out: tuple[Any, dict[int, Any]] = (None, {})

    def tree(self, results: Sequence[Any]) -> Any:
        """The results as the function nests them."""
        nesting, keys = self.out
        if keys:
            results = [jax.random.wrap_key_data(one, impl=keys[n]) if n in keys else one
                       for n, one in enumerate(results)]
        return tree_util.tree_unflatten(nesting, results)


class JitFunction:
    """A function of JAX that is compiled once for all sizes; see `anyshape.jax.jit`.

    Raises (when called):
        InputError: a static argument cannot be hashed. IndexRangeError, DivisionError: found while it ran; inside of
            `jax.jit` XLA raises them with the same words. What the function itself raises when it is traced.
    """

    def __init__(self, function: Callable[..., Any], config: Config, static_argnums: Sequence[int],
                 static_argnames: Sequence[str], shapes: Any, constraints: Sequence[str]) -> None:
        if not config.limited:  # XLA brings results as memory: none is taken late
            config = config.replace(disable=",".join((*sorted(config.disabled()), "insert_alloc_free")))
        check_stages(config)
        functools.update_wrapper(self, function)
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)
        self.compilation = Compilation(config, compile_program)
        self.shapes, self.constraints = shapes, tuple(constraints)
        try:
            self.parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):  # of some callables of C nothing is known
            self.parameters = []
        positional = [one.name for one in self.parameters
                      if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
        count = len(positional)
        self.static = {n if n >= 0 else n + count for n in static_argnums} | {
            positional.index(name) for name in static_argnames if name in positional}
        self.static_names = set(static_argnames) | {positional[n] for n in self.static if n < count}
        self.positional = positional
        self.flat: dict[Any, _Kind] = {}
        self.lock = threading.Lock()

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        fixed = tuple((n, value) for n, value in enumerate(arguments) if n in self.static)
        named = tuple(sorted((name, value) for name, value in keywords.items() if name in self.static_names))
        free = tuple(value for n, value in enumerate(arguments) if n not in self.static)
        rest = {name: value for name, value in keywords.items() if name not in self.static_names}
        leaves, tree = tree_util.tree_flatten((free, rest))
        kinds = tuple((aval.dtype, len(aval.shape), aval.weak_type) for aval in map(jax.typeof, leaves))
        settings = tuple([getattr(jax.config, name, None) for name in SETTINGS])
        key = tuple((n, type(value), value) for n, value in (*fixed, *named)), tree, kinds, settings
        try:
            known = self.flat.get(key)
        except TypeError as error:
            raise InputError("a static argument cannot be hashed", where=f"a call of {self.name}", why=str(error),
                             do="pass a value that can be, such as a tuple in place of a list") from error
        if known is None:
            known = self._flat(key, dict(fixed), dict(named), (free, rest), leaves)
        if known.keys:
            leaves = list(leaves)
            for n in known.keys:
                leaves[n] = jax.random.key_data(leaves[n])
        results = known.flat(*leaves)
        return known.tree(results)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """A method's: with the object as its first argument, as `jax.jit` has it."""
        return self if instance is None else functools.partial(self, instance)

    def _flat(self, key: Any, fixed: dict[int, Any], named: dict[str, Any], given: tuple[Any, Any],
              leaves: Sequence[Any]) -> _Kind:
        tree = key[1]
        keys = {n: jax.random.key_impl(leaf) for n, leaf in enumerate(leaves) if _is_key(jax.typeof(leaf))}
        kind: _Kind

        def function(*leaves: Any) -> tuple[Any, ...]:
            whole = [jax.random.wrap_key_data(leaf, impl=keys[n]) if n in keys else leaf
                     for n, leaf in enumerate(leaves)]
            free, rest = tree_util.tree_unflatten(tree, whole)
            every = list(free)
            for place, value in sorted(fixed.items()):
                every.insert(place, value)
            found, out = tree_util.tree_flatten(self.function(*every, **rest, **named))
            results = [jax.numpy.asarray(one) for one in found]
            kind.out = out, {n: jax.random.key_impl(one) for n, one in enumerate(results) if _is_key(one)}
            return tuple(jax.random.key_data(one) if n in kind.out[1] else one for n, one in enumerate(results))

        with self.lock:
            known = self.flat.get(key)
            if known is None:
                specs = self._specs(given, leaves)
                flat = FlatFunction(function, self.name, self._labels(given), self.compilation, specs, tuple(keys),
                                    self.constraints)
                known = kind = self.flat[key] = _Kind(flat, tuple(keys))
            return known

    def _specs(self, given: tuple[Any, Any], leaves: Sequence[Any]) -> list[Any] | None:
        """The shapes that the user gave, for all arguments in a line."""
        if self.shapes is None:
            return None
        free, rest = given
        found = tree_util.tree_leaves(
            export.symbolic_args_specs((free, rest), (self.shapes, "..."), constraints=self.constraints))
        specs = []
        for spec, leaf in zip(found, leaves, strict=True):
            aval = jax.typeof(leaf)
            words = jax.typeof(jax.random.key_data(leaf)) if _is_key(aval) else aval
            specs.append(jax.ShapeDtypeStruct((*spec.shape, *words.shape[len(aval.shape):]), words.dtype,
                                              weak_type=aval.weak_type))
        return specs

    def _labels(self, given: tuple[Any, Any]) -> list[str]:
        """A name for each leaf, by the function's parameters."""
        free = [name for n, name in enumerate(self.positional) if n not in self.static]
        labels = []
        for path, _ in tree_util.tree_flatten_with_path(given)[0]:
            group, first, *others = path
            if group.idx == 0:
                word = free[first.idx] if first.idx < len(free) else f"x{first.idx}"
            else:
                word = first.key
            labels.append(word + tree_util.keystr(tuple(others)))
        return labels

    def explain(self, **sizes: Any) -> Explanation:
        """What was decided, and why; `sizes` by the names of programs' sizes: argument and dim, such as `x_0`."""
        return explain(self.name, self.compilation, sizes)

    def memory(self, **sizes: Any) -> MemoryNote:
        """What its programs need, as formulas; `.bytes` is the predicted peak at `sizes`."""
        return memory(self.compilation, sizes)


def jit_function(function: Any, static_argnums: int | Iterable[int] | None, static_argnames: str | Iterable[str] | None,
                 shapes: Any, constraints: Sequence[str], config: Config) -> JitFunction:
    """A function of JAX compiled for all sizes; arguments, result and errors are those of `anyshape.jax.jit`."""
    if not callable(function):
        raise ConfigError(f"anyshape.jax.jit was given a {type(function).__name__}", where="its first argument",
                          why="it takes a function of JAX", do="pass the function, not what it returns")
    if isinstance(function, JitFunction):
        function = function.function
    nums = () if static_argnums is None else (static_argnums,) if isinstance(static_argnums, int) else static_argnums
    names = () if static_argnames is None else (
        (static_argnames,) if isinstance(static_argnames, str) else static_argnames)
    return JitFunction(function, config, tuple(nums), tuple(names), shapes, constraints)
