"""The models of the suite: each entry's function returns a `BenchModel`, which makes steps and inputs."""
from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from anyshape_bench.models import conformer as conformer_net
from anyshape_bench.models import dlrm as dlrm_net
from anyshape_bench.models import networks, padding
from anyshape_bench.models import unet as unet_net
from anyshape_bench.models.padding import Inputs, Pad
from anyshape_bench.models.suite import SUITE, Shape

Compiled = Callable[..., Any]
Compile = Callable[[nn.Module], Compiled]


class Step(Protocol):
    """What is timed: one call with the inputs of one shape."""

    def __call__(self, inputs: Inputs) -> object: ...

    def check(self, inputs: Inputs) -> dict[str, Tensor]:
        """The same work with its results named, and nothing updated, to be compared with another backend's."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers, so that a second step can start from the same point."""
        ...

    def load(self, state: dict[str, Tensor]) -> None: ...


@dataclass(frozen=True, slots=True)
class BenchModel:
    """One benchmark.

    Attributes:
        name: for reports.
        make: builds the model from a fixed seed, has it compiled by the function given, and returns the step.
        inputs: the inputs of one shape, the same each time.
        shapes: every shape, in the order of the first pass; the first two are the warm-up calls.
        trains: a step updates parameters.
        repeats: passes over the shapes when repeated shapes are measured.
        dims: the names of a shape's numbers.
        apart: shapes run once after the others.
        pad: makes inputs of a bucket's sizes with the same result; None: the model has no such padding.
    """

    name: str
    make: Callable[[Compile], Step]
    inputs: Callable[[Shape], Inputs]
    shapes: tuple[Shape, ...]
    trains: bool = False
    repeats: int = 2
    dims: tuple[str, ...] = ()
    apart: tuple[Shape, ...] = ()
    pad: Pad | None = None


def flatten(value: object) -> list[Tensor]:
    """The tensors of an output in order: of a tensor, of sequences, of mappings and of transformers' outputs."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in flatten(item)]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in flatten(item)]
    return []


class InferenceStep:
    """One forward call without gradients."""

    def __init__(self, module: nn.Module, compile_module: Compile) -> None:
        self.module = module.eval()
        self.compiled = compile_module(self.module)

    def __call__(self, inputs: Inputs) -> object:
        with torch.no_grad():
            return self.compiled(*inputs)

    def check(self, inputs: Inputs) -> dict[str, Tensor]:
        return {f"output {i}": tensor.clone() for i, tensor in enumerate(flatten(self(inputs)))}

    def state(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.module.state_dict().items()}

    def load(self, state: dict[str, Tensor]) -> None:
        self.module.load_state_dict(state)


class TranslateStep(InferenceStep):
    """A forward call of an encoder and decoder of transformers."""

    def __call__(self, inputs: Inputs) -> object:
        source, target = inputs
        with torch.no_grad():
            return self.compiled(input_ids=source, decoder_input_ids=target)


class TrainStep(InferenceStep):
    """One train step: forward with loss (compiled), backward, and AdamW, which is always torch's fused one. Moments
    exist from the start, so that memory before the first step is parameters and optimiser state."""

    def __init__(self, module: nn.Module, compile_module: Compile) -> None:
        module.train()
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
        make_moments(self.optimizer)
        self.module = module
        self.compiled = compile_module(module)

    def __call__(self, inputs: Inputs) -> object:
        loss = self.loss(self.compiled, *inputs)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def check(self, inputs: Inputs) -> dict[str, Tensor]:
        loss = self.loss(self.compiled, *inputs)
        loss.backward()
        found = {"loss": loss.detach().clone()}
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None:
                found[f"gradient of {name}"] = parameter.grad.detach().clone()
        self.optimizer.zero_grad(set_to_none=True)
        return found

    @staticmethod
    def loss(call: Compiled, *inputs: Tensor) -> Tensor:
        """What is trained on, of the module or of what it was compiled to."""
        result = call(*inputs)
        return result if isinstance(result, Tensor) else result.loss


class CausalTrainStep(TrainStep):
    """A train step of a language model of transformers, whose tokens are also the labels, if none are given."""

    @staticmethod
    def loss(call: Compiled, *inputs: Tensor) -> Tensor:
        tokens, labels = (*inputs, inputs[0])[:2]
        return call(input_ids=tokens, labels=labels).loss


class TranslateTrainStep(TrainStep):
    """A train step of an encoder and decoder of transformers; what is to be decoded are the labels."""

    @staticmethod
    def loss(call: Compiled, *inputs: Tensor) -> Tensor:
        source, target = inputs
        return call(input_ids=source, labels=target).loss


def make_moments(optimizer: torch.optim.Optimizer) -> None:
    """Lets the optimiser make its state without moving a parameter: one step of learning rate 0 on zero gradients."""
    groups = optimizer.param_groups
    rates = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate


def _seeded(name: str, shape: Shape) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(f"{name} {shape}".encode()))


def _model(name: str, build: Callable[[], nn.Module], inputs: Callable[[Shape, torch.Generator], Inputs],
           step: type[InferenceStep] = InferenceStep, pad: Pad | None = None) -> BenchModel:
    """Ties an entry of the suite to the function that builds its module and the one that draws its inputs."""
    entry = SUITE[name]

    def make(compile_module: Compile) -> Step:
        torch.manual_seed(0)
        return step(build(), compile_module)

    def inputs_of(shape: Shape) -> Inputs:
        return inputs(shape, _seeded(name, shape))

    return BenchModel(name, make, inputs_of, entry.shapes, entry.trains, entry.repeats, entry.dims,
                      entry.apart, pad)


def _tokens(vocabulary: int) -> Callable[[Shape, torch.Generator], Inputs]:
    return lambda shape, draw: (torch.randint(0, vocabulary, shape, generator=draw),)


def _image(shape: Shape, draw: torch.Generator) -> Inputs:
    batch, height, width = shape
    return (torch.randn(batch, 3, height, width, generator=draw),)


def _decode_inputs(shape: Shape, draw: torch.Generator) -> Inputs:
    (past,) = shape
    cache = (networks.DECODE_LAYERS, 1, networks.DECODE_HEADS, past, networks.DECODE_WIDTH // networks.DECODE_HEADS)
    token = torch.randint(0, networks.DECODE_VOCABULARY, (1, 1), generator=draw)
    return token, torch.randn(cache, generator=draw), torch.randn(cache, generator=draw)


def llama() -> BenchModel:
    """Llama as transformers writes it; tokens int64[batch, length] are also the labels."""
    return _model("llama", lambda: networks.llama(512, 4, 8, 1408, 8192), _tokens(8192), CausalTrainStep,
                  padding.tokens_and_labels)


def llama_12() -> BenchModel:
    """As `llama`, deeper."""
    return _model("llama-12", lambda: networks.llama(512, 12, 8, 1408, 8192), _tokens(8192), CausalTrainStep,
                  padding.tokens_and_labels)


def demo_llama() -> BenchModel:
    """A small Llama for quick runs."""
    return _model("demo-llama", lambda: networks.llama(64, 2, 4, 176, 256), _tokens(256), CausalTrainStep,
                  padding.tokens_and_labels)


def llama_small() -> BenchModel:
    """As `llama`, with few weights beside many values: a step takes some 30 ms."""
    return _model("llama-small", lambda: networks.llama(128, 6, 4, 352, 512), _tokens(512), CausalTrainStep,
                  padding.tokens_and_labels)


def llama_32() -> BenchModel:
    """As deep as Llama-2-7B, and narrow: what is planned grows with the layers, what is computed with the width."""
    return _model("llama-32", lambda: networks.llama(64, 32, 4, 176, 256), _tokens(256), CausalTrainStep,
                  padding.tokens_and_labels)


def llama_1b_like() -> BenchModel:
    """Four layers of Llama-2-7B, all sizes halved, as BladeDISC++ measures four whole ones: parameters, gradients and
    optimiser state are 4.3 GB, a step of 4 x 512 tokens takes half a minute on two cores."""
    return _model("llama-1b-like", lambda: networks.llama(2048, 4, 16, 5504, 16000), _tokens(16000), CausalTrainStep,
                  padding.tokens_and_labels)


def bert() -> BenchModel:
    """BERT as transformers writes it; tokens int64[batch, length]."""
    return _model("bert", lambda: networks.bert(512, 6, 8, 8192), _tokens(8192), pad=padding.tokens_and_mask)


def bert_train() -> BenchModel:
    """BERT in training, with a head that names the masked words; tokens int64[batch, length] are also the labels."""
    return _model("bert-train", lambda: networks.masked_bert(512, 6, 8, 8192), _tokens(8192), CausalTrainStep)


def gpt2_decode() -> BenchModel:
    """One step of decoding; token int64[1, 1], keys and values float32[layers, 1, heads, past, width / heads]."""
    return _model("gpt2-decode", networks.DecodeGPT, _decode_inputs)


def resnet() -> BenchModel:
    """ResNet-18; image float32[batch, 3, height, width]."""
    return _model("resnet", networks.ResNet18, _image)


def vit() -> BenchModel:
    """Vision transformer; image float32[batch, 3, height, width]."""
    return _model("vit", networks.VisionTransformer, _image)


def _labelled(shape: Shape, draw: torch.Generator) -> Inputs:
    return (*_image(shape, draw), torch.randint(0, networks.CLASSES, shape[:1], generator=draw))


def vit_train() -> BenchModel:
    """The vision transformer in training; image float32[batch, 3, height, width] and class int64[batch]."""
    return _model("vit-train", lambda: networks.Classifier(networks.VisionTransformer()), _labelled, TrainStep)


def _spectrum(shape: Shape, draw: torch.Generator) -> Inputs:
    return (torch.randn(*shape, conformer_net.MELS, generator=draw),)


def _sentences(vocabulary: int) -> Callable[[Shape, torch.Generator], Inputs]:
    def inputs(shape: Shape, draw: torch.Generator) -> Inputs:
        batch, *lengths = shape
        return tuple(torch.randint(0, vocabulary, (batch, length), generator=draw) for length in lengths)

    return inputs


def _clicks(shape: Shape, draw: torch.Generator) -> Inputs:
    batch, bag = shape
    chosen = torch.randint(0, dlrm_net.ROWS, (dlrm_net.TABLES, batch, bag), generator=draw)
    return torch.randn(batch, dlrm_net.DENSE, generator=draw), chosen


def conformer() -> BenchModel:
    """A speech encoder; spectrum float32[batch, frames, 80]."""
    return _model("conformer", conformer_net.Conformer, _spectrum)


def t5() -> BenchModel:
    """T5 as transformers writes it; tokens int64[batch, source] and int64[batch, target]."""
    return _model("t5", lambda: networks.t5(384, 4, 6, 1024, 8192), _sentences(8192), TranslateStep)


def t5_train() -> BenchModel:
    """T5 in training; tokens int64[batch, source] and labels int64[batch, target]."""
    return _model("t5-train", lambda: networks.t5(384, 4, 6, 1024, 8192), _sentences(8192), TranslateTrainStep)


def unet() -> BenchModel:
    """A U-Net in training; image and target float32[batch, 3, height, width]."""
    return _model("unet", unet_net.UNet, lambda shape, draw: (*_image(shape, draw), *_image(shape, draw)), TrainStep)


def dlrm() -> BenchModel:
    """A ranking model; float32[batch, 13] and int64[26, batch, bag]."""
    return _model("dlrm", dlrm_net.DLRM, _clicks)


def mixtral() -> BenchModel:
    """Mixtral as transformers writes it; tokens int64[batch, length]."""
    return _model("mixtral", lambda: networks.mixtral(256, 4, 8, 512, 8, 8192), _tokens(8192), pad=padding.tokens)


def mlp() -> BenchModel:
    """Three linear layers; float32[batch, 64]."""
    return _model("mlp", networks.perceptron, lambda shape, draw: (torch.randn(*shape, 64, generator=draw),))


MODELS: dict[str, Callable[[], BenchModel]] = {
    "llama": llama, "bert": bert, "gpt2-decode": gpt2_decode, "resnet": resnet, "mlp": mlp, "vit": vit,
    "conformer": conformer, "t5": t5, "dlrm": dlrm, "mixtral": mixtral, "demo-llama": demo_llama,
    "llama-12": llama_12, "t5-train": t5_train, "unet": unet, "llama-small": llama_small, "llama-32": llama_32,
    "llama-1b-like": llama_1b_like, "bert-train": bert_train, "vit-train": vit_train,
}


def load(name: str) -> BenchModel:
    """The benchmark of a name of the suite."""
    return MODELS[name]()
