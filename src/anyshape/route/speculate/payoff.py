"""Whether speculation pays: its hit rate and times, measured in running means, and a bound on what it may waste.

    on iff  p * t_hidden - (1 - p) * t_waste > margin        t_hidden = general - hit, t_waste = miss - general

all as shares of a general call: calls differ in length with the ways that they take, so times are compared within a
call only. Off again where the left side falls below zero (hysteresis). Besides, what misses have cost beyond what
hits have saved stays within a share of the time of all calls: a run is never slower than without speculation by more
than that share and the first three calls, whatever the decisions are.
"""
from __future__ import annotations

from dataclasses import dataclass

WEIGHT = 0.125  # of a new measurement in a running mean
MARGIN = 0.02  # of a general call: what speculation has to gain
SHARE = 0.02  # of the time of all calls: what may be wasted
MOST = 20.0  # general calls: what hits of long ago may make up for
FIRST = 3.0  # general calls: what may be wasted before anything is saved
PAIRS = 3  # comparisons of times before they count


@dataclass
class Payoff:
    """Running means.

    rate: of calls whose decisions were as predicted. hit: seconds of a predicted call by those of the general path on
    the same inputs; None while it is not measured. waste: the same of what a wrong prediction costs. general: seconds
    of a general call. pairs: how often both were compared. balance: seconds that hits have saved less those that misses
    have cost, and the share of all time that may be wasted. off_calls, looks: calls while off that were of this kind,
    and those of them that were watched.
    """

    rate: float = 1.0
    hit: float | None = None
    waste: float | None = None
    general: float = 0.0
    balance: float = 0.0
    pairs: int = 0
    on: bool = True
    switched_on: int = 0
    switched_off: int = 0
    off_calls: int = 0
    looks: int = 0

    @property
    def gain(self) -> float | None:
        """What a call is expected to gain by speculation, as a share of a general call; None while it is not known."""
        if self.hit is None and self.waste is None:
            return None
        hit = self.waste if self.hit is None else self.hit  # a call in vain takes about as long as a hit
        waste = self.hit if self.waste is None else self.waste
        assert hit is not None and waste is not None
        return self.rate * (1.0 - hit) - (1.0 - self.rate) * waste

    @property
    def may_pay(self) -> bool:
        """Whether there is a hit rate at which speculation pays, by what is known."""
        return self.hit is None or self.hit < 1.0

    def saw(self, hit: bool) -> None:
        """A call's decisions were as predicted, or not, speculated or not."""
        self.rate += WEIGHT * (hit - self.rate)

    def paired(self, predicted: float, general: float) -> None:
        """Both ways took so many seconds, on the same inputs, with the same results."""
        self.compared(predicted, general)
        self._spent(predicted + general, -predicted)

    def compared(self, predicted: float, general: float) -> None:
        """A predicted call takes so long where one on the general path takes `general` seconds."""
        share = predicted / max(general, 1e-9)
        if self.pairs < PAIRS and self.hit is not None:
            self.hit = min(self.hit, share)  # first calls are slow
        else:
            self.hit = _mean(self.hit, share)
        self.pairs += 1

    def took_general(self, seconds: float, calls: int = 1) -> None:
        """A call on the general path alone, which stands for so many."""
        self._spent(seconds, 0.0, calls)

    def took_hit(self, seconds: float) -> None:
        """A call whose predicted path gave its results."""
        if self.hit is not None:
            self._spent(seconds, seconds / max(self.hit, 1e-3) - seconds)

    def took_miss(self, predicted: float, general: float) -> None:
        """A call that ran so long in vain, and then on the general path."""
        self.waste = _mean(self.waste, predicted / max(general, 1e-9))
        self._spent(predicted + general, -predicted)

    def _spent(self, seconds: float, saved: float, calls: int = 1) -> None:
        general = seconds + saved
        if not self.general:
            self.balance = FIRST * general
        self.general = general if not self.general else self.general + WEIGHT * (general - self.general)
        self.balance = min(self.balance + SHARE * seconds * calls + saved, MOST * self.general)
        gain = self.gain
        if gain is None:
            return
        if self.on and (self.balance < 0 or (gain < 0 and (self.pairs >= PAIRS or self.waste is not None))):
            self.on = False
            self.switched_off += 1
        elif not self.on and gain > MARGIN and self.balance > 0:
            self.on = True
            self.switched_on += 1


def _mean(before: float | None, now: float) -> float:
    return now if before is None else before + WEIGHT * (now - before)
