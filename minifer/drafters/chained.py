"""Drafting a token after the other on the target's back: what EAGLE, DeepSeek's module and Gemma's drafter have in common.

    features of the last decided tokens ─► step ─► logits ─► a token of each row ─► step ─► logits ─► ...

Each uses its target's embedding, and its head or a head of its own. A greedy row's tokens are chosen, a sampled row's are drawn
with the row's own Sampling, and what they were drawn from is q.

Letters: A active rows, D width, V vocabulary, U drafted ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..batch import Batch
from ..model.linear import Linear, linear_of
from ..model.transformer import Transformer
from .drafter import Drafter, chains, pick


class Shared:
    """What a module uses of its target and does not hold: embedding, last norm, and the head or some of its rows.

    ids: int64 [U], the tokens that it drafts, in rising order; None: all. Fewer make a draft's logits cheaper, and no draft
    can be right where the target says another token. trains: gradients are to go through the head, so it is not packed.
    """

    def __init__(self, target: Transformer, ids: torch.Tensor | None = None, trains: bool = False) -> None:
        if ids is not None and not (len(ids) and int(ids.min()) >= 0 and int(ids.max()) < target.config.vocabulary):
            raise ValueError(f"{len(ids)} ids to draft must be ids of the target's vocabulary of {target.config.vocabulary}")
        self.target, self.ids = target, ids
        rows = target.head.rows if target.decides and (trains or ids is not None) else None
        self.head: Linear | None = None if rows is None else linear_of(rows if ids is None else rows[ids], pack=not trains)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[A, D], normed -> [A, U] in float32"""
        return self.target.logits(hidden) if self.head is None else self.target.bent(self.head(hidden))

    def tokens(self, places: list[int]) -> list[int]:
        """Places among the logits as ids."""
        return places if self.ids is None else self.ids[places].tolist()

    def spread(self, q: torch.Tensor) -> torch.Tensor:
        """[U] -> [V]: nothing is drafted outside of its ids."""
        if self.ids is None:
            return q
        return torch.zeros(self.target.config.vocabulary, dtype=q.dtype, device=q.device).index_copy_(0, self.ids.to(q.device), q)


class Chained(Drafter):
    """shared: what it uses of its target."""

    shared: Shared

    def step(
        self, batch: Batch, rows: list[int], tokens: list[int], features: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [A, U] after the last token of each of these rows, and the features [A, D] that it has made of it.

        length: tokens drafted so far. features: those of the last decided tokens, or what the last step has made.
        """
        raise NotImplementedError

    def chain(self, batch: Batch, features: torch.Tensor, deepest: Sequence[int]) -> torch.Tensor:
        """Chains. features [A, D]: of each active row's last decided token."""
        drafts: dict[int, list[int]] = {at: [] for at in batch.active}
        drawn: dict[int, list[torch.Tensor]] = {at: [] for at in batch.active if not batch.row(at).sampling.greedy}
        rows = list(batch.active)
        for length in range(max(deepest)):
            going = [at for at in rows if length < deepest[at]]
            if going != rows:
                features, rows = features[[rows.index(at) for at in going]], going
            last = [drafts[at][-1] if length else batch.row(at).tokens[-1] for at in rows]
            logits, features = self.step(batch, rows, last, features, length)
            asked = [batch.row(at) for at in rows]
            chosen, q = pick(asked, logits, [len(row.tokens) + length for row in asked])
            for place, (at, token) in enumerate(zip(rows, self.shared.tokens(chosen))):
                drafts[at].append(token)
                if q is not None and at in drawn:
                    drawn[at].append(self.shared.spread(q[place]))
        self.q = {at: torch.stack(q) for at, q in drawn.items() if q}
        return chains(drafts, batch.rows, self.nodes(self.draft_length))
