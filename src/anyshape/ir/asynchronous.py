"""Asynchronous collectives: the two calls that one is, its launch and the wait for it, with the message between them.

    m, ... = extern(x, ... | target=START, effect=1)    sends; x may be written over, m is not there yet
    y, ... = extern(m, ... | target=WAIT, effect=2)     m is there; what this rank gets of it

The first `apart` operands are messages by themselves, which lie as their results do: there a result may have the memory
of its message, and the wait has nothing to write. All others are one message. Both write their results where the plan
has them, messages among them, so the arena has room for them once other values are gone. Launches keep their order on
all ranks. A wait may stand anywhere between its launch and the first use of its results: what lies between hides the
messages, whose memory is taken from the one to the other.
"""
from __future__ import annotations

from anyshape.ir.graph import Attr, Node

START = "anyshape_collective.start.default"
WAIT = "anyshape_collective.wait.default"
WRITES_RESULTS = frozenset((START, WAIT))  # targets whose template names results, too, as ("result", i)


def writes_results(node: Node) -> bool:
    """Does the call write into memory that it is given for its results?"""
    return node.op == "extern" and node.attr("target") in WRITES_RESULTS


def apart_of(template: Attr) -> int:
    """How many operands of a launch or a wait are messages by themselves: the last argument of both; 0 of none."""
    if not template:
        return 0
    arguments = template[0][1:]  # type: ignore[index]
    kind, count = arguments[-1]  # type: ignore[misc,str-unpack,index]
    assert kind == "int", template
    return int(count)  # type: ignore[arg-type]
