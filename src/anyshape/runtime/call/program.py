"""The program: a compiled plan that any host calls by its driver (runtime/driver/), the same inside PyTorch and alone.
Stateless and re-entrant.

One call: read the symbols' record by the shapes of the inputs (or make it), allocate the outputs, take the arena, fill
the block, run the plan natively, give the arena back. `Executable` (runtime/call/executable.py) is the same with what
only PyTorch's programs have: tapes, steps by PyTorch, limits.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from anyshape.backend.interface import DONE, Kernel, PythonSteps
from anyshape.base import counters
from anyshape.base.errors import DeviceError, InputError
from anyshape.ir.types import TensorType
from anyshape.plan.ir.program import MemoryStep, Plan, Window, step_writes
from anyshape.runtime.call.dispatch_codegen import make_enter
from anyshape.runtime.call.unread_status import failure, settle
from anyshape.runtime.context.process_context import Context
from anyshape.runtime.memory.huge_pages import prefer_large
from anyshape.runtime.memory.pools import Block
from anyshape.runtime.specialize.shape_binding import Binder
from anyshape.runtime.specialize.specialization import Specialization, Specializer

RECORDS = 512  # shapes that one program remembers


class Program:
    """A compiled plan that a host calls: a call takes arrays and gives results. Threads may share one.

    Args:
        specializer: the plan's.
        context: what programs share, with the driver of who calls them.
        threads: of a call at most; 0: as many as the driver says.
        known: symbols that come from outside, from a tape.
        steps: does what a plan leaves to the host, of a call; None: such a plan cannot run.
        bound: inputs that are the same in every call, by position: what they are; callers leave them out.

    Raises:
        Unsupported: a size of the plan cannot be read from its inputs.
    """

    def __init__(self, specializer: Specializer, kernels: Sequence[Kernel], context: Context, threads: int = 0,
                 known: frozenset[str] = frozenset(), steps: Callable[..., PythonSteps] | None = None,
                 bound: Mapping[int, Any] = MappingProxyType({})) -> None:
        plan = self.plan = specializer.plan
        self.name = plan.name
        self.kernels = list(kernels)
        self.context = context
        self.driver = driver = context.driver
        self.threads = threads
        self.specializer = specializer
        self.runner = specializer.runner
        self.layout = self.runner.sizes
        self.steps = steps
        self.binder = Binder(plan, self.layout.symbols, known, specializer.names, driver, bound)
        self.specializations: dict[Any, Specialization] = {}
        self.lock = threading.Lock()
        self.enter = make_enter(plan, self.layout.slots, self.binder.strided, driver, bound)
        self.bound = [bound.get(i) for i in range(len(plan.inputs))]
        windows = [plan.outputs[buffer.index] for buffer in specializer.outputs]
        self.dtypes = tuple(driver.dtypes[window.type.dtype] for window in windows if isinstance(window, Window))
        self.allocate, self.address = driver.result, driver.address
        self.places = sorted((position, index) for index, position in enumerate(plan.restored))
        # of what a call brings
        self.called = [i for i in range(len(plan.inputs)) if i not in bound and i not in plan.restored]
        self.tensors = [i for i, kind in enumerate(plan.inputs) if isinstance(kind, TensorType) and i not in bound]
        self.scalars = [i for i in self.tensors if not plan.inputs[i].shape]  # type: ignore[union-attr]
        self.written = written_inputs(plan)
        self.order = result_order(plan, {b.name: i for i, b in enumerate(specializer.outputs)})
        late = {name for step in plan.steps if isinstance(step, MemoryStep) for name in step.take}
        self.lazy = any(b.name in late for b in specializer.outputs)
        self.takes_tape = bool(plan.restored)
        self.keeps = False  # calls save something, or keep to a limit
        # what does a call, with its arguments, that the device refuses
        self.otherwise: Callable[[list[Any], DeviceError], list[Any]] | None = None
        self.plain = self.order == tuple(range(len(self.dtypes))) and not plan.saved
        self.straight = self.order is not None and not self.lazy  # allocated at the start, returned as they are
        counters.count("programs")
        counters.count("kernels", len(self.kernels))

    def __call__(self, args: list[Any]) -> list[Any]:
        """Runs the program on `args` (emptied): the plan's inputs; for a backward the tape, then the other inputs.

        Returns the outputs; a forward that saves something returns its tape as the last one.

        Raises:
            InputError: an argument does not fit. IndexRangeError: an index of a gather is out of range.
            DivisionError: a whole number is divided by 0. On a device with streams either may come from an earlier
                call; nothing has run then, and `args` are as they were.
            DeviceError: the device refuses the call, and there is no other way to do it.
        """
        if self.context.unread:
            settle(self.context.unread)
        if self.takes_tape:
            return self._backward(args)
        try:
            record, inputs, pointers, undo = self.enter(args, self.specializations, self._slow, self._fit)
        except DeviceError as error:  # nothing has run
            return self._refused(args, error)
        if record.is_other is not self.specializer.is_other:
            return self._in_other_order(args)
        given = None if self.otherwise is None else args[:]
        args.clear()
        try:
            if self.keeps:
                return self._kept(record, inputs, pointers, undo)
            run = self._straight if self.straight and record.native and not undo else self._run
            return run(record, list(inputs), pointers, undo, self.context.kept.empty)
        except DeviceError as error:
            if given is None or self._has_written(error):
                raise
            refusal = error
        return self._refused(given, refusal)

    def _refused(self, args: list[Any], error: DeviceError) -> list[Any]:
        """A call that the device refuses, nothing of which the caller can see."""
        if self.otherwise is None:
            raise error
        error.__traceback__ = None  # which holds what the call has allocated
        if not error.where:  # no step's, as where there is no memory for all of them: where the program begins
            error = error.within(next((step.where for step in self.plan.steps if step.where), ""))
        return self.otherwise(args, error)

    def _has_written(self, error: DeviceError) -> bool:
        """Whether a step that has begun writes into what the caller brought: the call cannot be done once more."""
        steps = self.plan.steps if error.reached is None else self.plan.steps[:error.reached + 1]
        given = {b.name for b in self.plan.buffers if b.is_input}
        return any(window.buffer in given for step in steps for window in step_writes(step))

    def specialization(self, args: list[Any]) -> Specialization:
        """The record that a call with these arguments would run; nothing runs. Errors as of a call's arguments."""
        return self.enter(args, self.specializations, self._slow, self._fit)[0]

    def _backward(self, args: list[Any]) -> list[Any]:
        """A call that takes a tape."""
        raise NotImplementedError

    def _in_other_order(self, args: list[Any]) -> list[Any]:
        """A call in another order of steps."""
        raise NotImplementedError

    def _kept(self, record: Specialization, inputs: tuple[Any, ...], pointers: tuple[int, ...],
              undo: tuple[Any, ...]) -> list[Any]:
        """A call that saves something, or keeps to a limit."""
        raise NotImplementedError

    def _run(self, record: Specialization, inputs: list[Any], pointers: tuple[int, ...], undo: tuple[Any, ...],
             kept: Any, tape_memory: Any = None) -> list[Any]:
        """A call some steps of which are the host's, or whose results are parts of what is allocated."""
        driver, pool = self.driver, self.context.temporary
        outputs = [self.allocate(sizes, strides, dtype)
                   for (sizes, strides), dtype in zip(record.allocations, self.dtypes, strict=True)]
        threads = self.threads or driver.threads()
        scratch = record.scratch * threads
        blocks: list[Block] = []
        try:
            if record.given >= 0:
                kept = pool.take(record.kept)
                blocks.append(kept)
            temporary = pool.take(record.temporary + scratch)
            blocks.append(temporary)
            lower = kept.address if record.reused_output < 0 else self.address(outputs[record.reused_output])
            frame = self.runner.frame(record.payload, (*pointers, *map(self.address, outputs)), lower,
                                      temporary.address, temporary.address + record.temporary, threads)
            assert self.steps is not None, "such a plan is refused when it is loaded"
            steps = self.steps(self, record, inputs, outputs, kept, temporary, frame)
            profiler = self.context.profiler
            code = self.runner.run(frame, steps) if profiler.runs is None else profiler.run(self, record, frame, steps)
            if code != DONE:
                if steps.error is not None:
                    raise steps.error
                raise failure(self.name, self.plan, self.runner, frame, code)
            for given, used in undo:
                driver.put_back(given, used)
            return steps.results()  # type: ignore[attr-defined, no-any-return]
        finally:
            for block in blocks:
                pool.give(block)
            counters.count_run()

    def _straight(self, record: Specialization, inputs: list[Any], pointers: Sequence[int], _undo: tuple[Any, ...],
                  kept: Any, tape_memory: Any = None, brought: Sequence[int] = ()) -> list[Any]:
        """A call whose results are allocated at the start and returned as they are, and no step of which is Python's.
        kept: the lower block. tape_memory: of a forward that saves something. brought: addresses of memory that is
        there for the results, by slot, see `run_at`."""
        allocate, address, dtypes = self.allocate, self.address, self.dtypes
        if brought:
            outputs: list[Any] = []
            addresses = brought
        elif len(dtypes) == 1:
            (sizes, strides), = record.allocations
            outputs = [allocate(sizes, strides, dtypes[0])]
            addresses = [address(outputs[0])]
        else:
            outputs = [allocate(sizes, strides, dtype)
                       for (sizes, strides), dtype in zip(record.allocations, dtypes)]  # noqa: B905
            addresses = [address(output) for output in outputs]
        for i, bytes_ in () if brought else record.large:
            prefer_large(addresses[i], bytes_)
        context = self.context
        threads = self.threads or self.driver.threads()
        pool = context.temporary
        scratch = record.scratch * threads
        lower = kept.address if record.reused_output < 0 else addresses[record.reused_output]
        if scratch <= record.spare:
            temporary = pool.take(record.temporary)
            spare = lower + record.spare_at
        elif record.reused_output < 0:
            temporary = pool.take(record.temporary + scratch)
            spare = temporary.address + record.temporary
        else:
            temporary, spare, _own = self._above(record, scratch)
        try:
            runner = self.runner
            frame = runner.frame(record.payload, (*pointers, *addresses), lower, temporary.address, spare, threads)
            for slot, chunk, byte in record.parts:
                runner.bind(frame, slot, kept.addresses[chunk] + byte)
            code = runner.run(frame) if context.profiler.runs is None else context.profiler.run(self, record, frame)
            if code != DONE:
                self._not_done(code, frame, None, inputs)
            if self.plain:
                return outputs
            return self._results(record, inputs, outputs, kept, temporary, frame, tape_memory)
        finally:
            pool.give(temporary)
            counters.count_run()

    def run_at(self, record: Specialization, pointers: Sequence[int], results: Sequence[int]) -> None:
        """A call on memory that is the caller's, of a program that is `plain` and `straight`: pointers: addresses of
        the plan's parameters, see `make_enter`; results: of its outputs, dense, by slot. Errors as of a call."""
        self._straight(record, [], pointers, (), self.context.kept.empty, None, results)

    def _results(self, record: Specialization, inputs: list[Any], outputs: list[Any], kept: Any, temporary: Block,
                 frame: Any, tape_memory: Any) -> list[Any]:
        """What a call returns beside what it allocated."""
        assert self.order is not None
        return [value if i is None else outputs[i] for i, value in zip(self.order, record.outputs, strict=True)]

    def _above(self, record: Specialization, scratch: int) -> tuple[Block, int, Block | None]:
        """The temporary block, the address of scratch that the lower one has no room for, and its block if it has its
        own: where the arena is small, for it lies in a result, what idles between calls is to stay so."""
        pool = self.context.temporary
        if record.reused_output < 0:
            temporary = pool.take(record.temporary + scratch)
            return temporary, temporary.address + record.temporary, None
        own = pool.fresh(scratch)
        return pool.take(record.temporary), own.address, own

    def _not_done(self, code: int, frame: Any, call: Any, inputs: list[Any]) -> None:
        """Turns the end of a run into an exception."""
        raise failure(self.name, self.plan, self.runner, frame, code)

    def _choice(self, symbols: dict[str, int], origin: Any) -> tuple[Specializer, Any, Iterable[Program]]:
        """Who makes the record at the symbols' values, what it keeps (None: all), and the programs that it is of."""
        return self.specializer, None, (self,)

    def _slow(self, args: list[Any], values: Sequence[Any] = (), origin: Any = None
              ) -> tuple[Specialization, tuple[Any, ...]]:
        """A call with a new shape, or with arguments that do not fit: (record, one argument per plan input)."""
        plan = self.plan
        if len(args) != len(self.called):
            raise InputError(f"{self.name} takes {len(self.called)} arguments, {len(args)} were given",
                             do="pass one argument per input of the program")
        arguments = self.bound[:]
        for position, value in zip(self.called, args, strict=True):
            arguments[position] = value
        for position, index in self.places:
            arguments[position] = values[index]
        for i in self.scalars:
            arguments[i] = self._tensor(plan.inputs[i], arguments[i])
        known = origin.values if isinstance(origin, Specialization) else {}
        key, same = None, False
        if all(self.driver.inspect(arguments[i]) is not None for i in self.tensors):
            rest = [arguments[i] for i in self.called]
            key, same = self.enter.key(rest, *((values, origin) if self.places else ()))  # type: ignore[attr-defined]
            record = self.specializations.get(key)
            if record is not None:
                return record, tuple(arguments)
        symbols = self.binder.bind(arguments, known, same)
        specializer, policy, programs = self._choice(symbols, origin)
        record = specializer.make(symbols) if policy is None else specializer.made(symbols, policy)
        for one in programs:  # keys are made of the inputs, which are alike
            one._remember(key, record)
        return record, tuple(arguments)

    def _remember(self, key: Any, record: Specialization) -> None:
        with self.lock:
            while len(self.specializations) >= RECORDS:
                self.specializations.pop(next(iter(self.specializations)))
            self.specializations[key] = record

    def _tensor(self, kind: TensorType | str, argument: Any) -> Any:
        """A Python number where the program has a scalar tensor becomes one."""
        if isinstance(kind, TensorType) and not kind.shape and isinstance(argument, (bool, int, float)):
            return self.driver.scalar(argument, kind.dtype, kind.device)
        return argument

    def _fit(self, record: Specialization, inputs: tuple[Any, ...], known: bool
             ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Inputs in memory and with the strides that the program expects, copied where they are not; what is to be
        copied back afterwards as (given, used) pairs. known: their kinds fit (runtime/driver/tensor_kinds.py)."""
        fitted = list(inputs)
        undo = []
        for i, (kind, given) in enumerate(zip(self.plan.inputs, inputs, strict=True)):
            if not isinstance(kind, TensorType):
                continue
            if not known and i not in self.plan.restored:
                if given.dtype != self.driver.dtypes[kind.dtype] or self.driver.refused(given, self.plan, i):
                    self.binder.bind(inputs, record.values)  # says what is wrong
                fitted[i] = self.driver.plain(given)
            view = record.inputs[i]
            assert view is not None
            fitted[i] = self.driver.restrided(fitted[i], view[1])
            if fitted[i] is not given and i in self.written:
                undo.append((given, fitted[i]))
        return tuple(fitted), tuple(undo)


def written_names(plan: Plan) -> set[str]:
    """The buffers that steps write into."""
    return {window.buffer for step in plan.steps for window in step_writes(step)}


def written_inputs(plan: Plan) -> frozenset[int]:
    """The inputs that a plan writes into."""
    names = written_names(plan)
    return frozenset(b.index for b in plan.buffers if b.name in names and b.is_input)


def result_order(plan: Plan, output_of: dict[str, int]) -> tuple[int | None, ...] | None:
    """Per result, the allocated array that it is (None: a number or nothing); None when some are other windows.
    output_of: buffer -> which."""
    buffers = {b.name: b for b in plan.buffers}
    order: list[int | None] = []
    for i, entry in enumerate(plan.outputs):
        if isinstance(entry, Window) and (entry.buffer not in output_of or buffers[entry.buffer].index != i):
            return None
        order.append(output_of[entry.buffer] if isinstance(entry, Window) else None)
    return tuple(order)
