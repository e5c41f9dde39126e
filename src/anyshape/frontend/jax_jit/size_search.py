"""The search for what can be left symbolic: JAX or the compiler refuses some sizes, which then are numbers.

    x[x_0, x_1], weights f[f_0, x_1]  --"f_0 should be 8"-->  x[x_0, x_1], weights f[8, x_1]

A number is what costs a program for each size, so few dims become one, and none that only was equal to one by chance:
of dims that were one size those of arrays within trees come first, as weights are; the others, and those that no error
named, are tried again as soon as the rest is found; and so are all once a call tells them apart.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from anyshape.base.errors import Unsupported
from anyshape.frontend.jax_jit.size_questions import Question
from anyshape.frontend.jax_jit.symbolic_sizes import Fact, SizeClasses, Sizes, classes_of, names_in, names_of, refused

MOST_FROZEN = 6  # sizes that are made numbers one by one; then all of trees are, then all
MOST_FACTS = 16  # comparisons of sizes that JAX is told


class SizeSearch:
    """Of a function of arrays in a line. labels: of its arguments. keys: which of them are the words of keys of random
    numbers; how many words is a number."""

    def __init__(self, labels: Sequence[str], keys: Sequence[int]) -> None:
        self.labels = tuple(labels)
        self.keys = frozenset(keys)
        self.calls: list[Sizes] = []
        self.frozen: dict[tuple[int, ...], str] = {}  # places of dims that are numbers, each with the reason
        self.told: set[str] = set()  # those reasons that are recorded
        self.names: list[str] = []
        self.words: set[int] = set()  # places that are numbers of words of a key
        self.settled: set[int] = set()  # places of which what JAX was told for this program leaves one size
        self.nested: set[int] = set()  # places of arrays within trees
        self.trials = 0
        self.guesses: list[tuple[int, ...]] = []
        self.asked: set[tuple[int, ...]] = set()  # those of `frozen` that the function asked of

    def started(self, avals: Sequence[Any], sizes: Sizes) -> SizeClasses:
        """What a program for these sizes, which no other fits, may take for granted at first."""
        self.calls.append(sizes)
        apart = False  # those after one that is told apart may be numbers because of it
        for places in list(self.frozen):
            apart = apart or len({tuple(call[place] for call in self.calls) for place in places}) > 1
            if apart:
                del self.frozen[places]
        ranks = [len(aval.shape) for aval in avals]
        self.names = names_of(self.labels, ranks)
        at = 0
        for k, (label, rank) in enumerate(zip(self.labels, ranks, strict=True)):
            at += rank
            if k in self.keys:
                self.words.add(at - 1)
            if not label.isidentifier():
                self.nested.update(range(at - rank, at))
        self.trials, self.guesses, self.settled = 0, [], set()
        return self._classes(())

    def _classes(self, facts: Sequence[Fact]) -> SizeClasses:
        found = classes_of(self.calls, self.names, self.words.union(self.settled, *self.frozen))
        return replace(found, facts=tuple(fact for fact in facts if found.knows(fact)))

    def narrowed(self, classes: SizeClasses, said: str, reason: str, last: Question | None) -> SizeClasses | None:
        """What is left symbolic after an error with these classes; None: there is nothing left. reason: the error in
        a line. last: what JAX's own code denied right before it."""
        sizes = self.calls[-1]
        fact = None
        if len(classes.facts) < MOST_FACTS:
            fact = classes.comparison(said, sizes)
            if fact is None and last is not None and last[0].startswith("mod("):  # whether it divides evenly
                rest = last[0], "==", last[1]
                fact = rest if rest not in classes.facts and classes.compared(*rest, sizes) else None
        if fact is not None:
            return self._told(classes, fact)
        chosen = refused(classes, said)
        if chosen is None:
            return None
        self.trials += 1
        for name, places in [chosen] if self.trials <= MOST_FROZEN else classes.groups:
            inner = tuple(place for place in places if place in self.nested)
            if inner or self.trials != MOST_FROZEN + 1:
                places = inner or places
                self.frozen[places] = f"the size {name} is the number {sizes[places[0]]}: {reason}"
                if not inner or name not in said:
                    self.guesses.append(places)
        return self._classes(classes.facts)

    def _told(self, classes: SizeClasses, fact: Fact) -> SizeClasses:
        """With one fact more."""
        told = replace(classes, facts=(*classes.facts, fact))
        settled = told.settled(self.calls[-1])
        self.settled.update(settled)
        return self._classes(told.facts) if settled else told

    def answered(self, classes: SizeClasses, questions: Iterable[Question], sizes: Sizes) -> SizeClasses | None:
        """With what JAX denied in the trace and is so at these sizes: a number in place of a size, or a fact. None:
        there is nothing; a program of this trace is right at these sizes."""
        facts, found = list(classes.facts), False
        for a, b in questions:
            fact = a, "==", b
            if not classes.compared(*fact, sizes):
                continue
            known = fact in facts
            facts.append(fact)
            names = names_in(fact)
            number = a.isidentifier() and not names_in((b, "==", b))
            groups = [(name, places) for name, places in classes.groups if name in names]
            if groups and (number or known or len(facts) > MOST_FACTS):  # a fact that did not help, or too many
                facts = [one for one in facts if not names & names_in(one)]
                for name, places in groups:
                    places = tuple(place for place in places if place in self.nested) or places
                    self.asked.add(places)
                    self.frozen[places] = (f"the size {name} is the number {sizes[places[0]]}: the function asks "
                                           f"whether {a} is {b}")
            elif known:
                raise Unsupported(f"whether {a} is {b} is not known", where="anyshape.jax.jit",
                                  why="the function asks it, and JAX does not see it from what it was told",
                                  do="leave shapes= out")
            found = True
        if not found:
            return None
        return self._classes(facts) if classes.groups else replace(classes, facts=tuple(facts))

    def differing(self, classes: SizeClasses, questions: Iterable[Question], sizes: Sizes) -> SizeClasses:
        """With what JAX denied, and is not so: the program is for such sizes."""
        facts = [(a, "!=", b) for a, b in questions if classes.compared(a, "!=", b, sizes)]
        return replace(classes, facts=tuple(dict.fromkeys((*classes.facts, *facts))))

    def released(self, classes: SizeClasses, works: Callable[[SizeClasses], bool]) -> SizeClasses:
        """The same with those guesses symbolic again with which the export works as well. If the export worked right
        after the last one, that is none."""
        frozen = list(self.frozen)
        for places in self.guesses if self.guesses[-1] != frozen[-1] else self.guesses[:-1]:
            before = dict(self.frozen)  # in order: see started
            later = frozen[frozen.index(places):]  # what was asked later of dims of its size may be so because of it
            for one in [places, *(one for one in later if one in self.asked and self._alike(one, places))]:
                self.frozen.pop(one, None)
            free = self._classes(classes.facts)
            if works(free):
                classes = free
            else:
                self.frozen = before
        self.guesses = []
        return classes

    def _alike(self, some: Sequence[int], others: Sequence[int]) -> bool:
        """Whether some of these dims were of one size in all calls."""
        histories = [{tuple(call[place] for call in self.calls) for place in places} for places in (some, others)]
        return bool(histories[0] & histories[1])

    def news(self) -> list[str]:
        """Why sizes are numbers, where that has not been told yet."""
        found = [reason for reason in self.frozen.values() if reason not in self.told]
        self.told.update(found)
        return found
