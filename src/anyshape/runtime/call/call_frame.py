"""The call frame: one running call as Python sees it: tensors for the steps that PyTorch does, results, and saved
values."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from anyshape.backend.interface import PlanRunner
from anyshape.base import counters
from anyshape.base.errors import VerifyError
from anyshape.ir.asynchronous import WRITES_RESULTS
from anyshape.ir.graph import Graph, Node, Value
from anyshape.ir.panels import from_panels
from anyshape.ops.attention import OPERANDS as ATTENTION
from anyshape.ops.matmul import GROUPED
from anyshape.ops.routing import ROUTING
from anyshape.plan.ir.program import Buffer, CopyStep, ExternStep, LibraryStep, MemoryStep, RecomputeStep, Step, Window
from anyshape.runtime.call.extern_table import OWN, ExternTable
from anyshape.runtime.driver.torch_driver import overlaps, restrided, same_strides
from anyshape.runtime.memory.huge_pages import prefer_large
from anyshape.runtime.memory.offload_store import PendingCopy
from anyshape.runtime.memory.pools import Block, PhasedBlock, SegmentedBlock
from anyshape.runtime.numpy_ops.convolution import byte_conv
from anyshape.runtime.specialize.offload_schedule import CallAction
from anyshape.runtime.specialize.saved_policy import SAVE_ALL
from anyshape.runtime.specialize.specialization import Specialization, View
from anyshape.runtime.torch_ops.extern_calls import results_of
from anyshape.runtime.torch_ops.fallbacks import (
    by_torch,
    direct_conv_by_torch,
    grouped_by_torch,
    grouped_conv_by_torch,
    routing_by_torch,
)
from anyshape.runtime.torch_ops.reference_interpreter import Interpreter
from anyshape.sym.expr import Expr, evaluate
from anyshape.torch_compat import is_zeros, storage_id
from anyshape.torch_compat.dtypes import TORCH_DTYPES
from anyshape.torch_compat.tensors import in_memory


class CallFrame:
    """One running call.

    Attributes:
        shared: what all calls of the program have in common. record: the plan at this call's sizes.
        inputs, outputs: the call's tensors; an output is None until it is made. externs: those that PyTorch made, by
            buffer.
        kept, temporary, phases: the blocks of memory that the buffers of the arena lie in.
        error: what a step raised, for the caller. tickets: copies to the offload store that were begun, by step.
    """

    __slots__ = ("error", "externs", "frame", "inputs", "kept", "outputs", "phases", "record", "runner", "shared",
                 "temporary", "tickets")

    def __init__(self, shared: ExternTable, record: Specialization, inputs: list[Any], outputs: list[Any],
                 kept: Block | SegmentedBlock,
                 temporary: Block, phases: PhasedBlock | None, runner: PlanRunner, frame: Any) -> None:
        self.shared = shared
        self.record = record
        self.inputs = inputs
        self.outputs = outputs
        self.kept = kept
        self.temporary = temporary
        self.phases = phases
        self.externs: dict[str, torch.Tensor] = {}
        self.runner, self.frame = runner, frame
        self.error: BaseException | None = None
        self.tickets: dict[int, PendingCopy] = {}  # copies that were begun

    # --- tensors

    def tensor(self, window: Window, view: View) -> torch.Tensor:
        """The tensor that a window stands for."""
        shape, strides, offset = view
        buffer = self.shared.buffers[window.buffer]
        base = self._base(buffer)
        if base is None:
            dtype = TORCH_DTYPES[window.type.dtype]
            byte = self.record.offsets[window.buffer] + offset * dtype.itemsize
            if byte < self.record.kept and self.record.reused_output >= 0:
                output = self.outputs[self.record.reused_output].untyped_storage()
                flat = torch.empty(0, dtype=dtype, device=output.device)
                return flat.set_(output, byte // dtype.itemsize, shape, strides)
            if byte < self.record.kept:
                return self.kept.window(dtype, byte, shape, strides)
            byte -= self.record.kept
            if self.phases is not None and byte >= self.record.temporary:
                byte -= self.record.temporary + sum(self.phases.sizes[:self.phases.number])
                return self.phases.block.window(dtype, byte, shape, strides)
            return self.temporary.window(dtype, byte, shape, strides)
        if offset == 0 and base.shape == shape and same_strides(shape, base.stride(), strides):
            return base
        return base.as_strided(shape, strides, base.storage_offset() + offset)

    def _base(self, buffer: Buffer) -> torch.Tensor | None:
        """The tensor of a buffer that is one, None for a place in the arena."""
        if buffer.name in self.record.offsets:
            return None
        if buffer.name in self.shared.output_of:
            return self.outputs[self.shared.output_of[buffer.name]]
        if buffer.name in self.shared.position_of:
            return self.inputs[self.shared.position_of[buffer.name]]
        return self.externs[buffer.name]

    # --- steps

    def step(self, number: int) -> None:
        """Does a step by PyTorch, or what moves values."""
        if number >= len(self.shared.plan.steps):
            self._move(self.record.actions[number - len(self.shared.plan.steps)])
            return
        step = self.shared.plan.steps[number]
        assert self.record.windows is not None, "a program with steps of the host"
        views = self.record.windows[number]
        try:
            if isinstance(step, ExternStep):
                self._extern(number, step, views)
            elif isinstance(step, LibraryStep) and step.op in ATTENTION:
                self._attention(step, views)
            elif isinstance(step, LibraryStep) and step.op in GROUPED:
                operands = [self.tensor(w, v) for w, v in zip(step.inputs, views, strict=False)]
                self.tensor(step.outputs[0], views[-1]).copy_(grouped_by_torch(step.op, dict(step.attrs), operands))
            elif isinstance(step, LibraryStep) and step.op == "grouped_conv":
                operands = [self.tensor(w, v) for w, v in zip(step.inputs, views, strict=False)]
                self.tensor(step.outputs[0], views[-1]).copy_(grouped_conv_by_torch(dict(step.attrs), operands))
            elif isinstance(step, LibraryStep) and step.op == "direct_conv":
                operands = [self.tensor(w, v) for w, v in zip(step.inputs, views, strict=False)]
                self.tensor(step.outputs[0], views[-1]).copy_(direct_conv_by_torch(dict(step.attrs), operands))
            elif isinstance(step, LibraryStep) and step.op == "conv_bytes":
                x, w = (self.tensor(one, v) for one, v in zip(step.inputs, views, strict=False))
                sums = byte_conv(dict(step.attrs), x.cpu().numpy(), w.cpu().numpy())
                self.tensor(step.outputs[0], views[-1]).copy_(torch.from_numpy(sums))
            elif isinstance(step, LibraryStep) and step.op in ROUTING:
                self._routing(step, views)
            elif isinstance(step, LibraryStep):
                self._matmul(step, views)
            elif isinstance(step, MemoryStep):
                self._hold(number, step)
            else:
                assert isinstance(step, CopyStep)
                self.tensor(step.target, views[1]).copy_(self.tensor(step.source, views[0]))
        except RuntimeError as error:
            if isinstance(step, ExternStep) and ("c10d" in step.target or "collective" in step.target):
                from anyshape.runtime.collectives.lost_rank import lost  # torch.distributed, which few programs need
                found = lost(error)
                if found is not None:
                    raise found from error
            error.add_note(f"in step {number} of {self.shared.plan.name}, {step.where or 'source line unknown'}")
            raise

    def _move(self, action: CallAction) -> None:
        """Begins to copy a value to the store or back, or waits for that."""
        if action.kind == "wait":
            self.tickets[action.number].wait()
            return
        assert isinstance(self.kept, SegmentedBlock) and self.kept.space is not None
        begin = self.kept.space.put if action.kind == "out" else self.kept.space.get
        self.tickets[action.number] = begin(action.at, self.temporary.address + action.offset, action.bytes,
                                            self.temporary)

    def settle(self) -> None:
        """Returns when nobody copies from or to the call's memory any more: it is about to be given back. Ctrl-C
        waits for that, too."""
        interrupt: KeyboardInterrupt | None = None
        for ticket in self.tickets.values():
            ticket.unwanted = True
        while self.tickets:
            try:
                next(iter(self.tickets.values())).end()
                self.tickets.pop(next(iter(self.tickets)))
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _hold(self, number: int, step: MemoryStep) -> None:
        """Lets tensors go, and the lower block where that ends here; allocates results."""
        shared = self.shared
        self._let_go(number)
        if number == self.record.given and isinstance(self.kept, Block):
            self.kept.release()
        if step.chunk >= 0:
            assert isinstance(self.kept, SegmentedBlock)
            self.kept.free(step.chunk)
        if number in self.record.turns and self.phases is not None:
            self.phases.turn()
            address = self.phases.block.address
            for slot, byte in self.record.late[self.phases.number - 1]:
                self.runner.bind(self.frame, slot, address + byte)
        for name in step.drop:
            if name in shared.external:
                self.externs.pop(name, None)
            else:
                self.inputs[shared.position_of[name]] = None
        for name in step.take:
            index = shared.output_of[name]
            if index == self.record.reused_output:
                continue  # it is there already
            result = shared.allocate(*self.record.allocations[index], shared.dtypes[index])
            self.outputs[index] = result
            if self.runner.on_host:
                prefer_large(result.data_ptr(), result.nbytes)
            self.runner.bind(self.frame, shared.slots[name], result.data_ptr())

    def _let_go(self, number: int) -> None:
        """Lets go of what PyTorch made and no step from this one on reads."""
        for name in self.shared.drops[number]:
            self.externs.pop(name, None)
        dropped = self.record.policy.dropped
        if dropped:
            for name in self.shared.later[number]:
                if name in dropped:
                    self.externs.pop(name, None)

    def _extern(self, number: int, step: ExternStep, views: tuple[Any, ...]) -> None:
        self._let_go(number)
        counters.count_extern_call()
        operands = [self.tensor(entry, view) if isinstance(entry, Window) else view
                    for entry, view in zip(step.inputs, views, strict=False)]
        function = self.shared.functions.get(number)
        if step.target in WRITES_RESULTS:
            assert function is not None
            function(operands, [self.tensor(window, view) for window, view in zip(  # type: ignore[arg-type]
                step.outputs, views[len(step.inputs):], strict=True)])
            return
        returned = self._own(step, operands) if function is None else function(operands)
        results = results_of(returned, len(step.outputs))
        storages = {storage_id(one) for one in operands if isinstance(one, torch.Tensor)}
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
        outputs = tuple(Value(f"result{i}", window.type) for i, window in enumerate(step.outputs) if window is not None)
        return state.call(Node(step.target.removeprefix(OWN), inputs, attrs, outputs, step.where))

    def _receive(self, step: Step, window: Window, view: View, result: Any, storages: set[int]) -> None:
        """Puts a result of PyTorch where the plan wants it. `storages`: of the operands and of earlier results."""
        shape, strides, _ = view
        if not isinstance(result, torch.Tensor) or tuple(result.shape) != shape \
                or result.dtype != TORCH_DTYPES[window.type.dtype]:
            found = f"{result.dtype}{list(result.shape)}" if isinstance(result, torch.Tensor) else repr(result)
            raise VerifyError(f"{getattr(step, 'target', 'a library')} returned something else than was traced",
                              where=step.where, why=f"it returned {found}; traced: {window.type}, {list(shape)} here",
                              do="compile the program again; if it stays, report this operator")
        again = self.shared.again.get(window.buffer)
        if again is None and window.buffer not in self.shared.external:
            self.tensor(window, view).copy_(result)
            return
        if result.is_neg() or (result.dtype.is_complex and result.is_conj()) \
                or (not result.data_ptr() and is_zeros(result)):
            result = in_memory(result)
        result = restrided(result, strides)
        # an operator may return its operand, or parts of one tensor; each place is used again by itself
        if storage_id(result) in storages:
            result = _copied(result, shape, strides)
        storages.add(storage_id(result))
        if again is not None:
            self._put_back(again, result)
            return
        self.externs[window.buffer] = result
        self.runner.bind(self.frame, self.shared.slots[window.buffer], result.data_ptr())

    def _put_back(self, again: RecomputeStep, result: torch.Tensor) -> None:
        """Lets the tape's entries that lie in what the forward dropped be windows of `result`, unless it kept it."""
        shared = self.shared
        if again.saved not in self.record.policy.dropped:
            return
        for name, byte in again.windows:
            position = shared.position_of[name]
            shape, strides, _ = self.record.inputs[position]  # type: ignore[misc]
            offset = result.storage_offset() + evaluate(byte, self.record.values) // result.itemsize
            found = result.as_strided(shape, strides, offset)
            self.inputs[position] = found
            self.runner.bind(self.frame, shared.slots[name], found.data_ptr())

    def _attention(self, step: LibraryStep, views: tuple[Any, ...]) -> None:
        """Attention that the host cannot do in place: odd strides."""
        operands = [self.tensor(w, v) for w, v in zip(step.inputs, views, strict=False)]
        results = by_torch(step.op, dict(step.attrs), operands)
        for window, view, result in zip(step.outputs, views[len(step.inputs):], results, strict=True):
            self.tensor(window, view).copy_(result)

    def _routing(self, step: LibraryStep, views: tuple[Any, ...]) -> None:
        attrs: dict[str, Any] = dict(step.attrs)
        if "size" in attrs:
            attrs["size"] = views[1][0][0]
        results = routing_by_torch(step.op, attrs, self.tensor(step.inputs[0], views[0]))
        for window, view, result in zip(step.outputs, views[1:], results, strict=True):
            self.tensor(window, view).copy_(result)

    def _matmul(self, step: LibraryStep, views: tuple[Any, ...]) -> None:
        """A product that the library cannot do in place: integers, half precision, odd strides."""
        attrs = dict(step.attrs)
        alpha, beta = attrs.get("alpha", 1), attrs.get("beta", 1)
        assert isinstance(alpha, (int, float)) and isinstance(beta, (int, float))
        a, b, *rest = [self.tensor(w, v) for w, v in zip(step.inputs, views, strict=False)]
        columns = attrs.get("columns")
        if isinstance(columns, int):
            b = from_panels(b, a.shape[-1], columns)
        if step.op == "matmul_bytes":
            a, b = a.to(torch.float64), b.to(torch.float64)
            self.tensor(step.outputs[0], views[2]).copy_(torch.matmul(a, b).to(torch.int64))
            return
        if "rounded" in attrs:
            a, b = (x.to(TORCH_DTYPES[str(attrs["rounded"])]) for x in (a, b))
        target = self.tensor(step.outputs[0], views[len(step.inputs)])
        if not self.runner.on_host and _multiplied(target, a, b, rest, alpha, beta):
            return
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
        known = None if isinstance(self.kept, SegmentedBlock) else self.kept.views.get(self.record)
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
            elif (entry.buffer in record.offsets and record.policy != SAVE_ALL) or (
                    entry.buffer in record.policy.dropped):  # says what it is
                shape, strides, _ = record.saved[i]
                value = torch.empty_strided(shape, strides, dtype=TORCH_DTYPES[entry.type.dtype], device="meta")
            elif entry.buffer in record.offsets:
                value = self.tensor(entry, record.saved[i])
            else:
                buffer = self.shared.buffers[entry.buffer]
                if buffer.is_input and record.saved[i] == record.inputs[buffer.index]:
                    given.append((i, buffer.index))
                else:
                    others.append((i, entry))
            values.append(value)
        return values, given, others


def _multiplied(target: torch.Tensor, a: torch.Tensor, b: torch.Tensor, rest: Sequence[torch.Tensor],
                alpha: int | float, beta: int | float) -> bool:
    """A product by PyTorch straight into `target`; False where it would need other memory."""
    batch = target.shape[:-2]
    alike = a.dtype == b.dtype == target.dtype and target.is_floating_point() and a.shape[:-2] == b.shape[:-2] == batch
    if not alike or target.dim() not in (2, 3) or 0 in target.shape or any(x.dtype != target.dtype for x in rest):
        return False
    if not rest and alpha == 1:
        (torch.mm if target.dim() == 2 else torch.bmm)(a, b, out=target)
        return True
    if not rest:
        return False
    add = torch.addmm if target.dim() == 2 else torch.baddbmm
    add(rest[0].expand(target.shape), a, b, beta=beta, alpha=alpha, out=target)
    return True


def _copied(tensor: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """The same numbers in memory of their own, laid out as before; elements that lie on each other (sliding windows,
    a repeated row) stay so."""
    if 0 in shape or not overlaps(shape, strides):
        return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    span = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    return tensor.as_strided((span,), (1,)).clone().as_strided(shape, strides)
