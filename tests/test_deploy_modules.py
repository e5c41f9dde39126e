"""Modules of PyTorch in files to deploy: **keywords, named results, recurrent networks, operators by numpy."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import anyshape
from anyshape.base.errors import InputError

free = torch.export.Dim.DYNAMIC


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arguments: torch.Tensor) -> Any:
        return self.function(*arguments)


def same(module: nn.Module, calls: Sequence[Any], path: Path, trusts: Sequence[bool] = (True,)) -> list[Any]:
    """Saves what two calls made of the module, and compares all calls of the file with the module's."""
    module.eval()
    compiled = anyshape.compile(module)

    def call(function: Callable[..., Any], given: Any) -> Any:
        return function(**given) if isinstance(given, dict) else function(*given)

    with torch.no_grad():
        for given in calls[:2]:
            call(compiled, given)
        anyshape.save(compiled, path)
        results = []
        for trust in trusts:
            with anyshape.load(path, trust_native=trust) as run:
                for given in calls:
                    results.append(call(run, given))
                    torch.testing.assert_close(results[-1], call(module, given), rtol=1e-4, atol=1e-5)
    return results


class Keywords(nn.Module):
    """Takes names that its signature has not."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, *more: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        return self.up(x) + named["shift"] + sum(more) + named["other"].sum(0)


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def test_keywords_without_names_are_arguments(tmp_path: Path) -> None:
    draw = torch.randn
    calls = [{"x": draw(n, 4), "shift": draw(n, 3), "other": draw(m, 3)} for n, m in ((3, 5), (4, 7), (2, 9))]
    same(Keywords(), calls, tmp_path / "model.any", (True, False))
    weights = anyshape.load(tmp_path / "model.any", trust_native=True)
    with pytest.raises(anyshape.AnyShapeError, match="arguments"):
        weights(torch.ones(2, 4))
    weights.close()


def test_named_results_are_tuples(tmp_path: Path) -> None:
    function = Function(lambda x: (torch.topk(x, 2, -1), x.max(0), Pair(x + 1, x * 2)))
    found = same(function, [(torch.randn(3, 7),), (torch.randn(5, 4),)], tmp_path / "model.any")
    assert [type(one) for one in found[0]] == [tuple] * 3


@pytest.mark.parametrize("make", [
    lambda: nn.LSTM(5, 6, 2, bidirectional=True, batch_first=True), lambda: nn.GRU(5, 6),
    lambda: nn.RNN(5, 6, bias=False)])
def test_recurrent_networks(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    same(make(), [(torch.randn(3, 7, 5),), (torch.randn(4, 9, 5),), (torch.randn(2, 2, 5),)], tmp_path / "model.any")


def test_a_network_with_projections_is_left_to_pytorch(tmp_path: Path) -> None:
    module = nn.LSTM(5, 6, proj_size=2).eval()
    compiled = anyshape.compile(torch.export.export(module, (torch.randn(3, 7, 5),)))
    x = torch.randn(3, 7, 5)
    torch.testing.assert_close(compiled(x), module(x))
    with pytest.raises(anyshape.AnyShapeError, match="cannot be deployed"):
        anyshape.save(compiled, tmp_path / "model.any")


def test_operators_by_numpy(tmp_path: Path) -> None:
    """Steps that have no native routine, in one file: images, searches, distances, conditions of data."""
    functional = nn.functional

    def every(x: torch.Tensor, i: torch.Tensor) -> list[torch.Tensor]:
        image = x.reshape(2, 1, -1, 4)
        return [functional.interpolate(image, scale_factor=2.0, mode="bilinear"), torch.cdist(x, x), x.median(),
                functional.interpolate(image, size=(3, 5), mode="nearest"), functional.one_hot(i, 9),
                functional.grid_sample(image, x[:6].reshape(2, 3, 2, 2), align_corners=False),
                torch.searchsorted(x.sort(-1)[0], x)]

    def given(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(n, 4), torch.randint(0, 9, (n,))

    path = tmp_path / "model.any"
    same(Function(every), [given(8), given(6), given(12)], path)
    with anyshape.load(path, trust_native=True) as run, pytest.raises(anyshape.AnyShapeError, match="smaller than"):
        run(torch.randn(6, 4), torch.full((6,), 9))


def test_results_with_gaps_between_their_elements(tmp_path: Path) -> None:
    """A row of a product, as the first token of a sentence; two results in one piece of memory."""
    torch.manual_seed(0)
    project = nn.Linear(4, 6)
    function = Function(lambda x: (project(x)[:, 0], torch.relu(x).chunk(2, -1), (x + 1)[..., ::3]))
    found = same(function, [(torch.randn(3, 5, 4),), (torch.randn(2, 7, 4),), (torch.randn(2, 2, 4),)],
                 tmp_path / "model.any", (True, False))
    assert found[0][0].stride() == (30, 1)


def test_fourier_transforms_and_complex_weights(tmp_path: Path) -> None:
    class Rotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)))

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            turned = torch.view_as_complex(x[..., :6].reshape(x.shape[0], -1, 2)) * self.turns
            spectrum = torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2, norm="ortho")
            window = torch.hann_window(8)
            frames = torch.stft(x, 8, 4, window=window, return_complex=True)
            back = torch.istft(frames * 2j, 8, 4, window=window)
            return [torch.view_as_real(turned), spectrum.real, torch.fft.fftshift(spectrum).imag, frames.abs(), back,
                    (frames.conj() + 1).abs(), torch.fft.irfft(torch.fft.rfft(x), n=7)]

    torch.manual_seed(0)
    same(Rotated(), [(torch.randn(3, 20),), (torch.randn(2, 24),), (torch.randn(4, 28),)], tmp_path / "model.any",
         (True, False))


def test_linear_algebra_and_its_checks(tmp_path: Path) -> None:
    """Checks of matrices come with tokens of effects from torch.export."""
    def every(x: torch.Tensor) -> list[torch.Tensor]:
        whole = x @ x.mT + torch.eye(x.shape[-1])
        factor = torch.linalg.cholesky(whole)
        return [torch.linalg.inv(x), torch.linalg.solve(x, x[..., 0]), torch.logdet(whole), factor,
                torch.cholesky_solve(x, factor), torch.linalg.eigvalsh(whole), torch.linalg.matrix_norm(x, "nuc")]

    torch.manual_seed(0)
    path = tmp_path / "model.any"
    same(Function(every), [(torch.randn(2, 5, 5),), (torch.randn(3, 4, 4),)], path)
    with anyshape.load(path, trust_native=True) as run, \
            pytest.raises(anyshape.AnyShapeError, match=r"singular.*element 2.*batch element 1"):
        run(torch.stack([torch.eye(4), torch.tensor([1.0, 0, 1, 1]).diag()]))


class Behind(nn.Module):
    """Layers behind transposed operands, of which torch asks whether they are contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(4, 5, batch_first=True)
        self.up = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        found = self.up(self.recurrent(x)[0].transpose(0, 1).contiguous().transpose(0, 1))
        return found, found.new_zeros(found.shape).scatter_add_(1, y[:, :, :3].long(), found)


def test_layers_behind_transposed_operands_take_small_sizes(tmp_path: Path) -> None:
    calls = [(torch.randn(n, m, 4), torch.zeros(n, m, 4)) for n, m in ((2, 7), (3, 5), (1, 3), (3, 1), (1, 1), (0, 3))]
    same(Behind(), calls, tmp_path / "model.any")


def test_attention_over_a_batch_of_1(tmp_path: Path) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
            return self.attention(x, x, x, key_padding_mask=mask)[0]

    same(Attention(), [(torch.randn(n, m, 8), torch.zeros(n, m, dtype=torch.bool)) for n, m in (
        (2, 7), (3, 5), (1, 3), (3, 1), (1, 1))], tmp_path / "model.any")


def test_sizes_that_agree_may_be_0_or_1_together(tmp_path: Path) -> None:
    sampled = Function(lambda x, grid: nn.functional.grid_sample(x, grid, align_corners=False))
    path = tmp_path / "model.any"
    calls = [(torch.randn(n, 3, 8, 6), torch.rand(n, m, 5, 2)) for n, m in ((2, 4), (3, 5), (1, 1), (0, 4))]
    same(sampled, calls, path)
    with anyshape.load(path, trust_native=True) as run, pytest.raises(anyshape.AnyShapeError, match="these sizes"):
        run(torch.randn(1, 3, 8, 6), torch.rand(2, 4, 5, 2))


def test_a_guard_of_several_sizes_is_asked_of_each_call(tmp_path: Path) -> None:
    """What torch.export took for granted is another program where it does not hold."""
    module = Function(lambda x, y: (x * 2 if x.numel() == y.numel() else x * 3, y + 1))
    path = tmp_path / "model.any"
    same(module, [(torch.randn(4, 3), torch.randn(4, 3)), (torch.randn(6, 5), torch.randn(6, 5)),
                  (torch.randn(2, 6), torch.randn(3, 4))], path)
    auto = torch.export.Dim.AUTO
    exported = torch.export.export(module, (torch.randn(4, 3), torch.randn(4, 3)),
                                   dynamic_shapes=(({0: auto, 1: auto},) * 2,))
    with anyshape.load(path, trust_native=True) as run:
        for program in (run, anyshape.compile(exported)):
            with pytest.raises(anyshape.AnyShapeError, match="does not take these sizes"):
                program(torch.randn(4, 3), torch.randn(5, 3))


def test_bf16_for_another_dtype_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "model.any"
    same(Function(lambda x: x + 1), [(torch.randn(3),), (torch.randn(4),), (torch.randn(0),)], path)
    with anyshape.load(path, trust_native=True) as run, pytest.raises(anyshape.AnyShapeError, match="bf16") as error:
        run(torch.randn(3).bfloat16())
    assert "takes f32" in error.value.why


def test_a_size_by_a_factor_in_floats_is_free(tmp_path: Path) -> None:
    """Its guards have floats on both sides."""
    larger = Function(lambda x: nn.functional.interpolate(x, scale_factor=1.5, mode="bilinear"))
    same(larger, [(torch.randn(2, 3, *size),) for size in ((8, 6), (10, 8), (3, 5))], tmp_path / "model.any")


def test_a_size_that_a_number_in_floats_fixes_is_not_free(tmp_path: Path) -> None:
    """torch.export makes a constant of the tensor, with a guard over floats: resampling in torchaudio has it."""
    function = Function(lambda x: x.repeat(1, 2)[..., :torch.ceil(torch.as_tensor(3 * x.shape[-1] / 2)).long()])
    x = torch.randn(3, 16)
    exported = anyshape.compile(torch.export.export(function, (x,), dynamic_shapes=(({0: free, 1: free},),)))
    torch.testing.assert_close(exported(x), function(x))
    torch.testing.assert_close(exported(x[:2]), function(x[:2]))
    with pytest.raises(InputError, match=r"16 <= .* <= 16"):
        exported(torch.randn(3, 20))
    compiled = anyshape.compile(function)
    for size in (16, 20):  # no file is wrong, whatever was called before
        compiled(torch.randn(3, size))
    anyshape.save(compiled, tmp_path / "model.any")
    with anyshape.load(tmp_path / "model.any", trust_native=True) as run:
        torch.testing.assert_close(run(x), function(x))
        with pytest.raises(InputError, match=r"16..16"):
            run(torch.randn(3, 20))
