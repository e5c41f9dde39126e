"""What a file may hold: the version of the format, and which steps of a plan run without what made them."""
from __future__ import annotations

from anyshape.base.errors import Unsupported
from anyshape.plan.ir.program import ExternStep, LibraryStep, Plan

FORMAT, VERSION = "anyshape", 1
WITH_VECTORS = 2  # the version of files with test vectors, which readers of version 1 do not know
# library steps that are native, or numpy's where they are not (artifact/host_steps.py)
NATIVE = ("matmul", "matmul_add", "attention", "recurrence")


def check(plan: Plan, name: str) -> None:
    """Raises Unsupported, with the places in the user's program, where steps of a plan need PyTorch."""
    if plan.saved or plan.restored or plan.whole:
        raise Unsupported(f"{name} cannot be deployed", why="it is a part of a training step: it saves tensors",
                          do="export the model for inference: model.eval(), then torch.export.export")
    found = []
    for step in plan.steps:
        if isinstance(step, ExternStep):
            found.append((step.target, step.where))
        elif isinstance(step, LibraryStep) and (step.op not in NATIVE):
            found.append((f"{step.op} of {step.dtype}", step.where))
    if found:
        names = ", ".join(dict.fromkeys(target for target, _ in found))
        raise Unsupported(f"{name} cannot be deployed: {len(found)} steps of it are done by PyTorch",
                          where="; ".join(dict.fromkeys(where for _, where in found if where))[:400],
                          why=f"there is no native routine for {names}",
                          do="deploy that part with PyTorch, or write it by other operators")
