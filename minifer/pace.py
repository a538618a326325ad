"""How many tokens to draft: a fixed number, or in each round the number that promises most tokens a second.

Drafting one token more pays while the chance that all before it are kept, and it too, is worth its price: the time to draft
it and to have it verified. An Adaptive estimates both as it goes. Chances come from counts of the row's own rounds. Prices
are given, or come from the times that travel with each decision, so all ranks choose the same length.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from .batch import Batch
from .draft import Round, expected_tokens

if TYPE_CHECKING:
    from .drafters.drafter import Drafter

MEMORY = 0.9  # how much of an estimate stays when a round is added to it
PROBE = 8  # where drafting does not pay, it is tried again so often


class Pace(Protocol):
    """Tells how deep to draft."""

    longest: int

    def lengths(self, batch: Batch, took: dict[int, Round]) -> list[int]:
        """Of each row of the batch, given the rounds that have just ended ({row: round}; none for a prompt's pass)."""
        ...


class Fixed:
    """The same length in each round."""

    def __init__(self, length: int) -> None:
        if isinstance(length, bool) or not isinstance(length, int) or length < 0:
            raise ValueError(f"draft_length must be a whole number >= 0 or an Adaptive, it is {length!r}")
        self.longest = length

    def lengths(self, batch: Batch, took: dict[int, Round]) -> list[int]:
        return batch.at_most(self.longest)


@dataclass
class Adaptive:
    """At most `longest` tokens deep. cost: of drafting one more, and of verifying it, in plain steps; None: measured on the way.

    Measured costs follow the clock, and the numbers that draw a token depend on whether it was drafted: so a sampled text keeps
    its distribution, but the same seed gives the same text only with a fixed length or a given cost and in the same batch.
    """

    longest: int = 8
    cost: float | None = None
    _kept: dict[int, tuple[float, float]] = field(default_factory=dict, repr=False)  # {row: (accepted, judged)}, fading
    _times: list[float] = field(default_factory=lambda: [0.0] * 5, repr=False)  # fading sums of 1, x, y, x x, x y
    _drafting: float = 0.0
    _rounds: int = 0

    def __post_init__(self) -> None:
        if self.longest < 1:
            raise ValueError(f"an Adaptive drafts at least one token at most, not {self.longest}")
        if self.cost is not None and self.cost < 0:
            raise ValueError(f"a cost is >= 0, it is {self.cost}")

    def start(self) -> Adaptive:
        """One that has learnt nothing yet: a batch its own."""
        return Adaptive(self.longest, self.cost)

    def lengths(self, batch: Batch, took: dict[int, Round]) -> list[int]:
        self._rounds += 1
        for row, one in took.items():
            # Each depth that was reached is a trial; the one that failed ended them.
            accepted, judged = self._kept.get(row, (1.0, 2.0))
            trials = one.accepted + (one.accepted < one.depth)
            self._kept[row] = (MEMORY * accepted + one.accepted, MEMORY * judged + trials)
        if took:
            self._learn(list(took.values()))
        price = self._price()
        chosen = [self._best(*self._kept.get(row, (1.0, 2.0)), price) for row in range(batch.rows)]
        return batch.at_most(self.longest, chosen)

    def _best(self, accepted: float, judged: float, price: float) -> int:
        rate = min(0.99, accepted / judged)
        best = max(range(self.longest + 1), key=lambda length: expected_tokens(rate, length) / (1 + price * length))
        return max(best, self._rounds % PROBE == 0)

    def _learn(self, rounds: list[Round]) -> None:
        """Fit the seconds of a pass as a line over the depth drafted before it, and the mean seconds to draft one deeper."""
        x, y = sum(one.depth for one in rounds) / len(rounds), rounds[0].verify_seconds
        self._times = [MEMORY * old + new for old, new in zip(self._times, (1.0, x, y, x * x, x * y))]
        if x > 0:
            each = rounds[0].draft_seconds / x
            self._drafting = MEMORY * self._drafting + (1 - MEMORY) * each if self._drafting else each

    def _price(self) -> float:
        if self.cost is not None:
            return self.cost
        n, x, y, xx, xy = self._times
        if y == 0:
            return 0.1  # nothing measured yet
        spread = n * xx - x * x
        slope = max(0.0, (n * xy - x * y) / spread) if spread > 1e-6 * n * n else 0.0
        step = max(1e-9, (y - slope * x) / n)
        return (slope + self._drafting) / step


def pace_of(draft_length: int | Adaptive | None, drafter: Drafter) -> Pace:
    """A pace for one batch. None: the drafter's usual length."""
    if isinstance(draft_length, Adaptive):
        return draft_length.start()
    return Fixed(drafter.usual if draft_length is None else draft_length)
