"""A model of PyTorch, saved to one file and run by a process that has numpy and nothing else.

    python examples/deploy_numpy.py

The second process cannot import torch, nor a compiler: it maps the file and calls it at sizes that nobody has compiled
for.
"""
from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

import anyshape


class Tagger(nn.Module):
    """A tag for each token: embedding, attention over the sentence, a linear layer. ids i64[batch, length]."""

    def __init__(self, words: int = 200, width: int = 64, tags: int = 7) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(words, width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, tags)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        weights = torch.softmax(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5, -1)
        return torch.log_softmax(self.out(x + weights @ v), -1)


CLIENT = """
import sys
sys.modules["torch"] = sys.modules["llvmlite"] = None   # importing them would fail
import numpy as np, anyshape

with anyshape.load(sys.argv[1], trust_native=True) as tag, np.load(sys.argv[2]) as data:
    for name in data.files:
        np.save(sys.argv[3] + name, tag(data[name]))
"""


def main(folder: str = "") -> int:
    """Saves the model, runs it in the other process, and compares; 0: the same at all sizes."""
    torch.manual_seed(0)
    model = Tagger().eval()
    free = torch.export.Dim.DYNAMIC
    exported = torch.export.export(model, (torch.zeros(2, 9, dtype=torch.int64),), dynamic_shapes=({0: free, 1: free},))
    with tempfile.TemporaryDirectory() as own:
        place = Path(folder or own)
        file = anyshape.save(anyshape.compile(exported), place / "tagger.any")
        print(f"{file.name}: {file.stat().st_size / 1024:.0f} kB")
        draw = np.random.default_rng(0)
        data = {f"{batch}x{length}": draw.integers(0, 200, (batch, length))
                for batch, length in ((2, 5), (4, 31), (3, 160))}
        np.savez(place / "data.npz", **data)
        code = [sys.executable, "-c", CLIENT, str(file), str(place / "data.npz"), f"{place}/"]
        subprocess.run(code, check=True, timeout=120)
        for name, ids in data.items():
            with torch.no_grad():
                wanted = model(torch.from_numpy(ids)).numpy()
            difference = np.abs(np.load(place / f"{name}.npy") - wanted).max()
            print(f"{name}: differs from PyTorch by {difference:.1e} at most")
            if not difference < 1e-4:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
