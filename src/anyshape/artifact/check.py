"""Inspection of a deployed file: everything that can be said of it without compiling or running anything in it."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from anyshape.artifact.format import safetensors
from anyshape.artifact.format.container import VECTORS, WEIGHTS, Container, member, refused
from anyshape.artifact.format.elf import check_object
from anyshape.artifact.format.text_limits import parse_graph, parse_kernels, parse_plan
from anyshape.artifact.load import check_digests, read_head, special_text
from anyshape.artifact.native_code import reason_against
from anyshape.artifact.requirements import VERSION, WITH_NAMES, WITH_SPECIAL, WITH_VECTORS
from anyshape.base.errors import printable
from anyshape.base.units import bytes_text
from anyshape.ir.graph import Graph
from anyshape.ir.types import TensorType
from anyshape.kernel.loop_ir.program import LoopProgram
from anyshape.plan.ir.program import Plan
from anyshape.runtime.numpy_ops import draws
from anyshape.runtime.specialize.shape_binding import renamed


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What was found. lines: for people. graph: the program."""

    path: Path
    graph: Graph
    lines: Sequence[str]

    def __str__(self) -> str:
        return printable("\n".join(self.lines))


def check(path: str | Path) -> CheckReport:
    """Reads all of a file: sizes, digests, texts, weights, objects.

    Raises:
        ArtifactError: something of it is not as `anyshape.save` writes it.
    """
    container = Container(Path(path))
    try:
        head = read_head(container)
        check_digests(container, head, True)
        programs = [_program(container, number, one.needed) for number, one in enumerate(head.programs)]
        graph, first = programs[0][0], head.programs[0]
        weights = safetensors.decode(container.part(WEIGHTS), f"{path}: {WEIGHTS}")
        if {name for program in head.programs for _, name in program.weights} != weights.keys():
            raise refused(str(path), "there are weights without a place, or places without weights")
        for name in container.places:
            if name.endswith(".o"):
                check_object(name, container.data(name))
        bytes_ = sum(array.nbytes for _, array in weights.values())
        names = first.signature.names
        version = WITH_SPECIAL if len(programs) > 1 else WITH_NAMES if first.signature.gives else \
            WITH_VECTORS if VECTORS in container.places else VERSION
        lines = [f"{path}: version {version}, made with {head.made_with}"]
        for one in first.signature.inputs:
            kind = graph.inputs[one.position].type if 0 <= one.position < len(graph.inputs) else None
            shown = renamed(str(kind), names) if isinstance(kind, TensorType) else one.kind
            lines.append(f"  takes    {one.name}: {shown if one.kind != 'fixed' else repr(one.value)}")
        for name, low, high in graph.facts.ranges:
            lines.append(f"  sizes    {low} <= {names.get(name, name)}" + ("" if high is None else f" <= {high}"))
        for (own, plan, kernels), said in zip(programs, head.programs, strict=True):
            sizes = f", where {special_text(first.signature, said.sizes)}" if said.sizes else ""
            lines.append(f"  program  {len(own.nodes)} equations, {len(kernels)} kernels, "
                         f"{len(plan.steps)} steps{sizes}")
        drawn = {str(node.attr("target")): None for program, _, _ in programs for node in program.nodes
                 if node.op == "extern" and draws(str(node.attr("target")))}
        if drawn:
            lines.append(f"  draws    random numbers: {', '.join(drawn)}")
        lines.append(f"  weights  {len(weights)} tensors, {bytes_text(bytes_)}")
        if VECTORS in container.places:
            vectors = safetensors.decode(container.part(VECTORS), f"{path}: {VECTORS}")
            lines.append(f"  tests    {len({name.partition('.')[0] for name in vectors})} calls with their results")
            del vectors
        reason = reason_against(container)
        lines.append(f"  native   {reason or 'for this machine'}")
        return CheckReport(Path(path), graph, lines)
    finally:
        container.close()


def _program(container: Container, number: int, needed: Sequence[str]) -> tuple[Graph, Plan, Sequence[LoopProgram]]:
    """The texts of a program of the file."""
    graph, plan, kernels = (member(text, number) for text in ("graph.txt", "plan.txt", "kernels.txt"))
    found, _ = parse_graph(container.text(graph), needed, f"{container.path}: {graph}")
    return (found, parse_plan(container.text(plan), f"{container.path}: {plan}"),
            parse_kernels(container.text(kernels), f"{container.path}: {kernels}"))
