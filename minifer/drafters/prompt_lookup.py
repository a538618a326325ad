"""Drafting without a model: what followed the last words the last time they stood in the text?

    ... f o r   i   i n   r a n g e ( n ) :  ...  f o r   i   in
        └─────────────────┘                       └─────────┘ the same: so drafted is  range ( n ) :

Good where a text repeats itself or its prompt: code, tables, summaries, corrections. Costs nothing but a dictionary: each
n-gram of the row, from the longest size to the shortest, and where it last ended. A copy that reaches the end of the text
goes on with what it has drafted itself, so a loop is drafted as a loop.

Needs of a sharded target: nothing but the agreed tokens.
Source: Saxena 2023, "Prompt Lookup Decoding"; LLMA (Yang et al. 2023, arXiv 2304.04487).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..batch import Batch
from ..draft import Settled
from ..model.passes import Output
from .drafter import Drafter, chains


class PromptLookup(Drafter):
    """longest, shortest: sizes of the n-grams that are looked up, the longest first."""

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-grams of {shortest} to {longest} tokens: the shortest has 1 at least, the longest no fewer")
        self.longest, self.shortest = longest, shortest
        self._ends: dict[int, dict[tuple[int, ...], int]] = {}  # {row: {n-gram: where its successor stands}}
        self._seen: dict[int, int] = {}  # {row: tokens whose n-grams are entered}

    def prepare(self, batch: Batch) -> None:
        self._ends, self._seen = {}, {}

    def propose(self, batch: Batch, output: Output, settled: Settled, deepest: Sequence[int]) -> torch.Tensor:
        drafts = {at: self._look_up(at, batch.row(at).tokens, deepest[at]) for at in batch.active}
        return chains(drafts, batch.rows, self.draft_length)

    def _look_up(self, at: int, tokens: list[int], length: int) -> list[int]:
        ends = self._ends.setdefault(at, {})
        for end in range(self._seen.get(at, 0) + 1, len(tokens)):  # those whose successor is known
            for gram in self._grams(tokens, end):
                ends[gram] = end
        self._seen[at] = len(tokens) - 1
        found = next((ends[gram] for gram in self._grams(tokens, len(tokens)) if gram in ends), None)
        if found is None:
            return []
        drafted: list[int] = []
        for place in range(found, found + length):
            drafted.append(tokens[place] if place < len(tokens) else drafted[place - len(tokens)])
        return drafted

    def _grams(self, tokens: list[int], end: int) -> list[tuple[int, ...]]:
        """The n-grams that end there, the longest first."""
        return [tuple(tokens[end - size : end]) for size in range(min(self.longest, end), self.shortest - 1, -1)]
