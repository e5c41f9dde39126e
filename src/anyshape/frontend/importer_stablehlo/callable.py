"""The callable that `anyshape.compile_stablehlo` returns: any library's arrays in, the caller's kind out."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from anyshape.artifact.deployable import Deployable
from anyshape.backend.targets import target_of
from anyshape.base.config import Config
from anyshape.base.errors import AnyShapeError, InputError, Unsupported
from anyshape.compiler.driver import compile_pair
from anyshape.frontend.diagnostics.explain import explain
from anyshape.frontend.diagnostics.explain_text import Explanation
from anyshape.frontend.diagnostics.memory import memory
from anyshape.frontend.diagnostics.memory_text import MemoryNote
from anyshape.frontend.importer.graph_inputs import Notes
from anyshape.frontend.importer_stablehlo.control import RunTimeLoop
from anyshape.frontend.importer_stablehlo.module import Module, Type
from anyshape.frontend.importer_stablehlo.reader import read
from anyshape.frontend.importer_stablehlo.split import Branch, Loop, Part, Split, split
from anyshape.frontend.importer_stablehlo.table import HELD, MASKS
from anyshape.frontend.importer_stablehlo.walk import Argument, clean, imported, result_types
from anyshape.frontend.programs.compile_program import NativeProgram, compile_program
from anyshape.frontend.programs.deployable_program import deployable_program
from anyshape.frontend.programs.session import Compilation
from anyshape.frontend.symbols.numpy_arrays import to_tensor
from anyshape.sym.expr import Size, evaluate, symbols_of
from anyshape.torch_compat.dtypes import DTYPE_NAMES, TORCH_DTYPES

Giver = Callable[[torch.Tensor], Any]


def compile_module(source: Any, config: Config) -> StablehloCallable:
    """Compiles a StableHLO module; see `anyshape.compile_stablehlo`."""
    return StablehloCallable(read(source), config)


class CompiledPart:
    """A module as one program, for tensors that hold its values (see table.py)."""

    def __init__(self, module: Module, compilation: Compilation) -> None:
        config = compilation.config
        made = imported(module, target_of(config))
        self.arguments: tuple[Argument, ...] = made.arguments
        self.results: tuple[Type, ...] = made.results
        self.asserted = made.asserted
        places = {str(size): f"dim {dim} of {one.label}" for one in self.arguments if one.sizes is not None
                  for dim, size in enumerate(one.sizes) if not isinstance(size, int)}
        number = compilation.next_graph(tuple((name, where, name) for name, where in places.items()))
        graph = made.graph.replace(name=f"{number}_stablehlo")
        compiled = compile_pair(graph, None, config, names=places).forward
        self.program = NativeProgram(f"{number}.inference", compiled,
                                     Notes(constants=made.constants, externs=made.externs))
        compilation.register(self.program)

    def __call__(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results.

        Raises:
            InputError: sizes do not agree, or are not those of the module.
        """
        self.check(values)
        return self.program([int(value) if one.sizes is None else value  # type: ignore[no-any-return]
                             for one, value in zip(self.arguments, values, strict=True)])

    def check(self, values: Sequence[torch.Tensor]) -> None:
        """Raises InputError where sizes do not agree, or are not those of the module."""
        bound: dict[str, int] = {}
        for one, value in zip(self.arguments, values, strict=True):
            if one.sizes is None:
                bound[one.name] = int(value)
                continue
            for dim, (size, have) in enumerate(zip(one.sizes, value.shape, strict=True)):
                want = size if isinstance(size, int) else bound.setdefault(str(size), have)
                if want != have:
                    raise InputError(f"dim {dim} of {one.label} is {have}", where="a call of a StableHLO module",
                                     why=f"{size} is {want}" if want != size else f"the module takes {want}",
                                     do="pass sizes that agree")
        for size, words in self.asserted:
            if _holds(size, bound) is False:
                numbers = ", ".join(f"{name} = {bound[name]}" for name in sorted(symbols_of(size)))
                raise InputError("these sizes are not those of the module", where="a call of a StableHLO module",
                                 why=f"it says that {words}, and {numbers}", do="pass others, or export it for these")


class CompiledSplit:
    """A block with loops that run at run time: its programs, one after another."""

    def __init__(self, pieces: Split, compilation: Compilation) -> None:
        self.takes, self.gives = pieces.takes, pieces.gives
        self.pieces = [(one, [CompiledPart(one.module, compilation)] if isinstance(one, Part) else
                        [CompiledSplit(inner, compilation) for inner in inner_of(one)]) for one in pieces.pieces]

    def __call__(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results; errors as of `CompiledPart`."""
        known = dict(zip(self.takes, values, strict=True))
        for piece, inner in self.pieces:
            if isinstance(piece, Part):
                found = inner[0]([known[name] for name in piece.takes])
            elif isinstance(piece, Branch):
                found = inner[_taken(known[piece.index], len(inner))]([known[name] for name in piece.seen])
            else:
                around = [known[name] for name in piece.seen]
                found = [known[name] for name in piece.takes]
                while bool(inner[0]([*found, *around])[0]):
                    found = inner[1]([*found, *around])
            known.update(zip(piece.gives, found, strict=True))
        return [known[name] for name in self.gives]


def inner_of(piece: Loop | Branch) -> tuple[Split, ...]:
    """The blocks of a piece: of a loop, its condition and its body."""
    return piece.blocks if isinstance(piece, Branch) else (piece.condition, piece.body)


def _taken(index: torch.Tensor, count: int) -> int:
    """The number of the branch that is taken: the last one for a number that is none."""
    if index.dtype == torch.bool:
        return 0 if bool(index) else 1
    return int(index) if 0 <= int(index) < count else count - 1


class StablehloCallable:
    """A compiled StableHLO module, called with its arguments in order.

    arguments: labels and types of the module's arguments. results: the types of its results; labels: their
    names, where it says some.

    A call returns the result, or a tuple of several, of the kind of its first array: numpy's, torch's, JAX's or
    TensorFlow's; dtypes are those of the module.

    Raises (when called):
        InputError: wrong number, dtype, rank or sizes of arguments; nothing has run then.
    """

    def __init__(self, module: Module, config: Config, compilation: Compilation | None = None) -> None:
        if compilation is None:
            compilation = Compilation(config, compile_program)
            compilation.tracing = ("the StableHLO module", "", "stablehlo")
        self.compilation = compilation
        main = module.functions["main"]
        labels = main.labels or main.names
        self.arguments = tuple((label or f"argument {place}", kind)
                               for place, (label, kind) in enumerate(zip(labels, main.body.types, strict=True)))
        self.labels = main.results
        self.results = result_types(module)
        self.run: CompiledPart | CompiledSplit
        try:
            self.run = CompiledPart(module, self.compilation)
        except RunTimeLoop:
            try:
                self.run = CompiledSplit(split(module), self.compilation)
            except RunTimeLoop as error:  # in the body of an operation that is no branch
                raise Unsupported("a loop inside of another operation is not carried", where="a StableHLO module",
                                  why="it runs at run time, between programs",
                                  do="run this part where it comes from") from error
        # places of arguments that are numbers which the program takes for sizes
        self.counts = () if isinstance(self.run, CompiledSplit) else tuple(
            place for place, one in enumerate(self.run.arguments) if one.sizes is None)

    def __call__(self, *arguments: Any) -> Any:
        if len(arguments) != len(self.arguments):
            raise InputError(f"the module was given {len(arguments)} arguments", where="a call of a StableHLO module",
                             why=f"it takes {len(self.arguments)}", do="pass one for each")
        results = self.results_of(arguments)
        return results[0] if len(results) == 1 else results

    def results_of(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """All results of a call, in the kind of its first array. Errors as of a call."""
        give = next((giver for giver in map(giver_of, arguments) if giver is not None), _to_numpy)
        return tuple(map(give, self.tensors(arguments)))

    def tensors(self, arguments: Sequence[Any]) -> list[torch.Tensor]:
        """The results of a call, in the dtypes of the module. Errors as of a call."""
        values = [_value(label, kind, value)
                  for (label, kind), value in zip(self.arguments, arguments, strict=True)]
        try:
            with torch.no_grad():
                found = self.run(values)
        except RuntimeError as error:  # the border to PyTorch's operators
            if isinstance(error, AnyShapeError):
                raise
            raise Unsupported("the module cannot run with these arguments", where="a call of a StableHLO module",
                              why=f"a step by PyTorch refuses them: {' '.join(str(error).split())[:300]}",
                              do="pass arguments of other sizes, or run this part where it comes from") from error
        return [_of_module(value, kind.dtype) for value, kind in zip(found, self.results, strict=True)]

    def deployable(self) -> Deployable:
        """What a file holds of it (`anyshape.save`).

        Raises:
            Unsupported: it has loops that run at run time, takes sizes as numbers, or has dtypes that a file has not.
        """
        kinds = [kind for _, kind in self.arguments] + list(self.results)
        if isinstance(self.run, CompiledSplit) or self.counts or any(
                kind.dtype in HELD for kind in kinds):
            raise Unsupported("the module cannot be deployed", where="anyshape.save", do="export it without them",
                              why="it has loops that run at run time, sizes that are numbers, or whole numbers without "
                              "sign of more than 8 bits")
        names = [clean(one.label) if one.label else f"argument_{place}" for place, one in enumerate(self.run.arguments)]
        return deployable_program(self.run.program, self.compilation, names, len(self.results))

    def explain(self, **sizes: Any) -> Explanation:
        """What was decided, and why; `sizes` by the names of the module's sizes."""
        return explain("StableHLO module", self.compilation, sizes)

    def memory(self, **sizes: Any) -> MemoryNote:
        """What the program needs, as formulas; `.bytes` is the predicted peak at `sizes`."""
        return memory(self.compilation, sizes)


def _value(label: str, kind: Type, value: Any) -> torch.Tensor:
    """An argument as a program takes it."""
    tensor = tensor_of(value)
    dtype = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
    if dtype != kind.dtype:
        raise InputError(f"{label} is {dtype}", where="a call of a StableHLO module",
                         why=f"the module takes {kind.dtype}", do="convert it")
    if tensor.dim() != len(kind.shape):
        raise InputError(f"{label} has {tensor.dim()} dims", where="a call of a StableHLO module",
                         why=f"the module takes {len(kind.shape)}", do="reshape it")
    return _as_held(tensor, dtype)


def _holds(size: Size, bound: dict[str, int]) -> bool | None:
    return evaluate(size, bound) >= 0 if symbols_of(size) <= bound.keys() else None


# ---- arrays


def giver_of(value: Any) -> Giver | None:
    """What makes an array of the caller's kind; None for a plain number."""
    if isinstance(value, torch.Tensor):
        return lambda tensor: tensor
    if isinstance(value, np.ndarray):
        return _to_numpy
    package = type(value).__module__.split(".")[0]
    if package in ("jax", "jaxlib"):
        return to_jax
    if package == "tensorflow":
        return to_tensorflow
    return None


def tensor_of(value: Any) -> torch.Tensor:
    """A tensor over an array's memory, or a copy where it cannot be shared.

    Raises:
        InputError: it is no array.
    """
    if isinstance(value, torch.Tensor):
        return value.detach() if value.requires_grad else value
    try:
        if isinstance(value, np.ndarray) and value.dtype == np.uint64:  # of which C has two names
            return to_tensor(value.view(np.int64)).view(torch.uint64)
        if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack__"):
            return to_tensor(np.asarray(value))
        return torch.from_dlpack(value)
    except (TypeError, ValueError, RuntimeError, BufferError):
        pass
    try:
        return to_tensor(np.asarray(value))
    except (TypeError, ValueError) as error:
        raise InputError(f"a {type(value).__name__} is no array", where="a call of a StableHLO module",
                         why=str(error), do="pass an array of numpy, torch or JAX") from error


def _to_numpy(tensor: torch.Tensor) -> Any:
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def to_jax(tensor: torch.Tensor) -> Any:
    """An array of JAX over a tensor's memory, or a copy where it cannot be shared."""
    from jax import numpy as jnp
    if tensor.dtype in (torch.bool, torch.bfloat16) or tensor.is_complex():
        return jnp.asarray(_to_numpy(tensor))
    return jnp.from_dlpack(tensor)


def to_tensorflow(tensor: torch.Tensor) -> Any:
    """A tensor of TensorFlow over a tensor's memory, or a copy where it cannot be shared."""
    import tensorflow as tf
    if tensor.dtype in (torch.bool, torch.bfloat16) or not tensor.is_contiguous():
        return tf.constant(_to_numpy(tensor))
    return tf.experimental.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(tensor))


def _as_held(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """Whole numbers without sign in the dtype that holds them (see table.py)."""
    if dtype == "u64":
        return tensor.view(torch.int64)
    if dtype in MASKS:
        signed = {"u16": torch.int16, "u32": torch.int32}[dtype]
        return tensor.view(signed).to(TORCH_DTYPES[HELD[dtype]]) & MASKS[dtype]
    return tensor


def _of_module(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    if dtype == "u64":
        return tensor.view(torch.uint64)
    if dtype in MASKS:
        signed = {"u16": torch.int16, "u32": torch.int32}[dtype]
        return tensor.to(signed).view(TORCH_DTYPES[dtype])
    return tensor
