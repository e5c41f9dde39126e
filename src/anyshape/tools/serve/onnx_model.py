"""ONNX models behind the inference server: those that can be deployed as files are (artifact/), others are compiled in
this process, where PyTorch does the steps that have no native routine."""
from __future__ import annotations

import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyshape
from anyshape.artifact.load import load
from anyshape.base.errors import Unsupported
from anyshape.tools.serve.protocol import DATATYPES, Array, TensorSpec
from anyshape.tools.serve.served import Servable, Served


class CompiledModel:
    """A compiled ONNX model. Requests are calls of their own, one at a time, whose bytes are not known before.

    Raises:
        Unsupported: it takes or gives what the protocol has no word for.
    """

    platform, batch = "anyshape", None

    def __init__(self, name: str, compiled: Any) -> None:
        self.name, self.compiled = name, compiled
        self.inputs, self.outputs = _specs(compiled, compiled.inputs), _specs(compiled, compiled.outputs)
        self.lock = threading.Lock()

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """See `Servable`."""
        with self.lock:
            found = self.compiled(*[array if array.flags.writeable else array.copy() for array in arrays])
        return list(found) if isinstance(found, tuple) else [found]

    def bytes_of(self, arrays: Sequence[Array]) -> int:
        """Not known."""
        return 0

    def close(self) -> None:
        """Nothing is to be given back before the process ends."""


def served_onnx(name: str, path: str, threads: int) -> Servable:
    """A model of a file `path`."""
    compiled = anyshape.compile_onnx(path)
    with tempfile.TemporaryDirectory(prefix="anyshape-serve-") as folder:
        try:
            file = anyshape.save(compiled, Path(folder) / "model.any")
        except Unsupported:
            return CompiledModel(name, compiled)
        return Served(name, load(file, True, threads))  # it is mapped, and stays so


def _specs(compiled: Any, values: Sequence[Any]) -> list[TensorSpec]:
    found = []
    for one in values:
        if one.shape is None or one.dtype not in DATATYPES:
            raise Unsupported(f"{compiled.name} cannot be served", where=one.name,
                              why=f"the model says {one.dtype or 'no dtype'} and "
                                  f"{'no rank' if one.shape is None else 'a rank'} of it",
                              do="export it with tensors of numbers, whose ranks are known")
        found.append(TensorSpec(one.name, one.dtype, tuple(n if isinstance(n, int) else -1 for n in one.shape)))
    return found
