"""AnyShape: compile a PyTorch program once, run it at every shape, inside your memory."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anyshape.base.config import Config
    from anyshape.base.errors import AnyShapeError

__version__ = "0.1.0"
__all__ = ["AnyShapeError", "Config", "compile", "reset_stats", "stats"]


def compile(target: Any = None, **settings: Any) -> Any:
    """Compiles a module, a function or an exported program for all sizes of its inputs.

    Args:
        target: an `nn.Module` (the result shares its parameters and state), a function, or a
            `torch.export.ExportedProgram`. Left out, the call returns a decorator.
        settings: fields of `Config`.

    Returns:
        A callable used like `target`, with `explain()` and `memory()`. Compiling happens at the first call.

    Raises:
        ConfigError: an unknown setting, or a target of another kind.
    """
    from anyshape.base.config import Config
    config = Config.make(**settings)
    if target is None:
        return lambda function: compile(function, **settings)
    from anyshape.frontend import api
    return api.compile_target(target, config)


def stats(reset: bool = False) -> dict[str, int | float]:
    """Counts since the process began, or since the last reset.

    Args:
        reset: start over after reading.

    Returns:
        `programs` compiled, `kernels` in them, `runs` of programs, `plans` made for new shapes, `extern_calls` to
        PyTorch's operators, `compile_seconds`, `cache_hits` and `cache_misses` of the disk cache, `arena_bytes` held
        now and at most (`arena_peak_bytes`); and over all live compiled objects `compilations`, captured `graphs`, and
        `fallbacks`.
    """
    from anyshape.frontend import api
    return api.stats(reset)


def reset_stats() -> None:
    """Sets the counters of `stats` to 0; what is held now stays, and the peak starts from it."""
    from anyshape.base import events
    events.reset()


def __getattr__(name: str) -> Any:
    """The public classes, imported when first asked for, so that importing the package costs nothing."""
    if name == "Config":
        from anyshape.base.config import Config
        return Config
    if name == "AnyShapeError":
        from anyshape.base.errors import AnyShapeError
        return AnyShapeError
    raise AttributeError(f"module 'anyshape' has no attribute {name!r}")
