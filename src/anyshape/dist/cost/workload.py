"""A workload of the cost model: a model's layers, their products and attentions, with sizes as formulas over a batch.

    layers.*  x 32: products [b*s, 4096] @ [4096, 4096] .., attention of 32 heads, 202 million parameters

Elements are counted, not bytes, for the dtype is chosen later. What is cut by tensor parallelism is told apart from
what is not: `cut_...`. Layers that are alike are one `Layer` with a count: their choices are linked. Neighbours of one
block ("layers.*.self_attn", "layers.*.mlp") take turns.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

from anyshape.sym.expr import Size


@dataclass(frozen=True, slots=True)
class Product:
    """[rows, inner] @ [inner, columns] with a weight. cut: "column" where tensor parallelism deals out its columns,
    "row" where it deals out the inner dim (the result is a partial sum), "" where it is not cut. share: how much of
    `rows` come at a mean to it (of an expert: less than 1)."""

    name: str
    rows: Size
    inner: int
    columns: int
    cut: str = ""


@dataclass(frozen=True, slots=True)
class Attention:
    """Scores of `queries` by `keys` of each of batch * heads, and what they weigh."""

    batch: Size
    heads: int
    key_heads: int
    queries: Size
    keys: Size
    width: int
    causal: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """Layers that are alike, `count` of them in a row.

    parameters, cut_parameters: elements; the second ones are among the first. tensors: how many tensors they are.
    traffic: elements that pointwise operations of one forward read and write when they are fused. border: elements of
    its result. saved: elements kept for the backward. working: elements of gradients while its backward runs. regions:
    how often values go into a part that tensor parallelism cuts, and out again. most: ranks over which it can be cut.
    """

    name: str
    count: int
    products: tuple[Product, ...]
    attentions: tuple[Attention, ...]
    parameters: int
    cut_parameters: int
    tensors: int
    traffic: Size
    cut_traffic: Size
    border: Size
    saved: Size
    cut_saved: Size
    working: Size
    regions: int
    most: int

    @property
    def block(self) -> str:
        """What it is repeated with: "layers.*" of "layers.*.mlp"; its name, if it is not repeated."""
        head, star, _ = self.name.partition("*")
        return head + star


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """A model as the search sees it.

    layers: in order. batch, length: symbols of the formulas: sequences, and their length. dtype: of products.
    state_bytes: of an optimiser's state, for a parameter. master_bytes: of a parameter as it is kept.
    """

    name: str
    layers: tuple[Layer, ...]
    batch: str = "b"
    length: str = "s"
    dtype: str = "bf16"
    state_bytes: float = 8.0
    master_bytes: float = 4.0

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(layer.count * layer.parameters for layer in self.layers)

    @property
    def depth(self) -> int:
        """Layers, each counted."""
        return sum(layer.count for layer in self.layers)

    def replace(self, **changes: object) -> Workload:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]
