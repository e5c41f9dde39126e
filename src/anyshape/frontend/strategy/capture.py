"""Symbolic capture of a forward with its loss, for the strategy search: fake tensors, so that any model fits a laptop.

Of long lists of layers that are alike two are traced, and the rest is counted.
"""
from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.fx.experimental import symbolic_shapes

from anyshape import torch_compat as compat
from anyshape.base.errors import AnyShapeError, InputError
from anyshape.dist.cost.workload import Workload
from anyshape.dist.search.from_graph import workload_of
from anyshape.frontend.aten import decompositions
from anyshape.frontend.importer.fx_to_graph import to_graph
from anyshape.torch_compat.tracing.fx_threads import fx_in_this_thread
from anyshape.torch_compat.versions import api

TRACED = 2  # layers of a list of layers that are alike
STATE = {"SGD": 0.0, "Adam": 8.0, "AdamW": 8.0, "Lion": 4.0, "Muon": 4.0, "Adafactor": 0.1}  # bytes a parameter, in f32


class _Loss(torch.nn.Module):
    """A model with its loss, as a module."""

    def __init__(self, model: torch.nn.Module, loss_fn: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, *batch: Any) -> Tensor:
        found = self.loss_fn(self.model, *batch)
        loss = found[0] if isinstance(found, tuple) else found
        assert isinstance(loss, Tensor)
        return loss


def capture(model: torch.nn.Module, loss_fn: Callable[..., Any], optimizer: Any, batch: Any, name: str,
            dtype: str) -> Workload:
    """A model as a workload. batch: what loss_fn takes after the model, one tensor or a tuple; the first two dims of
    the first are sequences and positions. Nothing of it is computed.

    Raises:
        InputError: it cannot be traced, or the batch has no dim of sequences.
    """
    arguments = batch if isinstance(batch, tuple) else (batch,)
    first = first_of(arguments)
    short, counts = shortened(model)
    try:
        graph, names, symbols = _traced(_Loss(short, loss_fn), arguments, first)
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
        if isinstance(error, AnyShapeError) and not counts:
            raise
        if not counts:
            raise InputError(f"{name} cannot be traced for a strategy", why=f"{type(error).__name__}: {error}",
                             do="try loss_fn(model, batch) by itself") from error
        graph, names, symbols = _traced(_Loss(model, loss_fn), arguments, first)  # its layers know how many they are
        counts = {}
    state = STATE.get(type(optimizer).__name__, 8.0)
    return workload_of(graph, names, name, batch=symbols[0], length=symbols[1], dtype=dtype, counts=counts,
                       state_bytes=state, master_bytes=4.0)


def shortened(model: torch.nn.Module) -> tuple[torch.nn.Module, dict[str, int]]:
    """A copy whose long lists of layers that are alike have two; list with * -> how many there were. It shares what it
    keeps with the model."""
    lists = {path: module for path, module in model.named_modules()
             if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) and len(module) > TRACED and
             _alike(module)}
    if not lists:
        return model, {}
    memo: dict[int, Any] = {id(one): one for one in (*model.parameters(), *model.buffers())}
    found = copy.deepcopy(model, memo)
    counts = {}
    for path, module in lists.items():
        if any(path.startswith(f"{other}.") for other in lists if other != path):
            continue
        parent = found.get_submodule(path.rpartition(".")[0])
        kept = [one for _, one in zip(range(TRACED), found.get_submodule(path).children(), strict=False)]
        setattr(parent, path.rpartition(".")[2],
                torch.nn.ModuleList(kept) if isinstance(module, torch.nn.ModuleList) else torch.nn.Sequential(*kept))
        counts[f"{path}.*"] = len(module)
    return found, counts


def _alike(modules: Any) -> bool:
    kinds = {(type(one), tuple((name, tuple(weight.shape)) for name, weight in one.named_parameters()))
             for one in modules}
    return len(kinds) == 1 and next(iter(kinds))[1] != ()


def _traced(module: torch.nn.Module, arguments: tuple[Any, ...], first: Tensor) -> tuple[Any, list[str], tuple[str,
str]]:
    """The graph, the names of its inputs, the symbols of sequences and positions ("" where there are no positions)."""
    fake = compat.need("torch._subclasses.fake_tensor.FakeTensorMode")
    shapes = symbolic_shapes
    mode = fake(shape_env=shapes.ShapeEnv())
    weights = dict((*module.named_parameters(), *module.named_buffers()))
    known: dict[tuple[int, int], Any] = {}

    def symbolic(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.dim() == 0:
            with mode:
                return torch.empty((), dtype=value.dtype)
        same = value.shape[0] == first.shape[0]
        kinds = [shapes.DimDynamic.DYNAMIC if place < min(2, first.dim()) and same and size == first.shape[place]
                 and size > 1 else shapes.DimDynamic.STATIC for place, size in enumerate(value.shape)]
        context = shapes.StatelessSymbolicContext(dynamic_sizes=kinds, constraint_sizes=[None] * value.dim())
        meta = mode.from_tensor(torch.empty(value.shape, dtype=value.dtype, device="meta"), symbolic_context=context)
        sizes = [known.setdefault((place, size), made) if kind is shapes.DimDynamic.DYNAMIC else size
                 for place, (size, made, kind) in enumerate(zip(value.shape, meta.shape, kinds, strict=True))]
        with mode:
            return torch.empty(sizes, dtype=value.dtype)

    def run(*values: Any) -> Tensor:
        given = dict(zip(weights, values[len(arguments):], strict=True))
        result = functional_call(module, given, values[:len(arguments)])
        assert isinstance(result, Tensor)
        return result

    batch = [symbolic(one) for one in arguments]
    training = [one for one in module.modules() if one.training]
    try:
        for one in training:
            one.training = False  # dropout costs next to nothing, and draws random numbers in place
        with compat.compile_lock(), fx_in_this_thread(), torch.no_grad(), mode:
            # a product with a weight that is trained is taken apart as one of matrices, whatever its other operand is
            given = [torch.empty(one.shape, dtype=one.dtype, requires_grad=one.requires_grad)
                     for one in weights.values()]
            graph = api.trace_model(run, [*batch, *given], decompositions.table())
    finally:
        for one in training:
            one.training = True
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        node.replace_all_uses_with(node.args[1])  # what is written to buffers costs next to nothing
        graph.graph.erase_node(node)
    found, _ = to_graph(graph, "forward")
    parameters = {name.removeprefix("model.") for name, _ in module.named_parameters()}
    names = [""] * len(batch) + [name.removeprefix("model.") for name in weights]
    names = [name if name in parameters else "" for name in names]
    place = next(place for place, one in enumerate(arguments) if one is first)
    axes = ["" if isinstance(size, int) else str(size) for size in found.inputs[place].tensor.shape[:2]] + [""]
    return found, names, (axes[0], axes[1])


def first_of(arguments: Sequence[Any]) -> Tensor:
    """The tensor of a batch whose first two dims are sequences and positions.

    Raises:
        InputError: there is none.
    """
    first = next((one for one in arguments if isinstance(one, Tensor) and one.dim()), None)
    if first is None:
        raise InputError("there is no tensor with a dim in the batch", where="batch",
                         why="the first dim of the first one are sequences of all ranks",
                         do="give a batch as loss_fn takes it, for example torch.zeros(256, 4096, dtype=torch.int64)")
    return first


def sizes_of(batch: Any) -> tuple[int, int]:
    """Sequences and positions of a batch; raises InputError as `first_of` does."""
    first = first_of(batch if isinstance(batch, tuple) else (batch,))
    return int(first.shape[0]), int(first.shape[1]) if first.dim() > 1 else 1

