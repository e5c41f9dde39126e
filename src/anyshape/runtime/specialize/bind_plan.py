"""Plan binding: the specializer of a plan on a context, with its kernels in the table of functions."""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from anyshape.backend.cpu.bytecode import format as host
from anyshape.backend.cpu.bytecode.encode_plan import layout_of
from anyshape.backend.interface import LoadedKernel
from anyshape.plan.ir.program import Plan
from anyshape.runtime.context.process_context import Context
from anyshape.runtime.cost.autotune import autotune_of
from anyshape.runtime.specialize.specialization import Specializer


def specializer_of(plan: Plan, kernels: Sequence[LoadedKernel], context: Context, forward: Plan | None = None,
                   products: str = "usual", names: Mapping[str, str] = MappingProxyType({}),
                   chunks: Sequence[tuple[str, ...]] = (), is_other: bool = False) -> Specializer:
    """The specializer of an allocated plan.

    Args:
        kernels: what the plan's regimes name, in any order.
        products: which routines multiply (runtime/cost/autotune.py).
        names: symbol -> what errors call it.
        forward, chunks, is_other: see `Specializer`.
    """
    entries = {kernel.name: host.KERNELS + 4 * i for i, kernel in enumerate(kernels)}
    layout = dataclasses.replace(layout_of(plan, entries, autotune_of(context, products).ours), names=dict(names))
    functions = context.functions(list(kernels), layout.dtypes)
    return Specializer(plan, layout, context, functions, forward, chunks, is_other)
