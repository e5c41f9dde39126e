"""AnyShape: compile a PyTorch program once, run it at every shape, inside your memory."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anyshape.artifact.load import LoadedModel
    from anyshape.base.config import Config
    from anyshape.base.errors import AnyShapeError
    from anyshape.frontend.train_step_api import TrainStep

__version__ = "0.1.0"
__all__ = ["AnyShapeError", "Config", "compile", "load", "release", "reset_stats", "save", "stats", "train_step"]


_LEFT_OUT: Any = object()


def compile(target: Any = _LEFT_OUT, *others: Any, **settings: Any) -> Any:
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
    if others:
        from anyshape.base.errors import ConfigError
        raise ConfigError(f"anyshape.compile was given {others[0]!r} after what it is to compile",
                          why="settings are passed by name", do="write anyshape.compile(target, name=value)")
    config = Config.make(**settings)
    if target is _LEFT_OUT:
        return lambda function: compile(function, **settings)
    from anyshape.frontend import api
    return api.compile_target(target, config)


def train_step(model: Any, loss_fn: Any, optimizer: Any, *, clip_norm: float | None = None, accumulate: int = 1,
               scaler: Any = None, ema: float | None = None, gradient_dtype: Any = None,
               **settings: Any) -> TrainStep:
    """Compiles a whole train step: loss, gradients and the optimiser's update as one program for all sizes.

        step = anyshape.train_step(model, loss_fn, torch.optim.AdamW(model.parameters(), lr=3e-4), clip_norm=1.0)
        for batch in loader:
            loss = step(batch)

    Parameters and the optimiser's state are changed in place, as `optimizer.step()` does it; `.grad` is not used. The
    optimiser keeps its `state_dict` and its parameter groups; learning rates may change at every step. SGD, Adam,
    AdamW, Adafactor and Muon of torch.optim, and Lion, are part of the program; with another, or where the step cannot
    be one graph, forward and backward are compiled and the optimiser runs as it is, with a warning that says why.

    Args:
        model: an `nn.Module`.
        loss_fn: a function of the model and what the step is called with; it returns the loss, one number, or a tuple
            that begins with it.
        optimizer: a `torch.optim.Optimizer` over parameters of the model.
        clip_norm: the largest norm of all gradients; larger ones are scaled down, as `clip_grad_norm_` does it.
        accumulate: batches whose gradients make one update, by their mean.
        scaler: a `torch.amp.GradScaler("cpu")`: the loss is scaled, and a step with infinite gradients left out.
        ema: a running average of the parameters is kept in `averages`, of which this part stays at every step.
        gradient_dtype: `torch.bfloat16`: gradients that have to wait until all are there, for `clip_norm` or a
            `scaler`, are rounded to it, and take half the memory of float32. None: they wait as they are.
        settings: fields of `Config`.

    Raises:
        ConfigError: an unknown setting, or an argument of another kind.
    """
    from anyshape.base.config import Config
    from anyshape.frontend.train_step_api import TrainStep
    return TrainStep(model, loss_fn, optimizer, Config.make(**settings), clip_norm=clip_norm, accumulate=accumulate,
                     scaler=scaler, ema=ema, gradient_dtype=gradient_dtype)


def save(compiled: Any, path: Any, *, native: bool = True) -> Any:
    """Writes a compiled program to one file to deploy: text, weights, and machine code as a cache.

        program = torch.export.export(model.eval(), (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
        anyshape.save(anyshape.compile(program), "model.any")

    Args:
        compiled: what `anyshape.compile` made of a `torch.export.ExportedProgram`.
        path: the file; one that is there is replaced when the new one is whole.
        native: with the machine code of this machine, for `load(path, trust_native=True)`.

    Returns:
        The path.

    Raises:
        Unsupported: a step of it needs PyTorch, or it trains; nothing is written. OutputError: it cannot be written.
    """
    from anyshape.frontend.deploy import save_compiled
    return save_compiled(compiled, path, native)


def load(path: Any, *, trust_native: bool = False, threads: int = 0, verify: bool = False) -> LoadedModel:
    """Loads a file that `save` wrote. Neither torch nor, with `trust_native`, a compiler is needed.

        run = anyshape.load("model.any", trust_native=True)
        y = run(x)                                        # x: an array of numpy, PyTorch, JAX; y: of the same kind

    Args:
        path: the file. It is mapped: replace it by another file, do not write into it.
        trust_native: run the machine code in the file. It may do anything that this process may: set it for files that
            come from you. Otherwise the program is compiled here, from its text, which needs llvmlite.
        threads: of a call at most; 0: the cores that this process may run on.
        verify: compare all bytes of the weights with their digest, too.

    Raises:
        ArtifactError: it is no such file, or it needs what this machine or process has not.
    """
    from anyshape.artifact.load import load as load_file
    return load_file(path, trust_native, threads, verify)


def stats(reset: bool = False) -> dict[str, int | float]:
    """Counts since the process began, or since the last reset.

    Args:
        reset: start over after reading.

    Returns:
        `programs` compiled, `kernels` in them, `runs` of programs, `plans` made for new shapes, `extern_calls` to
        PyTorch's operators, `eager_calls` that ran as PyTorch, all or a part of them (`explain()` says why),
        `compile_seconds`, `cache_hits` and `cache_misses` of the disk cache, `arena_bytes` held
        now and at most (`arena_peak_bytes`); and over all live compiled objects `compilations`, captured `graphs`, and
        `fallbacks`.
    """
    from anyshape.frontend import api
    return api.stats(reset)


def reset_stats() -> None:
    """Sets the counters of `stats` to 0; what is held now stays, and the peak starts from it."""
    from anyshape.base import counters
    counters.reset()


def release() -> int:
    """Gives back the memory that idles: free arenas, and weights that were reordered for convolutions.

    It may be called at any time, from any thread, also while calls run: they keep what they have, and later ones take
    anew what they need. What no call has asked for in a minute goes back by itself. Compiled programs stay: they go
    with their compiled object.

    Returns:
        The bytes given back.
    """
    from anyshape.runtime.context import process_context
    return process_context.release()


def __getattr__(name: str) -> Any:
    """The public classes, imported when first asked for, so that importing the package costs nothing."""
    if name == "Config":
        from anyshape.base.config import Config
        return Config
    if name == "AnyShapeError":
        from anyshape.base.errors import AnyShapeError
        return AnyShapeError
    raise AttributeError(f"module 'anyshape' has no attribute {name!r}")
