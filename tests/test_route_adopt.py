"""Adoption of mixture-of-experts models of transformers: equal results, the same parameters, compiled, and undone."""
from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import anyshape
from anyshape import route
from anyshape.base.errors import InputError

transformers = pytest.importorskip("transformers", minversion="5")
COMMON = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
          "vocab_size": 64, "max_position_embeddings": 64, "use_cache": False, "intermediate_size": 48}


def mixtral(layers=2):
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(
        **COMMON | {"num_hidden_layers": layers}, num_local_experts=4, num_experts_per_tok=2))


def qwen3_moe():
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(
        **COMMON, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=3, head_dim=8))


def deepseek_v3():
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(
        **COMMON, moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=3, n_group=2, topk_group=1,
        first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=8, n_shared_experts=1))


def switch():
    """With a capacity that drops tokens."""
    return transformers.SwitchTransformersEncoderModel(transformers.SwitchTransformersConfig(
        d_model=32, d_ff=48, d_kv=8, num_layers=2, num_sparse_encoder_layers=2, num_heads=4, num_experts=4,
        expert_capacity=3, vocab_size=64, dropout_rate=0.0, router_jitter_noise=0.0))


def gpt_oss():
    """Biases, transposed weights, and a gate of its own."""
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(
        **COMMON, num_local_experts=4, num_experts_per_tok=2, head_dim=8, layer_types=["full_attention"] * 2))


MODELS = [mixtral, qwen3_moe, deepseek_v3, switch, gpt_oss]


def made(build):
    torch.manual_seed(0)
    model = build()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    return model


def tokens(*shape):
    return torch.randint(0, 64, shape, generator=torch.Generator().manual_seed(shape[-1]))


def ran(call, model, words):
    """Results, and the gradient of every parameter."""
    model.zero_grad()
    out = call(input_ids=words)[0]
    out.square().sum().backward()
    return out.detach(), {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def compare(found, wanted):
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-4)
    assert found[1].keys() >= wanted[1].keys()
    assert not any(found[1][name].any() for name in found[1].keys() - wanted[1].keys())  # experts without a token
    for name, gradient in wanted[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-3, atol=1e-3, msg=lambda text, name=name:
                                   f"{name}: {text}")


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_an_adopted_model_is_the_model(build):
    model = made(build)
    if hasattr(model, "set_experts_implementation") and build is not switch:
        model.set_experts_implementation("eager")  # the plain loop
    state, parameters = list(model.state_dict()), list(map(id, model.parameters()))
    words = tokens(2, 9)
    wanted = ran(model, model, words)
    assert route.adopt(model) is model
    layers = [one for one in model.modules() if isinstance(one, route.Router)]
    assert len(layers) == (1 if build is deepseek_v3 else 2)
    assert list(model.state_dict()) == state and list(map(id, model.parameters())) == parameters
    compare(ran(model, model, words), wanted)
    classes = [type(one) for one in model.modules()]
    assert route.adopt(model) is model and [type(one) for one in model.modules()] == classes
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        compare(ran(other, other, words), wanted)
        with torch.no_grad():
            for one in other.parameters():
                one.zero_()
        assert not other(input_ids=words)[0].any()  # a copy has its own weights
    route.release(model)
    assert not any(isinstance(one, route.Router) for one in model.modules())
    assert all(name not in layers[0].__dict__ for name in ("router_fn", "branches", "adopted_names"))
    compare(ran(model, model, words), wanted)


@pytest.mark.parametrize("train", [False, True], ids=["inference", "train"])
def test_an_adopted_model_is_compiled_once_for_all_loads(train):
    plain = made(lambda: mixtral(layers=1)).train(train)
    model = route.adopt(copy.deepcopy(plain))
    compiled = anyshape.compile(model)

    def check(words):
        if train:
            compare(ran(compiled, model, words), ran(plain, plain, words))
            return
        with torch.no_grad():
            torch.testing.assert_close(compiled(input_ids=words)[0], plain(input_ids=words)[0], rtol=1e-4, atol=1e-4)

    check(tokens(2, 9))
    check(tokens(3, 8))
    programs = anyshape.stats()["programs"]
    for shape in ((2, 11), (5, 3)):
        check(tokens(*shape))
    check(torch.zeros(2, 12, dtype=torch.long))  # all tokens to the same experts
    assert anyshape.stats()["programs"] == programs
    assert not [one for one in compiled.explain().fallbacks if one.name != "trace"]


class OwnExperts(nn.Module):
    """Stacked experts whose layout nothing says."""

    def __init__(self):
        super().__init__()
        self.down_proj = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return hidden_states


class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.known, self.experts = mixtral().model.layers[0].mlp, OwnExperts()


def test_an_unknown_mixture_of_experts_is_refused_and_nothing_changes():
    model = Other()
    with pytest.raises(InputError) as caught:
        route.adopt(model)
    error = caught.value
    assert "OwnExperts" in str(error) and "experts" in str(error) and "layout" in str(error) and error.do
    assert not any(isinstance(one, route.Router) for one in model.modules())


@pytest.mark.parametrize("build", [lambda: nn.Linear(3, 3), lambda: nn.ModuleDict({"experts": nn.ModuleList()})],
                         ids=["none", "a list without its loop"])
def test_what_has_no_experts_is_refused(build):
    with pytest.raises(InputError, match="adopt"):
        route.adopt(build())


def test_a_layer_spread_over_machines_is_refused():
    model = mixtral()
    model.model.layers[1].mlp.experts._is_expert_parallel = True
    with pytest.raises(InputError, match="machines"):
        route.adopt(model)
    assert not any(isinstance(one, route.Router) for one in model.modules())
