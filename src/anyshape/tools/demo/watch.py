"""The peak of each step under a limit in bytes: predicted by the compiler, and counted by torch's allocator."""

from __future__ import annotations

from anyshape.frontend.diagnostics.memory import limit_at
from anyshape.frontend.train_step_api import TrainStep
from anyshape.runtime.budget.memory_budget import MemoryBudget
from anyshape.runtime.specialize.saved_policy import SAVE_ALL


class PeakWatch:
    """Predicts the peaks of a compiled train step, which takes tokens and targets."""

    def __init__(self, step: TrainStep) -> None:
        self.step = step

    def limits(self) -> list[tuple[MemoryBudget, dict[str, str]]]:
        """The limits of the steps compiled so far, each with the names of its symbols: old to new."""
        compilation = self.step.compilation
        found = []
        for program in compilation.programs:
            limit = getattr(getattr(program, "executable", None), "limit", None)
            if limit is not None and limit.backward is not None:
                found.append((limit, compilation.names_of(program.name)))
        return found

    def peak(self, rows: int, length: int, bytes_: int = 0) -> tuple[int, int, int]:
        """Bytes of a step at this shape with everything kept, bytes under the limit of `bytes_` (0: the program's), and
        how many values are then computed again; zeros while no program serves it.

        Raises:
            LimitError: it cannot be done within the limit.
        """
        given = {f"arguments_{place}_{dim}": size for place in (0, 1) for dim, size in enumerate((rows, length))}
        for limit, names in self.limits():
            if all(names.get(old, old) in given for old in limit.program.layout.symbols):
                values = {old: given[names[old]] for old in limit.program.layout.symbols}
                limit = limit_at(limit, values)
                if bytes_:
                    limit = limit.apart(bytes_)
                policy = limit.choose(values)
                return limit.needed(values, SAVE_ALL), limit.needed(values, policy), len(policy.dropped)
        return 0, 0, 0
