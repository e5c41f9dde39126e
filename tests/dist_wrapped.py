"""Models that users have wrapped with torch.distributed, compiled, against the same without: one rank of two."""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import anyshape
from anyshape.base.errors import AnyShapeError

WIDTH = 32
WIDE = 320  # weights of 3.3 MB: with buckets of 1 MiB torch.compile cuts a forward at their borders


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = WIDTH, loops: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.head = Block(width), Block(width), nn.Linear(width, 4)
        self.loops = loops
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        if self.loops:
            for block in (self.first, self.second):
                x = block(x)
            return self.head(x)
        return self.head(self.second(self.first(x).sin()))


class Deep(nn.Module):
    """Loops over blocks, of several kinds, with something to compute in them."""

    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ModuleList(Block() for _ in range(2))
        self.named = nn.ModuleDict({name: Block() for name in ("first", "second")})
        self.others = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.list:
            x = block(x).sin()
        for number, block in enumerate(self.named.values()):
            x = block(x) / (1 + number)
        for scale, block in zip((0.5, 2.0), self.others[:2], strict=True):
            x = x + scale * block(x)
        for number in range(2, 4):
            x = self.others[number](x.tanh())
        return self.head(x)


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)


class Attention(nn.Module):
    """Of positions to those of another sequence, with a bias by distance, as in T5."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.distances = nn.Embedding(8, heads)

    def forward(self, x: Tensor, y: Tensor, causal: bool = False) -> Tensor:
        q, k, v = (weight(z).unflatten(-1, (self.heads, -1)).transpose(0, 1)
                   for weight, z in ((self.q, x), (self.k, y), (self.v, y)))
        steps = torch.arange(y.shape[0]) - torch.arange(x.shape[0])[:, None]
        scores = q @ k.transpose(1, 2) + self.distances(steps.clamp(-4, 3) + 4).permute(2, 0, 1)
        if causal:
            scores = scores.masked_fill(steps > 0, float("-inf"))
        return self.o((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))  # type: ignore[no-any-return]


class Coder(nn.Module):
    """A layer of an encoder, and of a decoder where it is given what the encoder made."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(3))
        self.own, self.other = Attention(), Attention()
        self.up, self.gate, self.down = nn.Linear(WIDTH, 40), nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def forward(self, x: Tensor, made: Tensor | None = None) -> Tensor:
        y = self.norms[0](x)
        x = x + self.own(y, y, made is not None)
        y = self.norms[1](x)
        x = x + self.other(y, y if made is None else made)
        y = self.norms[2](x)
        return x + self.down(nn.functional.gelu(self.gate(y)) * self.up(y))


class Translator(nn.Module):
    """An encoder and a decoder, of other lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.ModuleList([Coder(), Coder()]), nn.ModuleList([Coder(), Coder()])
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        made, y = x, x[:-1].sin()
        for layer in self.encoder:
            made = layer(made)
        for layer in self.decoder:
            y = layer(y, made)
        return self.head(y)


class Experts(nn.Module):
    """The two best of four experts for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, WIDTH, 40) / 6)
        self.down = nn.Parameter(torch.randn(4, 40, WIDTH) / 6)

    def forward(self, x: Tensor) -> Tensor:
        best, ids = self.gate(x).softmax(-1).topk(2, -1)
        shares = torch.zeros(x.shape[0], 4).scatter(1, ids, best / best.sum(-1, keepdim=True))
        inner = nn.functional.silu(torch.einsum("nd,edh->enh", x, self.up))
        return torch.einsum("enh,ehd,ne->nd", inner, self.down, shares)


class Mixture(nn.Module):
    """Experts in blocks of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), Experts()) for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


BLOCKS = (Block, Coder, nn.Sequential)
strict = functools.partial(anyshape.compile, strict=True)
by_backend = functools.partial(torch.compile, backend="anyshape", dynamic=True, options={"strict": True})
parallel = functools.partial(DistributedDataParallel, bucket_cap_mb=0.001)  # several buckets


def sharded(model: Any, compiled: Callable[[nn.Module], nn.Module] = lambda block: block, **more: Any) -> nn.Module:
    for parent in list(model.modules()):
        for name, part in parent.named_children():
            if isinstance(part, BLOCKS):
                setattr(parent, name, compiled(part))
                fully_shard(getattr(parent, name), mesh=mesh(), **more)
    fully_shard(model, mesh=mesh(), **more)
    return model  # type: ignore[no-any-return]


@functools.cache
def mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def columns(model: Any) -> nn.Module:
    for part in (model.first, model.second):
        parallelize_module(part, mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model  # type: ignore[no-any-return]


def positions(model: Any) -> nn.Module:
    """As `columns`, and positions are dealt out between the products. Lengths that ranks do not divide need DTensors
    all along: what is made of local parts has as many times the local ones."""
    for part in (model.first, model.second):
        parallelize_module(part, mesh(), {
            "norm": SequenceParallel(sequence_dim=0), "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False)})
    return parallelize_module(model, mesh(), {
        "first": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(0),)),
        "head": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate())})


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


def trained(reference: nn.Module, model: nn.Module, *, quiet: bool = False, rows: int = 1, hook: Any = None,
            width: int = WIDTH) -> dict[str, Any]:
    """Trains both on lengths that differ by step, and by rank where `rows` is 1; compares weights, buffers, losses."""
    for one in (reference, model) if hook else ():
        one.register_comm_hook(None, hook)
    before = anyshape.stats()
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2, eps=1e-3) for one in (reference, model)]
    worst = 0.0
    for number, length in enumerate((3, 5, 8, 7)):
        torch.manual_seed(10 * number + dist.get_rank() * rows)
        x = torch.randn(length + 2 * dist.get_rank() * rows, width)
        losses = []
        for one, optimizer in zip((reference, model), optimizers, strict=True):
            skips = quiet and number % 2 == 0
            with one.no_sync() if skips else contextlib.nullcontext():
                loss = one(x).float().square().mean()
                loss.backward()
            losses.append(loss.detach())
            if not skips:
                optimizer.step()
                optimizer.zero_grad()
        worst = max(worst, float((losses[0] - losses[1]).abs()))
    for own, other in zip(reference.state_dict().values(), model.state_dict().values(), strict=True):
        worst = max(worst, float((whole(own) - whole(other)).detach().abs().max()))
    after = anyshape.stats()
    return {"worst": worst, **{name: after[name] - before[name] for name in ("programs", "eager_calls", "runs")}}


def alike(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def pair(reference: Callable[[], nn.Module], model: Callable[[], nn.Module], **more: Any) -> dict[str, Any]:
    return trained(alike(reference), alike(model), **more)


def steps() -> dict[str, Any]:
    """A train step of a model under DistributedDataParallel, and what is refused."""
    reference, model = alike(lambda: parallel(Net())), alike(lambda: parallel(Net()))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (reference, model)]
    step = anyshape.train_step(model, lambda model, x: model(x).square().mean(), optimizers[1], strict=True)
    for length in (3, 6):
        torch.manual_seed(length + dist.get_rank())
        x = torch.randn(length, WIDTH)
        reference(x).square().mean().backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        step(x)
    worst = max(float((a - b).detach().abs().max())
                for a, b in zip(reference.parameters(), model.parameters(), strict=True))
    refused = []
    hooked = parallel(Net())
    hooked.register_comm_hook(None, allreduce_hook)
    for bad in (sharded(Net()), columns(Net()), hooked):
        try:
            anyshape.train_step(bad, lambda model, x: model(x).sum(), torch.optim.SGD(bad.parameters(), lr=0.1))
        except AnyShapeError as error:
            refused.append(str(error))
    return {"worst": worst, "programs": len(step.programs), "refused": refused}


def collectives() -> dict[str, Any]:
    """Functional collectives in a function, also those that Dynamo makes of torch.distributed's."""
    group = dist.group.WORLD

    def function(x: Tensor) -> tuple[Tensor, ...]:
        h = x.sin()
        gathered = functional.all_gather_tensor(h, 0, group)
        scattered = functional.reduce_scatter_tensor(gathered * 2, "sum", 0, group)
        total = x * 2
        dist.all_reduce(total)
        return total + 1, gathered, scattered, functional.all_reduce(h, "max", group)

    def exchanged(x: Tensor) -> Tensor:
        return functional.all_to_all_single_autograd(x.cos(), None, None, group).exp()

    worst, fast, both = 0.0, strict(function), strict(exchanged)
    for rows in (4, 2, 8):
        x = torch.randn(rows, 5, requires_grad=True)
        for own, other in zip(function(x.detach()), fast(x.detach()), strict=True):
            worst = max(worst, float((own - other).abs().max()))
        (own,), (other,) = (torch.autograd.grad(one(x).square().sum(), x) for one in (exchanged, both))
        worst = max(worst, float((own - other).abs().max()))
    return {"worst": worst, "programs": len(fast.programs) + len(both.programs)}


def quick() -> dict[str, Any]:
    return {"ddp": pair(lambda: parallel(Net()), lambda: strict(parallel(Net()))),
            "tensor": pair(lambda: columns(Net()), lambda: strict(columns(Net())), rows=0), "steps": steps(),
            "sequence": pair(lambda: positions(Net()), lambda: strict(positions(Net())), rows=0),
            "loop": pair(lambda: sharded(Net(loops=True)), lambda: strict(sharded(Net(loops=True))))}


def more() -> dict[str, Any]:
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = {name: pair(lambda options=options: parallel(Net(), **options),
                        lambda options=options: strict(parallel(Net(), **options)))
             for name, options in (("view", {"gradient_as_bucket_view": True}), ("static", {"static_graph": True}),
                                   ("buffers", {"broadcast_buffers": False}))}
    for name, make in (("translator", Translator), ("mixture", Mixture)):
        found[name] = pair(lambda make=make: parallel(make()), lambda make=make: strict(parallel(make())))
        found[f"{name} blocks"] = pair(lambda make=make: sharded(make()), lambda make=make: sharded(make(), strict))
    return {
        **found,
        "backend": pair(lambda: parallel(Net()), lambda: by_backend(DistributedDataParallel(Net()))),
        "buckets": pair(lambda: parallel(Net(WIDE)), lambda: by_backend(DistributedDataParallel(
            Net(WIDE), bucket_cap_mb=1)), width=WIDE),
        "fsdp": pair(lambda: sharded(Net()), lambda: strict(sharded(Net()))),
        "collectives": collectives(),
        "unused": pair(lambda: parallel(Unused(), find_unused_parameters=True),
                       lambda: strict(parallel(Unused(), find_unused_parameters=True))),
        "quiet": pair(lambda: parallel(Net()), lambda: strict(parallel(Net())), quiet=True),
        "inside": pair(lambda: parallel(Net()), lambda: parallel(strict(Net()))),
        "hook": pair(lambda: parallel(Net()), lambda: strict(parallel(Net())), hook=allreduce_hook),
        "blocks": pair(lambda: sharded(Net(loops=True)), lambda: sharded(Net(loops=True), strict)),
        "kept": pair(lambda: sharded(Net(), reshard_after_forward=False),
                     lambda: strict(sharded(Net(), reshard_after_forward=False))),
        "loops": pair(lambda: sharded(Deep()), lambda: strict(sharded(Deep()))),
        "usual": pair(lambda: sharded(Net(loops=True)), lambda: anyshape.compile(sharded(Net(loops=True)))),
        "mixed": pair(lambda: sharded(Net(), mp_policy=mixed), lambda: strict(sharded(Net(), mp_policy=mixed)))}
