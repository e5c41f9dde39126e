"""Content hashes of Python objects: functions, classes and modules in words that mean the same in another process.

    torch.nn.functional.silu    -> "function torch.nn.functional.silu 5c0e..."
    transformers.LlamaModel     -> "class transformers.models.llama.modeling_llama.LlamaModel 77ab..."

The hash of a function is that of its code, with the constants, the code of functions inside, and what its closure holds
of functions; that of a class is that of all functions along its method resolution order. So a method that was replaced
in one process and not in the other is told apart.
"""
from __future__ import annotations

import enum
import functools
import hashlib
import types
from typing import Any

import torch

from anyshape.torch_compat.dynamo.guard_record import NotRecorded

PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), torch.dtype, torch.device,
         torch.memory_format, torch.layout)
BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
           types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
           types.MethodWrapperType)
OPERATORS, OPERATORS_IN = ("OpOverload", "OpOverloadPacket"), "torch._ops"
# of operators, and of functions, whose definitions go with the versions in the key
NAMESPACES = ("aten.", "prims.", "prim.", "higher_order.", "anyshape.", "anyshape_route.", "anyshape_recurrent.",
              "anyshape_collective.")
PACKAGES = frozenset(("", "_operator", "builtins", "math", "torch", "anyshape"))
DEEPEST = 8  # closures inside of closures


class ObjectIdentities:
    """Describes objects; what it has found of a class or function it keeps as long as it lives: for one trace, or one
    look into the cache, in which nobody changes them."""

    def __init__(self) -> None:
        self.codes: dict[types.CodeType, str] = {}
        self.classes: dict[type, str] = {}
        self.functions: dict[int, tuple[types.FunctionType, str]] = {}

    def describe(self, value: Any) -> str:
        """An object in words.

        Raises:
            NotRecorded: it is known by nothing but its address.
        """
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, type):
            return f"class {value.__module__}.{value.__qualname__} {self.of_class(value)}"
        if isinstance(value, types.FunctionType):
            return f"function {value.__module__}.{value.__qualname__} {self.of_function(value)}"
        if isinstance(value, types.CodeType):
            return f"code {value.co_name} {self.of_code(value)}"
        if isinstance(value, BUILTIN):
            owner = getattr(value, "__objclass__", None) or getattr(value, "__self__", None)
            owner = owner if isinstance(owner, (type, types.ModuleType)) else type(owner)
            return f"builtin {getattr(value, '__module__', '')} {owner.__name__}.{value.__name__}"
        if isinstance(value, types.MethodType):
            return f"method {self.describe(value.__func__)} of {self.describe(value.__self__)}"
        if isinstance(value, enum.Enum):
            return f"enum {type(value).__module__}.{type(value).__qualname__}.{value.name}"
        if type(value).__name__ in OPERATORS and type(value).__module__ == OPERATORS_IN:
            return f"operator {value}"
        if isinstance(value, functools.partial):
            parts = [value.func, *value.args, *value.keywords.values()]
            return f"partial {', '.join(map(self.describe, parts))} {list(value.keywords)}"
        if type(value) in PLAIN:
            return f"{type(value).__name__} {value!r}"
        raise NotRecorded(f"a guard asks for one object, a {type(value).__module__}.{type(value).__qualname__}")

    def knows(self, code: types.CodeType) -> bool:
        """Whether something that was described has this code."""
        return code in self.codes

    def of_code(self, code: types.CodeType) -> str:
        """The hash of a code object. Where it stands in its file does not count."""
        found = self.codes.get(code)
        if found is None:
            constants = [self.of_code(one) if isinstance(one, types.CodeType) else _constant(one)
                         for one in code.co_consts]
            parts = (code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags,
                     code.co_argcount, code.co_kwonlyargcount, code.co_posonlyargcount, code.co_exceptiontable,
                     constants)
            found = self.codes[code] = _hash(repr(parts))
        return found

    def of_function(self, function: types.FunctionType, depth: int = 0) -> str:
        """The hash of a function with those in its closure."""
        known = self.functions.get(id(function))
        if known is not None:
            return known[1]
        parts = [self.of_code(function.__code__)]
        for cell in (function.__closure__ or ()) if depth < DEEPEST else ():
            try:
                inside = cell.cell_contents
            except ValueError:  # still empty
                continue
            if isinstance(inside, types.FunctionType) and inside is not function:
                parts.append(self.of_function(inside, depth + 1))
        digest = _hash(" ".join(parts))
        self.functions[id(function)] = function, digest
        return digest

    def of_class(self, kind: type) -> str:
        """The hash of a class: of all functions along its method resolution order."""
        found = self.classes.get(kind)
        if found is None:
            own = [f"{name} {self.of_function(one)}" for name, value in vars(kind).items()
                   for one in _functions(value)]
            above = [self.of_class(base) for base in kind.__mro__[1:] if base is not object]
            found = self.classes[kind] = _hash(" ".join((kind.__qualname__, *own, *above)))
        return found


def foreign_call(graph: torch.fx.GraphModule) -> str:
    """An operator or function that a captured graph calls, and that is neither PyTorch's nor ours, in words: what it
    does to shapes and gradients went into the program, and no guard knows its definition. "": there is none."""
    for part in graph.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            target = node.target
            if node.op == "call_function" and type(target).__name__ in OPERATORS:
                if not str(target).startswith(NAMESPACES):
                    return f"the operator {target}"
            elif node.op == "call_function":
                module = getattr(target, "__module__", None) or ""
                if module.partition(".")[0] not in PACKAGES:
                    return f"{module}.{getattr(target, '__qualname__', target)} as it is"
    return ""


def _functions(value: Any) -> list[types.FunctionType]:
    """The functions of Python that an attribute of a class leads to."""
    if isinstance(value, property):
        inside: tuple[Any, ...] = (value.fget, value.fset, value.fdel)
    elif isinstance(value, functools.cached_property):
        inside = (value.func,)
    else:
        inside = (getattr(value, "__func__", value),)
    return [one for one in inside if isinstance(one, types.FunctionType)]


def _constant(value: Any) -> str:
    """A constant of a code object; sets come in any order."""
    if isinstance(value, frozenset):
        return f"frozenset({sorted(map(_constant, value))})"
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"
    return f"{type(value).__name__} {value!r}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
