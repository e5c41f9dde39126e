"""The demo's training run: what it is fixed by, its state, one step, saving, going on, and stopping at Ctrl-C."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from tokenizers import Tokenizer

from anyshape.base.errors import AnyShapeError, InputError, OutputError
from anyshape.frontend.checkpoint.save_load import plain_data
from anyshape.tools.demo import data, measure
from anyshape.tools.demo.backends import Backend
from anyshape.tools.demo.model import DemoConfig, DemoLlama
from anyshape.tools.demo.ranks import Ranks

WARM_UP = 20  # steps
HELD_OUT_BATCHES = 8
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # what AdamW keeps for each weight
RUN = "run"  # the name of a session in its checkpoints


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that the numbers of a run depend on; a resumed run must have the same.

    tokens: the budget of a batch. longest: documents are cut to this many tokens.
    """

    seed: int = 0
    tokens: int = 2048
    longest: int = 512
    learning_rate: float = 2e-3
    model: DemoConfig = field(default_factory=DemoConfig)


@dataclass(slots=True)
class History:
    """One value per step: loss, shape, targets that are no padding, seconds, and bytes. Under a limit also the peak of
    the step, predicted and counted, and how many values were computed again; else zeros."""

    loss: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    arena: list[int] = field(default_factory=list)
    programs: list[int] = field(default_factory=list)
    predicted: list[int] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)
    again: list[int] = field(default_factory=list)

    def speed(self, steps: int = 10) -> float:
        """Tokens per second over the last `steps` steps."""
        return sum(self.tokens[-steps:]) / max(sum(self.seconds[-steps:]), 1e-9)


@dataclass(slots=True)
class Session:
    """A run in progress: the fixed part first, then what every step changes. ranks: those that train it together."""

    recipe: Recipe
    corpus: data.Corpus
    tokenizer: Tokenizer
    stream: data.BatchStream
    model: DemoLlama
    optimizer: torch.optim.Optimizer
    step: int = 0
    cursor: data.Cursor = field(default_factory=data.Cursor)
    history: History = field(default_factory=History)
    held_out_before: float | None = None
    ranks: Ranks = field(default_factory=Ranks)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds beside the model and its optimiser; plain data."""
        return {
            "step": self.step,
            "cursor": asdict(self.cursor),
            "recipe": asdict(self.recipe),
            "fingerprint": self.corpus.fingerprint,
            "held_out_before": self.held_out_before,
            "history": asdict(self.history),
            "vocabulary": self.tokenizer.to_str(),
        }

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Takes over how far a run had come; InputError where that cannot be read."""
        try:
            step, cursor, history = values["step"], data.Cursor(**values["cursor"]), History(**values["history"])
            self.held_out_before = values["held_out_before"]
        except (KeyError, TypeError) as error:
            raise InputError("the checkpoint cannot be read", why=f"{error} is missing or wrong",
                             do="leave --resume out to start afresh") from error
        self.step, self.cursor, self.history = step, cursor, history

    def save(self, backend: Backend, folder: Path) -> None:
        """Makes the checkpoint the one in `folder`, all ranks together; OutputError leaves the one before in force."""
        backend.checkpoints.count = self.step  # a backend that runs without it has made them
        backend.checkpoints.save(folder, keep=1, run=self)

    def load(self, backend: Backend, folder: Path) -> None:
        """Goes on from the checkpoint in `folder`, all ranks together; InputError where it is none of this run."""
        backend.checkpoints.load(folder, run=self)


def start(recipe: Recipe, documents: Sequence[str], device: str = "cpu") -> Session:
    """A new session at step 0: vocabulary, batches, model and optimiser, all from the recipe's seed."""
    return _session(recipe, documents, data.train_vocabulary(documents, recipe.model.vocabulary), device)


def _session(recipe: Recipe, documents: Sequence[str], tokenizer: Tokenizer, device: str) -> Session:
    corpus = data.encode(documents, tokenizer)
    if not corpus.training or not corpus.held_out:
        raise AnyShapeError(
            "there is too little to train on",
            why=f"{len(documents)} functions and classes were found, {data.HELD_OUT_EVERY} are the least",
            do="give --documents a folder with more Python files",
        )
    torch.manual_seed(recipe.seed)
    model = DemoLlama(recipe.model).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.05,
                                  fused=True)
    for parameter in model.parameters():  # as the first step would: its memory is then that of any other
        moments = (torch.zeros((), device=device), torch.zeros_like(parameter), torch.zeros_like(parameter))
        optimizer.state[parameter] = dict(zip(MOMENTS, (one.detach() for one in moments), strict=True))
    stream = data.BatchStream(corpus.training, recipe.tokens, recipe.longest, recipe.seed, device)
    return Session(recipe, corpus, tokenizer, stream, model, optimizer)


def stored_in(folder: Path) -> Mapping[str, Any]:
    """What the checkpoint in a folder says of its run, as `Session.state_dict`; InputError where there is none."""
    try:
        return plain_data(folder, RUN)  # type: ignore[no-any-return]
    except InputError as error:
        do = "give the --out folder of an earlier demo, or leave --resume out to start afresh"
        raise InputError(f"cannot resume from {folder}", where=error.what, why=error.why, do=do) from error


def recipe_of(stored: Mapping[str, Any]) -> Recipe:
    """The recipe a checkpoint was made with."""
    try:
        values = dict(stored["recipe"])
        return Recipe(**{**values, "model": DemoConfig(**values["model"])})
    except (KeyError, TypeError) as error:
        raise InputError("the checkpoint's recipe cannot be read", why=str(error),
                         do="leave --resume out to start afresh") from error


def go_on(stored: Mapping[str, Any], documents: Sequence[str], device: str = "cpu") -> Session:
    """The session a checkpoint was taken of, which has then to `load` its weights; InputError when the documents are
    not the ones it was trained on."""
    session = _session(recipe_of(stored), documents, Tokenizer.from_str(stored["vocabulary"]), device)
    if session.corpus.fingerprint != stored["fingerprint"]:
        raise InputError(
            "the checkpoint was trained on other documents",
            why="this Python's library, or the --documents folder, differs from the one at the start",
            do="resume with the Python and the folder it was started with, or start afresh without --resume",
        )
    session.load_state_dict(stored)
    return session


def learning_rate(step: int, peak: float) -> float:
    """Linear warm-up, then one over the square root of the step (Vaswani et al. 2017, section 5.3).

    It does not know the last step, so a run made longer by --resume equals one that was long from the start.
    """
    return peak * min((step + 1) / WARM_UP, (WARM_UP / (step + 1)) ** 0.5)


def train_step(session: Session, backend: Backend) -> None:
    """Take the next batch and train on it; the session moves on only when the whole step is done."""
    batch, following = session.stream.take(session.cursor)
    own = session.ranks.deal(batch)
    for group in session.optimizer.param_groups:
        group["lr"] = learning_rate(session.step, session.recipe.learning_rate)
    measure.forget_peak()
    predicted = again = 0
    with measure.counted_peak(backend.watch is not None) as counted:
        begin = time.perf_counter()
        value = float(backend.step(own.tokens, own.targets))
        seconds = time.perf_counter() - begin
    if backend.watch is not None:
        _, predicted, again = backend.watch.peak(*batch.tokens.shape)
    if not math.isfinite(value):
        raise AnyShapeError(
            f"the loss is {value} at step {session.step + 1}",
            why="the weights or the backend's arithmetic ran out of range; the checkpoint before is kept",
            do="run with --backend eager and the same --seed to tell which",
        )
    history = session.history
    history.loss.append(value)
    history.rows.append(batch.tokens.shape[0])
    history.length.append(batch.tokens.shape[1])
    history.tokens.append(batch.real)
    history.seconds.append(seconds)
    history.resident.append(measure.resident_peak())
    history.arena.append(backend.arena_bytes())
    history.programs.append(backend.programs())
    history.predicted.append(predicted)
    history.counted.append(counted[0])
    history.again.append(again)
    session.cursor = following
    session.step += 1


def held_out_loss(session: Session) -> float:
    """Mean loss per token on documents that are never trained on, by the plain model, without gradients."""
    recipe = session.recipe
    stream = data.BatchStream(session.corpus.held_out, recipe.tokens, recipe.longest, seed=0,
                              device=next(session.model.parameters()).device)
    total = 0.0
    count = 0
    with torch.no_grad():
        for batch in stream.first(HELD_OUT_BATCHES):
            total += float(session.model(batch.tokens, batch.targets)) * batch.real
            count += batch.real
    return total / count


class StopRequest:
    """While entered, the first Ctrl-C (or SIGTERM) sets `asked` and calls `told`; the second interrupts at once."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, told: Callable[[], None] = lambda: None) -> None:
        self.asked = False
        self._told = told
        self._before: list[Callable[[int, FrameType | None], object] | int | None] = []

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._told()

    def __enter__(self) -> StopRequest:
        self._before = [signal.signal(number, self._ask) for number in self.SIGNALS]
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in zip(self.SIGNALS, self._before, strict=True):
            signal.signal(number, handler)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run of `train` ended; `unsaved` says why the last checkpoint could not be written."""

    finished: bool
    unsaved: str = ""


def train(
    session: Session,
    backend: Backend,
    steps: int,
    folder: Path,
    save_every: int,
    stop: StopRequest,
    after_step: Callable[[Session], None],
) -> Outcome:
    """Train up to `steps`, saving on the way and at the end or the stop.

    A checkpoint that cannot be written does not end the training: the next one may find room. Of several ranks, a stop
    that one is asked for stops all.
    """
    unsaved = ""
    saved = -1
    while not session.ranks.any(stop.asked) and session.step < steps:
        train_step(session, backend)
        after_step(session)
        if session.step % save_every == 0:
            unsaved = _try_save(session, backend, folder)
            saved = session.step
    if saved != session.step or session.ranks.any(bool(unsaved)):
        unsaved = _try_save(session, backend, folder)
    return Outcome(session.step >= steps, unsaved)


def _try_save(session: Session, backend: Backend, folder: Path) -> str:
    try:
        session.save(backend, folder)
    except OutputError as error:
        return str(error)
    return ""
