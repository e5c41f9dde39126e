"""Index arithmetic in Triton text: sizes and offsets as expressions, loop nests as one variable, bounds of offsets."""
from __future__ import annotations

from collections.abc import Callable, Mapping

from anyshape.kernel.loop_ir.directives import Product, SplitReduction
from anyshape.kernel.loop_ir.program import Instruction, LoopProgram
from anyshape.sym.expr import (
    Atom,
    Call,
    Expr,
    Size,
    coefficient_of,
    maximum,
    minimum,
    product,
    substitute,
    symbol,
    symbols_of,
)
from anyshape.sym.floats import float_of

Loops = tuple[tuple[str, Size], ...]


def text_of(size: Size, name_of: Callable[[str], str]) -> str:
    """A size as a Triton expression; name_of: the text of a symbol."""
    if isinstance(size, int):
        return str(size)
    terms = []
    for mono, factor in size.terms:
        parts = [str(factor)] if factor != 1 or not mono else []
        for atom, power in mono:
            parts += [_atom(atom, name_of)] * power
        terms.append("*".join(parts))
    return terms[0] if len(terms) == 1 else f"({' + '.join(terms).replace(' + -', ' - ')})"


def divisor_of(size: Size, name_of: Callable[[str], str]) -> str:
    """A size as what stands behind `//` or `%`: a product has parentheses there."""
    text = text_of(size, name_of)
    if isinstance(size, int) or len(size.terms) != 1:
        return text
    (mono, factor), = size.terms
    return f"({text})" if (factor != 1) + sum(power for _, power in mono) > 1 else text


def _atom(atom: Atom, name_of: Callable[[str], str]) -> str:
    if isinstance(atom, str):
        return name_of(atom)
    if atom.op == "scaled":
        return f"({text_of(atom.args[0], name_of)} * tl.full((), {float_of(atom.args[1])!r}, tl.float64)).to(INDEX)"
    if atom.op == "root":
        return f"tl.sqrt(({text_of(atom.args[0], name_of)}) * tl.full((), 1.0, tl.float64)).to(INDEX)"
    a, b = (text_of(size, name_of) for size in atom.args)
    if atom.op == "floordiv":
        by = divisor_of(atom.args[1], name_of)
        return f"({a} // {by})" if is_positive(atom.args[0]) else f"_floor({a}, {b})"
    return f"tl.{atom.op}imum({a}, {b})"


def is_positive(size: Size) -> bool:
    """Is a size of sizes and loop variables at least 0, as its formula shows?"""
    if isinstance(size, int):
        return size >= 0
    return all(factor > 0 and all(_is_positive_atom(atom) for atom, _ in mono) for mono, factor in size.terms)


def _is_positive_atom(atom: Atom) -> bool:
    if isinstance(atom, str):
        return atom[0] != "%"
    if atom.op == "max":
        return any(is_positive(one) for one in atom.args)
    return all(is_positive(one) for one in (atom.args[:1] if atom.op in ("scaled", "root") else atom.args))


def linear(offset: Size, loops: Loops, name: str) -> Size:
    """The offset over the number of a point of `loops`, `name`, where it goes through them in order; else as it is."""
    if len(loops) < 2:
        return offset
    found = coefficient_of(offset, loops[-1][0])
    if found is None or found[0] == 0:
        return offset
    step, rest = found
    across = step
    for (variable, _), (_, inner) in zip(reversed(loops[:-1]), reversed(loops[1:]), strict=True):
        across = across * inner
        found = coefficient_of(rest, variable)
        if found is None or found[0] != across:
            return offset
        rest = found[1]
    return rest + step * symbol(name)


def is_injective(offset: Size, loops: Loops) -> bool:
    """Do different points of the loops have different offsets, as the formula shows: without registers, and each loop
    that is longer than 1 steps by a size that the loops inside of it do not reach?"""
    if any(name[0] == "%" for name in symbols_of(offset)):
        return False
    steps = []
    for variable, extent in loops:
        if extent == 1:
            continue
        found = coefficient_of(offset, variable)
        if found is None or found[0] == 0:
            return False
        steps.append((found[0], extent))
    if len(steps) < 2:
        return True
    whole = [one for one in steps if isinstance(one[0], int) and one[0] > 0]
    if not whole:
        return False
    inner = min(whole, key=lambda one: one[0] if isinstance(one[0], int) else 0)
    left = [one for one in steps if one is not inner]
    reached = inner[0] * inner[1]  # each step must be a multiple of what is inside of it
    while left:
        outer = next((one for one in left if _covers(one[0], reached)), None)
        if outer is None:
            return False
        left.remove(outer)
        reached = outer[0] * outer[1]
    return True


def _covers(step: Size, reached: Size) -> bool:
    """Is a step at least as long as everything inside of it?"""
    if isinstance(step, int) and isinstance(reached, int):
        return step >= reached
    return any(step == reached * number for number in range(1, 5))


def bound(offset: Size, loops: Mapping[str, Size], registers: Mapping[int, Size]) -> Size | None:
    """A size over the program's sizes that an offset never exceeds; None where the formula does not show one.

    loops: the extents of the loop variables. registers: bounds of registers.
    """
    values: dict[str, Size] = {}
    for name in symbols_of(offset):
        if name[0] == "%":
            found = registers.get(int(name[1:]))
            if found is None:
                return None
            values[name] = found
        elif name in loops:
            values[name] = loops[name]
    above: Size = 0
    for mono, factor in () if isinstance(offset, int) else offset.terms:
        names = {atom for atom, _ in mono}
        inside = [atom for atom in names if isinstance(atom, Call) and symbols_of(_one(atom)) & values.keys()]
        if any(not is_positive(one) for atom in inside for one in atom.args):
            return None
        if factor > 0:
            term: Size = factor
            for atom, power in mono:
                for _ in range(power):
                    term = term * substitute(_one(atom), values)
            above = above + term
    return offset if isinstance(offset, int) else above


def _one(atom: Atom) -> Size:
    return Expr(((((atom, 1),), 1),))


def bounds(program: LoopProgram) -> list[Size] | None:
    """Sizes that no offset, nor number of a row, exceeds; None where an offset has no bound."""
    loops = dict((*program.rows, *program.columns))
    registers: dict[int, Size] = {}
    found: list[Size] = [product(extent for _, extent in program.rows)]
    split = program.directive(SplitReduction)
    if split is not None:
        loops[split.axis] = split.parts
        found.append(found[0] * (split.parts + 1))
    multiplied = program.directive(Product)
    if multiplied is not None:
        rows, columns = found[0], product(extent for _, extent in program.columns)
        down, along, under, beside = multiplied.strides
        found += [rows * down + multiplied.inner * along, multiplied.inner * under + columns * beside]
    if any(symbols_of(extent) & loops.keys() for extent in loops.values()):
        return None  # rows of different lengths
    for one in (one for stage in program.stages for one in stage.instructions):
        limit = _register_bound(one, loops, registers)
        if limit is not None:
            registers[one.result] = limit
        if one.op in ("load", "store", "scatter", "fold"):
            limit = bound(one.offset, loops, registers)
            if limit is None:
                return None
            found.append(limit)
    return list(dict.fromkeys(found))


def _register_bound(one: Instruction, loops: Mapping[str, Size], registers: Mapping[int, Size]) -> Size | None:
    """A size that a whole number in a register does not exceed, where that can be seen."""
    known = [registers.get(register) for register in one.args]
    if one.op == "index":
        return bound(one.offset, loops, registers)
    if one.op == "constant" and isinstance(one.value, int) and one.dtype == "i64":
        return int(one.value)
    if one.op == "minimum":
        there = [size for size in known if size is not None]
        return there[0] if len(there) == 1 else minimum(*there) if there else None
    if one.op == "maximum" and known[0] is not None and known[1] is not None:
        return maximum(known[0], known[1])
    if one.op == "where" and known[1] is not None and known[2] is not None:
        return maximum(known[1], known[2])
    if one.op == "add" and known[0] is not None and known[1] is not None:
        return known[0] + known[1]
    if one.op == "sub" and known[0] is not None and isinstance(known[1], int) and known[1] >= 0:
        return known[0]
    return None
