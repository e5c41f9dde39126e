"""Splitting of a module at its loops: programs before, in and after each loop that runs at run time.

    %a = f(%x);  %b = while(%a) {...};  g(%b)   -->   Part(%x -> %a), Loop(condition, body: %a -> %b), Part(%b -> ...)

A branch with such a loop in it is a piece of its own as well: only the branch that is taken runs.

Functions are inlined first, so that every loop stands in the main block or in a loop's. Constants, and numbers that are
made of sizes alone, are computed again in each piece that uses them: passed from piece to piece they would be data, of
which no shape can be made.
"""
from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from anyshape.base.errors import InputError
from anyshape.frontend.importer_stablehlo.fold import FOLDS
from anyshape.frontend.importer_stablehlo.module import Block, Function, Module, Operation, Type, operations

CALLS = {"func.call": "callee", "stablehlo.composite": "decomposition"}  # the attribute that names the function
LOOP, BRANCHES = "stablehlo.while", ("stablehlo.case", "stablehlo.if")
CONSTANTS = ("stablehlo.constant", "arith.constant", "shape.const_shape", "shape.const_size")
SIZES = ("shape.shape_of", "shape.dim", "tensor.dim", "stablehlo.get_dimension_size")  # of a tensor
MOST_SIZES = 64  # elements of a tensor of them
MOST_OPERATIONS = 400_000  # after inlining


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Operations that are one program. takes, gives: names of values."""

    module: Module
    takes: tuple[str, ...]
    gives: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Loop:
    """A loop. takes: names of its first values, and of what it sees of what stands around; gives: of its results."""

    condition: Split
    body: Split
    takes: tuple[str, ...]
    seen: tuple[str, ...]
    gives: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """A choice among blocks. index: the name of the number of the one that is taken, of a bool the first one where it
    holds. seen: names of what they see of what stands around; gives: of its results."""

    blocks: tuple[Split, ...]
    index: str
    seen: tuple[str, ...]
    gives: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """A block in pieces. takes, gives: names of values."""

    pieces: tuple[Part | Loop | Branch, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]


def split(module: Module) -> Split:
    """The module's main function in pieces."""
    block = _Inliner(module).block(module.functions["main"].body, {}, itertools.count(), 0)
    return _split(block, (), {})


class _Inliner:
    """Puts the bodies of functions where they are called. `done`: operations so far."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.done = 0

    def block(self, block: Block, names: Mapping[str, str], numbers: Iterator[int], depth: int) -> Block:
        """A copy of the block without calls, with names by `names`, and new ones for what it makes below the top."""
        known = dict(names)
        found: list[Operation] = []
        self._into(found, block, known, numbers, depth)
        return Block(tuple(known.get(one, one) for one in block.arguments), block.types, tuple(found),
                     tuple(known.get(one, one) for one in block.results))

    def _into(self, found: list[Operation], block: Block, known: dict[str, str], numbers: Iterator[int], depth: int
              ) -> None:
        if depth > 64 or self.done > MOST_OPERATIONS:
            raise InputError("functions call each other without end", where="the module", why="64 were open",
                             do="check where the module comes from")
        for one in block.operations:
            self.done += 1
            inputs = tuple(known.get(name, name) for name in one.inputs)
            if one.name in CALLS:
                name = one.attributes[CALLS[one.name]]
                callee = self.module.functions.get(name)
                if callee is None:
                    raise InputError(f"there is no function {name}", where=str(one),
                                     why="a call names it", do="check where the module comes from")
                inner = dict(zip(callee.body.arguments, inputs, strict=True))
                self._into(found, callee.body, inner, numbers, depth + 1)
                for name, result in zip(one.outputs, callee.body.results, strict=True):
                    known[name] = inner.get(result, result)
                continue
            outputs = one.outputs
            if depth:
                outputs = tuple(f"{name}.{next(numbers)}" for name in outputs)
                known.update(zip(one.outputs, outputs, strict=True))
            regions = tuple(self._region(region, known, numbers, depth) for region in one.regions)
            found.append(dataclasses.replace(one, inputs=inputs, outputs=outputs, regions=regions))

    def _region(self, region: Block, known: Mapping[str, str], numbers: Iterator[int], depth: int) -> Block:
        inner = dict(known)
        for name in region.arguments:
            inner[name] = f"{name}.{next(numbers)}"
        return self.block(region, inner, numbers, depth + 1)


def _split(block: Block, seen: Sequence[tuple[str, Type]], constants: Mapping[str, Operation]) -> Split:
    """A block in pieces. seen: what it uses of what stands around it, which are arguments too. constants: that stand
    there, and what is made of sizes; each piece has its own."""
    types = dict(zip(block.arguments, block.types, strict=True)) | dict(seen)
    takes = (*block.arguments, *(name for name, _ in seen))
    own: dict[str, Operation] = {}
    constants = dict(constants)
    for one in block.operations:
        if one.name in CONSTANTS or _made_of_sizes(one, constants):
            own[one.outputs[0]] = constants[one.outputs[0]] = one
    groups: list[list[Operation] | Operation] = [[]]
    for one in block.operations:
        types.update(zip(one.outputs, one.gives, strict=True))
        if one.name == LOOP or _has_loop(one):
            groups += [one, []]
        else:
            groups[-1].append(one)  # type: ignore[union-attr]
    pieces: list[Part | Loop | Branch] = []
    later = set(block.results)
    for place, group in reversed(list(enumerate(groups))):  # from the end, so that it is known what is wanted later
        if isinstance(group, Operation):
            whole = _loop(group, types, constants) if group.name == LOOP else _branch(group, types, constants)
            takes_of = whole.takes if isinstance(whole, Loop) else (whole.index,)
            later = (later - set(whole.gives)) | set(takes_of) | set(whole.seen)
            pieces.insert(0, whole)
            continue
        missing = [constants[name] for name in later if not place and name in constants and name not in own]
        made = [name for one in (*missing, *group) for name in one.outputs if name in later]
        if made:
            part = _part([*missing, *group], made, types, constants)
            later = (later - set(made)) | set(part.takes)
            pieces.insert(0, part)
    return Split(tuple(pieces), takes, block.results)


def _part(group: Sequence[Operation], made: Sequence[str], types: Mapping[str, Type],
          constants: Mapping[str, Operation]) -> Part:
    used = _used(group)
    needed = _again(used, constants)
    used |= {name for one in needed for name in one.inputs}
    takes = tuple(name for name in types if name in used and name not in constants)
    body = Block(takes, tuple(types[name] for name in takes), (*needed, *group), tuple(made))
    return Part(Module({"main": Function(body, ("",) * len(takes))}), takes, tuple(made))


def _loop(one: Operation, types: Mapping[str, Type], constants: Mapping[str, Operation]) -> Loop:
    seen, (condition, body) = _regions(one, types, constants)
    return Loop(condition, body, one.inputs, seen, one.outputs)


def _branch(one: Operation, types: Mapping[str, Type], constants: Mapping[str, Operation]) -> Branch:
    seen, blocks = _regions(one, types, constants)
    return Branch(tuple(blocks), one.inputs[0], seen, one.outputs)


def _regions(one: Operation, types: Mapping[str, Type], constants: Mapping[str, Operation]
             ) -> tuple[tuple[str, ...], list[Split]]:
    """The regions of an operation in pieces, and what they see of what stands around."""
    free = {name for region in one.regions for name in _free(region)}
    free |= {name for one in _again(free, constants) for name in one.inputs}
    free -= constants.keys()
    seen = tuple(name for name in types if name in free)
    around = [(name, types[name]) for name in seen]
    return seen, [_split(region, around, constants) for region in one.regions]


def _has_loop(one: Operation) -> bool:
    """Is it a branch with a loop in it?"""
    return one.name in BRANCHES and any(inner.name == LOOP for region in one.regions for inner in operations(region))


def _made_of_sizes(one: Operation, known: Mapping[str, Operation]) -> bool:
    """Whether the operation computes a few whole numbers from sizes and from what is known as such."""
    if len(one.gives) != 1 or one.regions or one.name not in FOLDS or one.gives[0].dtype not in ("i32", "i64", "bool"):
        return False
    shape = one.gives[0].static
    if shape is None or len(shape) > 1 or math.prod(shape) > MOST_SIZES:
        return False
    return all(name in known for name in one.inputs[one.name in SIZES:])


def _again(names: Iterable[str], constants: Mapping[str, Operation]) -> list[Operation]:
    """The operations that make these names, and those that they read, in their order."""
    wanted: set[str] = set()
    waiting = [name for name in names if name in constants]
    while waiting:
        name = waiting.pop()
        if name not in wanted:
            wanted.add(name)
            waiting += [one for one in constants[name].inputs if one in constants]
    return [one for name, one in constants.items() if name in wanted]


def _used(group: Sequence[Operation]) -> set[str]:
    """Names that operations read and do not make."""
    made: set[str] = set()
    found: set[str] = set()
    for one in group:
        found |= set(one.inputs) - made
        for region in one.regions:
            found |= _free(region) - made
        made |= set(one.outputs)
    return found


def _free(block: Block) -> set[str]:
    own = {name for one in block.operations for name in one.outputs} | set(block.arguments)
    return (_used(block.operations) | set(block.results)) - own
