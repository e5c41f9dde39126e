"""Serialisation of a captured program: what the disk cache keeps of it, and the program that another process makes of
that, without a trace.

    kept:  guards, Dynamo's code, the compiled plans with their loops, what is asked about small sizes
    made:  plans are linked, kernels come from the same cache, and the program stands behind the same guards

Records are pickled. They lie in the user's own cache, which is only read where nobody else could have written it
(base/disk_cache.py), as the machine code beside them.
"""
from __future__ import annotations

import dataclasses
import functools
import io
import marshal
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from anyshape.backend.loaded_code import LoadedKernel
from anyshape.base.errors import InputError
from anyshape.compiler.compiled import CompiledGraph, PlannedGraph
from anyshape.compiler.link import link_backward, link_pair
from anyshape.frontend.autograd.partition import PartitionedGraphs
from anyshape.frontend.capture.autograd_function import AutogradProgram
from anyshape.frontend.capture.dynamo_backend import flat_program
from anyshape.frontend.capture.small_size_guard import SizeQuestions, asking_program
from anyshape.frontend.importer.graph_inputs import Notes
from anyshape.frontend.programs.compile_program import NativeProgram, native
from anyshape.frontend.programs.double_backward import DoubleBackward
from anyshape.frontend.programs.session import Boxed, Compilation, NotCovered
from anyshape.torch_compat.dynamo.guard_record import CodeNames, GuardRecord, NotRecorded

MOST_CONSTANTS = 1 << 20  # bytes of constants of a graph that are kept
NOT_JUDGED = "a pattern of sizes 0 and 1 that was not judged when the program was traced, in another process"
NOT_PLANNED = ("target", "kernels", "executable", "other")  # of the process
HOST = "cpu"


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """A compiled graph without what belongs to a process: `fields` of PlannedGraph, its notes, and by which keys the
    object code of its kernels is kept."""
    name: str
    fields: Mapping[str, Any]
    notes: Notes
    keys: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TrainingRecord:
    """The backward of a program, and what the function of autograd around both does.

    Args:
        backward: the compiled graph.
        runtime: what AOTAutograd's wrapper would do.
        inputs: how many flat inputs there are.
        second: of second derivatives (DoubleBackward.state).
    """
    backward: PlanRecord
    runtime: Any
    inputs: int
    second: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ProgramRecord:
    """A captured program.

    Args:
        guards: its guards.
        code: Dynamo's code, marshalled.
        names: what the code finds among its globals.
        plan: the compiled graph.
        hints: dims of outputs that are marked for later traces.
        training: of a program whose gradients are taken; None of others.
        questions: about small sizes; None: it serves all.
        sizes: see Capture.
        fixed: see Compilation.
        attentions: see Compilation.
        files: of the user and of libraries -> the hash of what they contain.
    """
    guards: GuardRecord
    code: bytes
    names: CodeNames
    plan: PlanRecord
    hints: list[tuple[int, set[int]]]
    training: TrainingRecord | None
    questions: SizeQuestions | None
    sizes: tuple[tuple[str, str, str], ...]
    fixed: dict[str, str]
    attentions: tuple[Any, ...]
    files: dict[str, str]


def record_of(program: Callable[..., Any], code: Any, names: CodeNames, guards: GuardRecord, files: dict[str, str],
              number: int, compilation: Compilation) -> ProgramRecord:
    """The record of a program that was just made. program: as `TracingMode` has it; code: Dynamo's; number:
    of the captured graph.

    Raises:
        NotRecorded: it is not one compiled program, or has what only this process has.
    """
    made = getattr(program, "made_of", None)
    if made is None:
        raise NotRecorded("its calls need PyTorch's wrapper")
    if str(number) in compilation.data_sizes:
        raise NotRecorded("sizes are found in the data")
    try:
        text = marshal.dumps(code)
    except ValueError:
        raise NotRecorded("its code holds an object of the process that traced it") from None
    training, hints = None, []
    if isinstance(made, AutogradProgram):
        training = _training_record(made, compilation)
        plan = _plan_record(made.forward, compilation)
    else:
        plan, hints = _plan_record(made[0], compilation), made[1]
    return ProgramRecord(guards, text, names, plan, hints, training,
                         getattr(program, "questions", None),
                         compilation.captures[number].sizes, dict(compilation.fixed),
                         compilation.attentions.get(number, ()), files)


def _training_record(pair: AutogradProgram, compilation: Compilation) -> TrainingRecord:
    assert pair.backward is not None and pair.second is not None
    try:
        second = pair.second.state()
    except Exception as error:  # the border to operators of users, which need not be written to a file
        raise NotRecorded(f"its graph cannot be pickled: {error!s:.200}") from error
    return TrainingRecord(_plan_record(pair.backward, compilation), pair.runtime, pair.count, second)


def _plan_record(boxed: Boxed | None, compilation: Compilation) -> PlanRecord:
    own = None if boxed is None else native(boxed, compilation)
    if own is None:
        raise NotRecorded("it is in several parts, or a part of it runs as PyTorch")
    compiled = own.compiled
    if compiled.target.device != HOST:
        raise NotRecorded(f"it is compiled for {compiled.target.device}")
    if compiled.edited:
        raise NotRecorded("a stage of it was edited")
    if sum(one.nbytes for one in own.constants) > MOST_CONSTANTS:
        raise NotRecorded(f"it has constants of more than {MOST_CONSTANTS} bytes")
    fields = {one.name: getattr(compiled, one.name) for one in dataclasses.fields(PlannedGraph)
              if one.name not in NOT_PLANNED}
    return PlanRecord(own.name.partition(".")[2], fields, own.notes,
                      {one.name: one.key for one in compiled.kernels if isinstance(one, LoadedKernel)})


class _Pickler(pickle.Pickler):
    """Pickles frozen dataclasses with slots by the values of their fields, in order: what dataclasses do for them looks
    up the fields of each object anew."""

    def reducer_override(self, value: Any) -> Any:
        """See pickle."""
        kind = type(value)
        own = vars(kind).get("__setstate__") if isinstance(kind, type) else None
        if getattr(own, "__module__", "") != dataclasses.__name__:
            return NotImplemented
        return _restored, (kind, *[getattr(value, one.name) for one in dataclasses.fields(kind)])


def _restored(kind: type, *values: Any) -> Any:
    made: Any = object.__new__(kind)
    for put, value in zip(_slots(kind), values, strict=True):
        put(made, value)
    return made


@functools.cache
def _slots(kind: Any) -> tuple[Callable[[Any, Any], None], ...]:
    return tuple(getattr(kind, one.name).__set__ for one in dataclasses.fields(kind))


def encode(record: ProgramRecord) -> bytes:
    """The record as bytes.

    Raises:
        NotRecorded: it holds what cannot be pickled.
    """
    text = io.BytesIO()
    try:
        _Pickler(text, pickle.HIGHEST_PROTOCOL).dump(record)
    except Exception as error:  # the border to whatever object of a user a guard or plan may hold
        raise NotRecorded(f"something of it cannot be pickled: {error!s:.200}") from error
    return text.getvalue()


def decode(data: bytes) -> ProgramRecord:
    """The record of such bytes.

    Raises:
        NotRecorded: they cannot be read in this process.
    """
    try:
        record = pickle.loads(data)
    except Exception as error:  # the border to a class or function that is gone
        raise NotRecorded(f"its record cannot be read: {error!r:.200}") from error
    if not isinstance(record, ProgramRecord):
        raise NotRecorded("it is no record")
    return record


def code_of(record: ProgramRecord) -> Any:
    """Dynamo's code."""
    return marshal.loads(record.code)


def program_of(record: ProgramRecord, target: Any, compilation: Compilation) -> Callable[..., Any]:
    """The program of a record, linked in this process and registered with the compilation."""
    number = compilation.next_graph(record.sizes)
    compilation.fixed.update(record.fixed)
    compilation.attentions[number] = record.attentions
    name = f"{number}.{record.plan.name}"
    names = compilation.names_of(name)
    forward = link_pair(_planned(record.plan, target), None, compilation.config, names, compilation.held).forward
    boxed = _registered(record.plan, name, forward, compilation)
    if record.training is None:
        program = flat_program(boxed, record.hints)
    else:
        backward = link_backward(_planned(record.training.backward, target), forward, compilation.config, names)
        program = _trained(record.training, boxed, _registered(
            record.training.backward, f"{number}.{record.training.backward.name}", backward, compilation), compilation)
    return program if record.questions is None else _asking(record.questions, program, compilation)


def _registered(plan: PlanRecord, name: str, compiled: CompiledGraph, compilation: Compilation) -> Boxed:
    own = NativeProgram(name, compiled, plan.notes)
    compilation.register(own)
    return own if own.constants else own.executable


def _trained(training: TrainingRecord, forward: Boxed, backward: Boxed, compilation: Compilation) -> Callable[..., Any]:
    """A forward and a backward as one function of autograd."""
    pair = AutogradProgram(PartitionedGraphs(), compilation, training.inputs)
    pair.forward, pair.backward, pair.runtime = forward, backward, training.runtime
    second = pair.second = DoubleBackward.restored(training.second, compilation)

    def elsewhere(*inputs: Any) -> Any:
        if second.as_pytorch:
            return second.plain(inputs)
        raise NotCovered("a call in a transform, which the program of an earlier process does not serve")

    return pair.joined(elsewhere)


def _planned(plan: PlanRecord, target: Any) -> PlannedGraph:
    """The compiled graph, with its kernels from the cache."""
    programs = plan.fields["programs"]
    kernels = None
    if plan.keys.keys() == programs.keys():
        kernels = target.kept({name: plan.keys[name] for name in programs})
    if kernels is None:
        kernels = target.build([target.emit(program) for program in programs.values()])
    return PlannedGraph(target=target, kernels=tuple(kernels), **plan.fields)


def _asking(questions: SizeQuestions, program: Callable[..., Any], compilation: Compilation) -> Callable[..., Any]:
    """`program` with what was found out about small sizes. There is no trace to judge others by: they get a program of
    their own."""
    def serves(pattern: tuple[int, ...], _inputs: tuple[Any, ...]) -> bool:
        if pattern not in questions.covered:
            compilation.record("trace", "small sizes", NOT_JUDGED)
        return questions.covered.setdefault(pattern, False)

    def close(pattern: tuple[int, ...], error: InputError) -> None:
        questions.covered[pattern] = False
        compilation.record("trace", "sizes that the general program takes as equal", error.why)

    return asking_program(questions, program, serves, close)


def structure(values: Mapping[str, Any]) -> list[str]:
    """The locals of a frame in words: kinds, dtypes, sizes of parameters. It addresses records; guards decide."""
    found = []
    for name, value in sorted(values.items()):
        if isinstance(value, torch.nn.Module):
            state = [f"{path} {_tensor(one)} {list(one.shape)}" for path, one in
                     (*value.named_parameters(), *value.named_buffers())]
            modes = "".join(str(int(one.training)) for one in value.modules())
            found.append(f"{name}: {type(value).__module__}.{type(value).__qualname__} {state} {modes}")
        elif isinstance(value, torch.Tensor):
            found.append(f"{name}: {_tensor(value)} {value.dim()}")
        elif isinstance(value, (tuple, list)):
            found.append(f"{name}: {type(value).__name__} {structure({str(i): one for i, one in enumerate(value)})}")
        elif isinstance(value, dict):
            found.append(f"{name}: dict {structure({str(key): one for key, one in value.items()})}")
        elif value is None or isinstance(value, (bool, int, float, str)):
            found.append(f"{name}: {type(value).__name__}")
        else:
            found.append(f"{name}: {type(value).__module__}.{type(value).__qualname__}")
    return found


def _tensor(value: torch.Tensor) -> str:
    return f"{type(value).__name__} {value.dtype} {value.device} {value.requires_grad}"
