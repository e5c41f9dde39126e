"""What a model of the zoo is."""
from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]
PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)


@dataclass(frozen=True)
class Case:
    """One model.

    Args:
        name: for test ids.
        build: makes the model; called after seeding.
        inputs: the inputs at a shape, from a generator.
        ranges: the least and the largest size per symbolic dimension.
        programs: most captured graphs allowed over all shapes.
        step: sizes are multiples of it, per dimension; 1 when left out.
        zero: a size of 0 in the first dimension is tried too.
        half: bfloat16 is tried too.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[Shape, torch.Generator], tuple[Tensor, ...]]
    ranges: tuple[tuple[int, int], ...]
    programs: int = 1
    step: Shape = ()
    zero: bool = True
    half: bool = True

    def shapes(self, count: int) -> list[Shape]:
        """`count` different shapes: the ends of the ranges, prime sizes, then random ones; the same each time."""
        draw = random.Random(self.name)
        steps = self.step or (1,) * len(self.ranges)
        lows, highs = [low for low, _ in self.ranges], [high for _, high in self.ranges]
        primes = [max(p for p in PRIMES if p <= max(high // s, 2)) * s for high, s in zip(highs, steps, strict=True)]
        known = [tuple(primes), tuple(lows), tuple(highs)]
        for d in range(len(lows)):
            known.append(tuple(low if k == d else p for k, (low, p) in enumerate(zip(lows, primes, strict=True))))
        if self.zero:
            known.insert(2, (0, *primes[1:]))
        found = dict.fromkeys(known)
        for _ in range(50 * count):
            if len(found) >= count:
                break
            found[tuple(draw.randint(low // s, high // s) * s
                        for low, high, s in zip(lows, highs, steps, strict=True))] = None
        return list(found)[:count]

    def make_inputs(self, shape: Shape) -> tuple[Tensor, ...]:
        """The inputs at a shape, the same each time."""
        return self.inputs(shape, torch.Generator().manual_seed(sum(17**k * n for k, n in enumerate(shape))))


def tokens(shape: Shape, vocabulary: int, draw: torch.Generator) -> Tensor:
    return torch.randint(vocabulary, shape, generator=draw)


def normal(shape: Shape, draw: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=draw)
