"""Random programs that draw random numbers in many ways, and what a call of one leaves behind, the generator too."""
from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Step = Callable[[Tensor, Tensor], Tensor]

PURE: dict[str, Step] = {
    "mul": lambda x, y: x * 2 + y,
    "tanh": lambda x, y: torch.tanh(x),
    "softmax": lambda x, y: torch.softmax(x, -1),
    "mean": lambda x, y: x - y.mean(0),
    "norm": lambda x, y: functional.layer_norm(x, x.shape[-1:]),
    "mix": lambda x, y: x @ (y.t() @ x) * 0.01,
    "flip": lambda x, y: x.flip(0) + y,
    "cumsum": lambda x, y: x.cumsum(0) * 0.1,
    "sort": lambda x, y: x.sort(0).values,
}
DRAWS: dict[str, Step] = {
    "rand": lambda x, y: x * torch.rand(x.shape),
    "randn": lambda x, y: x + torch.randn(x.shape[0], 1),
    "rand_like": lambda x, y: x + torch.rand_like(y),
    "randn_like": lambda x, y: torch.randn_like(x) * y,
    "randint": lambda x, y: x + torch.randint(0, 5, x.shape),
    "randint_like": lambda x, y: torch.randint_like(x, 3, 9) * y,
    "randperm": lambda x, y: x[torch.randperm(x.shape[0])] + y,
    "bernoulli": lambda x, y: x * torch.bernoulli(torch.sigmoid(y.detach())),
    "bernoulli_": lambda x, y: x * torch.empty_like(x).bernoulli_(0.3),
    "dropout": lambda x, y: functional.dropout(x + y, 0.1) + functional.dropout(y, 0.6),
    "alpha_dropout": lambda x, y: functional.alpha_dropout(x, 0.3, training=True),
    "feature_dropout": lambda x, y: functional.feature_alpha_dropout(x, 0.3, training=True),
    "dropout1d": lambda x, y: functional.dropout1d(x.unsqueeze(-1), 0.3).squeeze(-1),
    "attention": lambda x, y: functional.scaled_dot_product_attention(x[None], y[None], x[None], dropout_p=0.2)[0],
    "rrelu": lambda x, y: functional.rrelu(x, training=True) + y,
    "multinomial": lambda x, y: x + torch.multinomial(torch.softmax(y.detach(), -1), 2, True).sum(-1, keepdim=True),
    "normal": lambda x, y: x + torch.normal(y.detach(), y.detach().abs() + 0.1),
    "poisson": lambda x, y: x + torch.poisson(y.detach().abs().clamp(max=9)),
    "gumbel": lambda x, y: functional.gumbel_softmax(x, hard=False) * y,
    "distribution": lambda x, y: x + torch.distributions.Normal(y, 1.0 + y.square()).rsample().tanh(),
    "categorical": lambda x, y: x + torch.distributions.Categorical(logits=y.clamp(-9, 9)).sample().unsqueeze(-1),
    "normal_": lambda x, y: x + torch.empty_like(y).normal_(1, 2),
    "uniform_": lambda x, y: (x * 1.5).uniform_(-1, 1) + y,
    "exponential_": lambda x, y: x + torch.empty_like(y).exponential_().clamp(max=3),
    "log_normal_": lambda x, y: x + torch.empty_like(y).log_normal_().clamp(max=3),
    "cauchy_": lambda x, y: x + torch.empty_like(y).cauchy_().clamp(-3, 3),
    "geometric_": lambda x, y: x + torch.empty_like(y).geometric_(0.3).clamp(max=3),
    "not read": lambda x, y: (torch.rand(3), functional.dropout(x, 0.5), x + y)[2],
}


def program(seed: int, kinds: list[str]) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    """A function of a matrix and a vector that draws in each of those ways once, between steps that do not."""
    choose = random.Random(seed)
    names = [*kinds, *(choose.choice(list(PURE)) for _ in kinds)]
    choose.shuffle(names)
    steps = [((DRAWS | PURE)[name], choose.choice((k, k, max(0, k - 1), choose.randint(0, k))), choose.randint(0, k))
             for k, name in enumerate(names)]
    results = sorted(choose.sample(range(1, len(steps)), 2))

    def drawn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        values = [x * w]
        for step, first, second in steps:
            values.append(step(values[first], values[second]))
        return (*(values[k] for k in results), values[-1])

    return drawn


def deals(count: int) -> list[list[str]]:
    """All ways to draw in `count` lists."""
    names = list(DRAWS)
    random.Random(count).shuffle(names)
    return [names[k::count] for k in range(count)]


def outcome(function: Callable[..., Any], x: Tensor, w: Tensor, train: bool) -> list[Tensor]:
    """Results, then gradients, and the state of the generator after the call and after its backward."""
    torch.manual_seed(7)
    x, w = x.clone().requires_grad_(train), w.clone().requires_grad_(train)
    found = function(x, w)
    seen = [*(one.detach().clone() for one in found), torch.get_rng_state()]
    loss = [one.square().mean() for one in found if one.requires_grad]
    if loss:
        seen += [one for one in torch.autograd.grad(sum(loss), (x, w), allow_unused=True) if one is not None]
        seen.append(torch.get_rng_state())
    return seen


def assert_same(found: list[Tensor], wanted: list[Tensor], bound: float = 2e-4) -> None:
    """States of the generator equal, numbers near."""
    assert len(found) == len(wanted)
    for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if one.dtype == torch.uint8:
            assert torch.equal(one, other), f"the generator's state differs at place {place}"
        else:
            scale = max(1.0, float(other.abs().nan_to_num(0.0, 0.0).max()) if other.numel() else 1.0)
            torch.testing.assert_close(one, other, rtol=bound, atol=bound * scale, equal_nan=True)
