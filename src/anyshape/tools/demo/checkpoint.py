"""The demo's checkpoint: tensors in safetensors, the rest in JSON, and no moment without a whole one on the disk.

    checkpoint-000120.safetensors    weights, optimiser state, state of torch's random numbers
    checkpoint.json                  names the file above; its rename is the moment the new checkpoint counts

Each file is written under another name, flushed to the disk and renamed, the JSON last. Whatever stops a save, a full
disk or a lost process, the JSON still names the previous tensors, which are removed only after the rename.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from anyshape.base.errors import AnyShapeError
from anyshape.base.files import write_atomically

FORMAT = "anyshape-demo-1"
INDEX = "checkpoint.json"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # what AdamW keeps for each weight


class CheckpointError(AnyShapeError):
    """A checkpoint could not be written or read."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint in memory: named tensors and plain JSON values."""

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]


def save(folder: Path, checkpoint: Checkpoint, step: int) -> None:
    """Make `checkpoint` the one in `folder`; CheckpointError leaves the previous one in force."""
    tensors = folder / f"checkpoint-{step:06d}.safetensors"
    index = {"format": FORMAT, "tensors": tensors.name, **checkpoint.values}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(tensors, save_tensors(dict(checkpoint.tensors)))
        write_atomically(folder / INDEX, json.dumps(index).encode())
        for old in folder.glob("checkpoint-*.safetensors"):
            if old != tensors:
                old.unlink()
    except OSError as error:
        kept = "the previous checkpoint is whole" if (folder / INDEX).exists() else "there is no earlier checkpoint"
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written",
            where=str(folder),
            why=f"{error.strerror or error}; {kept}",
            do="free some space or give another folder with --out, then go on with --resume",
        ) from error


def load(folder: Path) -> Checkpoint:
    """Read the checkpoint in `folder`; CheckpointError says what is missing or broken."""
    index = folder / INDEX
    if not index.is_file():
        missing = "there is no such folder" if not folder.is_dir() else f"the folder has no {INDEX}"
        raise CheckpointError(
            f"cannot resume from {folder}",
            why=missing,
            do="give the --out folder of an earlier demo, or leave --resume out to start afresh",
        )
    try:
        values = json.loads(index.read_bytes())
        if values["format"] != FORMAT:
            raise ValueError(f"its format is {values['format']!r}, this version reads {FORMAT!r}")
        name = Path(values["tensors"]).name
        tensors = load_tensors((folder / name).read_bytes())
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            f"the checkpoint in {folder} cannot be read",
            why=f"{type(error).__name__}: {error}",
            do="leave --resume out to start afresh",
        ) from error
    return Checkpoint(tensors, values)


def pack_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights, AdamW state and torch's random state under one flat row of names."""
    tensors = {"random": torch.get_rng_state()}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        for moment, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{moment}.{name}"] = value
    return tensors


def unpack_state(tensors: Mapping[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put back what `pack_state` gave, bit for bit; a missing or misshapen tensor raises CheckpointError."""
    try:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                stored = tensors[f"model.{name}"]
                if stored.shape != parameter.shape:
                    raise ValueError(f"{name} is {tuple(stored.shape)}, the model has {tuple(parameter.shape)}")
                parameter.copy_(stored)
                if f"step.{name}" in tensors:
                    optimizer.state[parameter] = {moment: tensors[f"{moment}.{name}"].clone() for moment in MOMENTS}
        torch.set_rng_state(tensors["random"])
    except (KeyError, ValueError) as error:
        raise CheckpointError(
            "the checkpoint does not fit the model",
            why=str(error),
            do="resume with the options the run was started with",
        ) from error
