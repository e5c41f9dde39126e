"""Models of text: the usual transformers, with tiny configurations, and two mixtures of experts."""
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.case import Case, tokens

VOCABULARY = 37


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False))


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel
    return BertModel(BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration
    return T5ForConditionalGeneration(T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0,
        relative_attention_num_buckets=8, use_cache=False, decoder_start_token_id=0))


class T5Call(nn.Module):
    """T5 as a function of source and target tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = t5()

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.inner(input_ids=source, decoder_input_ids=target).logits


class Logits(nn.Module):
    """A language model as a function of tokens alone."""

    def __init__(self, inner: nn.Module, name: str = "logits") -> None:
        super().__init__()
        self.inner = inner
        self.name = name

    def forward(self, ids: Tensor) -> Tensor:
        return getattr(self.inner(input_ids=ids), self.name)


class DenseExperts(nn.Module):
    """A mixture of experts in which every expert sees every token and the router's weights mask."""

    def __init__(self, width: int = 12, experts: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.router = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * 0.2)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * 0.2)
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embed(ids))
        chances = self.router(x).softmax(-1)
        best, _ = chances.topk(2, dim=-1)
        weights = torch.where(chances >= best[..., -1:], chances, torch.zeros_like(chances))
        weights = weights / weights.sum(-1, keepdim=True)
        hidden = F.silu(torch.einsum("btd,edf->btef", x, self.up))
        return x + torch.einsum("btef,efd,bte->btd", hidden, self.down, weights)


class GatheredExperts(nn.Module):
    """A mixture of experts in which each token gathers the weights of its two experts."""

    def __init__(self, width: int = 8, experts: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.router = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, width) * 0.3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        chances, choice = self.router(x).softmax(-1).topk(2, dim=-1)
        own = self.up[choice]  # [b, t, 2, width, width]
        hidden = torch.matmul(x[..., None, None, :], own).squeeze(-2)
        load = x.new_zeros(ids.shape[0], 4).scatter_add(1, choice.flatten(1), chances.flatten(1))
        return x + (F.gelu(hidden) * chances[..., None]).sum(-2) + load.sum() * 0.01


def _ids(shape, draw):
    return (tokens(shape, VOCABULARY, draw),)


def _pair(shape, draw):
    batch, source, target = shape
    return tokens((batch, source), VOCABULARY, draw), tokens((batch, target), VOCABULARY, draw)


# transformers asks in Python whether the batch or the length is 1, so these have a program for each answer
LANGUAGE = (
    Case("llama", lambda: Logits(llama()), _ids, ((1, 6), (1, 40)), programs=4, zero=False),
    Case("bert", lambda: Logits(bert(), "last_hidden_state"), _ids, ((1, 6), (1, 40)), programs=2, zero=False),
    Case("gpt2", lambda: Logits(gpt2()), _ids, ((1, 6), (1, 40)), programs=4, zero=False),
    Case("t5", T5Call, _pair, ((1, 4), (1, 24), (1, 16)), programs=4, zero=False),
    Case("dense_experts", DenseExperts, _ids, ((1, 7), (1, 33))),
    Case("gathered_experts", GatheredExperts, _ids, ((1, 7), (1, 33))),
)
