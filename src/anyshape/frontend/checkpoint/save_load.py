"""Saving and loading a train step: `TrainStep.save`, `TrainStep.load`, and `anyshape.consolidate`."""
from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from anyshape.base.errors import AnyShapeError, ConfigError, InputError, OutputError
from anyshape.base.files import write_atomically
from anyshape.base.optional_packages import needed_by
from anyshape.frontend.checkpoint.contents import (
    NamedSavePlanner,
    Stored,
    as_parts,
    check_averages,
    check_model,
    check_optimizer,
    check_plain,
    contents,
    name_of,
    random_state,
    states_to_load,
    weight_names,
)
from anyshape.frontend.checkpoint.folder import StepWriter, checkpoints
from anyshape.frontend.checkpoint.safe_reader import SafeLoadPlanner, SafeReader, TrialPlanner
from anyshape.frontend.train_step.distributed import Distribution
from anyshape.runtime.collectives.agreement import told_once
from anyshape.runtime.collectives.lost_rank import lost

T = TypeVar("T")
FAULTS = (dcp.CheckpointException, OSError, RuntimeError)  # what comes of writing and reading files on many ranks


def cause_of(error: BaseException) -> tuple[int, BaseException]:
    """The first rank that failed, and what was raised there, of what torch makes of errors of many ranks."""
    failures = getattr(error, "failures", None)
    if not failures:
        return 0, error
    rank = min(failures)
    return rank, failures[rank][0]


class Saver:
    """Saves one train step, one checkpoint after the other.

    Attributes:
        last: the save that goes on beside steps; None when there is none.
        group: of all processes, for the messages of saves alone; None on one.
    """

    def __init__(self, is_distributed: bool) -> None:
        self.is_distributed = is_distributed
        self.group: Any = None
        self.last: Future[Any] | None = None
        self.writer: StepWriter | None = None

    @property
    def rank(self) -> int:
        """Of this process."""
        return dist.get_rank() if self.is_distributed else 0

    def save(self, folder: Path, found: dict[Any, Any], count: int, keep: int, wait: bool) -> None:
        """Stores what `contents` gave, after the save before has ended.

        Raises:
            OutputError: it cannot be written, or the one before could not be; the last whole checkpoint stands.
        """
        self.wait()
        if self.is_distributed and self.group is None:
            self.group = dist.new_group(backend="gloo")
        state = {name_of(path): one for path, one in found.items()}
        self.writer = StepWriter(folder, count, keep)
        planner = NamedSavePlanner({name_of(path): path for path in found})
        alone = not self.is_distributed
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            if not wait:  # copies are made here: the step may change its tensors when this returns
                self.last = dcp.async_save(  # type: ignore[assignment]
                    state, storage_writer=self.writer, planner=planner, process_group=self.group, no_dist=alone)
                return
            try:
                dcp.save(state, storage_writer=self.writer, planner=planner, process_group=self.group, no_dist=alone)
            except FAULTS as error:
                raise self._refusal(error, self.writer) from error
            finally:
                self.writer.release()

    def wait(self) -> None:
        """Until the save in hand has ended, if there is one.

        Raises:
            OutputError: it could not be written; the last whole checkpoint stands.
        """
        last, self.last = self.last, None
        if last is None or self.writer is None:
            return
        try:
            last.result()
        except FAULTS as error:
            raise self._refusal(error, self.writer) from error
        finally:
            self.writer.release()

    def _refusal(self, error: BaseException, writer: StepWriter) -> AnyShapeError:
        rank, cause = cause_of(error)
        if not isinstance(cause, Exception):  # an interrupt, which torch has wrapped
            if not self.rank:
                writer.abandon()
            if rank == self.rank:
                raise cause
        if self.is_distributed and (found := lost(cause)) is not None:
            return found
        what = f"the checkpoint of step {writer.count} could not be written"
        if self.rank:
            return OutputError(f"rank {self.rank}: {what} (see rank 0)")
        if not isinstance(cause, BlockingIOError):  # what is there is the other's
            writer.abandon()
        whole = checkpoints(writer.folder)
        words = getattr(cause, "strerror", None) or str(cause).strip().splitlines()[0]
        where = f"{writer.folder}, rank {rank}" if self.is_distributed else str(writer.folder)
        kept = f"the last whole one is {whole[-1].name}" if whole else "there is no earlier one"
        do = "let each step save into a folder of its own" if isinstance(cause, BlockingIOError) else \
            "free some space, or give another folder" if isinstance(cause, OSError) else "save again"
        return OutputError(what, where=where, why=f"{words}; {kept}", do=f"{do}; steps may go on")

def others_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data of what the user passes.

    Raises:
        ConfigError: an object has no state_dict.
    """
    for name, one in given.items():
        if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
            raise ConfigError(f"{name} is a {type(one).__name__}", why="it has no state_dict and load_state_dict",
                              do="pass objects that have both, such as schedulers")
    return {name: one.state_dict() for name, one in given.items()}


def found_in(step: Mapping[str, Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer, scaler: Any,
             others: Mapping[str, Any], distribution: Distribution | None, rank: int) -> dict[Any, Any]:
    """What this rank stores. step: as of `TrainStep.state_dict`, the tensors themselves.

    Raises:
        InputError: a state is no plain data. ConfigError: an object has no state.
    """
    found = contents(model, optimizer, step, others_of(others))
    if scaler is not None:
        found["scaler",] = scaler.state_dict()
    check_plain(found)
    return {**as_parts(found, distribution), **random_state(rank)}


def newest(folder: Path, is_distributed: bool) -> Path | None:
    """The checkpoint that is loaded: the folder itself where it is one, else the newest in it; as rank 0 sees it.

    Raises:
        InputError: the folder cannot be read.
    """
    given: list[str | None] = [None, None]
    if not is_distributed or dist.get_rank() == 0:
        try:
            found = folder if (folder / ".metadata").is_file() else next(reversed(checkpoints(folder)), None)
            given[0] = None if found is None else str(found)
        except OSError as error:
            given[1] = error.strerror or str(error)
    if is_distributed:
        dist.broadcast_object_list(given, 0)
    if given[1] is not None:
        raise told_once(dist.get_rank() if is_distributed else 0, InputError(
            f"{folder} cannot be read", where=str(folder), why=given[1], do="give a folder that this process may read"))
    return None if given[0] is None else Path(given[0])


@dataclass(frozen=True, slots=True)
class Loadable:
    """A checkpoint that has been read to its end, and fits the model, the optimiser and the others it is loaded into.

    Attributes:
        data: what of it is plain, by name.
        random: this rank's random states among its tensors.
    """

    reader: SafeReader
    stored: Stored
    data: dict[str, Any]
    random: list[str]


def examine(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, averages: Iterable[str],
            others: Mapping[str, Any], rank: int) -> Loadable:
    """Reads a checkpoint to its end, and changes nothing. averages: the parameters of which the step keeps them.

    Raises:
        InputError: it is none, it cannot be read, or it is one of another model, optimiser or step.
    """
    others_of(others)
    reader = SafeReader(path)
    stored = Stored.of(reader.read_metadata())
    plain = {name: None for name, shape in stored.shapes.items() if shape is None and not name.startswith(
        ("model.", "optimizer.state."))}
    lacking = [name for name in ("optimizer.param_groups", "train_step.numbers",
                                 *(f"others.{name}" for name in others)) if name not in plain]
    if lacking:
        raise InputError(f"the checkpoint {path} has no {', '.join(lacking)}",
                         why="it was saved without", do="load it into what was saved")
    data = read(reader, dict(plain))
    try:
        check_model(stored, model)
        check_optimizer(data["optimizer.param_groups"], optimizer, weight_names(model, optimizer))
        check_averages(stored, averages)
    except InputError as error:
        raise InputError(error.what, where=str(path), why=error.why, do=error.do) from None
    ranks = [name.split(".")[1] for name in stored.below("random.") if name.count(".") == 1]
    own = str(rank % max(len(ranks), 1))
    random = [name for name in (f"random.{own}", f"random.{own}.cuda") if name in stored.shapes]
    wanted = [*stored.below("model."), *stored.below("optimizer.state."), *stored.below("train_step."), *random]
    read(reader, {} if reader.has_checksums() else {name: None if stored.shapes[name] is None else  # of no memory
                  torch.empty((), dtype=stored.dtypes[name]).expand(stored.shapes[name])  # type: ignore[arg-type]
                  for name in wanted}, TrialPlanner())
    return Loadable(reader, stored, data, random)


def take(given: Loadable, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scaler: Any,
         others: Mapping[str, Any]) -> dict[str, Any]:
    """Loads what is whole here; the state for `TrainStep.load_state_dict` is given back.

    Raises:
        InputError: a file that could be read before cannot be read any more.
    """
    stored, data = given.stored, given.data
    _load_others(others, data)
    names = weight_names(model, optimizer)
    into: dict[str, Any] = states_to_load(stored, optimizer, names)
    into |= {f"model.{name}": one for name, one in model.state_dict().items()}
    for name in (*stored.below("train_step.averages."), *stored.below("train_step.gathered."), *given.random):
        into[name] = torch.empty(stored.shapes[name], dtype=stored.dtypes[name])  # type: ignore[arg-type]
    read(given.reader, into)

    _take_objects(into, model, optimizer, names)
    for there, group in zip(data["optimizer.param_groups"], optimizer.param_groups, strict=True):
        for key, value in there.items():
            if key != "params" and isinstance(group[key], Tensor):
                group[key].copy_(value)
            elif key != "params":
                group[key] = value
    if scaler is not None and "scaler" in data:
        scaler.load_state_dict(data["scaler"])
    for name in given.random:
        if not name.endswith(".cuda"):
            torch.set_rng_state(into[name])
        elif torch.cuda.is_available():
            torch.cuda.set_rng_state(into[name])
    state = dict(data["train_step.numbers"])
    for key in ("averages", "gathered"):
        prefix = f"train_step.{key}."
        state[key] = {name.removeprefix(prefix): into[name] for name in stored.below(prefix)}
    return state


def _load_others(others: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    """All of them, or none: their own code may refuse what it is given."""
    before = {name: copy.deepcopy(one.state_dict()) for name, one in others.items()}
    try:
        for name, one in others.items():
            one.load_state_dict(data[f"others.{name}"])
    except BaseException:
        for name, one in others.items():
            one.load_state_dict(before[name])
        raise


def plain_data(folder: Path, name: str) -> Any:
    """What `name` was saved with, among `others`, in the newest checkpoint of a folder; no model is needed to read it.

    Raises:
        InputError: there is no checkpoint, or it cannot be read.
    """
    path = newest(folder, False)
    if path is None:
        raise missing(folder)
    reader = SafeReader(path)
    if f"others.{name}" not in Stored.of(reader.read_metadata()).shapes:
        raise InputError(f"the checkpoint {path} has no others.{name}", why="it was saved without",
                         do="load it into what was saved")
    return read(reader, {f"others.{name}": None})[f"others.{name}"]


def missing(folder: Path) -> InputError:
    """The error of a folder without a checkpoint."""
    why = "no folder in it has a .metadata" if folder.is_dir() else "there is no such folder"
    return InputError(f"there is no checkpoint in {folder}", where=str(folder), why=why,
                      do="give a folder of TrainStep.save, or of torch.distributed.checkpoint")


def _take_objects(into: Mapping[str, Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer,
                  names: Mapping[int, str]) -> None:
    """What is no tensor goes where it belongs."""
    for weight, own in optimizer.state.items():
        for key in own:
            if not isinstance(own[key], Tensor):
                own[key] = into[f"optimizer.state.{names[id(weight)]}.{key}"]
    objects = {name: into[f"model.{name}"] for name, one in model.state_dict().items() if not isinstance(one, Tensor)}
    if objects:
        model.load_state_dict(objects, strict=False)


def read(reader: SafeReader, into: dict[str, Any], planner: SafeLoadPlanner | None = None) -> dict[str, Any]:
    """Fills tensors in place, and puts plain data in the place of what is no tensor.

    Raises:
        InputError: a file is not there, is shorter than it was, or has what is not plain data.
    """
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            dcp.load(into, storage_reader=reader, planner=planner or SafeLoadPlanner(), no_dist=True)
    except FAULTS as error:
        cause = cause_of(error)[1]
        raise InputError(f"the checkpoint {reader.path} cannot be read",
                         why=f"{type(cause).__name__}: {(str(cause).strip().splitlines() or [''])[0]}",
                         do="load an earlier one") from error
    return into


def consistently(saver: Saver, load: Callable[[], T]) -> T:
    """What `load` gives; where it fails on one rank, all raise: others would wait for it.

    Raises:
        InputError: as of `load`; four parts on one rank, one line elsewhere.
    """
    fault: Exception | None = None
    state: T
    try:
        state = load()
    except Exception as error:  # whatever it is, the others are told before it goes on
        fault = error
    if not saver.is_distributed:
        if fault is not None:
            raise fault
        return state
    every: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, None if fault is None else getattr(fault, "what", f"{type(fault).__name__}: {fault}"))
    failed = [rank for rank, words in enumerate(every) if words is not None]
    if failed and saver.rank != failed[0]:
        raise InputError(f"rank {saver.rank}: {every[failed[0]]} (see rank {failed[0]})") from fault
    if fault is not None:
        raise fault
    return state


def consolidate(checkpoint: Path, path: Path, rest: Path | None) -> None:
    """Writes a checkpoint as one safetensors file; arguments and errors are those of `anyshape.consolidate`."""
    with needed_by("anyshape.consolidate"):
        from safetensors.torch import save
    found = newest(checkpoint, False)
    if found is None:
        raise missing(checkpoint)
    reader = SafeReader(found)
    stored = Stored.of(reader.read_metadata())
    reader.has_checksums()
    of_model = [name for name in stored.shapes if name.startswith("model.")]
    beside = [name for name in stored.shapes if name not in set(of_model)]
    targets = [(path, of_model + beside, "")] if rest == path else [(path, of_model, "model."), (rest, beside, "")]
    for target, names, prefix in targets:
        if target is None:
            continue
        into: dict[str, Any] = {name: None if stored.shapes[name] is None else torch.empty(
            stored.shapes[name], dtype=stored.dtypes[name]) for name in names}  # type: ignore[arg-type]
        read(reader, into)
        tensors = {name.removeprefix(prefix): one for name, one in into.items() if isinstance(one, Tensor)}
        values = {name: json.dumps(one, default=str) for name, one in into.items() if not isinstance(one, Tensor)}
        try:
            write_atomically(target, save(tensors, {"format": "pt", **values}))
        except OSError as error:
            raise OutputError(f"{target} could not be written", why=error.strerror or str(error),
                              do="free some space, or give another file") from error
