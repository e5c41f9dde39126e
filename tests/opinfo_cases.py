"""Samples of torch's OpInfo database, run compiled and eagerly; as a program, a worker that reports line by line.

    python tests/opinfo_cases.py full < names    prints one line of JSON when an op starts and one with its outcome
    python tests/opinfo_cases.py sample names    the same, fewer samples of each

With ANYSHAPE_TEST_FENCED set, on fenced memory (fences.py).
"""
from __future__ import annotations

import itertools
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from anyshape.frontend.programs.graph_partition import SplitProgram
from comparing import differs, no_worse
from roads import compilation_of, compiled

MOST_ELEMENTS = 200_000
# repeated rows make a matrix singular; eager PyTorch itself crashes on offsets past the end
SKIP_RESIZE = ("linalg", "cholesky", "lu", "svd", "qr", "geqrf", "ormqr", "triangular_solve", "pca_lowrank", "pinverse",
               "nn.functional.embedding_bag")

# results that no one can compare: memory as it is found
UNDEFINED = frozenset((
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_", "resize_as_",
))

# OpInfo seeds random ops inside the call, with a generator that Dynamo does not trace; `run` seeds outside instead
common_methods_invocations.wrapper_set_seed = lambda function, *given, **keywords: function(*given, **keywords)

NAMED: dict[str, Any] = {}
for _op in op_db:
    NAMED.setdefault(f"{_op.name}.{_op.variant_test_name}" if _op.variant_test_name else _op.name, _op)


@dataclass
class Outcome:
    """What became of one op.

    verdict: "kernels" (compiled, no call of a PyTorch kernel), "mixed" (kernels and calls), "calls" (calls only),
        "break" (torch's tracer takes the call into no graph: PyTorch runs it between graphs), "fallback" (AnyShape
        ran the graph as PyTorch would), "fail", "skipped" (no sample of a supported dtype).
    calls: how many calls of compiled functions were compared; reason: of a break, fallback or failure, one line.
    plain: sizes at which torch's tracer refuses the call, which runs as plain PyTorch then.
    """

    name: str
    verdict: str = "skipped"
    reason: str = ""
    calls: int = 0
    seconds: float = 0.0
    externs: list[str] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)


class Wrong(Exception):
    """A compiled result that differs from eager's."""


# ---- a sample as a function of its tensors


@dataclass(frozen=True)
class Sample:
    """A function of tensors, the tensors, and which of them get gradients."""

    function: Callable[..., Any]
    tensors: tuple[torch.Tensor, ...]
    text: str


def sample_of(op: Any, given: Any) -> Sample:
    """One OpInfo sample: its tensors become parameters `t0, t1, ...`, everything else constants in the text."""
    tensors: list[torch.Tensor] = []
    constants: dict[str, Any] = {"op": op.op}

    def text(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return f"t{len(tensors) - 1}"
        if type(value) in (list, tuple):
            items = ", ".join(text(item) for item in value)
            return f"[{items}]" if isinstance(value, list) else f"({items}{',' if value else ''})"
        if isinstance(value, (int, str, bool, type(None))) or (type(value) is float and abs(value) < 1e300):
            return repr(value)
        constants[f"c{len(constants)}"] = value
        return f"c{len(constants) - 1}"

    arguments = [text(value) for value in (given.input, *given.args)]
    arguments += [f"{name}={text(value)}" for name, value in given.kwargs.items()]
    body = f"op({', '.join(arguments)})"
    source = f"def call({', '.join(f't{i}' for i in range(len(tensors)))}):\n    return {body}\n"
    exec(compile(source, f"<{op.name}>", "exec"), constants)
    return Sample(constants["call"], tuple(tensors), body)


def samples(op: Any, dtype: torch.dtype, limit: int) -> list[Sample]:
    """Up to `limit` samples, spread over the first ones that OpInfo gives."""
    torch.manual_seed(0)
    known = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), 24))
    chosen = sorted({len(known) * (2 * k + 1) // (2 * limit) for k in range(limit)}) if known else []
    found = [sample_of(op, known[k]) for k in chosen]
    return [sample for sample in found if sum(t.numel() for t in sample.tensors) <= MOST_ELEMENTS]


def resized(tensors: tuple[torch.Tensor, ...], size: Callable[[int], int],
            keep_integers: bool) -> tuple[torch.Tensor, ...]:
    """The tensors with every dimension's size changed by the same rule; elements are repeated or left out."""
    found = []
    for tensor in tensors:
        shape = [size(n) for n in tensor.shape]
        for d, (old, new) in enumerate(zip(tensor.shape, shape)):
            index = torch.arange(new) % max(old, 1) if old else torch.zeros(0, dtype=torch.long)
            tensor = tensor.index_select(d, index)
        integral = not tensor.dtype.is_floating_point and not tensor.dtype.is_complex and tensor.dtype != torch.bool
        found.append(tensor.zero_() if integral and not keep_integers else tensor)
    return tuple(found)


def variants(sample: Sample, name: str) -> Iterator[tuple[str, tuple[torch.Tensor, ...]]]:
    """The sample's tensors, then larger, of size one and of size zero."""
    yield "sample", sample.tensors
    if name.startswith(SKIP_RESIZE) or not any(t.dim() for t in sample.tensors):
        return
    if name == "repeat_interleave" and "output_size=" in sample.text:
        return  # the number says what the repeats add up to
    if any(t.layout != torch.strided or t.is_quantized for t in sample.tensors):
        return
    yield "larger", resized(sample.tensors, lambda n: n + 2 if n > 1 else n, True)
    yield "one", resized(sample.tensors, lambda n: 1 if n > 1 else n, False)
    yield "zero", resized(sample.tensors, lambda n: 0 if n > 1 else n, False)


# ---- running and comparing


def run(function: Callable[..., Any], tensors: tuple[torch.Tensor, ...],
        gradients: bool) -> tuple[list[Any], list[Any]]:
    """The results' tensors and numbers, and the gradients of the float inputs (None where there is none)."""
    inputs = [t.detach().clone() for t in tensors]
    smooth = [t for t in inputs if t.dtype.is_floating_point or t.dtype.is_complex] if gradients else []
    leaves = [t.requires_grad_() for t in smooth]
    torch.manual_seed(0)
    results = [value for value in pytree.tree_leaves(function(*inputs)) if value is not None]
    ends = [value for value in results if isinstance(value, torch.Tensor) and value.requires_grad]
    if not ends or not leaves:
        return results, []
    weights = [((torch.arange(end.numel()) % 7 + 1) / 4).reshape(end.shape).to(end.dtype) for end in ends]
    return results, list(torch.autograd.grad(ends, leaves, weights, allow_unused=True))


def compare(sample: Sample, fast: Callable[..., Any], tensors: tuple[torch.Tensor, ...], gradients: bool,
            undefined: bool) -> bool:
    """Compares one call; False when eager itself refuses the arguments.

    Raises:
        Wrong: the compiled function raises or gives something else.
    """
    gradients_here = gradients
    try:
        wanted, wanted_gradients = run(sample.function, tensors, gradients)
    except Exception:
        gradients_here = False
        try:
            wanted, wanted_gradients = run(sample.function, tensors, False)
        except Exception:
            return False
    try:
        found, found_gradients = run(fast, tensors, gradients_here)
    except Exception as error:
        text = " ".join(str(error).split())
        raise Wrong(f"raises {type(error).__name__}: {text[:300]}") from error
    if len(found) != len(wanted) or len(found_gradients) != len(wanted_gradients):
        raise Wrong("another number of results")
    if undefined:
        pairs = zip(found, wanted, strict=True)
        if any(isinstance(b, torch.Tensor) and (a.shape != b.shape or a.dtype != b.dtype) for a, b in pairs):
            raise Wrong("another shape or dtype")
        return True
    exact: tuple[list[Any], list[Any]] | None = None
    for kind, own, other in (("value", found, wanted), ("gradient", found_gradients, wanted_gradients)):
        for position, (a, b) in enumerate(zip(own, other, strict=True)):
            why = differs(a, b)
            if not why:
                continue
            if exact is None:
                exact = exact_results(sample, tensors, gradients_here)
            side = exact[kind == "gradient"]
            if position < len(side) and no_worse(a, b, side[position]):
                continue
            raise Wrong(f"{kind} {position}: {why}")
    return True


def exact_results(sample: Sample, tensors: tuple[torch.Tensor, ...], gradients: bool) -> tuple[list[Any], list[Any]]:
    """Eager's results in float64; nothing when the op refuses."""
    try:
        return run(sample.function, tuple(t.double() if t.dtype.is_floating_point else t for t in tensors), gradients)
    except Exception:
        return [], []


# ---- one op


def check_sample(op: Any, sample: Sample, outcome: Outcome, gradients: bool, dynamic: bool, resize: bool) -> None:
    """Compiles one sample and compares its calls; the verdict of what was compiled goes into `outcome`."""
    torch._dynamo.reset()
    fast = compiled(sample.function, dynamic=dynamic)
    undefined = op.name in UNDEFINED
    done = plain = 0
    for kind, tensors in variants(sample, op.name):
        try:
            done += compare(sample, fast, tensors, gradients, undefined)
            plain, before = sum(compilation_of(fast).eager.values()), plain
            if plain > before and kind not in outcome.plain:
                outcome.plain.append(kind)
        except Wrong as error:
            shapes = ", ".join(f"{str(t.dtype)[6:]}{list(t.shape)}" for t in tensors)
            raise Wrong(f"{sample.text} of {shapes} ({kind}{'' if dynamic else ', static'}): {error}") from error
        if not resize:
            break
    outcome.calls += done
    if done:
        note_compiled(fast, outcome)


RANK = {"skipped": 0, "kernels": 1, "mixed": 2, "calls": 3, "break": 4, "fallback": 5, "fail": 6}


def note_compiled(fast: Any, outcome: Outcome) -> None:
    """How the calls of `fast` ran."""
    compilation = compilation_of(fast)
    refused = [item for item in compilation.fallbacks if item.name != "trace" and item.stage != "split"]
    if refused:
        raise_verdict(outcome, "fallback", " ".join(refused[0].reason.split())[:300])
        return
    if not compilation.programs:
        why = compilation.fallbacks[0].reason if compilation.fallbacks else "Dynamo captures nothing"
        raise_verdict(outcome, "break", " ".join(why.split())[:300])
        return
    kernels, externs = 0, set()
    for program in compilation.programs:
        own, called = contents(program)
        kernels += own
        externs |= called
    outcome.externs = sorted(set(outcome.externs) | externs)
    raise_verdict(outcome, "kernels" if not externs else "mixed" if kernels else "calls", "")


def contents(program: Any) -> tuple[int, set[str]]:
    """Number of kernels and library calls of a program, and the names of the PyTorch kernels it calls."""
    if isinstance(program, SplitProgram):
        return 0, set(program.calls)
    found = getattr(program, "compiled", None)
    graph = getattr(found, "graph", None) or getattr(program, "graph", None)
    if graph is None:
        return 0, set()
    externs = {str(node.attr("target")) for node in graph.nodes if node.op == "extern"}
    return sum(node.op != "extern" for node in graph.nodes), externs


def raise_verdict(outcome: Outcome, verdict: str, reason: str) -> None:
    """The worst verdict of all samples counts."""
    if RANK[verdict] > RANK[outcome.verdict]:
        outcome.verdict, outcome.reason = verdict, reason


def check_op(name: str, full: bool) -> Outcome:
    """All checks of one op: dynamic with gradients and other sizes; static; bfloat16 and integers forward."""
    op = NAMED[name]
    outcome = Outcome(name)
    started = time.perf_counter()
    available = op.supported_dtypes("cpu")
    order = (torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64)
    first = next((dtype for dtype in order if dtype in available), None)
    if first is None:
        return outcome
    try:
        known = samples(op, first, 3 if full else 1)
        for sample in known:
            check_sample(op, sample, outcome, op.supports_autograd, True, True)
        if full:
            for sample in known[:1]:
                check_sample(op, sample, outcome, op.supports_autograd, False, False)
            for dtype in (torch.bfloat16, torch.int64, torch.bool):
                if dtype in available and dtype != first:
                    for sample in samples(op, dtype, 1):
                        check_sample(op, sample, outcome, False, True, False)
    except Wrong as error:
        raise_verdict(outcome, "fail", str(error))
    outcome.seconds = round(time.perf_counter() - started, 2)
    return outcome


def main() -> None:
    """Names among the arguments or on the standard input; see the head of this file."""
    mode, *names = sys.argv[1:]
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    if os.environ.get("ANYSHAPE_TEST_FENCED"):
        import fences
        fences.install()
    for name in names or map(str.strip, sys.stdin):
        print(json.dumps({"start": name}), flush=True)
        try:
            outcome = check_op(name, mode == "full")
        except Exception as error:  # a sample that cannot even be made
            outcome = Outcome(name, "fail", f"harness: {type(error).__name__}: {error}"[:300])
        print(json.dumps(asdict(outcome)), flush=True)


if __name__ == "__main__":
    main()
