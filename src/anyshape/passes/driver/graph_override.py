"""A graph that a person has edited, in place of the computed one: it is read, and must fit what stands around it.

    computed                            edited
      y = div(x, 2.0)  f32[n]             y = mul(x, 0.5)  f32[n]
      return y                            return y

Inputs, facts, what comes from the tape, and the types and memory of what is returned, saved and written stay: callers
and the other half of a forward and backward pair rely on them. Everything between is the person's. Whether it computes
the same is for check=2 to say, which compares every run with the graph as captured.
"""
from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import NoReturn

from anyshape.base.errors import ParseError, VerifyError
from anyshape.ir.graph import Graph, Operand, Value
from anyshape.ir.ir_dumps import Edited
from anyshape.ir.parse import parse_lines
from anyshape.ir.show import fact_texts, symbols_in_order
from anyshape.ir.types import TensorType
from anyshape.ir.verify import verify


def put_back(computed: Graph, edited: Edited, stage: str) -> Graph:
    """The edited graph, to go on with instead of `computed`.

    Raises:
        EditError: the text is no valid graph, or does not fit; with the file and the line.
    """
    try:
        graph, lines = parse_lines(edited.text)
        _Fit(computed, graph, edited.text, lines).run()
        verify(graph, stage, lines)
    except (ParseError, VerifyError) as error:
        edited.refuse(error)
    return dataclasses.replace(graph, facts=computed.facts)


class _Fit:
    def __init__(self, computed: Graph, graph: Graph, text: str, lines: Sequence[int]) -> None:
        self.computed = computed
        self.graph = graph
        self.text = text.split("\n")
        self.lines = lines

    def run(self) -> None:
        old, new = self.computed, self.graph
        self.same("graph", "the name", old.name, new.name)
        self.same("graph", "the inputs are", _typed(old.inputs), _typed(new.inputs))
        self.same("where", "what is known of sizes is", _known(old), _known(new))
        self.same("from tape", "what comes from the tape is", _typed(old.restored), _typed(new.restored))
        known = set(symbols_in_order(old)) | {name for name, _, _ in old.facts.ranges}
        for node, line in zip(new.nodes, self.lines, strict=True):
            for name in symbols_in_order(Graph(new.name, (), (node,), ())):
                if name not in known:
                    self.fail(line, f"{name} is neither a value defined above nor a size of the program",
                              f"the sizes are {', '.join(sorted(known))}")
        self.same("write", "the inputs that are written are", _typed(target for target, _ in old.writes),
                  _typed(target for target, _ in new.writes))
        self.same("save", "the saved values have the types", _types(old.saved), _types(new.saved))
        self.same("return", "the results have the types", _types(old.outputs), _types(new.outputs))
        self.same("return", "the results have the strides", _strides(old), _strides(new))
        self.same("return", "the results lie in", _joined(old.memory), _joined(new.memory))

    def same(self, word: str, what: str, old: str, new: str) -> None:
        if old != new:
            statement = re.compile(rf"\s*{word}\b(?! *[=,(])")
            found = [number for number, line in enumerate(self.text, 1) if statement.match(line)]
            self.fail(found[0] if found else 1, f"{what} {old or 'none'}; the edited text has {new or 'none'}",
                      "leave what callers see as it was")

    def fail(self, line: int, why: str, do: str) -> NoReturn:
        raise VerifyError("the edited graph does not fit", where=f"line {line}: {self.text[line - 1]}", why=why, do=do)


def _known(graph: Graph) -> str:
    """What is known of its sizes for sure: hints come from the sizes of the first call, which may be others now."""
    return ", ".join(fact_texts(dataclasses.replace(graph.facts, hints=())))


def _joined(texts: object) -> str:
    assert isinstance(texts, (tuple, list))
    return ", ".join(texts)


def _typed(values: object) -> str:
    return ", ".join(f"{value.name}: {value.type}" for value in values)  # type: ignore[attr-defined]


def _types(operands: tuple[Operand | None, ...]) -> str:
    """Types of tensors without strides, which only inputs and extern results have; sizes and numbers themselves."""
    found = []
    for operand in operands:
        if not isinstance(operand, Value):
            found.append(str(operand))
        elif isinstance(operand.type, TensorType):
            found.append(str(dataclasses.replace(operand.type, strides=None)))
        else:
            found.append(str(operand.type))
    return ", ".join(found)


def _strides(graph: Graph) -> str:
    strides = graph.output_strides or (None,) * len(graph.outputs)
    return ", ".join("dense" if one is None else f"[{', '.join(map(str, one))}]" for one in strides)
