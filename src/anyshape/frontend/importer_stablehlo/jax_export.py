"""The front end of JAX: a function exported with symbolic sizes becomes one program for all of them.

    exported = jax.export.export(jax.jit(f))(jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, n"), jnp.float32))
    fast = anyshape.compile_jax(exported)
"""
from __future__ import annotations

from typing import Any

import numpy as np

from anyshape.artifact.deployable import Deployable
from anyshape.base.config import Config
from anyshape.base.errors import InputError, Unsupported
from anyshape.base.optional_packages import needed_by
from anyshape.frontend.diagnostics.explain_text import Explanation
from anyshape.frontend.diagnostics.memory_text import MemoryNote
from anyshape.frontend.importer_stablehlo.callable import StablehloCallable
from anyshape.frontend.importer_stablehlo.module import Module
from anyshape.frontend.importer_stablehlo.reader import read

with needed_by("anyshape.compile_jax"):
    from jax import Array, dtypes, export, numpy, random, tree_util


def module_of(exported: Any) -> Module:
    """The module of an exported function."""
    return read(exported.mlir_module_serialized)


def compile_exported(exported: Any, config: Config) -> JaxCallable:
    """Compiles what `jax.export.export` made; see `anyshape.compile_jax`."""
    if not isinstance(exported, export.Exported):
        raise InputError(f"anyshape.compile_jax was given a {type(exported).__name__}", where="its first argument",
                         why="it takes what jax.export.export(...)(...) returns",
                         do="export the function: jax.export.export(jax.jit(f))(*shapes)")
    if exported.nr_devices != 1:
        raise Unsupported(f"the function was exported for {exported.nr_devices} devices", where=exported.fun_name,
                          why="a program runs on one", do="export it for one")
    return JaxCallable(exported, StablehloCallable(module_of(exported), config))


def _is_key(value: Any) -> bool:
    """Whether an array or a type of one holds keys of random numbers."""
    return bool(dtypes.issubdtype(value.dtype, dtypes.prng_key))


def _as_jax(leaf: Any) -> Any:
    """An array of numpy in the dtype that JAX gives it: without `jax_enable_x64` none has 64 bits. Keys of random
    numbers as their words."""
    if isinstance(leaf, Array) and _is_key(leaf):
        return random.key_data(leaf)
    if not isinstance(leaf, (np.ndarray, np.generic)):
        return leaf
    dtype = dtypes.canonicalize_dtype(leaf.dtype) if leaf.dtype.kind in "iufc" else leaf.dtype
    return leaf if dtype == leaf.dtype else leaf.astype(dtype)


class JaxCallable:
    """A compiled function of JAX, called as the function is: with trees of arrays, of JAX or numpy.

    Raises (when called):
        InputError: other trees, dtypes, ranks or sizes than those that it was exported for; nothing has run then.
    """

    def __init__(self, exported: Any, program: StablehloCallable) -> None:
        self.exported = exported
        self.program = program

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        leaves, tree = tree_util.tree_flatten((arguments, keywords))
        if tree != self.exported.in_tree:
            raise InputError("the arguments do not have the nesting that was exported", where=self.exported.fun_name,
                             why=f"expected {self.exported.in_tree}, got {tree}",
                             do="pass the same number of arguments, lists and dicts as at export")
        for leaf, kind in zip(leaves, self.exported.in_avals, strict=True):
            if _is_key(kind) and getattr(leaf, "dtype", None) != kind.dtype:
                raise InputError(f"an argument is {getattr(leaf, 'dtype', type(leaf).__name__)}",
                                 where=self.exported.fun_name, why=f"it was exported for {kind.dtype}",
                                 do="pass keys of that generator (jax.random.key)")
        found = self.program(*(_as_jax(leaves[place]) for place in self.exported.module_kept_var_idx))
        results = found if len(self.program.results) != 1 else (found,)
        results = [random.wrap_key_data(one, impl=random.key_impl(numpy.empty((), kind.dtype)))
                   if _is_key(kind) else one for one, kind in zip(results, self.exported.out_avals, strict=True)]
        return tree_util.tree_unflatten(self.exported.out_tree, results)

    def deployable(self) -> Deployable:
        """What a file holds of it (`anyshape.save`): it takes the leaves of the function's arguments in order, but for
        those that are not used, and gives the leaves of its results. Errors as of `StablehloCallable`."""
        return self.program.deployable()

    def explain(self, **sizes: Any) -> Explanation:
        """What was decided, and why; `sizes` by the names given at export."""
        return self.program.explain(**sizes)

    def memory(self, **sizes: Any) -> MemoryNote:
        """What the program needs, as formulas; `.bytes` is the predicted peak at `sizes`."""
        return self.program.memory(**sizes)
