"""What `anyshape.jax.jit` returns: the function of JAX, with trees of arrays and static arguments."""
from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
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
        self.flat: dict[Any, tuple[FlatFunction, list[Any]]] = {}
        self.lock = threading.Lock()

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        fixed = tuple((n, value) for n, value in enumerate(arguments) if n in self.static)
        named = tuple(sorted((name, value) for name, value in keywords.items() if name in self.static_names))
        free = tuple(value for n, value in enumerate(arguments) if n not in self.static)
        rest = {name: value for name, value in keywords.items() if name not in self.static_names}
        leaves, tree = tree_util.tree_flatten((free, rest))
        kinds = tuple((aval.dtype, len(aval.shape), aval.weak_type) for aval in map(jax.typeof, leaves))
        key = tuple((n, type(value), value) for n, value in (*fixed, *named)), tree, kinds
        try:
            known = self.flat.get(key)
        except TypeError as error:
            raise InputError("a static argument cannot be hashed", where=f"a call of {self.name}", why=str(error),
                             do="pass a value that can be, such as a tuple in place of a list") from error
        if known is None:
            known = self._flat(key, dict(fixed), dict(named), (free, rest), leaves)
        flat, trees = known
        results = flat(*leaves)
        return tree_util.tree_unflatten(trees[0], results)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """A method's: with the object as its first argument, as `jax.jit` has it."""
        return self if instance is None else functools.partial(self, instance)

    def _flat(self, key: Any, fixed: dict[int, Any], named: dict[str, Any], given: tuple[Any, Any],
              leaves: Sequence[Any]) -> tuple[FlatFunction, list[Any]]:
        tree = key[1]
        trees: list[Any] = []  # of the results, once it has been traced

        def function(*leaves: Any) -> tuple[Any, ...]:
            free, rest = tree_util.tree_unflatten(tree, leaves)
            every = list(free)
            for place, value in sorted(fixed.items()):
                every.insert(place, value)
            results, out = tree_util.tree_flatten(self.function(*every, **rest, **named))
            trees[:] = [out]
            return tuple(jax.numpy.asarray(one) for one in results)

        with self.lock:
            known = self.flat.get(key)
            if known is None:
                specs = self._specs(given, leaves)
                known = self.flat[key] = FlatFunction(function, self.name, self._labels(given), self.compilation,
                                                      specs), trees
            return known

    def _specs(self, given: tuple[Any, Any], leaves: Sequence[Any]) -> list[Any] | None:
        """The shapes that the user gave, for all arguments in a line."""
        if self.shapes is None:
            return None
        free, rest = given
        found = export.symbolic_args_specs((free, rest), (self.shapes, "..."), constraints=self.constraints)
        return [jax.ShapeDtypeStruct(spec.shape, aval.dtype, weak_type=aval.weak_type) for spec, aval in zip(
            tree_util.tree_leaves(found), map(jax.typeof, leaves), strict=True)]

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
    """See `anyshape.jax.jit`."""
    if not callable(function):
        raise ConfigError(f"anyshape.jax.jit was given a {type(function).__name__}", where="its first argument",
                          why="it takes a function of JAX", do="pass the function, not what it returns")
    if isinstance(function, JitFunction):
        function = function.function
    nums = () if static_argnums is None else (static_argnums,) if isinstance(static_argnums, int) else static_argnums
    names = () if static_argnames is None else (
        (static_argnames,) if isinstance(static_argnames, str) else static_argnames)
    return JitFunction(function, config, tuple(nums), tuple(names), shapes, constraints)
