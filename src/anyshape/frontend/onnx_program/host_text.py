"""String operators, which run on the host, for no program holds text: what moves it, encoders from it or to it, and
what makes text of text. Text is an array of objects (str).

    LabelEncoder(x: text[n], keys_strings=("red", "blue"), values_int64s=(0, 1))  -->  i64[n]
"""
from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from anyshape.frontend.importer_onnx.model import OnnxNode
from anyshape.frontend.importer_onnx_ml.classical import NAN_IS_A_KEY
from anyshape.frontend.onnx_program.host_ops import array, back, hosts


def _words(values: Any) -> list[str]:
    """Text of an attribute."""
    return [one.decode() if isinstance(one, bytes) else str(one) for one in values or ()]


def _text(values: Sequence[Any], shape: tuple[int, ...]) -> np.ndarray:
    found = np.empty(len(values), object)
    found[:] = values
    return found.reshape(shape)


def _ints(value: Any) -> tuple[int, ...]:
    return tuple(int(one) for one in array(value).reshape(-1))


# ---- what moves it


@hosts("Gather")
def gather(node: OnnxNode, x: Any, at: Any) -> Any:
    return back(np.take(array(x), array(at), node.attributes.get("axis", 0)))


@hosts("ai.onnx.ml:ArrayFeatureExtractor")
def array_feature_extractor(node: OnnxNode, x: Any, at: Any) -> Any:
    own = array(x)
    return back(np.take(own if own.ndim > 1 else own.reshape(1, -1), array(at).reshape(-1), -1))


@hosts("Reshape")
def reshape(node: OnnxNode, x: Any, shape: Any) -> Any:
    own, sizes = array(x), _ints(shape)
    if not node.attributes.get("allowzero", 0):
        sizes = tuple(own.shape[d] if n == 0 else n for d, n in enumerate(sizes))
    return back(own.reshape(sizes))


@hosts("Flatten")
def flatten(node: OnnxNode, x: Any) -> Any:
    own = array(x)
    axis = node.attributes.get("axis", 1)
    axis += own.ndim if axis < 0 else 0
    return back(own.reshape(int(np.prod(own.shape[:axis])), int(np.prod(own.shape[axis:]))))


@hosts("Squeeze")
def squeeze(node: OnnxNode, x: Any, axes: Any = None) -> Any:
    at = node.attributes.get("axes") if axes is None else _ints(axes)
    return back(np.squeeze(array(x), None if at is None else tuple(at)))


@hosts("Unsqueeze")
def unsqueeze(node: OnnxNode, x: Any, axes: Any = None) -> Any:
    return back(np.expand_dims(array(x), tuple(node.attributes["axes"] if axes is None else _ints(axes))))


@hosts("Transpose")
def transpose(node: OnnxNode, x: Any) -> Any:
    return back(np.transpose(array(x), node.attributes.get("perm")))


@hosts("Concat")
def concat(node: OnnxNode, *parts: Any) -> Any:
    return back(np.concatenate([array(one) for one in parts], node.attributes["axis"]))


@hosts("Where")
def where(node: OnnxNode, condition: Any, x: Any, y: Any) -> Any:
    return back(np.where(array(condition), array(x), array(y)))


@hosts("Equal")
def equal(node: OnnxNode, x: Any, y: Any) -> Any:
    return back(np.asarray(array(x) == array(y), bool))


# ---- encoders


@hosts("ai.onnx.ml:LabelEncoder")
def label_encoder(node: OnnxNode, x: Any) -> Any:
    roles = []
    for role in ("keys", "values"):
        kind, found = next((kind, node.attributes[f"{role}_{kind}"]) for kind in (
            "strings", "int64s", "floats", "tensor") if node.attributes.get(f"{role}_{kind}") is not None)
        items = _words(found) if kind == "strings" else array(found).reshape(-1).tolist()
        roles.append((kind, items, {"int64s": np.int64, "floats": np.float32}.get(kind, getattr(found, "dtype", None))))
    (_, keys, _), (kind, values, dtype) = roles
    if len(keys) != len(values):
        raise ValueError(f"there are {len(keys)} keys for {len(values)} values")
    table, own = dict(zip(keys[::-1], values[::-1], strict=True)), array(x)  # of equal keys the first one counts
    given = node.attributes.get("default_tensor")
    if given is not None:
        other = array(given).reshape(-1).tolist()[0]
    elif kind == "strings":
        other = _words([node.attributes.get("default_string", "_Unused")])[0]
    else:
        other = node.attributes.get("default_int64", -1) if kind == "int64s" else node.attributes.get(
            "default_float", -0.0)
    of_nan = next((value for key, value in zip(keys, values, strict=True) if key != key), other)
    of_nan = of_nan if node.version >= NAN_IS_A_KEY else other
    made = [of_nan if item != item else table.get(item, other) for item in own.reshape(-1).tolist()]
    return _text(made, own.shape) if kind == "strings" else back(np.asarray(made, dtype).reshape(own.shape))


@hosts("ai.onnx.ml:OneHotEncoder")
def one_hot_encoder(node: OnnxNode, x: Any) -> Any:
    own, kinds = array(x), np.array(_words(node.attributes.get("cats_strings")), object)
    found = own[..., None] == kinds
    if not node.attributes.get("zeros", 1) and not found.any(-1).all():
        raise ValueError("there is text that is none of the categories")
    return back(found.astype(np.float32))


@hosts("TfIdfVectorizer")
def term_frequencies(node: OnnxNode, x: Any) -> Any:
    """How often each gram of a pool stands in a line, with gaps of up to max_skip_count (ONNX TfIdfVectorizer-9)."""
    least, most, gaps = (int(node.attributes[name]) for name in ("min_gram_length", "max_gram_length",
                                                                 "max_skip_count"))
    texts = node.attributes.get("pool_strings")
    pool = _words(texts) if texts else list(node.attributes.get("pool_int64s") or ())
    starts = [*node.attributes["ngram_counts"], len(pool)]
    places = [int(one) for one in node.attributes["ngram_indexes"]]
    weights = node.attributes.get("weights") or (1.0,) * len(places)
    grams: list[tuple[Any, ...]] = []
    for length, (begin, end) in enumerate(itertools.pairwise(starts), 1):
        grams += [tuple(pool[at:at + length]) for at in range(begin, end, length)]
    table = {gram: place for place, gram in enumerate(grams) if least <= len(gram) <= most}
    own = array(x)
    lines = own.reshape(1, -1) if own.ndim < 2 else own
    counts = np.zeros((len(lines), len(grams)), np.float32)
    for row, line in zip(counts, lines.tolist(), strict=True):
        for length in range(least, most + 1):
            for gap in range(1, 2 + (gaps if length > 1 else 0)):
                for begin in range(len(line) - (length - 1) * gap):
                    place = table.get(tuple(line[begin:begin + (length - 1) * gap + 1:gap]))
                    if place is not None:
                        row[place] += 1
    mode = _words([node.attributes["mode"]])[0]
    if mode == "IDF":
        np.minimum(counts, 1, out=counts)
    if mode != "TF":
        counts *= np.asarray(weights, np.float32)
    found = np.zeros((len(lines), 1 + max(places, default=-1)), np.float32)
    found[:, places] = counts
    return back(found.reshape(-1) if own.ndim < 2 else found)


# ---- text of text


def _each(x: np.ndarray, split: Callable[[str], list[str]], pad: str) -> tuple[np.ndarray, np.ndarray]:
    """Parts of each text along a new last dim, filled up with `pad`, and how many there are."""
    parts = [split(one) for one in x.reshape(-1).tolist()]
    counts = np.array([len(one) for one in parts], np.int64)
    width = int(counts.max(initial=0))
    flat = [item for one in parts for item in (*one, *[pad] * (width - len(one)))]
    return _text(flat, (*x.shape, width)), counts.reshape(x.shape)


@hosts("StringSplit")
def string_split(node: OnnxNode, x: Any) -> Any:
    by, most = node.attributes.get("delimiter"), node.attributes.get("maxsplit")
    mark = _words([by])[0] if by else None
    parts, counts = _each(array(x), lambda one: (one if mark else one.strip()).split(
        mark, -1 if most is None else most) if one else [], "")
    return parts, back(counts)


@hosts("com.microsoft:Tokenizer")
def tokenizer(node: OnnxNode, x: Any) -> Any:
    """Words of each text: what an expression finds, what stands between separators, or its characters."""
    least = int(node.attributes.get("mincharnum", 1))
    expression, between = node.attributes.get("tokenexp"), _words(node.attributes.get("separators"))
    finds = re.compile(_words([expression])[0]) if expression else None

    def split(text: str) -> list[str]:
        if finds is not None:
            found = [one.group() for one in finds.finditer(text)]
        elif not any(between):
            found = list(text)
        else:
            found = [text]
            for mark in between:
                found = [part for one in found for part in re.split(mark, one)]
        return [one for one in found if len(one) >= max(least, 1)]
    pad = _words([node.attributes.get("pad_value", "")])[0]
    parts, counts = _each(array(x), split, pad)
    if node.attributes.get("mark", 0) and counts.any():  # where there are no words at all there are no marks
        parts, _ = _each(array(x), lambda one: ["\x02", *split(one), "\x03"], pad)
    return [parts]


@hosts("StringNormalizer")
def string_normalizer(node: OnnxNode, x: Any) -> Any:
    """Text in one case, without stop words (ONNX StringNormalizer-10)."""
    own, case = array(x), _words([node.attributes.get("case_change_action", "NONE")])[0]
    exact, stops = bool(node.attributes.get("is_case_sensitive", 0)), _words(node.attributes.get("stopwords"))
    changed = {"LOWER": str.lower, "UPPER": str.upper}.get(case, str)
    dropped = set(stops if exact else [one.lower() for one in stops])
    kept = [changed(one) for one in own.reshape(-1).tolist() if (one if exact else one.lower()) not in dropped]
    kept = kept or [""]
    return _text(kept, (1, len(kept)) if own.ndim == 2 else (len(kept),))


@hosts("StringConcat")
def string_concat(node: OnnxNode, x: Any, y: Any) -> Any:
    return np.asarray(array(x) + array(y), object)


@hosts("RegexFullMatch")
def full_match(node: OnnxNode, x: Any) -> Any:
    finds, own = re.compile(_words([node.attributes["pattern"]])[0]), array(x)
    found = [finds.fullmatch(one) is not None for one in own.reshape(-1).tolist()]
    return back(np.array(found, bool).reshape(own.shape))
