"""Drafting with a smaller model: it decodes ahead, a token a pass, and the target verifies.

    draft model   root ─► a ─► b ─► c        k small passes, on a cache of its own
    target        root    a    b    c        one pass

Any model with the target's vocabulary serves. Its cache needs no bookkeeping of what was accepted: each pass starts where the
row's text and the cache's tokens part, so rejected drafts are cut and a draft that was kept whole is caught up with.

A greedy row's drafts are chosen (the likeliest token); a sampled row's are drawn with the row's own Sampling, and the
distributions they were drawn from are q.

Cost: k passes of the draft model. Needs of a sharded target: nothing but the agreed tokens; it runs where the output is.
Source: Leviathan et al. 2023 (arXiv 2211.17192); Chen et al. 2023 (2302.01318).

Letters: R rows of the batch, A rows of a drafting pass, V vocabulary of the target, U of the ids that both models know.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from ..batch import Batch, Row
from ..draft import Settled
from ..model.cache import Cache
from ..model.passes import Output, Pass, Span
from ..model.transformer import Transformer
from .drafter import Drafter, chains, pick


class DraftModel(Drafter):
    """model: the smaller one. target: the model it drafts for. common: how many ids mean the same to both.

    Without `common` both vocabularies must be of one size. Larger tables of one tokenizer are padded: then give the
    tokenizer's own size.
    """

    def __init__(self, model: Transformer, target: Transformer, common: int | None = None) -> None:
        mine, theirs = model.config.vocabulary, target.config.vocabulary
        if common is None and mine != theirs:
            raise ValueError(
                f"a draft model needs its target's vocabulary: it has {mine} ids, the target {theirs}. If one tokenizer serves "
                "both and only padding differs, say how many ids it has: common="
            )
        self.model, self.common, self.vocabulary = model, min(common or theirs, mine, theirs), theirs

    def prepare(self, batch: Batch) -> None:
        room = max([1, *(row.prompt + row.budget for row in batch.going)])
        self._cache: Cache = self.model.new_cache(max(1, batch.rows), min(room, self.model.config.context))

    def propose(self, batch: Batch, output: Output, settled: Settled, deepest: Sequence[int]) -> torch.Tensor:
        drafts: dict[int, list[int]] = {at: [] for at in batch.active}
        drawn: dict[int, list[torch.Tensor]] = {at: [] for at in batch.active if not batch.row(at).sampling.greedy}
        last = {at: min(deepest[at], self._room(batch.row(at).tokens)) for at in batch.active}
        with torch.inference_mode():
            for length in range(max(last.values(), default=0)):
                rows = [at for at in batch.active if length < last[at]]
                self._step(rows, [batch.row(at) for at in rows], drafts, drawn)
        self.q = {at: torch.stack(q) for at, q in drawn.items() if q}
        return chains(drafts, batch.rows, self.draft_length)

    def _room(self, text: list[int]) -> int:
        """How many tokens it can draft behind this text."""
        if max(text) >= self.model.config.vocabulary:  # a larger target has said what this model cannot read
            return 0
        return self._cache.capacity - len(text) + 1  # a draft's last token is not run

    def _step(
        self, numbers: list[int], rows: list[Row], drafts: dict[int, list[int]], drawn: dict[int, list[torch.Tensor]]
    ) -> None:
        """One small pass: a token more for each of these rows."""
        logits = self._run(numbers, [[*row.tokens, *drafts[at]] for at, row in zip(numbers, rows)])  # [A, U]
        chosen, q = pick(rows, logits, [len(row.tokens) + len(drafts[at]) for at, row in zip(numbers, rows)])
        if q is not None:
            for at, distribution in zip(numbers, F.pad(q, (0, self.vocabulary - self.common))):
                if at in drawn:
                    drawn[at].append(distribution)
        for at, token in zip(numbers, chosen):
            drafts[at].append(token)

    def _run(self, numbers: list[int], texts: list[list[int]]) -> torch.Tensor:
        """Logits [A, U] after these texts, of which only what the cache lacks is run."""
        ids: list[int] = []
        spans: list[Span] = []
        for at, text in zip(numbers, texts):
            start = min(self._cache.holds(at, text), len(text) - 1)
            ids += text[start:]
            spans.append(Span(at, start, len(text) - start))
        ends = [0]
        for span in spans:
            ends.append(ends[-1] + span.count)
        output = self.model(Pass(torch.tensor(ids), tuple(spans), tuple(end - 1 for end in ends[1:])), self._cache)
        return output.logits[:, : self.common]
