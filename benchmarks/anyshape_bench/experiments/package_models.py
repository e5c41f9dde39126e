"""Models of other packages against eager PyTorch, at shapes that change: results, gradients, and how many programs.

    python -m anyshape_bench.experiments.package_models docs/results/models/models.json

Runs the models of `models/package_models.py` and `models/more_package_models.py` whose packages are installed, each in
a process of its own; rows of others that are stored already stay. Sizes are small: numbers are compared, not speed.
"""
from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from anyshape_bench.harness.machine import commit
from anyshape_bench.models import more_package_models, package_models
from anyshape_bench.models.package_models import Case

CASES = (*package_models.CASES, *more_package_models.CASES)
STEPS = 3  # of `anyshape.train_step`, each at another shape
KINDS = ("results", "gradients", "weights")
TOLERANCE = 2e-4  # of the largest element of a result, and of the largest gradient of all parameters
SECONDS = 900  # a hang of one model ends here
INTRODUCTION = """# Models of other packages

Written by `python -m anyshape_bench.experiments.package_models docs/results/models/models.json` from stored results; it
is not edited by hand.

Each model has random weights and small sizes, and is called at several shapes, batches of one and lengths of one among
them: `anyshape.compile(model)(...)` against the model itself, without gradients and with those of all parameters, in
float32 on one thread. The difference of results is of the largest element of each, that of gradients of the largest
gradient of all parameters. Steps are three of `anyshape.train_step` with SGD, each at another shape; what differs are
the weights, of the largest change of any (- where no steps were taken). A program for inference and one for training
are two, or three where the backward is counted apart; those of steps are not counted. Calls as eager are those that
wait until a program of their own would pay, such as a batch of one in a model that asks Python about it, and those of
which PyTorch does a part.

Eager itself is wrong in timm's XCiT: the gradient of a batch norm for a batch of one
([upstream-bugs.md](upstream-bugs.md)).
"""


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Of a result of any kind, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from tensors(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors(one)
    elif hasattr(value, "__dict__"):
        yield from tensors(vars(value))


def distance(have: Sequence[torch.Tensor], want: Sequence[torch.Tensor], largest: float = 0.0) -> float:
    """The largest difference, of the largest element of each that is wanted, or of `largest`."""
    if [(one.shape, one.dtype) for one in have] != [(one.shape, one.dtype) for one in want]:
        return float("inf")
    found = 0.0
    for a, b in zip(have, want, strict=True):
        if b.numel():
            a, b = a.double().nan_to_num(), b.double().nan_to_num()
            found = max(found, float((a - b).abs().max()) / max(largest or float(b.abs().max()), 1e-6))
    return found


def lie_alike(have: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    """Whether results have the same strides, in dims of more than one element of tensors that are not empty."""
    return all(a.shape == b.shape and all(size < 2 or ours == theirs for size, ours, theirs in zip(
        b.shape, a.stride(), b.stride(), strict=True)) for a, b in zip(have, want, strict=True) if b.numel())


def called(model: Any, given: Any) -> Any:
    """The model's result; a dictionary is keywords, a tuple arguments. What draws draws the same in each call."""
    torch.manual_seed(0)
    return applied(model, given)


def applied(model: Any, given: Any) -> Any:
    """The same, from where the generator is."""
    if isinstance(given, dict):
        return model(**given)
    return model(*given) if isinstance(given, tuple) else model(given)


def trained(model: Any, given: Any, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of a loss that weighs each element of the results at random."""
    loss = torch.zeros(())
    generator = torch.Generator().manual_seed(1)
    for one in tensors(called(model, given)):
        if one.requires_grad:
            loss = loss + (one * torch.randn(one.shape, generator=generator)).sum()
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if one is None else one for one, p in zip(found, parameters, strict=True)]


def waved(model: Any, given: Any) -> torch.Tensor:
    """A loss that weighs the elements of the results differently, and draws nothing."""
    loss = torch.zeros(())
    for one in tensors(applied(model, given)):
        if one.requires_grad:
            weights = torch.arange(one.numel()).remainder(7).sub(2.5).reshape(one.shape)
            loss = loss + (one * weights).sum()
    return loss


def stepped(case: Case) -> Iterator[dict[str, Any]]:
    """Steps of SGD from the same weights: how far they end from eager's, of the largest change of any.

    The rate changes the largest weight by its own size: a smaller change would be hidden by the rounding of weights.
    """
    import anyshape
    torch.manual_seed(0)
    model = case.make().eval()
    parameters = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    step = anyshape.train_step(model, waved, optimizer, threads=1)
    before = [one.detach().clone() for one in parameters]
    for sizes in case.sizes[:STEPS]:
        torch.manual_seed(sum(sizes))
        given = case.inputs(*sizes)
        torch.manual_seed(0)
        gradients = torch.autograd.grad(waved(model, given), parameters, allow_unused=True, materialize_grads=True)
        size, change = (max((float(one.abs().max()) for one in each if one.numel()), default=0.0)
                        for each in (before, gradients))
        rate = size / max(change, 1e-12)
        optimizer.param_groups[0]["lr"] = rate
        torch.manual_seed(0)
        step(given)
        with torch.no_grad():
            want = [one - rate * gradient for one, gradient in zip(before, gradients, strict=True)]
            differs = distance([one.detach() for one in parameters], want, size)
            for one, old in zip(parameters, before, strict=True):
                one.copy_(old)
        yield {"sizes": sizes, "weights": differs}


def compared(case: Case) -> dict[str, Any]:
    """The row of a model: differences by shape, and counts."""
    import anyshape
    torch.manual_seed(0)
    model = case.make().eval()
    fast = anyshape.compile(model, threads=1)
    parameters = [one for one in model.parameters() if one.requires_grad]
    rows = []
    for training in (False, True):
        for sizes in case.sizes:
            torch.manual_seed(sum(sizes))
            given = case.inputs(*sizes)
            if training:
                have, want = (trained(one, given, parameters) for one in (fast, model))
                largest = max((float(one.abs().max()) for one in want if one.numel()), default=0.0)
                rows.append({"sizes": sizes, "gradients": distance(have, want, largest)})
            else:
                with torch.no_grad():
                    have, want = (list(tensors(called(one, given))) for one in (fast, model))
                rows.append({"sizes": sizes, "results": distance(have, want), "strides": lie_alike(have, want)})
    counts = anyshape.stats()
    rows += stepped(case)
    return {"shapes": rows, "programs": counts["programs"], "eager": counts["eager_calls"], "error": ""}


def measured(number: int, into: Any) -> None:
    """One process: a model; puts its row."""
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row = compared(CASES[number])
    except Exception as error:  # whatever a model raises is its row
        row = {"shapes": [], "programs": 0, "eager": 0, "error": f"{type(error).__name__}: {error}"[:300]}
    into.put(row)


def version_of(package: str) -> str:
    """Of an installed package; empty where it is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def study(only: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The row of every model whose package is there. only: packages or names of models, all without any."""
    context = multiprocessing.get_context("forkserver")  # imports are made once
    context.set_forkserver_preload(["torch", "anyshape.frontend.api"])
    for number, case in enumerate(CASES):
        version = version_of(case.package)
        if not version or (only and not {case.package, case.name} & {*only}):
            continue
        queue = context.Queue()
        process = context.Process(target=measured, args=(number, queue))
        process.start()
        try:
            row = queue.get(timeout=SECONDS)
        except Exception:  # nothing came: it crashed or hung
            row = {"shapes": [], "programs": 0, "eager": 0, "error": "the process ended, or took too long"}
        process.kill()
        yield {"package": case.package, "model": case.name, "version": version, "commit": commit(), **row}


def worst(row: dict[str, Any], kind: str) -> float:
    """The largest difference of a row: of its results, or its gradients."""
    return max((one[kind] for one in row["shapes"] if kind in one), default=0.0)


def is_same(row: dict[str, Any]) -> bool:
    """Whether a model gives eager's numbers at all shapes, and where eager's lie in memory."""
    return not row["error"] and all(one.get("strides", True) for one in row["shapes"]) and max(
        worst(row, kind) for kind in KINDS) <= TOLERANCE


def page(found: dict[str, Any]) -> str:
    """docs/models.md."""
    rows = found["rows"]
    right = [row for row in rows if is_same(row)]
    few = sum(row["programs"] <= 3 for row in right)
    lines = [INTRODUCTION, f"{len(right)} of {len(rows)} models give eager's numbers at all shapes, with "
             f"eager's strides, within {TOLERANCE:.0e}; {few} of them by three programs at most.", ""]
    for package in dict.fromkeys(row["package"] for row in rows):
        own = [row for row in rows if row["package"] == package]
        versions = ", ".join(dict.fromkeys(row["version"] for row in own))
        commits = ", ".join(dict.fromkeys(row["commit"] for row in own))
        lines += [f"## {package} {versions}", "", f"Commit {commits}.", "",
                  "| model | shapes | results differ by | gradients differ by | steps differ by | programs | "
                  "calls as eager |", "|---|---:|---:|---:|---:|---:|---:|"]
        for row in own:
            shapes = sum("results" in one for one in row["shapes"])
            said = [row["error"].splitlines()[0].replace("|", "/"), "", ""] if row["error"] else [
                f"{worst(row, kind):.0e}" if any(kind in one for one in row["shapes"]) else "-" for kind in KINDS]
            lines.append(f"| {row['model']} | {shapes} | {' | '.join(said)} | {row['programs']} | {row['eager']} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=Path, help="where the results are written, as JSON")
    parser.add_argument("--only", nargs="*", default=(), help="packages or names of models")
    given = parser.parse_args()
    order = {(case.package, case.name): place for place, case in enumerate(CASES)}
    given.path.parent.mkdir(parents=True, exist_ok=True)
    for row in study(given.only):
        print(json.dumps({name: row[name] for name in ("package", "model", "programs", "eager", "error")}),
              *(f"{worst(row, kind):.0e}" for kind in KINDS), flush=True)
        # read each time, for others may write, too
        known = json.loads(given.path.read_text("utf-8"))["rows"] if given.path.exists() else []
        rows = {(one["package"], one["model"]): one for one in known}
        rows[row["package"], row["model"]] = row
        found = {"rows": sorted(rows.values(), key=lambda one: order[one["package"], one["model"]])}
        given.path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        folder = given.path.resolve().parents[1]
        if folder.name == "results":
            (folder.parent / "models.md").write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
