"""Torch's logs of what is handled here: it would print a traceback for what the user hears of once, in his words."""
from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

FAKE_TENSORS = "torch._subclasses.fake_tensor"  # an operator refuses its arguments: the call then raises it itself
GUARDS = "torch._guards"  # a guard that cannot be made in this process
WHILE_TRACING = (
    FAKE_TENSORS,
    "torch._dynamo.variables.tensor",  # `.item()` ends a graph: counted, and the warning names the line
    "torch._dynamo.exc",  # what else ends one: the same
    "torch._dynamo.variables.ctx_manager",  # a range of the profiler is not in a graph
    "torch.fx.experimental.recording",  # a question about sizes that has no answer: the same
)


@contextlib.contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Inside, the loggers of these names give no warnings and errors of this thread; what `TORCH_LOGS` asks for beside
    them stays."""
    thread = threading.get_ident()

    def elsewhere(entry: logging.LogRecord) -> bool:
        return entry.thread != thread or entry.levelno < logging.WARNING

    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addFilter(elsewhere)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(elsewhere)
