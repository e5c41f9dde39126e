"""Products whose right operand lies in panels, and files whose weights do (artifact/prepack.py)."""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import anyshape
from anyshape.artifact import prepack
from anyshape.base.config import Config
from anyshape.base.errors import VerifyError
from anyshape.compiler.driver import compile_graph
from anyshape.ir.panels import into_panels, panels_of
from anyshape.ir.parse import parse
from anyshape.ir.verify import verify
from deploying import members_of, saved


def product_graph(inner: int, columns: int, batch: str = "", addend: bool = False) -> str:
    panels = ", ".join(map(str, panels_of(inner, columns, "f32")))
    op, more = ("matmul_add", "alpha=1.0, beta=1.0, ") if addend else ("matmul", "")
    return f"""
        graph product(x: f32[{batch}n, {inner}], w: f32[{panels}], c: f32[{batch}n, {columns}])
          y = {op}(x, w{", c" * addend} | {more}columns={columns})  f32[{batch}n, {columns}]
          return y
        """


@pytest.mark.parametrize("inner, columns", [(1, 1), (5, 7), (64, 32), (300, 100), (513, 257)])
def test_products_of_all_numbers_of_rows(inner: int, columns: int) -> None:
    torch.manual_seed(0)
    for batch, addend in (("", False), ("b, ", True)):
        program = compile_graph(parse(product_graph(inner, columns, batch, addend)), Config.make()).executable
        for rows in (0, 1, 3, 8, 9, 13, 28, 50):
            lead = (3, rows) if batch else (rows,)
            x, w, c = torch.randn(*lead, inner), torch.randn(inner, columns), torch.randn(*lead, columns)
            (found,) = program([x, torch.from_numpy(into_panels(w.numpy())), c])
            wanted = x.double() @ w.double() + (c.double() if addend else 0)
            torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


def test_panels_that_do_not_fit_are_refused() -> None:
    for text in (product_graph(64, 100).replace("columns=100", "columns=65"),
                 product_graph(64, 100).replace("64]", "63]"),
                 product_graph(64, 100).replace("w: f32", "w: f64"),
                 product_graph(64, 0).replace("columns=0", "columns=-5").replace("0]\n", "-5]\n")):
        with pytest.raises(VerifyError):
            verify(parse(text))


class Several(nn.Module):
    """Products of one operand; weights that are tied, read in another way too, or too narrow."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 64)
        self.q, self.k, self.narrow, self.plain = (nn.Linear(64, n) for n in (64, 96, 3, 64))
        self.tied = nn.Linear(64, 64)
        self.tied.weight = self.plain.weight
        self.head = nn.Linear(64, 40, bias=False)
        self.head.weight = self.table.weight

    def forward(self, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.table(i) * self.q.weight.sum()
        y = self.tied(torch.relu(self.plain(x)))
        return self.q(x), self.k(x), self.narrow(y), self.head(y)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    torch.manual_seed(0)
    model = Several().eval()
    return model, saved(tmp_path_factory.mktemp("prepacked"), model, torch.zeros(3, 7, dtype=torch.int64))


def test_which_weights_a_file_has_in_panels(file: tuple[nn.Module, Path]) -> None:
    members = members_of(file[1])
    weights = members["weights.safetensors"]
    kinds = json.loads(weights[8:8 + int.from_bytes(weights[:8], "little")])
    ranks = {name: len(one["shape"]) for name, one in kinds.items() if name.endswith("weight")}
    assert ranks == {"table.weight": 2, "q.weight": 2, "k.weight": 4, "narrow.weight": 2, "plain.weight": 4}
    assert members["plan.txt"].count(b"columns=") == 3


@pytest.mark.parametrize("trusted", [True, False])
def test_files_with_panels_give_what_the_model_gives(file: tuple[nn.Module, Path], trusted: bool) -> None:
    model, path = file
    with anyshape.load(path, trust_native=trusted) as run:
        for shape in ((2, 2), (3, 7), (5, 13), (31, 2)):
            i = torch.randint(0, 40, shape)
            with torch.no_grad():
                for found, wanted in zip(run(i), model(i), strict=True):
                    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_convolutions_over_one_element_have_their_weights_in_panels(tmp_path: Path) -> None:
    """Not so those over borders, of groups, over windows, or too narrow."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 96, 1), nn.Conv2d(96, 64, 1, stride=2),
                          nn.Conv2d(64, 64, 1, groups=2), nn.Conv2d(64, 64, 1, padding=1), nn.Conv2d(64, 8, 1)).eval()
    path = saved(tmp_path, model, torch.zeros(3, 3, 7, 9), dims=1)
    weights = members_of(path)["weights.safetensors"]
    kinds = json.loads(weights[8:8 + int.from_bytes(weights[:8], "little")])
    shapes = [kinds[f"{number}.weight"]["shape"] for number in range(6)]
    assert shapes == [[64, 3, 3, 3], [3, 64, 32, 1], [2, 96, 32, 1], [64, 32, 1, 1], [64, 64, 1, 1], [8, 64, 1, 1]]
    for trusted in (True, False):
        with anyshape.load(path, trust_native=trusted) as run:
            for batch in (2, 5):
                x = torch.randn(batch, 3, 7, 9)
                with torch.no_grad():
                    torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_weight_whose_product_cannot_read_panels_stays_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path
                                                                   ) -> None:
    seen = []
    usual = prepack._read_otherwise

    def one_left(plan: object, places: dict[int, bool]) -> set[int]:
        seen.append(sorted(places))
        return usual(plan, places) | (set(seen[0][:1]) if len(seen) == 1 else set())

    monkeypatch.setattr(prepack, "_read_otherwise", one_left)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()
    path = saved(tmp_path, model, torch.zeros(3, 64), dims=1)
    assert len(seen) == 2 and seen[1] == seen[0][1:]
    with anyshape.load(path, trust_native=True) as run:
        x = np.ones((5, 64), np.float32)
        np.testing.assert_allclose(run(x), model(torch.from_numpy(x)).detach().numpy(), rtol=1e-4, atol=1e-5)
