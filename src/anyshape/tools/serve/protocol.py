"""Serialisation of inference requests and responses: the Open Inference Protocol, version 2, over HTTP.

    {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 3], "data": [0.5, ...]}]}     numbers in JSON
    {"inputs": [{..., "parameters": {"binary_data_size": 24}}]} and 24 bytes behind it       the binary extension

Specification: https://github.com/open-inference/open-inference-protocol; of the extension: NVIDIA Triton's
`docs/protocol/extension_binary_data.md`. What does not fit is refused before anything runs.
"""
from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anyshape.artifact.host_steps import put, wide
from anyshape.base.errors import AnyShapeError
from anyshape.runtime.driver.numpy_driver import NUMPY_DTYPES

Array = np.ndarray[Any, Any]
# our dtype -> the protocol's word (BF16 is Triton's)
DATATYPES = {"bool": "BOOL", "u8": "UINT8", "u16": "UINT16", "u32": "UINT32", "u64": "UINT64", "i8": "INT8",
             "i16": "INT16", "i32": "INT32", "i64": "INT64", "f16": "FP16", "bf16": "BF16", "f32": "FP32",
             "f64": "FP64"}
HEADER = "inference-header-content-length"
MOST_DIMS = 64
# parameters of Triton's extensions that change what is read or answered, so that they are not passed over
NOT_HERE = {"classification", "shared_memory_region", "sequence_id"}
DO = "see the model's metadata at /v2/models/NAME"


class RequestError(AnyShapeError):
    """A request that is not done. status: of HTTP. The others: as in AnyShapeError."""

    def __init__(self, status: int, what: str, *, where: str = "", why: str = "", do: str = DO) -> None:
        super().__init__(what, where=where, why=why, do=do)
        self.status = status


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output of a model: dtype by our name, sizes, -1 where they are free."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def encode(self) -> dict[str, Any]:
        """As metadata have it."""
        return {"name": self.name, "datatype": DATATYPES[self.dtype], "shape": list(self.shape)}

    def configured(self) -> dict[str, Any]:
        """As Triton's model configuration has it."""
        return {"name": self.name, "data_type": f"TYPE_{DATATYPES[self.dtype]}", "dims": list(self.shape)}


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A request that fits a model: arrays in the order of its inputs; outputs: (which, whether as bytes)."""

    id: str
    arrays: Sequence[Array]
    outputs: Sequence[tuple[int, bool]]


def decode(body: memoryview, header: int | None, inputs: Sequence[TensorSpec],
           outputs: Sequence[TensorSpec]) -> InferRequest:
    """The request in a body. header: bytes of its JSON; None: all.

    Raises:
        RequestError: it is none that the model takes.
    """
    length = len(body) if header is None else header
    if not 0 <= length <= len(body):
        raise _refused(f"{HEADER} is {length}", f"the body has {len(body)} bytes")
    try:
        text = json.loads(bytes(body[:length]), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise _refused("the request is no JSON", str(error)[:200], "send an object of JSON") from None
    given = text.get("inputs") if isinstance(text, dict) else None
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise _refused("the request has no inputs", "`inputs` is no list of objects")
    by_name = {str(one.get("name")): one for one in given}
    wanted = [one.name for one in inputs]
    if len(by_name) != len(given) or by_name.keys() != set(wanted):
        raise _refused("the inputs are not those of the model", f"it takes {', '.join(wanted)}; given: "
                       f"{', '.join(str(one.get('name'))[:40] for one in given)[:400] or 'none'}")
    at = length
    arrays: dict[str, Array] = {}
    specs = {one.name: one for one in inputs}
    for name, one in by_name.items():  # in the request's order: so lie the bytes
        size = _parameters(one, name).get("binary_data_size")
        if size is None:
            arrays[name] = _from_numbers(one, specs[name])
        else:
            if type(size) is not int or not 0 <= size <= len(body) - at:
                raise _refused(f"binary_data_size of {name} is {str(size)[:40]}",
                               f"{len(body) - at} bytes are left behind the JSON")
            arrays[name] = _from_bytes(body[at:at + size], one, specs[name])
            at += size
    if at != len(body):
        raise _refused(f"{len(body) - at} bytes belong to no input", "binary_data_size does not add up to the body")
    identity = text.get("id", "")
    if not isinstance(identity, str):
        raise _refused("the request's id is no text", "", "send a text, or none")
    return InferRequest(identity, [arrays[name] for name in wanted], _asked_for(text, outputs))


def encode(model: str, request: InferRequest, specs: Sequence[TensorSpec],
           results: Sequence[Array]) -> tuple[list[bytes | memoryview], int | None]:
    """A response: its parts, and the bytes of its JSON where tensors lie behind it.

    Raises:
        RequestError: a number is infinite or none, which JSON cannot say.
    """
    found, parts = [], []
    for number, binary in request.outputs:
        entry = specs[number].encode() | {"shape": list(results[number].shape)}
        array = results[number]
        if binary:
            entry["parameters"] = {"binary_data_size": array.nbytes}
            parts.append(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
        else:
            values = wide(array, specs[number].dtype)
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                raise RequestError(400, f"the output {specs[number].name} cannot be written as JSON",
                                   why="it has numbers that are infinite or not a number, for which JSON has no words",
                                   do="ask for it as bytes: \"parameters\": {\"binary_data\": true}")
            entry["data"] = values.reshape(-1).tolist()
        found.append(entry)
    head: dict[str, Any] = {"model_name": model, "model_version": "1", "outputs": found}
    if request.id:
        head["id"] = request.id
    text = json.dumps(head, separators=(",", ":")).encode()
    return [text, *parts], len(text) if parts else None


def _refused(what: str, why: str, do: str = DO) -> RequestError:
    return RequestError(400, what, where="the body of the request", why=why, do=do)


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")


def _parameters(one: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = one.get("parameters", {})
    if not isinstance(found, dict):
        raise _refused(f"the parameters of {name[:80]} are no object", str(found)[:80])
    for unknown in NOT_HERE & found.keys():
        raise _refused(f"{name[:80]} has the parameter {unknown}", "the server has no such extension", "leave it out")
    return found


def _asked_for(text: dict[str, Any], outputs: Sequence[TensorSpec]) -> list[tuple[int, bool]]:
    """Which outputs, and whether as bytes."""
    usual = _parameters(text, "the request").get("binary_data_output", False) is True
    given = text.get("outputs")
    if given is None:
        return [(number, usual) for number in range(len(outputs))]
    numbers = {one.name: number for number, one in enumerate(outputs)}
    names = [one.get("name") if isinstance(one, dict) else None for one in given] if isinstance(given, list) else [None]
    if not all(isinstance(name, str) and name in numbers for name in names) or len(set(names)) != len(names):
        raise _refused("the outputs are not those of the model", f"it has {', '.join(numbers)}, each once")
    return [(numbers[one["name"]], _parameters(one, one["name"]).get("binary_data", usual) is True) for one in given]


def _shape(one: Mapping[str, Any], spec: TensorSpec) -> tuple[int, ...]:
    """The shape of an input, which fits what the model says of it."""
    shape, datatype = one.get("shape"), one.get("datatype")
    if datatype != DATATYPES[spec.dtype]:
        raise _refused(f"the input {spec.name} is {str(datatype)[:40]}", f"the model takes {DATATYPES[spec.dtype]}")
    if not isinstance(shape, list) or len(shape) > MOST_DIMS or not all(
            type(n) is int and 0 <= n < 2**62 for n in shape) or math.prod(n or 1 for n in shape) >= 2**62:
        raise _refused(f"the shape of {spec.name} is {str(shape)[:80]}", "a shape is a list of whole numbers from 0")
    if len(shape) != len(spec.shape) or any(own not in (-1, n) for own, n in zip(spec.shape, shape, strict=True)):
        raise _refused(f"the shape of {spec.name} is {shape}", f"the model takes {list(spec.shape)}")
    return tuple(shape)


def _from_bytes(data: memoryview, one: Mapping[str, Any], spec: TensorSpec) -> Array:
    shape, dtype = _shape(one, spec), NUMPY_DTYPES[spec.dtype]
    if "data" in one:
        raise _refused(f"the input {spec.name} has data twice", "it has `data` and `binary_data_size`")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise _refused(f"binary_data_size of {spec.name} is {len(data)}",
                       f"{math.prod(shape)} elements of {dtype.itemsize} bytes do not fit")
    if spec.dtype == "bool" and data and max(data) > 1:
        raise _refused(f"the input {spec.name} has a byte that is neither 0 nor 1", "its datatype is BOOL")
    return np.frombuffer(data, dtype).reshape(shape)


def _from_numbers(one: Mapping[str, Any], spec: TensorSpec) -> Array:
    """An array of numbers of JSON, nested or one after the other; none is rounded but to the nearest float."""
    shape, dtype = _shape(one, spec), NUMPY_DTYPES[spec.dtype]
    if "data" not in one:
        raise _refused(f"the input {spec.name} has no data", "`data` and `binary_data_size` are missing")
    try:
        given = np.asarray(one["data"])
        if dtype.kind == "u" and given.dtype.kind == "f" and given.size:  # of 2^63 and more beside smaller ones
            exact = np.asarray(one["data"], object)
            given = exact.astype(np.uint64) if all(type(n) is int for n in exact.flat) else given
    except (ValueError, OverflowError, RecursionError) as error:
        raise _refused(f"the data of {spec.name} are no array", str(error)[:200]) from None
    if given.size == 0 and given.dtype.kind == "f":
        given = given.astype(dtype)  # an empty list has no kind of its own
    kind = "f" if spec.dtype == "bf16" else dtype.kind
    if given.dtype.kind not in {"b": "b", "f": "fiu"}.get(kind, "iu"):
        raise _refused(f"the data of {spec.name} are no numbers of {DATATYPES[spec.dtype]}",
                       f"they are {given.dtype}: {str(one['data'])[:80]}")
    if given.size != math.prod(shape) or (given.ndim > 1 and given.shape != shape):
        raise _refused(f"the data of {spec.name} have the shape {list(given.shape)}", f"its shape says {list(shape)}")
    with np.errstate(over="ignore"):
        found = given.astype(np.float32 if spec.dtype == "bf16" else dtype)
    if not (np.isfinite(found) if kind == "f" else found == given).all():
        raise _refused(f"a number of {spec.name} is out of range", f"its datatype is {DATATYPES[spec.dtype]}")
    if spec.dtype == "bf16":
        bits = np.empty(found.shape, np.uint16)
        put(bits, "bf16", found)
        found = bits
    return found.reshape(shape)
