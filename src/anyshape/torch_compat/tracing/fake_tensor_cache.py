"""The fake-tensor cache: shapes of traced operators are found once a pass.

A trace runs every operator on tensors that have a shape and no numbers, and torch finds each shape anew: 0.2 to 3
milliseconds of Python with symbolic sizes. Layers repeat. An operator that is given the very sizes (the same objects)
that it was given before in this pass gets a result with the same objects again, in memory of its own, or in that of the
operand which the first result was a view of.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from anyshape import torch_compat as compat
from anyshape.torch_compat.versions.autocast import casts

FAKE = "torch._subclasses.fake_tensor."
FakeTensor = compat.need(f"{FAKE}FakeTensor")
PLAIN = frozenset((bool, int, float, str, type(None), torch.dtype, torch.layout, torch.device, torch.memory_format))
FRESH, VIEW, OPERAND = range(3)


class Unkeyed(Exception):
    """An argument that no key can be made of."""


@contextlib.contextmanager
def remembered_shapes(memory: dict[Any, Any]) -> Iterator[None]:
    """Inside, results of operators are kept in `memory`, which is emptied when a pass begins. Without effect where
    torch's internals are not as expected."""
    FakeTensorMode = compat.need(f"{FAKE}FakeTensorMode")
    if not compat.has(f"{FAKE}FakeTensorMode._dispatch_impl", "torch._functionalize_unsafe_set",
                      "torch.Tensor._is_view", "torch._C._current_graph_task_id",
                      f"{FAKE}in_kernel_invocation_manager"):
        yield
        return
    dispatch = FakeTensorMode._dispatch_impl
    FakeTensorMode._dispatch_impl = _remembering(_without_numbers(dispatch), memory)
    try:
        yield
    finally:
        FakeTensorMode._dispatch_impl = dispatch


def _without_numbers(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """`dispatch`, in which an operator on numbers that are not known has no known result: torch 2.13 takes `aten.div`
    of two sizes for the constant NaN, so that `float(torch.ops.aten.div(int(a), int(b)))` is NaN in a trace."""
    def dispatched(mode: Any, op: Any, types: Any, arguments: Any, keywords: Any) -> Any:
        result = dispatch(mode, op, types, arguments, keywords)
        if result.__class__ is FakeTensor and result.constant is not None \
                and any(isinstance(one, (torch.SymInt, torch.SymFloat)) for one in arguments):
            result.constant = None
        return result

    return dispatched


def _remembering(dispatch: Callable[..., Any], memory: dict[Any, Any]) -> Callable[..., Any]:
    from torch.fx.experimental.proxy_tensor import get_proxy_mode
    pure: dict[Any, bool] = {}

    def remembered(mode: Any, op: Any, types: Any, arguments: Any, keywords: Any) -> Any:
        known = pure.get(op)
        if known is None:
            known = pure[op] = _is_pure(op)
        if not known or mode.shape_env is None or get_proxy_mode() is not None:
            return dispatch(mode, op, types, arguments, keywords)
        operands: list[Any] = []
        kept: list[Any] = []
        try:
            key = (op, mode, setting(), _key(arguments, mode, operands, kept), _key(keywords, mode, operands, kept))
        except Unkeyed:
            return dispatch(mode, op, types, arguments, keywords)
        found = memory.get(key)
        if found is not None:
            return _again(found[0], mode, operands)
        ranges = len(mode.shape_env.var_to_range)
        result = dispatch(mode, op, types, arguments, keywords)
        form = _form(result, mode, operands) if len(mode.shape_env.var_to_range) == ranges else None
        if form is not None:
            memory[key] = (form, kept)  # the sizes are held, for the key has their addresses
        return result

    return remembered


def _is_pure(op: Any) -> bool:
    """Whether an operator's result depends on nothing but its arguments' shapes, and it changes nothing."""
    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view,
            torch.Tag.nondeterministic_seeded)
    return isinstance(op, compat.OpOverload) and op.namespace in ("aten", "prims") \
        and not op._schema.is_mutable and not any(tag in op.tags for tag in tags) and "lift" not in op._schema.name \
        and any(isinstance(argument.type, (torch.TensorType, torch.ListType)) for argument in op._schema.arguments)


_task: Callable[[], int] = compat.bind(
    globals(), "_task", lambda: compat.get("torch._C._current_graph_task_id") or (lambda: -1))


def setting() -> tuple[Any, ...]:
    """What else decides how an operator is taken apart."""
    return (torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
            _task() != -1, casts())


def _key(value: Any, mode: Any, operands: list[Any], kept: list[Any]) -> Any:
    """A hashable form of an argument; tensors among it are appended to `operands`, symbolic sizes to `kept`."""
    kind = value.__class__
    if kind in PLAIN:
        return kind, value
    if kind is torch.SymInt:
        return torch.SymInt, _size(value, kept)
    if kind is tuple or kind is list:
        return kind, tuple([_key(one, mode, operands, kept) for one in value])
    if isinstance(value, dict):
        return tuple([(name, _key(one, mode, operands, kept)) for name, one in value.items()])
    if isinstance(value, torch.Tensor):
        if not _usual(value, mode):
            raise Unkeyed
        operands.append(value)
        return (value.dtype, value.fake_device, tuple([_size(size, kept) for size in value.shape]),  # type: ignore
                tuple([_size(stride, kept) for stride in value.stride()]), _size(value.storage_offset(), kept))
    raise Unkeyed


def _size(size: Any, kept: list[Any]) -> Any:
    if size.__class__ is int:
        return size
    node = size.node
    if node.__class__.__name__ != "SymNode":
        raise Unkeyed
    kept.append(node)
    return "", id(node)


def _usual(tensor: Any, mode: Any) -> bool:
    """A fake tensor of this mode that stands for a plain strided one."""
    return (tensor.__class__ is FakeTensor and tensor.fake_mode is mode and tensor.constant is None
            and tensor.real_tensor is None and tensor.layout is torch.strided and not tensor.is_conj()
            and not tensor.is_neg() and not tensor.is_quantized and tensor.pytype is None
            and tensor.dispatch_keys is None)


def _form(result: Any, mode: Any, operands: list[Any]) -> Any:
    """How a result is made again; None if it cannot be."""
    if isinstance(result, (tuple, list)):
        if result.__class__ not in (tuple, list):
            return None
        parts = [_form(one, mode, operands) for one in result]
        own = [compat.storage_id(one) for one, part in zip(result, parts, strict=True)
               if part is not None and part[0] == FRESH]
        return None if None in parts or len(set(own)) < len(own) else (result.__class__, parts)
    if not isinstance(result, torch.Tensor) or not _usual(result, mode):
        return None
    places = [place for place, one in enumerate(operands) if one is result]
    if places:
        return OPERAND, places[0]
    if result.is_inference() or result.requires_grad or result._version or result._is_view():
        return None
    storage = compat.storage_id(result)
    places = [place for place, one in enumerate(operands) if compat.storage_id(one) == storage]
    if len(places) > 1:
        return None
    with compat.need(f"{FAKE}in_kernel_invocation_manager")(mode):
        pattern = torch.ops.aten.detach.default(result)
        if pattern.__class__ is not torch.Tensor or pattern.device.type != "meta":
            return None
        if places:
            return VIEW, pattern, result.fake_device, places[0]  # type: ignore[attr-defined]
        return FRESH, pattern, result.fake_device, pattern.untyped_storage().nbytes()  # type: ignore[attr-defined]


def _again(form: Any, mode: Any, operands: list[Any]) -> Any:
    kind = form[0]
    if kind is tuple or kind is list:
        return kind([_again(part, mode, operands) for part in form[1]])
    if kind == OPERAND:
        return operands[form[1]]
    _, pattern, device, memory = form
    with compat.need(f"{FAKE}in_kernel_invocation_manager")(mode):
        shape = pattern.data  # sizes, strides and what was found out about them; no copy, and a version of its own
        source = operands[memory] if kind == VIEW else torch.empty((memory,), dtype=torch.uint8, device="meta")
        compat.need("torch._functionalize_unsafe_set")(shape, source)
    return FakeTensor(mode, shape, device)
