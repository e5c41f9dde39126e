"""Deployment of a program that takes arrays in a line: what a file has of it (artifact/save.py)."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from anyshape.artifact.deployable import Deployable
from anyshape.artifact.format.signature import InputSpec, Signature
from anyshape.base.errors import Unsupported
from anyshape.frontend.programs.compile_program import NativeProgram
from anyshape.frontend.programs.session import Compilation
from anyshape.ir.types import TensorType
from anyshape.torch_compat.dtypes import DTYPE_NAMES


def deployable_program(program: NativeProgram, compilation: Compilation, takes: Sequence[str], outputs: int,
                       gives: Sequence[str] = ()) -> Deployable:
    """What a file holds of a program.

    Args:
        takes: names of its arguments, which stand before its constants.
        outputs: how many results there are; one is given as it is, several as a tuple.
        gives: the results' names, if the model has any.
    """
    weights = {}
    for number, tensor in enumerate(program.constants):
        kind = program.compiled.plan.inputs[len(takes) + number]
        assert isinstance(kind, TensorType)
        name = f"constant.{number}"
        weights[len(takes) + number] = (name, kind.dtype, array_of(tensor, name))
    inputs = tuple(InputSpec(name, "array", position) for position, name in enumerate(takes))
    signature = Signature(inputs, ["tuple", list(range(len(takes)))], ["dict", []],
                          0 if outputs == 1 else ["tuple", list(range(outputs))], compilation.names_of(program.name),
                          tuple(gives))
    graph = program.compiled.history.captured
    assert graph is not None
    return Deployable(graph, program.compiled, compilation.config, weights, signature)


def array_of(tensor: torch.Tensor, name: str) -> np.ndarray[Any, Any]:
    """The numbers of a tensor; of bf16 the bits.

    Raises:
        Unsupported: it is no dense tensor on the CPU, or of complex numbers of two f64.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or DTYPE_NAMES.get(tensor.dtype) is None \
            or (tensor.is_complex() and tensor.dtype != torch.complex64):
        raise Unsupported(f"the program cannot be deployed: {name} is a {tensor.dtype} tensor on {tensor.device}",
                          why="weights are dense tensors on the CPU, of complex ones those of complex64",
                          do="move or convert it before the export")
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()
