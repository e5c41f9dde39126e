"""Programs for the tests of deployment: a small encoder with free batch and length, saved; files that are changed."""
from __future__ import annotations

import hashlib
import json
import random
import re
import struct
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import anyshape
from anyshape.artifact.format import container

SHAPES = ((3, 7), (2, 2), (2, 33), (5, 64), (2, 150))


class Encoder(nn.Module):
    """Embedding, layer norm, MLP, attention by hand, softmax."""

    def __init__(self, width: int = 32, words: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.out = nn.Linear(width, words)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x + self.down(nn.functional.gelu(self.up(self.first(x))))
        q = self.second(x)
        weights = torch.softmax(q @ q.transpose(1, 2) / 8.0, -1)
        return torch.softmax(self.out(weights @ q), -1)


def ids(*shape: int, words: int = 50) -> torch.Tensor:
    return torch.randint(0, words, shape, generator=torch.Generator().manual_seed(sum(shape)))


def exported(model: nn.Module, *inputs: torch.Tensor, dims: int = 2) -> torch.export.ExportedProgram:
    """The model with the first dims of every input free."""
    free = {dim: torch.export.Dim.DYNAMIC for dim in range(dims)}
    return torch.export.export(model.eval(), inputs, dynamic_shapes=tuple(free for _ in inputs))


def saved(folder: Path, model: nn.Module, *inputs: torch.Tensor, dims: int = 2, tested: bool = False) -> Path:
    """A file of the model; tested: with the inputs as a test vector."""
    compiled = anyshape.compile(exported(model, *inputs, dims=dims))
    return anyshape.save(compiled, folder / "model.any", tests=[inputs] if tested else ())


def alone(code: str, *arguments: object, blocked: tuple[str, ...] = ("torch", "llvmlite")) -> str:
    """What a process prints in which the packages `blocked` are not installed."""
    guard = f"""
        import sys
        from importlib.machinery import PathFinder
        class Installed(PathFinder):
            @classmethod
            def find_spec(cls, name, path=None, target=None):
                return None if name.partition(".")[0] in {blocked!r} else super().find_spec(name, path, target)
        sys.meta_path[sys.meta_path.index(PathFinder)] = Installed
        """
    text = textwrap.dedent(guard) + textwrap.dedent(code)
    command = [sys.executable, "-c", text, *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


def members_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist()}


def with_members(path: Path, members: dict[str, bytes], digests: bool = True) -> Path:
    """A file with these members, and, where `digests`, with their digests."""
    if digests:
        try:
            head = json.loads(members["format.json"])
            head["digests"] = {name: hashlib.sha256(data).hexdigest() for name, data in members.items()
                               if name != "format.json"}
            members = {**members, "format.json": json.dumps(head).encode()}
        except (ValueError, TypeError, KeyError):
            pass
    container.write(path, members)
    return path


TOKENS = ("(", ")", "[", "]", "b", "s0", "*", "//", "-1", "9" * 30, "0", "4*", "f64", "i64", "max(", "where", "\n",
          "strides", "return", "None", "{", "}", '"', "bool", ",", "2**64", "16", "->", "&", "arena", "steps")


def changed_text(text: bytes, draw: random.Random) -> bytes:
    """A text with some change of those that people and machines make."""
    lines = text.split(b"\n")
    at = draw.randrange(len(lines))
    way = draw.randrange(7)
    if way == 0:
        del lines[at]
    elif way == 1:
        lines.insert(at, lines[draw.randrange(len(lines))])
    elif way == 2:
        words = re.split(rb"(\W)", lines[at])
        words[draw.randrange(len(words))] = draw.choice(TOKENS).encode()
        lines[at] = b"".join(words)
    elif way == 3:
        lines[at] = re.sub(rb"\d+", lambda _: str(draw.choice((0, 1, 7, 2**31, 2**63, 10**40))).encode(), lines[at])
    elif way == 4:
        cut = draw.randrange(len(lines[at]) + 1)
        lines[at] = lines[at][:cut] + draw.choice(TOKENS).encode() * draw.choice((1, 2, 300)) + lines[at][cut:]
    elif way == 5:
        other = draw.randrange(len(lines))
        lines[at], lines[other] = lines[other], lines[at]
    else:
        lines[at] = bytes(draw.randrange(256) for _ in range(draw.randrange(40)))
    return b"\n".join(lines)


def changed_bytes(data: bytes, draw: random.Random) -> bytes:
    """Bytes of which some are others, are missing, or are there twice."""
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8, 64))):
        way = draw.randrange(5)
        at = draw.randrange(len(found)) if found else 0
        if way < 2 and found:
            found[at] = draw.choice((0, 1, 127, 128, 255, draw.randrange(256)))
        elif way == 2 and len(found) > 8:
            struct.pack_into("<Q", found, draw.randrange(len(found) - 8),
                             draw.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, len(found))))
        elif way == 3:
            del found[at:at + draw.choice((1, 4, 64, 4096))]
        else:
            found[at:at] = found[at:at + draw.choice((1, 4, 64, 4096))]
    return bytes(found)


def mutants(path: Path, folder: Path, count: int, seed: int) -> Iterator[tuple[str, Path]]:
    """Changed files, each with what was changed: the file itself, or one member, with right digests."""
    draw = random.Random(seed)
    whole, members = path.read_bytes(), members_of(path)
    place = folder / "changed.any"
    names = sorted(members)
    for number in range(count):
        if draw.randrange(3) == 0:
            place.write_bytes(changed_bytes(whole, draw))
            yield f"{number}: the file", place
            continue
        name = draw.choice(names)
        own = dict(members)
        change = changed_text if name.endswith((".txt", ".json")) and draw.randrange(4) else changed_bytes
        for _ in range(draw.choice((1, 1, 3))):
            own[name] = change(own[name], draw) or b"\n"
        yield f"{number}: {name}", with_members(place, own)
