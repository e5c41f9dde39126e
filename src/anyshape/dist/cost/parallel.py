"""Degrees of parallelism and choices of a layer: what the cost model is asked about.

    mesh(pipe=1, data=16, context=1, tensor=8)       the last axis runs fastest: tensor ranks are neighbours
    cut fsdp                                         a layer's tensor and data parallelism

Data parallelism of a layer: `ddp` all of it everywhere; `zero1` states dealt out; `zero2` gradients, too, and weights
gathered once a step; `fsdp` weights too, gathered for the forward and again for the backward (ZeRO-3); `hsdp` fsdp
inside a node, ddp between nodes. (Rajbhandari et al., "ZeRO", 2020; Zhao et al., "PyTorch FSDP", 2023.)

Along the axis `tensor`: `cut` deals out weights in Megatron's way (Shoeybi et al., 2019), `sequence` deals out
positions, with attention's heads exchanged by all_to_all (Jacobs et al., "DeepSpeed Ulysses", 2023),
`whole` does neither.
"""
from __future__ import annotations

from dataclasses import dataclass

from anyshape.dist.cost.collectives import Group

DATA = ("ddp", "zero1", "zero2", "fsdp", "hsdp")
TENSOR = ("whole", "cut", "sequence")
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class Degrees:
    """Ranks along each axis. sequence: between the parts that tensor parallelism cuts, positions are dealt out
    (Korthikanti et al., "Reducing Activation Recomputation", 2022)."""

    data: int = 1
    tensor: int = 1
    context: int = 1
    pipe: int = 1
    sequence: bool = True

    @property
    def world(self) -> int:
        """All ranks."""
        return self.data * self.tensor * self.context * self.pipe

    @property
    def tensor_group(self) -> Group:
        """The ranks along `tensor`."""
        return Group(self.tensor, 1)

    @property
    def context_group(self) -> Group:
        """The ranks along `context`."""
        return Group(self.context, self.tensor)

    def weights_group(self, tensor: str) -> Group:
        """The ranks that have the same weights of a layer: data and context, and tensor where it is not cut."""
        if tensor == "cut":
            return Group(self.data * self.context, self.tensor)
        return Group(self.data * self.context * self.tensor, 1)

    def __str__(self) -> str:
        return f"mesh(pipe={self.pipe}, data={self.data}, context={self.context}, tensor={self.tensor})"


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """Placement of a layer's parameters: one of TENSOR and one of DATA."""

    tensor: str = "whole"
    data: str = "ddp"

    def __str__(self) -> str:
        return f"{self.tensor} {self.data}"


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of an element. products: dtype of products; gather, reduce: of what collectives of weights and gradients
    send; compute: of activations. eager: pointwise operations are not fused. overlap_tensor: part of the collectives
    of tensor parallelism that hides behind its products (asynchronous tensor parallelism)."""

    products: str = "bf16"
    compute: float = 2.0
    gather: float = 2.0
    reduce: float = 4.0
    gradient: float = 4.0
    eager: bool = False
    overlap_tensor: float = 0.0

    @staticmethod
    def of(dtype: str) -> Precision:
        """That of products in a dtype: activations and gathered weights are in it; those of fp8 products in bf16."""
        bytes_ = {"f32": 4.0, "f64": 8.0}.get(dtype, 2.0)
        return Precision(dtype, compute=bytes_, gather=bytes_)
