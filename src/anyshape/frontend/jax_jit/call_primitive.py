"""A call of a program as one operation of JAX: XLA's call of our handler, which `jax.vmap` takes as a call of the
function over one dim more.

An operation of its own is traced once and lowered to one line; `jax.custom_batching` would trace and lower a function
around it at every new shape.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anyshape.base.optional_packages import needed_by
from anyshape.frontend.jax_jit.ffi_handler import TARGET

with needed_by("anyshape.jax.jit"):
    import jax
    from jax import numpy as jnp
    from jax.extend.core import Primitive
    from jax.interpreters import batching, mlir


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)  # JAX's caches refer to it weakly
class ProgramCall:
    """What is called. number: the digest of the program. kept: places of the arguments that it takes. results: their
    shapes and dtypes. run: the call with arrays. batched: the call over one dim more: which arguments have it, as their
    first, and the arguments -> results, all with it."""

    number: int
    kept: tuple[int, ...]
    results: tuple[Any, ...]
    run: Callable[..., Sequence[Any]] = field(repr=False)
    batched: Callable[[tuple[bool, ...], Sequence[Any]], Sequence[Any]] = field(repr=False)

    def __call__(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """The results in a trace."""
        return tuple(_program_call.bind(*leaves, call=self))


def equally_varying(leaves: Sequence[Any]) -> Sequence[Any]:
    """The arguments of a call as values that vary over the same axes of a mesh, as `jax.shard_map` tells them:
    gradients of those that did not are sums over it then."""
    kinds = [getattr(jax.typeof(leaf), "manual_axis_type", None) for leaf in leaves]
    varying: list[frozenset[str]] = [getattr(kind, "varying", frozenset()) for kind in kinds]
    axes = frozenset().union(*varying)
    if not axes:
        return leaves
    return [jax.lax.pcast(leaf, tuple(sorted(axes - have)), to="varying")
            for leaf, have in zip(leaves, varying, strict=True)]


def _types(*avals: Any, call: ProgramCall) -> list[Any]:
    """Of the results: whole on each device, and varying as the arguments do."""
    types = [jax.core.ShapedArray(one.shape, one.dtype) for one in call.results]
    if not avals or avals[0].sharding.mesh.empty:
        return types
    first = avals[0]
    return [first.update(shape=one.shape, dtype=one.dtype, weak_type=False,
                         sharding=first.sharding.update(spec=(None,) * len(one.shape))) for one in types]


def _batch(leaves: Sequence[Any], dims: Sequence[int | None], *, call: ProgramCall) -> Any:
    leaves = [leaf if dim is None else jnp.moveaxis(leaf, dim, 0) for leaf, dim in zip(leaves, dims, strict=True)]
    results = call.batched(tuple(dim is not None for dim in dims), leaves)
    return results, (0,) * len(results)


def _lower(context: Any, *operands: Any, call: ProgramCall) -> Any:
    context = context.replace(avals_in=[context.avals_in[k] for k in call.kept])
    return jax.ffi.ffi_lowering(TARGET)(context, *(operands[k] for k in call.kept), program=np.int64(call.number))


_program_call = Primitive(TARGET)
_program_call.multiple_results = True
_program_call.def_impl(lambda *leaves, call: call.run(*leaves))
_program_call.def_abstract_eval(_types)
batching.primitive_batchers[_program_call] = _batch
mlir.register_lowering(_program_call, _lower)
