"""Differential testing (`check=2`): every run of a compiled program is compared with the reference interpreter on the
graph as captured."""
from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from anyshape.base.errors import VerifyError
from anyshape.frontend.programs.session import Boxed, ProgramRequest
from anyshape.ir.graph import Graph
from anyshape.runtime.memory.tape import Tape
from anyshape.runtime.torch_ops.reference_interpreter import interpret
from anyshape.torch_compat.versions.random_state import RandomState

# most that a result may differ, relative to the largest number of the reference
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class DifferenceWarning(UserWarning):
    """A compiled program gave another result than the reference; the reference's was used."""


class CheckedProgram:
    """A program that runs twice, natively and by the interpreter, and gives the reference's numbers where they differ.

    Args:
        program: called with one list of inputs, as AOTAutograd does.
        graph: before any pass.
        constants: tensors for the last inputs of the graph, which the program adds by itself.

    Raises (when called): VerifyError: the results differ, and `config.strict` is set.
    """

    _boxed_call = True

    def __init__(self, program: Boxed, graph: Graph, constants: Sequence[torch.Tensor],
                 request: ProgramRequest) -> None:
        self.program = program
        self.graph = graph
        self.constants = list(constants)
        self.request = request

    def __call__(self, inputs: list[Any]) -> list[Any]:
        random = RandomState.now(self._arguments(inputs))
        wanted, saved, written = self._reference(inputs)
        random.restore()
        given = self._arguments(inputs)
        found = self.program(inputs)
        pairs = [(f"output {i}", a, b) for i, (a, b) in enumerate(zip(found, wanted, strict=False))]
        if saved:
            tape = found[-1]
            assert isinstance(tape, Tape)
            pairs += [(f"saved value {i}", a, b) for i, (a, b) in enumerate(zip(tape.values, saved, strict=True))]
        names = [value.name for value in self.graph.inputs]
        pairs += [(f"input {name}", given[names.index(name)], value) for name, value in written.items()]
        problems = [f"{name}: {problem}" for name, a, b in pairs if (problem := difference(a, b))]
        if problems:
            self._report(problems)
            for _, a, b in pairs:
                if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.shape == b.shape:
                    with torch.no_grad():
                        a.detach().copy_(b)
        return found

    def _arguments(self, inputs: Sequence[Any]) -> list[Any]:
        """One per input of the graph: those from the tape in their places, constants last."""
        graph = self.graph
        rest = list(inputs)
        values = rest.pop(0).open() if graph.restored else []
        places = {value.name: index for index, value in enumerate(graph.restored)}
        given = iter([*rest, *self.constants])
        return [values[places[value.name]] if value.name in places else next(given) for value in graph.inputs]

    def _reference(self, inputs: Sequence[Any]) -> tuple[list[Any], list[Any], dict[str, Any]]:
        """Outputs, saved values, and the inputs that are written by name; on copies, so nothing is changed."""
        copies = [_copied(value) for value in self._arguments(inputs)]
        outputs, saved, _ = interpret(self.graph, copies)
        names = [value.name for value in self.graph.inputs]
        written = {target.name: copies[names.index(target.name)] for target, _ in self.graph.writes}
        return outputs, saved, written

    def _report(self, problems: list[str]) -> None:
        request = self.request
        why = "; ".join(problems)
        error = VerifyError(f"program {request.name} gives other results than the reference interpreter", why=why,
                            do="report it with the text that dump= writes: a bug of AnyShape")
        if request.config.strict:
            raise error
        request.compilation.record(request.name, "check", why)
        warnings.warn(str(error), DifferenceWarning, stacklevel=2)


def _copied(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return copy.copy_(value) if 0 not in value.stride() else value.clone()


def difference(found: Any, wanted: Any) -> str:
    """How `found` differs from `wanted`; empty when it does not, up to rounding."""
    if not isinstance(wanted, torch.Tensor) or not isinstance(found, torch.Tensor):
        same = isinstance(found, torch.Tensor) == isinstance(wanted, torch.Tensor) and found == wanted
        return "" if same else f"{found!r} instead of {wanted!r}"
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"{found.dtype} {list(found.shape)} instead of {wanted.dtype} {list(wanted.shape)}"
    if wanted.numel() == 0:
        return ""
    found, wanted = found.detach(), wanted.detach()
    if not (wanted.dtype.is_floating_point or wanted.dtype.is_complex):
        wrong = int((found != wanted).sum())
        return f"{wrong} of {wanted.numel()} elements differ" if wrong else ""
    wide = torch.complex128 if wanted.dtype.is_complex else torch.float64
    a, b = found.to(wide), wanted.to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    finite = b[torch.isfinite(b)].abs()
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    error = torch.where(same, torch.zeros((), dtype=torch.float64), (a - b).abs())
    worst = float(error.nan_to_num(nan=float("inf"), posinf=float("inf")).max())
    if worst <= TOLERANCE.get(wanted.dtype, 2e-4) * scale:
        return ""
    return f"differs by up to {worst:.3g} (largest number {scale:.3g})"
