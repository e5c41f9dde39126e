"""Errors of arguments that PyTorch cannot trace a program with: which argument, and what about it does not fit.

    The size of tensor a (s27: hint = 5) must match the size of tensor b (s98: hint = 6) at ...
    -->  the size of tensor a (dim 1 of ids = 5) must match the size of tensor b (dim 0 of scale = 6) at ...
"""
from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from anyshape.base.errors import AnyShapeError, InputError, InputIndexError, InputTypeError, InputValueError
from anyshape.frontend.messages.recompile_reasons import source_words, value_of
from anyshape.torch_compat.dtypes import DTYPE_NAMES
from anyshape.torch_compat.versions import api

AS_EAGER = {"TypeError": InputTypeError, "ValueError": InputValueError, "IndexError": InputIndexError}

def refusal(error: BaseException, target: Callable[..., Any], arguments: Sequence[Any],
            keywords: dict[str, Any]) -> AnyShapeError | None:
    """The error to raise instead of `error`, which a call of `target` ended in; None: `error` is the program's own."""
    inner = getattr(error, "inner_exception", None)
    if isinstance(inner, AnyShapeError) and not isinstance(inner, InputError):
        return inner
    failure = api.trace_failure(error)
    if failure is None and inner is None:
        return None
    named = _named(target, arguments, keywords)
    given = ", ".join(f"{name}: {_tensor_words(value)}" for name, value in named if isinstance(value, torch.Tensor))
    what = f"{_name(target)} does not take these arguments"
    elsewhere = [f"{name} is on {value.device}" for name, value in named
                 if isinstance(value, torch.Tensor) and value.device.type != "cpu"]
    if isinstance(inner, InputError):
        return InputError(what, where=inner.where, why=f"{inner.why} ({given})", do=inner.do)
    if elsewhere and "device" in f"{type(inner).__name__} {error}".lower():
        return InputError(what, why=f"{', '.join(elsewhere)}; the program runs on the CPU",
                          do="move the arguments to the CPU")
    if failure is None:
        return None
    kind, message, where, sources = failure
    for symbol, source in sources.items():
        place, number = source_words(source), value_of(source, dict(named))
        message = re.sub(rf"\b{symbol}: hint = (\d+)", rf"{place} = \1", message)
        message = re.sub(rf"\b{symbol}\b", place if number is None else f"{place} ({number})", message)
    error_type = AS_EAGER.get(kind, InputError)
    return error_type(what, where=where, why=f"{message} ({given})" if given else message,
                      do="correct the argument; if eager PyTorch takes it as it is, report that")


def _name(target: Callable[..., Any]) -> str:
    return getattr(target, "__name__", type(target).__name__)


def _named(target: Callable[..., Any], arguments: Sequence[Any], keywords: dict[str, Any]) -> list[tuple[str, Any]]:
    """(name, value) of what the caller passed; numbered where the signature does not say."""
    function = target.forward if isinstance(target, torch.nn.Module) else target
    try:
        bound = inspect.signature(function).bind(*arguments, **keywords).arguments
    except (TypeError, ValueError):
        return [*((f"input {index}", value) for index, value in enumerate(arguments)), *keywords.items()]
    found: list[tuple[str, Any]] = []
    for name, value in bound.items():
        many = isinstance(value, (tuple, list)) and any(isinstance(one, torch.Tensor) for one in value)
        found += [(f"{name}[{index}]", one) for index, one in enumerate(value)] if many else [(name, value)]
    return found


def _tensor_words(value: torch.Tensor) -> str:
    return f"{DTYPE_NAMES.get(value.dtype, value.dtype)}{list(value.shape)}"
