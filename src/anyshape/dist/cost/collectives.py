"""Collectives by the alpha-beta model (Hockney, 1994): ring and tree, within nodes and between them.

    all_gather of n bytes by k ranks, ring                      (k - 1) alpha + n (k - 1) / k beta
    all_reduce                                                  twice that; as a tree 2 log2(k) alpha + 2 n beta
    a group of several nodes, r ranks in each                   the slower of both levels: inside a node n (r - 1) / r,
                                                                between nodes n (nodes - 1) / nodes, over a network that
                                                                the groups of the node's chips share

Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH" (2005), section 4; the tree
is the double binary tree of Sanders, Speck and Traeff (2009), as NCCL has it. Bytes are of the whole value.
"""
from __future__ import annotations

import math
from dataclasses import dataclass

from anyshape.dist.cost.machine import Machine

RING = ("all_gather", "reduce_scatter")


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks of one axis of a mesh (or of several). size: ranks. stride: by how much neighbours' ranks differ: those of
    the axes behind it, which lie between."""

    size: int
    stride: int = 1

    def per_node(self, machine: Machine) -> int:
        """Ranks of the group in one node."""
        return max(1, min(self.size, machine.per_node // max(self.stride, 1)))

    def nodes(self, machine: Machine) -> int:
        """Nodes it reaches over."""
        return -(-self.size // self.per_node(machine))

    def link(self, machine: Machine) -> str:
        """What its collectives are sent over: "fabric" inside a node, "network" between nodes."""
        return "fabric" if self.nodes(machine) == 1 else "network"


def seconds(kind: str, total: float, group: Group, machine: Machine) -> float:
    """Seconds of one collective.

    Args:
        kind: all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, send.
        total: bytes of the whole value (of a reduction: what every rank has; of all_to_all: what all ranks have).
    """
    if group.size <= 1 or total <= 0:
        return 0.0
    if kind == "all_reduce":
        ring = 2 * seconds("all_gather", total, group, machine)
        depth = 2 * math.log2(group.size)
        tree = depth * _alpha(group, machine) + 2 * total * max(_betas(group, machine))
        return min(ring, tree)
    inside, between = _betas(group, machine)
    k, nodes, per_node = group.size, group.nodes(machine), group.per_node(machine)
    alpha = _alpha(group, machine)
    if kind == "send":
        return alpha + total * (between if nodes > 1 else inside)
    if kind == "broadcast":
        return math.log2(k) * alpha + total * max(inside, between)
    if kind == "all_to_all":
        away = total / k * (k - per_node) / k
        return (k - 1) * alpha / 2 + max(total / k * (k - 1) / k * inside, away * per_node * between)
    assert kind in RING, kind
    steps = (per_node - 1) * machine.chip.alpha + (nodes - 1) * machine.chip.alpha_network
    return steps + max(total * (k - 1) / k * inside if per_node > 1 else 0.0,
                       total * (nodes - 1) / nodes * between)


def _alpha(group: Group, machine: Machine) -> float:
    return machine.chip.alpha if group.nodes(machine) == 1 else machine.chip.alpha_network


def _betas(group: Group, machine: Machine) -> tuple[float, float]:
    """Seconds a byte inside a node, and between nodes: the groups of a node share its network."""
    chip = machine.chip
    inside = 1 / (chip.fabric * chip.efficiency.fabric)
    if group.nodes(machine) == 1:
        return inside, 0.0
    sharing = machine.per_node / group.per_node(machine)
    return inside, sharing / (machine.network * chip.efficiency.network)
