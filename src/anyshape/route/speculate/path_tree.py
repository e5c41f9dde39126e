"""The tree of predicted paths: straight programs between commit points, with side exits where decisions turn out else.

    paths: go on, go on, exit (60 %); go on, exit (40 %)
    tree:  decision 1 -go on-> decision 2 -exit-> results
                                          -go on-> decision 3 -exit-> results

A region is a chain of decisions that one program computes, and what the way taken next needs. The host reads its
decisions once, at its end (a commit point). Where one is not as predicted, the call goes on at that decision with the
values that are there, along another path of the tree; where the tree has none, the caller runs the general path. So a
decision deferred too far costs work done in vain, never a wrong result. (Tracing compilers call it a trace tree: Gal
et al., PLDI 2009.)
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from anyshape.route.speculate.captured import INPUT, STATE, CapturedValues, Compile, Path, Ref, compiled
from anyshape.route.speculate.predicted import Choice
from anyshape.torch_compat import tree as pytree


@dataclass(eq=False)
class Branching:
    """A place of the tree: a decision with a way for each choice that is known, or an end with results.

    count: of the predicted calls, how many come here, in shares of all.
    """

    count: float = 0.0
    decision: int | None = None
    ways: dict[Choice, Branching] = field(default_factory=dict)
    path: Path | None = None

    @property
    def likeliest(self) -> Choice:
        return max(self.ways, key=lambda choice: self.ways[choice].count)

    def wanted(self) -> list[int]:
        """The values that have to be known here."""
        if self.path is None:
            return [] if self.decision is None else [self.decision]
        return [leaf.number for leaf in self.path.leaves if isinstance(leaf, Ref)]

    def below(self) -> list[int]:
        """The values that have to be known here and on all ways from here."""
        return [*self.wanted(), *(number for way in self.ways.values() for number in way.below())]


def branchings(paths: Sequence[tuple[Path, float]]) -> Branching:
    """The tree of paths, each with its share of calls.

    Raises:
        ValueError: paths disagree on what is decided, or on where the network ends, after the same choices.
    """
    root = Branching()
    for path, share in paths:
        here = root
        here.count += share
        for decision, choice in path.decisions:
            if here.path is not None or here.decision not in (None, decision):
                raise ValueError("paths with the same decisions go on in different ways")
            here.decision = decision
            here = here.ways.setdefault(choice, Branching())
            here.count += share
        if here.ways or (here.path is not None and here.path != path):
            raise ValueError("paths with the same decisions end differently")
        here.path = path
    return root


@dataclass(frozen=True, slots=True, eq=False)
class PathRegion:
    """A chain of decisions and the program that computes them.

    program: (values of `inputs`) -> (all decisions in a row, int64 [sum of cells * k], then values of `outputs`); None
    where nothing is left to compute. shapes: of each decision, [cells, k]. predicted: the row of a hit. ends: results,
    where the chain leads to them. after: the regions behind decisions, by (place in the chain, choice): behind the last
    one for every choice that is known, else for those that are not predicted.
    """

    program: Callable[..., Any] | None
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    shapes: tuple[tuple[int, int], ...]
    predicted: Tensor
    choices: tuple[Choice, ...]
    ends: Path | None
    after: Mapping[tuple[int, Choice], PathRegion]


@dataclass(frozen=True, slots=True)
class Tree:
    """All regions. inputs: the numbers of the values that the call gives, with their places among its tensors."""

    root: PathRegion
    branching: Branching
    inputs: tuple[tuple[int, int], ...]
    states: Mapping[int, Tensor]
    programs: int


@dataclass(frozen=True, slots=True)
class PathOutcome:
    """What became of a call.

    ends: the path that it took; None where the tree has none for its decisions. leaves: its results. choices: what was
    decided, as far as it is known. missed: where what was computed ahead was in vain. redo: cells [N] that took
    another way (bool); None where all took this one.
    """

    ends: Path | None
    leaves: tuple[Any, ...]
    choices: tuple[Choice, ...]
    missed: int
    redo: Tensor | None = None


RUNS = 3  # of which the least counts, where seconds are counted
WARM = 3  # calls after which a program runs as it will: compilers are late, weights are reordered
COMMIT = Branching()  # stands for the reading of a decision, where seconds are counted


def _least(function: Callable[[], Any], clock: Callable[[], float]) -> float:
    """Seconds of a call, the least of RUNS."""
    found = []
    for _ in range(RUNS):
        begin = clock()
        function()
        found.append(clock() - begin)
    return min(found)


def _nothing() -> GraphModule:
    """A program without work, but for one operator."""
    graph = Graph()
    row = graph.placeholder("row")
    graph.output((graph.call_function(torch.ops.aten.add.Tensor, (row, row)),))
    return GraphModule(nn.Module(), graph)


class PathTreeBuilder:
    """Makes the regions of a tree.

    Args:
        deferral: (begin, way) -> whether what follows a decision on its likeliest way, `way`, is computed before the
            decisions since `begin` are read.
    """

    def __init__(self, values: CapturedValues, deferral: Callable[[Branching, Branching], bool],
                 compile: Compile | None) -> None:
        self.values, self.deferral, self.compile = values, deferral, compile
        self.states = {number: value.args[0] for number, value in enumerate(values.values) if value.target == STATE}
        self.inputs = {number: value.args[0] for number, value in enumerate(values.values) if value.target == INPUT}
        self.programs = 0

    def tree(self, root: Branching) -> Tree:
        region = self.region(root, {*self.inputs, *self.states})
        return Tree(region, root, tuple(self.inputs.items()), self.states, self.programs)

    def timed(self, root: Branching, inputs: Sequence[Tensor], clock: Callable[[], float]) -> dict[Branching, float]:
        """Seconds of the work from each decision to the next on the likeliest way, as PyTorch does it, and of a commit
        alone (COMMIT): a program without work, compiled, and a look at its decision. The least of three runs."""
        row = torch.zeros(1, dtype=torch.int64)
        nothing = compiled(_nothing(), (row,), self.compile)
        with torch.no_grad():
            commit = [_least(lambda: torch.equal(nothing(row)[0], row), clock) for _ in range(WARM)][-1]
        chain, pieces = [root], list[set[int]]()
        known = {*self.inputs, *self.states}
        while True:
            pieces.append(self.values.ancestors(chain[-1].wanted(), known))
            known |= pieces[-1]
            if chain[-1].path is not None:
                break
            chain.append(chain[-1].ways[chain[-1].likeliest])
        program = self.values.timed(tuple(self.inputs), pieces, clock)
        with torch.no_grad():
            runs = [program(*[inputs[place] for place in self.inputs.values()]) for _ in range(WARM + RUNS)][WARM:]
        taken = [[after - before for before, after in pairwise(times)] for times in runs]
        return {COMMIT: commit, **{here: min(own) for here, own in zip(chain, zip(*taken), strict=True)}}

    def region(self, here: Branching, known: set[int]) -> PathRegion:
        chain = [here]
        while chain[-1].path is None and self.deferral(here, chain[-1].ways[chain[-1].likeliest]):
            chain.append(chain[-1].ways[chain[-1].likeliest])
        ends = chain[-1].path
        computed = self.values.ancestors((number for one in chain for number in one.wanted()), known)
        sides = [(place, choice, way) for place, one in enumerate(chain) for choice, way in one.ways.items()
                 if way not in chain]
        below = {number for _, _, way in sides for number in way.below()}
        later = below | {operand for number in self.values.ancestors(below, known | computed)
                         for operand in self.values.operands[number]}
        results = set() if ends is None else set(chain[-1].wanted())
        outputs = tuple(sorted(computed & (later | results)))
        decisions = [one.decision for one in chain if one.decision is not None]
        read = {operand for number in computed for operand in self.values.operands[number]} | set(decisions)
        inputs = tuple(sorted(read - computed - set(self.states)))
        program, shapes = self.program(inputs, computed | (read & set(self.states)), outputs, decisions)
        choices = tuple(one.likeliest for one in chain if one.decision is not None)
        row = [number for choice, shape in zip(choices, shapes, strict=True) for number in choice * shape[0]]
        after = {(place, choice): self.region(way, known | computed) for place, choice, way in sides}
        return PathRegion(program, inputs, outputs, shapes, torch.tensor(row, dtype=torch.int64), choices, ends, after)

    def program(self, inputs: Sequence[int], computed: set[int], outputs: Sequence[int], decisions: Sequence[int]
                ) -> tuple[Callable[..., Any] | None, tuple[tuple[int, int], ...]]:
        """The program of a region, and the shapes of its decisions."""
        if not decisions and not outputs:
            return None, ()
        module = self.values.program(inputs, computed, [*decisions, *outputs])
        if decisions:
            _put_in_a_row(module, len(decisions))
        self.programs += 1
        samples = [self.values.values[number].sample for number in decisions]
        examples = tuple(self.values.zeros(number) for number in inputs)
        shapes = tuple((one.shape[0], one.shape[1]) for one in samples if one is not None)
        program = compiled(module, examples, self.compile)
        with torch.no_grad(), contextlib.suppress(Exception):  # zeros may not be fit for it
            for _ in range(WARM):
                program(*examples)
        return program, shapes


def _put_in_a_row(module: GraphModule, count: int) -> None:
    """The first `count` results become one, int64."""
    aten, call = torch.ops.aten, module.graph.call_function
    end = module.graph.output_node()
    own = list(end.args[0])  # type: ignore[arg-type]
    with module.graph.inserting_before(end):
        flat = [call(aten.reshape.default, (node, [-1])) for node in own[:count]]
        row = call(aten.cat.default, ([call(aten._to_copy.default, (one,), {"dtype": torch.int64}) for one in flat],))
    end.args = ((row, *own[count:]),)
    module.recompile()


def run(tree: Tree, tensors: Sequence[Tensor], independent: bool = False) -> PathOutcome:
    """A call along the tree.

    Args:
        independent: the cells of every decision are the rows of all inputs and results, and do not depend on each
            other: then cells that part from the others are left for the caller to do again.
    """
    known: dict[int, Any] = {number: tensors[place] for number, place in tree.inputs}
    region, missed, redo = tree.root, 0, None
    choices: list[Choice] = []
    while True:
        decided = region.predicted
        if region.program is not None:
            found = region.program(*[known[number] for number in region.inputs])
            if region.shapes:
                decided, found = found[0], found[1:]
            known.update(zip(region.outputs, found, strict=True))
        last = len(region.shapes) - 1
        place, choice = last, region.choices[-1] if region.choices else None
        if not torch.equal(decided, region.predicted):
            place, choice, redo = _parting(region, decided, redo, independent)
        choices += region.choices[:max(place, 0)]
        hit = place == last and (last < 0 or choice == region.choices[last])
        missed += not hit and (place < last or region.ends is not None)
        if choice is not None:
            choices.append(choice)
        if hit and region.ends is not None:
            return PathOutcome(region.ends, _results(tree, region.ends, known), tuple(choices), missed, redo)
        if choice is None or (place, choice) not in region.after:
            return PathOutcome(None, (), tuple(choices), missed)
        region = region.after[place, choice]


def _results(tree: Tree, ends: Path, known: dict[int, Any]) -> tuple[Any, ...]:
    """Results, none of them a tensor that the caller has: copies of inputs, parameters and other results."""
    own = {number for number, _ in tree.inputs} | set(tree.states)
    found: list[Any] = []
    for leaf in ends.leaves:
        if not isinstance(leaf, Ref):
            found.append(leaf)
            continue
        value = known[leaf.number] if leaf.number in known else tree.states[leaf.number]
        found.append(value.clone() if leaf.number in own else value)
        own.add(leaf.number)
    return tuple(found)


def _parting(region: PathRegion, decided: Tensor, redo: Tensor | None, independent: bool
             ) -> tuple[int, Choice | None, Tensor | None]:
    """The first place where the call takes another way than predicted, the choice there (None: the cells take several),
    and the cells to do again. Where no cell that counts takes another way: the last place, and its predicted choice."""
    begin = 0
    for place, (cells, width) in enumerate(region.shapes):
        rows = decided[begin:begin + cells * width].reshape(cells, width)
        begin += cells * width
        same = (rows == rows.new_tensor(region.choices[place])).all(1)
        counting = rows if redo is None else rows[~redo]
        if bool(same.all() if redo is None else same[~redo].all()):
            continue
        if bool((counting == counting[0]).all()):
            return place, tuple(counting[0].tolist()), redo
        redo = ~same if redo is None else redo | ~same
        if not independent or bool(redo.all()):
            return place, None, None
    return len(region.shapes) - 1, region.choices[-1], redo


def nested(outcome: PathOutcome) -> Any:
    """The results as the model returns them."""
    assert outcome.ends is not None
    return pytree.tree_unflatten(list(outcome.leaves), outcome.ends.nesting)


def follow(branching: Branching, choices: Sequence[Choice]) -> bool:
    """Whether a tree has the path of these decisions, to its end."""
    for choice in choices:
        if choice not in branching.ways:
            return False
        branching = branching.ways[choice]
    return branching.path is not None
