"""The demo from the first line to the last: documents, session, training, summary."""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from anyshape.backend.targets import target_of
from anyshape.base import counters
from anyshape.base.config import Config
from anyshape.base.errors import AnyShapeError, ConfigError, DeviceError, InputError
from anyshape.frontend.train_step.auto_strategy import AUTO
from anyshape.runtime.collectives.agreement import told_once
from anyshape.tools.demo import backends, data, ranks, report
from anyshape.tools.demo.choose import chosen
from anyshape.tools.demo.compare import compare
from anyshape.tools.demo.limit import HALF, limit_bytes
from anyshape.tools.demo.model import complete
from anyshape.tools.demo.show import display
from anyshape.tools.demo.show.strategy import run_text
from anyshape.tools.demo.status import STOPPED
from anyshape.tools.demo.training import (
    Recipe,
    Session,
    StopRequest,
    go_on,
    held_out_loss,
    recipe_of,
    start,
    stored_in,
    train,
)

STEPS = 250
PROMPT = "def get_name(self"
SAMPLE_TOKENS = 96
WIDTH = 120  # columns of tables where nobody says how many there are


def run(args: argparse.Namespace) -> int:
    """Run the demo with parsed options; prints errors as messages and returns the exit code."""
    console = Console()
    errors = Console(stderr=True)
    here = ranks.Ranks()
    try:
        if not args.strategy and ranks.is_launched():
            args.strategy = AUTO
        if args.strategy:
            here = ranks.join(args.strategy)
            if not here.is_first:
                console = Console(quiet=True)
                warnings.simplefilter("ignore")  # the first rank says them
            elif not console.is_terminal:
                console.width = max(console.width, WIDTH)
            _check_dealt_out(args)
        return _run(args, console, here)
    except AnyShapeError as error:
        errors.print(f"error: {told_once(here.rank, error)}", highlight=False, markup=False, soft_wrap=True)
        return 1
    except torch.OutOfMemoryError as error:  # PyTorch's: of weights, or of a step that runs as PyTorch
        full = DeviceError.no_memory(str(error).partition("\n")[0])
        errors.print(f"error: {full}", highlight=False, markup=False, soft_wrap=True)
        return 1
    except OSError as error:
        errors.print(f"error: {error.strerror or error}: {error.filename}\n  do:    give another folder with --out",
                     highlight=False, markup=False, soft_wrap=True)
        return 1
    finally:
        ranks.leave(here)


def _check_dealt_out(args: argparse.Namespace) -> None:
    """Raises ConfigError where other options do not go with a strategy."""
    for name, given, only, why in (
            ("--backend", args.backend, "anyshape", "the others cannot deal a step out"),
            ("--device", args.device, "cpu", "its ranks talk by gloo"),
            ("--memory-limit", args.memory_limit if args.memory_limit == HALF else "", "",
             "half of a peak is known of a step on one rank")):
        if given != only:
            raise ConfigError(f"--strategy {args.strategy} does not go with {name} {given}", where="the options",
                              why=f"{why}", do=f"leave one of them out{', or give bytes' if given == HALF else ''}")


def _run(args: argparse.Namespace, console: Console, here: ranks.Ranks) -> int:
    begin = time.perf_counter()
    folder = args.out
    named = ranks.named_strategy(args.strategy, here.world) if args.strategy else None
    target_of(Config.make(), args.device)  # says what is missing for a device, before anything is read
    if args.device != "cpu" and not torch.cuda.is_available():
        raise DeviceError("this build of torch has no GPUs", why=f"torch {torch.__version__} was built without them",
                          do="install a CUDA or ROCm build of torch")
    if args.threads:
        torch.set_num_threads(args.threads)
    stored = None
    if args.resume is not None:
        folder = args.out if args.resume == Path() else args.resume
        stored = stored_in(folder)
    folder.mkdir(parents=True, exist_ok=True)
    session = _session(args, stored, console)
    session.ranks = here
    steps = args.steps or max(STEPS, session.step)
    bytes_, told = _limit(args, session, steps)
    strategy = chosen(console, session, named, bytes_) if args.strategy else None
    backend = backends.make(args.backend, session.model, session.optimizer, bytes_, strategy)
    if stored is not None:
        session.load(backend, folder)
    if session.held_out_before is None and here.is_first:
        session.held_out_before = held_out_loss(session)
    _describe(console, session, backend.name, steps)
    if told:
        console.print(told, highlight=False, markup=False)

    before, first = counters.stats(), session.step
    shown = display.make(console, backend.name, session.step, steps)
    with shown, StopRequest(lambda: shown.note("stopping after this step; Ctrl-C again stops at once")) as stop:
        outcome = train(session, backend, steps, folder, args.save_every, stop,
                        lambda now: shown.show(_status(now, bytes_)))
    if outcome.unsaved:
        Console(stderr=True).print(f"error: {outcome.unsaved}", highlight=False, markup=False, soft_wrap=True)
    if not outcome.finished:
        if not outcome.unsaved:
            console.print(f"stopped after step {session.step}; go on with --resume {folder}",
                          highlight=False, markup=False, soft_wrap=True)
        return STOPPED
    with backend.checkpoints.whole():
        if not here.is_first:
            return 1 if outcome.unsaved else 0
        summary = _summarise(session, backend, begin)
    if strategy is not None:
        taken = session.step - first
        summary = replace(summary, strategy=run_text(strategy), messages=_each(before, "collectives", taken),
                          waited=_each(before, "collective_wait_seconds", taken))
    report.print_summary(console, summary)
    report.write_summary(folder, summary)
    if session.history.loss:
        report.draw(folder / "training.png", session.history, backend.name, bytes_)
    console.print(f"{folder / 'training.png'} and {folder / 'summary.json'} written; {summary.seconds:.0f} s in all",
                  highlight=False, markup=False, soft_wrap=True)
    return 1 if outcome.unsaved else 0


def _each(before: Mapping[str, float], name: str, taken: int) -> float:
    """What a step has counted, on average."""
    return (counters.stats()[name] - before[name]) / max(taken, 1)


def _session(args: argparse.Namespace, stored: Mapping[str, Any] | None, console: Console) -> Session:
    """A session from the options, or from a checkpoint that the options must not contradict."""
    where = args.documents or "Python's own library"
    console.print(f"reading the functions and classes of {where} ...", highlight=False, markup=False)
    if stored is None:
        if args.documents and not args.documents.is_dir():
            raise AnyShapeError(f"--documents {args.documents} is not a folder", do="give a folder with Python files")
        default = Recipe()
        recipe = Recipe(default.seed if args.seed is None else args.seed, args.tokens or default.tokens)
        return start(recipe, data.read_documents(args.documents), args.device)
    recipe = recipe_of(stored)
    for name, given, kept in (("--seed", args.seed, recipe.seed), ("--tokens", args.tokens, recipe.tokens)):
        if given is not None and given != kept:
            raise InputError(
                f"{name} {given} contradicts the checkpoint",
                why=f"the run was started with {name} {kept}, and a resumed run goes on exactly where it stopped",
                do=f"leave {name} out, or start afresh without --resume",
            )
    return go_on(stored, data.read_documents(args.documents), args.device)


def _describe(console: Console, session: Session, backend: str, steps: int) -> None:
    weights = sum(parameter.numel() for parameter in session.model.parameters())
    begin = f"goes on after step {session.step}" if session.step else "starts"
    console.print(
        f"{len(session.corpus.training):,} documents, a Llama of {weights / 1e6:.1f} million weights, "
        f"batches of at most {session.recipe.tokens} tokens, {torch.get_num_threads()} threads, backend {backend}; "
        f"{begin}, {max(steps - session.step, 0)} steps to go",
        highlight=False, markup=False,
    )


def _limit(args: argparse.Namespace, session: Session, steps: int) -> tuple[int, str]:
    """The limit in bytes, 0 for none, and a line that says how it was found."""
    if not args.memory_limit:
        return 0, ""
    if args.backend != "anyshape":
        raise AnyShapeError(f"--memory-limit does not go with --backend {args.backend}",
                            why="only AnyShape knows what a step will take", do="leave one of them out")
    return limit_bytes(args.memory_limit, session, steps)


def _status(session: Session, bytes_: int) -> display.Status:
    history = session.history
    peaks = display.Peaks(bytes_, history.predicted, history.counted, history.again[-1]) if bytes_ else None
    return display.Status(
        session.step, history.loss[-1], history.speed(), history.rows[-1], history.length[-1],
        report.shapes_of(history), history.programs[-1], history.arena[-1], history.resident[-1],
        peaks,
    )


def _summarise(session: Session, backend: backends.Backend, begin: float) -> report.Summary:
    history = session.history
    counted = backend.counters()
    after = held_out_loss(session)
    prompt = [data.END, *session.tokenizer.encode(PROMPT).ids]
    written = complete(session.model, prompt, SAMPLE_TOKENS, data.END, session.recipe.seed)
    alone = backend.name != "eager" and session.ranks.world == 1
    compared = compare(session, backend) if alone else None
    return report.Summary(
        backend=backend.name,
        steps=session.step,
        seconds=time.perf_counter() - begin,
        shapes=report.shapes_of(history),
        counters=counted,
        held_out_before=session.held_out_before or 0.0,
        held_out_after=after,
        speed=history.speed(len(history.seconds)),
        resident_peak=max(history.resident, default=0),
        arena_peak=max(int(counted.get("arena_peak_bytes", 0)), max(history.arena, default=0)),
        comparison=compared,
        sample=session.tokenizer.decode(written),
        limit=backend.limit,
        counted_peak=max(history.counted, default=0),
        limited_steps=sum(one > 0 for one in history.again),
    )
