"""`anyshape explain TARGET`: compiles a program and says what was decided.

    anyshape explain model.pt2                      an exported program (torch.export.save)
    anyshape explain package.module:function        a function that returns (model, inputs) or (model, [inputs, ...])
    anyshape explain path.py:function
"""
from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import anyshape
from anyshape.base.errors import ConfigError
from anyshape.tools.resolve_target import call, find


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `main` reads."""
    parser.add_argument("target", help="a .pt2 file, or module:function or path.py:function that returns "
                        "(model, inputs)")
    parser.add_argument("--size", action="append", default=[], metavar="NAME=N",
                        help="give a size, so that formulas stand in bytes too; may be repeated")
    parser.add_argument("--train", action="store_true", help="also run the backward of the summed first result")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def main(arguments: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        ConfigError: the target cannot be loaded, or a size is not NAME=N.
    """
    sizes = dict(_size(text) for text in arguments.size)
    target, calls = load(arguments.target)
    fast = anyshape.compile(target)
    for inputs in calls:
        with torch.set_grad_enabled(arguments.train):
            results = fast(*inputs)
        if arguments.train:
            _first_tensor(results).sum().backward()
    explanation = fast.explain(**sizes)
    if arguments.json:
        print(json.dumps(explanation.to_dict(), indent=2))
    else:
        Console().print(explanation)
    return 0


def _size(text: str) -> tuple[str, int]:
    name, equal, value = text.partition("=")
    if not equal or not value.strip().isdigit():
        raise ConfigError(f"--size {text!r} is not NAME=N", do="write for example --size x_0=8")
    return name.strip(), int(value)


def load(target: str) -> tuple[Any, list[tuple[Any, ...]]]:
    """The program and the calls to make of it.

    Raises:
        ConfigError: there is no such file, module or function, or it returns something else.
    """
    if target.endswith(".pt2"):
        if not Path(target).is_file():
            raise ConfigError(f"there is no file {target}", do="give a file that torch.export.save wrote")
        program = torch.export.load(target)
        arguments, keywords = program.example_inputs or ((), {})
        if keywords:
            raise ConfigError(f"{target} takes keyword arguments", do="export it with positional ones")
        return program, [tuple(arguments)]
    if ":" not in target:
        raise ConfigError(f"{target!r} is neither a .pt2 file nor module:function", do="write for example net:make")
    maker = find(target)
    if not _takes_nothing(maker):
        raise ConfigError(f"{target} is no function without arguments", why="it is called for the program to explain",
                          do="name a function that returns the module or function, and the tuple of inputs of a call")
    made = call(target, maker)
    if not isinstance(made, tuple) or len(made) != 2 or not callable(made[0]):
        raise ConfigError(f"{target} does not return (model, inputs)", why=f"it returned a {type(made).__name__}",
                          do="return the module or function, and the tuple of inputs of a call")
    model, inputs = made
    return model, [tuple(call) for call in inputs] if isinstance(inputs, list) else [_call(inputs)]


def _takes_nothing(maker: Any) -> bool:
    if not callable(maker) or isinstance(maker, torch.nn.Module):
        return False
    try:
        inspect.signature(maker).bind()
    except (TypeError, ValueError):
        return False
    return True


def _call(inputs: Any) -> tuple[Any, ...]:
    return tuple(inputs) if isinstance(inputs, tuple) else (inputs,)


def _first_tensor(results: Any) -> torch.Tensor:
    if isinstance(results, torch.Tensor):
        return results
    values = results.values() if isinstance(results, dict) else results
    found = next((value for value in values if isinstance(value, torch.Tensor) and value.requires_grad), None) \
        if isinstance(values, Sequence) or isinstance(results, dict) else None
    if found is None:
        raise ConfigError("the program returns no tensor that has a gradient", do="leave --train out")
    return found
