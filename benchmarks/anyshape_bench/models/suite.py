"""The suite as data: what is measured, at which shapes, in which order. Needs no torch, so listing it is instant."""
from __future__ import annotations

import math
import random
from dataclasses import dataclass

from anyshape.base.errors import ConfigError

Shape = tuple[int, ...]

FULL_SHAPES = 40
QUICK_SHAPES = 8
WARM_UP_CALLS = 2
TRIES = 20  # draws until a shape is not a corner; a small box may have nothing else
BACKENDS = ("eager", "inductor", "anyshape")
PADDED = "inductor-padded"  # models/padding.py
AUTOCAST = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the suite.

    Attributes:
        name: what the user types.
        summary: one line for `--list` and for the document.
        dims: the names of a shape's numbers.
        trains: a step is forward, backward and update; otherwise forward without gradients.
        shapes: every shape of the full run, first the two of the warm-up calls.
        apart: shapes with a size of 1 that the ranges do not have, run once after the others: a backend may compile
            again for them.
        repeats: passes over all shapes when repeated shapes are measured, in one process.
        in_default: measured when no name is given.
        calls: random shapes that are run under six limits each, where no other number is asked for; the fewer, the
            longer a step takes.
    """

    name: str
    summary: str
    dims: tuple[str, ...]
    trains: bool
    shapes: tuple[Shape, ...]
    repeats: int = 2
    in_default: bool = True
    apart: tuple[Shape, ...] = ()
    calls: int = 6


def primes(low: int, high: int) -> list[int]:
    """The primes p with low <= p <= high."""
    return [n for n in range(max(low, 2), high + 1) if all(n % d for d in range(2, int(n**0.5) + 1))]


def spread(ranges: tuple[tuple[int, int], ...], seed: str, number: int = FULL_SHAPES) -> tuple[Shape, ...]:
    """Picks `number` different shapes from a box of inclusive ranges, the same ones each time; all, if it has fewer.

    The first two are ordinary (where the ranges allow it no size is 1 or an end), for the warm-up calls. The third is
    the least of every size and the last the greatest. Between them lie each size at its least and at its greatest
    alone, shapes of primes, and random ones.
    """
    draw = random.Random(seed)
    middle = tuple((low + high) // 2 for low, high in ranges)
    second = tuple(max(low, min(high - 1, size + 1 + draw.randrange(max(1, (high - low) // 4)))) for size, (low, high)
                   in zip(middle, ranges, strict=True))
    least = tuple(low for low, _ in ranges)
    greatest = tuple(high for _, high in ranges)
    chosen = dict.fromkeys([middle, second, least])
    for i, (low, high) in enumerate(ranges):
        for end in (low, high):
            for _ in range(TRIES):
                shape = tuple(end if i == j else _any(draw, *ranges[j]) for j in range(len(ranges)))
                if shape not in (least, greatest):
                    break
            chosen[shape] = None
    chosen.pop(greatest, None)
    room = math.prod(high - low + 1 for low, high in ranges)
    turn = len(chosen)
    while len(chosen) < min(number, room) - 1:
        of_primes = turn % 3 == 0
        turn += 1
        shape = tuple(_prime(draw, *bounds) if of_primes else _any(draw, *bounds) for bounds in ranges)
        if shape != greatest:
            chosen[shape] = None
    return (*chosen, greatest)


def with_one(ranges: tuple[tuple[int, int], ...], seed: str, places: tuple[int, ...]) -> tuple[Shape, ...]:
    """A shape for each of `places`, with a size of 1 there, which its range does not have."""
    draw = random.Random(f"{seed} ones")
    return tuple(tuple(1 if i == j else _any(draw, *bounds) for j, bounds in enumerate(ranges)) for i in places)


def _any(draw: random.Random, low: int, high: int) -> int:
    return draw.randint(low, high)


def _prime(draw: random.Random, low: int, high: int) -> int:
    return draw.choice(primes(low, high) or [low])


def growing(low: int, high: int, warm_up: tuple[int, int], number: int = FULL_SHAPES) -> tuple[Shape, ...]:
    """One size that grows from `low` to `high` over `number` - 2 calls, after two warm-up calls inside the range."""
    steps = number - len(warm_up)
    ratio = (high / low) ** (1 / (steps - 1))
    sizes: list[int] = []
    for i in range(steps):
        wanted = round(low * ratio**i)
        size = max(wanted, sizes[-1] + 1) if sizes else low
        while size in warm_up:
            size += 1
        sizes.append(size)
    sizes[-1] = high
    return tuple((size,) for size in (*warm_up, *sizes))


def pick(shapes: tuple[Shape, ...], number: int) -> tuple[Shape, ...]:
    """A shorter list in the same order: the two warm-up shapes, the least and the greatest of the rest, one of primes,
    one with a size of 1, and others evenly."""
    if number >= len(shapes):
        return shapes
    if number <= WARM_UP_CALLS:
        return shapes[:max(1, number)]
    rest = shapes[WARM_UP_CALLS:]
    wanted = number - WARM_UP_CALLS
    last = len(rest) - 1
    special = [next((i for i, shape in enumerate(rest) if holds(shape)), 0) for holds in (of_primes, has_one)]
    evenly = [round(i * last / max(1, wanted - 1)) for i in range(wanted)]
    places = list(dict.fromkeys([0, last, *special, *evenly, *range(len(rest))]))[:wanted]
    return shapes[:WARM_UP_CALLS] + tuple(rest[place] for place in sorted(places))


def of_primes(shape: Shape) -> bool:
    """Whether every size is a prime."""
    return all(primes(size, size) for size in shape)


def has_one(shape: Shape) -> bool:
    """Whether some size is 1."""
    return 1 in shape


def said_of(shapes: tuple[Shape, ...]) -> str:
    """How many shapes, and which kinds of sizes are among them."""
    kinds = [name for name, holds in (("1", has_one), ("primes", of_primes)) if any(map(holds, shapes))]
    kinds += ["the least and the greatest"] if len(shapes) > WARM_UP_CALLS + 1 else []
    count = f"{len(shapes)} shape{'s' if len(shapes) > 1 else ''}"
    return f"{count}, with sizes of {', '.join(kinds)}" if kinds and len(shapes) > 1 else count


SUITE: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            "llama", "transformers LlamaForCausalLM, hidden 512, 4 layers, vocabulary 8192; train step with AdamW",
            ("batch", "length"), True, spread(((2, 6), (48, 256)), "llama"),
            apart=with_one(((2, 6), (48, 256)), "llama", (0,)), repeats=1,
        ),
        Entry(
            "bert", "transformers BertModel, hidden 512, 6 layers; inference",
            ("batch", "length"), False, spread(((1, 8), (16, 320)), "bert"),
            apart=with_one(((1, 8), (16, 320)), "bert", (1,)),
        ),
        Entry(
            "gpt2-decode", "GPT-2 blocks, hidden 512, 6 layers; one token over a growing key/value cache",
            ("past",), False, growing(1, 400, (16, 23)), repeats=5,
        ),
        Entry(
            "resnet", "ResNet-18, 1000 classes; inference",
            ("batch", "height", "width"), False, spread(((1, 4), (96, 320), (96, 320)), "resnet"),
            apart=with_one(((1, 4), (96, 320), (96, 320)), "resnet", (1, 2)),
        ),
        Entry(
            "mlp", "three-layer perceptron, width 64, batch 1; inference, call overhead",
            ("batch",), False, ((1,),), repeats=3000,
        ),
        Entry(
            "vit", "vision transformer, patch 16, hidden 256, 6 layers; inference",
            ("batch", "height", "width"), False, spread(((1, 4), (64, 256), (64, 256)), "vit"),
        ),
        Entry(
            "conformer", "Conformer speech encoder, width 256, 6 layers; inference",
            ("batch", "frames"), False, spread(((1, 4), (64, 1000)), "conformer"),
            apart=with_one(((1, 4), (64, 1000)), "conformer", (1,)),
        ),
        Entry(
            "t5", "transformers T5ForConditionalGeneration, width 384, 4 + 4 layers; inference",
            ("batch", "source", "target"), False, spread(((1, 4), (16, 256), (8, 128)), "t5"),
            apart=with_one(((1, 4), (16, 256), (8, 128)), "t5", (1, 2)),
        ),
        Entry(
            "dlrm", "DLRM ranking model, 26 tables of embedding bags, width 64; inference",
            ("batch", "bag"), False, spread(((1, 2048), (1, 12)), "dlrm"),
        ),
        Entry(
            "mixtral", "transformers MixtralForCausalLM, hidden 256, 4 layers, 2 of 8 experts; inference",
            ("batch", "length"), False, spread(((1, 4), (16, 256)), "mixtral"),
            apart=with_one(((1, 4), (16, 256)), "mixtral", (1,)),
        ),
        Entry(
            "llama-12", "the same as llama with 12 layers; train step with AdamW",
            ("batch", "length"), True, spread(((1, 4), (48, 256)), "llama-12"), repeats=1, in_default=False,
        ),
        Entry(
            "t5-train", "the same as t5; train step with AdamW",
            ("batch", "source", "target"), True, spread(((1, 4), (16, 256), (8, 128)), "t5-train"), in_default=False,
        ),
        Entry(
            "bert-train", "transformers BertForMaskedLM, sizes as bert, without dropout; train step with AdamW",
            ("batch", "length"), True, spread(((2, 6), (48, 256)), "bert-train"),
            apart=with_one(((2, 6), (48, 256)), "bert-train", (0,)), repeats=1, in_default=False,
        ),
        Entry(
            "vit-train", "the same as vit; train step with AdamW",
            ("batch", "height", "width"), True, spread(((2, 8), (64, 256), (64, 256)), "vit-train"),
            apart=with_one(((2, 8), (64, 256), (64, 256)), "vit-train", (0,)), repeats=1, in_default=False,
        ),
        Entry(
            "unet", "U-Net of four levels with skip connections, 16 to 128 channels; train step with AdamW",
            ("batch", "height", "width"), True, spread(((1, 4), (32, 160), (32, 160)), "unet"), in_default=False,
        ),
        Entry(
            "demo-llama", "transformers LlamaForCausalLM, hidden 64, 2 layers, vocabulary 256; train step with AdamW",
            ("batch", "length"), True, spread(((1, 4), (2, 96)), "demo-llama"), in_default=False, calls=200,
        ),
        Entry(
            "llama-small", "transformers LlamaForCausalLM, hidden 128, 6 layers, vocabulary 512; train step with AdamW",
            ("batch", "length"), True, spread(((1, 6), (32, 224)), "llama-small"), in_default=False, calls=200,
        ),
        Entry(
            "llama-32", "transformers LlamaForCausalLM, hidden 64, 32 layers, vocabulary 256; train step with AdamW",
            ("batch", "length"), True, spread(((1, 4), (16, 256)), "llama-32"), repeats=1, in_default=False, calls=20,
        ),
        Entry(
            "llama-1b-like", "Llama-2-7B with 4 layers, half as wide (hidden 2048, vocabulary 16000); train step with "
            "AdamW", ("batch", "length"), True, spread(((1, 4), (32, 512)), "llama-1b-like"), repeats=1,
            in_default=False, calls=1,
        ),
    )
}


def default_names(quick: bool) -> tuple[str, ...]:
    """The entries measured when none is named: all of the suite, or with `quick` the two smallest."""
    if quick:
        return ("demo-llama", "mlp")
    return tuple(name for name, entry in SUITE.items() if entry.in_default)


def check_name(name: str) -> None:
    """Accepts a name of the suite, `module:function` or `path.py:function`.

    Raises:
        ConfigError: the name is neither.
    """
    if name in SUITE or (name.count(":") == 1 and all(name.split(":"))):
        return
    raise ConfigError(
        f"no benchmark is called {name!r}",
        why=f"the suite has {', '.join(SUITE)}",
        do="name one of these, or module:function or path.py:function for a model of your own",
    )


def named_backends(text: str | None, default: tuple[str, ...]) -> tuple[str, ...]:
    """The backends of a list with commas, each once; where none is given, `default`.

    Raises:
        ConfigError: the list is empty.
    """
    found = default if text is None else tuple(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))
    if not found:
        raise ConfigError("no backend to measure", do=f"give --backends {','.join(default)}")
    return found
