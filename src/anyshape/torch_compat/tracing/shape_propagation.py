"""Shape propagation: captured programs run on shapes alone, which gives the shape, strides and memory of each call.

Torch has two ways. A tensor of FakeTensorMode stands for a tensor of a processor: every operator can be asked, for a
millisecond of Python each. A tensor on the device "meta" has the shape and nothing else: an operator takes
microseconds, but what asks for the device hears the wrong one. So values are meta tensors here; what does the same on
every device (`ANYWHERE`) gets them as they are, and everything else fake tensors of the same sizes, strides and memory.
What gave memory of its own is remembered by the shapes that it was given, for layers repeat.
"""
from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from anyshape.torch_compat import compile_lock, get, has, need, storage_id
from anyshape.torch_compat import tree as pytree
from anyshape.torch_compat.tracing import settings
from anyshape.torch_compat.tracing.fake_tensor_cache import FAKE, PLAIN, Unkeyed, setting
from anyshape.torch_compat.tracing.quiet_logs import FAKE_TENSORS, quiet
from anyshape.torch_compat.versions import api, symbolic_functions
from anyshape.torch_compat.versions.autocast import casts

# Functions and methods by their names. Their code chooses by shapes, strides and dtypes only.
ANYWHERE_NAMES = frozenset((
    # views, and copies where a view does not do
    "view", "reshape", "flatten", "unflatten", "expand", "expand_as", "view_as", "reshape_as", "permute", "transpose",
    "t", "swapaxes", "movedim", "squeeze", "unsqueeze", "select", "narrow", "split", "chunk", "unbind", "diagonal",
    "broadcast_to", "ravel", "contiguous", "clone", "detach", "to", "float", "double", "half", "bfloat16", "int",
    "long", "bool", "type_as", "size", "dim", "numel", "stride", "is_contiguous",
    # element by element
    "add", "sub", "mul", "div", "true_divide", "neg", "abs", "exp", "log", "sqrt", "rsqrt", "sin", "cos", "tanh",
    "sigmoid", "pow", "square", "reciprocal", "erf", "floor", "clamp", "where", "maximum", "minimum", "masked_fill",
    "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or",
    "bitwise_not", "relu", "relu6", "gelu", "silu", "leaky_relu", "elu", "softplus", "hardtanh", "hardswish", "mish",
    "add_", "sub_", "mul_", "div_", "copy_", "fill_", "zero_", "masked_fill_", "relu_", "clamp_",
    # products, reductions, norms, and what moves rows about
    "linear", "matmul", "bmm", "mm", "addmm", "baddbmm", "sum", "mean", "amax", "amin", "max", "min", "argmax",
    "argmin", "cumsum", "dropout", "glu", "softmax", "log_softmax", "layer_norm", "batch_norm", "group_norm",
    "max_pool2d", "embedding", "gather", "index_select", "cat", "concat", "stack", "repeat", "flip", "roll", "tril",
    "triu", "pad",
    # tensors made of sizes
    "arange", "zeros", "ones", "full", "empty", "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros",
    "new_ones", "new_full", "new_empty",
))
_OPERATORS = frozenset((
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow,
    operator.neg, operator.abs, operator.matmul, operator.and_, operator.or_, operator.xor, operator.invert,
    operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne, operator.getitem, operator.setitem,
    operator.iadd, operator.isub, operator.imul, operator.itruediv,
    torch.sym_max, torch.sym_min, symbolic_functions.item_at, symbolic_functions.write_at,
    symbolic_functions.embedding_bag,
))
_MAKERS = frozenset((torch.arange, torch.zeros, torch.ones, torch.full, torch.empty))
ANYWHERE = _OPERATORS | frozenset(getattr(room, name) for room in (torch, functional, get("torch._C._nn"))
                                  for name in ANYWHERE_NAMES if callable(getattr(room, name, None)))
# Functions that lay results out otherwise on "meta", but for operands that are contiguous.
LAID_OUT_NAMES = frozenset(("batch_norm", "group_norm", "pad", "roll"))
META = torch.device("meta")
DISABLE, OUTSIDE = "torch._C._DisableTorchDispatch", "torch.utils._python_dispatch._disable_current_modes"


def can_run() -> bool:
    """Whether this torch has all that is needed here."""
    return has(DISABLE, OUTSIDE)


class Shapes:
    """What a program's calls give on shapes alone; use within `shapes_only`. All tensors are on one processor, strided,
    and of real numbers if `quick`; otherwise all values are fake tensors."""

    def __init__(self, mode: Any, value_of: Callable[[Any], int], quick: bool) -> None:
        self.mode = mode
        self.value_of = value_of
        self.quick = quick
        self.known: dict[Any, Any] = {}
        self.traced: dict[Any, torch.Tensor] = {}  # by storage, offset, dtype, sizes and strides
        self.memory: dict[int, Any] = {}  # by the address of a real storage: the one that stands for it

    def of(self, value: Any) -> Any:
        """The shape of a tensor, a real one or one of a trace; the number of a size; other values as they are."""
        if isinstance(value, torch.SymInt):
            return self.value_of(value)
        if not isinstance(value, torch.Tensor):
            return value
        if api.is_fake(value):
            sizes, strides = map(self.value_of, value.shape), map(self.value_of, value.stride())
            return self._traced(value, tuple(sizes), tuple(strides))
        if self.quick:
            return self._in(self._memory(value, self.memory), value)
        with self.mode:
            fake = self.mode.from_tensor(value, static_shapes=True)
            if not value.is_inference():
                return fake
            # the same memory as a tensor that counts its changes
            return torch.empty(0, dtype=value.dtype, device=value.device).set_(
                fake.untyped_storage(), value.storage_offset(), value.shape, value.stride())

    def _traced(self, value: torch.Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
        """The shape of a tensor of a trace; of one tensor that has two names, such as tied weights, the same."""
        place = api.storage_key(value), self.value_of(value.storage_offset()), value.dtype, sizes, strides
        if place not in self.traced or place[0] is None:
            self.traced[place] = self.empty(sizes, value, strides)
        return self.traced[place]

    def empty(self, sizes: Sequence[int], like: torch.Tensor, strides: Sequence[int] | None = None) -> torch.Tensor:
        """A shape in memory of its own."""
        with contextlib.nullcontext() if self.quick else self.mode:
            device = META if self.quick else like.device
            if strides is None:
                return torch.empty(sizes, dtype=like.dtype, device=device)
            return torch.empty_strided(sizes, strides, dtype=like.dtype, device=device)

    def call(self, function: Any, arguments: Sequence[Any], keywords: dict[str, Any]) -> tuple[Any, list[Any]]:
        """What `function`, the name of a method or something to call, gives; and which tensors it changed. Raises what
        the function raises."""
        operands = [one for one in pytree.tree_leaves((arguments, keywords)) if isinstance(one, torch.Tensor)]
        if not self.quick:
            versions = [one._version for one in operands]
            with self.mode:
                result = _applied(function, arguments, keywords)
            return result, _changed(operands, operands, versions)
        key = self._key(function, arguments, keywords, operands)
        if key is not None and key in self.known:
            return pytree.tree_map(_made, self.known[key]), []
        result, changed = self._found(function, arguments, keywords, operands)
        if key is not None and not changed:
            self._remember(key, result, operands)
        return result, changed

    def _found(self, function: Any, arguments: Sequence[Any], keywords: dict[str, Any],
               operands: list[Any]) -> tuple[Any, list[Any]]:
        if _is_anywhere(function, operands) and not casts():
            here, named = (pytree.tree_map_only(torch.device, lambda _: META, part) for part in (arguments, keywords))
            if function in _MAKERS or "device" in named:
                named = {**named, "device": META}
            versions = [one._version for one in operands]
            with contextlib.suppress(RuntimeError, TypeError, ValueError, IndexError, AssertionError):
                result = _applied(function, here, named)
                if all(not isinstance(one, torch.Tensor) or one.is_meta for one in pytree.tree_leaves(result)):
                    return result, _changed(operands, operands, versions)
        return self._by_fake(function, arguments, keywords, operands)

    def _by_fake(self, function: Any, arguments: Sequence[Any], keywords: dict[str, Any],
                 operands: list[Any]) -> tuple[Any, list[Any]]:
        stand_in: dict[int, Any] = {}
        memory: dict[int, Any] = {}  # by the address of a fake storage: ours
        with self.mode:
            storages: dict[int, Any] = {}
            for one in operands:
                own = storage_id(one)
                if own not in storages:
                    fake = torch.empty(one.untyped_storage().nbytes(), dtype=torch.uint8)
                    storages[own], memory[storage_id(fake)] = fake.untyped_storage(), one.untyped_storage()
                stand_in[id(one)] = torch.empty(0, dtype=one.dtype).set_(
                    storages[own], one.storage_offset(), one.shape, one.stride())
            fakes = [stand_in[id(one)] for one in operands]
            versions = [one._version for one in fakes]
            given = pytree.tree_map_only(torch.Tensor, lambda one: stand_in[id(one)], (tuple(arguments), keywords))
            result = _applied(function, *given)
            if any(fake.shape != one.shape or fake.stride() != one.stride()
                   for fake, one in zip(fakes, operands, strict=True)):
                raise NotImplementedError("a tensor gets another shape in place")
            found = pytree.tree_map_only(torch.Tensor, lambda one: self._in(self._memory(one, memory), one), result)
        return found, _changed(operands, fakes, versions)

    def _memory(self, value: torch.Tensor, memory: dict[int, Any]) -> Any:
        """Our storage for that of `value`."""
        own = storage_id(value)
        found = memory.get(own)
        if found is None:
            with need(DISABLE)():
                made = torch.empty(value.untyped_storage().nbytes(), dtype=torch.uint8, device=META)
            found = memory[own] = made.untyped_storage()
        return found

    def _in(self, storage: Any, value: torch.Tensor) -> torch.Tensor:
        """`value` on our device, in `storage`."""
        with need(DISABLE)():
            return torch.empty(0, dtype=value.dtype, device=META).set_(
                storage, value.storage_offset(), value.shape, value.stride())

    def _key(self, function: Any, arguments: Sequence[Any], keywords: dict[str, Any], operands: list[Any]) -> Any:
        """What a result depends on; None where operands share memory, or for what no key can be made of."""
        if not operands or len({storage_id(one) for one in operands}) < len({id(one) for one in operands}):
            return None
        places = {id(one): place for place, one in enumerate(operands)}
        try:
            key = function, setting(), _key(tuple(arguments), places), _key(keywords, places)
            hash(key)
        except (Unkeyed, TypeError):
            return None
        return key

    def _remember(self, key: Any, result: Any, operands: list[Any]) -> None:
        """Keeps a result of tensors that are each in memory of its own."""
        leaves = pytree.tree_leaves(result)
        if not leaves or not all(isinstance(one, torch.Tensor) for one in leaves):
            return
        memory = [storage_id(one) for one in (*leaves, *{id(one): one for one in operands}.values())]
        if len(set(memory)) == len(memory) and all(one.storage_offset() == 0 for one in leaves):
            self.known[key] = pytree.tree_map(lambda one: _Form((one.shape, one.stride(), one.dtype)), result)


class _Form(tuple):  # type: ignore[type-arg]
    """Sizes, strides and dtype of a result that is made again."""


def _made(form: Any) -> Any:
    sizes, strides, dtype = form
    return torch.empty_strided(sizes, strides, dtype=dtype, device=META)


def _is_anywhere(function: Any, operands: Sequence[Any]) -> bool:
    name = function if isinstance(function, str) else getattr(function, "__name__", "")
    if name in LAID_OUT_NAMES and not all(one.is_contiguous() for one in operands):
        return False
    try:
        return function in (ANYWHERE_NAMES if isinstance(function, str) else ANYWHERE)
    except TypeError:  # it has no hash
        return False


def _applied(function: Any, arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
    if isinstance(function, str):
        return getattr(arguments[0], function)(*arguments[1:], **keywords)
    return function(*arguments, **keywords)


def _changed(operands: list[Any], stand_ins: list[Any], versions: list[int]) -> list[Any]:
    """The operands whose stand-ins count another version than before."""
    return [one for one, stand_in, version in zip(operands, stand_ins, versions, strict=True)
            if stand_in._version != version]


def _key(value: Any, places: dict[int, int]) -> Any:
    kind = value.__class__
    if kind in PLAIN:
        return kind, value
    if isinstance(value, (tuple, list)):
        return kind, tuple([_key(one, places) for one in value])
    if kind is slice:
        return kind, _key((value.start, value.stop, value.step), places)
    if isinstance(value, dict):
        return tuple([(name, _key(one, places)) for name, one in value.items()])
    if isinstance(value, torch.Tensor):
        return places[id(value)], value.dtype, value.shape, value.stride()
    raise Unkeyed


@contextlib.contextmanager
def shapes_only(rules: Mapping[Any, Callable[..., Any]], value_of: Callable[[Any], int] = int,
                quick: bool = True) -> Iterator[Shapes]:
    """Inside, torch computes shapes, not numbers, by `rules` too (torch_trace.shape_rules), through what is yielded;
    `value_of` knows the sizes of a trace. `quick`: see Shapes."""
    FakeTensorMode = need(f"{FAKE}FakeTensorMode")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = True  # layers repeat, and here sizes are numbers; see DYNAMO_SETTINGS of `torch_trace`
    with compile_lock():  # what is changed here is every thread's
        known, FakeTensorMode.cache = FakeTensorMode.cache, {}  # what our rules say is nobody else's to find
        try:
            with (quiet(FAKE_TENSORS), settings.shape_rules(rules), need(OUTSIDE)(), torch.inference_mode(False),
                  torch.no_grad()):
                yield Shapes(mode, value_of, quick)
        finally:
            FakeTensorMode.cache = known


def is_plain(value: Any) -> bool:
    """Whether a value of a trace, if it is a tensor, is one that `Shapes` may take as quick."""
    return not isinstance(value, torch.Tensor) or (
        api.is_fake(value) and value.layout == torch.strided and value.device.type == "cpu"
        and not value.is_complex() and not value.is_neg() and not value.is_quantized)


def unknown_results() -> tuple[type[BaseException], ...]:
    """The exceptions by which an operator that computes shapes says that its result depends on the data."""
    return need(f"{FAKE}DataDependentOutputException"), need(f"{FAKE}DynamicOutputShapeException")
