"""Planning problems of whole train steps, for `anyshape bench plan`: one process traces a network with a small batch
and writes the problem at each batch size as text. Sizes are formulas, so the large ones are never run.

A problem is the list of steps of the compiled train step, forward, backward and update by AdamW, before any order is
chosen: kernels, products and calls of PyTorch's operators, with the bytes that each makes. The order of the list is
that of the program, as it was traced and PyTorch cut it in two: what the backward computes again comes right before
its first reader.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import anyshape
from anyshape.backend.targets import usual_target
from anyshape.base.config import Config
from anyshape.compiler.build_plan import assemble
from anyshape.compiler.driver import fused, named
from anyshape.frontend.diagnostics.memory import limit_at, pairs
from anyshape.plan.ir.context import PlanContext
from anyshape.plan.ir.program import Plan
from anyshape.plan.memory.mutation_copy_elision import elide_mutation_copies, sink_mutations
from anyshape.plan.schedule.joint_problem import step_problem
from anyshape.plan.schedule.reorder import reorder
from anyshape.runtime.specialize.saved_policy import SAVE_ALL
from anyshape_bench.experiments.planning.order_search import at
from anyshape_bench.experiments.planning.problem_text import show_problem
from anyshape_bench.models import convnets
from anyshape_bench.models.networks import Classifier, transformers_package

TRACED = 3  # the batch that is traced
IMAGE, TOKENS, CLASSES = 224, 128, 1000


@dataclass(frozen=True, slots=True)
class Network:
    """A network, what a batch of it is, and what it is in words."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, ...]]
    summary: str


def _images(batch: int) -> tuple[Tensor, ...]:
    return torch.randn(batch, 3, IMAGE, IMAGE), torch.randint(0, CLASSES, (batch,))


def _tokens(batch: int) -> tuple[Tensor, ...]:
    tokens = torch.randint(0, 1000, (batch, TOKENS))
    return tokens, tokens


class Labelled(nn.Module):
    """A model of transformers that returns its loss for labels."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.inner(x, labels=labels).loss


def _vit() -> nn.Module:
    package = transformers_package()
    return Labelled(package.ViTForImageClassification(package.ViTConfig(
        num_labels=CLASSES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)))


def _bert() -> nn.Module:
    package = transformers_package()
    return Labelled(package.BertForMaskedLM(package.BertConfig(
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)))


def _gpt2(**sizes: Any) -> nn.Module:
    package = transformers_package()
    return Labelled(package.GPT2LMHeadModel(package.GPT2Config(
        use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes)))


def _classifier(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Classifier(make())


NETWORKS = {one.name: one for one in (
    Network("alexnet", _classifier(convnets.alexnet), _images, "AlexNet"),
    Network("vgg16", _classifier(convnets.vgg16), _images, "VGG16"),
    Network("mobilenet-v2", _classifier(convnets.mobilenet_v2), _images, "MobileNetV2"),
    Network("efficientnet-b0", _classifier(convnets.efficientnet_b0), _images, "EfficientNet-B0"),
    Network("vit", _vit, _images, "ViT-B/16"),
    Network("bert", _bert, _tokens, f"BERT base, {TOKENS} tokens"),
    Network("gpt2", _gpt2, _tokens, f"GPT-2, {TOKENS} tokens"),
    Network("gpt2-xl", lambda: _gpt2(n_layer=48, n_embd=100, n_head=25, vocab_size=1000), _tokens,
            f"GPT-2 XL: 48 layers of 25 heads, hidden size 100, {TOKENS} tokens"),
)}


def file_of(folder: Path, name: str, batch: int) -> Path:
    """Where the text of a network's problem at a batch size is."""
    return folder / f"{name}-{batch}.txt"


def written(network: Network, batches: Sequence[int], folder: Path) -> dict[str, Any]:
    """Writes the problems of a network; what is known of its programs."""
    torch.manual_seed(0)
    module = network.make()
    begun = time.process_time()
    step = anyshape.train_step(module, lambda model, *batch: model(*batch),
                               torch.optim.AdamW(module.parameters()), strict=True)
    step(*network.batch(TRACED))
    record: dict[str, Any] = {"model": network.name, "compiled": time.process_time() - begun, "problems": {}}
    compiled = [program.compiled for program in step.programs]
    record["nodes"] = sum(len(one.graph.nodes) for one in compiled)
    record["planned"] = sum(dict(one.seconds)["plan"] for one in compiled)
    plans = plans_of(step)
    first = compiled[1].executable.specializer.keeps.forward
    place = {id(one): k for k, one in enumerate((*plans[0].steps, *plans[1].steps))}
    [(_, limit)] = pairs(step.compilation)
    unused = dict.fromkeys(limit.program.layout.symbols, 0)  # sizes that nothing depends on
    for batch in batches:
        values = sizes_at(plans[0], batch)
        problem = step_problem(*(at(plan, values) for plan in plans))
        chosen = [place[id(one)] for one in (*reorder(at(plans[0], values))[0].steps,
                                             *reorder(at(plans[1], values), PlanContext(forward=first))[-1].steps)]
        path = file_of(folder, network.name, batch)
        path.write_text(show_problem(problem, path.stem))
        called = unused | values
        record["problems"][str(batch)] = {
            "order": chosen, "needed": limit_at(limit, called).needed(called, SAVE_ALL)}
    return record


def plans_of(step: Any) -> list[Plan]:
    """The forward and the backward of a train step that has run, in the order of the program; not allocated."""
    plans = []
    for program in step.programs:
        graph = program.compiled.graph
        store, fusion = fused(graph, usual_target(), Config())
        versions, _ = named(fusion, graph.facts, usual_target())
        plans.append(elide_mutation_copies(sink_mutations(assemble(graph, fusion, store, versions))))
    return plans


def sizes_at(plan: Plan, batch: int) -> dict[str, int]:
    """The hints of a plan, with another batch size."""
    return {name: batch if hint == TRACED else hint for name, hint in plan.facts.hints}
