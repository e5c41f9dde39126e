"""The executable, which PyTorch calls: a `Program` (runtime/call/program.py) with tapes, steps that PyTorch does, and
limits. Stateless and re-entrant: calls may run at once from several threads. Nothing is decided here.
"""
from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from anyshape.backend.interface import CALLBACK_FAILED, DONE, ISSUED, NO_MEMORY, Kernel, Target
from anyshape.backend.targets import usual_target
from anyshape.base import counters
from anyshape.base.errors import DeviceError, InputError, VerifyError
from anyshape.plan.ir.program import Plan
from anyshape.runtime.call.call_frame import CallFrame
from anyshape.runtime.call.extern_table import ExternTable
from anyshape.runtime.call.program import Program
from anyshape.runtime.call.unread_status import UnreadRun, failure, note
from anyshape.runtime.context.process_context import Context, shared_context
from anyshape.runtime.driver.tensor_kinds import without_memory
from anyshape.runtime.memory.huge_pages import prefer_large
from anyshape.runtime.memory.pools import Block, BudgetPolicy, PhasedBlock, SegmentedBlock, TapeMemory
from anyshape.runtime.memory.stream_pools import follow
from anyshape.runtime.memory.tape import Tape
from anyshape.runtime.specialize.specialization import Specialization, Specializer
from anyshape.torch_compat.versions import api


class OrderPolicy(Protocol):
    """Which of two orders of steps a call takes: runtime/budget/order_selection.py."""

    def is_second(self, values: Mapping[str, int]) -> bool:
        """Whether it is the second one at these sizes."""


class BudgetFactory(Protocol):
    """A memory budget that has no program yet: runtime/budget/arbitration.py."""

    def bind(self, program: Executable) -> BudgetPolicy:
        """That of a program."""


@dataclass(frozen=True, slots=True)
class CallPolicy:
    """What calls of a program keep to.

    budget: says what a call at given sizes does not keep. alternative: the same in another order, which calls run
    where `selection` says so.
    """

    budget: BudgetFactory | None = None
    alternative: Executable | None = None
    selection: OrderPolicy | None = None


FREE = CallPolicy()


class Executable(Program):
    """A program that PyTorch calls, with tapes, steps by PyTorch, and limits. Threads may share one.

    Args:
        plan: allocated (plan/memory/symbolic_allocator.py).
        kernels: what the plan's regimes name, in any order.
        context: what programs share; the process's own when left out.
        forward: for a backward program that uses the kept block of its forward, the forward's allocated plan.
        threads, packed_bytes: see `Config`.
        target: what runs the plan, and what its kernels were compiled for; that of the environment when left out.
        specializer: the plan's specializer, for the same target; made when left out.
        policy: what its calls keep to.

    Raises:
        Unsupported: a size of the plan cannot be read from its inputs.
    """

    _boxed_call = True

    def __init__(self, plan: Plan, kernels: Sequence[Kernel] = (), context: Context | None = None,
                 forward: Plan | None = None, threads: int = 0, packed_bytes: int = 0,
                 target: Target | None = None, specializer: Specializer | None = None,
                 policy: CallPolicy = FREE) -> None:
        self.target = usual_target() if target is None else target
        context = (shared_context() if context is None else context).on(self.target)
        specializer = specializer or Specializer(plan, self.target.runner(plan, list(kernels)), context.host, forward)
        known = frozenset(specializer.layout.symbols) if forward is not None else frozenset()
        super().__init__(specializer, kernels, context, threads, known)
        self.streams = self.target.streams
        self.threads = threads if self.streams is None else 1  # whose scratch it is
        self.allocate = self.target.allocator()
        self.calls = ExternTable(plan, self.layout, self.context.packed, packed_bytes, self.allocate)
        self.other, self.choice = policy.alternative, policy.selection
        self.limit = None if policy.budget is None else policy.budget.bind(self)
        self.keeps = self.limit is not None or bool(plan.saved)

    def admit(self, record: Specialization) -> None:
        """Makes room for a call that has this record, which is not made yet.

        Raises:
            LimitError: there is none.
        """
        limit = self.ran(record).limit
        if limit is not None:
            _, space = limit.fit(record)
            if space is not None:
                space.release()

    def _kept(self, record: Specialization, inputs: tuple[Any, ...], pointers: tuple[int, ...],
              undo: tuple[Any, ...]) -> list[Any]:
        """A call under a limit, or of a forward that saves something, which returns its tape as the last result."""
        space = None
        if self.limit is not None:
            record, space = self.limit.fit(record)
        run = self._straight if self.straight and record.native and not undo else self._run
        if not self.plan.saved:
            return run(record, list(inputs), pointers, undo, self.context.kept.empty)
        pool = self.context.kept
        tape_memory = TapeMemory(pool, SegmentedBlock(pool, record.chunks, space) if record.chunks
                           else pool.take(record.kept), record,
                      self.limit)
        try:
            return run(record, list(inputs), pointers, undo, tape_memory.block, tape_memory)
        except BaseException:
            tape_memory.release()
            raise

    def _backward(self, args: list[Any]) -> list[Any]:
        if not args or not isinstance(args[0], Tape):
            raise InputError(f"{self.name} takes the tape of its forward first",
                             why=f"got {type(args[0]).__name__ if args else 'no argument'}",
                             do="pass what the forward returned last")
        tape_memory = args[0].owner if isinstance(args[0].owner, TapeMemory) else None
        if tape_memory is not None and tape_memory.record.is_other is not self.specializer.is_other:
            return self._in_other_order(args)
        tape = args.pop(0)
        if tape_memory is not None and tape_memory.limit is not None:
            tape_memory.limit.begin(tape_memory)
        values = tape.open()
        origin = tape.owner.record if tape_memory is not None else tuple(
            (v.shape, v.stride()) if isinstance(v, torch.Tensor) else v for v in values)
        try:
            record, inputs, pointers, undo = self.enter(args, self.specializations, self._slow, self._fit, values,
                                                        origin)
        except DeviceError as error:  # nothing has run
            return self._refused([tape, *args], error)
        args.clear()
        if self.streams is not None and tape_memory is not None:
            follow(tape_memory.block, self.streams.current())
        private = again = refusal = None
        keeps = not tape.once and api.keeps_graph()
        if tape_memory is not None and record.kept != tape_memory.record.kept:
            raise VerifyError(f"the tape of {self.name} comes from another forward",
                              why=f"it holds {tape_memory.record.kept} bytes, the backward expects {record.kept}")
        if tape_memory is None or (record.overwrites and keeps):
            private = self._private_kept(record, inputs, tape_memory)
        if tape_memory is not None and isinstance(tape_memory.block, SegmentedBlock):
            tape_memory.block.pinned = keeps
        kept = private or (tape_memory.block if tape_memory is not None else self.context.kept.empty)
        # from here on the call alone holds the saved tensors, so that each can go after its last use
        held = list(inputs)
        del inputs, values
        if not keeps:
            tape.values = []
        run = self._straight if self.straight and record.native and not undo else self._run
        try:
            outputs = run(record, held, pointers, undo, kept)
        except BaseException as error:
            overwritten = private is None and record.overwrites and getattr(error, "reached", None) != -1
            again = None if overwritten or not isinstance(error, DeviceError) else self._again(error, tape, held)
            if again is None or not isinstance(error, DeviceError):
                if not keeps or overwritten:
                    tape.release()  # its values are gone, or half overwritten
                raise
            refusal = error
        finally:
            if private is not None:
                self.context.kept.give(private)
        if again is not None and refusal is not None:
            return self._refused(again, refusal)
        if not keeps:
            tape.release()
        return outputs

    def _again(self, error: DeviceError, tape: Tape, held: list[Any]) -> list[Any] | None:
        """The arguments of a backward that the device refused, whose tape is whole; None: something is gone, or the
        caller can see what has run."""
        values: list[Any] = [None] * (1 + max((index for _, index in self.places), default=-1))
        for position, index in self.places:
            values[index] = held[position]
        if self.otherwise is None or self._has_written(error) or any(one is None for one in held) \
                or len(values) != len(self.places):
            return None
        tape.values = tape.values or values
        places = {position for position, _ in self.places}
        return [tape, *(one for position, one in enumerate(held) if position not in places)]

    def at(self, values: Mapping[str, int]) -> Executable:
        """Who runs a call at the symbols' `values`: the program itself, or the same in another order."""
        is_second = self.other is not None and self.choice is not None and self.choice.is_second(values)
        return self.other if is_second and self.other is not None else self

    def ran(self, record: Specialization) -> Executable:
        """Who ran a call that had this record: the program itself, or the same in another order."""
        return self.other if record.is_other and self.other is not None else self

    def _in_other_order(self, args: list[Any]) -> list[Any]:
        """The call in the order that its sizes, or its forward, take. Whoever watches this program sees it."""
        other = self.other
        if other is None:
            raise VerifyError(f"the tape of {self.name} comes from another forward",
                              why="that has another order of steps", do="report it: a bug of the runtime")
        other.context, other.otherwise = self.context, self.otherwise
        return other(args)

    def _private_kept(self, record: Specialization, inputs: Sequence[Any], tape_memory: TapeMemory | None) -> Block:
        """A copy of the kept block, for a tape that must stay as it is or that has no block."""
        block = self.context.kept.take(record.kept)
        if tape_memory is not None:
            if record.kept and isinstance(tape_memory.block, Block):
                block.tensor[:record.kept].copy_(tape_memory.block.tensor[:record.kept])
            return block
        for buffer in self.plan.buffers:
            if buffer.is_restored and buffer.name in record.offsets:
                position = self.plan.parameter_number(buffer)
                view = record.inputs[position]
                assert view is not None
                source = inputs[position]
                block.window(source.dtype, record.offsets[buffer.name], view[0], view[1]).copy_(source)
        return block

    def _run(self, record: Specialization, inputs: list[Any], pointers: tuple[int, ...], undo: tuple[Any, ...],
             kept: Any, tape_memory: Any = None) -> list[Any]:
        context = self.context
        if self.lazy:
            outputs: list[Any] = [None] * len(self.dtypes)
            for i in self.calls.early if record.reused_output < 0 else {*self.calls.early, record.reused_output}:
                outputs[i] = self.allocate(*record.allocations[i], self.dtypes[i])
        else:
            outputs = [self.allocate(sizes, strides, dtype)
                       for (sizes, strides), dtype in zip(record.allocations, self.dtypes)]  # noqa: B905
        for i, bytes_ in record.large:
            if outputs[i] is not None:
                prefer_large(outputs[i].data_ptr(), bytes_)
        threads = self.threads or self.driver.threads()
        temporary: Block | None = None
        phases: PhasedBlock | None = None
        call: CallFrame | None = None
        # torch.no_grad() costs more than the rest of a small call
        graded = bool(record.payload.calls or undo or not self.plain) and torch.is_grad_enabled()
        try:
            scratch = record.scratch * threads
            if record.given >= 0:
                kept = context.kept.fresh(record.kept + (scratch if record.spare else 0))
            lower = kept.address if record.reused_output < 0 else outputs[record.reused_output].data_ptr()
            if record.phases:
                phases = PhasedBlock(context.temporary, record.phases)
            if scratch <= record.spare:
                temporary = context.temporary.take(record.temporary)
                spare = lower + record.spare_at
            else:
                temporary, spare, _own = self._above(record, scratch)
            if graded:
                api.set_grad_enabled(False)
            runner = self.runner
            frame = runner.frame(record.payload, (*pointers, *(0 if output is None else output.data_ptr()
                                                              for output in outputs)),
                                 lower, temporary.address, spare, threads)
            if record.payload.calls:
                self.calls.begin(record)
                call = CallFrame(self.calls, record, inputs, outputs, kept, temporary, phases, runner, frame)
            if record.parts:
                addresses = [*kept.addresses, phases.block.address] if phases is not None else kept.addresses
                for slot, chunk, byte in record.parts:
                    runner.bind(frame, slot, addresses[chunk] + byte)
            profiler = context.profiler
            code = runner.run(frame, call) if profiler.runs is None else profiler.run(self, record, frame, call)
            if code != DONE:
                self._not_done(code, frame, call, inputs)
            for given, used in undo:
                given.copy_(used)
            if self.plain and record.exact:
                return outputs
            if call is None:
                call = CallFrame(self.calls, record, inputs, outputs, kept, temporary, phases, runner, frame)
            results = call.in_order() if self.order is not None and record.exact else call.results()
            if self.plan.saved:
                results.append(self._tape(call, tape_memory))
            return results
        except BaseException:
            if self.calls.launches:  # a message may be under way: who sends it has its memory, and nobody else
                for block in (kept, temporary):
                    if isinstance(block, Block) and block.bytes:
                        block.release()
            raise
        finally:
            if graded:
                api.set_grad_enabled(True)
            if call is not None and call.tickets:
                call.settle()
            if phases is not None:
                phases.release()
            if temporary is not None:
                context.temporary.give(temporary)
            counters.count_run()

    def _tape(self, call: CallFrame, tape_memory: TapeMemory | None) -> Tape:
        """The tape of a forward that has run."""
        tape = Tape(call.saved(), tape_memory, self.calls.checked)
        if tape_memory is not None and tape_memory.limit is not None:
            tape_memory.tape = weakref.ref(tape)
        return tape

    def _not_done(self, code: int, frame: Any, call: CallFrame | None, inputs: list[Any]) -> None:
        """Turns the end of a run into an exception; one that has not ended is remembered."""
        if code == ISSUED:
            note(self.context.unread, UnreadRun(self.name, self.plan, self.runner, frame))
            return
        if code == CALLBACK_FAILED and call is not None:
            raise call.error or KeyboardInterrupt("while PyTorch was about to do a step")
        if code == NO_MEMORY:
            raise without_memory(self.plan, inputs)
        raise failure(self.name, self.plan, self.runner, frame, code)

    def _results(self, record: Specialization, inputs: list[Any], outputs: list[Any], kept: Any, temporary: Block,
                 frame: Any, tape_memory: Any) -> list[Any]:
        """See `Program`: the results in order, and the tape of a forward."""
        call = CallFrame(self.calls, record, inputs, outputs, kept, temporary, None, self.runner, frame)
        results = call.in_order()
        if self.plan.saved:
            results.append(self._tape(call, tape_memory))
        return results

    def _choice(self, symbols: dict[str, int], origin: Any) -> tuple[Specializer, Any, Iterable[Program]]:
        """See `Program`: in the order that its sizes take, and with what its limit or its tape keeps."""
        program = self if self.plan.restored else self.at(symbols)
        policy = origin.policy if isinstance(origin, Specialization) else None
        if policy is None and program.limit is not None:
            return program.specializer, program.limit.choose(symbols), dict.fromkeys((self, program))
        specializer = program.specializer if policy is None else self.specializer
        return specializer, policy, dict.fromkeys((self, program))

    def record(self, *args: Any) -> Specialization:
        """The record of a call with these arguments (as in a call), without running it."""
        arguments = list(args)
        if self.takes_tape:
            tape = arguments.pop(0)
            origin = tape.owner.record if isinstance(tape.owner, TapeMemory) else ()
            is_ours = not isinstance(origin, Specialization) or origin.is_other is self.specializer.is_other
            if self.other is not None and not is_ours:
                return self.other.record(tape, *arguments)
            return self._slow(arguments, tape.open(), origin)[0]
        return self._slow(arguments)[0]
