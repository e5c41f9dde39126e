"""`anyshape strategy MODEL`: searches a strategy for many devices, prints it, and writes a page and a trace.

    anyshape strategy llama-7b --world 128 --machine a100x8:800Gb --batch 256 --length 2048
    anyshape strategy net.py:make --world 8 --memory-limit 38GiB --out strategy.html

No device is needed, and nothing of the model is computed.
"""
from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import anyshape
from anyshape.base.errors import ConfigError
from anyshape.tools.resolve_target import call, find

# name: hidden, inner, layers, heads, key heads, vocabulary
LLAMAS = {"llama-1b": (2048, 8192, 16, 32, 8, 128256), "llama-7b": (4096, 11008, 32, 32, 32, 32000),
          "llama-8b": (4096, 14336, 32, 32, 8, 128256), "llama-13b": (5120, 13824, 40, 40, 40, 32000),
          "llama-70b": (8192, 28672, 80, 64, 8, 128256), "llama-405b": (16384, 53248, 126, 128, 8, 128256)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `main` reads."""
    parser.add_argument("model", help=f"one of {', '.join(LLAMAS)} (they need transformers), or your own: "
                        "module:function or path.py:function that returns (model, loss_fn, optimizer, batch)")
    parser.add_argument("--world", type=int, required=True, help="number of devices")
    parser.add_argument("--machine", default="h100", help="CHIP[xCHIPS A NODE][:GIGABITS A SECOND A NODEGb], such as "
                        "a100x8:800Gb (default %(default)s)")
    parser.add_argument("--memory-limit", default="", metavar="BYTES", help="of a device, such as 38GiB (default: all "
                        "that the chip has)")
    parser.add_argument("--batch", type=int, default=0, help="sequences of all devices together (of a llama; default 2 "
                        "a device)")
    parser.add_argument("--length", type=int, default=4096, help="positions of a sequence (of a llama)")
    parser.add_argument("--lengths", default="", metavar="N,N,..", help="lengths that steps have, where they differ")
    parser.add_argument("--mesh", default="auto", metavar="NAME=N,..", help="fixed axes: data, tensor, context, "
                        "pipe")
    parser.add_argument("--override", action="append", default=[], metavar="LAYERS=WORD", help="fix the placement of "
                        "layers, such as layers.*.mlp=column; may be repeated")
    parser.add_argument("--out", type=Path, help="a page to write (.html)")
    parser.add_argument("--trace", type=Path, help="a trace for Perfetto to write (.json)")


def main(arguments: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        AnyShapeError: an argument is wrong, or no strategy fits.
    """
    model, loss_fn, optimizer, batch = _model(arguments)
    mesh: Any = "auto"
    if arguments.mesh != "auto":
        mesh = {name: _number("--mesh", size) for name, _, size in
                (one.partition("=") for one in arguments.mesh.split(","))}
    lengths = [_number("--lengths", one) for one in arguments.lengths.split(",")] if arguments.lengths else None
    search = anyshape.strategy(model, loss_fn, optimizer, batch, mesh=mesh, world=arguments.world,
                               machine=arguments.machine, memory_limit=arguments.memory_limit or 0, lengths=lengths)
    for one in arguments.override:
        pattern, equal, word = one.rpartition("=")
        if not equal:
            raise ConfigError(f"--override {one!r} is not LAYERS=WORD", do="write for example layers.*.mlp=column")
        search.override(pattern, placement=word)
    print(search)
    for path, write in ((arguments.out, search.report), (arguments.trace, search.trace)):
        if path is not None:
            write(path)
            print(f"Wrote {path}")
    return 0


def _number(what: str, text: str) -> int:
    if not text.strip().isdigit():
        raise ConfigError(f"{what}: {text!r} is no number", do="write --mesh tensor=8 or --lengths 512,2048")
    return int(text)


def _model(arguments: argparse.Namespace) -> tuple[Any, Any, Any, Any]:
    if arguments.model in LLAMAS:
        batch = torch.empty(arguments.batch or 2 * max(arguments.world, 1), arguments.length, dtype=torch.int64,
                            device="meta")
        return llama(*LLAMAS[arguments.model]), loss_of_tokens, None, (batch, batch)
    found = call(arguments.model, find(arguments.model))
    if not isinstance(found, tuple) or len(found) != 4:
        raise ConfigError(f"{arguments.model} does not make a model for a strategy",
                          why="it returns (model, loss_fn, optimizer, batch)", do="return these four")
    return found


def llama(hidden: int, inner: int, layers: int, heads: int, key_heads: int, vocabulary: int) -> torch.nn.Module:
    """A Llama without storage.

    Raises:
        ConfigError: transformers is not installed.
    """
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise ConfigError("the llamas need the package transformers", why="it is not installed",
                          do="pip install anyshape[bench], or give your own module:function") from error
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(  # type: ignore[no-any-return]
            vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=key_heads, use_cache=False, max_position_embeddings=1 << 20))


def loss_of_tokens(model: torch.nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The cross entropy of next tokens."""
    scores = model(tokens, use_cache=False).logits
    return F.cross_entropy(scores.flatten(0, 1).float(), labels.flatten())
