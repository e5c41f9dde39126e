"""Models of other packages at small sizes, for `experiments/package_models.py`: how each is made, and its inputs."""
from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

VOCABULARY = 99
Args = dict[str, Any]
Inputs = Callable[..., Any]  # of sizes: a tensor, a tuple of arguments, or a dictionary of keywords


@dataclass(frozen=True)
class Case:
    """A model. make: the module, with random weights, without dropout. sizes: what `inputs` is called with, in turn."""

    package: str
    name: str
    make: Callable[[], nn.Module]
    inputs: Inputs
    sizes: Sequence[tuple[int, ...]]


TEXTS = ((2, 7), (3, 33), (1, 5), (4, 64), (2, 1))
IMAGES = ((2, 64, 64), (1, 96, 64), (3, 64, 128), (5, 32, 96))
SQUARES = ((2, 32), (1, 16), (3, 64), (2, 48))
BATCHES = ((2,), (1,), (5,), (3,))
GRAPHS = ((10, 30), (17, 50), (33, 101), (4, 1))


def _ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length))


def _image(batch: int, height: int, width: int) -> torch.Tensor:
    return torch.randn(batch, 3, height, width)


# ---- transformers

SMALL = Args(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37,
             max_position_embeddings=256, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
             attention_dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2)
GROUPED = Args(num_key_value_heads=2, head_dim=8, use_cache=False)
GPT = Args(n_embd=32, n_layer=2, n_head=4, n_positions=256, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
           use_cache=False)
T5 = Args(d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4, dropout_rate=0.0, use_cache=False)
BART = Args(d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=37, decoder_ffn_dim=37, dropout=0.0, use_cache=False)
EXPERTS = Args(num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
               shared_expert_intermediate_size=16, num_local_experts=4, intermediate_size=48, use_cache=False)
LATENT = Args(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
              n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, moe_intermediate_size=16,
              n_shared_experts=1, first_k_dense_replace=1, use_cache=False)
STATES = Args(state_size=8, use_cache=False)
SPEECH = Args(conv_dim=[8] * 7, feat_proj_dropout=0.0, layerdrop=0.0, num_conv_pos_embeddings=16,
              num_conv_pos_embedding_groups=2, activation_dropout=0.0, hidden_dropout=0.0, apply_spec_augment=False)
STAGES = Args(hidden_sizes=[8, 16, 32, 64], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 4, 8], drop_path_rate=0.0)
PATCHES = Args(image_size=64, patch_size=8, drop_path_rate=0.0)


def _lm(batch: int, length: int) -> dict[str, torch.Tensor]:
    ids = _ids(batch, length)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _masked(batch: int, length: int) -> dict[str, torch.Tensor]:
    found = _lm(batch, length)
    for row in range(batch):
        found["attention_mask"][row, max(1, length - row):] = 0
    return found


def _translation(batch: int, length: int) -> dict[str, torch.Tensor]:
    return {"input_ids": _ids(batch, length), "decoder_input_ids": _ids(batch, length // 2 + 1)}


def _pixels(batch: int, height: int, width: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": _image(batch, height, width)}


def _transformers(inputs: Inputs, sizes: Sequence[tuple[int, ...]], words: str, head: str = "Model",
                  **settings: Any) -> list[Case]:
    """Cases of several classes: {word}{head} with {word}Config."""
    def maker(word: str) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            package = importlib.import_module("transformers")
            config = getattr(package, f"{word}Config")(**{**SMALL, **settings})
            return getattr(package, f"{word}{head}")(config)  # type: ignore[no-any-return]
        return make

    return [Case("transformers", word, maker(word), inputs, sizes) for word in words.split()]


TRANSFORMERS = [
    *_transformers(_masked, TEXTS, "Bert Roberta Electra Ernie RoFormer MegatronBert XLMRoberta Camembert Esm MPNet "
                   "Deberta DebertaV2 ConvBert Nystromformer", embedding_size=32),
    *_transformers(_lm, TEXTS, "GPTNeoX OPT Persimmon XGLM BioGpt", "ForCausalLM", ffn_dim=37, word_embed_proj_dim=32,
                   d_model=32, num_layers=2, attention_heads=4, use_cache=False, dropout=0.0, activation_dropout=0.0,
                   hidden_dropout=0.0, layerdrop=0.0),
    *_transformers(_lm, TEXTS, "GPTJ CodeGen GPTBigCode", "ForCausalLM", **GPT, rotary_dim=4),
    *_transformers(_lm, TEXTS, "Llama Mistral Gemma Gemma2 Qwen2 Qwen3 Cohere Olmo2 Starcoder2 Granite Helium Glm "
                   "SmolLM3", "ForCausalLM", **GROUPED),
    *_transformers(_lm, TEXTS, "StableLm Phi Phi3", "ForCausalLM", num_key_value_heads=2, use_cache=False,
                   resid_pdrop=0.0, embd_pdrop=0.0, hidden_dropout=0.0),
    *_transformers(_lm, TEXTS, "Qwen2Moe Olmoe Phimoe GraniteMoe", "ForCausalLM", **EXPERTS),
    *_transformers(_lm, TEXTS, "Mamba FalconMamba", "ForCausalLM", **STATES),
    *_transformers(_lm, TEXTS, "Mamba2", "ForCausalLM", **STATES, expand=2, head_dim=16, num_heads=4, n_groups=1,
                   chunk_size=8),
    *_transformers(_lm, TEXTS, "RecurrentGemma", "ForCausalLM", **GROUPED, lru_width=32, attention_window_size=16,
                   block_types=["recurrent", "attention"]),
    *_transformers(_lm, TEXTS, "DeepseekV3", "ForCausalLM", **LATENT),
    *_transformers(_translation, TEXTS, "T5 MT5 UMT5", **T5),
    *_transformers(_translation, TEXTS, "Bart MBart Pegasus Marian M2M100 Blenderbot PLBart", **BART),
    *_transformers(_pixels, IMAGES, "ResNet Segformer PoolFormer PvtV2", **{
        **STAGES, "embedding_size": 8, "classifier_dropout_prob": 0.0}),
    *_transformers(_pixels, [(batch, 64, 64) for batch, in BATCHES], "ViT DeiT Beit Dinov2", **PATCHES),
    *_transformers(lambda batch, frames: {"input_values": torch.randn(batch, 400 + 320 * frames)}, TEXTS,
                   "Wav2Vec2 Hubert UniSpeech Data2VecAudio", **SPEECH)]

# ---- timm, segmentation-models-pytorch

TIMM = """resnet18 regnetx_002 densenet121 efficientnet_b0 mobilenetv3_small_050 convnext_atto vit_tiny_patch16_224
swin_tiny_patch4_window7_224 edgenext_xx_small mobileone_s0 repvgg_a0 ghostnet_050 hrnet_w18_small""".split()
SEGMENTATION = "Unet UnetPlusPlus FPN PSPNet DeepLabV3Plus Linknet MAnet Segformer".split()


def _timm(name: str) -> nn.Module:
    made = importlib.import_module("timm").create_model
    try:
        found: nn.Module = made(name, num_classes=10, dynamic_img_size=True)
    except TypeError:
        found = made(name, num_classes=10)
    for part in found.modules():
        if hasattr(part, "drop_prob"):
            part.drop_prob = 0.0
    return found


def _segmentation(name: str) -> nn.Module:
    package = importlib.import_module("segmentation_models_pytorch")
    return getattr(package, name)("resnet18", encoder_weights=None, classes=3)  # type: ignore[no-any-return]


# ---- diffusers

UNET = Args(sample_size=32, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8, attention_head_dim=8)
SD3 = Args(sample_size=32, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
           caption_projection_dim=32, joint_attention_dim=32, pooled_projection_dim=64, out_channels=4,
           pos_embed_max_size=32)
FLUX = Args(patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=24, pooled_projection_dim=20, axes_dims_rope=[4, 4, 8])
PROMPTS = ((2, 32, 7), (1, 16, 77), (3, 64, 5), (2, 48, 1))


def _diffusers(name: str, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(importlib.import_module("diffusers"), name)(**settings)


def _steps(batch: int) -> torch.Tensor:
    return torch.randint(0, 1000, (batch,))


DIFFUSERS = [
    Case("diffusers", "UNet2DModel", _diffusers(
        "UNet2DModel", **UNET, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D")),
        lambda batch, side: (torch.randn(batch, 3, side, side), _steps(batch)), SQUARES),
    Case("diffusers", "UNet2DConditionModel", _diffusers(
        "UNet2DConditionModel", **UNET, cross_attention_dim=24,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D")),
        lambda batch, side, words: (torch.randn(batch, 4, side, side), _steps(batch), torch.randn(batch, words, 24)),
        PROMPTS),
    Case("diffusers", "AutoencoderKL", _diffusers(
        "AutoencoderKL", block_out_channels=(16, 32), norm_num_groups=8, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2),
        lambda batch, side: _image(batch, side, side), SQUARES),
    Case("diffusers", "SD3Transformer2DModel", _diffusers("SD3Transformer2DModel", **SD3), lambda batch, side, words: {
        "hidden_states": torch.randn(batch, 4, side, side), "encoder_hidden_states": torch.randn(batch, words, 32),
        "pooled_projections": torch.randn(batch, 64), "timestep": torch.rand(batch)},
        ((2, 16, 7), (1, 32, 5), (3, 24, 1))),
    Case("diffusers", "FluxTransformer2DModel", _diffusers("FluxTransformer2DModel", **FLUX),
         lambda batch, places, words: {
        "hidden_states": torch.randn(batch, places, 16), "encoder_hidden_states": torch.randn(batch, words, 24),
        "pooled_projections": torch.randn(batch, 20), "timestep": torch.rand(batch),
        "img_ids": torch.randn(places, 3), "txt_ids": torch.zeros(words, 3)}, ((2, 16, 7), (1, 64, 5), (3, 25, 1)))]

# ---- torch_geometric, peft, x-transformers


class TwoLayers(nn.Module):
    """A network over the edges of a graph."""

    def __init__(self, name: str, **settings: Any) -> None:
        super().__init__()
        kind = getattr(importlib.import_module("torch_geometric.nn"), name)
        self.first, self.second = kind(8, 16, **settings), kind(16, 4, **settings)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.first(x, edges).relu(), edges)
        return found


HEADS = Args(heads=2, concat=False)
GEOMETRIC: dict[str, dict[str, Any]] = {"SAGEConv": {}, "GCNConv": {}, "GATConv": HEADS, "GATv2Conv": HEADS,
                                        "TransformerConv": HEADS, "ChebConv": dict(K=2), "GraphConv": {},
                                        "LEConv": {}, "ClusterGCNConv": {}, "SGConv": dict(K=2), "TAGConv": dict(K=2),
                                        "ARMAConv": {}, "FeaStConv": {}, "MFConv": dict(max_degree=4), "FiLMConv": {},
                                        "SuperGATConv": HEADS, "ResGatedGraphConv": {}, "GeneralConv": {},
                                        "HypergraphConv": {}, "SSGConv": dict(alpha=0.1)}


def _geometric(name: str) -> Case:
    return Case("torch_geometric", name, lambda: TwoLayers(name, **GEOMETRIC[name]),
                lambda nodes, edges: (torch.randn(nodes, 8), torch.randint(0, nodes, (2, edges))), GRAPHS)


def _adapted(name: str, **settings: Any) -> Case:
    def make() -> nn.Module:
        peft, package = map(importlib.import_module, ("peft", "transformers"))
        base = package.LlamaForCausalLM(package.LlamaConfig(**{**SMALL, **GROUPED}))
        return peft.get_peft_model(base, getattr(peft, name)(**settings))  # type: ignore[no-any-return]

    return Case("peft", " ".join([name, *(word for word in settings if settings[word] is True)]), make, _lm, TEXTS)


X_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "plain": {}, "rotary": dict(rotary_pos_emb=True), "ALiBi": dict(alibi_pos_bias=True),
    "relative positions": dict(rel_pos_bias=True), "gated": dict(ff_glu=True, ff_swish=True),
    "RMSNorm": dict(use_rmsnorm=True, attn_qk_norm=True), "memory": dict(attn_num_mem_kv=4),
    "macaron": dict(macaron=True), "hyper-connections": dict(num_residual_streams=2),
    "value residual": dict(add_value_residual=True), "talking heads": dict(attn_pre_talking_heads=True),
    "shifted tokens": dict(shift_tokens=1), "residual attention": dict(residual_attn=True),
    "gated residual": dict(gate_residual=True), "sandwich norm": dict(sandwich_norm=True),
    "grouped queries": dict(attn_kv_heads=2), "CoPE": dict(attn_use_cope=True)}


def _x_transformers(name: str) -> Case:
    def make() -> nn.Module:
        package = importlib.import_module("x_transformers")
        layers = package.Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **X_TRANSFORMERS[name])
        return package.TransformerWrapper(  # type: ignore[no-any-return]
            num_tokens=VOCABULARY, max_seq_len=256, attn_layers=layers)

    return Case("x-transformers", name, make, _ids, TEXTS)


def _named(package: str, make: Callable[[str], nn.Module], names: Sequence[str]) -> list[Case]:
    return [Case(package, name, lambda name=name: make(name), _image, IMAGES) for name in names]  # type: ignore[misc]


CASES: tuple[Case, ...] = (
    *TRANSFORMERS, *_named("timm", _timm, TIMM),
    *_named("segmentation-models-pytorch", _segmentation, SEGMENTATION), *DIFFUSERS, *map(_geometric, GEOMETRIC),
    _adapted("LoraConfig", r=4, target_modules=["q_proj", "v_proj"]),
    _adapted("LoraConfig", r=4, target_modules=["q_proj", "v_proj"], use_dora=True),
    _adapted("IA3Config", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    _adapted("PromptTuningConfig", task_type="CAUSAL_LM", num_virtual_tokens=4),
    *map(_x_transformers, X_TRANSFORMERS))
