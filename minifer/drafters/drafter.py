"""What every drafter is: it reads what the target computed for decided tokens, and says which tokens may come next.

    pass of the target ──► Output: hidden states, states of layers, logits ──► propose ──► ids and parents ──► next pass
                     └───► Settled: which tokens are decided, and where in the pass they stand

A drafter object holds weights and options. `start` gives a copy with a batch's own state (its cache, its q), so one drafter
serves any number of batches, at the same time too.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TypeVar

import torch

from ..batch import Batch, Row
from ..draft import Settled
from ..model.passes import Output
from ..model.sampling import distributions, draw, uniform

Self = TypeVar("Self", bound="Drafter")
GUESS = 2000  # the stream of random numbers that a first child is drawn with; its siblings have the next streams


class Drafter:
    """The interface. reads: the layers whose states it needs. usual: the draft length it takes if none is asked for.

    q: {row: [n, V]}, what each node of its last draft was drawn from. A row without an entry was not drawn but chosen. q stays
    where it was made; all else that drafts say is agreed. Who draws lays nodes level by level, so that cutting a draft off at
    some depth leaves their numbers as they are.
    """

    reads: tuple[int, ...] = ()
    usual = 4
    q: dict[int, torch.Tensor]
    draft_length: int

    def check(self, draft_length: int) -> None:
        """Raise a ValueError if it cannot draft so deep."""

    def nodes(self, draft_length: int) -> int:
        """Most nodes of a row's draft of this depth: of a chain, its length."""
        return draft_length

    def start(self: Self, batch: Batch, draft_length: int) -> Self:
        """One with a state of its own, for this batch."""
        self.check(draft_length)
        mine = copy.copy(self)
        mine.q, mine.draft_length = {}, draft_length
        mine.prepare(batch)
        return mine

    def prepare(self, batch: Batch) -> None:
        """Make the state for a batch."""

    def propose(self, batch: Batch, output: Output, settled: Settled, deepest: Sequence[int]) -> torch.Tensor:
        """int64 [R, 2, nodes]: ids, -1 behind a row's last, and their parents (-1: the last decided token; siblings differ).

        Called once a pass after the batch has taken its tokens, so each pass is seen once. deepest: of each row, how many tokens
        at most; 0 for rows that have ended or want none.
        """
        raise NotImplementedError


def chains(drafts: dict[int, list[int]], rows: int, length: int) -> torch.Tensor:
    """{row: its drafted tokens} as what `propose` returns, int64 [rows, 2, length]."""
    found = torch.full((rows, 2, length), -1)
    found[:, 1] = torch.arange(-1, length - 1)
    for row, tokens in drafts.items():
        found[row, 0, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
    return found


def pick(rows: Sequence[Row], logits: torch.Tensor, places: Sequence[int]) -> tuple[list[int], torch.Tensor | None]:
    """A drafted token for each of these rows from a drafter's logits [A, U], and what they were drawn from [A, U].

    places: in its row's text, of each token. Greedy rows get the likeliest; if all are greedy nothing is drawn, and there is no q.
    """
    if all(row.sampling.greedy for row in rows):
        return logits.argmax(-1).tolist(), None
    q = distributions(logits, [row.sampling for row in rows])
    return draw(q, [uniform(row.seed, place, GUESS) for row, place in zip(rows, places)]).tolist(), q
