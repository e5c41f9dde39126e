"""Serialisation of test vectors: arguments and results of calls, stored in a deployed file and run where it is checked.

    tests.safetensors    "0.in.1" is argument 1 of the first call, "0.out.0" its first output

A program that is compiled again, or runs on another processor, has to give the same up to rounding.
"""
from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anyshape.artifact import arrays
from anyshape.artifact.format import safetensors
from anyshape.artifact.format.container import VECTORS, Container, refused
from anyshape.artifact.host_steps import wide
from anyshape.artifact.load import LoadedModel, load
from anyshape.base.errors import ArtifactError, InputError
from anyshape.runtime.driver.numpy_driver import NAMES

NAME = re.compile(r"(\d{1,6})\.(in|out)\.(\d{1,6})")
TOLERANCE = {"f64": 1e-8, "f32": 1e-4, "f16": 1e-2, "bf16": 5e-2}  # of the largest number of a result


def recorded(path: Path, native: bool, calls: Sequence[Sequence[Any]]) -> bytes:
    """What the file at `path` computes for these calls, each a tuple of arguments.

    Raises:
        InputError: arguments do not fit.
    """
    found: dict[str, tuple[str, np.ndarray[Any, Any]]] = {}
    with load(path, trust_native=native, seed=0) as model:
        for number, arguments in enumerate(calls):
            flat = model.signature.flat(arguments, {})
            outputs = model.run(flat)
            for place, one, _ in model.inputs:
                if one.kind != "fixed":
                    given = np.asarray(arrays.incoming(flat[place], model.names[place]))
                    found[f"{number}.in.{place}"] = (model.kinds[place] or "i64", given)
            for place, output in enumerate(outputs):
                if output is not None:
                    array = np.asarray(output)
                    found[f"{number}.out.{place}"] = (model.dtypes[place] or NAMES[array.dtype], array)
    return safetensors.encode(found)


def run(path: Path, trust_native: bool = False) -> int:
    """Runs the calls that are in a file; returns how many there are.

    Raises:
        ArtifactError: a result is another one, or what is there are no calls.
    """
    container = Container(path)
    try:
        if VECTORS not in container.places:
            return 0
        where = f"{path}: {VECTORS}"
        calls = _calls(safetensors.decode(container.part(VECTORS), where), where)
        with load(path, trust_native, seed=0) as model:
            for number, (given, wanted) in enumerate(calls):
                _compare(model, f"{where}: call {number}", given, wanted)
        return len(calls)
    finally:
        calls = []  # its arrays lie in the mapping
        container.close()


Arrays = dict[int, tuple[str, np.ndarray[Any, Any]]]


def _calls(tensors: Mapping[str, tuple[str, np.ndarray[Any, Any]]], where: str) -> list[tuple[Arrays, Arrays]]:
    """(arguments, outputs) of each call, by position."""
    found: dict[int, tuple[Arrays, Arrays]] = {}
    for name, (dtype, array) in tensors.items():
        match = NAME.fullmatch(name)
        if match is None:
            raise refused(where, f"{name[:80]} is no argument or result of a call")
        found.setdefault(int(match[1]), ({}, {}))[match[2] == "out"][int(match[3])] = (dtype, array)
    if sorted(found) != list(range(len(found))):
        raise refused(where, "calls are missing")
    return [found[number] for number in range(len(found))]


def _compare(model: LoadedModel, where: str, given: Arrays, wanted: Arrays) -> None:
    """Raises ArtifactError where a call gives something else."""
    flat: list[Any] = [one.value for _, one, _ in model.inputs]
    opened = {place for place, one, _ in model.inputs if one.kind != "fixed"}
    if given.keys() != opened:
        raise refused(where, "its arguments are not those of the program")
    for place, (_, array) in given.items():
        flat[place] = int(array) if model.inputs[place][1].kind == "size" and array.size == 1 else array
    try:
        outputs = model.run(flat)
    except InputError as error:
        raise refused(where, f"its arguments do not fit: {error.why or error.what}"[:300]) from None
    there = {place for place, output in enumerate(outputs) if output is not None}
    if there != wanted.keys():
        raise refused(where, "its results are not those of the program")
    for place, (dtype, array) in wanted.items():
        own = np.asarray(outputs[place])
        alike = own.shape == array.shape and own.dtype == array.dtype
        difference = _difference(own, array, dtype) if alike else f"{own.dtype}{list(own.shape)}"
        if difference:
            raise ArtifactError("the program gives another result than the one that was saved with it", where=where,
                                why=f"output {place}: {difference}",
                                do="do not use the file here; save it again, and report it if that does not help")


def _difference(own: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any], dtype: str) -> str:
    """How they differ, in words; empty where they do not."""
    if dtype not in TOLERANCE:
        return "" if np.array_equal(own, wanted) else f"{int((own != wanted).sum())} of {own.size} numbers are others"
    one, other = wide(own, dtype), wide(wanted, dtype)
    finite = np.isfinite(other)
    if not np.array_equal(one[~finite], other[~finite], equal_nan=True):
        return "numbers that are not finite are elsewhere"
    allowed = TOLERANCE[dtype] * max(1e-30, float(np.abs(other[finite]).max(initial=0)))
    worst = float(np.abs(one[finite] - other[finite]).max(initial=0))
    return "" if worst <= allowed else f"it differs by {worst:.3g}, {allowed:.3g} is allowed"
