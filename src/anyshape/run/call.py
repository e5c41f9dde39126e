"""One running call as Python sees it: tensors for the steps that PyTorch does, results, and saved values."""
from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from anyshape.backend import host_words as host
from anyshape.base import events
from anyshape.base.errors import VerifyError
from anyshape.ir.graph import Graph, Node, Value
from anyshape.plan.alloc import live_bytes
from anyshape.plan.plan import Buffer, CopyStep, ExternStep, KernelStep, LibraryStep, MemoryStep, Plan, Step, Window
from anyshape.run import torch_api
from anyshape.run.arena import Block, Chunks
from anyshape.run.attention import OPS as ATTENTION
from anyshape.run.attention import by_torch
from anyshape.run.convolution import Convolution, PackedWeights
from anyshape.run.dtypes import TORCH_DTYPES
from anyshape.run.extern import compile_extern, results_of
from anyshape.run.grouped import OPS as GROUPED
from anyshape.run.grouped import grouped_by_torch
from anyshape.run.interp import Interpreter
from anyshape.run.keeping import EVERYTHING
from anyshape.run.layout import Layout
from anyshape.run.pages import prefer_large
from anyshape.run.record import Record, View
from anyshape.sym.expr import Expr, evaluate

OWN = "anyshape."  # targets that are our own ops, run by the reference interpreter
MOST_NEEDS = 4096  # records whose need is remembered
CONVOLUTION = f"{OWN}convolution"  # but for this one


def same_strides(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two strides mean the same elements: they may differ where the size is 1, or when there are none."""
    return one == other or 0 in shape or all(a == b for n, a, b in zip(shape, one, other, strict=True) if n != 1)


def restrided(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """`tensor` itself if it has these strides, else a copy that has."""
    if same_strides(tensor.shape, tensor.stride(), strides):
        return tensor
    copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype)
    return copy.copy_(tensor.detach())


class Calls:
    """What calls of one plan need that does not depend on sizes."""

    def __init__(self, plan: Plan, layout: Layout, packed: PackedWeights, packed_bytes: int) -> None:
        self.plan = plan
        self.slots = layout.slots
        self.buffers = {b.name: b for b in plan.buffers}
        ordered = sorted((b for b in plan.buffers if b.home == "output"), key=lambda b: layout.slots[b.name])
        self.output_of = {b.name: i for i, b in enumerate(ordered)}
        self.order = self._order()
        taken = {name for step in plan.steps if isinstance(step, MemoryStep) for name in step.take}
        self.dtypes = [TORCH_DTYPES[plan.outputs[b.index].type.dtype] for b in ordered]  # type: ignore[union-attr]
        self.early = [i for i, b in enumerate(ordered) if b.name not in taken]  # allocated at the start
        self.allocate = torch_api.allocator()
        self.functions: dict[int, Callable[[Sequence[Any]], Any]] = {}
        self.drops: dict[int, tuple[str, ...]] = {}
        self.written = frozenset(self.buffers[name].index for name in _written(plan)
                                 if name in self.buffers and self.buffers[name].home == "input")
        self.checked = tuple(i for i, w in enumerate(plan.saved)
                             if isinstance(w, Window) and self.buffers[w.buffer].home in ("input", "output"))
        externs = [b for b in plan.buffers if b.home == "extern"]
        ends = {w.buffer for w in (*plan.outputs, *plan.saved) if isinstance(w, Window)}
        self.packed = packed
        self.packed_bytes = packed_bytes
        owner = next(packed.owners)
        for number, step in enumerate(plan.steps):
            if isinstance(step, ExternStep):
                if step.target == CONVOLUTION:
                    weights = step.inputs[1]
                    constant = isinstance(weights, Window) and self.buffers[weights.buffer].home == "input"
                    attributes: Any = step.template
                    self.functions[number] = Convolution(packed, (owner, number), dict(attributes), constant)
                elif not step.target.startswith(OWN):
                    self.functions[number] = compile_extern(step.target, step.template)
                # what died before this step and after the last one that could drop it
                self.drops[number] = tuple(b.name for b in externs if b.last < number and b.name not in ends)
        # bytes of the weights that convolutions bring in PyTorch's order
        self.weights = [step.inputs[1].type.bytes for number, step in enumerate(plan.steps)  # type: ignore[union-attr]
                        if isinstance(self.functions.get(number), Convolution)]
        if self.weights:
            weakref.finalize(self, packed.forget, owner)
        self.needs: dict[Record, tuple[int, list[int]]] = {}

    def _order(self) -> tuple[int | None, ...] | None:
        """Per result, the allocated tensor that it is (None: a number or nothing); None when some are other windows."""
        order: list[int | None] = []
        for i, entry in enumerate(self.plan.outputs):
            if isinstance(entry, Window) and (entry.buffer not in self.output_of
                                              or self.buffers[entry.buffer].index != i):
                return None
            order.append(self.output_of[entry.buffer] if isinstance(entry, Window) else None)
        return tuple(order)

    def begin(self, record: Record) -> None:
        """A call with `record` begins: weights that are packed from before make room for it."""
        if not self.weights:
            return
        if record not in self.needs:
            if len(self.needs) >= MOST_NEEDS:
                self.needs.clear()
            self.needs[record] = (record.arena + held_bytes(self.plan, record.values),
                                  [evaluate(size, record.values) for size in self.weights])
        self.packed.begin(*self.needs[record], self.packed_bytes)


def held_bytes(plan: Plan, values: dict[str, int]) -> int:
    """The most bytes of results and of tensors made by PyTorch that a call holds at once."""
    held = [b for b in plan.buffers if b.home in ("output", "extern")]
    return live_bytes([evaluate(b.bytes, values) for b in held], [(b.first, b.last) for b in held], len(plan.steps))


def _written(plan: Plan) -> set[str]:
    names: set[str] = set()
    for step in plan.steps:
        if isinstance(step, CopyStep):
            names.add(step.target.buffer)
        elif isinstance(step, KernelStep):
            names.update(step.params[k].buffer for k in step.outputs)
        elif not isinstance(step, MemoryStep):
            names.update(w.buffer for w in step.outputs if w is not None)
    return names


class Call:
    """See the head of this file."""

    __slots__ = ("block", "error", "externs", "inputs", "kept", "outputs", "record", "shared", "temporary")

    def __init__(self, shared: Calls, record: Record, inputs: list[Any], outputs: list[Any], kept: Block | Chunks,
                 temporary: Block) -> None:
        self.shared = shared
        self.record = record
        self.inputs = inputs
        self.outputs = outputs
        self.kept = kept
        self.temporary = temporary
        self.externs: dict[str, torch.Tensor] = {}
        self.block: Any = None
        self.error: BaseException | None = None

    # --- tensors

    def tensor(self, window: Window, view: View) -> torch.Tensor:
        """The tensor that a window stands for."""
        shape, strides, offset = view
        buffer = self.shared.buffers[window.buffer]
        base = self._base(buffer)
        if base is None:
            dtype = TORCH_DTYPES[window.type.dtype]
            byte = self.record.offsets[window.buffer] + offset * dtype.itemsize
            if byte < self.record.kept and self.record.room >= 0:
                room = self.outputs[self.record.room].untyped_storage()
                return torch.empty(0, dtype=dtype).set_(room, byte // dtype.itemsize, shape, strides)
            if byte < self.record.kept:
                return self.kept.window(dtype, byte, shape, strides)
            return self.temporary.window(dtype, byte - self.record.kept, shape, strides)
        if offset == 0 and base.shape == shape and same_strides(shape, base.stride(), strides):
            return base
        return base.as_strided(shape, strides, base.storage_offset() + offset)

    def _base(self, buffer: Buffer) -> torch.Tensor | None:
        """The tensor of a buffer that is one, None for a place in the arena."""
        if buffer.name in self.record.offsets:
            return None
        if buffer.home == "output":
            return self.outputs[self.shared.output_of[buffer.name]]
        if buffer.home == "extern":
            return self.externs[buffer.name]
        position = self.shared.plan.restored[buffer.index] if buffer.home == "tape" else buffer.index
        return self.inputs[position]

    # --- steps

    def step(self, number: int) -> None:
        """Does a step by PyTorch."""
        step = self.shared.plan.steps[number]
        views = self.record.windows[number]
        try:
            if isinstance(step, ExternStep):
                self._extern(number, step, views)
            elif isinstance(step, LibraryStep) and step.op in ATTENTION:
                self._attention(step, views)
            elif isinstance(step, LibraryStep) and step.op in GROUPED:
                operands = [self.tensor(w, v) for w, v in zip(step.inputs, views, strict=False)]
                self.tensor(step.outputs[0], views[-1]).copy_(grouped_by_torch(step.op, operands))
            elif isinstance(step, LibraryStep):
                self._matmul(step, views)
            elif isinstance(step, MemoryStep):
                self._hold(number, step)
            else:
                assert isinstance(step, CopyStep)
                self.tensor(step.target, views[1]).copy_(self.tensor(step.source, views[0]))
        except RuntimeError as error:
            error.add_note(f"in step {number} of {self.shared.plan.name}, {step.where or 'source line unknown'}")
            raise

    def _hold(self, number: int, step: MemoryStep) -> None:
        """Lets tensors go, and the lower block where that ends here; allocates results."""
        shared = self.shared
        if number == self.record.given and isinstance(self.kept, Block):
            self.kept.release()
        if step.chunk >= 0:
            assert isinstance(self.kept, Chunks)
            self.kept.free(step.chunk)
        for name in step.drop:
            buffer = shared.buffers[name]
            if buffer.home == "extern":
                self.externs.pop(name, None)
            else:
                self.inputs[shared.plan.restored[buffer.index] if buffer.home == "tape" else buffer.index] = None
        for name in step.take:
            index = shared.output_of[name]
            if index == self.record.room:
                continue  # it is there already
            result = shared.allocate(*self.record.allocations[index], shared.dtypes[index])
            self.outputs[index] = result
            prefer_large(result.data_ptr(), result.nbytes)
            self.block[host.SLOTS + shared.slots[name]] = result.data_ptr()

    def _extern(self, number: int, step: ExternStep, views: tuple[Any, ...]) -> None:
        for name in self.shared.drops[number]:
            self.externs.pop(name, None)
        events.count_extern_call()
        operands = [self.tensor(entry, view) if isinstance(entry, Window) else view
                    for entry, view in zip(step.inputs, views, strict=False)]
        function = self.shared.functions.get(number)
        returned = self._own(step, operands) if function is None else function(operands)
        results = results_of(returned, len(step.outputs))
        storages = {one.untyped_storage()._cdata for one in operands if isinstance(one, torch.Tensor)}
        for window, view, result in zip(step.outputs, views[len(step.inputs):], results, strict=True):
            if window is not None:
                self._receive(step, window, view, result, storages)

    def _own(self, step: ExternStep, operands: list[Any]) -> tuple[Any, ...]:
        """One of our own ops that no kernel does."""
        inputs = tuple(Value(f"operand{i}", entry.type) if isinstance(entry, Window) else entry
                       for i, entry in enumerate(step.inputs))
        state = Interpreter(Graph(step.target, (), (), ()))
        state.symbols = self.record.values
        state.values = {f"operand{i}": operand for i, operand in enumerate(operands)}
        attrs: Any = step.template
        return state.call(Node(step.target.removeprefix(OWN), inputs, attrs, (), step.where))

    def _receive(self, step: Step, window: Window, view: View, result: Any, storages: set[int]) -> None:
        """Puts a result of PyTorch where the plan wants it. `storages`: of the operands and of earlier results."""
        shape, strides, _ = view
        if not isinstance(result, torch.Tensor) or tuple(result.shape) != shape \
                or result.dtype != TORCH_DTYPES[window.type.dtype]:
            found = f"{result.dtype}{list(result.shape)}" if isinstance(result, torch.Tensor) else repr(result)
            raise VerifyError(f"{getattr(step, 'target', 'a library')} returned something else than was traced",
                              where=step.where, why=f"it returned {found}; traced: {window.type}, {list(shape)} here",
                              do="compile the program again; if it stays, report this operator")
        buffer = self.shared.buffers[window.buffer]
        if buffer.home != "extern":
            self.tensor(window, view).copy_(result)
            return
        result = restrided(result, strides)
        # an operator may return its operand, or parts of one tensor; each place is used again by itself
        if result.untyped_storage()._cdata in storages:
            result = _copied(result, shape, strides)
        storages.add(result.untyped_storage()._cdata)
        self.externs[window.buffer] = result
        self.block[host.SLOTS + self.shared.slots[window.buffer]] = result.data_ptr()

    def _attention(self, step: LibraryStep, views: tuple[Any, ...]) -> None:
        """Attention that the host cannot do in place: odd strides."""
        operands = [self.tensor(w, v) for w, v in zip(step.inputs, views, strict=False)]
        results = by_torch(step.op, dict(step.attrs), operands)
        for window, view, result in zip(step.outputs, views[len(step.inputs):], results, strict=True):
            self.tensor(window, view).copy_(result)

    def _matmul(self, step: LibraryStep, views: tuple[Any, ...]) -> None:
        """A product that the library cannot do in place: integers, half precision, odd strides."""
        attrs = dict(step.attrs)
        alpha, beta = attrs.get("alpha", 1), attrs.get("beta", 1)
        assert isinstance(alpha, (int, float)) and isinstance(beta, (int, float))
        a, b, *rest = [self.tensor(w, v) for w, v in zip(step.inputs, views, strict=False)]
        if "rounded" in attrs:
            a, b = (x.to(TORCH_DTYPES[str(attrs["rounded"])]) for x in (a, b))
        target = self.tensor(step.outputs[0], views[len(step.inputs)])
        if rest and 2 <= a.dim() == b.dim() and target.is_floating_point():  # rounded once
            batch = target.shape[:-2]
            added = torch.baddbmm(*(x.expand(*batch, *x.shape[-2:]).reshape(math.prod(batch), *x.shape[-2:])
                                    for x in (rest[0].expand(target.shape), a, b)), alpha=alpha, beta=beta)
            target.copy_(added.view(target.shape))
            return
        product = torch.matmul(a, b)
        if alpha != 1:
            product.mul_(alpha)
        if rest and beta:
            product.add_(rest[0], alpha=beta)
        target.copy_(product)

    # --- results

    def results(self) -> list[Any]:
        """The outputs of the call."""
        found: dict[tuple[str, View], Any] = {}
        results: list[Any] = []
        for entry, view in zip(self.shared.plan.outputs, self.record.outputs, strict=True):
            if not isinstance(entry, Window):
                results.append(view)
                continue
            key = (entry.buffer, view)
            if key not in found:
                found[key] = self.tensor(entry, view)
            results.append(found[key])
        return results

    def in_order(self) -> list[Any]:
        """The outputs of a call whose results are allocated tensors as they are."""
        order = self.shared.order
        assert order is not None
        outputs = self.outputs
        return [value if i is None else outputs[i]
                for i, value in zip(order, self.record.outputs)]  # noqa: B905

    def saved(self) -> list[Any]:
        """The tape's values: tensors over the kept block, tensors held, numbers."""
        known = None if isinstance(self.kept, Chunks) else self.kept.views.get(self.record)
        if known is None:
            known = self._saved_here()
            if isinstance(self.kept, Block):
                self.kept.remember(self.record, known)
        values, given, others = known
        values = values.copy()
        for i, position in given:
            values[i] = self.inputs[position]
        for i, entry in others:
            values[i] = self.tensor(entry, self.record.saved[i])
        return values

    def _saved_here(self) -> tuple[list[Any], list[tuple[int, int]], list[tuple[int, Window]]]:
        """What is the same for every call with this record and this kept block: the values that are, (index, position)
        of those that are inputs as they came, (index, window) of the others."""
        values: list[Any] = []
        given: list[tuple[int, int]] = []
        others: list[tuple[int, Window]] = []
        record = self.record
        for i, entry in enumerate(self.shared.plan.saved):
            value: Any = None
            if not isinstance(entry, Window):
                value = evaluate(entry, record.values) if isinstance(entry, Expr) else entry
            elif entry.buffer in record.offsets and record.keeping != EVERYTHING:  # says what it is
                shape, strides, _ = record.saved[i]
                value = torch.empty_strided(shape, strides, dtype=TORCH_DTYPES[entry.type.dtype], device="meta")
            elif entry.buffer in record.offsets:
                value = self.tensor(entry, record.saved[i])
            else:
                buffer = self.shared.buffers[entry.buffer]
                if buffer.home == "input" and record.saved[i] == record.inputs[buffer.index]:
                    given.append((i, buffer.index))
                else:
                    others.append((i, entry))
            values.append(value)
        return values, given, others


def _copied(tensor: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """The same numbers in memory of their own, laid out as before; elements that lie on each other (sliding windows,
    a repeated row) stay so."""
    if 0 in shape or not _overlaps(shape, strides):
        return torch.empty_strided(shape, strides, dtype=tensor.dtype).copy_(tensor)
    span = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    return tensor.as_strided((span,), (1,)).clone().as_strided(shape, strides)


def _overlaps(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    reach = 0
    for step, n in sorted((step, n) for n, step in zip(shape, strides, strict=True) if n > 1):
        if step <= reach:
            return True
        reach += step * (n - 1)
    return False
