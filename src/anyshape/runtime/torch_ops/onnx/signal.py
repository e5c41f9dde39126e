"""Fourier transforms and mel weights of ONNX; complex numbers are pairs of real ones in the last dim."""
from __future__ import annotations

import numpy as np
import torch

from anyshape.torch_compat.dtypes import TORCH_DTYPES


def _complex(x: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return torch.view_as_complex(wide.contiguous()) if x.shape[-1] == 2 else wide.squeeze(-1).to(torch.complex128)


def dft(x: torch.Tensor, count: int, dim: int, inverse: bool, half: bool) -> torch.Tensor:
    """The discrete Fourier transform along `dim`, cut or padded to `count` (ONNX DFT-20)."""
    numbers = _complex(x)
    if inverse and half:
        return torch.fft.irfft(numbers, count, dim).unsqueeze(-1).to(x.dtype)
    found = torch.fft.ifft(numbers, count, dim) if inverse else torch.fft.fft(numbers, count, dim)
    if half:
        found = found.narrow(dim, 0, count // 2 + 1)
    return torch.view_as_real(found.contiguous()).to(x.dtype)


def stft(x: torch.Tensor, step: int, window: torch.Tensor | None, length: int, half: bool) -> torch.Tensor:
    """Transforms of windows of a signal [n, samples, 1 or 2]: [n, frames, places, 2]."""
    numbers = _complex(x)
    frames = numbers.unfold(1, length, step)
    if window is not None:
        frames = frames * window
    found = torch.fft.fft(frames, dim=-1)
    if half:
        found = found[..., :length // 2 + 1]
    return torch.view_as_real(found.contiguous()).to(x.dtype)


def mel_weights(bins: int, length: int, rate: int, low: float, high: float, dtype: str) -> torch.Tensor:
    """The matrix [length//2 + 1, bins] that turns a spectrum into mel bands (ONNX MelWeightMatrix-17)."""
    places = length // 2 + 1
    points = np.arange(bins + 2, dtype=np.float64)
    first, last = (2595 * np.log10(1 + edge / 700) for edge in (low, high))
    points = points * ((last - first) / len(points)) + first
    edges = (((length + 1) * (700 * (10 ** (points / 2595) - 1))) // rate).astype(int)
    found = np.zeros((places, bins))
    for band in range(bins):
        begin, middle, end = edges[band:band + 3]
        if middle == begin:
            found[middle, band] = 1
        else:
            found[begin:middle + 1, band] = (np.arange(begin, middle + 1) - begin) / (middle - begin)
        if end != middle:
            found[middle:end, band] = (end - np.arange(middle, end)) / (end - middle)
    return torch.from_numpy(found).to(TORCH_DTYPES[dtype])
