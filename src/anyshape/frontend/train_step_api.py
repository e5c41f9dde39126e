"""`anyshape.train_step`: loss, gradients and the optimiser's update as one compiled program.

    step = anyshape.train_step(model, loss_fn, torch.optim.AdamW(model.parameters()))
    for batch in loader:
        loss = step(batch)

What is compiled is `WholeStep` (frontend/train_step/step_module.py). What cannot be one program runs as a compiled
forward and backward, with the optimiser as it is (frontend/train_step_fallback.py), and says why.
"""
from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anyshape.base.config import Config
from anyshape.base.errors import AnyShapeError, ConfigError, InputError, RankError, Unsupported
from anyshape.frontend.callables.compiled_callable import CompiledCallable
from anyshape.frontend.checkpoint.save_load import Saver, consistently, examine, found_in, missing, newest, take
from anyshape.frontend.diagnostics.explain_text import Explanation
from anyshape.frontend.diagnostics.memory_text import MemoryNote
from anyshape.frontend.programs.eager_fallback import FallbackWarning, refuse
from anyshape.frontend.programs.session import Compilation
from anyshape.frontend.train_step.auto_strategy import AUTO, searched
from anyshape.frontend.train_step.defer_interrupts import DeferInterrupts
from anyshape.frontend.train_step.distributed import as_batch, distribution_of, meet, mesh_of_all
from anyshape.frontend.train_step.optimizer_state import StepStates
from anyshape.frontend.train_step.step_module import StepState, WholeStep
from anyshape.frontend.train_step.traced_gradients import gradients_of
from anyshape.frontend.train_step.validation import (
    StepSettings,
    check_loss,
    parts_of,
    rule_for,
    unwrapped,
    warn_of_others,
    why_apart,
)
from anyshape.frontend.train_step.wrapped_model import unwrapped_model
from anyshape.frontend.train_step_fallback import StepApart
from anyshape.runtime.collectives.agreement import fail_together, together, told_once
from anyshape.runtime.collectives.lost_rank import leave, leave_words, lost, told_of_lost_ranks
from anyshape.runtime.collectives.process_group import ProcessMesh, sending
from anyshape.torch_compat.tracing import settings as torch_trace
from anyshape.torch_compat.versions import api

APART = "forward and backward are compiled, and the optimiser runs as it is"


class TrainStep:
    """A compiled train step: call it with a batch. See `anyshape.train_step`.

    Attributes:
        norm: of the gradients of the last step, before it was limited; None without `clip_norm`.
        averages: name of a parameter -> its running average; empty without `ema`.
        position: batches of the step in hand that have run; 0 at the border of two steps.
        count: steps made, with those before the checkpoint that was loaded.
    """

    def __init__(self, model: torch.nn.Module, loss_fn: Callable[..., Any], optimizer: torch.optim.Optimizer,
                 config: Config, *, clip_norm: float | None = None, accumulate: int = 1,
                 scaler: torch.amp.GradScaler | None = None, ema: float | None = None,
                 gradient_dtype: torch.dtype | None = None, strategy: Any = None) -> None:
        compiled = getattr(model, "_anyshape", None)
        inner, strategy = unwrapped_model(
            compiled.target if compiled is not None else getattr(model, "_orig_mod", model), strategy)
        if isinstance(scaler, torch.amp.GradScaler) and not scaler.is_enabled():
            scaler = None
        self.settings = settings = StepSettings(
            inner, loss_fn, unwrapped(optimizer), config.replace(fullgraph=True), clip_norm, accumulate, scaler, ema,
            gradient_dtype, strategy)
        settings.check()
        optimizer = settings.optimizer
        warn_of_others(inner, optimizer)
        self.norm: Tensor | None = None
        self.position = 0
        self.count = 0
        self._saver = Saver(strategy is not None)
        self.averages: dict[str, Tensor] = {}
        settings.begin_averages(self.averages)
        self._apart: StepApart | None = None
        self._why = ""  # it is as it is
        self._lock = threading.RLock()  # batches of several threads come one after another
        rule, why = rule_for(inner, optimizer)
        if rule is None:
            self._refuse_apart(why)
            self._refuse_alone(why)
            self._fall_back(why)
            return
        self._whole = WholeStep(inner, loss_fn, StepState())
        if strategy is not None:
            meet(strategy, inner, optimizer)
        if strategy is not None and strategy != AUTO:
            self._whole.state.distribution = distribution_of(strategy, inner, self._names,
                                                                 settings.config.limited)
        self._states = StepStates(self._whole, settings, rule, self.averages)
        self._compiled = CompiledCallable(self._whole, settings.config)
        self._compiled.compilation.step = self._whole.state
        torch_trace.one_node(gradients_of)

    # ---- a step

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Runs one batch; with the last of `accumulate` batches, weights and optimiser state are updated in place.

        Args:
            arguments, keywords: what `loss_fn` takes after the model.

        Returns:
            The loss, detached. Where `loss_fn` returns a tuple, a tuple that begins with it.

        Raises:
            InputError: the loss is not one number that depends on a weight, or it is called inside of `whole`.
            LimitError: the step needs more than `memory_limit`; nothing of it has run.
            RankError: ranks run other programs, or one is lost: its process has ended.
        """
        with self._lock:
            mesh = None if self._apart is not None else self._mesh()
            met = 0 if mesh is None else mesh.met
            try:
                results = self._run(arguments, keywords) if self._apart is None else self._apart(arguments, keywords)
            except BaseException as error:
                if self.settings.strategy is None:
                    raise
                mesh = None if self._apart is not None else self._mesh()
                found = lost(error)
                told = found or error
                if mesh is not None and mesh.failed and mesh.failure is None:
                    leave(mesh, told)
                elif isinstance(told, Exception) and not isinstance(told, RankError):
                    leave_words(told)  # the others hear of it when this process ends
                    if mesh is not None and mesh.met == met:  # or at once, where they have yet to compare programs
                        fail_together(mesh, told)
                if found is None:
                    raise
                raise found from error
            finally:  # an interrupt is raised after a step
                if self._apart is not None:
                    self.count += self._apart.made
                    self.position, self.norm, self._apart.made = self._apart.position, self._apart.norm, 0
            if self._apart is not None:
                self.compilation.ran_eagerly(f"the optimiser's update is no part of the program: {self._why}")
        return results if len(results) > 1 else results[0]

    def _run(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
        """One batch by the one program; where it turns out that it cannot be one, nothing has run, and its parts do."""
        why = why_apart(self.settings.optimizer)
        if why:  # hooks that are new, or weights
            self._refuse_apart(why)
            self._refuse_alone(why)
            return self._run_apart(why, arguments, keywords)
        state = self._whole.state
        if state.distribution is not None and state.distribution.is_whole:
            raise InputError("a step was called inside of `with step.whole():`", where="train_step(strategy=...)",
                             why="it changes the parts that ranks have, and the wholes are taken over behind it: the "
                                 "step would be lost", do="call it behind the block")
        is_last = self.position == self.settings.accumulate - 1
        self._states.prepare(is_last)
        if self.settings.strategy is not None:
            if state.distribution is None:  # the search needs a batch
                self._meet("step")
                one = self.settings
                found = searched(one.model, one.loss_fn, one.optimizer, arguments, one.config.memory_limit, keywords)
                state.distribution = distribution_of(found.strategy, one.model, self._names, one.config.limited)
                if found.search is not None:
                    self.compilation.strategy.append(str(found.search))
            arguments, keywords = as_batch((arguments, keywords))
        state.has_ended = False
        try:
            loss, rest, _ = self._compiled.call(arguments, keywords)
        except api.not_one_graph() as error:
            if self.settings.config.strict or self.settings.strategy is not None:  # PyTorch says what it refuses
                check_loss(parts_of(self.settings.loss_fn(self.settings.model, *arguments, **keywords))[0])
            if self.settings.config.strict:
                raise
            cause = getattr(error, "inner_exception", error)  # the compiler's own, inside Dynamo's
            why = f"{type(cause).__name__}: {(str(cause).strip().splitlines() or [''])[0]}"
            self._refuse_alone(why, cause)
            return self._run_apart(why, arguments, keywords)
        finally:
            if state.has_ended:  # an interrupt is raised after it
                self._ended(is_last)
        return (loss, *rest)

    def _ended(self, is_last: bool) -> None:
        """After a batch has changed what it changes."""
        state = self._whole.state
        with DeferInterrupts():
            self._states.count(is_last)
            self._states.settle()
            self.position = 0 if is_last else self.position + 1
            if is_last:
                self.count += 1
                self.norm = state.norm
                self._states.ended(state.finite)

    def _run_apart(self, why: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
        """The batch as parts, as all that come after it. What PyTorch refuses too, it says itself: then the next batch
        is tried as one program again."""
        begun = self.state_dict()
        self._apart = StepApart(self.settings, self.averages)
        try:
            self.load_state_dict(begun)
            results = self._apart(arguments, keywords)
        except BaseException:
            self._apart, self.position = None, begun["position"]
            raise
        self._fall_back(why, level=5)
        return results

    def finish(self) -> None:
        """Ends a step of which fewer than `accumulate` batches have run, such as at the end of an epoch: the update is
        made by the mean of the gradients gathered so far. Does nothing where there are none."""
        with self._lock, told_of_lost_ranks():
            if self.position == 0:
                return
            with DeferInterrupts():
                if self._apart is not None:
                    self._apart.finish()
                    self.count += self._apart.made
                    self.position, self.norm, self._apart.made = 0, self._apart.norm, 0
                    return
                with self.whole(), self._others_hear():
                    self._states.prepare(True)
                    self._states.make(self.position)
                    self._ended(True)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Parameters and optimiser state are whole inside, on every rank; what is changed there is taken over.

        Under a strategy that deals them out, the model's tensors read as NaN elsewhere. All ranks enter it together, as
        to evaluate, to save, or to load a state. Without a strategy it does nothing.
        """
        distribution = None if self._apart is not None else self._whole.state.distribution
        with told_of_lost_ranks():
            self._meet("whole")
        if distribution is None or distribution.is_whole:
            yield
            return
        with self._others_hear():
            distribution.gather()
        try:
            yield
        finally:
            with self._others_hear():
                distribution.scatter()

    @contextmanager
    def _others_hear(self) -> Iterator[None]:
        """Inside, ranks that have met do what all of them have to do to the end: a failure of this one ends the groups
        of the mesh, so that the others hear of it at once, as within a step."""
        mesh = self._mesh()
        if mesh is None:
            yield
            return
        try:
            with sending(mesh):
                yield
        except BaseException as error:
            found = lost(error)
            if mesh.failure is None:
                leave(mesh, found or error)
            if found is None:
                raise
            raise found from error

    def _mesh(self) -> ProcessMesh | None:
        """Of the strategy; None without, and before it was searched for."""
        distribution = self._whole.state.distribution
        return None if distribution is None else distribution.mesh

    def _meet(self, what: str) -> None:
        """Under a strategy, all ranks do the same now. One that is searched for has no mesh of its own before the first
        step.

        Raises:
            RankError: some do something else; nothing has been done.
        """
        if self.settings.strategy is not None:
            together(self._mesh() or mesh_of_all(), what)

    def _refuse_alone(self, why: str, cause: BaseException | None = None) -> None:
        """Raises Unsupported under a strategy: the optimiser as it is knows nothing of other ranks. cause: the error
        that `why` is of, which may say where it is and what to do."""
        if self.settings.strategy is not None:
            known = cause if isinstance(cause, AnyShapeError) else AnyShapeError("")
            raise Unsupported("a step that is dealt out over ranks has to be one program", where=known.where,
                              why=f"{why}: {known.why}" if known.why else why,
                              do=known.do or "leave the strategy out, or choose an optimiser and a loss that can be "
                                             "compiled")

    def _refuse_apart(self, why: str) -> None:
        """Raises Unsupported where the optimiser may not run as PyTorch. (A limit is on forward and backward then.)"""
        if self.settings.config.strict:
            refuse(self.settings.config, f"the optimiser's update is no part of the program: {why}",
                   "set strict=False to let the optimiser run as it is")

    def _fall_back(self, why: str, level: int = 4) -> None:
        """From here on, forward and backward apart from the optimiser."""
        self._apart = self._apart or StepApart(self.settings, self.averages)
        self._why = why
        self._shown.compilation.record("train step", "one program", f"{why}; {APART}")
        warnings.warn(f"the train step is not one program: {APART}.\n  why: {why}\n"
                      "  do:  nothing, if that is fast enough; see explain()", FallbackWarning, stacklevel=level)

    # ---- looking at it

    @property
    def _shown(self) -> CompiledCallable:
        return self._compiled if self._apart is None else self._apart.compiled._anyshape

    @property
    def compilation(self) -> Compilation:
        """All that was captured and compiled so far."""
        return self._shown.compilation

    @property
    def programs(self) -> list[Any]:
        """The programs compiled so far."""
        return self._shown.compilation.programs

    def explain(self, **sizes: Any) -> Explanation:
        """What was decided, and why; as for `anyshape.compile`."""
        return self._shown.explain(**sizes)

    def memory(self, **sizes: Any) -> MemoryNote:
        """What each program needs, as formulas and in bytes at `sizes`; as for `anyshape.compile`."""
        return self._shown.memory(**sizes)

    def report(self, *paths: str | Path, **sizes: Any) -> None:
        """Writes a page, a picture or data: what is alive at every step; as for `anyshape.compile`."""
        self._shown.report(*paths, **sizes)

    # ---- to go on later

    def state_dict(self) -> dict[str, Any]:
        """What model and optimiser do not hold: averages, the count of steps, and gradients gathered of a step that has
        not ended."""
        state = self._state()
        return {**state, **{key: {name: one.clone() for name, one in state[key].items()}
                            for key in ("gathered", "averages")}}

    def _state(self) -> dict[str, Any]:
        """The same, with the tensors themselves."""
        gathered, uses = {}, {}
        if self.position and self._apart is None:
            update = self._states.update
            for name, one, use in zip(self._names(), update.weights, update.uses.tolist(), strict=True):
                uses[name] = use
                if one.gathered is not None:
                    gathered[name] = one.gathered
        elif self.position:
            for name, weight in self.settings.model.named_parameters():
                if weight.grad is not None:  # the mean's part
                    gathered[name], uses[name] = weight.grad * self.settings.accumulate, float(self.position)
        return {"position": self.position, "count": self.count, "gathered": gathered, "uses": uses,
                "averages": dict(self.averages)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave, after model and optimiser have loaded theirs.

        Raises:
            InputError: it belongs to another model.
        """
        averages = state["averages"]
        if set(averages) != set(self.averages):
            raise InputError("the averages of this state are of other parameters",
                             why=f"they differ in {', '.join(sorted(set(averages) ^ set(self.averages))[:4])}",
                             do="load the state of the same model, with the same setting of ema")
        for name, average in averages.items():
            self.averages[name].copy_(average)
        self.position, self.count = state["position"], state.get("count", 0)
        gathered = state["gathered"]
        if self._apart is not None:
            self._apart.position = self.position
            for name, weight in self.settings.model.named_parameters():
                used = name in gathered and state["uses"][name] > 0
                weight.grad = gathered[name] / self.settings.accumulate if used else None
            return
        self._states.prepare(False)
        for place, (name, one) in enumerate(zip(self._names(), self._states.update.weights, strict=True)):
            self._states.update.uses[place] = state["uses"].get(name, 0.0)
            if one.gathered is not None and name in gathered:
                one.gathered.copy_(gathered[name])
            elif one.gathered is not None:
                one.gathered.zero_()

    def save(self, folder: str | Path, *, wait: bool = True, keep: int = 2, **others: Any) -> None:
        """Saves a checkpoint, `folder/step-<count>`, in the format of `torch.distributed.checkpoint`: model, optimiser,
        this step, torch's random numbers and `others`. All ranks call it together; each writes its parts.

        It is written under another name and counts from its rename on, so the last whole one stands whatever happens.

        Args:
            folder: on a disk that all ranks see.
            wait: False: returns when copies have been made, in memory, and writes beside the steps that follow. The
                next `save`, and `wait_for_save`, wait for its end and raise its errors.
            keep: how many whole checkpoints stay.
            others: name=object with `state_dict` and `load_state_dict`, such as schedulers, equal on all ranks.

        Raises:
            OutputError: it cannot be written, or the one before could not be.
            InputError: a state is no plain data. ConfigError: an object has no state.
        """
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ConfigError(f"keep is {keep!r}", why="it is the number of checkpoints that stay",
                              do="give a whole number from 1 on")
        one = self.settings
        with self._lock, told_of_lost_ranks():
            self._saver.wait()
            distribution = None if self._apart is not None else self._whole.state.distribution
            self._meet("save")
            found = consistently(self._saver, lambda: found_in(
                self._state(), one.model, one.optimizer, one.scaler, others, distribution, self._saver.rank))
            self._saver.save(Path(folder), found, self.count, keep, wait)

    def wait_for_save(self) -> None:
        """Returns when the last `save` has been written.

        Raises:
            OutputError: it could not be.
        """
        with self._lock, told_of_lost_ranks():
            self._saver.wait()

    def load(self, folder: str | Path, *, missing_ok: bool = False, **others: Any) -> int:
        """Loads the newest checkpoint in a folder, or the folder itself where it is one, in place; it may have been
        saved under another strategy, or by another number of processes. All ranks call it together.

        Args:
            folder: of `save`.
            missing_ok: a folder without checkpoints changes nothing.
            others: as of `save`.

        Returns:
            The count of steps made; 0 without a checkpoint.

        Raises:
            InputError: there is none, it cannot be read, or it is of another model or optimiser: it says which names
                differ. Nothing has been changed then.
        """
        one = self.settings
        with self._lock, told_of_lost_ranks():
            self._saver.wait()
            self._meet("load")
            path = newest(Path(folder), self._saver.is_distributed)
            if path is None:
                if missing_ok:
                    return self.count
                raise told_once(self._saver.rank, missing(Path(folder)))
            found = consistently(self._saver, lambda: examine(path, one.model, one.optimizer, self.averages, others,
                                                              self._saver.rank))
            with DeferInterrupts(), self.whole():  # it is loaded whole, or not at all
                self.load_state_dict(consistently(
                    self._saver, lambda: take(found, one.model, one.optimizer, one.scaler, others)))
            return self.count

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainStep:
        """A step of copies of model and optimiser, compiled anew."""
        one = self.settings
        model, optimizer, scaler = copy.deepcopy((one.model, one.optimizer, one.scaler), memo)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what there is to say has been said of this one
            found = TrainStep(model, copy.deepcopy(one.loss_fn, memo), optimizer, one.config, clip_norm=one.clip_norm,
                              accumulate=one.accumulate, scaler=scaler, ema=one.ema, gradient_dtype=one.gradient_dtype,
                              strategy=one.strategy)
        found.load_state_dict(self.state_dict())
        return found

    def __reduce__(self) -> Any:
        raise InputError("a train step cannot be pickled", why="it holds compiled programs",
                         do="save the state_dict of the model, of the optimiser and of the step")

    def _names(self) -> list[str]:
        """Of the weights; the places of those that are not the model's."""
        names = self._states.names
        return [names.get(id(one.weight), str(place)) for place, one in enumerate(self._states.update.weights)]
