"""Serialisation of guards: what Dynamo guards a program by, as data that another process makes the same guards of.

    recorded:  sources and kinds of guards, sizes, shape guards;  what each guard says of the traced frame, as text
    rebuilt:   the same guards, of the frame at hand;  what each says now;  they are used only where both say the same

torch's own serialisation refuses guards on identity (of functions, classes, modules), or leaves them out. Here a
guard is made anew from the live frame, and its text is compared with the recorded one, in which a description stands
for each object whose identity is guarded. A description that differs, or an object that has none, means that there is
no warm start: it never means a guard less.
"""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from anyshape import torch_compat as compat
from anyshape.torch_compat.tracing.quiet_logs import GUARDS, quiet

DYNAMO = "torch._dynamo."
MANAGER = f"{DYNAMO}guards.CheckFunctionManager"
TRACER = f"{DYNAMO}convert_frame"
STATE = f"{DYNAMO}output_graph.OutputGraphGuardsState"
COMMON = f"{DYNAMO}output_graph.OutputGraphCommon"
MODES = "torch.overrides._get_current_function_mode_stack"
DEVICE = "torch.utils._device"
ORDERED = "torch.utils._ordered_set.OrderedSet"
NUMBERS = f"{DYNAMO}bytecode_transformation._unique_id_counter"
TRACE_LOG = "torch._logging.trace_structured"
CONSTANT = "invoke_and_store_as_constant"  # of `torch.compiler.assume_constant_result`
MARKED = "_dynamo_marked_constant"
CALLERS = (f"{DYNAMO}variables.functions", f"{DYNAMO}variables.nn_module")
HOOK = f"{DYNAMO}utils.CleanupHook"
HOOKS = f"{DYNAMO}utils.CleanupManager.instance"
NEEDED = (MANAGER, f"{MANAGER}.compile_check_fn", f"{MANAGER}.build_guards", f"{MANAGER}.id_ref", TRACER, STATE, COMMON,
          MODES, DEVICE, ORDERED, NUMBERS, TRACE_LOG,
          *CALLERS, f"{CALLERS[0]}.{CONSTANT}",
          HOOK, HOOKS, f"{TRACER}.orig_code_map", f"{TRACER}.output_codes", f"{DYNAMO}types.GuardedCode",
          f"{DYNAMO}types.wrap_guarded_code", "torch._guards.GuardsSet", "torch._guards.CompileId")
# what the live process says, or the frame; the rest is recorded
LIVE_STATE = ("local_scope", "global_scope", "torch_function_mode_stack", "current_device", "_guards",
              "skip_guards_check")
BUILTINS = "__builtins_dict__"
IMPORTED = "__import_"
PROGRAM = "__compiled_fn"
_IDENTITY = re.compile(r"\b\d{6,}\b")
_COMMENT = re.compile(r"\s*(  #.*|\(HINT: .*\))$", re.DOTALL)  # where the guard was asked for
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+")
_SHOWN = re.compile(r"(?<=\)), type=<.* at 0x[0-9a-f]+.*")  # what `repr` says of an object


class Identities(Protocol):
    """Says what objects are."""

    def describe(self, value: Any) -> str:
        """An object in words that hold in another process, too. Raises NotRecorded where there are none."""

    def knows(self, code: Any) -> bool:
        """Whether something that was described has this code."""


class NotRecorded(Exception):
    """Guards cannot be carried to another process; the text says why."""


@dataclass(frozen=True, slots=True)
class GuardRecord:
    """The guards of one program.

    Args:
        guards: torch's, without what they were made of.
        state: what torch makes them with, without the frame.
        shapes: the guards on sizes, as torch writes them.
        texts: what each guard says of the frame, with descriptions in place of identities.
        imports: names among the frame's globals -> the module that Dynamo put there.
        builtins: the name of the dictionary of builtins among them; "": there is none.
        files: of the functions that were traced.
    """
    guards: tuple[Any, ...]
    state: dict[str, Any]
    shapes: Any
    texts: tuple[str, ...]
    imports: dict[str, str]
    builtins: str
    files: tuple[str, ...]


def can_record() -> bool:
    """Whether this torch has the parts that guards are recorded by."""
    return compat.has(*NEEDED)


@contextlib.contextmanager
def recording(identities: Identities) -> Iterator[list[GuardRecord | NotRecorded]]:
    """Inside, the guards of each program that Dynamo makes are recorded; the list receives them, the last trace's
    last."""
    found: list[GuardRecord | NotRecorded] = []
    assumed: list[str] = []
    tracer, torchs = compat.need(TRACER), compat.need(MANAGER)

    def made(manager: Any, builder: Any, guards: Sequence[Any]) -> None:
        found.append(NotRecorded(f"{assumed[0]} is assumed to be constant, in this process") if assumed else
                     _recorded(manager, builder, guards, identities))

    def noted(tx: Any, function: Any, name: str, *more: Any, **keywords: Any) -> Any:
        if getattr(function, MARKED, False) and not (getattr(function, "__module__", None) or "").startswith("torch."):
            assumed.append(name)
        return called(tx, function, name, *more, **keywords)

    callers = [compat.need(module) for module in CALLERS]
    called = getattr(callers[0], CONSTANT)
    tracer.CheckFunctionManager = _recorder(torchs, made)
    for module in callers:
        setattr(module, CONSTANT, noted)
    try:
        yield found
    finally:
        tracer.CheckFunctionManager = torchs
        for module in callers:
            setattr(module, CONSTANT, called)


def rebuilt(record: GuardRecord, code: Any, local: dict[str, Any], names: dict[str, Any],
            objects: dict[str, Any], identities: Identities) -> Any:
    """Guards of this record for a frame of `code`, which hold for its locals and say what they said.

    Args:
        names: the frame's globals.
        objects: what else guards find there (`objects_of`), for the time being.

    Raises:
        NotRecorded: they would not. Exception: a source leads nowhere in this process.
    """
    # by an entry of its log PyTorch finds out whether anybody wants one: let it be short
    compat.need(TRACE_LOG)("artifact", metadata_fn=lambda: {"name": "anyshape_warm_start", "encoding": "string"},
                           payload_fn=lambda: code.co_qualname, expect_trace_id=False)
    said: list[tuple[str, ...]] = []
    make = _recorder(compat.need(MANAGER), lambda manager, builder, _: said.append(
        _texts(manager, builder, identities)))
    state = compat.need(STATE)(
        **record.state, local_scope=dict(local), global_scope=names,
        torch_function_mode_stack=list(compat.need(MODES)()),
        current_device=compat.need(DEVICE).CURRENT_DEVICE,
        _guards=compat.need("torch._guards.GuardsSet")(compat.need(ORDERED)(record.guards)), skip_guards_check=True)
    taken = [name for name in objects if name in names]
    if taken:
        raise NotRecorded(f"the name {taken[0]} is taken")
    names.update(objects)
    try:
        with quiet(GUARDS):
            manager = make(code, compat.need(COMMON)(state), shape_code_parts=record.shapes,
                           runtime_global_scope=names)
        answer = manager.guard_manager.check_verbose(local)
    finally:
        for name in objects:
            del names[name]
    if not answer.result:
        raise NotRecorded(f"a guard does not hold: {'; '.join(answer.verbose_code_parts):.300}")
    if said[-1] != record.texts:
        pairs = zip(record.texts, said[-1], strict=False)
        differing = next((f"{before}; now {after}" for before, after in pairs if before != after), "their number")
        raise NotRecorded(f"a guard says something else: {differing:.400}")
    return manager.guard_manager


def install(record: GuardRecord, names: dict[str, Any]) -> None:
    """Puts what the guards read under names of Dynamo's among a frame's globals.

    Raises:
        NotRecorded: a name is taken.
    """
    import builtins
    import importlib
    given = {name: importlib.import_module(module) for name, module in record.imports.items()}
    wanted: dict[str, Any] = {**given, **({record.builtins: vars(builtins)} if record.builtins else {})}
    for name, value in wanted.items():
        if names.get(name, value) is not value:
            raise NotRecorded(f"the name {name} is taken")
    _number_after(wanted)
    names.update(wanted)


def answer_of(code: Any, names: dict[str, Any], guards: Any, transformed: Any, given: dict[str, Any]) -> Any:
    """Dynamo's answer for a frame of `code`: that it runs as `transformed` behind these guards. given: what that finds
    by names of Dynamo's among the frame's globals, `names`, as long as it is there."""
    hook, hooks = compat.need(HOOK), compat.need(HOOKS)
    hooks[transformed] = [hook.create(names, name, value) for name, value in given.items()]
    compat.need(f"{TRACER}.orig_code_map")[transformed] = code
    compat.need(f"{TRACER}.output_codes").add(transformed)
    number = compat.need("torch._guards.CompileId")(frame_id=0, frame_compile_id=0)
    return compat.need(f"{DYNAMO}types.wrap_guarded_code")(
        compat.need(f"{DYNAMO}types.GuardedCode")(transformed, guards, number, "AnyShape: from the cache"))


def renamed(code: Any, program: str, names: dict[str, Any]) -> tuple[Any, str]:
    """Dynamo's code, and the name by which it calls its program: another one where a live program of this process, the
    recorded one perhaps, has it among the frame's globals."""
    free = program
    for number in itertools.count(1):
        if free not in names:
            break
        free = f"{program}_{number}"
    return code.replace(co_names=tuple(free if name == program else name for name in code.co_names)), free


@dataclass(frozen=True, slots=True)
class CodeNames:
    """What Dynamo's code finds among the globals of its frame.

    Args:
        program: the name of the one program that it calls.
        objects: names -> module, qualified name and description of modules, classes and functions.
    """
    program: str
    objects: dict[str, tuple[str, str, str]]


def names_of(code: Any, names: dict[str, Any], identities: Identities) -> CodeNames:
    """The names that Dynamo has put among a frame's globals for `code`.

    Raises:
        NotRecorded: the code calls several programs, or names what another process has not.
    """
    hooks = compat.need(HOOKS)
    installed = {hook.name for hook in hooks[code]} if code in hooks else set()
    programs = [name for name in installed if name.startswith(PROGRAM)]
    if len(programs) != 1 or programs[0] not in code.co_names:
        raise NotRecorded(f"its code calls {len(programs)} programs")
    objects = {}
    for name in sorted(installed):
        if not name.startswith((PROGRAM, BUILTINS, IMPORTED)):
            value = names[name]
            is_module = isinstance(value, types.ModuleType)
            module = value.__name__ if is_module else getattr(value, "__module__", None) or ""
            path = "" if is_module else getattr(value, "__qualname__", "")
            if not (is_module or path) or _at(module, path) is not value:
                raise NotRecorded(f"its code refers to an object of the process that traced it, a {type(value)}")
            objects[name] = module, path, identities.describe(value)
    return CodeNames(programs[0], objects)


def objects_of(found: CodeNames, identities: Identities) -> dict[str, Any]:
    """The objects of this process that such names stand for.

    Raises:
        NotRecorded: one is not what it was.
    """
    values = {name: _at(module, path) for name, (module, path, _) in found.objects.items()}
    for name, (module, path, said) in found.objects.items():
        if values[name] is None or identities.describe(values[name]) != said:
            raise NotRecorded(f"{module}.{path} is not what it was")
    return values


def _at(module: str, path: str) -> Any:
    """The object of a qualified name; None where there is none."""
    import importlib
    try:
        found: Any = importlib.import_module(module)
        for part in filter(None, path.split(".")):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError):
        return None
    return found


def _recorder(base: Any, made: Callable[[Any, Any, Sequence[Any]], None]) -> Any:
    """torch's maker of guards, which hands over what it has made, and which objects' identities are guarded."""

    class Recorder(base):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            self.known: dict[int, Any] = {}
            super().__init__(*arguments, **keywords)
            self.known = {}

        def id_ref(self, value: object, text: str) -> int:
            self.known[id(value)] = value
            return super().id_ref(value, text)  # type: ignore[no-any-return]

        def build_guards(self, guards: Any, existing: Any, code: Any, graph: Any, _save: bool, **more: Any) -> Any:
            return super().build_guards(guards, existing, code, graph, True, **more)  # so that it keeps shape guards

        def compile_check_fn(self, builder: Any, guards: Any, fail: Any) -> None:
            super().compile_check_fn(builder, guards, fail)
            made(self, builder, guards)

    return Recorder


def _recorded(manager: Any, builder: Any, guards: Sequence[Any],
              identities: Identities) -> GuardRecord | NotRecorded:
    """The record of the guards that torch has just made."""
    graph = manager.output_graph
    names = graph.global_scope
    if graph.torch_function_mode_stack or graph.functorch_layers:
        return NotRecorded("it was traced inside of a mode or a transform")
    try:
        texts = _texts(manager, builder, identities)
        state = {one.name: getattr(graph, one.name.lstrip("_") if one.name == "_aotautograd_guards" else one.name)
                 for one in dataclasses.fields(compat.need(STATE)) if one.name not in LIVE_STATE}
        state["input_source_to_sizes_strides"] = {
            source: {kind: tuple(map(_number, sizes)) for kind, sizes in known.items()}
            for source, known in graph.input_source_to_sizes_strides.items()}
        kept = tuple(_bare(guard) for guard in guards)
    except NotRecorded as why:
        return why.with_traceback(None)  # whose frames hold the guards
    read = {name for text in texts for name in re.findall(r"G\['(\w+)'\]", text)}
    imports = {name: names[name].__name__ for name in names if name.startswith(IMPORTED)}
    builtins = graph.name_of_builtins_dict_key_in_fglobals or ""
    traced = graph.tracing_context.traced_code
    loose = [code for code in traced if code.co_filename.startswith("<") and not identities.knows(code)]
    if loose:
        return NotRecorded(f"{loose[0].co_name} is in no file, and no guard knows it")
    files = tuple(dict.fromkeys(code.co_filename for code in traced if not code.co_filename.startswith("<")))
    return GuardRecord(kept, state, manager.shape_code_parts, texts, imports,
                       builtins if builtins in read or builtins else "", files)


def _number(size: Any) -> int | None:
    """A size that a guard compares; None where it is a symbol."""
    return size if isinstance(size, int) else size.node.maybe_as_int()  # type: ignore[no-any-return]


def _bare(guard: Any) -> Any:
    """A guard without the objects of this process."""
    make = guard.create_fn
    if isinstance(make, functools.partial):
        keywords = {name: value for name, value in make.keywords.items() if name != "value"}
        make = functools.partial(make.func, *make.args, **keywords) if make.args or keywords else make.func
    return dataclasses.replace(guard, create_fn=make, guard_types=None, code_list=None, obj_weakref=None,
                               guarded_class_weakref=None, stack=None, user_stack=None, _hash=None)


def _texts(manager: Any, builder: Any, identities: Identities) -> tuple[str, ...]:
    """What guards say: as they are asked, and as torch would write them in Python."""
    known = manager.known
    said: dict[int, str] = {}

    def word(match: re.Match[str]) -> str:
        number = int(match.group())
        if number not in known:
            return match.group()
        if number not in said:
            said[number] = identities.describe(known[number])
        return said[number]

    asked = [_COMMENT.sub("", text) for text in manager.guard_manager.code_parts]
    written = [text for one in builder.code for text in one.code_list]
    keys = _keys(manager.guard_manager.root)
    found = tuple(_IDENTITY.sub(word, without_object(text)) for text in (*asked, *written, *keys))
    for text in found:
        if _ADDRESS.search(text):
            raise NotRecorded(f"a guard names an object of this process: {text:.200}")
    return found


def without_object(text: str) -> str:
    """What a guard says without the object whose identity it asks, which torch before 2.13 writes behind it."""
    return _SHOWN.sub("", text)


def _keys(manager: Any) -> Iterator[str]:
    """What guards say of the keys of dictionaries in their order: the guards of a live frame ask for its own order, and
    torch writes these nowhere else."""
    pairs = getattr(manager, "get_key_value_managers", None)
    for number, (key, value) in sorted(pairs().items()) if pairs is not None else ():
        if key is not None:
            for guard in key.get_leaf_guards():
                for text in guard.verbose_code_parts():
                    yield f"{manager.get_source()}, key {number}: {_COMMENT.sub('', text).rstrip()}"
            yield from _keys(key)
        if value is not None:
            yield from _keys(value)
    for child in manager.get_child_managers():
        yield from _keys(child)


def _number_after(names: dict[str, Any]) -> None:
    """Has Dynamo number its next names behind those that were recorded."""
    counter = compat.need(NUMBERS)
    largest = max((int(found.group(1)) for name in names if (found := re.search(r"_(\d+)$", name))), default=-1)
    while next(counter) <= largest:
        pass
