"""The text form of a graph; ir/parse.py reads it back.

    graph softmax(x: f32[b, n]) where 1 <= b, 1 <= n <= 4096, n near 512, 8 divides n
      m = amax(x | dims=[1], keep)  f32[b, 1]  # model.py:12
      d = sub(x, m)                 f32[b, n]
      return d strides [n, 1]

Operands and attributes stand on either side of "|". A tuple is written in brackets, a text in double quotes, a flag
that is set by its name alone. Sizes are written as polynomials, numbers so that they read back exactly. Further lines:
"from tape a, b" (inputs that the forward saved), "write x <- y", "save a, 2*n".
"""
from __future__ import annotations

import json
from collections.abc import Iterable

from anyshape.ir.graph import Attr, Graph, Node, Operand, Value
from anyshape.ir.types import TensorType
from anyshape.sym.expr import Expr, Size, symbol
from anyshape.sym.facts import Facts

_WIDE = 100
_COLUMN = 60


def show(graph: Graph) -> str:
    """The text of `graph`, ending in a newline."""
    return "\n".join((*header_lines(graph), *node_lines(graph.nodes), *_closing_lines(graph))) + "\n"


def header_lines(graph: Graph) -> list[str]:
    """Name, inputs, facts, and what comes from the tape."""
    inputs = [f"{value.name}: {value.type}" for value in graph.inputs]
    facts = fact_texts(graph.facts)
    line = f"graph {graph.name}({', '.join(inputs)})"
    if len(line) <= _WIDE:
        lines = [line]
    else:
        lines = [f"graph {graph.name}(", *(f"    {text}," for text in inputs), ")"]
    if facts:
        clause = f"where {', '.join(facts)}"
        if len(lines[-1]) + len(clause) < _WIDE:
            lines[-1] += f" {clause}"
        else:
            lines.extend(wrapped("where ", facts))
    if graph.restored:
        lines.append(f"  from tape {', '.join(value.name for value in graph.restored)}")
    return lines


def node_lines(nodes: tuple[Node, ...]) -> list[str]:
    """One line per equation, the types in one column."""
    texts = [equation(node) for node in nodes]
    width = max((len(text) for text in texts if len(text) <= _COLUMN), default=0)
    return [_line(node, text, width) for node, text in zip(nodes, texts, strict=True)]


def node_line(node: Node) -> str:
    """The line of one equation."""
    return _line(node, equation(node), 0)


def equation(node: Node) -> str:
    """A node without its types: results, op, operands, attributes."""
    left = ", ".join([value.name for value in node.outputs])
    inside = ", ".join([operand_text(operand) for operand in node.inputs])
    if node.attrs:
        inside += (" | " if inside else "| ") + attrs_text(node.attrs)
    return f"{left} = {node.op}({inside})" if left else f"{node.op}({inside})"


def operand_text(operand: Operand | None) -> str:
    """A value's name, a literal, or a size."""
    if isinstance(operand, Value):
        return operand.name
    if isinstance(operand, float):
        return repr(operand)
    return str(operand)


def attr_text(value: Attr) -> str:
    """An attribute's value."""
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, tuple):
        return f"[{', '.join([attr_text(item) for item in value])}]"
    return str(value)


def fact_texts(facts: Facts) -> list[str]:
    """What is known, one text per fact."""
    texts = []
    for name, low, high in facts.ranges:
        texts.append(f"{low} <= {name}" if high is None else f"{low} <= {name} <= {high}")
    texts.extend(f"{name} near {value}" for name, value in facts.hints)
    texts.extend(f"{divisor} divides {size}" for size, divisor in facts.divisible)
    texts.extend(f"{size} >= 0" for size in facts.known)
    return texts


def attrs_text(attrs: Iterable[tuple[str, Attr]]) -> str:
    """Attributes with their names; a flag that is set by its name alone."""
    return ", ".join([name if value is True else f"{name}={attr_text(value)}" for name, value in attrs])


def _line(node: Node, text: str, width: int) -> str:
    types = ", ".join([str(value.type) for value in node.outputs])
    line = f"  {text:<{width}}  {types}" if types else f"  {text}"
    return f"{line}  # {' '.join(node.where.split())}" if node.where else line


def _closing_lines(graph: Graph) -> list[str]:
    lines = [f"  write {target.name} <- {value.name}" for target, value in graph.writes]
    if graph.saved:
        lines.append(f"  save {', '.join(operand_text(operand) for operand in graph.saved)}")
    outputs = []
    for position, operand in enumerate(graph.outputs):
        text = operand_text(operand)
        strides = graph.output_strides[position] if position < len(graph.output_strides) else None
        if strides is not None:
            text += f" strides {_sizes(strides)}"
        if position < len(graph.memory) and graph.memory[position]:
            text += f" in {graph.memory[position]}"
        outputs.append(text)
    lines.append(f"  return {', '.join(outputs)}" if outputs else "  return")
    return lines


def _sizes(sizes: tuple[Size, ...]) -> str:
    return f"[{', '.join(str(size) for size in sizes)}]"


def wrapped(word: str, texts: list[str]) -> list[str]:
    """Lines of a word and a list of texts."""
    lines = [f"  {word}"]
    for position, text in enumerate(texts):
        piece = text if position == len(texts) - 1 else f"{text}, "
        if len(lines[-1]) + len(piece) > _WIDE:
            lines[-1] = lines[-1].rstrip()
            lines.append(" " * (2 + len(word)))
        lines[-1] += piece
    return lines


def symbols_in_order(graph: Graph) -> list[str]:
    """Every symbol that a type, an operand or an attribute of the graph names, in order of first appearance."""
    found: dict[str, None] = {}

    def visit(item: object) -> None:
        if isinstance(item, Expr):
            from_expr(item)
        elif isinstance(item, tuple):
            for part in item:
                visit(part)
        elif isinstance(item, TensorType):
            visit(item.shape)
            visit(item.strides)

    def from_expr(size: Expr) -> None:
        for mono, _ in size.terms:
            for atom, _ in mono:
                if isinstance(atom, str):
                    found[atom] = None
                else:
                    visit(atom.args)

    for value in graph.inputs:
        if isinstance(value.type, TensorType):
            visit(value.type)
        else:
            visit(symbol(value.name))
    for node in graph.nodes:
        visit(node.inputs)
        visit(tuple(value for _, value in node.attrs))
        for output in node.outputs:
            visit(output.type)
    visit(tuple(x for x in (*graph.outputs, *graph.saved) if isinstance(x, Expr)))
    return list(found)
