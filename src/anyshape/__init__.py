"""AnyShape: compile a PyTorch program once, run it at every shape, inside your memory.

    fast = anyshape.compile(model)                                  one program, forward and backward, for all sizes
    step = anyshape.train_step(model, loss_fn, optimizer)           the whole train step
    anyshape.save(fast, "model.any"); run = anyshape.load("model.any")

Every error is an `AnyShapeError`: `what`, `where`, `why`, `do`. Its subclasses that functions here name under "Raises"
are in `anyshape.base.errors`.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from anyshape.base.optional_packages import needed_by
from anyshape.base.version import __version__ as __version__

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    import torch

    from anyshape import jax as jax
    from anyshape.artifact.load import LoadedModel
    from anyshape.base.config import Config
    from anyshape.base.errors import AnyShapeError
    from anyshape.dist.cost.machine import Machine
    from anyshape.frontend.callables.compiled_function import CompiledFunction
    from anyshape.frontend.importer_stablehlo.callable import StablehloCallable
    from anyshape.frontend.importer_stablehlo.jax_export import JaxCallable
    from anyshape.frontend.importer_tensorflow.callable import TensorflowCallable
    from anyshape.frontend.onnx_program import OnnxCallable
    from anyshape.frontend.strategy.api import StrategySearch
    from anyshape.frontend.train_step_api import TrainStep
    from anyshape.runtime.inspect.profile import Profile

__all__ = ["AnyShapeError", "Config", "compile", "compile_jax", "compile_onnx", "compile_stablehlo",
           "compile_tensorflow", "consolidate", "load", "profile", "release", "reset_stats", "save", "stats",
           "strategy", "train_step"]


P = ParamSpec("P")
R = TypeVar("R")
_LEFT_OUT: Any = object()


@overload
def compile(target: torch.nn.Module | torch.export.ExportedProgram, **settings: Any) -> Any: ...
@overload  # the mypy of this project reads torch's classes as Any
def compile(target: Callable[P, R],  # type: ignore[overload-cannot-match]
            **settings: Any) -> CompiledFunction[P, R]: ...
@overload
def compile(**settings: Any) -> Callable[[Callable[P, R]], CompiledFunction[P, R]]: ...
def compile(target: Any = _LEFT_OUT, *others: Any, **settings: Any) -> Any:
    """Compiles a module, a function or an exported program for all sizes of its inputs.

        fast = anyshape.compile(model, memory_limit="2GiB")
        y = fast(x)                                       # x: any number of rows, any length

        @anyshape.compile                                 # or @anyshape.compile(strict=True)
        def scores(x): ...

    Args:
        target: an `nn.Module` (the result shares its parameters and state), a function, or a
            `torch.export.ExportedProgram`. Left out, the call returns a decorator.
        settings: fields of `Config` (docs/settings.md), by name.

    Returns:
        A callable used like `target`, on tensors of any sizes, with `explain()`, `memory()` and `report(path)`. The
        first call compiles. A call that cannot be compiled runs as PyTorch would, and is counted (`stats`).

    Raises:
        ConfigError: an unknown setting, or a target of another kind. A call raises InputError where its arguments do
            not fit, LimitError where it cannot keep to `memory_limit`, and Unsupported, with `strict`, where it would
            run as PyTorch.
    """
    from anyshape.base.config import Config
    if others:
        from anyshape.base.errors import ConfigError
        raise ConfigError(f"anyshape.compile was given a {type(others[0]).__name__} after what it is to compile",
                          why="settings are passed by name", do="write anyshape.compile(target, name=value)")
    config = Config.make(**settings)
    if target is _LEFT_OUT:
        return lambda function: compile(function, **settings)
    with needed_by("anyshape.compile"):
        from anyshape.frontend import api
    return api.compile_target(target, config)


def compile_onnx(source: Any, **settings: Any) -> OnnxCallable:
    """Compiles an ONNX model: one program for every size of its inputs.

        detect = anyshape.compile_onnx("detector.onnx")
        boxes = detect(images)

    Args:
        source: a path, the model's bytes, or an `onnx.ModelProto`; operator sets 7 to 28.
        settings: fields of `Config`.

    Returns:
        A callable that takes arrays of numpy or tensors of torch, in the model's order or by name, with `explain()`
        and `memory()`. A size that the model names is one size wherever the name stands.

    Raises:
        InputError: it is no model, or breaks a limit. Unsupported: the model has an operator set that is not known.
        ConfigError: an unknown setting, or the extra `onnx` is not installed.
    """
    from anyshape.base.config import Config
    with needed_by("anyshape.compile_onnx", "onnx"):
        from anyshape.frontend.onnx_program import compile_model
    return compile_model(source, Config.make(**settings))


def compile_jax(exported: Any, **settings: Any) -> JaxCallable:
    """Compiles a function that JAX exported: one program for every size that was left symbolic.

        sizes = jax.export.symbolic_shape("batch, time")
        exported = jax.export.export(jax.jit(f))(jax.ShapeDtypeStruct(sizes, jnp.float32))
        fast = anyshape.compile_jax(exported)

    Args:
        exported: what `jax.export.export(...)(...)` returns, for one device.
        settings: fields of `Config`.

    Returns:
        A callable that takes the function's arguments, trees of arrays of JAX or numpy, and gives its results in the
        kind of the first array; with `explain()` and `memory()`.

    Raises:
        InputError: it is no exported function. Unsupported: an operation is not carried; it names the operation and
            the line. ConfigError: an unknown setting, or the extra `jax` is not installed.
    """
    from anyshape.base.config import Config
    with needed_by("anyshape.compile_jax", "jax"):
        from anyshape.frontend.importer_stablehlo import jax_export
    return jax_export.compile_exported(exported, Config.make(**settings))


def compile_stablehlo(source: Any, **settings: Any) -> StablehloCallable:
    """Compiles a StableHLO module, as JAX, TensorFlow and others export it: one program for every size.

    Args:
        source: the bytes of a portable artefact or of MLIR, or the module's text. Its function `main` is compiled.
        settings: fields of `Config`.

    Returns:
        A callable that takes arrays of numpy, torch or JAX in order and gives results in the kind of the first one;
        with `explain()` and `memory()`.

    Raises:
        InputError: it is no module, or breaks a limit. Unsupported: an operation is not carried. ConfigError: an
            unknown setting, or the extra `jax`, whose jaxlib reads modules, is not installed.
    """
    from anyshape.base.config import Config
    with needed_by("anyshape.compile_stablehlo", "jax"):
        from anyshape.frontend.importer_stablehlo import callable as stablehlo_callable
    return stablehlo_callable.compile_module(source, Config.make(**settings))


def compile_tensorflow(source: Any, *, signature: str = "serving_default", **settings: Any) -> TensorflowCallable:
    """Compiles a model of TensorFlow, by its own converter to StableHLO: one program for every size that is None.

        fast = anyshape.compile_tensorflow("saved_model")             # fast(x=x)["y"]: by the signature's names
        fast = anyshape.compile_tensorflow(keras_model)               # fast(x): as the model is called
        fast = anyshape.compile_tensorflow(function)                  # of @tf.function(input_signature=[...])

    Args:
        source: the folder of a SavedModel, a `.keras` file, a Keras model on the backend of TensorFlow, a `tf.function`
            with an `input_signature`, or a concrete function. TensorFlow reads folders and files: pass your own.
        signature: which signature of a SavedModel is compiled.
        settings: fields of `Config`.

    Returns:
        A callable that takes arrays of TensorFlow, numpy, torch or JAX, nested as the function's arguments, and gives
        its results in the kind of the first array; with `explain()` and `memory()`. Weights are inside.

    Raises:
        InputError: it is none of those. Unsupported: an operation is not carried, or TensorFlow's converter refuses.
        ConfigError: an unknown setting, or the extra `tensorflow` is not installed.
    """
    from anyshape.base.config import Config
    with needed_by("anyshape.compile_tensorflow", "tensorflow"):
        from anyshape.frontend.importer_tensorflow import callable as tensorflow_callable
    return tensorflow_callable.compile_source(source, signature, Config.make(**settings))


def train_step(model: torch.nn.Module, loss_fn: Callable[..., Any], optimizer: torch.optim.Optimizer, *,
               clip_norm: float | None = None, accumulate: int = 1, scaler: torch.amp.GradScaler | None = None,
               ema: float | None = None, gradient_dtype: torch.dtype | None = None, strategy: Any = None,
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
        strategy: how the step is dealt out over the processes of `torch.distributed` (docs/distributed.md): "ddp",
            "zero1", "fsdp", "tp", "sp", "auto", a mesh with named axes, or what `anyshape.strategy` found. Each rank
            calls the step with its own rows; the loss is that of all. None: one process.
        settings: fields of `Config`.

    Raises:
        ConfigError: an unknown setting, or an argument of another kind.
        RankError: ranks differ in code, model, settings or versions.
    """
    from anyshape.base.config import Config
    with needed_by("anyshape.train_step"):
        from anyshape.frontend.train_step_api import TrainStep
    return TrainStep(model, loss_fn, optimizer, Config.make(**settings), clip_norm=clip_norm, accumulate=accumulate,
                     scaler=scaler, ema=ema, gradient_dtype=gradient_dtype, strategy=strategy)


def strategy(model: torch.nn.Module, loss_fn: Callable[..., Any], optimizer: torch.optim.Optimizer | None, batch: Any,
             *, mesh: Any = "auto", world: int, machine: str | Machine = "h100", memory_limit: str | int = 0,
             lengths: Sequence[int] | Mapping[int, float] | None = None, dtype: str = "") -> StrategySearch:
    """Searches how to train a model on many devices: placements of every layer, collectives, recomputation, pipeline.

        search = anyshape.strategy(model, loss_fn, optimizer, batch, world=128, machine="a100x8:800Gb")
        print(search)
        search.override("layers.*.mlp", placement="column")

    The forward is traced with fake tensors: nothing is computed, no device is needed, and a model on the device
    `meta` does. Seconds are simulated (docs/strategy.md says how well that fits published runs). Where lengths differ
    from step to step, placements of parameters are common to all, and what activations do is decided for each class of
    lengths.

    Args:
        model: an `nn.Module`.
        loss_fn: a function of the model and the batch; it returns the loss, or a tuple that begins with it.
        optimizer: a `torch.optim.Optimizer`, for the bytes of its state; None: as of AdamW.
        batch: what `loss_fn` takes after the model, a tensor or a tuple; dims 0 and 1 of the first are the sequences
            of all ranks together, and positions.
        mesh: "auto", or sizes of axes that are fixed: {"tensor": 8}; of "data", "tensor", "context", "pipe".
        world: number of devices.
        machine: what they are: "a100x8:800Gb" has nodes of 8 A100, with 800 gigabits a second for each node.
        memory_limit: bytes of a device, as a number or such as "38GiB"; 0: all that the chip has.
        lengths: of steps as they come, or length -> weight. None: that of `batch`.
        dtype: of products: "bf16", "f16", "f32", "f64" or "fp8"; "": f32 on "cpu", else bf16. Weights and states are
            in f32.

    Returns:
        The result: `print` it, `override` parts of it, write it with `report("strategy.html")` and
        `trace("step.json")`.

    Raises:
        InputError: ranks, mesh, lengths or dtype that cannot be, or a model that cannot be traced.
        LimitError: no strategy keeps to the limit; its `least` says which limit would do.
        ConfigError: an unknown machine, or a limit that is no number of bytes.
    """
    with needed_by("anyshape.strategy"):
        from anyshape.frontend.strategy.api import strategy as search
    return search(model, loss_fn, optimizer, batch, mesh=mesh, world=world, machine=machine, memory_limit=memory_limit,
                  lengths=lengths, dtype=dtype)


def save(compiled: Any, path: str | os.PathLike[str], *, native: bool = True,
         tests: Sequence[Sequence[Any]] = ()) -> Path:
    """Writes a compiled program to one file to deploy: text, weights, and machine code as a cache.

        fast = anyshape.compile(model.eval())
        fast(x)                                           # calls say what the program takes
        anyshape.save(fast, "model.any")

    Args:
        compiled: what `anyshape.compile` made of a module or function, which was called, or of a
            `torch.export.ExportedProgram`; or what was compiled of an ONNX model, or of JAX or StableHLO.
        path: the file; one that is there is replaced when the new one is whole.
        native: with the machine code of this machine, for `load(path, trust_native=True)`.
        tests: calls, each a tuple of arguments, that are stored with their results; `anyshape check` runs them.

    Returns:
        The path.

    Raises:
        Unsupported: a step of it needs PyTorch, or it trains; nothing is written. OutputError: it cannot be written.
    """
    from pathlib import Path
    with needed_by("anyshape.save"):
        from anyshape.frontend.deploy import save_compiled
    return save_compiled(compiled, Path(path), native, tests)


def load(path: str | os.PathLike[str], *, trust_native: bool = False, threads: int = 0,
         verify: bool = False, seed: int | None = None) -> LoadedModel:
    """Loads a file that `save` wrote. Neither torch nor, with `trust_native`, a compiler is needed.

        run = anyshape.load("model.any", trust_native=True)
        y = run(x)                                        # x: an array of numpy, PyTorch, JAX; y: of the same kind

    Args:
        path: the file. It is mapped: replace it by another file, do not write into it.
        trust_native: run the machine code in the file. It may do anything that this process may: set it for files that
            come from you. Otherwise the program is compiled here, from its text, which needs llvmlite, and kept in the
            user's cache, from which later processes load it about as fast.
        threads: of a call at most; 0: the cores that this process may run on.
        verify: compare all bytes of the weights with their digest, too.
        seed: of the random numbers that its calls draw, a whole number from 0; None: the system's entropy. They are
            numpy's, not those that PyTorch draws from the same seed. `run.seed(number)` begins anew.

    Raises:
        ArtifactError: it is no such file, or it needs what this machine or process has not.
        ConfigError: `threads` is no number of threads, `seed` no seed, or a setting that is neither True nor False.
    """
    from pathlib import Path

    from anyshape.artifact.load import load as load_file
    return load_file(Path(path), trust_native, threads, verify, seed)


def consolidate(checkpoint: str | os.PathLike[str], path: str | os.PathLike[str], *,
                rest: str | os.PathLike[str] | None = None) -> None:
    """Writes the parameters and buffers of a checkpoint of `TrainStep.save` into one safetensors file, whole, with the
    model's own names. One process does it; neither the model nor a mesh is needed.

    Args:
        checkpoint: a checkpoint, or a folder of them, of which the newest is taken.
        path: the file; one that is there is replaced when the new one is whole.
        rest: a second file, for all else: optimiser states as `optimizer.state.<parameter>.<name>`, random state and
            averages as tensors, and what is no tensor as JSON in the file's metadata. None: it is left out. The same
            file: it has all, the parameters as `model.<name>`.

    Raises:
        InputError: it is no checkpoint. OutputError: a file cannot be written.
    """
    from pathlib import Path
    with needed_by("anyshape.consolidate"):
        from anyshape.frontend.checkpoint import save_load
    save_load.consolidate(Path(checkpoint), Path(path), None if rest is None else Path(rest))


def stats(reset: bool = False) -> dict[str, int | float]:
    """Counts since the process began, or since the last reset.

    Args:
        reset: start over after reading.

    Returns:
        `programs` compiled, `kernels` in them, `fusion_retries` with less fusion, `compile_seconds`;
        `runs` of programs, `plans` made for new shapes, `extern_calls` to PyTorch's operators, `collectives` and
        `collective_wait_seconds`; `eager_calls` that ran as PyTorch, all or a part of them (`explain()` says why);
        `cache_hits` and `cache_misses` of the disk cache, and with `warm_start` the programs taken from it
        (`warm_starts`), those that did not fit (`warm_refusals`), and those that cannot be recorded (`warm_not_kept`);
        `arena_bytes` held now and at most (`arena_peak_bytes`);
        over all live compiled objects `compilations`, captured `graphs`, and `fallbacks`.
    """
    from anyshape.frontend import api
    return api.stats(reset)


def reset_stats() -> None:
    """Sets the counters of `stats` to 0; what is held now stays, and the peak starts from it."""
    from anyshape.base import counters
    counters.reset()


def profile() -> AbstractContextManager[Profile]:
    """Times the steps of all programs that run meanwhile, in all threads: compiled objects, train steps, loaded files.

        with anyshape.profile() as profile:
            fast(x)
        print(profile)                                    # a table: ms, share, GFLOP/s, GB/s, step, source
        profile.export_chrome_trace("trace.json")         # for Perfetto, or chrome://tracing

    What PyTorch runs between programs is not in it (`torch.profiler` has that). Calls take a little longer meanwhile;
    on a device each step is waited for.

    Returns:
        A context manager that gives the `Profile`, whose `steps()` are numbers: seconds, operations and bytes.
    """
    from anyshape.runtime.inspect.profile import profile as recorded
    return recorded()


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
    """The public classes and `anyshape.jax`, imported when first asked for: importing the package costs nothing."""
    if name == "Config":
        from anyshape.base.config import Config
        return Config
    if name == "AnyShapeError":
        from anyshape.base.errors import AnyShapeError
        return AnyShapeError
    if name == "jax":
        from importlib import import_module
        return import_module("anyshape.jax")
    raise AttributeError(f"module 'anyshape' has no attribute {name!r}")
