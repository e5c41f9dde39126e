"""The callable that `anyshape.compile_onnx` returns: arrays of numpy or torch in, results of the caller's kind out."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from anyshape.artifact.deployable import Deployable
from anyshape.base.config import Config
from anyshape.base.errors import InputError, Unsupported
from anyshape.frontend.diagnostics.explain import explain
from anyshape.frontend.diagnostics.explain_text import Explanation
from anyshape.frontend.diagnostics.memory import memory
from anyshape.frontend.diagnostics.memory_text import MemoryNote
from anyshape.frontend.importer_onnx.model import OnnxValue
from anyshape.frontend.importer_onnx.reader import Reader
from anyshape.frontend.importer_onnx.walk import with_labels
from anyshape.frontend.onnx_program.stage import Shared, Stage, Values, Variant
from anyshape.frontend.programs.compile_program import compile_program
from anyshape.frontend.programs.deployable_program import deployable_program
from anyshape.frontend.programs.session import Compilation
from anyshape.frontend.symbols.numpy_arrays import to_tensor
from anyshape.torch_compat.dtypes import DTYPE_NAMES


def compile_model(source: Any, config: Config) -> OnnxCallable:
    """Compiles an ONNX model; see `anyshape.compile_onnx`."""
    reader = Reader(source)
    name = Path(source).stem if isinstance(source, (str, Path)) else reader.graph.name or "model"
    return OnnxCallable(reader, name, config)


class OnnxCallable:
    """A compiled ONNX model, called with its inputs in order or by name.

    inputs, outputs: of the model, with dtypes and shapes (numbers, names, or None).
    defaults: constants of the model that a call may bring by name, in programs of their own.

    A call returns the output, or a tuple of several: arrays of numpy where an array came in (or nothing), else tensors.

    Raises (when called):
        InputError: wrong number, dtype, rank or sizes of inputs. Unsupported: an operator that cannot run.
    """

    def __init__(self, reader: Reader, name: str, config: Config) -> None:
        graph = reader.graph
        self.name = name
        self.inputs: tuple[OnnxValue, ...] = graph.inputs
        self.outputs: tuple[OnnxValue, ...] = graph.outputs
        self.compilation = Compilation(config, compile_program)
        self.compilation.tracing = (name, "", "onnx")
        self.defaults: tuple[OnnxValue, ...] = graph.defaults
        self.reader = reader
        self.stage = self._stage(())
        self.overriding: dict[tuple[OnnxValue, ...], Stage] = {}
        self.ahead = self.stage.prepare()

    def _stage(self, given: tuple[OnnxValue, ...]) -> Stage:
        """The stage of the whole model, for calls that bring these of its defaults."""
        graph, taken = self.reader.graph, {one.name for one in given}
        inputs = with_labels((*graph.inputs, *given))
        constants = {name: array for name, array in graph.constants.items() if name not in taken}
        shared = Shared(self.reader, self.compilation, self.name, constants, {one.name: one for one in inputs})
        return Stage(shared, [one.name for one in inputs], graph.nodes, [one.name for one in graph.outputs], constants)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        values, arrays = self._values(arguments, named)
        stage, given = self.stage, tuple(one for one in self.defaults if one.name in values)
        if given:
            stage = self.overriding.get(given) or self.overriding.setdefault(given, self._stage(given))
        elif self.ahead is not None:
            stage.keep(self.ahead, values)
            self.ahead = None
        with torch.no_grad():
            found = stage.run(values)
        results = tuple(_given_back(found[one.name], arrays) for one in self.outputs)
        return results[0] if len(results) == 1 else results

    def _values(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Values, bool]:
        """The inputs as tensors, by name; and whether any was an array of numpy."""
        names, more = ([one.name for one in ones] for ones in (self.inputs, self.defaults))
        if len(arguments) > len(names):
            raise InputError(f"{self.name} was given {len(arguments)} inputs", where=self.name,
                             why=f"it takes {len(names)}: {', '.join(names)}", do="leave the others out")
        given = dict(zip(names, arguments, strict=False))
        for key, value in named.items():
            if key in given or key not in (*names, *more):
                raise InputError(f"{self.name} was given {key!r}" + (" twice" if key in given else ""), where=self.name,
                                 why=f"its inputs are {', '.join((*names, *more))}", do="give each of them once")
            given[key] = value
        missing = [name for name in names if name not in given]
        if missing:
            raise InputError(f"{self.name} was not given {', '.join(missing)}", where=self.name,
                             why=f"its inputs are {', '.join(names)}", do="give each of them once")
        arrays = not given or any(not isinstance(value, torch.Tensor) for value in given.values())
        return {one.name: self._value(one, given[one.name]) for one in (*self.inputs, *self.defaults)
                if one.name in given}, arrays

    def _value(self, declared: OnnxValue, value: Any) -> Any:
        if value is None or isinstance(value, list) or (isinstance(value, np.ndarray) and value.dtype.kind in "OUS"):
            return [self._value(OnnxValue(declared.name), one) for one in value] if isinstance(value, list) else value
        if not isinstance(value, torch.Tensor):
            try:
                value = to_tensor(np.asarray(value))
            except TypeError:
                return value  # a narrow dtype, which torch lacks
        if value.requires_grad:
            value = value.detach()
        dtype = DTYPE_NAMES.get(value.dtype, str(value.dtype))
        if declared.dtype and dtype != declared.dtype:
            raise InputError(f"the input {declared.name!r} is {dtype}", where=self.name,
                             why=f"the model takes {declared.dtype}", do="convert it")
        if declared.shape is not None and value.dim() != len(declared.shape):
            raise InputError(f"the input {declared.name!r} has {value.dim()} dims", where=self.name,
                             why=f"the model takes {len(declared.shape)}", do="reshape it")
        return value

    def only(self) -> Variant | None:
        """The one program that the model is, for every call; None where it is several, or none yet."""
        found = [self.ahead] if self.ahead is not None else list(self.stage.variants.values())
        names = tuple(one.name for one in self.outputs)
        whole = len(found) == 1 and found[0].program is not None and found[0].made.cut is None
        if not whole or found[0].made.gives != names or found[0].made.takes != tuple(one.name for one in self.inputs):
            return None
        keyed = self.stage.numbers or self.stage.sizes or self.stage.fixed or self.stage.conditions
        return None if keyed else found[0]

    def _reasons(self) -> list[str]:
        """Why the model is not one program, in words."""
        stage, found = self.stage, [one.reason for one in self.compilation.cuts]
        asked = [*stage.numbers, *stage.sizes]
        if asked:
            found.append(f"what it does depends on the numbers in {', '.join(asked)}")
        if stage.fixed:
            found.append(f"it is compiled for each number of {', '.join(stage.fixed)}")
        found += [f"calls without {one} have a program of their own" for one in stage.conditions]
        made = [self.ahead] if self.ahead is not None else stage.variants.values()
        known = sorted({name for one in made for name in (*one.fixed, *one.made.renames)})
        if known and not found:
            found.append(f"no program computes {', '.join(known)}: constants, or no tensors that PyTorch has")
        return found or ["inputs of several dtypes or ranks have been given, or none yet"]

    def deployable(self) -> Deployable:
        """What a file holds of it (`anyshape.save`).

        Raises:
            Unsupported: it is not one program for all its inputs.
        """
        variant = self.only()
        if variant is None:
            raise Unsupported(f"{self.name} cannot be deployed: it is not one program", where=self.name,
                              why="; ".join(self._reasons())[:300], do="export the model without what is named there, "
                              "with numbers that its inputs bring as constants")
        names = [one.name for one in self.outputs]
        named = names if len({*names}) == len(names) else ()  # a model may give a result twice
        return deployable_program(variant.program, self.compilation, variant.made.takes, len(names), named)

    def explain(self, **sizes: Any) -> Explanation:
        """What was decided, and why; `sizes` by the names of the model's dims."""
        return explain("ONNX model", self.compilation, sizes)

    def memory(self, **sizes: Any) -> MemoryNote:
        """What the programs need, as formulas; `.bytes` is the predicted peak at `sizes`."""
        return memory(self.compilation, sizes)


def _given_back(value: Any, arrays: bool) -> Any:
    if isinstance(value, list):
        return [_given_back(one, arrays) for one in value]
    if not arrays or not isinstance(value, torch.Tensor):
        return value
    if value.dtype == torch.bfloat16:
        import ml_dtypes
        return value.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return value.numpy()
