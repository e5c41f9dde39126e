"""What a file to deploy is made of: a traced graph, what the compiler made of it, weights and a signature."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from anyshape.artifact.format.signature import Signature
from anyshape.base.config import Config
from anyshape.compiler.compiled import PlannedGraph
from anyshape.ir.graph import Graph

Weight = tuple[str, str, "np.ndarray[Any, Any]"]  # a name, our name of the dtype, and the numbers; of bf16 the bits


@dataclass(frozen=True, slots=True)
class Deployable:
    """What is saved. graph: as it was traced, before the first pass. planned: what the compiler made of it, and by
    which configuration. weights: by position among the plan's inputs. special: programs for calls with some sizes,
    which take and give the same, each with those sizes: (input, dim, size)."""

    graph: Graph
    planned: PlannedGraph
    config: Config
    weights: Mapping[int, Weight]
    signature: Signature
    special: tuple[tuple[tuple[tuple[int, int, int], ...], Deployable], ...] = ()


def storage_of(weight: Weight) -> tuple[Any, ...]:
    """The same for weights that are one tensor."""
    _, dtype, array = weight
    return array.__array_interface__["data"][0], array.shape, array.strides, dtype
