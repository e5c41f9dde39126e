"""What forked.py's first process has imported and made once: all that the first program of a process takes, 8 s on a
slow machine, and nothing that a script could find."""
from __future__ import annotations

import gc

import torch

import anyshape
import dist_worker  # noqa: F401  # and with it torch.distributed
from anyshape.base import counters

# Autograd's engine makes a thread for each device when it is first used, after which nobody may fork. A build for CUDA
# on a machine without one counts none at first, and one after the first fake tensor: so plain PyTorch is the first.
if torch.cuda.device_count() == 0:
    torch.ones(1, requires_grad=True).sum().backward()
    anyshape.compile(lambda x: torch.softmax(x, -1))(torch.ones(2, 3, requires_grad=True)).sum().backward()
torch._dynamo.reset()
anyshape.release()
counters.reset()
gc.collect()
gc.freeze()  # scripts do not look through it
