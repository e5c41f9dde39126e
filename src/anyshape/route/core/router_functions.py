"""Router functions (gates): decisions that are ready to use, each a module from cells to Routes.

    top_k, switch               the largest of learned scores       expert_choice         branches choose cells
    threshold, residual_threshold   all scores above a bound        confidence_exit       who is sure leaves
    hash_route, task_route      what a token or a task says

All have fixed shapes for every decision, so that a compiled program serves all of them. Of several tensors that are
routed by one decision, the first is asked. Which of equal scores wins depends on the cell's scores alone (as in
torch.topk), and so not on the batch.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anyshape.base.errors import InputError
from anyshape.route.core.capacity import capacity_of, fraction_of, limited
from anyshape.route.core.routes import Routes, wide

Gate = Callable[[Tensor], Tensor]
_GOLDEN = 0x9E3779B1  # Knuth, The Art of Computer Programming, volume 3, section 6.4: multiplicative hashing


class TopK(nn.Module):
    """The k branches of the highest scores, weighted by their softmax (Shazeer et al., 2017, section 2.1).

    Args:
        gate: cells -> scores [N, branches]. k: choices of a cell.
        normalize: whether the k weights of a cell sum to 1 (softmax over the chosen) or are those of the softmax over
            all branches. weighted: whether there are weights at all.
        noise: in training, scores get normal noise: of this standard deviation, or of softplus(noise(cells)) where it
            is a module (noisy top-k, section 2.1).
        capacity_factor, batch_prioritised: see capacity.limited; None: no cell is dropped.
    """

    def __init__(self, gate: Gate, k: int = 2, *, normalize: bool = True, weighted: bool = True,
                 noise: float | nn.Module | None = None, capacity_factor: float | None = None,
                 batch_prioritised: bool = False) -> None:
        super().__init__()
        if k < 1:
            raise InputError(f"top-{k} chooses nothing", why="a cell takes at least one branch", do="give k=1 or more")
        if capacity_factor is not None:
            fraction_of(capacity_factor)
        self.gate, self.k, self.normalize, self.weighted, self.noise = gate, k, normalize, weighted, noise
        self.capacity_factor, self.batch_prioritised = capacity_factor, batch_prioritised

    def forward(self, cells: Tensor, *others: Any) -> Routes:
        logits = self._noisy(self.gate(cells), cells)
        if logits.shape[-1] < self.k:
            raise InputError(f"top-{self.k} of {logits.shape[-1]} branches", why="a cell takes a branch once at most",
                             do="give a smaller k, or a gate with a score for each branch")
        weights, ids = torch.topk(torch.softmax(logits, -1, dtype=wide(logits)), self.k, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        routes = Routes(ids, weights.to(cells.dtype), logits)
        if self.capacity_factor is not None:
            routes = limited(routes, logits.shape[1], self.capacity_factor, batch_prioritised=self.batch_prioritised)
        return routes if self.weighted else Routes(routes.ids, None, logits)

    def _noisy(self, logits: Tensor, cells: Tensor) -> Tensor:
        if self.noise is None or not self.training:
            return logits
        scale = self.noise if isinstance(self.noise, (int, float)) else nn.functional.softplus(self.noise(cells))
        return logits + torch.randn_like(logits) * scale


class Switch(nn.Module):
    """The branch of the highest score, weighted by its softmax over all (Switch Transformer, Fedus et al., 2021).

    Args:
        gate: cells -> scores [N, branches].
        jitter: in training, what the gate sees is multiplied by uniform numbers from [1 - jitter, 1 + jitter]
            (section 2.4).
        capacity_factor, batch_prioritised: see capacity.limited; None: no cell is dropped.
    """

    def __init__(self, gate: Gate, *, jitter: float = 0.0, capacity_factor: float | None = None,
                 batch_prioritised: bool = False) -> None:
        super().__init__()
        if not 0 <= jitter < 1:
            raise InputError(f"a jitter of {jitter} is out of range", why="it is a share of a cell, from 0 to below 1",
                             do="give 0.01")
        if capacity_factor is not None:
            fraction_of(capacity_factor)
        self.gate, self.jitter = gate, jitter
        self.capacity_factor, self.batch_prioritised = capacity_factor, batch_prioritised

    def forward(self, cells: Tensor, *others: Any) -> Routes:
        seen = cells
        if self.training and self.jitter:
            seen = cells * (1 + self.jitter * (2 * torch.rand_like(cells) - 1))
        logits = self.gate(seen)
        weights, ids = torch.softmax(logits, -1, dtype=wide(logits)).max(-1)
        routes = Routes(ids, weights.to(cells.dtype), logits)
        if self.capacity_factor is None:
            return routes
        return limited(routes, logits.shape[1], self.capacity_factor, batch_prioritised=self.batch_prioritised)


class Threshold(nn.Module):
    """All branches whose score is above a bound.

    Args:
        gate: cells -> scores [N, branches].
        bound: of scores. weighted: whether results are multiplied by the scores.
        most: how many branches a cell takes at most, those of its highest scores; None: all, which costs memory for
            N * branches rows.
        residual: the branch of cells that no score sends anywhere: its number; None drops them.
    """

    def __init__(self, gate: Gate, bound: float = 0.0, *, weighted: bool = False, most: int | None = None,
                 residual: int | None = None) -> None:
        super().__init__()
        self.gate, self.bound, self.weighted, self.most, self.residual = gate, bound, weighted, most, residual

    def forward(self, cells: Tensor, *others: Any) -> Routes:
        logits = self.gate(cells)
        places = torch.arange(logits.shape[1], device=logits.device).expand(logits.shape)
        scores, ids = (logits, places) if self.most is None else \
            torch.topk(logits, min(self.most, logits.shape[1]), dim=-1)
        ids = torch.where(scores > self.bound, ids, -1)
        weights = scores if self.weighted else None
        rest = self.rest(logits.shape[1])
        if rest is not None:
            idle = (ids < 0).all(1, keepdim=True)
            ids = torch.cat([torch.where(idle, rest, ids[:, :1]), ids[:, 1:]], 1)
            if weights is not None:  # the residual path passes on what it is given
                weights = torch.cat([torch.where(idle, 1.0, weights[:, :1]), weights[:, 1:]], 1)
        return Routes(ids, weights, logits)

    def rest(self, branches: int) -> int | None:
        """The branch of cells that no score sends anywhere. branches: the number of scores."""
        return self.residual


class ResidualThreshold(Threshold):
    """Threshold with one branch more than the gate has scores, the last: the residual path of all other cells."""

    def rest(self, branches: int) -> int | None:
        return branches


class ConfidenceExit(nn.Module):
    """Early exit: cells whose classifier is sure leave (BranchyNet, Teerapittayanon et al., 2016; MSDNet, Huang et al.,
    2018): branch 0 where the largest softmax is above the bound, else branch 1.

    Args:
        classifier: cells -> logits [N, classes]. bound: from 0 to 1.
    """

    def __init__(self, classifier: Gate, bound: float) -> None:
        super().__init__()
        self.classifier, self.bound = classifier, bound

    def forward(self, cells: Tensor, *others: Any) -> Routes:
        logits = self.classifier(cells)
        sure = torch.softmax(logits, -1, dtype=wide(logits)).amax(-1) > self.bound
        return Routes(torch.where(sure, 0, 1), None, logits)


class HashRoute(nn.Module):
    """Branches by a hash of token ids (Hash Layers, Roller et al., 2021); nothing is learned.

    Args:
        branches: how many. k: choices of a cell, all different.
        vocabulary: how many ids there are: each branch gets as many, at random (balanced hash, section 3.2). Left out,
            the hash is computed.
        seed: of the random numbers.

    Calls: cells, tokens: whole numbers, one for each cell.
    """

    table: Tensor

    def __init__(self, branches: int, *, k: int = 1, vocabulary: int | None = None, seed: int = 0) -> None:
        super().__init__()
        if not 1 <= k <= branches:
            raise InputError(f"{k} different branches of {branches}", why="a choice is made once",
                             do="give a k from 1 to the number of branches")
        self.branches, self.k, self.vocabulary, self.seed = branches, k, vocabulary, seed
        if vocabulary is not None:
            order = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(seed))
            self.register_buffer("table", order % branches, persistent=True)

    def forward(self, cells: Tensor, tokens: Tensor, *more: Any) -> Routes:
        flat = tokens.reshape(-1).long()
        if self.vocabulary is not None:
            first = self.table.index_select(0, flat)
        else:
            first = _mixed(flat + self.seed) % self.branches
        if self.k == 1:
            return Routes(first)
        others = torch.arange(self.k - 1, device=first.device)
        step = 1 + (_mixed(flat + self.seed + 1)[:, None] + others) % (self.branches - 1)
        return Routes(torch.cat([first[:, None], (first[:, None] + step) % self.branches], 1))


def _mixed(numbers: Tensor) -> Tensor:
    """A hash of whole numbers, of 31 bits."""
    return ((numbers * _GOLDEN) >> 15) & 0x7FFFFFFF


class TaskRoute(nn.Module):
    """Branches by the task of a cell (task-level mixture of experts, Kudugunta et al., 2021).

    Args:
        table: [tasks] or [tasks, k]: the branches of each task.

    Calls: cells, task: a whole number for each cell, or one for all.
    """

    table: Tensor

    def __init__(self, table: Tensor | Sequence[Any]) -> None:
        super().__init__()
        found = torch.as_tensor(table)
        if found.dim() not in (1, 2) or found.dtype != torch.int64:
            raise InputError(f"a table of tasks has shape {tuple(found.shape)} and dtype {found.dtype}",
                             why="it says the branches of each task", do="give whole numbers [tasks] or [tasks, k]")
        self.register_buffer("table", found if found.dim() == 2 else found[:, None])

    def forward(self, cells: Tensor, task: Tensor, *others: Any) -> Routes:
        tasks = task.reshape(-1).expand(cells.shape[0]) if task.dim() == 0 else task.reshape(-1)
        return Routes(self.table.index_select(0, tasks))


class ExpertChoice(nn.Module):
    """Each branch takes the cells that fit it best, so that all have the same load (Zhou et al., 2022, section 3.1): of
    the softmax over branches, the largest `capacity` cells of each; a cell may go to several branches, or to none.

    Args:
        gate: cells -> scores [N, branches].
        capacity_factor: how many branches a cell takes in the mean; a branch takes ceil(factor * N / branches) cells.
        most: how many branches a cell takes at most (section 3.3), those of its highest scores; None: all, which costs
            memory for N * branches rows.
    """

    def __init__(self, gate: Gate, capacity_factor: float = 2.0, *, most: int | None = None) -> None:
        super().__init__()
        fraction_of(capacity_factor)
        self.gate, self.capacity_factor, self.most = gate, capacity_factor, most

    def forward(self, cells: Tensor, *others: Any) -> Routes:
        logits = self.gate(cells)
        scores = torch.softmax(logits, -1, dtype=wide(logits))
        count, branches = logits.shape
        room = capacity_of(count, branches, 1, self.capacity_factor)
        # the place of a cell in the order of a branch: earlier cells first where scores are equal
        order = torch.argsort(scores, dim=0, descending=True, stable=True)
        rank = torch.empty_like(order).scatter(0, order, torch.arange(count, device=order.device)[:, None].expand(
            count, branches))
        taken = rank < room
        places = torch.arange(branches, device=order.device).expand(count, branches)
        if self.most is not None and self.most < branches:
            scores, places = torch.topk(torch.where(taken, scores, -1.0), self.most, dim=-1)
            taken = scores >= 0
        return Routes(torch.where(taken, places, -1), scores.to(cells.dtype), logits)


# the names that stand in a model: route.top_k(gate, k=2)
top_k, switch, expert_choice, threshold, residual_threshold = TopK, Switch, ExpertChoice, Threshold, ResidualThreshold
confidence_exit, hash_route, task_route = ConfidenceExit, HashRoute, TaskRoute
