"""Native bytecode encoder, in Python, of library steps whose words are made at each new shape: grouped
convolutions, routing. A native routine fills in the words of all others
(backend/cpu/bytecode/template.py), and most programs have no other."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from anyshape.backend.cpu.bytecode.conv_spec import ConvSpec
from anyshape.backend.cpu.bytecode.encode_grouped_conv import grouped_conv_words
from anyshape.backend.cpu.bytecode.encode_routing import RoutingSpec, routing_words
from anyshape.backend.cpu.machine.target import Machine
from anyshape.ops.convolution import CONVOLUTIONS
from anyshape.ops.routing import ROUTING
from anyshape.ops.type_rules import ORDERED
from anyshape.plan.ir.program import LibraryStep


class EncodedStep(NamedTuple):
    """A step that Python encodes. words: (shape, strides, offset) of its windows -> its words. dtype: of its routines;
    "" where they are of none."""

    words: Callable[[tuple[Any, ...]], list[int]]
    dtype: str


def encoded_step(number: int, step: LibraryStep, places: tuple[tuple[int, int], ...],
                 machine: Machine) -> EncodedStep | None:
    """Step `number`; None: there is no routine for it. places: (slot, bytes per element) of its windows."""
    attrs: dict[str, Any] = dict(step.attrs)
    dtype = (*step.inputs, *step.outputs)[0].type.dtype
    if step.op in CONVOLUTIONS:
        settings = tuple(attrs[name] for name in ("stride", "padding", "dilation"))
        optional = (bool(attrs.get(name)) for name in ("added", "relu", "scaled", "shifted", *ORDERED))
        conv = ConvSpec(number, dtype, places, settings, *optional)
        return EncodedStep(partial(grouped_conv_words, machine, conv), conv.dtype)
    if step.op in ROUTING:
        return EncodedStep(partial(routing_words, RoutingSpec(number, step.op, dtype, places)), "")
    return None
