"""`anyshape repro FILE`: runs a graph that failed to compile again, natively and by the reference interpreter."""
from __future__ import annotations

import argparse
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from anyshape.base.errors import AnyShapeError, ParseError
from anyshape.base.files import read_text
from anyshape.compiler.driver import compile_graph
from anyshape.frontend.diagnostics.repro import MARK, Repro, likely_sizes, read, versions
from anyshape.frontend.programs.differential_check import difference
from anyshape.ir.graph import Graph
from anyshape.ir.parse import parse
from anyshape.ir.types import TensorType, kind_of
from anyshape.runtime.memory.tape import Tape
from anyshape.runtime.torch_ops.reference_interpreter import interpret
from anyshape.sym.expr import evaluate
from anyshape.torch_compat.dtypes import TORCH_DTYPES


@dataclass(frozen=True, slots=True)
class ReproOutcome:
    """How a run ended. problem: empty when both sides agree. stage: "reading", "reference", "compiling", "running" or
    "comparing", the last one that began. detail: a traceback, if there is one."""

    stage: str
    problem: str
    detail: str = ""
    compared: int = 0


def run(repro: Repro, seed: int = 0) -> ReproOutcome:
    """Compiles and runs the graph on random inputs at the sizes of the trace, and compares with the interpreter."""
    if repro.graph is None:
        return ReproOutcome("reading", "the file holds no graph: the failure came before there was one")
    graph = repro.graph.replace(restored=())  # what came from a tape is an input like others here
    sizes = {**likely_sizes(graph), **repro.sizes}
    given = random_inputs(graph, sizes, seed)
    try:
        stage = "reference"
        outputs, saved, _ = interpret(graph, [_clone(value) for value in given])
        stage = "compiling"
        compiled = compile_graph(graph, repro.config)
        stage = "running"
        found = compiled.executable([_clone(value) for value in given])
    except Exception as error:  # the border of a tool: the error is what it was asked for
        return ReproOutcome(stage, f"{type(error).__name__}: {error}", traceback.format_exc())
    if graph.saved:
        tape = found.pop()
        assert isinstance(tape, Tape)
        found = [*found, *tape.values]
        outputs = [*outputs, *saved]
    problems = [f"result {i}: {problem}" for i, (a, b) in enumerate(zip(found, outputs, strict=True))
                if (problem := difference(a, b))]
    return ReproOutcome("comparing", "\n".join(problems), compared=len(outputs))


def random_inputs(graph: Graph, sizes: dict[str, int], seed: int = 0) -> list[Any]:
    """One random tensor or size per input, with the declared strides: floats normal, whole numbers 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    inputs: list[Any] = []
    for value in graph.inputs:
        if not isinstance(value.type, TensorType):
            inputs.append(sizes[value.name])
            continue
        kind = value.type
        shape = [evaluate(size, sizes) for size in kind.shape]
        strides = [evaluate(stride, sizes) for stride in kind.layout()]
        dtype = TORCH_DTYPES[kind.dtype]
        if kind_of(kind.dtype) in ("float", "complex"):
            numbers = torch.randn(shape, generator=generator).to(dtype)
        else:
            numbers = torch.randint(0, 2, shape, generator=generator).to(dtype)
        stride_order = all(stride > 0 for stride, size in zip(strides, shape, strict=True) if size > 1)
        tensor = torch.empty_strided(shape, strides, dtype=dtype) if stride_order else torch.empty(shape, dtype=dtype)
        inputs.append(tensor.copy_(numbers))
    return inputs


def _clone(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value)


def load(path: Path) -> Repro:
    """The repro file at `path`; a file with a graph alone will do too.

    Raises:
        ConfigError: there is no such file. ParseError: it holds no graph.
    """
    text = read_text(path, "give the path that the warning named")
    try:
        if text.startswith(MARK):
            return read(text)
        from anyshape.base.config import Config
        return Repro("", "", Config.make(), {}, {}, (), parse(text))
    except ParseError as error:
        raise ParseError(f"{path}: {error.what}", where=error.where, why=error.why, do=error.do) from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `main` reads."""
    parser.add_argument("file", type=Path, help="a file that a warning named, or the text form of a graph")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs (default 0)")
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")


def main(arguments: argparse.Namespace) -> int:
    """Runs the command: 0 when both sides agree, 1 when they differ or a side fails.

    Raises:
        AnyShapeError: the file cannot be read.
    """
    repro = load(arguments.file)
    if repro.error:
        print(f"then: {repro.error}")
        print(f"      in {repro.stage}")
    now = versions()
    changed = [f"{name} {then} -> {now.get(name, 'none')}" for name, then in repro.versions.items()
               if now.get(name) != then]
    if changed:
        print(f"      other versions now: {', '.join(changed)}")
    verdict = run(repro, arguments.seed)
    if not verdict.problem:
        print(f"now:  compiled and run; {verdict.compared} results agree with the reference interpreter")
        return 0
    print(f"now:  {verdict.stage}: {verdict.problem}")
    if verdict.detail and arguments.traceback:
        print(verdict.detail)
    elif repro.graph is None and arguments.traceback:
        print("\n".join(repro.traceback))
    return 1


__all__ = ["AnyShapeError", "ReproOutcome", "add_arguments", "load", "main", "random_inputs", "run"]
