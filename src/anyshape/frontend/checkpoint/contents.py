"""What a checkpoint holds, by name, and where it goes when it is loaded.

    model.<name>                         parameters and buffers, as in model.state_dict()
    optimizer.state.<parameter>.<name>   as in torch's get_optimizer_state_dict
    optimizer.param_groups               without tensors: the names of the parameters, learning rates ...
    train_step.averages.<parameter>      and train_step.gathered.<parameter>: of a step that has not ended
    train_step.numbers, scaler           plain data
    random.<rank>                        of torch's generator (random.<rank>.cuda: of the device's)
    others.<name>                        what the user passes
"""
from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from anyshape.base.errors import InputError
from anyshape.frontend.checkpoint.local_part import LocalPart, segments
from anyshape.frontend.train_step.distributed import Distribution

Path = tuple[str, ...]  # a name's parts; joined by dots they are the name
SHOWN = 4  # names in a message


def name_of(path: Path) -> str:
    """As torch flattens a state of many levels."""
    return ".".join(path)


def weight_names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """Of the weights of an optimiser, by id; one that is not the model's is named by its place."""
    found = {id(weight): name for name, weight in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for place, weight in enumerate(group["params"]):
            found.setdefault(id(weight), f"group{number}.{place}")
    return found


def groups_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """Its parameter groups, with names for parameters."""
    return [{**group, "params": [names[id(weight)] for weight in group["params"]]} for group in optimizer.param_groups]


def contents(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: Mapping[str, Any],
             others: Mapping[str, Any]) -> dict[Path, Any]:
    """All that is the same on every rank, or a part of the same: tensors themselves, and plain data.

    Args:
        step: as of `TrainStep.state_dict`.
        others: name -> plain data.
    """
    names = weight_names(model, optimizer)
    found: dict[Path, Any] = {("model", name): one for name, one in model.state_dict(keep_vars=True).items()}
    for weight, own in optimizer.state.items():
        for key, value in own.items():
            found["optimizer", "state", names[id(weight)], str(key)] = value
    found["optimizer", "param_groups"] = groups_of(optimizer, names)
    for key in ("averages", "gathered"):
        found |= {("train_step", key, name): one for name, one in step[key].items()}
    found["train_step", "numbers"] = {key: value for key, value in step.items() if key not in ("averages", "gathered")}
    found |= {("others", name): value for name, value in others.items()}
    return found


def random_state(rank: int) -> dict[Path, Tensor]:
    """Of this rank's generators."""
    found: dict[Path, Tensor] = {("random", str(rank)): torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["random", f"{rank}.cuda"] = torch.cuda.get_rng_state()
    return found


def as_parts(found: Mapping[Path, Any], distribution: Distribution | None) -> dict[Path, Any]:
    """What this rank stores: of a tensor that is dealt out its part, and nothing of one that is on other ranks."""
    if distribution is None or distribution.is_whole:
        return dict(found)
    mesh, stored = distribution.mesh, {}
    for path, one in found.items():
        if distribution.is_elsewhere(one):
            continue
        part = distribution.parts.get(id(one))
        if part is None or not one.numel():
            stored[path] = one
            continue
        cuts = [(numbers, mesh.mesh.axis(axis).size, mesh.coordinates[axis]) for axis, numbers in part.cuts]
        stored[path] = LocalPart(part.own, one.shape, segments(one.shape, cuts))
    return stored


def check_plain(found: Mapping[Path, Any]) -> None:
    """Raises InputError for what could not be loaded again without running code of the file."""
    for path, one in found.items():
        if not isinstance(one, (Tensor, LocalPart)):
            stored = io.BytesIO()
            try:
                torch.save(one, stored)
                stored.seek(0)
                torch.load(stored, weights_only=True)
            except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as error:
                raise InputError(f"{name_of(path)} cannot be part of a checkpoint",
                                 why=f"it is no plain data: {str(error).strip().splitlines()[0]}",
                                 do="give an object whose state_dict has tensors, numbers, texts, lists and dicts "
                                 "alone") from None


class NamedSavePlanner(DefaultSavePlanner):
    """torch's planner for a state of one level, which notes the levels that names stand for.

    Args:
        paths: name -> its parts.
    """

    def __init__(self, paths: Mapping[str, Path]) -> None:
        # both ways to flatten lose empty dicts that lie in plain data
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.paths = dict(paths)

    def set_up_planner(self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None,
                       is_coordinator: bool = False) -> None:
        """As torch's, and of its own state the levels, too."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.flatten_state_dict, self.mappings = True, self.paths  # type: ignore[assignment]

    def create_local_plan(self) -> SavePlan:
        """As torch's; plain data is that of the first rank, where torch would take it of any."""
        plan = super().create_local_plan()
        if not self.is_coordinator:
            items = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
            plan = self.plan = replace(plan, items=items)
        return plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """A tensor, a rectangle of one, or plain data; torch's own finds rectangles in tensors alone."""
        found = self.state_dict[index.fqn]
        return found.__get_tensor_shard__(index) if isinstance(found, LocalPart) else super().lookup_object(index)


@dataclass(frozen=True, slots=True)
class Stored:
    """What a checkpoint has: name -> shape, None of plain data."""

    shapes: dict[str, torch.Size | None]
    dtypes: dict[str, torch.dtype]

    @staticmethod
    def of(metadata: Metadata) -> Stored:
        shapes: dict[str, torch.Size | None] = {}
        dtypes = {}
        for name, one in metadata.state_dict_metadata.items():
            shapes[name] = None
            if isinstance(one, TensorStorageMetadata):
                shapes[name], dtypes[name] = one.size, one.properties.dtype
                if sum(chunk.sizes.numel() for chunk in one.chunks) < one.size.numel():
                    raise InputError(f"the checkpoint has not all of {name}",
                                     why="parts of it were written by ranks that are not in its .metadata",
                                     do="load an earlier one")
        return Stored(shapes, dtypes)

    def below(self, prefix: str) -> list[str]:
        """Names that begin so."""
        return [name for name in self.shapes if name.startswith(prefix)]


def check_model(stored: Stored, model: torch.nn.Module) -> None:
    """Raises InputError where the checkpoint is of another model: which names differ."""
    own = {f"model.{name}": one.shape if isinstance(one, Tensor) else None for name, one in model.state_dict().items()}
    there = {name: stored.shapes[name] for name in stored.below("model.")}
    _same_names("model", set(there), set(own), "model.")
    wrong = [name for name in own if own[name] != there[name]]
    if wrong:
        words = [f"{name.removeprefix('model.')} is {_shape(there[name])} there and {_shape(own[name])} here"
                 for name in wrong[:SHOWN]]
        raise InputError("the checkpoint is of another model", why="; ".join(words), do="make the model as it was then")


def _shape(given: torch.Size | None) -> str:
    return "no tensor" if given is None else str(list(given))


def _same_names(what: str, there: set[str], here: set[str], prefix: str) -> None:
    words = [f"{len(names)} only {place} ({', '.join(name.removeprefix(prefix) for name in sorted(names)[:SHOWN])}"
             f"{', ...' if len(names) > SHOWN else ''})"
             for place, names in (("in the checkpoint", there - here), ("here", here - there)) if names]
    if words:
        raise InputError(f"the checkpoint is of another {what}", why=f"names differ: {'; '.join(words)}",
                         do=f"make the {what} as it was then")


def check_optimizer(groups: list[dict[str, Any]], optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """Raises InputError where the checkpoint is of another optimiser."""
    own = groups_of(optimizer, names)
    if len(groups) != len(own):
        raise InputError("the checkpoint is of another optimiser",
                         why=f"it has {len(groups)} groups of parameters, and this one {len(own)}",
                         do="make the optimiser as it was then")
    for there, here in zip(groups, own, strict=True):
        _same_names("optimiser", set(there["params"]), set(here["params"]), "")
        _same_names("optimiser", set(there), set(here), "")


def check_averages(stored: Stored, averages: Iterable[str]) -> None:
    """Raises InputError where the checkpoint has averages of other parameters."""
    prefix = "train_step.averages."
    differing = set(averages) ^ {name.removeprefix(prefix) for name in stored.below(prefix)}
    if differing:
        raise InputError("the averages of the checkpoint are of other parameters",
                         why=f"they differ in {', '.join(sorted(differing)[:SHOWN])}",
                         do="load it into a step of the same model, with the same setting of ema")


def states_to_load(stored: Stored, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Tensors for the states that are stored; what the optimiser has beside goes."""
    found: dict[str, Any] = {}
    for group in optimizer.param_groups:
        for weight in group["params"]:
            prefix = f"optimizer.state.{names[id(weight)]}."
            keys = [name for name in stored.below(prefix) if "." not in name.removeprefix(prefix)]
            own = optimizer.state.get(weight, {})
            kept: dict[str, Any] = {}
            for name in keys:
                key, shape = name.removeprefix(prefix), stored.shapes[name]
                before = own.get(key)
                if shape is None:
                    kept[key] = None
                elif isinstance(before, Tensor) and before.shape == shape and before.dtype == stored.dtypes[name]:
                    kept[key] = before
                else:
                    device = "cpu" if key == "step" else weight.device
                    like = torch.empty_like(weight.detach(), dtype=stored.dtypes[name]) \
                        if shape == weight.shape else torch.empty(shape, dtype=stored.dtypes[name], device=device)
                    kept[key] = like
                found[name] = kept[key]
            if kept:
                optimizer.state[weight] = kept
            else:
                optimizer.state.pop(weight, None)
    return found
