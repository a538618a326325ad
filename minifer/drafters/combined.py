"""Two drafters one after the other: where the first has nothing to say, the second is asked.

Prompt lookup costs nothing and is right wherever a text repeats itself; elsewhere it finds nothing, or little. A head drafts
everywhere. The second drafter sees every pass, whoever drafts, so what it keeps of the target is never behind.

Cost and needs of a sharded target: those of both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..batch import Batch
from ..draft import Settled
from ..model.passes import Output
from .drafter import Drafter


class Combined(Drafter):
    """first: asked first. then: drafts for the rows that the first has no token for."""

    def __init__(self, first: Drafter, then: Drafter) -> None:
        self.first, self.then, self.usual = first, then, then.usual
        self.reads = tuple(sorted({*first.reads, *then.reads}))

    def check(self, draft_length: int) -> None:
        self.first.check(draft_length)
        self.then.check(draft_length)

    def nodes(self, draft_length: int) -> int:
        return max(self.first.nodes(draft_length), self.then.nodes(draft_length))

    def prepare(self, batch: Batch) -> None:
        self.first, self.then = (one.start(batch, self.draft_length) for one in (self.first, self.then))

    def propose(self, batch: Batch, output: Output, settled: Settled, deepest: Sequence[int]) -> torch.Tensor:
        found = torch.full((batch.rows, 2, self.nodes(self.draft_length)), -1)
        mine = self.first.propose(batch, output, settled, deepest)
        found[:, :, : mine.shape[2]] = mine
        has = [bool(ids[0] >= 0) for ids in mine[:, 0]]
        theirs = self.then.propose(batch, output, settled, [0 if some else depth for some, depth in zip(has, deepest)])
        for at in range(batch.rows):
            if not has[at]:
                found[at, :, : theirs.shape[2]] = theirs[at]
        self.q = {at: one.q[at] for one, said in ((self.first, True), (self.then, False)) for at in one.q if has[at] == said}
        return found
