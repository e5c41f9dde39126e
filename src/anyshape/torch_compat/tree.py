"""Pytrees: torch's walk over nested arguments and results."""
from __future__ import annotations

from typing import Any

from anyshape.torch_compat.access import need

tree_flatten: Any = need("torch.utils._pytree.tree_flatten")
tree_leaves: Any = need("torch.utils._pytree.tree_leaves")
tree_map: Any = need("torch.utils._pytree.tree_map")
tree_map_only: Any = need("torch.utils._pytree.tree_map_only")
tree_unflatten: Any = need("torch.utils._pytree.tree_unflatten")
