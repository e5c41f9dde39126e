"""Plain holders of values, as torch's tracer should take them: `types.SimpleNamespace` (subclasses that make their
objects as it does, too), which ends a graph in torch, and the `__dict__` of a new object, which torch gives out empty.

    return SimpleNamespace(loss=loss, out=out)  -->  an object whose attributes are set, as of a class of the user's own

Without effect where torch's internals are not as expected.
"""
from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from anyshape import torch_compat as compat

RESUMED = "torch_dynamo_resume_in"  # Dynamo's name for what comes after a graph break begins so
VARIABLES = "torch._dynamo.variables."
Holder = types.SimpleNamespace
MOST_POSITIONAL = 1 if sys.version_info >= (3, 13) else 0


def _made(kind: Any, given: Mapping[str, Any], named: Mapping[str, Any]) -> Any:
    """A holder of class `kind`; what the tracer traces in place of a call of the class."""
    holder = kind.__new__(kind)
    for name, value in given.items():
        setattr(holder, name, value)
    for name, value in named.items():
        setattr(holder, name, value)
    return holder


def _is_plain(kind: Any) -> bool:
    """Whether objects of a class are made and changed as those of SimpleNamespace are."""
    return isinstance(kind, type) and issubclass(kind, Holder) and all(
        getattr(kind, name) is getattr(Holder, name) for name in ("__new__", "__init__", "__setattr__",
                                                                  "__getattribute__"))


@contextlib.contextmanager
def holders_traced() -> Iterator[None]:
    """Inside, Dynamo traces calls of such classes, and changes of their objects. When nested, without effect."""
    names = [compat.get(VARIABLES + name) for name in ("UserDefinedClassVariable", "ConstDictVariable",
                                                       "DunderDictVariable", "VariableTracker", "user_defined")]
    effects = compat.get("torch._dynamo.side_effects.SideEffects")
    if effects is None or None in names:
        yield
        return
    kind, dictionary, attributes_of, tracker, user_defined = names
    try:
        call, known, changes = (kind.call_function, kind.supported_c_new_functions,
                                effects.cls_supports_mutation_side_effects)
        attributes, standard = vars(attributes_of)["create"], user_defined.is_standard_setattr
    except (AttributeError, KeyError):  # of an older torch
        yield
        return
    if hasattr(call, "anyshape"):
        yield
        return

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if not self.source or not _is_plain(self.value) or len(args) > MOST_POSITIONAL:
            return call(self, tx, args, kwargs)
        build = tracker.build
        named = dictionary({build(tx, name): value for name, value in kwargs.items()})
        given = args[0] if args else dictionary({})
        return tx.inline_user_function_return(build(tx, _made), [self, given, named], {})

    def new_functions() -> Any:
        return known() | {Holder.__new__}

    def supports_changes(one: type) -> bool:
        return _is_plain(one) or bool(changes(one))

    def is_standard_setattr(method: Any) -> bool:
        return method is Holder.__setattr__ or bool(standard(method))

    def create(cls: Any, tx: Any, holder: Any) -> Any:
        found = attributes.__func__(cls, tx, holder)
        found.holder = holder  # what the tracer sees in use: else it forgets a new object, and with it these attributes
        return found

    call_function.anyshape = True  # type: ignore[attr-defined]
    patches = [(kind, "call_function", call_function, call),
               (kind, "supported_c_new_functions", staticmethod(new_functions), staticmethod(known)),
               (effects, "cls_supports_mutation_side_effects", staticmethod(supports_changes),
                staticmethod(changes)),
               (user_defined, "is_standard_setattr", is_standard_setattr, standard),
               (attributes_of, "create", classmethod(create), attributes)]
    try:
        for owner, name, ours, _ in patches:
            setattr(owner, name, ours)
        yield
    finally:
        for owner, name, _, torchs in patches:
            setattr(owner, name, torchs)


@contextlib.contextmanager
def parts_of_holders_traced() -> Iterator[None]:
    """Inside, Dynamo also looks at what comes after a graph break where its tensors are attributes of objects. It
    passes over frames in which it sees no tensor, and looks into lists, tuples and dictionaries only."""
    name = "torch._dynamo.convert_frame.has_tensor_in_frame"
    sees = compat.get(name)
    if sees is None:
        yield
        return
    room = compat.need("torch._dynamo.convert_frame")

    def has_tensor_in_frame(frame: Any) -> bool:
        return bool(sees(frame)) or (frame.f_code.co_name.startswith(RESUMED)
                                     and any(_holds_tensors(value) for value in frame.f_locals.values()))

    room.has_tensor_in_frame = has_tensor_in_frame
    try:
        yield
    finally:
        room.has_tensor_in_frame = sees


def _holds_tensors(value: Any, depth: int = 2) -> bool:
    """Whether a tensor is among the attributes of an object, or among those of an attribute."""
    if isinstance(value, torch.Tensor):
        return True
    inner = getattr(value, "__dict__", None)
    return depth > 0 and isinstance(inner, dict) and not isinstance(value, type | types.ModuleType) and any(
        _holds_tensors(one, depth - 1) for one in list(inner.values()))
