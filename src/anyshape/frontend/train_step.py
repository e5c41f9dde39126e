"""`anyshape.train_step`: loss, gradients and the optimiser's update as one compiled program.

    step = anyshape.train_step(model, loss_fn, torch.optim.AdamW(model.parameters()))
    for batch in loader:
        loss = step(batch)

The program is `WholeStep` (frontend/whole_step.py), compiled as any module is. The optimiser stays the owner of its
state: the program changes the tensors in `optimizer.state` in place, and reads learning rates and the like from
`optimizer.param_groups` at every step. What cannot be one program runs as a compiled forward and backward, with the
optimiser as it is, and says why.
"""
from __future__ import annotations

import inspect
import signal
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from anyshape.base.config import Config
from anyshape.base.errors import ConfigError, InputError
from anyshape.frontend.api import Compiled, CompiledFunction
from anyshape.frontend.dynamo import FallbackWarning
from anyshape.frontend.explanation import Explanation, MemoryNote
from anyshape.frontend.updates import Rule, rule_of
from anyshape.frontend.whole_step import Weight, WholeStep
from anyshape.run import torch_api

APART = "forward and backward are compiled, and the optimiser runs as it is"


class TrainStep:
    """A compiled train step: call it with a batch. See `anyshape.train_step`.

    Attributes:
        norm: of the gradients of the last step, before it was limited; None without `clip_norm`.
        averages: name of a parameter -> its running average; empty without `ema`.
    """

    def __init__(self, model: torch.nn.Module, loss_fn: Callable[..., Any], optimizer: torch.optim.Optimizer,
                 config: Config, *, clip_norm: float | None = None, accumulate: int = 1,
                 scaler: torch.amp.GradScaler | None = None, ema: float | None = None) -> None:
        _check(model, loss_fn, optimizer, clip_norm, accumulate, ema)
        own = getattr(model, "_anyshape", None)
        self.model: torch.nn.Module = own.target if own is not None else getattr(model, "_orig_mod", model)
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.config = config.replace(fullgraph=True)
        self.clip_norm = clip_norm
        self.accumulate = accumulate
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.ema = ema
        self.norm: Tensor | None = None
        self.averages: dict[str, Tensor] = {}
        self.position = 0  # batches of the step in hand that have run
        self._weights: tuple[Weight, ...] = ()
        self._names = {id(weight): name for name, weight in self.model.named_parameters()}
        self._structure: Any = None
        self._has_run = False
        self._numbers: list[numpy.ndarray[Any, Any]] = []  # of each weight, the memory of its `numbers`
        self._apart: _Apart | None = None
        _warn_of_others(self.model, optimizer)
        rule, why = _rule(self.model, optimizer)
        self._rule = rule
        if ema is not None:
            self.averages = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        self.whole = WholeStep(self.model, loss_fn, rule) if rule is not None else None
        self._compiled = None if self.whole is None else Compiled(self.whole, self.config, _uninterrupted)
        if self._compiled is not None:
            self._compiled.compilation.steps = True
        if rule is None:
            self._fall_back(why)

    # ---- a step

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Runs one batch; with the last of `accumulate` batches, weights and optimiser state are updated in place.

        Args:
            arguments, keywords: what `loss_fn` takes after the model.

        Returns:
            The loss, detached: a tensor without dims. Where `loss_fn` returns a tuple, a tuple that begins with it.

        Raises:
            InputError: the loss is not one number that depends on a weight.
            LimitError: the step needs more than `memory_limit`; nothing of it has run.
        """
        if self._apart is not None:
            return self._apart(arguments, keywords)
        assert self.whole is not None and self._compiled is not None
        self._prepare()
        whole = self.whole
        whole.is_last = self.position == self.accumulate - 1
        try:
            loss, norm, finite, *rest = self._compiled.call(arguments, keywords)
        except (*torch_api.tracer_failures(), torch_api.graph_break_error(), InputError) as error:
            if self._has_run:
                raise  # it has compiled before: the call is at fault
            self._loss_checked(arguments, keywords)
            if self.config.strict:
                raise
            self._fall_back(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
            assert self._apart is not None
            return self._apart(arguments, keywords)
        finally:
            self._settle()
        self._has_run = True
        self.position = (self.position + 1) % self.accumulate
        if whole.is_last:
            self.norm = norm
            self._scaled(finite)
        return (loss, *rest) if rest else loss

    def finish(self) -> None:
        """Ends a step of which fewer than `accumulate` batches have run, such as at the end of an epoch: the update is
        made by the mean of the gradients gathered so far. Does nothing where there are none."""
        if self._apart is not None:
            self._apart.finish()
            return
        if self.position == 0 or self.whole is None:
            return
        self._prepare()
        whole = self.whole
        whole.parts = self.position
        try:
            with torch.no_grad():
                self.norm, finite = whole.update([None] * len(whole.weights))
        finally:
            whole.parts = self.accumulate
        self._settle()
        self.position = 0
        self._scaled(finite)

    # ---- what a step needs of the optimiser

    def _prepare(self) -> None:
        """Takes the optimiser's groups and states over, where they have changed, and fills in the numbers of this step.
        """
        structure = self._structure_now()
        if structure != self._structure or not self._holds_states():
            self._take_over()
            self._structure = structure
        if self.position < self.accumulate - 1:
            return
        whole, rule = self.whole, self._rule
        assert whole is not None and rule is not None
        groups = self.optimizer.param_groups
        known: dict[Any, tuple[float, ...]] = {}
        for one, numbers, made in zip(self._weights, self._numbers, whole.steps.tolist(), strict=True):
            key = (one.group, one.weight.shape, made)
            if key not in known:
                known[key] = rule.numbers(groups[one.group], one.weight.shape, int(made) + 1, made == 0)
            numbers[:] = known[key]
        if self.clip_norm is not None:
            whole.most.fill_(self.clip_norm)
        if self.ema is not None:
            whole.part.fill_(1 - self.ema)

    def _structure_now(self) -> Any:
        """What the program depends on of the optimiser, apart from tensors: weights by group, and choices."""
        assert self._rule is not None
        return [([id(weight) for weight in group["params"] if weight.requires_grad], self._rule.choices(group))
                for group in self.optimizer.param_groups]

    def _holds_states(self) -> bool:
        """Are the optimiser's tensors those that the program has? Not after `load_state_dict`."""
        state = self.optimizer.state
        for one in self._weights:
            own = state.get(one.weight)
            if own is None:
                if one.is_new:
                    continue
                return False
            for name, tensor in one.states.items():
                if own.get(name) is not tensor:
                    return False
            if one.step is not None and own.get("step") is not one.step:
                return False
        return True

    def _take_over(self) -> None:
        """Weights with their states from the optimiser; zeros where it has none yet."""
        whole, rule = self.whole, self._rule
        assert whole is not None and rule is not None
        groups = self.optimizer.param_groups
        listed = [(number, weight) for number, group in enumerate(groups) for weight in group["params"]
                  if weight.requires_grad]
        gathered = {id(one.weight): one.gathered for one in self._weights}
        steps, found = torch.zeros(len(listed)), []
        uses = {id(one.weight): use for one, use in zip(self._weights, whole.uses.tolist(), strict=True)}
        for place, (number, weight) in enumerate(listed):
            own = self.optimizer.state.get(weight, {})
            shapes = rule.shapes(groups[number], weight.shape)
            is_new = any(own.get(name) is None for name in shapes)
            states = {name: own[name] if own.get(name) is not None else _zeros(weight, shape)
                      for name, shape in shapes.items()}
            steps[place] = float(own.get("step", 1.0 if shapes and not is_new else 0.0))
            sums = None
            if self.accumulate > 1:
                sums = gathered.get(id(weight))
                sums = torch.zeros_like(weight.detach()) if sums is None else sums
            found.append(Weight(weight, number, rule.choices(groups[number]), states, torch.zeros(0), sums,
                                self.averages.get(self._names.get(id(weight), "")), is_new))
        for place, one in enumerate(found):  # memory of its own each: no offsets for a program to depend on
            one.numbers = torch.zeros(len(rule.numbers(groups[one.group], one.weight.shape, 1, True)),
                                      dtype=torch.float64)
            if rule.counts:
                one.step = steps[place]
                if not one.is_new:
                    self.optimizer.state[one.weight]["step"] = one.step
            for tensor in (*one.states.values(), one.numbers, one.gathered, one.average):
                if tensor is not None:
                    torch_api.fix_sizes(tensor)
        self._numbers = [one.numbers.numpy() for one in found]
        self._weights = whole.weights = tuple(found)
        whole.steps = steps
        whole.uses = torch.tensor([uses.get(id(weight), 0.0) for _, weight in listed])
        whole.parts = self.accumulate
        whole.is_clipped = self.clip_norm is not None
        if self.scaler is not None:
            if self.scaler._scale is None:
                self.scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
            whole.scale = self.scaler._scale

    def _settle(self) -> None:
        """Hands the optimiser the states that were made for a first step, once that has been made."""
        if not any(one.is_new for one in self._weights):
            return
        assert self.whole is not None
        for one, made in zip(self._weights, self.whole.steps.tolist(), strict=True):
            if one.is_new and made:
                one.is_new = False
                if one.states or one.step is not None:
                    self.optimizer.state[one.weight].update(
                        {**({"step": one.step} if one.step is not None else {}), **one.states})

    def _scaled(self, finite: Tensor | None) -> None:
        """After an update: the next scale of the loss, and for schedulers that there was a step."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        if self.scaler is not None and finite is not None:
            torch._amp_update_scale_(
                self.scaler._scale, self.scaler._growth_tracker, 1.0 - finite.to(torch.float32),
                self.scaler.get_growth_factor(), self.scaler.get_backoff_factor(), self.scaler.get_growth_interval())

    # ---- another way

    def _loss_checked(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        found = self.loss_fn(self.model, *arguments, **keywords)  # what eager PyTorch refuses too, it says itself
        _check_loss(_parts(found)[0])

    def _fall_back(self, why: str) -> None:
        """From here on, forward and backward apart from the optimiser."""
        self._apart = _Apart(self)
        self._apart.compiled._anyshape.compilation.record("train step", "one program", f"{why}; {APART}")
        warnings.warn(f"the train step is not one program: {APART}.\n  why: {why}\n"
                      "  do:  nothing, if that is fast enough; see explain()", FallbackWarning, stacklevel=3)

    # ---- looking at it

    @property
    def _shown(self) -> Compiled:
        shown = self._apart.compiled._anyshape if self._apart is not None else self._compiled
        assert shown is not None
        return shown

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
        """What model and optimiser do not hold: averages, and gradients gathered of a step that has not ended."""
        names = [self._names.get(id(one.weight), str(place)) for place, one in enumerate(self._weights)]
        gathered = {name: one.gathered.clone() for name, one in zip(names, self._weights, strict=True)
                    if one.gathered is not None and self.position}
        uses = self.whole.uses.tolist() if self.whole is not None and self.position else []
        return {"position": self.position, "gathered": gathered, "uses": dict(zip(names, uses, strict=False)),
                "averages": {name: average.clone() for name, average in self.averages.items()}}

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
        if self.whole is None:
            return
        self._prepare()
        self.position = state["position"]
        for place, one in enumerate(self._weights):
            name = self._names.get(id(one.weight), str(place))
            if one.gathered is not None:
                one.gathered.copy_(state["gathered"][name]) if name in state["gathered"] else one.gathered.zero_()
            self.whole.uses[place] = state["uses"].get(name, 0.0)


class _Apart:
    """The step as a compiled forward and backward, and the optimiser's own `step`."""

    def __init__(self, step: TrainStep) -> None:
        loss_fn, model = step.loss_fn, step.model

        def loss(*arguments: Any, **keywords: Any) -> Any:
            return loss_fn(model, *arguments, **keywords)

        self.step = step
        self.compiled = CompiledFunction(loss, step.config.replace(fullgraph=False))
        self.searches = _wants_closure(step.optimizer)
        self.batches: list[tuple[tuple[Any, ...], dict[str, Any]]] = []  # of the step in hand, if it searches

    def __call__(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        step = self.step
        if self.searches:
            self.batches.append((arguments, keywords))
            step.position += 1
            with torch.enable_grad():
                found = self.finish() if step.position == step.accumulate else self.compiled(*arguments, **keywords)
        else:
            found = self._backward(arguments, keywords, step.accumulate)
            step.position += 1
            if step.position == step.accumulate:
                self.finish()
        loss, rest = _parts(found)
        return (loss.detach(), *(one.detach() if isinstance(one, Tensor) else one for one in rest)) if rest \
            else loss.detach()

    def _backward(self, arguments: tuple[Any, ...], keywords: dict[str, Any], parts: int) -> Any:
        """Adds the gradients of one of `parts` batches to those there are; what `loss_fn` gave."""
        step = self.step
        found = self.compiled(*arguments, **keywords)
        loss, _ = _parts(found)
        _check_loss(loss)
        scaled = loss if parts == 1 else loss / parts
        (scaled if step.scaler is None else step.scaler.scale(scaled)).backward()
        return found

    def finish(self) -> Any:
        """Updates by the batches there are; of an optimiser that searches, what `loss_fn` gave for the last one."""
        step, optimizer = self.step, self.step.optimizer
        count, step.position = step.position, 0
        if count == 0:
            return None
        found: Any = None
        if self.searches:
            batches, self.batches = self.batches, []
            first: list[Any] = []

            def closure() -> Tensor:
                optimizer.zero_grad()
                given = [self._backward(*batch, len(batches)) for batch in batches]
                first.append(given[-1])
                self._clip()
                total: Tensor = sum(_parts(one)[0].detach() for one in given)  # type: ignore[assignment]
                return total / len(given)

            optimizer.step(closure)  # type: ignore[arg-type]
            found = first[0]
        else:
            for weight in self._weights() if count < step.accumulate else ():
                assert weight.grad is not None
                weight.grad.mul_(step.accumulate / count)
            if step.scaler is not None:
                step.scaler.unscale_(optimizer)
            self._clip()
            if step.scaler is None:
                optimizer.step()
            else:
                step.scaler.step(optimizer)
                step.scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if step.ema is not None:
            with torch.no_grad():
                for name, weight in step.model.named_parameters():
                    step.averages[name].lerp_(weight, 1 - step.ema)
        return found

    def _weights(self) -> list[Tensor]:
        return [weight for group in self.step.optimizer.param_groups for weight in group["params"]
                if weight.grad is not None]

    def _clip(self) -> None:
        if self.step.clip_norm is not None:
            self.step.norm = torch.nn.utils.clip_grad_norm_(self._weights(), self.step.clip_norm)


def _parts(found: Any) -> tuple[Any, tuple[Any, ...]]:
    """The loss, and what `loss_fn` gave beside."""
    return (found[0], tuple(found[1:])) if isinstance(found, (tuple, list)) and found else (found, ())


def _wants_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Does its `step` compute the loss itself, as a search along a line does?"""
    parameters = inspect.signature(type(optimizer).step).parameters
    return "closure" in parameters and parameters["closure"].default is inspect.Parameter.empty


def _check(model: Any, loss_fn: Any, optimizer: Any, clip_norm: float | None, accumulate: int,
           ema: float | None) -> None:
    """Raises ConfigError for what cannot be a train step."""
    for value, kind, words in ((model, torch.nn.Module, "the model is an nn.Module"),
                               (optimizer, torch.optim.Optimizer, "the optimiser is a torch.optim.Optimizer")):
        if not isinstance(value, kind):
            raise ConfigError(f"anyshape.train_step got a {type(value).__name__}", why=words, do="pass one")
    if not callable(loss_fn):
        raise ConfigError(f"anyshape.train_step got a {type(loss_fn).__name__} for loss_fn",
                          why="it is a function of the model and a batch", do="pass such a function")
    for name, found, fits, words in (
            ("clip_norm", clip_norm, clip_norm is None or clip_norm > 0, "it is the largest norm of the gradients"),
            ("accumulate", accumulate, isinstance(accumulate, int) and accumulate >= 1, "it is a number of batches"),
            ("ema", ema, ema is None or 0 <= ema < 1, "it is the part of an average that stays, from 0 to below 1")):
        if not fits:
            raise ConfigError(f"{name} is {found!r}", why=words, do="set another number")


def _check_loss(loss: Any) -> None:
    """Raises InputError where gradients cannot be taken of it."""
    if not isinstance(loss, Tensor):
        raise InputError(f"loss_fn returned a {type(loss).__name__}", why="gradients are those of a tensor",
                         do="return the loss, or a tuple that begins with it")
    if loss.numel() != 1:
        raise InputError(f"the loss has the shape {list(loss.shape)}", why="gradients are those of one number",
                         do="reduce it, for example by loss.mean()")
    if not loss.requires_grad:
        raise InputError("the loss depends on no weight", why="it was made of tensors without gradients",
                         do="call the model in loss_fn, outside of no_grad, and give back a loss that is not detached")


def _rule(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Rule | None, str]:
    """The rule of the optimiser; None, and why the step cannot be one program."""
    if isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        return None, f"a model under {type(model).__name__} hands on its gradients while the backward runs"
    rule = rule_of(optimizer)
    if _wants_closure(optimizer):
        return None, f"{type(optimizer).__name__} computes the loss several times a step, by a closure"
    if rule is None:
        return None, f"there is no update rule for {type(optimizer).__name__}"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return None, "the optimiser has hooks on its step"
    for group in optimizer.param_groups:
        for weight in group["params"]:
            hooks = [weight._backward_hooks, getattr(weight, "_post_accumulate_grad_hooks", None)]
            if any(hooks):
                return None, "a parameter has hooks, which run when its gradient is there"
            if not weight.is_floating_point() or weight.device.type != "cpu" or type(weight) not in (
                    Tensor, torch.nn.Parameter):
                return None, f"a weight is a {type(weight).__name__} of {weight.dtype} on {weight.device}"
    return rule, ""


def _warn_of_others(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Says which weights that could be trained will not be."""
    owned = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    others = [name for name, weight in model.named_parameters() if weight.requires_grad and id(weight) not in owned]
    if others:
        more = f" and {len(others) - 4} more" if len(others) > 4 else ""
        warnings.warn(f"the optimiser does not have all weights of the model: {', '.join(others[:4])}{more}\n"
                      "  why: they are in none of its parameter groups; they stay as they are, and get no gradients\n"
                      "  do:  give them to the optimiser, or freeze them with requires_grad_(False)", stacklevel=4)


def _zeros(weight: Tensor, shape: Any) -> Tensor:
    if tuple(shape) == tuple(weight.shape):
        return torch.zeros_like(weight.detach(), memory_format=torch.preserve_format)
    return weight.detach().new_zeros(tuple(shape))


def _uninterrupted(program: Callable[..., Any]) -> Callable[..., Any]:
    """`program` over flat inputs; Ctrl-C while it runs is raised after it, for it changes weights in place."""

    def run(*inputs: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return program(*inputs)
        with _held():
            return program(*inputs)

    return run


class _held:
    """Inside, an interrupt waits."""

    def __enter__(self) -> None:
        self.seen: list[Any] = []
        self.before = signal.getsignal(signal.SIGINT)
        if callable(self.before):
            signal.signal(signal.SIGINT, lambda number, frame: self.seen.append((number, frame)))

    def __exit__(self, *_: Any) -> None:
        if callable(self.before):
            signal.signal(signal.SIGINT, self.before)
            if self.seen:
                self.before(*self.seen[0])


