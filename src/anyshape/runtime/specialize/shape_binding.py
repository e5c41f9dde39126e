"""Shape binding: reads the symbols from a call's arguments and checks that they fit the program; done once per new
shape."""
from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from anyshape.base.errors import AnyShapeError, DivisionError, IndexRangeError, InputError, Unsupported
from anyshape.ir.op import DIVISOR, LENGTH, ROUTE
from anyshape.ir.types import TensorType
from anyshape.plan.ir.home import Home
from anyshape.plan.ir.program import Plan, Step
from anyshape.runtime.driver.interface import HostDriver
from anyshape.runtime.driver.usual import usual_driver
from anyshape.sym.expr import Size, coefficient_of, evaluate, symbol, symbols_of

_NUMBERED = re.compile(r"(primals|tangents|arg\d+)_\d+$")  # names of torch for inputs, which say nothing to a user


class _Source(NamedTuple):
    """Where a symbol is read: size or stride `dim` of an input is `size`, factor * symbol + rest (dim -1: the input
    itself)."""

    name: str
    position: int
    dim: int
    stride: bool
    size: Size
    factor: Size = 1
    rest: Size = 0


class Binder:
    """Binds the symbols of one plan; those in `known` may come from outside (from a tape). given: inputs that are the
    same in every call, by position, which are looked at here.

    Raises:
        Unsupported: a symbol of the plan cannot be read from its inputs.
    """

    def __init__(self, plan: Plan, symbols: Sequence[str], known: frozenset[str] = frozenset(),
                 names: Mapping[str, str] | None = None, driver: HostDriver | None = None,
                 given: Mapping[int, Any] = MappingProxyType({})) -> None:
        self.plan = plan
        self.driver = driver = usual_driver() if driver is None else driver
        self.names = {} if names is None else names
        self.sources = _sources(plan)
        bound = {source.name for source in self.sources} | known
        missing = [name for name in symbols if name not in bound]
        if missing:
            raise Unsupported(f"{plan.name} computes with the size {', '.join(missing)}",
                              why="no input has it as a size: it is only known while the program runs",
                              do="split the program there")
        # most inputs are parameters, whose sizes are numbers: looked at quickly, and closely when they do not fit
        self.fixed = [(i, driver.dtypes[kind.dtype], kind.shape) for i, kind in enumerate(plan.inputs)
                      if isinstance(kind, TensorType) and all(isinstance(n, int) for n in kind.shape)]
        closed = {position for position, _, _ in self.fixed}
        self.open = [i for i in range(len(plan.inputs)) if i not in closed]
        self.devices = {i: driver.device(kind.device) for i, kind in enumerate(plan.inputs)
                        if isinstance(kind, TensorType)}
        # inputs whose strides must be looked at to know the symbols
        self.strided = frozenset(source.position for source in self.sources if source.stride)
        # of those of fixed sizes, the ones that the entry of the program does not compare
        # (runtime/call/dispatch_codegen.py)
        apart = {*plan.restored, *self.strided}
        self.fixed = [one for one in self.fixed
                      if one[0] not in given
                      or not driver.fits(given[one[0]], one[1], one[2], self.devices[one[0]])]  # type: ignore[arg-type]
        self.uncompared = [one for one in self.fixed if one[0] in apart or not _has_fixed_strides(plan.inputs[one[0]])]

    def bind(self, arguments: Sequence[Any], known: Mapping[str, int], same: bool = False) -> dict[str, int]:
        """Symbol -> value, checked against every type and range.

        Args:
            arguments: one per input of the plan.
            known: values that are known already (of the forward's symbols).
            same: the entry has found the inputs that it compares to be like some that fitted.

        Raises:
            InputError: an argument does not fit.
        """
        rest, fits = self.open, self.driver.fits
        for position, dtype, shape in self.uncompared if same else self.fixed:
            if not fits(arguments[position], dtype, shape, self.devices[position]):  # type: ignore[arg-type]
                rest = sorted((*rest, position))
        for position in rest:
            self._kind(position, self.plan.inputs[position], arguments[position])
        values = dict(known)
        for source in self.sources:
            if source.name not in values or source.dim < 0:
                values[source.name] = self._read(source, arguments[source.position], values)
        for position in rest:
            kind = self.plan.inputs[position]
            if isinstance(kind, TensorType):
                found, wanted = tuple(arguments[position].shape), tuple(evaluate(n, values) for n in kind.shape)
                if found != wanted:
                    self._fail(position, f"its sizes are {list(found)}; {kind} means {list(wanted)} here"
                               + self._origin(kind))
        for name, low, high in self.plan.facts.ranges:
            if name in values and (values[name] < low or (high is not None and values[name] > high)):
                raise InputError(f"{self.plan.name} does not take these sizes",
                                 why=f"the size {self.names.get(name, name)} is {values[name]}, the program "
                                     f"was compiled for {low}..{'' if high is None else high}",
                                 do="compile the program again for this size")
        return values

    def _kind(self, position: int, kind: TensorType | str, argument: Any) -> None:
        if isinstance(kind, str):
            if not isinstance(argument, int):
                self._fail(position, f"it is a whole number ({kind}), got {type(argument).__name__}")
            return
        found = self.driver.inspect(argument)
        if found is None:
            self._fail(position, f"it is a tensor {kind}, got {type(argument).__name__}")
        if self.driver.dtypes.get(found.dtype) != self.driver.dtypes[kind.dtype]:
            self._fail(position, f"its dtype is {found.dtype}, the program was compiled for {kind.dtype}")
        if len(found.sizes) != kind.rank:
            self._fail(position, f"it has {len(found.sizes)} dims, the program was compiled for {kind.rank}: {kind}")
        error = self.driver.refused(argument, self.plan, position)
        if error is not None:
            raise error

    def _read(self, source: _Source, argument: Any, values: Mapping[str, int]) -> int:
        if source.dim < 0:
            return int(argument)
        found = (self.driver.strides(argument) if source.stride else argument.shape)[source.dim]
        factor, rest = evaluate(source.factor, values), evaluate(source.rest, values)
        if factor == 0 and found == rest:
            return 0  # any value does
        if factor == 0 or (found - rest) % factor:
            word = "stride" if source.stride else "size"
            self._fail(source.position, f"{word} {source.dim} is {found}, which is not {source.size} for any "
                                        f"{source.name}")
        return int((found - rest) // factor)

    def _origin(self, kind: TensorType) -> str:
        names = sorted(set().union(*(symbols_of(size) for size in kind.shape)))
        places = {source.name: source for source in reversed(self.sources)}
        parts = [f"{name} is read from {self._input(places[name].position)}" for name in names if name in places]
        return f" ({', '.join(parts)})" if parts else ""

    def _input(self, position: int) -> str:
        """An input by its position, and the name that the user's program gives it, where it has one."""
        name = next((buffer.name for buffer in self.plan.buffers
                     if buffer.is_parameter and self.plan.parameter_number(buffer) == position), "")
        return f"input {position} ({name})" if name and not _NUMBERED.match(name) else f"input {position}"

    def _fail(self, position: int, why: str) -> NoReturn:
        raise InputError(f"{self._input(position)} of {self.plan.name} does not fit the compiled program",
                         where=self.plan.name, why=renamed(why, self.names),
                         do="call the program with arguments like those it was compiled for, or compile it again")


def _has_fixed_strides(kind: TensorType | str) -> bool:
    return isinstance(kind, TensorType) and all(isinstance(n, int) for n in kind.strides or ())


def renamed(text: str, names: Mapping[str, str]) -> str:
    """A text with the sizes of a trace, such as 2*s27, in the user's words: 2*ids_1."""
    return re.sub(r"\w+", lambda found: names.get(found.group(), found.group()), text) if names else text


def check_inside(plan: Plan, nonnegative: Sequence[int], selected: Sequence[int], names: Mapping[str, str]) -> None:
    """Whether a plan computes what eager PyTorch would at sizes that give `plan.nonnegative`, and `plan.selected` with
    `plan.divided`, these values. `names`: of sizes, in the user's words.

    Raises:
        InputError: a tensor inside would have a size below 0: eager PyTorch goes another way; or a number made of sizes
            is no int64.
        IndexRangeError: an index selects from a dim without elements. DivisionError: a size that is 0 divides.
    """
    if min(nonnegative, default=0) < 0:
        below = [f"{renamed(str(size), names)} is {number}"
                 for size, number in zip(plan.nonnegative, nonnegative, strict=True) if number < 0]
        raise InputError(f"{plan.name} does not take these sizes",
                         why="a size inside, or a difference of sizes, would be below 0, or a number made of sizes "
                             f"does not fit in 64 bits: {', '.join(below)}",
                         do="compile the program again for these sizes")
    if min(selected, default=0) >= 0:
        return
    conditions = *(("index", where) for _, where in plan.selected), *(("divisor", where) for _, where in plan.divided)
    for (kind, where), number in zip(conditions, selected, strict=True):
        if number < 0 and kind == "divisor":
            raise DivisionError("ZeroDivisionError: whole numbers are divided by 0", where=where,
                                why="the divisor is a number or a size that is 0",
                                do="check the divisor, or divide floating-point numbers")
        if number < 0:
            raise IndexRangeError(f"an index is out of range in {plan.name}", where=where,
                                  why="it selects from a dim that has no elements at these sizes",
                                  do="check the sizes of what is indexed: one of them is 0")


def with_addresses(plan: Plan, placed: Container[str], home: type[Home]) -> tuple[int, list[int]]:
    """How many buffers of this home the host finds by addresses that Python gives it, and the positions of the inputs
    among them that may have no elements."""
    found = [plan.parameter_number(b)
             for b in plan.buffers if isinstance(b.home, home) and b.name not in placed]
    kinds = [(i, plan.inputs[i]) for i in found]
    return len(found), [i for i, kind in kinds if isinstance(kind, TensorType)
                        and not all(isinstance(n, int) and n > 0 for n in kind.shape)]


def failed_check(name: str, step: Step, code: int) -> AnyShapeError:
    """The error for a step whose status says that its data are wrong."""
    if code == ROUTE:
        return IndexRangeError(f"a route is out of range in {name}", where=getattr(step, "where", ""),
                               why="branches are counted from 0, and -1 drops a choice",
                               do="look at what the router function returns")
    if code == LENGTH:
        return IndexRangeError(f"a sequence is longer than there are times in {name}", where=getattr(step, "where", ""),
                               why="lengths are from 0 to the number of times of the input",
                               do="check the lengths of the sequences")
    found = [(str(operand), where) for op, operand, where in getattr(step, "checks", ())
             if (op == "divisor") == (code == DIVISOR)]
    where = "; ".join(dict.fromkeys(where for _, where in found if where)) or getattr(step, "where", "")
    names = list(dict.fromkeys(name for name, _ in found if name and not _NUMBERED.match(name)))
    operands = f" ({', '.join(names)})" if names else ""
    if code == DIVISOR:
        return DivisionError(f"ZeroDivisionError: whole numbers are divided by 0 in {name}", where=where,
                             why=f"an element of the divisor{operands} is 0",
                             do="check the divisor, or divide floating-point numbers")
    return IndexRangeError(f"an index is out of range in {name}", where=where,
                           why=f"an element of an index tensor{operands} is not below the size of the dim that it "
                               "selects from (or is below minus that size)",
                           do="check the values of the index tensor, for example token numbers against the size of the "
                              "vocabulary")


def _sources(plan: Plan) -> list[_Source]:
    """One place per symbol: numbers and plain sizes first, then sizes that are affine in one symbol more."""
    found: dict[str, _Source] = {}
    places: list[tuple[Size, int, int, bool]] = []
    for position, kind in enumerate(plan.inputs):
        if isinstance(kind, str):
            found.setdefault(kind, _Source(kind, position, -1, False, symbol(kind)))
            continue
        places += [(size, position, dim, False) for dim, size in enumerate(kind.shape)]
    for position, kind in enumerate(plan.inputs):
        if isinstance(kind, TensorType) and kind.strides is not None:
            places += [(size, position, dim, True) for dim, size in enumerate(kind.strides)]
    places.sort(key=lambda place: str(place[0]) not in symbols_of(place[0]))
    open_places = places
    while True:
        rest = []
        for size, position, dim, stride in open_places:
            unknown = [name for name in symbols_of(size) if name not in found]
            split = coefficient_of(size, unknown[0]) if len(unknown) == 1 else None
            if split is not None:
                found[unknown[0]] = _Source(unknown[0], position, dim, stride, size, *split)
            elif unknown:
                rest.append((size, position, dim, stride))
        if len(rest) == len(open_places):
            return list(found.values())
        open_places = rest
