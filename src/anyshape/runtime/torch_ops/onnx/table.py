"""The table of operators of ONNX for extern steps, by the target that a graph names."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anyshape.runtime.torch_ops.onnx import elements, images, recurrent, signal, windows

OPERATORS: dict[str, Callable[..., Any]] = {
    "onnx.by_numpy": elements.by_numpy, "onnx.converted": elements.converted, "onnx.bits": elements.bits,
    "onnx.topk": elements.topk, "onnx.coupled": elements.coupled,
    "onnx.lstm": recurrent.lstm, "onnx.gru": recurrent.gru,
    "onnx.rnn": recurrent.rnn,
    "onnx.resize": images.resize, "onnx.grid_sample": images.grid_sample, "onnx.affine_grid": images.affine_grid,
    "onnx.roi_align": images.roi_align, "onnx.deform_conv": windows.deform_conv, "onnx.col2im": windows.col2im,
    "onnx.max_pool_positions": windows.max_pool_positions, "onnx.max_unpool": windows.max_unpool,
    "onnx.dft": signal.dft, "onnx.stft": signal.stft, "onnx.mel_weights": signal.mel_weights,
}  # fmt: skip
