"""Models that torch.distributed has wrapped already, given to a train step: what the step makes of them.

A step deals out its graph itself (`strategy=`), so it takes the model inside of a DistributedDataParallel; weights that
are parts of tensors already are refused, with the strategy that does the same.
"""
from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from anyshape.base.errors import ConfigError
from anyshape.torch_compat.versions import api


def unwrapped_model(model: Any, strategy: Any) -> tuple[Any, Any]:
    """The model that a step is made of, and its strategy: of a DistributedDataParallel the module in it, and "ddp"
    where none was given.

    Raises:
        ConfigError: the wrapper does what no strategy does, or weights are parts of tensors.
    """
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        why = _beyond(model)
        if why:
            raise ConfigError("anyshape.train_step got a DistributedDataParallel that does more than add up gradients",
                              why=why, do='pass the model that is in it, with strategy="ddp"')
        compiled = getattr(model.module, "_anyshape", None)
        inner = compiled.target if compiled is not None else getattr(model.module, "_orig_mod", model.module)
        return inner, "ddp" if strategy is None else strategy
    if not isinstance(model, torch.nn.Module):
        return model, strategy
    sharded = sys.modules.get("torch.distributed.fsdp")
    kinds = tuple(getattr(sharded, name) for name in ("FSDPModule", "FullyShardedDataParallel")
                  if hasattr(sharded, name))
    if any(isinstance(module, kinds) for module in model.modules()):
        raise ConfigError("anyshape.train_step got a model that is sharded already (FSDP)",
                          why="its hooks gather weights and scatter gradients while the model runs, and a step is one "
                              "program that does both itself",
                          do='pass the model as it was, with strategy="fsdp"; or anyshape.compile the sharded one, and '
                             "write the step yourself")
    tensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if tensor is not None and any(isinstance(one, tensor) for one in model.parameters()):
        raise ConfigError("anyshape.train_step got a model whose weights are DTensors",
                          why="they are parts of tensors already, and a step deals whole ones out",
                          do='pass the model as it was, with strategy="tp"; or anyshape.compile the parallelised one, '
                             "and write the step yourself")
    return model, strategy


def _beyond(model: torch.nn.parallel.DistributedDataParallel) -> str:
    """What a DistributedDataParallel does that strategies do not; empty where it is the mean of gradients alone."""
    if dist.get_process_group_ranks(model.process_group) != list(range(dist.get_world_size())):
        return "its process group is not that of all processes, and a step is dealt out over all"
    if getattr(model, "mixed_precision", None) is not None:
        return "it has a mixed precision of its own (mixed_precision)"
    if api.comm_hooks(model):
        return "gradients go through a communication hook (register_comm_hook)"
    return ""
