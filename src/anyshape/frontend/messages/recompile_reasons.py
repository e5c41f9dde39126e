"""Recompile reasons: Dynamo's failed guards, as what forced another program, in the user's words.

    tensor 'L['ids']' rank mismatch. expected 3, actual 4        -->  ids had 3 dims, now 4
    0 <= L['x'].size()[0] <= 10  # if x.shape[0] > 10:  # m.py:7  -->  0 <= dim 0 of x <= 10 does not hold, it is 30 ...
"""
from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from anyshape.torch_compat.versions import api

_MODULE_PATH = re.compile(r"(?:\._modules\['([^']*)'\]|\._parameters\['([^']*)'\]|\._buffers\['([^']*)'\])")
_MISMATCH = re.compile(r"tensor '(.*)' (\w[\w ]*) mismatch(?: at index (\d+))?\. expected ([^,]*), actual (.*)")
_GRADIENT = re.compile(r"tensor '(.*)' requires_grad mismatch\. expected requires_grad=(\w+)")
_KEYS = re.compile(r"tensor '(.*)' dispatch key set mismatch\. expected DispatchKeySet\((.*)\), "
                   r"actual DispatchKeySet\((.*)\)")
_TYPE = re.compile(r"expected type of '(.*)' to be a tensor type, ' but found <class '(?:\w+\.)*(\w+)'>")
_ADVICE = re.compile(r"\. Guard failed on a parameter, consider using torch\._dynamo\.config\..*")
_SIZE = re.compile(r"([\w.']+(?: of \w+)?|input \d+)\.size\(\)\[(\d+)\]")
_SIZE_OF_INPUT = re.compile(r"L(?:\['\w+'\]|\[\d+\])+\.size\(\)\[\d+\]")
OTHERS = (2, 3, 17, 1009)  # sizes that stand for all but 0 and 1
_KIND = re.compile(r"GLOBAL_STATE|_parameters\[|_buffers\[|(?:rank|dtype|device|stride|requires_grad|key set) mismatch|"
                   r"check_type_id|expected type of| (?:==|is) (?:True|False|None|'.*'|\".*\"|torch\.\w+)$|^not |hooks|"
                   r"keys\(|CodeGuardAccessor|hasattr|isinstance|_iterator_len\(|_range_iter\(")
# a count, wherever it is found: of a list that hooks fill, but not of the hooks; not how far a loop is that is cut
_COUNT = re.compile(r"(?!.*_(?:parameters|buffers)\[|___tuple_iterator_len).*(?<!hooks\)) == -?\d+$")
_NUMBER = re.compile(r"(?<![\w'\[])-?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?!\w)")
UNCOVERED = "sizes are 0 or 1, or strides in an order, that the program for all sizes does not serve"
_OF_SMALL = re.compile(rf"{UNCOVERED}|" r"\.size\(\)\[\d+\] == [01]$|size mismatch at index \d+\. expected [01],")
_COUNTER = re.compile(r"(L\['\w+'\](?:\.\w+|\['\w+'\])+) == -?\d+$")
_CODE = re.compile(r"#\s*(.*?)\s*#\s*(\S+:\d+)")
_LOCAL = re.compile(r"^L\['(\w+)'\] (==|is) (.+)$")
_MODES = {"grad_mode": "gradients were switched on or off (torch.no_grad, inference_mode)",
          "num_threads": "the number of threads changed (torch.set_num_threads)",
          "deterministic_algorithms": "torch.use_deterministic_algorithms changed",
          "default_dtype": "the default dtype changed", "torch_function": "a torch function mode was switched"}


def source_words(source: str) -> str:
    """A place in the user's program: L['x'] is x, L['args'][0] is input 0, L['self']._modules['up'] is up."""
    text = re.sub(r"L\['args'\]\[(\d+)\]", r"input \1", source)
    text = re.sub(r"L\['kwargs'\]\['(\w+)'\]", r"\1", text)
    text = re.sub(r"(?:L\['(?:self|fn|s)'\])((?:\._(?:modules|parameters|buffers)\['[^']*'\])+)",
                  lambda found: _module_path(found.group(1)), text)
    text = re.sub(r"[LG]\['(\w+)'\]", r"\1", text)
    text = _MODULE_PATH.sub(lambda found: "." + next(part for part in found.groups() if part is not None), text)
    return _SIZE.sub(r"dim \2 of \1", text)


def size_names(gm: GraphModule) -> tuple[tuple[str, str, str], ...]:
    """(symbol, place in the user's words, a name such as x_0) for every symbolic size of a Dynamo graph's inputs."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    return name_sizes([(source_words(api.source_of(node)), node.meta.get("example_value"))
                       for node in placeholders if api.source_of(node)])


def name_sizes(inputs: Sequence[tuple[str, Any]]) -> tuple[tuple[str, str, str], ...]:
    """As `size_names`, for inputs given as (name in the user's words, traced value)."""
    found: dict[str, tuple[str, str, str]] = {}
    for name, value in inputs:
        if isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt) and not size.node.expr.is_number:
                    symbol = str(size.node.expr)
                    found.setdefault(symbol, (symbol, f"dim {dim} of {name}", f"{_identifier(name)}_{dim}"))
    for name, value in inputs:
        if isinstance(value, torch.SymInt):
            symbol = str(value.node.expr)
            found.setdefault(symbol, (symbol, name, _identifier(name)))
    return tuple(found.values())


def _identifier(words: str) -> str:
    return re.sub(r"\W+", "_", words.replace("input ", "input")).strip("_")


def _module_path(text: str) -> str:
    return ".".join(next(part for part in parts if part) for parts in _MODULE_PATH.findall(text))


def miss_words(parts: Sequence[str], values: Mapping[str, Any]) -> str:
    """Why a program could not take a call, from the failed guards (`parts`) and the locals of the call."""
    # guards on sizes are checked together, and those that hold are given too
    failed = [part for part in parts if not _holds(part.partition("  #")[0].strip(), values)] or parts
    said = [_part_words(part.strip(), values) for part in failed if part.strip()]
    return "; ".join(dict.fromkeys(said)) or "another kind of call"


def singled_out(programs: Sequence[Sequence[str]], values: Mapping[str, Any]) -> frozenset[str]:
    """Sizes of the call that are 1 and by that alone miss a program: its guard would hold at other sizes.

    2 <= L['x'].size()[1]  -->  L['x'].size()[1], where that is 1

    Args:
        programs: the failed guards of each; values: the locals of the call.
    """
    conditions = dict.fromkeys(part.partition("  #")[0].strip() for parts in programs for part in parts)
    found: set[str] = set()
    for condition in conditions:
        for place in dict.fromkeys(_SIZE_OF_INPUT.findall(condition)):
            if place not in found and value_of(place, values) == 1 and not _holds(condition, values) and all(
                    value_of(condition.replace(place, str(other)), values) is True for other in OTHERS):
                found.add(place)
    return frozenset(found)


def counters(programs: Sequence[Sequence[str]], values: Mapping[str, Any]) -> frozenset[str]:
    """Places of whole numbers, as of a counter on a module, that programs took for another number than they are now.

    L['self'].step == 3  -->  L['self'].step
    """
    found = set()
    for part in (part for parts in programs for part in parts):
        equal = _COUNTER.match(part.partition("  #")[0].strip())
        if equal and type(value_of(equal.group(1), values)) is int and not _holds(equal.group(0), values):
            found.add(equal.group(1))
    return frozenset(found)


def varying(programs: Sequence[Sequence[str]], values: Mapping[str, Any]) -> str:
    """What of the call is another number than the constant that some program took it for: the guard without numbers;
    empty where each program is for calls of another kind (dtype, rank, mode, type, a flag, a text, another weight), or
    for sizes of 0 or 1 only.

    tensor 'L['y']' size mismatch at index 2. expected 5, actual 6  -->  tensor 'L['y']' size mismatch at index 2
    len(L['xs']) == 3                                               -->  len(L['xs']) == #
    """
    for parts in programs:
        failed = [condition for condition in (part.partition("  #")[0].strip() for part in parts)
                  if not _holds(condition, values)]
        if failed and not any(_OF_SMALL.search(condition) or (_KIND.search(condition) and not _COUNT.match(condition))
                              for condition in failed):
            first = failed[0]
            return first.partition(". expected")[0] if _MISMATCH.match(first) else _NUMBER.sub("#", first)
    return ""


def _holds(condition: str, values: Mapping[str, Any]) -> bool:
    """Whether a condition on sizes, as Dynamo writes it in Python, holds for the locals of the call."""
    return bool(re.search(r"\.(size|stride)\(\)\[", condition)) and bool(value_of(condition, values))


def value_of(text: str, values: Mapping[str, Any]) -> Any:
    """What a text of Dynamo's guards is for the locals of the call; None where it cannot be told."""
    try:
        return eval(text, {"__builtins__": {"min": min, "max": max}, "L": values})
    except (ArithmeticError, AttributeError, LookupError, NameError, SyntaxError, TypeError):
        return None


def _part_words(part: str, values: Mapping[str, Any]) -> str:
    condition, _, _ = part.partition("  #")
    condition = _ADVICE.sub("", condition.strip())
    if condition == UNCOVERED:
        return condition
    for pattern, words in ((_GRADIENT, _gradient_words), (_KEYS, _keys_words), (_TYPE, _type_words),
                           (_MISMATCH, _mismatch_words)):
        mismatch = pattern.match(condition)
        if mismatch:
            return words(*mismatch.groups())  # type: ignore[operator]
    if condition.startswith("GLOBAL_STATE changed:"):
        names = condition.split(":", 1)[1].split()
        return "; ".join(_mode_words(name) for name in names)
    local = _LOCAL.match(condition)
    if local and local.group(1) in values:
        return f"{local.group(1)} was {local.group(3)}, now {_value_words(values[local.group(1)])}"
    return f"{source_words(condition)} does not hold{_found(condition, values)}{_code(part)}"


def _gradient_words(source: str, expected: str) -> str:
    wanted, now = ("a", "no") if expected in ("1", "True") else ("no", "a")
    return f"{source_words(source)} needed {wanted} gradient, now it needs {now} gradient"


def _keys_words(source: str, expected: str, actual: str) -> str:
    name, counted = source_words(source), [("ADInplaceOrView" in keys) for keys in (expected, actual)]
    if counted[0] != counted[1]:
        return f"{name} was made {'outside' if counted[0] else 'inside'} of torch.inference_mode, now " \
               f"{'outside' if counted[1] else 'inside'}"
    if ("Autograd" in expected) != ("Autograd" in actual):
        return "torch.inference_mode was switched on or off"
    return f"{name} was a tensor of another kind ({expected}; now {actual})"


def _type_words(source: str, found: str) -> str:
    return f"{source_words(source)} was a tensor of another type, now a {found}"


def _mismatch_words(source: str, what: str, index: str | None, expected: str, actual: str) -> str:
    name = source_words(source)
    if what == "rank":
        return f"{name} had {expected} dims, now {actual}"
    if what == "size":
        return f"dim {index} of {name} was {expected}, now {actual}"
    if what == "stride":
        return f"stride {index} of {name} was {expected}, now {actual}"
    if what == "dtype":
        return f"{name} was {expected}, now {actual}"
    return f"{name}: {what} was {expected}, now {actual}"


def _mode_words(name: str) -> str:
    if name.startswith("autocast"):
        return f"autocast changed ({name.partition('_')[0]})"
    return _MODES.get(name, f"a global setting of PyTorch changed: {name}")


def fixed_at(parts: Sequence[str], lines: Mapping[str, str]) -> str:
    """The user's line, among `lines`, that made a program take as a number the size by which it misses the call."""
    for part in parts:
        mismatch = _MISMATCH.match(part.partition("  #")[0].strip())
        if mismatch and mismatch.group(2) == "size":
            line = lines.get(f"{mismatch.group(1)}.size()[{mismatch.group(3)}]")
            return f" ({line})" if line else ""
    return ""


def _found(condition: str, values: Mapping[str, Any]) -> str:
    """The sizes that the condition speaks of, as they are now."""
    found: dict[str, int] = {}
    for name, dim in re.findall(r"L\['(\w+)'\]\.size\(\)\[(\d+)\]", condition):
        value = values.get(name)
        if isinstance(value, torch.Tensor) and int(dim) < value.dim():
            found[f"dim {dim} of {name}"] = value.shape[int(dim)]
    for index, dim in re.findall(r"L\['args'\]\[(\d+)\]\.size\(\)\[(\d+)\]", condition):
        arguments = values.get("args", ())
        if int(index) < len(arguments) and isinstance(arguments[int(index)], torch.Tensor):
            found[f"dim {dim} of input {index}"] = arguments[int(index)].shape[int(dim)]
    if not found:
        return ""
    return ": " + ", ".join(f"{place} is {size}" for place, size in found.items())


def _code(part: str) -> str:
    """The user's line that asked, which is the last one named."""
    lines = _CODE.findall(part.split("  #", 1)[1] if "  #" in part else "")
    found = re.findall(r"([^#]*?)\s*#\s*(\S+:\d+) in ", part.partition("  #")[2])
    if not found and not lines:
        return ""
    code, place = (found or lines)[-1]
    code = code.rsplit(") and ", 1)[-1].strip()
    return f" ({place}: {code})" if code else f" ({place})"


def _value_words(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "a tensor"
    text = repr(value)
    return text if len(text) <= 40 else f"a {type(value).__name__}"
