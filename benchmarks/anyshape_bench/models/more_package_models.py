"""Unusual models of vision, speech and medicine at small sizes, for `experiments/package_models.py`."""
from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from anyshape_bench.models.package_models import TEXTS, Args, Case, Inputs

COUNTS = ((2,), (1,), (5,), (3,), (7,), (4,), (11,))  # batches, where a model takes one size of image
LENGTHS = (*TEXTS, (1, 1), (5, 19))
ODD = ((2, 64, 64), (1, 96, 64), (3, 65, 97), (5, 33, 96), (1, 50, 75), (2, 96, 96), (4, 71, 40))
EVEN = ((2, 64, 64), (1, 96, 64), (3, 64, 128), (5, 32, 96), (1, 64, 64), (2, 96, 96), (4, 128, 32))
CUBES = ((2, 32, 32, 32), (1, 16, 32, 48), (3, 32, 16, 16), (1, 32, 32, 16), (2, 48, 16, 32), (1, 16, 16, 16))


def _made(module: str, name: str, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(importlib.import_module(module), name)(**settings)  # type: ignore[no-any-return]


def _images(channels: int, *side: int) -> Inputs:
    """Of sizes (batch, *more): images of the sides given, or those of `more`."""
    return lambda batch, *more: torch.randn(batch, channels, *(side or more))


# ---- timm: one block for each stage


def _timm(name: str, sizes: Sequence[tuple[int, ...]], *side: int, **settings: Any) -> Case:
    """side: the one of all images, where the model knows it."""
    known = dict(img_size=side[0]) if side[:1] == (64,) else {}
    return Case("timm", name, _made("timm", "create_model", model_name=name, num_classes=10, **known, **settings),
                _images(3, *side), sizes)


def _class_of_timm(module: str, name: str, sizes: Sequence[tuple[int, ...]], *side: int, **settings: Any) -> Case:
    made = _made(f"timm.models.{module}", name, num_classes=10, **settings)
    return Case("timm", name, made, _images(3, *side), sizes)


ONES, WIDTHS, HEADS = (1, 1, 1, 1), (8, 16, 24, 32), (1, 2, 3, 4)
TIMM = [
    _timm("mambaout_femto", ODD, depths=ONES, dims=WIDTHS),
    _timm("edgenext_xx_small", ODD, depths=ONES, dims=(8, 16, 32, 48)),
    _class_of_timm("focalnet", "FocalNet", ODD, depths=ONES, embed_dim=8),
    _timm("pvt_v2_b0", EVEN, depths=ONES, embed_dims=WIDTHS, num_heads=HEADS),
    _timm("davit_tiny", ODD, depths=ONES, embed_dims=WIDTHS, num_heads=HEADS),
    _class_of_timm("volo", "VOLO", COUNTS, 64, 64, img_size=64, layers=ONES, embed_dims=(12, 24, 24, 24),
                   num_heads=(2, 4, 4, 4), mlp_ratio=2.0, use_mix_token=False,
                   downsamples=(True, False, False, False), outlook_attention=(True, False, False, False)),
    _timm("sequencer2d_s", COUNTS, 64, 64, layers=ONES, embed_dims=(8, 16, 16, 16), hidden_sizes=(4, 4, 4, 4)),
    _timm("hiera_tiny_224", COUNTS, 64, 64, stages=ONES, embed_dim=16),
    _timm("xcit_nano_12_p16_224", COUNTS, 64, 64, depth=2, embed_dim=32),
    _timm("efficientformer_l1", COUNTS[:4], 224, 224, depths=ONES, embed_dims=WIDTHS),
    _timm("crossvit_tiny_240", COUNTS[:3], 240, 240, depth=((1, 1, 0),), embed_dim=(16, 24), num_heads=(2, 2))]

# ---- vit-pytorch

VIT = Args(image_size=64, patch_size=16, dim=32, depth=2, heads=2, mlp_dim=64, num_classes=10)
FOUR = Args(num_classes=10, depth=(1, 1, 1, 1))
LOCAL = {f"s{n}_{name}": value for n, dim, patch in ((1, 8, 4), (2, 16, 2), (3, 24, 1), (4, 32, 1)) for name, value in (
    ("emb_dim", dim), ("patch_size", patch), ("local_patch_size", 4), ("global_k", 4), ("depth", 1))}
VIT_PYTORCH: dict[str, tuple[str, dict[str, Any]]] = {
    "simple_vit": ("SimpleViT", VIT), "deepvit": ("DeepViT", VIT), "cait": ("CaiT", {**VIT, "cls_depth": 1}),
    "rvt": ("RvT", VIT), "regionvit": ("RegionViT", {**FOUR, "dim": (8, 16, 32, 64), "window_size": 2}),
    "cvt": ("CvT", dict(num_classes=10, s1_emb_dim=8, s2_emb_dim=16, s2_heads=2, s2_depth=1, s3_emb_dim=32, s3_heads=2,
                        s3_depth=1)),
    "twins_svt": ("TwinsSVT", dict(num_classes=10, **LOCAL)),
    "nest": ("NesT", dict(image_size=64, patch_size=4, dim=16, heads=2, num_hierarchies=3, block_repeats=(1, 1, 1),
                          num_classes=10)),
    "mobile_vit": ("MobileViT", dict(image_size=(64, 64), dims=[16, 24, 32], num_classes=10,
                                     channels=[8, 8, 16, 16, 16, 16, 24, 24, 24, 24, 32])),
    "xcit": ("XCiT", {**VIT, "cls_depth": 1}),
    "scalable_vit": ("ScalableViT", {**FOUR, "dim": 16, "heads": (2, 2, 2, 2), "ssa_dim_key": (8, 8, 8, 8),
                                     "reduction_factor": (4, 2, 2, 1), "window_size": (8, 4, None, None)}),
    "max_vit": ("MaxViT", dict(num_classes=10, dim_conv_stem=16, dim=16, dim_head=8, depth=(1, 1), window_size=4)),
    "cct": ("CCT", dict(img_size=64, embedding_dim=32, n_conv_layers=1, num_layers=2, num_heads=2, mlp_ratio=2.0,
                        num_classes=10)),
    "cross_vit": ("CrossViT", dict(num_classes=10, image_size=64, depth=1, sm_dim=16, sm_patch_size=8, lg_dim=32,
                                   lg_patch_size=16)),
    "t2t": ("T2TViT", dict(image_size=64, dim=32, depth=1, heads=2, mlp_dim=64, num_classes=10)),
    "levit": ("LeViT", dict(image_size=64, num_classes=10, stages=3, dim=(16, 24, 32), depth=1, heads=(2, 3, 4),
                            mlp_mult=2)),
    "vit_for_small_dataset": ("ViT", VIT), "ats_vit": ("ViT", {**VIT, "max_tokens_per_depth": (12, 8)}),
    "learnable_memory_vit": ("ViT", VIT), "parallel_vit": ("ViT", {**VIT, "num_parallel_branches": 2}),
    "look_vit": ("LookViT", dict(dim=32, image_size=64, num_classes=10, depth=1, patch_size=16, heads=2, mlp_factor=2,
                                 highres_patch_size=8, highres_mlp_factor=2, cross_attn_heads=2, cross_attn_dim_head=8,
                                 dim_head=8)),
    "normalized_vit": ("nViT", VIT), "simple_vit_with_fft": ("SimpleViT", {**VIT, "freq_patch_size": 16}),
    "vit_with_patch_merger": ("ViT", {**VIT, "patch_merge_layer": 0, "patch_merge_num_tokens": 4})}


class Packed(nn.Module):
    """NaViT, of two groups of images of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.model = importlib.import_module("vit_pytorch.na_vit").NaViT(**{**VIT, "depth": 1})

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model([[*first.unbind()], [*second.unbind()]])
        return found


def _two(batch: int, height: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 3, 16 * height, 32), torch.randn(2, 3, 32, 16)


# ---- monai, kornia

UNET = Args(spatial_dims=2, in_channels=1, out_channels=2)
MONAI = [Case("monai", f"{name}{mark}", _made("monai.networks.nets", name, **settings), _images(1), sizes)
         for name, mark, sizes, settings in (
    ("UNet", "", EVEN, {**UNET, "channels": (4, 8, 16), "strides": (2, 2), "num_res_units": 2}),
    ("UNet", " of volumes", CUBES, {**UNET, "spatial_dims": 3, "channels": (4, 8, 16), "strides": (2, 2)}),
    ("AttentionUnet", "", EVEN, {**UNET, "channels": (4, 8, 16), "strides": (2, 2)}),
    ("BasicUNetPlusPlus", "", EVEN, {**UNET, "features": (4, 4, 8, 8, 16, 4)}),
    ("SegResNet", "", CUBES, {**UNET, "spatial_dims": 3, "init_filters": 8}),
    ("DynUNet", "", EVEN, {**UNET, "kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2],
                           "filters": [8, 16, 32]}),
    ("VNet", "", EVEN, UNET), ("HighResNet", "", ODD, UNET),
    ("SwinUNETR", "", EVEN[:4], {**UNET, "feature_size": 12, "num_heads": (1, 2, 2, 4)}))]


class Filters(nn.Module):
    """Functions of kornia, of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kornia, x = importlib.import_module("kornia"), x * self.scale
        colours = x.sigmoid()
        return (kornia.filters.gaussian_blur2d(x, (5, 5), (1.5, 1.5)), kornia.filters.sobel(x),
                kornia.color.rgb_to_hsv(colours), kornia.color.rgb_to_lab(colours),
                kornia.filters.bilateral_blur(x, (3, 3), 0.1, (1.5, 1.5)),
                kornia.morphology.dilation(x, torch.ones(3, 3)), kornia.losses.ssim_loss(x, x * 0.9, 5),
                kornia.filters.laplacian(x, 3), kornia.filters.unsharp_mask(x, (3, 3), (1.0, 1.0)),
                kornia.enhance.adjust_hue(colours, 0.2), kornia.losses.total_variation(x))


class Geometry(nn.Module):
    """Images of kornia's, seen from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(3)[None] + 0.01 * torch.randn(1, 3, 3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        geometry, (batch, _, height, width) = importlib.import_module("kornia").geometry, x.shape
        matrix = self.matrix.expand(batch, 3, 3)
        return (geometry.warp_perspective(x, matrix, (height, width)),
                geometry.homography_warp(x, matrix, (height // 2, width)), geometry.pyrdown(x),
                geometry.resize(x, (height * 2, width + 3)), geometry.spatial_soft_argmax2d(x), geometry.hflip(x),
                geometry.rotate(x, x.new_full((batch,), 30.0)))


# ---- torchaudio


class Scaled(nn.Module):
    """A transform of torchaudio behind a weight."""

    def __init__(self, name: str, **settings: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.2))
        self.transform = _made("torchaudio.transforms", name, **settings)()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.transform(x * self.scale)
        return found


def _frames(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.randint(max(1, length // 2), length + 1, (batch,))
    lengths[0] = length
    return torch.randn(batch, length, 16), lengths


def _wave(batch: int, length: int) -> torch.Tensor:
    return torch.randn(batch, 200 + 37 * length)


def _speech(batch: int, length: int) -> tuple[torch.Tensor, ...]:
    whole = [torch.full((batch,), length) for length in (length, 9)]
    return torch.randint(0, 20, (batch, length)), whole[0], torch.randn(batch, 8, 9), whole[1]


ENCODER = {"projection_dropout": 0.0, "attention_dropout": 0.0, "ff_interm_dropout": 0.0, "dropout": 0.0,
           "layer_drop": 0.0, "embed_dim": 16, "pos_conv_kernel": 16, "pos_conv_groups": 2, "num_layers": 2,
           "num_heads": 4, "ff_interm_features": 32, "layer_norm_first": False}
TORCHAUDIO = [Case("torchaudio", name, _made("torchaudio.models", name, **settings), inputs, sizes)
              for name, settings, inputs, sizes in (
    ("Conformer", dict(input_dim=16, num_heads=4, ffn_dim=32, num_layers=2, depthwise_conv_kernel_size=7), _frames,
     LENGTHS),
    ("Emformer", dict(input_dim=16, num_heads=4, ffn_dim=32, num_layers=2, segment_length=8, left_context_length=8,
                      right_context_length=2), _frames, ((2, 10), (3, 33), (1, 16), (4, 64), (2, 11), (5, 19))),
    ("wav2vec2_model", dict(extractor_mode="group_norm", extractor_conv_bias=False, aux_num_out=7,
                            extractor_conv_layer_config=[(8, 10, 5), (8, 3, 2), (8, 2, 2)],
                            **{f"encoder_{name}": value for name, value in ENCODER.items()}),
     lambda batch, length: torch.randn(batch, 400 + 40 * length), LENGTHS),
    ("Tacotron2", dict(n_mels=8, n_symbol=20, symbol_embedding_dim=16, encoder_embedding_dim=16, attention_rnn_dim=16,
                       attention_hidden_dim=8, decoder_rnn_dim=16, prenet_dim=8, postnet_embedding_dim=16,
                       attention_location_n_filter=4), _speech, ((2, 7), (1, 5), (3, 11))),
    ("ConvTasNet", dict(num_sources=2, enc_num_feats=16, msk_num_feats=8, msk_num_hidden_feats=16, msk_num_layers=2,
                        msk_num_stacks=2), lambda batch, length: torch.randn(batch, 1, 100 + 37 * length), LENGTHS),
    ("DeepSpeech", dict(n_feature=16, n_hidden=32, n_class=9), lambda batch, length: torch.randn(batch, 1, length, 16),
     LENGTHS),
    ("WaveRNN", dict(upsample_scales=[2, 3], n_classes=8, hop_length=6, n_res_block=1, n_rnn=16, n_fc=16, kernel_size=5,
                     n_freq=8, n_hidden=8, n_output=8),
     lambda batch, length: (torch.randn(batch, 1, 6 * (length + 2)), torch.randn(batch, 1, 8, length + 6)), LENGTHS))]
TRANSFORMS: dict[str, dict[str, Any]] = {
    "MelSpectrogram": dict(n_fft=64, n_mels=8), "MFCC": dict(n_mfcc=8, melkwargs=dict(n_fft=64, n_mels=16)),
    "Resample": dict(orig_freq=16000, new_freq=12000)}

CASES: tuple[Case, ...] = (
    *TIMM,
    *(Case("vit-pytorch", name, _made(f"vit_pytorch.{name}", kind, **settings), _images(3, 64, 64), COUNTS)
      for name, (kind, settings) in VIT_PYTORCH.items()),
    Case("vit-pytorch", "na_vit", Packed, _two, ((2, 1), (1, 2), (3, 3), (1, 1), (5, 2))),
    *MONAI, Case("kornia", "filters", Filters, _images(3), ODD), Case("kornia", "geometry", Geometry, _images(3), ODD),
    *TORCHAUDIO, *(Case("torchaudio", name, lambda name=name: Scaled(name, **TRANSFORMS[name]),  # type: ignore[misc]
                        _wave, LENGTHS) for name in TRANSFORMS))
