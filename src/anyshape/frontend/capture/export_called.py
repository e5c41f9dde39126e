"""`torch.export` of a module or function that was compiled as it is, by the calls that were traced, with dynamic shapes
where its programs have symbols: what `anyshape.save` saves. Sizes of 0 and 1 are taken, too, where guards hold and
shapes come out as predicted there; where a size of 1 is another program, that is exported, too.
"""
from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from anyshape import torch_compat as compat
from anyshape.artifact.requirements import MOST_SPECIAL
from anyshape.base.errors import AnyShapeError, ConfigError, Unsupported
from anyshape.frontend.capture import exported_sizes
from anyshape.frontend.capture.meta_kernels import tracing_settings
from anyshape.frontend.capture.traced_calls import LEAST, Described, Other, TracedCall
from anyshape.frontend.train_step.defer_interrupts import DeferInterrupts
from anyshape.torch_compat import tree as pytree
from anyshape.torch_compat.tracing.fx_threads import fx_in_this_thread
from anyshape.torch_compat.tracing.size_texts import size_texts

aten = torch.ops.aten
EXPORT = "anyshape.save(anyshape.compile(torch.export.export(model.eval(), inputs, dynamic_shapes=...)), path)"


def export_called(target: Callable[..., Any], calls: Sequence[TracedCall], symbols: frozenset[str], dynamic: bool,
                  reason: str = "") -> list[torch.export.ExportedProgram]:
    """The target as an exported program that takes what `calls` took, at other sizes. Where it can be shown that sizes
    of 0 and 1 do nothing else than larger ones, it takes them too; where it does not take a size of 1, programs follow
    in which that is fixed. They are to be compiled under the settings of `all_sizes_traced`.

    Args:
        symbols: sizes that are symbols of a program, such as "dim 0 of x".
        dynamic: whether sizes are free at all.
        reason: why a call ran as PyTorch, if one did.

    Raises:
        ConfigError: no call was traced, or they are of several kinds. Unsupported: torch.export refuses the target.
    """
    module = target if isinstance(target, torch.nn.Module) else _Function(target)
    signature = inspect.signature(module.forward)
    bound = [one.bound(signature) for one in calls]
    call = _general(bound, reason)
    module = _with_names(module, call)
    signature = inspect.signature(module.forward)
    error: Exception | None = None
    for one in _attempts(call, bound, signature, symbols) if dynamic else (call,):
        try:
            with size_texts(False) as files:
                exported = _exported(module, one, signature, dynamic)
            if files:
                _refuse_texts(exported, module, one, signature, files[0])
        except Exception as found:  # the border to torch's tracer
            error = found
            continue
        if not dynamic:
            return [exported]
        if one is call or _is_free(exported, one, call):
            exported, strict = _freed(exported, module, one, signature, symbols)
            export = _Export(module, signature, strict)
            exported = export.with_small(exported, one)
            programs = [exported, *export.with_ones(exported, one)]
            if one is call or any(exported_sizes.takes(program, call.sizes()) for program in programs):
                return programs
    assert error is not None
    if isinstance(error, AnyShapeError):
        raise error
    raise Unsupported("the program cannot be deployed: torch.export does not take it",
                      why=f"{type(error).__name__}: {' '.join(str(error).split())[:400]}",
                      do=f"change that line; or export it by hand: {EXPORT}") from error


def all_sizes_traced() -> Any:
    """Settings under which sizes of 0 and 1 are not singled out."""
    return tracing_settings(True, True, 0, frozenset(), frozenset())


def _refuse_texts(exported: torch.export.ExportedProgram, module: torch.nn.Module, call: TracedCall,
                  signature: inspect.Signature, file: str) -> None:
    """Raises where the program depends on the texts that it makes of sizes, which are names of symbols in a trace; as
    the message of an assertion, which most are, it does not."""
    with size_texts(True):
        other = _exported(module, call, signature, True)
    if other.graph_module.code != exported.graph_module.code or not all(
            torch.equal(one, exported.constants[name]) for name, one in other.constants.items()
            if isinstance(one, torch.Tensor)):
        raise Unsupported("the program cannot be deployed: it computes with a text of a size", where=file,
                          why="torch.export makes a text of a size of its symbol's name, such as s77",
                          do="compute with the size itself, not with str(size) or f\"{size}\"")


def _freed(exported: torch.export.ExportedProgram, module: torch.nn.Module, call: TracedCall,
           signature: inspect.Signature, symbols: frozenset[str]) -> tuple[torch.export.ExportedProgram, bool]:
    """The same, and False; or, where a symbol of the compiled program is fixed in it and is not in that of a strict
    export, the latter, and True. What runs as Python makes numbers of sizes in `len(x)`, `int(size)`, `float(size)` and
    `math.sqrt(size)`; Dynamo, which traced the compiled program and traces a strict export, keeps them."""
    fixed = _fixed(exported, call, signature, symbols)
    if not fixed:
        return exported, False
    try:
        with all_sizes_traced():  # with what mends Dynamo's bugs
            found = _exported(module, call, signature, True, strict=True)
    except Exception:  # the border to torch's tracer: what is there already will do
        return exported, False
    is_better = _fixed(found, call, signature, symbols) < fixed and _reads_data(found) <= _reads_data(exported)
    return (found, True) if is_better else (exported, False)


def _reads_data(exported: torch.export.ExportedProgram) -> bool:
    """Whether a number of the program's data becomes one of Python's, which a file cannot do."""
    return any(node.target in (aten._local_scalar_dense.default, aten.item.default) for node in exported.graph.nodes)


def _fixed(exported: torch.export.ExportedProgram, call: TracedCall, signature: inspect.Signature,
           symbols: frozenset[str]) -> int:
    """How many sizes of the call are symbols of a compiled program and numbers in the exported one, or such that what
    is computed of them is a number in it."""
    tensors = [value for value in exported_sizes.given(exported) if isinstance(value, torch.Tensor)]
    asked = exported_sizes.made_numbers(exported)
    return sum(not symbols.isdisjoint(words) and (not exported_sizes.is_open(size) or size.node.expr in asked)
               for tensor, names in zip(tensors, _names(call, signature), strict=True)
               for size, words in zip(tensor.shape, names, strict=True))


def _names(call: TracedCall, signature: inspect.Signature) -> list[list[tuple[str, str]]]:
    """What captures may call each size of each tensor of a call."""
    named = signature.bind(*call.arguments, **call.keywords).arguments
    leaves = [(f"{name}{path}", leaf) for name, value in named.items() for path, leaf in _leaves(value)
              if isinstance(leaf, Described)]
    return [[(f"dim {dim} of {place}", f"dim {dim} of input {number}") for dim in range(len(leaf.sizes))]
            for number, (place, leaf) in enumerate(leaves)]


class _Export(NamedTuple):
    """How a module is exported."""

    module: torch.nn.Module
    signature: inspect.Signature
    strict: bool

    def with_small(self, exported: torch.export.ExportedProgram, call: TracedCall, floor: int = 0
                   ) -> torch.export.ExportedProgram:
        """The same with ranges that begin at 0 or 1, for all sizes for which that is as good, or else as it is. floor:
        where they may begin."""
        for low in range(floor, LEAST):
            least: dict[tuple[int, int], int] = {}
            with contextlib.suppress(Exception):  # the border to torch's tracer: what is there already will do
                for _ in range(2):
                    with all_sizes_traced():
                        found = _exported(self.module, call, self.signature, True, least, low, self.strict)
                        judged = exported_sizes.least_sizes(found, False)
                    ranges = found.range_constraints
                    if all(int(ranges[symbol].lower) == size for symbol, size in judged.items()):
                        return found
                    least |= {place: judged[symbol] for place, symbol in exported_sizes.symbols(found).items()}
        return exported

    def with_ones(self, exported: torch.export.ExportedProgram, call: TracedCall
                  ) -> list[torch.export.ExportedProgram]:
        """Programs for sizes of 1 that the exported one does not take, each alone and then several, at most
        MOST_SPECIAL."""
        found: list[torch.export.ExportedProgram] = []
        open_ = [(exported, call, (-1, -1))]  # sizes up to that place have had their turn
        for wider, its_call, after in open_:
            places: dict[Any, list[tuple[int, int]]] = {}
            for place, symbol in exported_sizes.symbols(wider).items():
                if wider.range_constraints[symbol].lower == LEAST:
                    places.setdefault(symbol, []).append(place)
            for ones in [ones for ones in places.values() if ones[0] > after]:
                if len(found) == MOST_SPECIAL:
                    return found
                at_one = _at_one(its_call, ones)
                try:
                    with all_sizes_traced():
                        special = _exported(self.module, at_one, self.signature, True, strict=self.strict)
                except Exception:  # the border to torch's tracer: the module does not take this size
                    continue
                found.append(self.with_small(special, at_one, 1))
                open_.append((found[-1], at_one, ones[0]))
        return found


def _at_one(call: TracedCall, places: Sequence[tuple[int, int]]) -> TracedCall:
    """The call with sizes of 1 at these places."""
    return call.resized(lambda number, dim, size: 1 if (number, dim) in places else size)


class _Function(torch.nn.Module):
    """A function as a module, with its module inside where it is a method."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        owner = getattr(function, "__self__", None)
        if isinstance(owner, torch.nn.Module):
            self.owner = owner
        self.forward = function if _has_signature(function) else lambda *args, **keywords: function(*args, **keywords)


def _has_signature(function: Callable[..., Any]) -> bool:
    """Functions of C have none, as most of torch's."""
    try:
        return bool(inspect.signature(function).parameters)
    except (ValueError, TypeError):
        return False


def _with_names(module: torch.nn.Module, call: TracedCall) -> torch.nn.Module:
    """The module with names in place of **keywords, of whose sizes torch.export makes nothing."""
    signature = inspect.signature(module.forward)
    plain = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    if len(plain) == len(signature.parameters):
        return module
    forward = module.forward

    def named(*arguments: Any, **keywords: Any) -> Any:
        return forward(*arguments, **keywords)

    own = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in call.keywords
           if name not in signature.parameters]
    named.__signature__ = signature.replace(parameters=[*plain, *own])  # type: ignore[attr-defined]
    found = copy.copy(module)
    found.forward = named
    return found


def _general(calls: Sequence[TracedCall], reason: str) -> TracedCall:
    """The call whose program serves the others: that with the fewest sizes of 0 and 1."""
    if not calls and reason:
        raise ConfigError("anyshape.save does not know what the program takes",
                          why=f"every call of it ran as PyTorch, and none was traced: {reason}",
                          do="call it once more, at sizes other than 0 and 1, then save it; or " + EXPORT)
    if not calls:
        raise ConfigError("anyshape.save does not know what the program takes", why="it was not called since it was "
                          "compiled", do="call it once, then save it; or " + EXPORT)
    first = calls[0]
    other = next((one for one in calls if one.kind() != first.kind()), None)
    if other is not None:
        raise ConfigError("anyshape.save cannot tell which program to save",
                          why=f"it was called as ({first}) and as ({other}), which are programs of their own",
                          do="compile it anew and call it in one way only before it is saved; or " + EXPORT)
    if first.autocast is not None:
        raise Unsupported("the program cannot be deployed: it was called inside of torch.autocast",
                          why="torch.export takes a module as it is outside of it",
                          do=f"convert the module, such as model.to({first.autocast}), and call it outside of autocast")
    leaves = pytree.tree_leaves((first.arguments, dict(first.keywords)))
    unknown = next((leaf for leaf in leaves if isinstance(leaf, Other)), None)
    if unknown is not None:
        raise Unsupported(f"the program cannot be deployed: it was called with {unknown}",
                          why="a file knows tensors, numbers, texts and None, in tuples, lists and dicts with names",
                          do="compile a function that takes these, call and save that")
    return min(calls, key=lambda one: sum(size < LEAST for sizes in one.sizes() for size in sizes))


def _attempts(call: TracedCall, calls: Sequence[TracedCall], signature: inspect.Signature, symbols: frozenset[str]
              ) -> Iterator[TracedCall]:
    """Calls to export by, the most general first. Sizes of 0 and 1 that are free are LEAST there: those that are
    symbols of a program or differ between the calls; before that, where there are some, all of them, for a symbol is
    named by the first of the sizes that it stands for."""
    several = [one.sizes() for one in calls]
    names = _names(call, signature)

    def is_symbol(number: int, dim: int) -> bool:
        return len({one[number][dim] for one in several}) > 1 or not symbols.isdisjoint(names[number][dim])

    found = call.widened(is_symbol)
    if found != call:
        yield call.widened(lambda number, dim: True)
        yield found
    yield call


def _is_free(exported: torch.export.ExportedProgram, wide: TracedCall, call: TracedCall) -> bool:
    """Whether what is wider than in the call is a symbol of the exported program: it depends on no such number."""
    if any(low == high for low, high in exported_sizes.limited(exported).values()):
        return False
    shapes = [value.shape for value in exported_sizes.given(exported) if isinstance(value, torch.Tensor)]
    return all(exported_sizes.is_open(size) for shape, wider, sizes in zip(shapes, wide.sizes(), call.sizes(),
                                                                              strict=True)
               for size, one, other in zip(shape, wider, sizes, strict=True) if one != other)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of an argument in the order of torch's, each with its path."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _leaves(one, f"{path}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for number, one in enumerate(value):
            yield from _leaves(one, f"{path}[{number}]")
    else:
        yield path, value


def _exported(module: torch.nn.Module, call: TracedCall, signature: inspect.Signature, dynamic: bool,
              least: Mapping[tuple[int, int], int] | None = None, floor: int = LEAST, strict: bool = False
              ) -> torch.export.ExportedProgram:
    """least: where sizes begin, by the tensor's number and the dim; others begin at `floor`. strict: by Dynamo."""
    numbers = itertools.count()

    def example(leaf: Any) -> Any:
        return torch.zeros(leaf.sizes, dtype=leaf.dtype, device=leaf.device) if isinstance(leaf, Described) else leaf

    def free(leaf: Any) -> Any:
        auto = torch.export.Dim.AUTO
        if isinstance(leaf, Described):
            number = next(numbers)
            return {dim: auto(min=(least or {}).get((number, dim), floor))
                    for dim, size in enumerate(leaf.sizes) if size >= LEAST} if dynamic else None
        return auto if dynamic and type(leaf) is int and leaf >= LEAST else None

    named = signature.bind(*call.arguments, **call.keywords).arguments
    with compat.compile_lock(), fx_in_this_thread(), warnings.catch_warnings(), DeferInterrupts(once=True):
        # what torch's own recurrent networks do with their weights
        warnings.filterwarnings("ignore", "The tensor attributes self._flat_weights", UserWarning)
        return torch.export.export(module, pytree.tree_map(example, call.arguments),
                                   pytree.tree_map(example, dict(call.keywords)),
                                   dynamic_shapes=pytree.tree_map(free, dict(named)), strict=strict)
