"""The demo on several ranks, started by torchrun: the documents of a batch are dealt out, and all ranks stop together.

    batch of 9 x 70    -->    rank 0: 5 x 62    rank 1: 4 x 70

The batches are those of one process, so the learning curve is, too: the loss is the mean over the tokens of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from anyshape.base.errors import ConfigError
from anyshape.dist.mesh import Mesh, mesh_of
from anyshape.dist.placement import local_count
from anyshape.dist.strategies import AXES, Strategy, strategy_of
from anyshape.frontend.train_step.auto_strategy import AUTO
from anyshape.tools.demo.data import END, Batch
from anyshape.tools.demo.model import IGNORED

LEAST = 2  # rows and positions that a rank is given: sizes of 1 are another program to PyTorch
COMMAND = "torchrun --nproc_per_node=2 -m anyshape demo --strategy {}"


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among all that train the model. part, parts: which part of a batch it gives, of how many. begun:
    torch.distributed began with it."""

    rank: int = 0
    world: int = 1
    part: int = 0
    parts: int = 1
    begun: bool = False

    @property
    def is_first(self) -> bool:
        """It speaks for all, and writes files."""
        return self.rank == 0

    def running(self, strategy: Strategy) -> Ranks:
        """The same, by a strategy."""
        part, parts = strategy.part_of_batch(self.rank)
        return replace(self, part=part, parts=parts)

    def any(self, asked: bool) -> bool:
        """Whether any rank is asked to; all ranks call this."""
        if self.world == 1:
            return asked
        found = torch.tensor(int(asked))
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found)

    def deal(self, batch: Batch) -> Batch:
        """This rank's documents of a batch, padded to the longest of them; what is missing of `LEAST` rows or positions
        has no target."""
        if self.world == 1:
            return batch
        low, high = local_count(batch.tokens.shape[0], self.parts, self.part)
        tokens, targets = batch.tokens[low:high], batch.targets[low:high]
        if self.parts > 1:
            length = int((targets != IGNORED).sum(1).max()) if high > low else 0
            tokens, targets = tokens[:, :length], targets[:, :length]
        rows, length = tokens.shape
        missing = (0, max(LEAST - length, 0), 0, max(LEAST - rows, 0))
        if any(missing):
            tokens = torch.nn.functional.pad(tokens, missing, value=END)
            targets = torch.nn.functional.pad(targets, missing, value=IGNORED)
        return Batch(tokens.contiguous(), targets.contiguous(), batch.real)


def is_launched() -> bool:
    """Whether torchrun has started this process."""
    return dist.is_available() and dist.is_torchelastic_launched()


def leave(ranks: Ranks) -> None:
    """Ends what `join` began."""
    if ranks.begun and dist.is_initialized():
        dist.destroy_process_group()


def join(text: str) -> Ranks:
    """Makes this process one of torchrun's ranks.

    Args:
        text: of --strategy.

    Raises:
        ConfigError: torchrun has not started it.
    """
    begun = not dist.is_initialized()
    try:
        if begun:
            dist.init_process_group("gloo")
    except ValueError as error:
        raise ConfigError(f"--strategy {text} needs processes, and there is one", where="the environment",
                          why=f"torchrun has not started it: {error}", do=COMMAND.format(text)) from error
    return Ranks(dist.get_rank(), dist.get_world_size(), begun=begun)


def _mesh(text: str) -> Mesh:
    return mesh_of(text if text.startswith("mesh(") else f"mesh({text})")


def named_strategy(text: str, world: int) -> Strategy | None:
    """The strategy that --strategy names: a word, or axes of a mesh such as data=2,tensor=2. None: it is searched.

    Raises:
        ConfigError: there is no such strategy, or it has another number of ranks.
    """
    if text == AUTO:
        return None
    try:
        return strategy_of(_mesh(text) if "=" in text else text, world)
    except ConfigError as error:
        words = ", ".join([AUTO, *sorted(set(AXES.values()))])
        do = error.do if "=" in text else f"give one of {words}, or axes of a mesh such as data={world}"
        raise ConfigError(error.what, where=f"--strategy {text}, {world} processes", why=error.why, do=do) from error
