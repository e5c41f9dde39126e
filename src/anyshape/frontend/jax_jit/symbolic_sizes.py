"""Which dims of a function's arguments are symbolic when JAX exports it, and which of them are one size.

    x f32[3, 8], w f32[8, 5]  -->  x f32[x_0, x_1], w f32[x_1, w_1]

Every dim is symbolic. JAX has to know which ones are equal, so dims of one size in the first call are taken as one,
and a dim of 0 or 1, which broadcasts, as that number. A call that this does not fit has another program made, which
tells those dims apart that differed in any call so far. Where JAX has to know how two sizes compare, or the function
asks it (size_questions.py), the program is for calls in which they compare as in the first one. A dim that JAX refuses
to leave open is a number, with a reason.
"""
from __future__ import annotations

import operator
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anyshape.base.errors import ParseError
from anyshape.base.optional_packages import needed_by
from anyshape.sym.expr import Size, evaluate, symbols_of
from anyshape.sym.parse import parse

with needed_by("anyshape.jax.jit"):
    import jax
    from jax import export

COMPARISON = re.compile(r"Symbolic dimension comparison '(.+?)' ([<>]=?) '(.+?)' is inconclusive")
REMAINDER = re.compile(r"The remainder (mod\(.+\)) should be 0")
DIVISION = re.compile(r"\bfloordiv\((\w+), (\d+)\)")
CHOICE = re.compile(r"\b(?:max|min)\(")  # of two sizes

SIGNS = {">=": operator.ge, "==": operator.eq, "!=": operator.ne}
Fact = tuple[str, str, str]  # a size, >= or == or !=, a size: as JAX writes them
Sizes = tuple[Any, ...]  # of all dims of all arguments in a line: numbers, and symbolic sizes of JAX


@dataclass(frozen=True, slots=True)
class SizeClasses:
    """What a program takes for granted. groups: places of dims that are one size, at least 1, each with its name.
    fixed: place -> size of the others. facts: how sizes compare. told: names that the user gave, each with a place that
    has its size; arguments that do not fit the others are refused when the program is called."""

    groups: tuple[tuple[str, tuple[int, ...]], ...]
    fixed: Mapping[int, Any]
    facts: tuple[Fact, ...] = ()
    told: tuple[tuple[str, int], ...] = ()

    def serves(self, sizes: Sizes) -> bool:
        """Whether arguments of these sizes are such."""
        return all(_same(sizes[place], size) for place, size in self.fixed.items()) and all(
            all(_same(sizes[place], sizes[places[0]]) for place in places[1:])
            and not (isinstance(sizes[places[0]], int) and sizes[places[0]] < 1) for _, places in self.groups
        ) and all(self.compared(*fact, sizes) for fact in self.facts)

    def compared(self, a: str, sign: str, b: str, sizes: Sizes) -> bool | None:
        """Whether a fact holds at some sizes; None: JAX cannot tell, because some of them are symbolic in turn."""
        known = {name: sizes[places[0]] for name, places in self.groups} | {
            name: sizes[place] for name, place in self.told}
        try:
            return bool(SIGNS[sign](evaluate(_read(a), known), evaluate(_read(b), known)))
        except Exception:  # of JAX's comparison, or the text is no size
            return None

    def comparison(self, said: str, sizes: Sizes) -> Fact | None:
        """The fact that JAX says it has to know, or that would tell which of two sizes a maximum or minimum is in what
        it says, as it is at some sizes; None: there is none, or JAX knew."""
        remainder = REMAINDER.search(said)
        if remainder is not None:
            wholes = [f"mod({size}, {number})" for size, number in DIVISION.findall(said)]  # JAX sees the rest of these
            facts = [(rest, "==", "0") for rest in (*wholes, remainder[1])]
            return next((fact for fact in facts if fact not in self.facts and self.compared(*fact, sizes)), None)
        found = COMPARISON.search(said)
        for a, sign, b in [found.groups()] if found is not None else [(a, ">=", b) for a, b in _choices(said)]:
            if sign in ("<", "<="):
                a, b = b, a
            if sign in ("<", ">"):
                b = f"{b} + 1"
            truth = self.compared(a, ">=", b, sizes)
            if found is None and truth is False and self.compared(b, ">=", a, sizes):
                fact = b, ">=", a
            else:
                fact = (a, ">=", b) if truth else (b, ">=", f"{a} + 1")
            if truth is not None and fact not in self.facts:
                return fact
        return None

    def settled(self, sizes: Sizes) -> tuple[int, ...]:
        """Places of the dims of which the comparisons leave one size: JAX's own code asks `size == 1` after `size > 1`,
        and does not see that it is."""
        found: list[int] = []
        for name, places in self.groups:
            known = [fact for fact in self.facts if fact[1] == ">=" and names_in(fact) == {name}]
            size = sizes[places[0]]
            if known and isinstance(size, int) and not any(self._holds(known, places, sizes, other)
                                                           for other in (size - 1, size + 1)):
                found.extend(places)
        return tuple(found)

    def _holds(self, facts: Sequence[Fact], places: Sequence[int], sizes: Sizes, size: int) -> bool:
        """Whether facts hold at these sizes with another one at some places."""
        there = tuple(size if place in places else have for place, have in enumerate(sizes))
        return size >= 1 and all(self.compared(*fact, there) for fact in facts)

    def knows(self, fact: Fact) -> bool:
        """Whether all names in a fact are of sizes that are symbolic."""
        return names_in(fact) <= {name for name, _ in self.groups}

    def scope(self, constraints: Sequence[str] = ()) -> Any:
        """Of JAX's symbols: what it is told of them."""
        return export.SymbolicScope([*constraints, *(" ".join(fact) for fact in self.facts if fact[1] != "!=")])


@dataclass(frozen=True, slots=True)
class ResultSizes:
    """The sizes of an exported function's results, of those of its arguments.

    given: of all arguments' dims in a line. results: of each result; None where JAX writes what we do not read, or a
    size is not a dim of some argument.
    """

    given: tuple[Size, ...]
    results: tuple[tuple[Size, ...], ...] | None

    @classmethod
    def of(cls, exported: Any) -> ResultSizes:
        """Those of a function that JAX exported."""
        try:
            given = tuple(_size(size) for aval in exported.in_avals for size in aval.shape)
            results = tuple(tuple(map(_size, aval.shape)) for aval in exported.out_avals)
        except ParseError:
            return cls((), None)
        known = {str(size) for size in given}
        open_ = all(symbols_of(size) <= known for sizes in (given, *results) for size in sizes)
        return cls(given, results if open_ else None)

    def at(self, sizes: Sizes) -> list[tuple[int, ...]] | None:
        """The results' shapes for arguments of these sizes; None: it cannot be said, or such are not taken."""
        if self.results is None or not all(isinstance(size, int) for size in sizes):
            return None
        known = {str(name): size for name, size in zip(self.given, sizes, strict=True)}
        if any(evaluate(size, known) != have for size, have in zip(self.given, sizes, strict=True)):
            return None
        return [tuple(evaluate(size, known) for size in shape) for shape in self.results]


def _size(size: Any) -> Size:
    return size if isinstance(size, int) else _read(str(size))


def _read(text: str) -> Size:
    """A size that JAX has written.

    Raises:
        ParseError: it is none.
    """
    return parse(text.replace("^", "**"))


def _choices(said: str) -> Iterator[tuple[str, str]]:
    """The two sizes of which each maximum or minimum in a text is one."""
    for found in CHOICE.finditer(said):
        parts, depth = [""], 1
        for letter in said[found.end():]:
            depth += (letter == "(") - (letter == ")")
            if not depth:
                break
            if letter == "," and depth == 1:
                parts.append("")
            else:
                parts[-1] += letter
        if len(parts) == 2 and not depth:
            yield parts[0].strip(), parts[1].strip()


def names_in(fact: Fact) -> frozenset[str]:
    """The sizes that a fact is about."""
    return frozenset(symbols_of(_read(fact[0])) | symbols_of(_read(fact[2])))


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) if isinstance(a, int) == isinstance(b, int) else False


def classes_of(calls: Sequence[Sizes], names: Sequence[str], frozen: Collection[int]) -> SizeClasses:
    """For the last of some calls, telling apart what differed in any of them. frozen: places that are to be numbers."""
    last = calls[-1]
    groups: dict[tuple[Any, ...], list[int]] = {}
    fixed = {}
    for place, size in enumerate(last):
        every = tuple(one[place] for one in calls)
        if place in frozen or (isinstance(size, int) and (size == 0 or (size == 1 and set(every) == {1}))):
            fixed[place] = size
        else:
            groups.setdefault(every, []).append(place)
    return SizeClasses(tuple((names[places[0]], tuple(places)) for places in groups.values()), fixed)


def names_of(labels: Sequence[str], ranks: Sequence[int]) -> list[str]:
    """A name for each dim, of the label of its argument: all differ."""
    found: list[str] = []
    for label, rank in zip(labels, ranks, strict=True):
        word = re.sub(r"\W+", "_", label).strip("_") or "x"
        word = f"x_{word}" if word[0].isdigit() else word
        for dim in range(rank):
            name = f"{word}_{dim}"
            found.append(name if name not in found else f"{name}_{len(found)}")
    return found


def specs_of(classes: SizeClasses, avals: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """The arguments with symbolic sizes, to be exported."""
    scope = classes.scope()
    sizes: dict[int, Any] = dict(classes.fixed)
    if classes.groups:
        symbols = export.symbolic_shape(", ".join(name for name, _ in classes.groups), scope=scope)
        for symbol, (_, places) in zip(symbols, classes.groups, strict=True):
            sizes.update(dict.fromkeys(places, symbol))
    found, at = [], 0
    for aval in avals:
        shape = tuple(sizes[at + dim] for dim in range(len(aval.shape)))
        at += len(shape)
        found.append(jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type))
    return found


def told_by(specs: Sequence[Any]) -> SizeClasses:
    """What is taken for granted of shapes that the user gave."""
    sizes = [size for spec in specs for size in spec.shape]
    return SizeClasses((), {}, (), tuple({str(size): place for place, size in enumerate(sizes)
                                          if str(size).isidentifier()}.items()))


def told_again(specs: Sequence[Any], classes: SizeClasses, constraints: Sequence[str]) -> list[jax.ShapeDtypeStruct]:
    """The shapes that the user gave, of new symbols, of which JAX is told the facts as well: of the same ones it keeps
    traces, in which a function asks nothing."""
    scope = classes.scope(constraints)
    return [jax.ShapeDtypeStruct(export.symbolic_shape(", ".join(map(str, spec.shape)), scope=scope), spec.dtype,
                                 weak_type=spec.weak_type) for spec in specs]


def refused(classes: SizeClasses, said: str) -> tuple[str, tuple[int, ...]] | None:
    """The size that becomes a number where JAX refused an export, by what it said: of the symbols that it names, or of
    all, that which most dims have, and of those the last: sizes of weights and features rather than of a batch. None:
    there is none left."""
    named = [(name, places) for name, places in classes.groups if re.search(rf"\b{re.escape(name)}\b", said)]
    return max(named or classes.groups, key=lambda group: (len(group[1]), group[1][-1]), default=None)
