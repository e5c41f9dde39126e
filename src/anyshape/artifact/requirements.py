"""What a file may hold: the version of the format, and which steps of a plan run without what made them."""
from __future__ import annotations

from collections.abc import Container

from anyshape.base.errors import Unsupported
from anyshape.ops.matmul import GROUPED, PRODUCTS
from anyshape.ops.routing import ROUTING
from anyshape.plan.ir.program import ExternStep, LibraryStep, Plan
from anyshape.runtime.call.program import written_inputs

FORMAT, VERSION = "anyshape", 1
WITH_VECTORS = 2  # the version of files with test vectors, which readers of version 1 do not know
WITH_NAMES = 3  # of files whose results have names of the model's, with test vectors or without
WITH_SPECIAL = 4  # of files with programs for special sizes, with or without the above
VERSIONS = (VERSION, WITH_VECTORS, WITH_NAMES, WITH_SPECIAL)
MOST_SPECIAL = 7  # programs for special sizes
# library steps that are native, or numpy's where they are not (artifact/host_steps.py)
NATIVE = (*PRODUCTS, "attention", "recurrence", "recurrence_bytes", "direct_conv", "conv_bytes", "grouped_conv",
          *GROUPED, *ROUTING)


def check(plan: Plan, name: str, weights: Container[int]) -> None:
    """Raises Unsupported, with the places in the user's program, where steps of a plan need PyTorch, or write into
    weights. weights: positions of the inputs that the file brings; its mapping cannot be written to."""
    if plan.saved or plan.restored or plan.whole:
        raise Unsupported(f"{name} cannot be deployed", why="it is a part of a training step: it saves tensors",
                          do="export the model for inference: model.eval(), then torch.export.export")
    if any(position in weights for position in written_inputs(plan)):
        raise Unsupported(f"{name} cannot be deployed", why="it writes into its parameters or buffers, as batch "
                          "normalisation does in training, and those of a file are read only",
                          do="export the model for inference: model.eval(); pass state as an argument")
    found = []
    for step in plan.steps:
        if isinstance(step, ExternStep):
            from anyshape.runtime.numpy_ops import reason_against  # most programs have no such step
            reason = reason_against(step.target, step.template, len(step.inputs), step.effect)
            if reason:
                found.append((reason, step.where))
        elif isinstance(step, LibraryStep) and (step.op not in NATIVE):
            found.append((f"there is no native routine for {step.op} of {step.dtype}", step.where))
    if found:
        reasons = dict.fromkeys(reason for reason, _ in found)
        raise Unsupported(f"{name} cannot be deployed: {len(found)} steps of it are done by PyTorch",
                          where="; ".join(dict.fromkeys(where for _, where in found if where))[:400],
                          why="; ".join(reasons),
                          do="deploy that part with PyTorch, or write it by other operators")
