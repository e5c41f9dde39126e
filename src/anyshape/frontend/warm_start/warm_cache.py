"""The persistent cache of captured programs (warm start): a second process of a script takes a frame's program from the
disk cache, with its guards, in place of a trace.

    key:     the frame's code, kinds and sizes of what it is called with, settings, versions, processor -> records
    record:  is used where each of its guards, made anew of the live frame, says what it said (torch_compat/dynamo/
             guard_record.py), and the files whose functions were traced contain what they contained

Whatever is not as it was means a cold start: the frame is traced, and that is counted.
"""
from __future__ import annotations

import functools
import hashlib
import os
import platform
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from anyshape.backend.targets import target_of
from anyshape.base import counters
from anyshape.base.disk_cache import DiskCache, cache_of
from anyshape.base.own_sources import own_sources, process_start
from anyshape.base.version import __version__
from anyshape.frontend.aten.table import TABLE
from anyshape.frontend.capture.autograd_function import AutogradProgram
from anyshape.frontend.programs.eager_fallback import Underway, counted
from anyshape.frontend.programs.session import Compilation
from anyshape.frontend.warm_start.identity import ObjectIdentities, foreign_call
from anyshape.frontend.warm_start.program_record import (
    HOST,
    code_of,
    decode,
    encode,
    program_of,
    record_of,
    structure,
)
from anyshape.ops.pointwise import POINTWISE
from anyshape.torch_compat.dynamo import guard_record
from anyshape.torch_compat.dynamo.guard_record import CodeNames, GuardRecord, NotRecorded
from anyshape.torch_compat.versions import api

FORMAT = 1
WHOLE = ("all sizes", "one graph")  # ways of tracing that another one serves after
MOST_RECORDS = 4  # of one key, which are tried one after another
# settings that programs do not depend on
NOT_IN_KEY = ("cache", "warm_start", "cache_dir", "cache_limit", "background", "defer", "strict", "fullgraph")


def warm_start_of(compilation: Compilation, own: list[Callable[..., Any]], underway: Underway) -> WarmStart | None:
    """The warm start of a compilation; None where there is no cache, this torch lacks a part, or a setting asks for
    what a trace shows. own: the programs that were handed to Dynamo."""
    config = compilation.config
    cache = cache_of(config)
    watched = config.show or config.dump or config.edit or config.check >= 2
    if cache is None or not config.warm_start or watched or config.limited or compilation.step is not None \
            or not guard_record.can_record() or not own_sources() or _is_distributed():
        return None
    return WarmStart(compilation, cache, own, underway)


@dataclass(frozen=True, slots=True)
class Traced:
    """What a trace gave beside its program: Dynamo's code, what that finds among its globals, the guards, and the
    number of the captured graph."""

    code: Any
    names: CodeNames
    guards: GuardRecord | NotRecorded
    number: int


class WarmStart:
    """Takes the programs of one way of tracing from the cache, and puts them there."""

    def __init__(self, compilation: Compilation, cache: DiskCache, own: list[Callable[..., Any]],
                 underway: Underway) -> None:
        self.compilation = compilation
        self.cache = cache
        self.own = own
        self.underway = underway
        self.used: dict[str, int] = {}  # key -> how many records of it were looked at, or written
        self.made: Callable[..., Any] | None = None
        self.foreign = ""  # what of the user's its graph calls

    def compiled(self, graph: torch.fx.GraphModule, program: Callable[..., Any]) -> None:
        """Told of a captured graph and its program, inside of `recording`."""
        self.made, self.foreign = program, foreign_call(graph)

    def answer(self, frame: Any, way: str) -> Any:
        """Dynamo's answer for a frame, from the cache; None: it has to be traced."""
        key = self._key(frame, way)
        identities = ObjectIdentities()
        for number in range(self.used.get(key, 0), MOST_RECORDS):
            data = self.cache.get(_numbered(key, number))
            if data is None:
                return None
            self.used[key] = number + 1
            try:
                return self._answer(frame, data, identities)
            except NotRecorded as why:
                self._refuse(str(why))
            except Exception as error:  # the border to a record of another process: it costs no more than a trace
                self._refuse(f"{type(error).__name__}: {error}")
        return None

    def _refuse(self, why: str) -> None:
        counters.count("warm_refusals")
        self.compilation.warm.append(f"a program of an earlier process does not fit: {why}")

    def _answer(self, frame: Any, data: bytes, identities: ObjectIdentities) -> Any:
        begun = time.perf_counter()
        record = decode(data)
        _check_files(record.files)
        names = frame.f_globals
        guard_record.install(record.guards, names)
        code, name = guard_record.renamed(code_of(record), record.names.program, names)
        objects = guard_record.objects_of(record.names, identities)
        guards = guard_record.rebuilt(record.guards, frame.f_code, frame.f_locals, names, objects, identities)
        program = program_of(record, target_of(self.compilation.config, HOST), self.compilation)
        program = counted(program, self.underway, "")
        answer = guard_record.answer_of(frame.f_code, names, guards, code, {
            **objects, name: api.unhooked(program, "a compiled program")})
        self.own.append(program)
        counters.count("warm_starts")
        self.compilation.warm.append(f"program {self.compilation.graphs - 1} was taken from the cache, without a trace")
        counters.count("compile_seconds", time.perf_counter() - begun)
        return answer

    @contextmanager
    def recording(self, frame: Any, way: str) -> Iterator[Callable[[Any, bool], None]]:
        """Inside, a trace of the frame is recorded. What it gives is called with Dynamo's answer, and whether the
        program is all of what the user has called; it writes the record."""
        key = self._key(frame, way)  # the trace may change what the frame has
        self.made = None
        identities = ObjectIdentities()
        identities.of_code(frame.f_code)
        with guard_record.recording(identities) as found:
            def keep(answer: Any, whole: bool) -> None:
                if self.made is None or not whole:
                    return
                number = self.used.get(key, 0) % MOST_RECORDS  # in place of one that did not fit, at last
                self.used[key] = number + 1
                made, self.made = self.made, None
                pair = getattr(made, "made_of", None)
                try:
                    if self.foreign:
                        raise NotRecorded(f"it calls {self.foreign}, whose definition is in no guard")
                    code = answer.guarded_code.code
                    traced = Traced(code, guard_record.names_of(code, frame.f_globals, identities), found[-1],
                                    self.compilation.graphs - 1)
                    if isinstance(pair, AutogradProgram) and way in WHOLE:
                        pair.when_whole = functools.partial(self._keep_or_say, _numbered(key, number), traced, made)
                        if pair.backward is not None:
                            pair.when_whole()
                        return
                    if isinstance(pair, AutogradProgram):
                        raise NotRecorded("its gradients are taken, and it is not traced for all sizes")
                except NotRecorded as why:
                    self._say(why)
                    return
                self._keep_or_say(_numbered(key, number), traced, made)
            yield keep

    def _say(self, why: NotRecorded) -> None:
        counters.count("warm_not_kept")
        self.compilation.warm.append(f"the next process will trace it again: {why}")

    def _keep_or_say(self, key: str, traced: Traced, program: Callable[..., Any]) -> None:
        try:
            self._keep(key, traced, program)
        except NotRecorded as why:
            self._say(why)

    def _keep(self, key: str, traced: Traced, program: Callable[..., Any]) -> None:
        guards = traced.guards
        if isinstance(guards, NotRecorded):
            # not the same one: torch's guards hold that, its frames the program, and the program, in C++, the guards
            raise NotRecorded(str(guards))
        record = record_of(program, traced.code, traced.names, guards, _hashes(guards.files), traced.number,
                           self.compilation)
        self.cache.put(key, encode(record))

    def _key(self, frame: Any, way: str) -> str:
        """By what records are found; the guards say whether they fit."""
        identities = ObjectIdentities()
        code = frame.f_code
        config = self.compilation.config
        settings = [(name, getattr(config, name)) for name in config.__dataclass_fields__ if name not in NOT_IN_KEY]
        parts = (FORMAT, _versions(), target_of(config, HOST).machine_key, settings, way, code.co_name,
                 code.co_qualname, identities.of_code(code), structure(frame.f_locals), torch.is_grad_enabled(),
                 torch.is_inference_mode_enabled(), str(torch.get_default_dtype()), _added(identities))
        return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()


def _is_distributed() -> bool:
    """Whether this process is one of a group: a trace has ranks, and sizes of groups, as numbers, which no guard asks
    for."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _added(identities: ObjectIdentities) -> list[str]:
    """What the user has added to the tables of operators, or replaced in them."""
    ours = __package__.partition(".")[0] + "."
    return sorted([*(f"{op} {identities.of_function(one)}" for op, one in TABLE.items()
                     if isinstance(one, types.FunctionType) and not one.__module__.startswith(ours)),
                   *(str(row) for name, row in POINTWISE.items() if name not in _OPS)])


_OPS = frozenset(POINTWISE)


def _numbered(key: str, number: int) -> str:
    return hashlib.sha256(f"{key} {number}".encode()).hexdigest()


@functools.cache
def _versions() -> str:
    """Of all that makes a program, and reads its record: Python, torch, and our own files."""
    return repr((sys.version, platform.machine(), torch.__version__, torch.version.git_version, __version__,
                 own_sources()))


_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep  # known by its version


def _hashes(files: tuple[str, ...]) -> dict[str, str]:
    """The hash of each file of traced functions, but torch's.

    Raises:
        NotRecorded: one is no file, or was changed since this process began, which may have read it before.
    """
    return {file: _hash(file) for file in files if not os.path.abspath(file).startswith(_TORCH)}


def _hash(file: str) -> str:
    try:
        if os.stat(file).st_mtime >= process_start():
            raise NotRecorded(f"{file} was changed while the process ran")
        with open(file, "rb") as opened:
            return hashlib.sha256(opened.read()).hexdigest()
    except OSError:
        raise NotRecorded(f"there is no source file {file}") from None


def _check_files(files: dict[str, str]) -> None:
    """Raises NotRecorded where a file is not what it was."""
    for file, digest in files.items():
        if _hash(file) != digest:
            raise NotRecorded(f"{file} was changed")

