"""Benchmark cases of transformers' mixtures of experts, adopted by `route.adopt` without a change of source.

The plain form is the loop of transformers (`experts_implementation="eager"`); "grouped_mm" is what it takes by itself.
Loads are those of random tokens at sizes that differ from call to call.
"""
from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from anyshape import route
from anyshape_bench.models.networks import transformers_package
from anyshape_bench.routes.case import Case, Forms, Way

VOCABULARY = 512
COMMON = {"hidden_size": 192, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 6,
          "vocab_size": VOCABULARY, "max_position_embeddings": 512, "use_cache": False, "intermediate_size": 384}
SIZES = ((2, 64), (3, 50), (2, 97), (4, 33), (3, 128), (5, 71), (8, 16))  # (batch, length)
PADDED = "anyshape_bench_padded"  # a name in transformers' table of implementations


def mixtral() -> nn.Module:
    """Two of 8 experts."""
    package = transformers_package()
    return package.MixtralForCausalLM(package.MixtralConfig(**COMMON, num_local_experts=8, num_experts_per_tok=2))


def qwen3moe() -> nn.Module:
    """Eight of 64 small experts."""
    package = transformers_package()
    return package.Qwen3MoeForCausalLM(package.Qwen3MoeConfig(
        **COMMON, moe_intermediate_size=64, num_experts=64, num_experts_per_tok=8, head_dim=32, norm_topk_prob=True))


def deepseekv3() -> nn.Module:
    """Four of 32 experts in groups, and a shared one."""
    package = transformers_package()
    return package.DeepseekV3ForCausalLM(package.DeepseekV3Config(
        **COMMON, moe_intermediate_size=128, n_routed_experts=32, num_experts_per_tok=4,
        n_group=4, topk_group=2, first_k_dense_replace=1, q_lora_rank=64, kv_lora_rank=64, qk_rope_head_dim=16,
        qk_nope_head_dim=16, v_head_dim=32, n_shared_experts=1))


def padded_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Baseline: as many rows for each expert as the busiest has, in batched products."""
    choices, experts = top_k_index.shape[1], self.num_experts
    ids = top_k_index.reshape(-1)
    mine = nn.functional.one_hot(ids, experts)
    place = (mine.cumsum(0) - 1).gather(1, ids[:, None])[:, 0]
    rows = hidden_states.new_zeros(experts, int(mine.sum(0).max()), hidden_states.shape[1])
    rows = rows.index_put((ids, place), hidden_states.repeat_interleave(choices, 0))
    gate, up = torch.bmm(rows, self.gate_up_proj.transpose(1, 2)).chunk(2, -1)
    found = torch.bmm(self.act_fn(gate) * up, self.down_proj.transpose(1, 2))[ids, place]
    return (found * top_k_weights.reshape(-1, 1)).reshape(-1, choices, found.shape[1]).sum(1).to(found.dtype)


def forms(build: Callable[[], nn.Module]) -> Forms:
    """The model with each implementation of its experts, and adopted."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(PADDED, padded_experts)
    model = build()

    def implemented(name: str) -> nn.Module:
        other = copy.deepcopy(model)
        other.set_experts_implementation(name)
        return other

    draw = torch.Generator().manual_seed(0)
    grouped = implemented("grouped_mm")
    return Forms(
        implemented("eager"), route.adopt(copy.deepcopy(model)),
        [(torch.randint(0, VOCABULARY, size, generator=draw),) for size in SIZES],
        padded=implemented(PADDED), grouped_mm=grouped,
        others={"inductor-grouped_mm": Way(lambda: copy.deepcopy(grouped), "inductor"),
                "anyshape-grouped_mm": Way(lambda: copy.deepcopy(grouped), "anyshape")})


def cases() -> list[Case]:
    """Each model in inference and in training."""
    return [Case(f"{build.__name__}-{'train' if trains else 'inference'}", build.__name__,
                 functools.partial(forms, build), trains, quick=build is mixtral)
            for build in (mixtral, qwen3moe, deepseekv3) for trains in (False, True)]
