"""Calls of PyTorch operators by name: a template is turned once into a Python function of the operands.

    ("args", ("operand", 0), ("list", ("int", 2), ("operand", 1))), ("kwargs", ("alpha", ("int", 1)))
    -->  lambda operands, results=(): target(operands[0], [2, operands[1]], alpha=1)
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from anyshape.base.errors import DataError, VerifyError
from anyshape.ir.graph import Attr
from anyshape.runtime.torch_ops import lapack
from anyshape.runtime.torch_ops.bernoulli import bernoulli
from anyshape.runtime.torch_ops.onednn_workarounds import guarded_backward, guarded_convolution
from anyshape.runtime.torch_ops.onnx import OPERATORS
from anyshape.torch_compat.dtypes import TORCH_DTYPES


def resolve(target: str) -> Callable[..., Any]:
    """The operator overload that `target` names under torch.ops, e.g. "aten.convolution.default".

    Raises:
        VerifyError: this process has no such operator (its library is not imported, or torch lacks it).
    """
    found: Any = torch.ops
    for part in target.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise VerifyError(f"there is no operator {target}", why=str(error),
                              do="import the library that defines it, or use the torch version that the program was "
                                 "made with") from error
    return found  # type: ignore[no-any-return]


# operators that read the storage of their first operand by strides and an offset from its start
BY_STORAGE = frozenset(("as_strided", "as_strided_copy", "as_strided_scatter"))


def _in_own_storage(target: Any) -> Callable[..., Any]:
    """A call of `target` whose first operand lies dense at the start of its storage, as the trace had it: here it may
    be a window into a block."""
    def call(tensor: torch.Tensor, *rest: Any, **keywords: Any) -> Any:
        dense = tensor.contiguous()
        return target(dense.clone() if dense.storage_offset() else dense, *rest, **keywords)

    return call


def _converted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype, copy=True)


def _asserted(condition: torch.Tensor, message: str) -> None:
    """aten._assert_async, which raises RuntimeError whatever the user's program would have raised."""
    if not condition:
        raise DataError(message)


# what torch does in Python, in a quarter of a millisecond, and can do in its own code; what it says in other words; and
# what no operator of torch does
STAND_INS: dict[str, Callable[..., Any]] = {"aten._assert_async.msg": _asserted, "draws.bernoulli": bernoulli,
                                            "prims.convert_element_type.default": _converted, **OPERATORS,
                                            **lapack.OPERATORS}


_VECTOR = 32  # no fewer numbers than the widest register holds


def _dense_heads(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its last dim in steps of 1: a trace makes it so, but a copy inside of a program may be a view."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _attention(target: Any) -> Callable[..., Any]:
    """Fused attention, which divides by its lengths, and takes heads for dense. Over nothing its results are zero.
    With fewer keys than a vector has places, and no mask, it takes scores that are all NaN for -inf."""
    def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **keywords: Any) -> Any:
        if query.numel() and key.numel():
            if key.shape[-2] < _VECTOR and keywords.get("attn_mask") is None and not any(rest):
                keywords["attn_mask"] = query.new_zeros(1, key.shape[-2])
            return target(_dense_heads(query), _dense_heads(key), _dense_heads(value), *rest, **keywords)
        sums = torch.float64 if query.dtype == torch.float64 else torch.float32
        return query.new_zeros(*query.shape[:-1], value.shape[-1]), query.new_zeros(query.shape[:-1], dtype=sums)

    return call


DEEP = -1024.0  # a logarithm from here on has lost more digits of its sum than half precision has


def _attention_backward(target: Any) -> Callable[..., Any]:
    """The backward of fused attention, right also in rows that are masked everywhere with finite numbers: the operator
    gets the logarithm of their sum of exponentials, -3e38 + log(n), which is -3e38, and takes each weight to be n times
    what it was. A gradient that is smaller by n makes up for it, for all that the row gives is linear in it."""
    def call(gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
             sums: torch.Tensor, *rest: Any, attn_mask: torch.Tensor | None = None, scale: float | None = None) -> Any:
        if query.numel() and key.numel():
            query, key, value = (_dense_heads(tensor) for tensor in (query, key, value))
            deep = sums < DEEP if attn_mask is not None else None
            if attn_mask is not None and deep is not None and bool(deep.any()):
                gradient = _by_row_sums(gradient, query, key, attn_mask, scale, sums, deep)
            return target(_dense_heads(gradient), query, key, value, out, sums, *rest, attn_mask=attn_mask, scale=scale)
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)

    return call


def _by_row_sums(gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor,
                 scale: float | None, sums: torch.Tensor, deep: torch.Tensor) -> torch.Tensor:
    """The gradient with its `deep` rows divided by what their weights come to, one head after the other."""
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    gradient = gradient.clone()
    masks = mask.expand(*query.shape[:-1], key.shape[-2])
    for batch, head in deep.any(-1).nonzero().tolist():
        rows = deep[batch, head].nonzero().flatten()
        scores = query[batch, head, rows].to(sums.dtype) @ key[batch, head].to(sums.dtype).T
        scores = scores * factor + masks[batch, head, rows].to(sums.dtype)
        total = (scores - sums[batch, head, rows, None]).exp().sum(-1, keepdim=True)
        gradient[batch, head, rows] = (gradient[batch, head, rows] / total).to(gradient.dtype)
    return gradient


def _device_attention(target: Any) -> Callable[..., Any]:
    """Attention with a bias on a device. Its kernels want the bias's rows at multiples of 16 elements, which PyTorch's
    own call of them sees to. On NVIDIA's they return where the generator stood as two numbers on the host; values of a
    program are on its device."""
    def call(query: Any, key: Any, value: Any, attn_bias: Any, compute_log_sumexp: bool, dropout_p: float = 0.0,
             *rest: Any, **keywords: Any) -> Any:
        *found, seed, offset = target(
            query, key, value, _padded(attn_bias), compute_log_sumexp, dropout_p, *rest, **keywords)
        if dropout_p:
            return (*found, seed.to(query.device), offset.to(query.device))
        return (*found, *(torch.empty((), dtype=one.dtype, device=query.device) for one in (seed, offset)))

    return call


def _device_attention_backward(target: Any) -> Callable[..., Any]:
    """See `_device_attention`. The generator's numbers are read only where there was a dropout: that waits for them."""
    def call(gradient: Any, query: Any, key: Any, value: Any, bias: Any, out: Any, sums: Any, seed: Any, offset: Any,
             dropout: float, *rest: Any, **keywords: Any) -> Any:
        if torch.version.hip is None:
            seed, offset = (one.cpu() if dropout else torch.zeros((), dtype=one.dtype) for one in (seed, offset))
        return target(gradient, query, key, value, _padded(bias), out, sums, seed, offset, dropout, *rest, **keywords)

    return call


def _library_attention_backward(target: Any) -> Callable[..., Any]:
    """cuDNN's, which refuses sequences of one element, where PyTorch's choice at that length would be another kernel:
    the only weight is 1 there."""
    def call(gradient: Any, query: Any, key: Any, value: Any, *rest: Any, **keywords: Any) -> Any:
        dropout = rest[9]
        if query.shape[-2] != 1 or key.shape[-2] != 1 or dropout or query.shape[-3] != value.shape[-3]:
            return target(gradient, query, key, value, *rest, **keywords)
        return torch.zeros_like(query), torch.zeros_like(key), gradient.to(value.dtype)

    return call


def _padded(bias: torch.Tensor | None) -> torch.Tensor | None:
    """The same values, whose last dim lies in memory in a multiple of `BIAS_STEP` elements; repeated dims stay so."""
    if bias is None or not any(step % BIAS_STEP for step in bias.stride()[:-1]):
        return bias
    length = bias.shape[-1]
    once = bias
    for d in range(bias.dim() - 1):
        if bias.stride(d) == 0 and bias.shape[d]:
            once = once.narrow(d, 0, 1)
    return torch.nn.functional.pad(once, (0, -length % BIAS_STEP))[..., :length].expand(bias.shape)


BIAS_STEP = 16  # elements, as PyTorch pads them in `scaled_dot_product_attention`
FUNCTIONAL = "_c10d_functional."  # collectives of torch.distributed that give new tensors, there after `wait_tensor`
WAIT = f"{FUNCTIONAL}wait_tensor.default"


def _waited(target: Any) -> Callable[..., Any]:
    """A collective that has come when the call returns. It reads its operands until then, and here their memory is
    another value's as soon as no later step of the program reads them."""
    wait = resolve(WAIT)

    def call(*given: Any, **keywords: Any) -> Any:
        made = target(*given, **keywords)
        for one in made if isinstance(made, (list, tuple)) else (made,):
            wait(one)
        return made

    return call


def _guard_of(target: str) -> Callable[[Any], Callable[..., Any]] | None:
    return _waited if target.startswith(FUNCTIONAL) and target != WAIT else _GUARDED.get(target)


# operators that end the process, or read elsewhere; some do where eager PyTorch would not call them
_GUARDED: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "aten.convolution.default": guarded_convolution,
    "aten.convolution_backward.default": guarded_backward,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _attention_backward,
    "aten._scaled_dot_product_efficient_attention.default": _device_attention,
    "aten._scaled_dot_product_efficient_attention_backward.default": _device_attention_backward,
    "aten._scaled_dot_product_cudnn_attention_backward.default": _library_attention_backward,
    **{f"aten.{name}.default": _in_own_storage for name in BY_STORAGE},
}


@lru_cache(maxsize=4096)
def compile_extern(target: str, template: Attr) -> Callable[..., Any]:
    """The call of `target` as a function of the list of operands (tensors and numbers), and of that of the tensors that
    it writes where its template names results; template: ops/extern.py."""
    found = STAND_INS.get(target) or resolve(target)
    found = getattr(found, "_op", found)  # what an operator's overload calls, without its function of Python
    guarded = _guard_of(target)
    constants: dict[str, Any] = {"target": found if guarded is None else guarded(found)}

    def constant(value: Any) -> str:
        name = f"constant_{len(constants)}"
        constants[name] = value
        return name

    def source(entry: Any) -> str:
        tag = entry[0]
        if tag == "operand":
            return f"operands[{int(entry[1])}]"
        if tag == "result":
            return f"results[{int(entry[1])}]"
        if tag == "permuted":
            return f"operands[{int(entry[1])}].permute({[int(d) for d in entry[2:]]})"
        if tag == "list":
            return "[" + ", ".join(source(item) for item in entry[1:]) + "]"
        if tag == "none":
            return "None"
        if tag in ("int", "bool"):
            return repr(entry[1])
        if tag in ("float", "str"):
            return constant(entry[1])
        if tag == "complex":
            return constant(complex(entry[1], entry[2]))
        if tag == "dtype":
            return constant(TORCH_DTYPES[entry[1]])
        if tag == "device":
            return constant(torch.device(entry[1]))
        if tag in ("layout", "memory_format"):
            return constant(getattr(torch, entry[1]))
        raise VerifyError(f"the template of {target} has an unknown entry", why=f"{entry!r}")

    assert isinstance(template, tuple) and len(template) == 2, template
    arguments, keywords = template
    assert isinstance(arguments, tuple) and isinstance(keywords, tuple), template
    parts = [source(entry) for entry in arguments[1:]]
    for name, entry in keywords[1:]:  # type: ignore[misc, str-unpack]
        if not isinstance(name, str) or not name.isidentifier():
            raise VerifyError(f"the template of {target} has the keyword {name!r}", why="that is no name")
        parts.append(f"{name}={source(entry)}")
    text = f"lambda operands, results=(): target({', '.join(parts)})"
    return eval(compile(text, f"<extern {target}>", "eval"), constants)  # type: ignore[no-any-return]


def call_extern(target: str, template: Attr, operands: Sequence[Any]) -> Any:
    """Call `target` with the arguments of `template` over `operands`; what the operator returns."""
    return compile_extern(target, template)(operands)


def results_of(returned: Any, count: int) -> tuple[Any, ...]:
    """What an operator returned as `count` results. Where it returned more than `count` entries, the entries that
    are None (gradients that were not asked for), and then those that are no tensors (the longest sequence that an
    attention met), stand for no result.

    Raises:
        VerifyError: the number does not fit.
    """
    found = tuple(returned) if isinstance(returned, (tuple, list)) else () if returned is None else (returned,)
    if len(found) != count:
        found = tuple(item for item in found if item is not None)
    if len(found) != count:
        found = tuple(item for item in found if isinstance(item, torch.Tensor))
    if len(found) != count:
        raise VerifyError(f"an operator returned {len(found)} results, {count} were declared")
    return found
