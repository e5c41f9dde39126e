"""Counts what one step launches: kernels, products of a library, single calls of PyTorch, copies. Never while timing.

Ours are counted from what ran: the clock of `backend/cpu/step_timer.py` has a mark for every step of the host that was
reached. Kernels that follow each other are one such step, for which threads are called together once, and so are a
product and the kernels that read its result, which counts as a product (backend/cpu/routines/parallel_region.py).
Inductor's are counted in the Python that it generates, whose lines run one after another: what calls a kernel of its
own or an operator of PyTorch is one; allocations, views of memory and checks are none. Its kernels too are all loops
between two calls, in one function that calls threads together once.
"""
from __future__ import annotations

import ast
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch._inductor.output_code import CompiledFxGraph

from anyshape.frontend.programs.graph_partition import SplitProgram
from anyshape.frontend.programs.plain_program import PlainProgram
from anyshape.plan.ir.program import CopyStep, ExternStep, KernelStep, LibraryStep, Plan, Step, TiledGemmStep, parts_of
from anyshape.runtime.context.profiling import recorded

# what generated code calls that computes nothing
NO_WORK = ("assert_size_stride", "assert_alignment", "empty", "reinterpret", "alloc", "as_strided", "return_if",
           "view", "alias", "set_", "item", "dtype", "device", "inductor_ops", "_assert")
OURS = ("anyshape", "anyshape-single")
INDUCTORS = ("inductor", "inductor-padded")
BODIES = ("call", "partition_")  # functions of generated code that run kernels
# names that operators of PyTorch are called by there
OPERATORS = ("extern_kernels", "aten", "torch.ops", "fallback_kernel")


@dataclass(frozen=True, slots=True)
class Launches:
    """kernels: generated ones. products: matrix products and attention that a library, or ours, does as one call.
    calls: of single operators of PyTorch. copies: of memory."""

    kernels: int = 0
    products: int = 0
    calls: int = 0
    copies: int = 0

    def __add__(self, other: Launches) -> Launches:
        return Launches(self.kernels + other.kernels, self.products + other.products, self.calls + other.calls,
                        self.copies + other.copies)

    def total(self) -> int:
        return self.kernels + self.products + self.calls + self.copies


KINDS: dict[type, Launches] = {KernelStep: Launches(kernels=1), LibraryStep: Launches(products=1),
                               TiledGemmStep: Launches(products=1), ExternStep: Launches(calls=1),
                               CopyStep: Launches(copies=1)}


def of_step(backend: str, compiled: Any, step: Callable[[], object], apart: bool = False) -> dict[str, int] | None:
    """What one step launches, by kind, in all programs of a backend together; None where nothing can be counted. The
    step is run once before, so that it compiles nothing while it is counted. apart: every kernel of ours
    counts, also those that run as one step with others, or with a product."""
    if backend not in (*OURS, *INDUCTORS):
        return None
    step()
    with counted(compiled.programs, apart) if backend in OURS else counted_inductor() as seen:
        step()
    return asdict(sum(seen.values(), Launches()))


@contextlib.contextmanager
def counted(programs: Sequence[Any], apart: bool = False) -> Iterator[dict[str, Launches]]:
    """Counts what our programs run meanwhile; at the end there is name of program -> launches of all its runs. What a
    program leaves to PyTorch as a whole, or between its parts, counts as calls. apart: as in `of_step`."""
    seen: dict[str, Launches] = {}
    executables = [(program.name, program.executable) for program in programs]  # several may have one name

    def add(name: str, found: Launches) -> None:
        seen[name] = seen.get(name, Launches()) + found

    with recorded() as runs, \
            _called(PlainProgram, lambda program: add(program.name, Launches(calls=operators(program.gm)))), \
            _called(SplitProgram, lambda program: add(program.name, Launches(calls=len(program.calls)))):
        try:
            yield seen
        finally:
            for run, (name, executable) in itertools.product(runs, executables):
                if run.program is executable.ran(run.record):
                    for number, _ in run.steps:
                        for step in _steps(run.program.plan, number, apart):
                            add(name, KINDS.get(type(step), Launches()))


def _steps(plan: Plan, number: int, apart: bool) -> Sequence[Step]:
    """The step of this number; apart: all kernels that run as one with it."""
    end = number + 1
    for first, last in plan.together:
        if apart and first <= number <= last:
            end = last + 1
    found = [step for step in plan.steps[number:end] if step is plan.steps[number] or isinstance(step, KernelStep)]
    return [part for step in found for part in parts_of(step)] if apart else found


@contextlib.contextmanager
def counted_inductor() -> Iterator[dict[str, Launches]]:
    """Counts what Inductor's programs run meanwhile: key of program -> launches of all its runs."""
    seen: dict[str, Launches] = {}

    def add(program: Any) -> None:
        name = str(getattr(program, "_fx_graph_cache_key", "") or id(program))
        seen[name] = seen.get(name, Launches()) + in_wrapper(program.source_code)

    with _called(CompiledFxGraph, add):
        yield seen


@contextlib.contextmanager
def _called(kind: type, tell: Any) -> Iterator[None]:
    """Tells of every call of an object of a class before it is made."""
    own = kind.__call__

    @functools.wraps(own)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        tell(self)
        return own(self, *arguments, **keywords)

    kind.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.__call__ = own  # type: ignore[method-assign]


def operators(gm: Any) -> int:
    """Operators in a graph that is run one by one."""
    return sum(node.op == "call_function" and hasattr(node.target, "overloadpacket") for node in gm.graph.nodes)


@functools.cache
def in_wrapper(source: str) -> Launches:
    """What the generated Python of one program launches in a run."""
    total = Launches()
    tree = ast.parse(source)
    kernels = {target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets
               if isinstance(target, ast.Name) and ast.unparse(node.value).startswith("async_compile.")}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name.startswith(BODIES):
            for node in ast.walk(function):
                if isinstance(node, ast.Call):
                    total += _launched(ast.unparse(node.func), kernels)
    return total


def _launched(name: str, kernels: set[str]) -> Launches:
    """What a call of this name launches."""
    if name in kernels:
        return Launches(kernels=1)
    operator = name.removesuffix(".run").split(".")
    if not name.startswith(OPERATORS) or any(word.startswith(NO_WORK) for word in operator[1:]):
        return Launches()
    return Launches(copies=1) if "copy_" in operator else Launches(products=1) if _is_product(operator) \
        else Launches(calls=1)


def _is_product(operator: list[str]) -> bool:
    return any(word in ("mm", "addmm", "bmm", "baddbmm") or "attention" in word or "linear_pointwise" in word
               for word in operator)
