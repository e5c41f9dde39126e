"""Convolutions with channels last: as eager's for every kind, and packed weights that notice every change."""
from __future__ import annotations

import gc
import math
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import anyshape
import forked
from anyshape.passes.channels_last import channels_last
from anyshape.passes.memory_format import leader, lies_last
from anyshape.runtime.context.process_context import shared_context
from anyshape.runtime.driver.torch_driver import same_strides
from anyshape.runtime.memory.packed_weights import PackedWeights
from anyshape.runtime.specialize.saved_policy import SAVE_ALL
from anyshape.runtime.torch_ops.convolution import by_product, convolve, few_windows
from anyshape.runtime.torch_ops.onednn_workarounds import guarded_backward, guarded_convolution
from anyshape.torch_compat.versions import api
from limits import NO_LIMIT, limit_of
from roads import compilation_of
from sampling import crossed, some

pytestmark = pytest.mark.usefixtures("quick_collections")

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def packed() -> PackedWeights:
    return shared_context().packed


class Random(nn.Module):
    """A chain of convolutions of any kind, with what a network puts between them."""

    def __init__(self, dims: int, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.dims = dims
        self.layers = nn.ModuleList()
        self.between = []
        channels = draw.choice([1, 2, 3])
        self.channels = channels
        for _ in range(4):
            groups = draw.choice([1, 1, channels])
            wanted = groups * draw.choice([1, 2, 5])
            kernel = [draw.choice([1, 1, 2, 3]) for _ in range(dims)] if draw.random() < 0.7 else [1] * dims
            self.layers.append(CONV[dims](channels, wanted, kernel, draw.choice([1, 1, 2]), draw.choice([0, 1]),
                                          draw.choice([1, 1, 2]), groups, bias=draw.random() < 0.5))
            self.between.append(draw.choice(["relu", "norm", "residual", "pad", "mean", "none", "flip", "swap"]))
            channels = wanted
        self.end = draw.choice(["flatten", "pool", "none", "tokens"])
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        axes = tuple(range(2, 2 + self.dims))
        for layer, between in zip(self.layers, self.between, strict=True):
            x = layer(x)
            if between == "relu":
                x = F.relu(x)
            elif between == "norm":
                x = (x - x.mean(axes, keepdim=True)) * torch.rsqrt(x.var(axes, keepdim=True, unbiased=False) + 1e-3)
            elif between == "residual":
                x = torch.cat([x, x * 0.5], 1)[:, :x.shape[1]] + x.amax(1, keepdim=True)
            elif between == "pad":
                x = F.pad(x, (1, 0) * self.dims, value=0.25)
            elif between == "mean":
                x = x - x.mean((0, *axes))[:, None].reshape(-1, *[1] * self.dims)
            elif between == "flip":
                x = x.flip(2, -1)
            elif between == "swap" and self.dims > 1:
                x = x.transpose(2, 3)
        if self.end == "flatten":
            return x.flatten(1)
        if self.end == "pool":
            return x.mean(axes)
        return x.flatten(2).transpose(1, 2) if self.end == "tokens" else x


@pytest.mark.parametrize(("seed", "dims"), crossed(range(4), [1, 2, 3], one_in=4))
def test_any_chain_is_as_eager(dims: int, seed: int) -> None:
    model = Random(dims, 10 * seed + dims)
    compiled = anyshape.compile(model, strict=True)
    for batch, *sizes in ((2, 17, 12, 9), (1, 9, 31, 10), (3, 16, 9, 9), (0, 12, 11, 10), (2, 17, 12, 9)):
        x = torch.randn(batch, model.channels, *sizes[:dims])
        try:
            wanted = model(x)
        except RuntimeError:
            with pytest.raises(RuntimeError):  # a window that is too large, or the extreme of nothing
                compiled(x)
            continue
        with torch.no_grad():
            found = compiled(x)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        assert same_strides(found.shape, found.stride(), wanted.stride())


def gradients(run, model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The result, and the gradients of the input and of all parameters."""
    x = x.clone().requires_grad_()
    model.zero_grad(set_to_none=True)
    result = run(x)
    (result * torch.linspace(0.5, 1.5, result.numel()).reshape(result.shape)).sum().backward()
    return [result.detach(), x.grad, *[p.grad for p in model.parameters()]]


def close(found: list[torch.Tensor], wanted: list[torch.Tensor], what: object) -> None:
    # biases before a norm have no gradient but what rounding makes of the others
    largest = max(1.0, *(float(other.abs().max()) for other in wanted))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=3e-5 * largest, msg=lambda m: f"{what}: {m}")


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("seed", some(range(3), 3, 1))
def test_any_chain_trains_as_eager(dims: int, seed: int) -> None:
    model = Random(dims, 10 * seed + dims)
    compiled = anyshape.compile(model, strict=True)
    for batch, *sizes in ((2, 17, 12, 9), (1, 9, 31, 10), (3, 16, 9, 9)):
        x = torch.randn(batch, model.channels, *sizes[:dims])
        try:
            wanted = gradients(model, model, x)
        except RuntimeError:
            continue
        close(gradients(compiled, model, x), wanted, (dims, seed, batch))


PIXELS = """
import ctypes
import mmap
import torch
from torch import nn
import anyshape

assert ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD: what is larger has pages of its own
torch.manual_seed(0)
torch.set_num_threads(1)
nobodys = []
all_sizes = {1: ((3, 40), (2, 4096)), 2: ((3, 14, 20), (1, 1024, 1024), (2, 127, 161)), 3: ((2, 8, 32, 32),)}
for dims, sizes in all_sizes.items():
    module = getattr(nn, f"Conv{dims}d")(3, 1, 1, stride=2)
    run = anyshape.compile(module, strict=True)
    for batch, *size in sizes:
        x = torch.randn(batch, 3, *size)
        found = run(x.movedim(1, -1).contiguous().movedim(-1, 1))
        # what is taken from here on lies below memory that nobody may touch
        nobodys += [mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE, prot=0) for _ in range(100)]
        found.square().sum().backward()
        gradients = [parameter.grad for parameter in module.parameters()]
        module.zero_grad(set_to_none=True)
        pixels = x[(..., *[slice(None, None, 2)] * dims)].double()
        weights, bias = (parameter.double() for parameter in module.parameters())
        (torch.einsum("nc...,oc->no...", pixels, weights.flatten(1)) + bias).square().sum().backward()
        for one, parameter in zip(gradients, module.parameters(), strict=True):
            torch.testing.assert_close(one, parameter.grad, rtol=1e-4, atol=1e-4 * float(one.abs().max()))
        module.zero_grad(set_to_none=True)
print("all is well")
"""


def test_few_channels_without_a_window_are_trained_within_their_memory(tmp_path: Path) -> None:
    """oneDNN writes beyond its own there: eager PyTorch dies of the second image."""
    (tmp_path / "pixels.py").write_text(PIXELS)
    done = forked.Run(tmp_path / "pixels.py", [], os.environ, tmp_path).done(600)
    assert done.stdout.strip() == "all is well", done.stderr[-2000:]


class Odd(nn.Module):
    """Convolutions that oneDNN does wrongly in bf16 with channels last, among plain ones."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        conv, turned = CONV[dims], {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}[dims]
        self.layers = nn.ModuleList([
            conv(3, 6, 3, padding=1), turned(6, 40, (*[2] * (dims - 1), 5), (*[1] * (dims - 1), 3), dilation=2),
            conv(40, 17, 3, padding=2, dilation=2), conv(17, 16, (*[2] * (dims - 1), 3)),
            conv(16, 32, 3, padding=1, groups=4), conv(32, 32, 3, padding=1, groups=32), conv(32, 2, 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_transposed_windows_side_by_side_are_a_product(dims: int) -> None:
    """Others are PyTorch's: those that overlap, have gaps or a border, and groups."""
    turned = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}[dims]
    kinds: list[tuple[int, bool, dict[str, Any]]] = [
        (2, True, {"stride": 2}), (3, True, {"stride": 3, "bias": False}), (1, True, {}), (2, False, {"stride": 1}),
        (2, False, {"stride": 2, "padding": 1}), (2, False, {"stride": 3}),
        (2, False, {"stride": 2, "output_padding": 1}), (2, False, {"stride": 2, "groups": 2})]
    for kernel, product, settings in kinds[:: 1 if dims == 2 else 3]:
        model = nn.Sequential(CONV[dims](3, 4, 3, padding=1), nn.ReLU(), turned(4, 6, kernel, **settings), nn.SiLU(),
                              CONV[dims](6, 2, 1)).eval()
        fast = anyshape.compile(model, strict=True)
        with torch.no_grad():
            for sizes in ((2, 3, 5, 3, 4), (1, 3, 2, 2, 2), (3, 3, 7, 4, 2)):
                x = torch.randn(sizes[:2 + dims])
                torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)
        assert dims != 2 or ("aten.convolution" not in str(fast.explain())) == product


@pytest.mark.parametrize("dims", [2, 3])
def test_what_is_wrong_with_channels_last_has_them_where_they_are(dims: int) -> None:
    torch.manual_seed(0)
    model = Odd(dims).bfloat16()
    compiled = anyshape.compile(model, strict=True)
    for batch, *sizes in ((1, 9, 33, 7), (3, 12, 20, 6), (2, 7, 7, 8)):
        x = torch.randn(batch, 3, *sizes[:dims]).bfloat16()
        for found, wanted in zip(gradients(compiled, model, x), gradients(model, model, x), strict=True):
            torch.testing.assert_close(found.float(), wanted.float(), rtol=0.1, atol=0.05 * float(wanted.abs().max()))


@pytest.mark.parametrize("dims", [1, 2])
def test_groups_of_one_channel_are_reduced_once(dims: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(CONV[dims](1, 16, 5, 3), nn.GroupNorm(16, 16), nn.GELU(), CONV[dims](16, 4, 2)).eval()
    compiled = anyshape.compile(model, strict=True, check=1)
    for batch, size in ((2, 60), (1, 37), (3, 91)):
        x = torch.randn(batch, 1, *(size,) * dims)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    nodes = compilation_of(compiled).programs[0].compiled.graph.nodes
    assert sum(node.op == "sum" for node in nodes) == 2


def test_one_such_layer_leaves_the_plain_ones_with_channels_last() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, dilation=1), nn.ReLU()) for _ in range(6)),
                          nn.Conv2d(16, 3, 3, dilation=2)).bfloat16()
    compiled = anyshape.compile(model, strict=True)
    x = torch.randn(2, 16, 12, 14).bfloat16()
    for found, wanted in zip(gradients(compiled, model, x), gradients(model, model, x), strict=True):
        torch.testing.assert_close(found.float(), wanted.float(), rtol=0.1, atol=0.05 * float(wanted.abs().max()))
    forward = next(p.compiled.graph for p in compilation_of(compiled).programs if "forward" in p.name)
    assert sum(node.op == "convolution" for node in forward.nodes) == 6


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(8, 20))])
def test_odd_convolutions_of_bf16_are_right_with_channels_last(seed: int) -> None:
    """What a caller gives with channels last, too, where eager PyTorch is wrong at times."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    dims, groups, turned = draw.choice([1, 2, 3]), draw.choice([1, 2, 3]), draw.random() < 0.4
    channels, number = groups * draw.choice([1, 2, 17, 16]), groups * draw.choice([1, 2, 5, 16])
    pairs = [[draw.choice([1, 2, 3]) for _ in range(dims)] for _ in range(3)]
    images = torch.randn(2, channels, *(draw.choice([1, 7, 12, 33]) for _ in range(dims))).bfloat16()
    weights = torch.randn(*(channels, number // groups) if turned else (number, channels // groups),
                          *pairs[0]).bfloat16()
    more = (pairs[1], [1] * dims, [draw.choice([1, 2]) for _ in range(dims)], turned, [0] * dims, groups)

    def both(images: torch.Tensor, weights: torch.Tensor, is_ours: bool) -> tuple[torch.Tensor, ...]:
        function, backward = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
        if is_ours:
            function, backward = guarded_convolution(function), guarded_backward(backward)
        result = function(images, weights, None, *more)
        gradient = torch.linspace(-1, 1, result.numel()).view(result.shape).to(result)
        gradient = last(gradient) if is_ours else gradient
        return result, *backward(gradient, images, weights, [number], *more, [True, True, False])[:2]

    def last(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.movedim(1, -1).contiguous().movedim(-1, 1)

    def is_right(one: torch.Tensor, other: torch.Tensor) -> bool:
        return torch.allclose(one.double(), other, rtol=0.05, atol=0.02 * float(other.abs().max()))

    try:
        wanted = both(images.double(), weights.double(), False)
    except RuntimeError:
        return  # no result at this size
    for one, other in zip(both(last(images), weights, True), wanted, strict=True):
        assert is_right(one, other)


NARROW = [  # images, weights, strides, padding, dilation, transposed: what oneDNN does wrongly on processors with AMX
    ((2, 8, 17, 4), (17, 8, 2, 3), (2, 2), (0, 0), (1, 1), False),
    ((2, 3, 9, 1), (16, 3, 3, 3), (1, 2), (1, 2), (1, 1), False),
    ((2, 8, 1, 24), (1, 8, 2, 2), (1, 1), (1, 0), (2, 2), False),
    ((5, 1, 49, 43), (17, 1, 1, 2), (3, 1), (0, 2), (1, 2), False),
    ((5, 17, 12, 1), (17, 1, 3, 3), (3, 2), (0, 0), (1, 1), True),
    ((3, 6, 1, 9, 5), (6, 1, 5, 5, 5), (1, 1, 1), (2, 0, 1), (1, 1, 1), True),
    ((2, 16, 1, 1), (8, 16, 1, 1), (1, 1), (0, 0), (1, 1), False)]  # and one that is right


@pytest.mark.parametrize("case", NARROW, ids=str)
def test_narrow_images_in_half_precision(case: Any) -> None:
    images, weights, strides, padding, dilation, turned = case
    torch.manual_seed(0)
    operands = [torch.randn(*shape).bfloat16() for shape in (images, weights)]
    rest = strides, padding, dilation, turned, [0] * len(strides), 1
    function, backward = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
    wanted = function(*(one.double() for one in operands), None, *rest)
    gradient = torch.randn(wanted.shape).bfloat16()
    channels = [weights[1 if turned else 0]]
    wanted = wanted, *backward(gradient.double(), *(one.double() for one in operands), channels, *rest, [True] * 3)
    found = (guarded_convolution(function)(*operands, None, *rest),
             *guarded_backward(backward)(gradient, *operands, channels, *rest, [True] * 3))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0.02, atol=0.01 * float(other.abs().max()))


def test_a_nan_of_no_number_in_the_gradient_of_weights_is_not_kept() -> None:
    """As where oneDNN takes zero times what lies in its scratch; one that the numbers have stays."""
    calls: list[torch.dtype] = []

    def library(gradient: torch.Tensor, images: torch.Tensor, weights: torch.Tensor, *rest: Any) -> Any:
        calls.append(images.dtype)
        found = torch.ops.aten.convolution_backward.default(gradient, images, weights, *rest)
        if images.dtype == torch.bfloat16:
            found[1][0, -1, -1, -1] = math.nan
        return found

    torch.manual_seed(0)
    images, weights = torch.randn(2, 4, 9, 8).bfloat16(), torch.randn(3, 4, 3, 3).bfloat16()
    gradient = torch.randn(2, 3, 7, 6).bfloat16()
    rest = [3], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True]
    found = guarded_backward(library)(gradient, images, weights, *rest)
    wanted = torch.ops.aten.convolution_backward.default(*(one.double() for one in (gradient, images, weights)), *rest)
    assert calls == [torch.bfloat16, torch.float32]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0.02, atol=0.1)
    gradient[0, 0, 0, 0] = math.nan
    assert guarded_backward(library)(gradient, images, weights, *rest)[1][0].isnan().all()


class Levels(nn.Module):
    """What a network that is trained puts between convolutions: norms over batches and over groups, pooling with its
    positions, resizing, a skip, one convolution a channel, and a turned one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.batch = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.each, self.group = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), nn.GroupNorm(8, 16)
        self.wide, self.back = nn.Conv2d(16, 24, 1), nn.ConvTranspose2d(24, 16, 2, stride=2)
        self.last = nn.Conv2d(32, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.batch(self.first(x)))
        small = F.silu(self.group(self.each(F.max_pool2d(x, 2, ceil_mode=True))))
        large = F.interpolate(small, scale_factor=2.0, mode="nearest") + self.back(self.wide(small))
        return self.last(torch.cat([x, large[:, :, :x.shape[2], :x.shape[3]]], 1))


def test_training_takes_channels_last_from_end_to_end() -> None:
    torch.manual_seed(0)
    model = Levels()
    compiled = anyshape.compile(model, strict=True)
    for shape in ((2, 3, 16, 22), (3, 3, 17, 13), (1, 3, 9, 40), (2, 3, 6, 7)):
        x = torch.randn(shape)
        state = {name: one.clone() for name, one in model.state_dict().items()}
        wanted = gradients(model, model, x)
        after = {name: one.clone() for name, one in model.state_dict().items()}
        model.load_state_dict(state)
        close(gradients(compiled, model, x), wanted, shape)
        close([model.state_dict()[name] for name in after], [*after.values()], shape)
    forward, backward = (next(p.compiled.graph for p in compilation_of(compiled).programs if part in p.name)
                         for part in ("forward", "backward"))
    assert sum(node.op == "convolution" for node in forward.nodes) == 3
    leaders = [lead for node in backward.nodes if (lead := leader(node)) is not None]
    permuted = {node.output.name for node in backward.nodes if node.op == "permute"}
    assert len(leaders) == 6
    # all but the images themselves lie with channels last
    assert sum(lead.name in permuted or lies_last(lead.tensor) for lead in leaders) == 5


def test_a_train_step_and_a_limit_take_channels_last() -> None:
    torch.manual_seed(0)
    ours, theirs = (nn.Sequential(*(part for _ in range(8) for part in (
        nn.LazyConv2d(8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU()))) for _ in range(2))
    for model in (ours, theirs):
        model(torch.randn(1, 3, 8, 8))
    theirs.load_state_dict(ours.state_dict())
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (ours, theirs))

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    step = anyshape.train_step(ours, loss_of, first, strict=True, memory_limit=NO_LIMIT)
    dropped = []
    for size in (32, 32, 17):
        x = torch.randn(4, 3, size, 24)
        step(x)
        second.zero_grad()
        loss_of(theirs, x).backward()
        second.step()
        limit = limit_of(step)
        dropped += [len(record.policy.dropped) for record in limit.program.specializations.values()]
        values = dict(next(iter(limit.program.specializations.values())).values)
        least = limit.least(values)
        assert least < 0.9 * limit.needed(values, SAVE_ALL)
        limit.move(least)  # the next step at these sizes drops what it can
    assert any(dropped)
    assert any(node.op == "convolution" for program in step.programs for node in program.compiled.graph.nodes)
    for one, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-3, atol=1e-4)


class Small(nn.Module):
    """Two convolutions with a norm of running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3)
        self.norm = nn.BatchNorm2d(16)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.relu(self.norm(self.first(x)))).mean((2, 3))


def test_weights_and_a_bias_of_any_number_of_channels() -> None:
    """The trace of torch 2.11 does not ask whether a bias has as many channels as the weights."""
    fast = anyshape.compile(lambda x, w, b: nn.functional.conv2d(x, w, b).relu(), strict=True)
    x = torch.randn(2, 3, 8, 8)
    for channels in (4, 5, 8):
        w, b = torch.randn(channels, 3, 3, 3), torch.randn(channels)
        torch.testing.assert_close(fast(x, w, b), nn.functional.conv2d(x, w, b).relu(), rtol=1e-4, atol=1e-4)
    with pytest.raises((RuntimeError, anyshape.AnyShapeError), match="bias"):
        fast(x, torch.randn(3, 3, 3, 3), torch.randn(7))
    assert len(fast.programs) == 1


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_operands_in_either_format(form: torch.memory_format) -> None:
    model = Small().to(memory_format=form)
    compiled = anyshape.compile(model, strict=True)
    with torch.no_grad():
        for size in ((2, 8, 9), (1, 5, 31), (2, 1, 1), (3, 3, 3)):
            x = torch.randn(size[0], 3, *size[1:]).to(memory_format=form)
            if min(size[1:]) < 3:
                with pytest.raises(RuntimeError):
                    model(x)
                with pytest.raises((RuntimeError, anyshape.AnyShapeError)):
                    compiled(x)
                continue
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


def changes(model: Small) -> dict[str, object]:
    """Ways in which weights change between calls; those through `.data` leave no version behind."""
    weight = model.second.weight
    other = Small()
    return {
        "in place": lambda: weight.mul_(2),
        "data": lambda: weight.data.mul_(2),
        "one element of data": lambda: weight.data.view(-1)[-1:].add_(0.5),
        "data replaced": lambda: setattr(weight, "data", torch.randn_like(weight)),
        "parameter replaced": lambda: setattr(model.second, "weight", nn.Parameter(torch.randn_like(weight))),
        "numpy": lambda: weight.detach().numpy().__imul__(3),
        "state": lambda: model.load_state_dict(other.state_dict()),
        "channels last": lambda: model.to(memory_format=torch.channels_last),
        "swapped": lambda: weight.data.copy_(weight.data.flip(0)),
    }


@pytest.mark.parametrize(("name", "products"), crossed(changes(Small()), ["own", "library"]))
def test_packed_weights_notice_a_change(name: str, products: str) -> None:
    model = Small()
    compiled = anyshape.compile(model, strict=True, products=products)
    x = torch.randn(2, 3, 9, 10)
    with torch.no_grad():
        compiled(x)
        compiled(x)
        assert products == "own" or packed().bytes > 0, "nothing was packed, so nothing is tested"
        changes(model)[name]()  # type: ignore[operator]
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


def test_packed_weights_go_with_their_program() -> None:
    model, x = Small(), torch.randn(2, 3, 9, 10)
    compiled = anyshape.compile(torch.export.export(model, (x,)), strict=True, products="library")
    gc.collect()
    packed().release()  # what other tests have left, which might go at any time
    with torch.no_grad():
        before = packed().bytes
        compiled(x)
        assert packed().bytes == before + model.first.weight.nbytes + model.second.weight.nbytes
        del compiled
        gc.collect()
        assert packed().bytes == before


def test_packed_weights_keep_within_their_room() -> None:
    store = PackedWeights(shared_context().packed.digest)
    weights = [torch.full((100,), float(i)) for i in range(4)]  # 400 bytes each

    def use() -> int:
        """How many had to be packed."""
        made: list[int] = []
        for i, tensor in enumerate(weights):
            copy = store.get((1, i), tensor, lambda tensor=tensor, i=i: made.append(i) or tensor.clone())
            assert torch.equal(copy, tensor)
        return len(made)

    sizes = [400] * 4
    store.begin(0, sizes, limit=2000)
    assert use() == 4 and store.bytes == 1600 and use() == 0
    store.begin(1000, sizes, limit=2000)  # 1000 are left, less 400 for the one being packed
    assert store.bytes == 400 and use() == 3 and store.bytes == 400
    store.begin(5000, sizes, limit=2000)
    assert store.bytes == 0 and use() == 4 and store.bytes == 0
    store.begin(0, sizes, limit=2000)  # what the neediest call held may be used
    assert use() == 4 and use() == 0
    store.forget(2)
    assert store.bytes == 1600
    store.forget(1)
    assert store.bytes == 0 and not store.entries


def test_without_room_or_library_the_numbers_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Small(), torch.randn(2, 3, 9, 10)
    with torch.no_grad():
        wanted = model(x)
        never = anyshape.compile(model, strict=True, packed_bytes=0)
        torch.testing.assert_close(never(x), wanted, rtol=1e-4, atol=1e-5)
        with torch.backends.mkldnn.flags(enabled=False):
            torch.testing.assert_close(anyshape.compile(model, strict=True)(x), wanted, rtol=1e-4, atol=1e-5)
        plain = anyshape.compile(model, strict=True, disable=channels_last.__name__)
        torch.testing.assert_close(plain(x), wanted, rtol=1e-4, atol=1e-5)
        assert "anyshape.convolution" not in str(plain.explain().to_dict())


def test_a_digest_sees_every_word() -> None:
    digest = packed().digest

    def of(tensor: torch.Tensor) -> int:
        return digest(tensor.data_ptr(), tensor.nbytes)

    for count in (0, 1, 2, 63, 64, 65, 127, 1000):
        tensor = torch.randn(count)
        before = of(tensor)
        assert of(tensor.clone()) == before
        for i in range(count):
            kept = tensor[i].clone()
            tensor[i] = torch.nextafter(kept, kept + 1)
            assert of(tensor) != before, (count, i)
            tensor[i] = kept
        if count > 64:
            assert of(tensor.roll(1)) != before and of(tensor.roll(64)) != before
    assert of(torch.tensor([0.0])) != of(torch.tensor([-0.0]))


def test_convolve_against_the_plain_call() -> None:
    def pack(weights: torch.Tensor, how: object) -> torch.Tensor:
        return how()  # type: ignore[operator, no-any-return]

    torch.manual_seed(0)
    draw = random.Random(0)
    for _ in range(60):
        dims, groups = draw.choice([1, 2, 3]), draw.choice([1, 1, 2])
        inside, outside = groups * draw.choice([1, 3, 8]), groups * draw.choice([1, 4, 17])
        kernel, stride, around, apart = ([draw.choice(pool) for _ in range(dims)]
                                         for pool in ((1, 2, 3), (1, 2), (0, 1), (1, 2)))
        x = torch.randn(draw.choice([1, 2]), *[draw.choice([5, 6, 11]) for _ in range(dims)], inside)
        weights = torch.randn(outside, inside // groups, *kernel)
        bias = torch.randn(outside) if draw.random() < 0.5 else None
        arguments = (x, weights, bias, tuple(stride), tuple(around), tuple(apart), groups)
        torch.testing.assert_close(convolve(*arguments, packed=pack), convolve(*arguments), rtol=1e-4, atol=1e-4)


def test_few_windows_are_a_product_with_the_weights_as_they_are() -> None:
    draw = random.Random(0)
    for _ in range(60):
        kernel, stride, around, apart = ([draw.choice(pool) for _ in range(2)]
                                         for pool in ((1, 2, 3), (1, 2), (0, 1), (1, 2)))
        x = torch.randn(draw.choice([1, 2]), *[draw.choice([5, 6, 11]) for _ in range(2)], draw.choice([1, 3, 8]))
        weights = torch.randn(draw.choice([1, 17]), x.shape[-1], *kernel)
        bias = torch.randn(weights.shape[0]) if draw.random() < 0.5 else None
        arguments = (x, weights, bias, tuple(stride), tuple(around), tuple(apart), 1)
        wanted = convolve(*arguments)
        found = by_product(*arguments)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        assert same_strides(found.shape, found.stride(), wanted.contiguous().stride())


@pytest.mark.parametrize("room", [0, 1 << 30])
def test_weights_without_room_are_not_reordered_for_few_windows(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    pack = api.pack_convolution
    monkeypatch.setattr(api, "pack_convolution", lambda *given: made.append(1) or pack(*given))
    monkeypatch.setattr(packed(), "most", 0)  # what calls of earlier tests have held is room, too
    model = nn.Sequential(nn.Conv2d(512, 512, 3, padding=1), nn.ReLU(), nn.Conv2d(512, 512, 3, 2, 1)).eval()
    with torch.no_grad():
        fast = anyshape.compile(model, strict=True, packed_bytes=room)
        for size, most in ((3, 0), (20, 2), (4, 0)):
            x = torch.randn(1, 512, size, size)
            made.clear()
            torch.testing.assert_close(fast(x), model(x), rtol=1e-3, atol=1e-4)
            assert len(made) == (most if room == 0 else 2 * (size == 3)), size
    assert few_windows(torch.zeros(1, 3, 3, 512), model[0].weight, (1, 1), (1, 1), (1, 1), 1)
    assert not few_windows(torch.zeros(1, 20, 20, 512), model[0].weight, (1, 1), (1, 1), (1, 1), 1)


def test_threads_share_packed_weights() -> None:
    model = Small()
    compiled = anyshape.compile(model, strict=True)
    inputs = [torch.randn(1 + i % 3, 3, 5 + i, 9) for i in range(8)]
    with torch.no_grad():
        wanted = [model(x) for x in inputs]
        compiled(inputs[0])
    wrong: list[str] = []

    def work() -> None:
        with torch.no_grad():
            for _ in range(10):
                for x, right in zip(inputs, wanted, strict=True):
                    if not torch.allclose(compiled(x), right, rtol=1e-4, atol=1e-5):
                        wrong.append(str(x.shape))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
