"""The signature of a deployed program: names, dtypes, sizes and nesting of its arguments and results, as JSON.

    {"args": ["tuple", [0, 1]], "kwargs": ["dict", [["mask", 2]]]}      numbers are leaves: positions among the inputs

An input is an array, a whole number, or a value that was fixed when the program was made.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from anyshape.artifact.format.container import refused
from anyshape.base.errors import InputError

KINDS = ("array", "size", "fixed")
MOST_DEPTH = 16
Tree = Any  # an int (a leaf), or [kind, items]: "tuple" and "list" of trees, "dict" of [key, tree]


@dataclass(frozen=True, slots=True)
class InputSpec:
    """An input of the user's. position: among the plan's inputs; -1: the program does not have it. value: of a fixed
    one."""

    name: str
    kind: str
    position: int
    value: bool | int | float | str | None = None


@dataclass(frozen=True, slots=True)
class Signature:
    """What a deployed program takes and gives, read from JSON and written to it. args, kwargs: trees over `inputs`;
    results: a tree over the program's outputs. names: symbol -> what messages call it. gives: the results' names, in
    the tree's order, where the model had names for them (an ONNX model has)."""

    inputs: tuple[InputSpec, ...]
    args: Tree
    kwargs: Tree
    results: Tree
    names: Mapping[str, str]
    gives: tuple[str, ...] = ()

    @property
    def is_flat(self) -> bool:
        """Whether the inputs are the arguments by place, in this order, and there are no others."""
        return self.args[1] == list(range(len(self.inputs))) and not self.kwargs[1]

    def is_like(self, other: Signature) -> bool:
        """Whether arguments and results are those of another signature; only their places in the program differ."""
        return (self.args, self.kwargs, self.results, self.gives) == (
            other.args, other.kwargs, other.results, other.gives) and [
            replace(one, position=0) for one in self.inputs] == [replace(one, position=0) for one in other.inputs]

    def flat(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> list[Any]:
        """The arguments of a call, one per input.

        Raises:
            InputError: they are nested otherwise.
        """
        found: list[Any] = [None] * len(self.inputs)
        if len(arguments) != len(self.args[1]):
            arguments, keywords = self._moved(arguments, keywords)
        _fill(self.args, tuple(arguments), found, self)
        _fill(self.kwargs, keywords, found, self)
        return found

    def _moved(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Arguments as the program takes them: those that are given by name where it has a place, or by place where it
        has a name."""
        given, rest = list(arguments), dict(keywords)
        for item in self.args[1][len(given):]:
            if isinstance(item, int) and self.inputs[item].name in rest:
                given.append(rest.pop(self.inputs[item].name))
        keys = [key for key, _ in self.kwargs[1]]
        while len(given) > len(self.args[1]) and keys and keys[0] not in rest:
            rest[keys.pop(0)] = given.pop(len(self.args[1]))
        strange = [key for key in rest if key not in dict(self.kwargs[1])]
        missing = [self.inputs[item].name for item in self.args[1][len(given):] if isinstance(item, int)]
        if strange or missing:
            parts = [f"it has no argument {', '.join(strange)[:200]}"] * bool(strange) \
                + [f"{', '.join(missing)[:200]} {'is' if len(missing) == 1 else 'are'} missing"] * bool(missing)
            raise InputError("the arguments are not those of the program", why="; ".join(parts), do=_advice(self))
        return given, rest

    def nested(self, outputs: Sequence[Any]) -> Any:
        """The results as the program's author returned them."""
        return _nested(self.results, outputs)

    def result_names(self, name: str = "result") -> list[tuple[str, int]]:
        """A name for each result, and which output it is: the model's own; without, "result", or "result.0",
        "result.key" of nested ones."""
        found = list(_named(self.results, name))
        return [(own, leaf) for own, (_, leaf) in zip(self.gives, found, strict=True)] if self.gives else found

    def encode(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"inputs": [asdict(one) for one in self.inputs], "args": self.args, "kwargs": self.kwargs,
                "results": self.results, "names": dict(self.names),
                **({"gives": list(self.gives)} if self.gives else {})}


def decode(found: Any, where: str) -> Signature:
    """The signature in what `encode` made.

    Raises:
        ArtifactError: it is none.
    """
    if not isinstance(found, dict) or found.keys() - {"gives"} != {"inputs", "args", "kwargs", "results", "names"}:
        raise refused(where, "the signature is not complete")
    if not isinstance(found["inputs"], list) or not all(isinstance(one, dict) for one in found["inputs"]):
        raise refused(where, "the signature has no inputs")
    inputs = []
    for one in found["inputs"]:
        fits = one.keys() == {"name", "kind", "position", "value"} and isinstance(one["name"], str) \
            and one["kind"] in KINDS and type(one["position"]) is int and one["position"] >= -1 \
            and isinstance(one["value"], (bool, int, float, str, type(None)))
        if not fits or (one["kind"] == "array" and one["position"] < 0):
            raise refused(where, f"this is no input: {str(one)[:80]}")
        inputs.append(InputSpec(**one))
    names = found["names"]
    if not isinstance(names, dict) or not all(isinstance(one, str) for one in names.values()):
        raise refused(where, "names of sizes are no texts")
    leaves: list[int] = []
    for name in ("args", "kwargs"):
        _check(found[name], leaves, where, 0)
        if isinstance(found[name], int) or found[name][0] != {"args": "tuple", "kwargs": "dict"}[name]:
            raise refused(where, f"{name} are no {'tuple' if name == 'args' else 'dict'}")
    if sorted(leaves) != list(range(len(inputs))):
        raise refused(where, "not every input is one argument")
    given: list[int] = []
    _check(found["results"], given, where, 0)
    gives = found.get("gives", [])
    if not isinstance(gives, list) or not all(isinstance(one, str) for one in gives) \
            or len(gives) not in (0, len(given)) or len(set(gives)) != len(gives):
        raise refused(where, "names of results are not one text for each")
    return Signature(tuple(inputs), found["args"], found["kwargs"], found["results"], names, tuple(gives))


def _check(tree: Any, leaves: list[int], where: str, depth: int) -> None:
    if type(tree) is int and 0 <= tree < 2**31:
        leaves.append(tree)
        return
    if depth < MOST_DEPTH and isinstance(tree, list) and len(tree) == 2 and isinstance(tree[1], list):
        kind, items = tree
        if kind in ("tuple", "list"):
            for item in items:
                _check(item, leaves, where, depth + 1)
            return
        if kind == "dict" and all(isinstance(item, list) and len(item) == 2 and isinstance(item[0], str)
                                  for item in items):
            for _, item in items:
                _check(item, leaves, where, depth + 1)
            return
    raise refused(where, f"this is no nesting of arguments: {str(tree)[:80]}")


def most_leaf(tree: Tree) -> int:
    """The largest leaf; -1: there is none."""
    if isinstance(tree, int):
        return tree
    items = tree[1] if tree[0] != "dict" else [item for _, item in tree[1]]
    return max(map(most_leaf, items), default=-1)


def _fill(tree: Tree, value: Any, found: list[Any], signature: Signature) -> None:
    if isinstance(tree, int):
        found[tree] = value
        return
    kind, items = tree
    if kind == "dict":
        if not isinstance(value, Mapping) or value.keys() != {key for key, _ in items}:
            names = ", ".join(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
            raise InputError("the arguments are not those of the program", why=f"named ones are "
                             f"{', '.join(key for key, _ in items) or 'none'}; given: {names or 'none'}",
                             do=_advice(signature))
        for key, item in items:
            _fill(item, value[key], found, signature)
        return
    wanted = tuple if kind == "tuple" else list
    if not isinstance(value, wanted) or len(value) != len(items):
        given = len(value) if isinstance(value, wanted) else type(value).__name__
        raise InputError("the arguments are not those of the program",
                         why=f"expected a {kind} of {len(items)}, given: {given}", do=_advice(signature))
    for item, one in zip(items, value, strict=True):
        _fill(item, one, found, signature)


def _advice(signature: Signature) -> str:
    return f"pass {', '.join(one.name for one in signature.inputs) or 'nothing'}, nested as when it was exported"


def _named(tree: Tree, name: str) -> Iterator[tuple[str, int]]:
    if isinstance(tree, int):
        yield name, tree
        return
    items = tree[1] if tree[0] == "dict" else enumerate(tree[1])
    for key, item in items:
        yield from _named(item, f"{name}.{key}")


def _nested(tree: Tree, outputs: Sequence[Any]) -> Any:
    if isinstance(tree, int):
        return outputs[tree]
    kind, items = tree
    if kind == "dict":
        return {key: _nested(item, outputs) for key, item in items}
    found = [_nested(item, outputs) for item in items]
    return tuple(found) if kind == "tuple" else found
