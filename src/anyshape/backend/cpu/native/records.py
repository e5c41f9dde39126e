"""Records and memory of native routines as Python has them: an address with attributes, words of 64 bits, and the
functions on memory that routines may call. backend/cpu/native/compiler.py translates them to LLVM.

    class Span(Struct):                 span = new(Span)
        count: i64                      span.count = 3        the word at the address
        values: Array[i64]              span.values[2]        the third word at the address that stands there
"""
from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Generic, NamedTuple, TypeVar, cast, get_args, get_origin, get_type_hints

i64 = int
T = TypeVar("T")
R = TypeVar("R", bound="Struct")


class Inline(NamedTuple):
    """Marks a field that lies in its record, `number` records or elements of it, in place of their address."""

    number: int = 1


Nested = Annotated[T, Inline()]


class Field(NamedTuple):
    """Where a field lies in its record, in words, and what it is. `inline`: how many of these lie in the record; None:
    its value or address does."""

    at: int
    kind: Any
    inline: int | None

    @property
    def words(self) -> int:
        return 1 if self.inline is None else self.inline * words_of(element_of(self.kind))

    def __get__(self, record: Struct | None, owner: type[Struct]) -> Any:
        if record is None:
            return 8 * self.at
        at = record + 8 * self.at
        return _view(self.kind, load64(at) if self.inline is None else at)

    def __set__(self, record: Struct, value: Any) -> None:
        assert self.inline is None, "what lies in a record is written by its own fields"
        store64(record + 8 * self.at, value)


class Struct(int):
    """A record of words at an address. Its annotations are its fields: `i64`; a record or an `Array`, by address; with
    `Nested`, or `Annotated[Array[...], Inline(n)]`, in the record itself. On the class, a field is its byte offset."""

    fields: Mapping[str, Field] = {}
    total = 0  # words
    memory: Any

    def __init_subclass__(cls) -> None:
        fields = dict(cls.fields)
        at = cls.total
        for name, annotation in inspect.get_annotations(cls).items():
            assert name not in fields, f"{cls.__name__} has two fields {name}"
            if annotation == "i64":  # most are
                fields[name], width = Field(at, int, None), 1
            else:
                kind, inline = _evaluated(annotation, cls.__module__), None
                if get_origin(kind) is Annotated:
                    kind, mark = get_args(kind)
                    inline = mark.number
                fields[name] = Field(at, kind, inline)
                width = fields[name].words
            setattr(cls, name, fields[name])
            at += width
        cls.fields, cls.total = fields, at

    @classmethod
    def index(cls, name: str) -> int:
        """The word of a field; of one in a record within it by dots ("a.slot")."""
        first, _, rest = name.partition(".")
        field = cls.fields[first]
        return field.at + (field.kind.index(rest) if rest else 0)

    @classmethod
    def encoder(cls) -> Callable[..., list[int]]:
        """A function from the fields, all by name, to the words of the record; of nested ones a sequence of words, of
        an array at the end that is open (`Inline(0)`) as many as there are."""
        parts = ", ".join(name if field.inline is None else f"*{name}" for name, field in cls.fields.items())
        names: dict[str, Any] = {}
        exec(f"def encode(*, {', '.join(cls.fields)}):\n    return [{parts}]", names)  # noqa: S102
        return cast(Callable[..., list[int]], names["encode"])


def _evaluated(annotation: Any, module: str) -> Any:
    """What an annotation of a module says: `get_type_hints` takes ten times as long for a record, and every process
    makes all of them."""
    return eval(annotation, vars(sys.modules[module])) if isinstance(annotation, str) else annotation  # noqa: S307


class Array(int, Generic[T]):
    """Elements side by side at an address: words, or records."""

    memory: Any
    element: Any

    def __getitem__(self, index: int) -> T:
        if self.element is int:
            return cast(T, load64(self + 8 * index))
        return cast(T, _view(self.element, self + 8 * words_of(self.element) * index))

    def __setitem__(self, index: int, value: T) -> None:
        assert self.element is int, "records of an array are written by their fields"
        store64(self + 8 * index, cast(int, value))


def array_at(element: type[T], address: int) -> Array[T]:
    """The array of such elements at an address."""
    result: Array[T] = Array(address)
    result.element = element
    return result


def tail(array: Array[T], count: int) -> Array[T]:
    """The array without its first elements."""
    return array_at(array.element, array + 8 * words_of(array.element) * count)


def words_of(kind: Any) -> int:
    """Words of a record, or of a number."""
    return 1 if kind is int else int(kind.total)


def size_of(kind: type[Struct]) -> int:
    """Bytes of a record."""
    return 8 * words_of(kind)


def element_of(kind: Any) -> Any:
    """What an array holds; of a record or number itself."""
    return get_args(kind)[0] if get_origin(kind) is Array else kind


def kind_of(annotation: Any) -> Any:
    """What an annotation says of a value: a record, an array, or a number."""
    record = isinstance(annotation, type) and issubclass(annotation, Struct)
    return annotation if record or get_origin(annotation) is Array else int


def _view(kind: Any, address: int) -> Any:
    """The value of such a type, whose word this is."""
    if kind is int:
        return address
    return array_at(element_of(kind), address) if get_origin(kind) is Array else kind(address)


def _allocated(count: int) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * count)()


def new(kind: type[R]) -> R:
    """A zeroed record on the stack."""
    memory = _allocated(words_of(kind))
    result = kind(ctypes.addressof(memory))
    result.memory = memory
    return result


def words(count: int) -> Array[int]:
    """`count` zeroed words on the stack, a constant number."""
    memory = _allocated(count)
    result = array_at(int, ctypes.addressof(memory))
    result.memory = memory
    return result


def _loader(kind: Any) -> Callable[[int], int]:
    def load(address: int) -> int:
        return int(kind.from_address(address).value)
    load.__name__ = f"load{8 * ctypes.sizeof(kind)}"
    return load


def _storer(kind: Any) -> Callable[[int, int], None]:
    def store(address: int, value: int) -> None:
        kind.from_address(address).value = address_of(value)
    store.__name__ = f"store{8 * ctypes.sizeof(kind)}"
    return store


# the unsigned number at an address, of so many bits (64: with a sign); the low bits of a value to an address
load8, store8 = _loader(ctypes.c_uint8), _storer(ctypes.c_uint8)
load16, store16 = _loader(ctypes.c_uint16), _storer(ctypes.c_uint16)
load32, store32 = _loader(ctypes.c_uint32), _storer(ctypes.c_uint32)
load64, store64 = _loader(ctypes.c_int64), _storer(ctypes.c_int64)


def copy_bytes(target: int, source: int, count: int) -> None:
    """memcpy."""
    ctypes.memmove(target, source, count)


def fill_zero(target: int, count: int) -> None:
    """memset to 0."""
    ctypes.memset(target, 0, count)


_routines: dict[int, Callable[..., int]] = {}


def address_of(function: int | Callable[..., int]) -> int:
    """A number that `call` takes for a function, in place of the address that it has as native code."""
    if not callable(function):
        return int(function)
    _routines[id(function)] = function
    return id(function)


def call(function: int | Callable[..., int], *arguments: int | Callable[..., int]) -> int:
    """Calls the function at an address with i64 arguments; its result is an i64."""
    address, values = address_of(function), [address_of(argument) for argument in arguments]
    if address not in _routines:
        return int(ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * len(values))(address)(*values))
    routine = _routines[address]
    hints = get_type_hints(routine)
    return routine(*(_view(kind_of(hints.get(name, int)), value)
                     for name, value in zip(inspect.signature(routine).parameters, values, strict=True)))


def call_void(function: int | Callable[..., int], *arguments: int | Callable[..., int]) -> None:
    """Calls the function at an address with i64 arguments; it has no result."""
    call(function, *arguments)


def minimum(left: int, right: int) -> int:
    """The smaller."""
    return min(left, right)


def maximum(left: int, right: int) -> int:
    """The larger."""
    return max(left, right)
