"""Drafting with a layer that is fed its own output: what EAGLE and DeepSeek's module have in common.

An entry joins a token with the feature of the token before it: what the target's layers made of that one, or, where the target
has not been yet, what the module made of it itself. Each entry sees those before it, in a cache of the module's own:

    token       x1     x2     x3   │  d4      d5          x: decided, d: drafted
    feature     f0     f1     f2   │  g3      g4          f: the target's, g: the module's own
    entry       1      2      3    │  4       5
                              └► d4   └► d5   └► d6

After a pass of the target the entries of what was decided are run again, now with the target's features, in place of what drafts
have left there. So what is drafted never depends on how earlier drafts fared.

Cost: a pass of the module over the tokens just decided, then one for each further depth, each with its logits.

Letters: A active rows, N tokens of a module's pass, F width of what is read, D width, U drafted ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..batch import Batch
from ..draft import Settled
from ..model.cache import Cache
from ..model.layers import Attention
from ..model.passes import Output, Pass, Span
from .chained import Chained, Shared


class Module(nn.Module):
    """One layer that turns features into the next ones."""

    attention: Attention

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared = shared

    def read(self, states: torch.Tensor) -> torch.Tensor:
        """What the target's layers said, side by side [N, F], as features [N, D]."""
        raise NotImplementedError

    def enter(self, ids: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [N] and the features [N, D] of those before them -> what goes past the attention, and what it reads."""
        raise NotImplementedError

    def leave(self, past: torch.Tensor, attended: torch.Tensor, pass_: Pass) -> torch.Tensor:
        """-> the next features [N, D]"""
        raise NotImplementedError

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """[A, D] -> [A, U] in float32"""
        raise NotImplementedError

    def forward(self, pass_: Pass, features: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Run entries over its cache: [N, D] -> [N, D]"""
        cache.begin(pass_)
        past, x = self.enter(pass_.ids, features)
        features = self.leave(past, self.attention(x, pass_, cache, 0), pass_)
        cache.commit(pass_)
        return features


class Recurrent(Chained):
    """module: filled, of this target. reads: the layers whose states make its features."""

    def __init__(self, module: Module, reads: Sequence[int]) -> None:
        self.module, self.reads, self.shared = module, tuple(reads), module.shared

    def spare(self) -> int:
        """Places in its cache that a draft may take."""
        return self.draft_length

    def prepare(self, batch: Batch) -> None:
        target = self.shared.target
        room = max([1, *(row.prompt + row.budget + self.spare() for row in batch.going)])
        self._cache = Cache([self.module.attention.cache_shape], max(1, batch.rows), room, target.dtype, target.device)
        self._entered: dict[int, int] = {}  # {row: entries of decided tokens}

    def propose(self, batch: Batch, output: Output, settled: Settled, deepest: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.draft(batch, self._enter(batch.active, output, settled), deepest)

    def _enter(self, rows: Sequence[int], output: Output, settled: Settled) -> torch.Tensor:
        """Run the entries of what was decided; the last feature of each row, [A, D]."""
        pass_ = output.pass_
        ids: list[int] = []
        places: list[int] = []
        spans: list[Span] = []
        for span, offset in zip(pass_.spans, pass_.offsets):
            if span.row not in rows:
                continue
            kept = [pass_.wanted[place] for place in settled.kept[span.row]]
            # Before the root stands the rest of a prompt: each token's feature goes with the token after it.
            tokens = [*pass_.ids[offset + 1 : kept[0] + 1].tolist(), *settled.tokens[span.row]]
            start = self._entered.get(span.row, 0)
            self._entered[span.row] = start + len(tokens)
            ids += tokens
            places += [*range(offset, kept[0]), *kept]
            spans.append(Span(span.row, start, len(tokens)))
        ends = torch.tensor([span.count for span in spans]).cumsum(0).sub(1).tolist()
        assert output.states is not None
        features = self.module.read(torch.cat([output.states[layer][places] for layer in self.reads], -1))
        return self.module(Pass(torch.tensor(ids), tuple(spans), tuple(ends)), features, self._cache)[ends]

    def draft(self, batch: Batch, features: torch.Tensor, deepest: Sequence[int]) -> torch.Tensor:
        """What is proposed. features [A, D]: of each active row's last decided token."""
        return self.chain(batch, features, deepest)

    def step(
        self, batch: Batch, rows: list[int], tokens: list[int], features: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if length:  # the last decided token has been entered already
            spans = tuple(Span(at, self._entered[at] + length - 1, 1) for at in rows)
            features = self.module(Pass(torch.tensor(tokens), spans, tuple(range(len(rows)))), features, self._cache)
        return self.module.logits(features), features
