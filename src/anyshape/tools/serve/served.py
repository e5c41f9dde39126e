"""Models behind the inference server: deployed programs as tensors by name, and the batches that calls may share."""
from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from anyshape.artifact.format.text_limits import parse_graph
from anyshape.artifact.load import LoadedModel
from anyshape.base.errors import Unsupported, VerifyError
from anyshape.dist.data_parallel import ParallelSize, parallel_size
from anyshape.ir.types import TensorType
from anyshape.plan.ir.program import Window
from anyshape.tools.serve.protocol import DATATYPES, Array, TensorSpec

MOST_SAME = 1024  # bytes of an input without rows up to which requests are looked at for the same one


class Servable(Protocol):
    """What the server needs of a model. batch: None where requests must not share a call."""

    @property
    def name(self) -> str: ...
    @property
    def platform(self) -> str: ...
    @property
    def inputs(self) -> Sequence[TensorSpec]: ...
    @property
    def outputs(self) -> Sequence[TensorSpec]: ...
    @property
    def batch(self) -> Rows | None: ...

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """One call; called by several threads at once."""

    def bytes_of(self, arrays: Sequence[Array]) -> int:
        """Bytes that such a call takes, results included, arguments and weights not."""

    def close(self) -> None:
        """Gives everything back."""


class Rows:
    """Concatenation of requests along a size whose rows are independent, and splitting of what comes out.

    inputs, outputs: the dim of each; None: a tensor that is the same for all rows. least, most: of the size. Where
    there are fewer rows, as torch.export's programs begin at 2, rows are repeated, and what comes of them is dropped.
    """

    def __init__(self, inputs: Sequence[int | None], outputs: Sequence[int | None], least: int,
                 most: int | None) -> None:
        self.inputs, self.outputs = inputs, outputs
        self.least, self.most = least, most

    def key(self, arrays: Sequence[Array]) -> tuple[Any, int]:
        """What requests that may share a call have in common, and the rows of this one; None: it shares none."""
        found: list[Any] = []
        rows = set()
        for array, dim in zip(arrays, self.inputs, strict=True):
            if dim is None:
                if array.nbytes > MOST_SAME:
                    return None, 1
                found.append((array.shape, array.tobytes()))
            else:
                rows.add(array.shape[dim])
                found.append((*array.shape[:dim], *array.shape[dim + 1:]))
        if len(rows) != 1:
            return None, 1
        (count,) = rows
        fits = (count > 0 or self.least == 0) and (self.most is None or count <= self.most)
        return (tuple(found) if fits else None), count

    def joined(self, requests: Sequence[Sequence[Array]]) -> list[Array]:
        """The arguments of one call for all requests."""
        found = [each[0] if dim is None else each[0] if len(each) == 1 else np.concatenate(each, dim)
                 for dim, each in zip(self.inputs, zip(*requests, strict=True), strict=True)]
        rows = next(array.shape[dim] for array, dim in zip(found, self.inputs, strict=True) if dim is not None)
        if rows >= self.least:
            return found
        chosen = np.arange(self.least) % rows
        return [array if dim is None else array.take(chosen, dim)
                for array, dim in zip(found, self.inputs, strict=True)]

    def split(self, results: Sequence[Array], rows: Sequence[int]) -> list[list[Array]]:
        """The results of each request, as views."""
        if len(rows) == 1 and rows[0] >= self.least:
            return [list(results)]
        found: list[list[Array]] = [[] for _ in rows]
        ends = np.cumsum(rows)
        total = max(int(ends[-1]), self.least)
        for result, dim in zip(results, self.outputs, strict=True):
            if dim is None:
                parts = [result] * len(rows)
            else:
                if total == 0 or result.shape[dim] % total:
                    raise VerifyError(f"a result of {total} rows has {result.shape[dim]}", do="report it")
                parts = np.split(result, ends * (result.shape[dim] // total), dim)[:-1]
            for own, part in zip(found, parts, strict=True):
                own.append(part)
        return found


class Hosted:
    """The models of a server by name. One can be replaced: requests that have the old one are done by it, and when the
    last of them has been answered it is closed. Thread-safe."""

    def __init__(self, models: Mapping[str, Servable]) -> None:
        self.models = dict(models)
        self.users: Counter[Servable] = Counter()
        self.lock = threading.Lock()

    def take(self, name: str) -> Servable:
        """The model of a request, until it is given back."""
        with self.lock:
            model = self.models[name]
            self.users[model] += 1
            return model

    def give(self, model: Servable) -> None:
        """Gives a model back."""
        with self.lock:
            self.users[model] -= 1
            done = self.users[model] == 0 and self.models[model.name] is not model
            if done:
                del self.users[model]
        if done:
            model.close()

    def replace(self, model: Servable) -> None:
        """Requests that come from now on are done by this model, in the place of the one with its name."""
        with self.lock:
            old, self.models[model.name] = self.models[model.name], model
            done = not self.users[old]
            if done:
                del self.users[old]
        if done:
            old.close()

    def close(self) -> None:
        """Closes them all; no request has one."""
        for model in self.models.values():
            model.close()


class Served:
    """A loaded program.

    Raises:
        Unsupported: it takes or gives what the protocol has no word for.
    """

    platform = "anyshape"

    def __init__(self, name: str, model: LoadedModel) -> None:
        self.name, self.model = name, model
        self.fixed = [one.value for one in model.signature.inputs]
        self.open = [(number, one) for number, one in enumerate(model.signature.inputs) if one.kind != "fixed"]
        plan = model.plan
        self.inputs = [TensorSpec(one.name, *_kind(plan.inputs[one.position] if one.kind == "array" else None))
                       for _, one in self.open]
        leaves = [(path, leaf) for path, leaf in model.signature.result_names()
                  if plan.outputs[leaf] is not None]
        self.leaves = [leaf for _, leaf in leaves]
        kinds = [plan.outputs[leaf] for leaf in self.leaves]
        self.outputs = [TensorSpec(path, *_kind(kind.type if isinstance(kind, Window) else None))
                        for (path, _), kind in zip(leaves, kinds, strict=True)]
        unknown = [one.name for one in (*self.inputs, *self.outputs) if one.dtype not in DATATYPES]
        if unknown:
            raise Unsupported(f"{model.path} cannot be served", where=", ".join(unknown),
                              why="the protocol has no complex numbers", do="pass real and imaginary parts")
        self.batch = self._rows(parallel_size(_graph(model)))

    def _rows(self, size: ParallelSize | None) -> Rows | None:
        if size is None or any(one.kind == "size" for _, one in self.open):
            return None
        return Rows([size.inputs[one.position] for _, one in self.open],
                    [size.outputs[leaf] for leaf in self.leaves], size.least, size.most)

    def _flat(self, arrays: Sequence[Array]) -> list[Any]:
        flat: list[Any] = list(self.fixed)
        for (number, one), array in zip(self.open, arrays, strict=True):
            flat[number] = array if one.kind == "array" else int(array[0])
        return flat

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """See `Servable`."""
        found = self.model.run(self._flat(arrays))
        results = [found[leaf] for leaf in self.leaves]
        return [one if isinstance(one, np.ndarray) else np.asarray([one]) for one in results]

    def bytes_of(self, arrays: Sequence[Array]) -> int:
        """See `Servable`."""
        return self.model.bytes_of(self._flat(arrays))

    def close(self) -> None:
        """See `Servable`."""
        self.model.close()


def _kind(kind: object) -> tuple[str, tuple[int, ...]]:
    """Dtype and sizes of a tensor; a whole number is one i64."""
    if not isinstance(kind, TensorType):
        return "i64", (1,)
    return kind.dtype, tuple(n if isinstance(n, int) else -1 for n in kind.shape)


def _graph(model: LoadedModel) -> Any:
    """The graph that the plan was made of: whoever trusts the plan trusts it, too."""
    return parse_graph(model.container.text("graph.txt"), (), f"{model.path}: graph.txt")[0]


def name_of(path: str) -> str:
    """What a file's model is called when nobody says it."""
    return Path(path).name.removesuffix(".any").removesuffix(".onnx")
