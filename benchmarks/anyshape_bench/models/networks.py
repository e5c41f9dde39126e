"""Networks of the suite: those of transformers, as their users call them, and plain torch ones."""
from __future__ import annotations

import math
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyshape.base.errors import ConfigError

DECODE_LAYERS, DECODE_WIDTH, DECODE_HEADS = 6, 512, 8
DECODE_VOCABULARY, DECODE_POSITIONS = 8192, 1024
CLASSES = 100  # of images


def transformers_package() -> ModuleType:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("this benchmark needs the package transformers", why=str(error),
                          do="pip install 'anyshape[bench]', or choose other models (see --list)") from error
    return transformers


def llama(width: int, layers: int, heads: int, inner: int, vocabulary: int) -> nn.Module:
    """LlamaForCausalLM with random weights; call with input_ids and labels, int64[batch, length]."""
    package = transformers_package()
    config = package.LlamaConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
        intermediate_size=inner, vocab_size=vocabulary, max_position_embeddings=512, use_cache=False,
    )
    return package.LlamaForCausalLM(config)


def bert(width: int, layers: int, heads: int, vocabulary: int) -> nn.Module:
    """BertModel with random weights; call with input_ids, int64[batch, length]."""
    package = transformers_package()
    config = package.BertConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * width,
        vocab_size=vocabulary,
    )
    return package.BertModel(config)


def masked_bert(width: int, layers: int, heads: int, vocabulary: int) -> nn.Module:
    """BertForMaskedLM with random weights, without dropout, so that backends can be compared; call with input_ids and
    labels, int64[batch, length]."""
    package = transformers_package()
    config = package.BertConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * width,
        vocab_size=vocabulary, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )
    return package.BertForMaskedLM(config)


def t5(width: int, layers: int, heads: int, inner: int, vocabulary: int) -> nn.Module:
    """T5ForConditionalGeneration with random weights; call with input_ids and decoder_input_ids, int64[batch, n]."""
    package = transformers_package()
    config = package.T5Config(
        d_model=width, num_layers=layers, num_heads=heads, d_kv=width // heads, d_ff=inner, vocab_size=vocabulary,
        feed_forward_proj="gated-gelu", use_cache=False, decoder_start_token_id=0,
    )
    return package.T5ForConditionalGeneration(config)


def mixtral(width: int, layers: int, heads: int, inner: int, experts: int, vocabulary: int) -> nn.Module:
    """MixtralForCausalLM with random weights, two experts per token; call with input_ids, int64[batch, length]."""
    package = transformers_package()
    config = package.MixtralConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads // 2,
        intermediate_size=inner, num_local_experts=experts, num_experts_per_tok=2, vocab_size=vocabulary,
        max_position_embeddings=512, use_cache=False,
    )
    return package.MixtralForCausalLM(config)


def perceptron(width: int = 64) -> nn.Module:
    """Three linear layers with ReLU between them."""
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
                         nn.Linear(width, width))


class DecodeBlock(nn.Module):
    """A GPT-2 block that attends from new positions to old and new ones."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x float32[batch, new, width]; keys and values float32[batch, heads, past, width / heads]."""
        batch, new, width = x.shape
        q, k, v = self.attention(self.norm_1(x)).split(width, dim=2)
        q, k, v = (t.view(batch, new, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        keys = torch.cat([keys, k], dim=2)
        values = torch.cat([values, v], dim=2)
        mixed = F.scaled_dot_product_attention(q, keys, values)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, new, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh")), k, v


class DecodeGPT(nn.Module):
    """GPT-2 for one step of decoding: a token and the cache in, logits and the longer cache out."""

    def __init__(self) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(DECODE_VOCABULARY, DECODE_WIDTH)
        self.position_embedding = nn.Embedding(DECODE_POSITIONS, DECODE_WIDTH)
        self.blocks = nn.ModuleList(DecodeBlock(DECODE_WIDTH, DECODE_HEADS) for _ in range(DECODE_LAYERS))
        self.norm = nn.LayerNorm(DECODE_WIDTH)

    def forward(self, token: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """token int64[batch, 1]; keys and values float32[layers, batch, heads, past, width / heads]."""
        past = keys.shape[3]
        position = torch.arange(past, past + token.shape[1], device=token.device)
        x = self.token_embedding(token) + self.position_embedding(position)
        new_keys, new_values = [], []
        for i, block in enumerate(self.blocks):
            x, k, v = block(x, keys[i], values[i])
            new_keys.append(k)
            new_values.append(v)
        logits = F.linear(self.norm(x), self.token_embedding.weight)
        return (logits, torch.cat([keys, torch.stack(new_keys)], dim=3),
                torch.cat([values, torch.stack(new_values)], dim=3))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.norm_1 = nn.BatchNorm2d(channels)
        self.conv_2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm_2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(nn.Conv2d(channels_in, channels, 1, stride, bias=False),
                                          nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm_1(self.conv_1(x)))
        return F.relu(self.norm_2(self.conv_2(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 (He and others, 2015, table 1); image float32[batch, 3, height, width] to float32[batch, 1000]."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
                                  nn.MaxPool2d(3, 2, 1))
        blocks = []
        channels_in = 64
        for channels, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [ResidualBlock(channels_in, channels, stride), ResidualBlock(channels, channels, 1)]
            channels_in = channels
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(512, classes)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(image)).mean((2, 3)))


class EncoderBlock(nn.Module):
    """Pre-norm self-attention and a two-layer perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.attention(self.norm_1(x)).split(width, dim=2)
        q, k, v = (t.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class VisionTransformer(nn.Module):
    """Patches of 16 pixels, learned row and column positions, mean pooling; float32[batch, 3, height, width] in."""

    def __init__(self, width: int = 256, layers: int = 6, heads: int = 4, most_patches: int = 32,
                 classes: int = CLASSES) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.rows = nn.Parameter(torch.randn(most_patches, width) / math.sqrt(width))
        self.columns = nn.Parameter(torch.randn(most_patches, width) / math.sqrt(width))
        self.blocks = nn.Sequential(*(EncoderBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image)
        height, width = x.shape[2], x.shape[3]
        position = self.rows[:height, None] + self.columns[None, :width]
        x = x.permute(0, 2, 3, 1) + position
        return self.head(self.norm(self.blocks(x.flatten(1, 2))).mean(1))


class Classifier(nn.Module):
    """A network of images with its loss; image float32[batch, 3, height, width] and class int64[batch] in."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.network(image), label)
