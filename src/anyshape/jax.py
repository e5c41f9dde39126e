"""`anyshape.jax`: functions of JAX, compiled once for all sizes."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from anyshape.base.optional_packages import needed_by

if TYPE_CHECKING:
    from anyshape.frontend.jax_jit.jitted import JitFunction

__all__ = ["jit"]

_LEFT_OUT: Any = object()


def jit(function: Any = _LEFT_OUT, *, static_argnums: int | Iterable[int] | None = None,
        static_argnames: str | Iterable[str] | None = None, donate_argnums: int | Iterable[int] | None = None,
        donate_argnames: str | Iterable[str] | None = None, shapes: Any = None, constraints: Sequence[str] = (),
        **settings: Any) -> JitFunction | Any:
    """Compiles a function of JAX once for all sizes of its arguments.

        @anyshape.jax.jit
        def layer(params, x):
            return jax.nn.gelu(x @ params["w"])

    Every dim is symbolic; dims of one size in the first call are taken as one size until a call has them differ, and a
    dim of 0 or 1 as that number. A dim that JAX cannot leave open becomes a number, and `explain()` says why. What
    cannot be compiled runs as `jax.jit` would run it.

    It works inside of `jax.jit`, `jax.grad`, `jax.vmap`, where XLA calls the program by its FFI. Gradients are programs
    as well, which compute the forward again; there is no forward mode.

    Args:
        function: of arrays and trees of them; left out, the call returns a decorator.
        static_argnums, static_argnames: arguments that are values, as of `jax.jit`: each value has programs of its own.
        donate_argnums, donate_argnames: taken so that a call of `jax.jit` need not be changed; no argument is
            overwritten.
        shapes: which dims are symbolic, in the words of `jax.export.symbolic_args_specs`: a text such as "batch, 8" for
            each positional argument that is not static, or for each array in it; "..." or None for one that is fixed.
        constraints: of these sizes, such as "batch <= 512".
        settings: fields of `Config`; `strict`: nothing runs as JAX runs it.

    Returns:
        A function that takes arrays of JAX or numpy, and numbers, and gives arrays of JAX, with `explain()` and
        `memory()`. Compiling happens at the first call.

    Raises:
        ConfigError: an unknown setting, no function, or the extra `jax` is not installed.
    """
    from anyshape.base.config import Config
    config = Config.make(**settings)
    if function is _LEFT_OUT:
        return lambda given: jit(given, static_argnums=static_argnums, static_argnames=static_argnames, shapes=shapes,
                                 constraints=constraints, **settings)
    with needed_by("anyshape.jax.jit", "jax"):
        from anyshape.frontend.jax_jit.jitted import jit_function
    return jit_function(function, static_argnums, static_argnames, shapes, constraints, config)
