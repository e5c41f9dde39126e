"""What forked.py's first process has imported and made once: all that the first program of a process takes, 8 s on a
slow machine, and nothing that a script could find."""
from __future__ import annotations

import gc

import torch

import anyshape
import dist_worker  # noqa: F401  # and with it torch.distributed
from anyshape.base import counters

anyshape.compile(lambda x: torch.softmax(x, -1))(torch.ones(2, 3, requires_grad=True)).sum().backward()
torch._dynamo.reset()
anyshape.release()
counters.reset()
gc.collect()
gc.freeze()  # scripts do not look through it
