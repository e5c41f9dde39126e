"""Safetensors: weights as a header of JSON and their bytes, which are used where they lie in a mapped file.

    8 bytes: length n    n bytes: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}    the bytes

Format: https://github.com/huggingface/safetensors. Ours is the stricter part of it: tensors follow each other without
holes, and the bytes begin at a multiple of 64.
"""
from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from anyshape.artifact.format.container import ALIGNMENT, refused
from anyshape.ir.types import size_of
from anyshape.runtime.driver.numpy_driver import NUMPY_DTYPES

DTYPES = {"F64": "f64", "F32": "f32", "F16": "f16", "BF16": "bf16", "I64": "i64", "I32": "i32", "I16": "i16",
          "I8": "i8", "U64": "u64", "U32": "u32", "U16": "u16", "U8": "u8", "BOOL": "bool",
          "C64": "c64"}
WORDS = {name: word for word, name in DTYPES.items()}
MOST_JSON = 8 << 20  # bytes, which take half a second to read
MOST_DIMS = 64


def encode(tensors: Mapping[str, tuple[str, np.ndarray[Any, Any]]]) -> bytes:
    """The bytes of tensors by name, each with our name of its dtype; the largest alignment comes first."""
    order = sorted(tensors, key=lambda name: (-(tensors[name][1].nbytes & -tensors[name][1].nbytes or 1 << 62), name))
    header: dict[str, Any] = {}
    at = 0
    for name in order:
        dtype, array = tensors[name]
        header[name] = {"dtype": WORDS[dtype], "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return b"".join([len(text).to_bytes(8, "little"), text,
                     *(np.ascontiguousarray(tensors[name][1]).tobytes() for name in order)])


def decode(data: memoryview, where: str) -> dict[str, tuple[str, np.ndarray[Any, Any]]]:
    """The tensors in `data`, as arrays over it that cannot be written to, each with our name of its dtype.

    Raises:
        ArtifactError: a tensor has no place in the data, or it is no such data.
    """
    length = int.from_bytes(data[:8], "little") if len(data) >= 8 else -1
    if not 0 <= length <= len(data) - 8:
        raise refused(where, f"its header is {length} bytes")
    header = parse_json(data[8:8 + length], where)
    body = data[8 + length:]
    found: dict[str, tuple[str, np.ndarray[Any, Any]]] = {}
    places = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, (begin, end) = _entry(name, entry, where)
        if end - begin != math.prod(shape) * size_of(dtype) or end > len(body) or begin % size_of(dtype):
            raise refused(where, f"{name} has no place at {begin}..{end}")
        array = np.frombuffer(body[begin:end], NUMPY_DTYPES[dtype]).reshape(shape)
        found[name] = (dtype, array)
        places.append((begin, end))
    at = 0
    for begin, end in sorted(places):
        if begin != at:
            raise refused(where, f"tensors overlap, or leave a hole, at {begin}")
        at = end
    if at != len(body):
        raise refused(where, f"{len(body) - at} bytes belong to no tensor")
    return found


def _entry(name: str, entry: Any, where: str) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    if isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"}:
        dtype, shape, place = entry["dtype"], entry["shape"], entry["data_offsets"]
        if isinstance(dtype, str) and dtype in DTYPES and _sizes(shape) and _sizes(place) and len(place) == 2 \
                and place[0] <= place[1]:
            return DTYPES[dtype], tuple(shape), (place[0], place[1])
    raise refused(where, f"{name[:80]} is no tensor: {str(entry)[:80]}")


def _sizes(found: Any) -> bool:
    return isinstance(found, list) and len(found) <= MOST_DIMS and all(
        isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**62 for n in found)


def parse_json(data: bytes | memoryview, where: str) -> dict[str, Any]:
    """An object of JSON without repeated names.

    Raises:
        ArtifactError: it is none.
    """
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name is there twice")
        return found

    if len(data) > MOST_JSON:
        raise refused(where, f"{len(data)} bytes of JSON are more than {MOST_JSON}")
    try:
        found = json.loads(bytes(data), object_pairs_hook=once, parse_int=_number)
    except (ValueError, RecursionError) as error:
        raise refused(where, f"it is no JSON: {str(error)[:80]}") from None
    if not isinstance(found, dict):
        raise refused(where, "it is no object of JSON")
    return found


def _number(text: str) -> int:
    if len(text) > 19:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)
