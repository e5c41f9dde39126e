"""A program of a deployed file: a plan, its machine code and the file's weights, called with one argument per input."""
from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from anyshape.artifact import arrays
from anyshape.artifact.format.container import refused
from anyshape.artifact.format.signature import Signature, most_leaf
from anyshape.artifact.judged import Judged
from anyshape.artifact.requirements import check
from anyshape.backend.interface import PythonSteps
from anyshape.backend.loaded_code import LoadedKernel
from anyshape.base.errors import InputError
from anyshape.ir.types import TensorType
from anyshape.plan.ir.liveness import peak_bytes
from anyshape.plan.ir.program import Plan, Window
from anyshape.runtime.call.program import Program, written_inputs
from anyshape.runtime.context.process_context import Context
from anyshape.runtime.driver.numpy_driver import NumpyDriver
from anyshape.runtime.specialize.specialization import Specialization
from anyshape.sym.expr import evaluate

Weights = Mapping[str, tuple[str, "np.ndarray[Any, Any]"]]


class LoadedProgram:
    """One program of a file.

    Args:
        target: what its code was made for.
        weights: of the file, by name.
        places: (position among the plan's inputs, name of a weight).
        where: the file, in errors.

    Raises:
        ArtifactError: plan, signature and weights do not fit each other.
    """

    def __init__(self, target: Any, plan: Plan, kernels: Sequence[LoadedKernel], signature: Signature,
                 places: Sequence[tuple[int, str]], weights: Weights, context: Context, where: str) -> None:
        check(plan, where, {position for position, _ in places})
        self.plan, self.context = plan, context
        bound = _bound(plan, places, weights, where)
        self.inputs = [(number, one, plan.inputs[one.position] if one.position >= 0 else None)
                       for number, one in enumerate(signature.inputs)]
        self.fixed = [(number, one.value) for number, one, _ in self.inputs if one.kind == "fixed"]
        self.closed = frozenset(number for number, _ in self.fixed)
        written = written_inputs(plan)
        self.order = _order(plan, signature, bound, where)
        self.written = [place for place, number in enumerate(self.order)
                        if signature.inputs[number].position in written]
        self.kinds = {number: kind.dtype if isinstance(kind, TensorType) else "" for number, _, kind in self.inputs}
        self.dtypes = [entry.type.dtype if isinstance(entry, Window) else "" for entry in plan.outputs]
        if most_leaf(signature.results) >= len(plan.outputs):
            raise refused(where, "a result of the signature is no output of the program")
        specializer = Judged(plan, target.runner(plan, kernels), target.native, names=signature.names)
        self.program = Program(specializer, kernels, context, steps=_host_steps, bound=bound)
        self.needs: weakref.WeakKeyDictionary[Specialization, int] = weakref.WeakKeyDictionary()  # see `bytes_of`
        self.names = [f"the argument {one.name}" for one in signature.inputs]

    def run(self, flat: Sequence[Any]) -> list[Any]:
        """The program's outputs, as arrays of numpy (of bf16 the bits) and numbers, for one argument per input of the
        signature. Errors as of a call of the file."""
        return self.program(self._given(flat))

    def bytes_of(self, flat: Sequence[Any]) -> int:
        """Bytes of memory that such a call takes; see `LoadedModel.bytes_of`."""
        record = self.program.specialization(self._given(flat))
        found = self.needs.get(record)
        if found is None:
            found = self.needs[record] = self._bytes(record)
        return found

    def _bytes(self, record: Specialization) -> int:
        results = sum((1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))) * dtype.itemsize
                      for (sizes, strides), dtype in zip(record.allocations, self.program.dtypes, strict=True)
                      if 0 not in sizes)
        made = [(evaluate(b.bytes, record.values), b.first, b.last) for b in self.plan.buffers if b.is_external]
        arena = self.context.temporary.block_bytes(record.arena + record.scratch * self.program.driver.threads())
        return results + arena + peak_bytes(made, len(self.plan.steps))

    def _given(self, flat: Sequence[Any]) -> list[Any]:
        """The program's arguments."""
        for number, value in self.fixed:
            if flat[number] != value or type(flat[number]) is not type(value):
                raise InputError(f"{self.names[number]} is {flat[number]!r:.80}", do="pass that value",
                                 why=f"the program was made for {value!r}")
        given = [0 if number in self.closed else arrays.incoming(flat[number], self.names[number], self.kinds[number])
                 for number in self.order]
        for place in self.written:
            number = self.order[place]
            if isinstance(given[place], np.ndarray) and not arrays.takes_writes(flat[number], given[place]):
                raise InputError(f"{self.names[number]} cannot be written to", do="pass a copy of it",
                                 why="the program writes into it, as the module does that was saved")
        return given


def _host_steps(*call: Any) -> PythonSteps:
    """Does the steps of a call that are numpy's."""
    from anyshape.artifact.host_steps import HostSteps  # operators by numpy, which most programs do not have
    return HostSteps(*call)


def _bound(plan: Plan, places: Sequence[tuple[int, str]], weights: Weights,
           where: str) -> dict[int, np.ndarray[Any, Any]]:
    """The weights by position, each as the plan has it."""
    found: dict[int, np.ndarray[Any, Any]] = {}
    for position, name in places:
        kind = plan.inputs[position] if 0 <= position < len(plan.inputs) else None
        dtype, array = weights[name]
        if not isinstance(kind, TensorType) or kind.dtype != dtype or kind.shape != array.shape or position in found:
            raise refused(where, f"the weights {name[:80]} are {dtype}{list(array.shape)}; the program takes {kind}")
        strides = kind.layout()
        if not all(isinstance(step, int) for step in strides):
            raise refused(where, f"the strides of the weights {name[:80]} are no numbers")
        found[position] = NumpyDriver().restrided(array, strides)  # type: ignore[arg-type]
    return found


def _order(plan: Plan, signature: Signature, bound: Mapping[int, Any], where: str) -> list[int]:
    """The numbers of the user's inputs in the order of the plan's."""
    by_position = {one.position: number for number, one in enumerate(signature.inputs) if one.position >= 0}
    taken = [position for position in range(len(plan.inputs)) if position not in bound]
    used = [one for one in signature.inputs if one.position >= 0]
    if len(used) != len(by_position) or sorted(by_position) != taken:
        raise refused(where, "not every input of the program is an argument or has weights")
    for position, number in by_position.items():
        entry, kind = plan.inputs[position], signature.inputs[number].kind
        scalar = not isinstance(entry, TensorType) or not entry.shape  # as fixed values are, which nothing reads
        if not (scalar if kind == "fixed" else isinstance(entry, TensorType) is (kind == "array")):
            raise refused(where, f"the argument {signature.inputs[number].name[:80]} is of another kind")
    return [by_position[position] for position in taken]

