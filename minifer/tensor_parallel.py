"""Tensor parallelism: every rank has a slice of every matrix, and all compute each token together.

A layer has two blocks, attention and feed-forward, and both are two matrix products with something elementwise between. The
first is cut by columns, the second by rows, so that nothing need be exchanged in the middle:

    x ──┬─ rank 0 ── W1 left half  ── a0 ── W2 upper half ── y0 ─┐
        │                                                        + ── all-reduce ──► y = y0 + y1 on both
        └─ rank 1 ── W1 right half ── a1 ── W2 lower half ── y1 ─┘

    attention      q k v │ o        columns are heads, dealt in whole key/value groups; each rank caches its own heads only
    feed-forward   gate up │ down   columns dealt one by one
    embedding      rows of the vocabulary: who does not hold a token adds zeros
    head           rows of the vocabulary: logits are gathered, or, if all are greedy, only each rank's best candidate

Sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198) splits each all-reduce into its two halves and does norms and
residuals between them, on a share of the tokens:

    tokens 0 1 │ norm, + │─ all-gather ─► all tokens ─ W1 ─ W2 ─ reduce-scatter ─►│ norm, + │
    tokens 2 3 │         │                                                        │         │

Invariant: a pass gives every rank the hidden states and logits of the plain model, up to the order of sums.
Cost: 2 all-reduces of N D elements a layer and 1 for the embedding (with sequence parallelism twice as many calls of that size; a
ring sends the same bytes, since an all-reduce is both of its halves), for the head W rows of V elements or one candidate, and what
was decided. A rank reads and keeps 1/n of the matrices and, as long as there are as many key/value heads, 1/n of the cache; norms,
and the tables of Gemma's per-layer inputs, are whole on all.
Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3.

Letters: N tokens of a pass, W wanted ones, D width, H query and K key/value heads, h width of a head, V vocabulary, n ranks,
c tokens of a rank's share (the last ones filled up).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from .model.config import Config
from .model.layers import FeedForward, Hidden, Layer, scaled
from .model.linear import Linear
from .model.passes import Pass
from .model.transformer import Embedding, Head, Transformer
from .model.weights import select
from .ranks.names import all_gather_single, reduce_scatter_single

Range = tuple[int, int]


def shard(model: Transformer, group: dist.ProcessGroup, sequence_parallel: bool = False) -> Transformer:
    """Keep this rank's part of an empty model; it is called as before, by all ranks of the group together.

    sequence_parallel: norms and residuals on a share of the tokens. Raises the same ValueError on all ranks if there are more
    ranks than query heads.
    """
    check(model.config, group.size())
    for layer in model.layers:
        keep_heads(layer, group)
        keep_columns(layer.feed_forward, group)
        if sequence_parallel:
            layer.attention = TokenBlock(layer.attention, group)  # type: ignore[assignment]
            layer.feed_forward = TokenBlock(layer.feed_forward, group)  # type: ignore[assignment]
    embedding, head = (TokenEmbedding, TokenHead) if sequence_parallel else (VocabularyEmbedding, VocabularyHead)
    for chunk in model.chunks:
        if isinstance(chunk.entrance, Embedding):
            chunk.entrance = embedding(chunk.entrance, group)
        if isinstance(chunk.exit, Head):
            chunk.exit = head(chunk.exit, group)
    model.agreements.insert(0, FromFirst(group))  # before those of groups that lie further out
    model.cuts.append(partial(keep_heads, group=group))
    return model


def check(config: Config, ranks: int) -> None:
    """Raise a ValueError if heads cannot be dealt to so many ranks. (That they come in whole groups, the config sees to.)"""
    if ranks > config.heads:
        raise ValueError(f"tensor parallelism over {ranks} ranks needs a query head for each: the model has {config.heads}")


def deal(count: int, ranks: int, rank: int) -> Range:
    """Which of `count` things a rank has: consecutive ones, as evenly as possible. Of 7 on 2 ranks: (0, 3) and (3, 7)."""
    return count * rank // ranks, count * (rank + 1) // ranks


def deal_heads(heads: int, kv_heads: int, ranks: int, rank: int) -> tuple[Range, Range]:
    """A rank's query heads and its key/value heads.

    With enough key/value heads each rank has some, and all of their query heads. With fewer, several ranks have the same one
    and share its query heads. 9 over 3, on 2 ranks: ((0, 3), (0, 1)) and ((3, 9), (1, 3)).
    """
    group = heads // kv_heads
    if kv_heads >= ranks:
        first, last = deal(kv_heads, ranks, rank)
        return (first * group, last * group), (first, last)
    mine = next(one for one in range(kv_heads) if rank < deal(ranks, kv_heads, one)[1])
    sharers = deal(ranks, kv_heads, mine)
    first, last = deal(group, sharers[1] - sharers[0], rank - sharers[0])
    return (mine * group + first, mine * group + last), (mine, mine + 1)


def keep_heads(layer: Layer, group: dist.ProcessGroup) -> None:
    """Of a layer's attention only this rank's heads. Layers that read another's keys and values are cut like those."""
    attention = layer.attention
    query, keys = deal_heads(attention.heads, attention.kv_heads, group.size(), group.rank())
    width = attention.head_dim
    columns = [(query[0] * width, query[1] * width)]
    keep_rows(attention.q, columns)
    for part in (attention.k, attention.v):
        if part is not None:
            keep_rows(part, [(keys[0] * width, keys[1] * width)])
    attention.o = Row(attention.o, columns, group)  # type: ignore[assignment]
    attention.heads, attention.kv_heads = query[1] - query[0], keys[1] - keys[0]


def keep_columns(block: FeedForward, group: dist.ProcessGroup) -> None:
    """Of a feed-forward block only this rank's columns."""
    mine = [deal(block.gate.weight.shape[0], group.size(), group.rank())]  # type: ignore[union-attr]
    keep_rows(block.gate, mine)
    keep_rows(block.up, mine)
    block.down = Row(block.down, mine, group)  # type: ignore[assignment]


def keep_rows(linear: Linear, ranges: list[Range]) -> None:
    """Some outputs of a Linear: what is called column-parallel, for those who write x W."""
    assert linear.weight is not None
    linear.weight = select(linear.weight, 0, ranges)
    if linear.bias is not None:
        linear.bias = select(linear.bias, 0, ranges)


class Row(nn.Module):
    """y = the sum over ranks of x_r W_r^T: each holds some inputs of the matrix, and all give the whole result."""

    def __init__(self, linear: Linear, ranges: list[Range], group: dist.ProcessGroup) -> None:
        super().__init__()
        assert linear.weight is not None
        linear.weight = select(linear.weight, 1, ranges)
        if group.rank():
            linear.bias = None  # it is added once
        self.linear, self.group = linear, group
        self.whole = True  # or only this rank's part of the sum

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.whole:
            dist.all_reduce(y, group=self.group)
        return y


def share(vocabulary: int, group: dist.ProcessGroup, rank: int | None = None) -> Range:
    """A rank's ids: equal shares, of which the last ones may be short or empty; so what is gathered need only be cut off."""
    size = -(-vocabulary // group.size())
    first = size * (group.rank() if rank is None else rank)
    return min(first, vocabulary), min(first + size, vocabulary)


class VocabularyEmbedding(Embedding):
    """Rows of the table."""

    def __init__(self, whole: Embedding, group: dist.ProcessGroup) -> None:
        nn.Module.__init__(self)
        self.first, last = share(len(whole.weight), group)
        self.weight = select(whole.weight, 0, [(self.first, last)])
        self.scale, self.group = whole.scale, group

    def look_up(self, ids: torch.Tensor) -> Hidden:
        x = self.look_up_mine(ids)
        dist.all_reduce(x, group=self.group)
        return x

    def look_up_mine(self, ids: torch.Tensor) -> Hidden:
        """[N] -> [N, D], zeros for tokens of other ranks."""
        if not len(self.weight):
            return self.weight.new_zeros(len(ids), self.weight.shape[1])
        local = ids.to(self.weight.device) - self.first
        mine = (local >= 0) & (local < len(self.weight))
        return F.embedding(local.where(mine, 0), self.weight) * mine[:, None]


class VocabularyHead(Head):
    """Rows of the head's matrix."""

    def __init__(self, whole: Head, group: dist.ProcessGroup) -> None:
        nn.Module.__init__(self)
        self.norm, self.group = whole.norm, group
        assert whole.linear.weight is not None
        self.vocabulary = len(whole.linear.weight)
        self.first, last = share(self.vocabulary, group)
        keep_rows(whole.linear, [(self.first, last)])
        self.linear = whole.linear

    def raw(self, hidden: torch.Tensor) -> torch.Tensor:
        mine = self.linear(hidden)  # [W, V / n]
        size = -(-self.vocabulary // self.group.size())
        return _gathered(F.pad(mine, (0, size - mine.shape[1])), self.group).transpose(0, 1).flatten(1)[:, : self.vocabulary]

    def best(self, hidden: torch.Tensor, bent: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Each rank's best candidate, as (logit, id): 16 bytes a token and rank instead of a rank's logits."""
        mine = bent(self.linear(hidden))
        candidates = torch.full((len(hidden), 2), float("-inf"), dtype=torch.float64, device=hidden.device)
        if mine.shape[1]:
            largest, place = mine.max(-1)
            candidates[:, 0], candidates[:, 1] = largest, place + self.first
        found = _gathered(candidates, self.group)  # [n, W, 2]
        winner = found[..., 0].argmax(0)  # the lowest rank of equals, which has the lowest ids
        return found[winner, torch.arange(len(hidden), device=hidden.device), 1].long()

    @property
    def rows(self) -> torch.Tensor:
        """All rows [V, D], gathered from all ranks: for drafters that keep some of them."""
        mine = self.linear.rows
        size = -(-self.vocabulary // self.group.size())
        return _gathered(F.pad(mine, (0, 0, 0, size - len(mine))), self.group).flatten(0, 1)[: self.vocabulary]


def _gathered(mine: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[...] of each rank -> [n, ...] on all."""
    out = mine.new_empty(group.size() * len(mine), *mine.shape[1:])
    all_gather_single(out, mine.contiguous(), group=group)
    return out.view(group.size(), *mine.shape)


class TokenBlock(nn.Module):
    """Attention or feed-forward between shares of the tokens: [c, D] -> [c, D]."""

    def __init__(self, block: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.block, self.group = block, group
        for part in block.modules():
            if isinstance(part, Row):
                part.whole = False  # the sum is made here, and scattered

    def forward(self, share: Hidden, *given: Any) -> Hidden:
        """given: for attention the pass, whose tokens must be exactly those that there are; feed-forward may run filling too."""
        x = _gathered(share, self.group).flatten(0, 1)
        return summed_share(self.block(x[: len(given[0].ids)] if given else x, *given), self.group)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)


class TokenEmbedding(VocabularyEmbedding):
    """Sums what the ranks have looked up, and leaves each its share of the tokens."""

    def forward(self, pass_: Pass) -> tuple[Hidden, list[torch.Tensor]]:
        hidden = scaled(summed_share(self.look_up_mine(pass_.ids), self.group), self.scale)
        first = self.group.rank() * len(hidden)
        ids = F.pad(pass_.ids, (0, len(hidden) * self.group.size() - len(pass_.ids)))[first : first + len(hidden)]
        pass_.shared["embedded"] = ids, hidden
        return hidden, []


class TokenHead(VocabularyHead):
    """Brings the shares together again: whoever reads states or hidden states finds those of all tokens."""

    def forward(self, hidden: Hidden, states: list[torch.Tensor], pass_: Pass) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        hidden, *states = (_gathered(one, self.group).flatten(0, 1)[: len(pass_.ids)] for one in (hidden, *states))
        return super().forward(hidden, states, pass_)


def summed_share(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[N, D] of each rank -> [c, D]: this rank's tokens of the sum. Any N: behind the last token zeros fill up."""
    size = -(-len(x) // group.size())
    if len(x) < size * group.size():
        x = F.pad(x, (0, 0, 0, size * group.size() - len(x)))
    out = x.new_empty(size, x.shape[1])
    reduce_scatter_single(out, x.contiguous(), group=group)
    return out


class FromFirst:
    """Everybody decided, from the same numbers; the first rank's answer counts. So not even a draw or a clock can differ."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, decision: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor | None:
        if decision is None:  # this stage of a pipeline has no head
            return None
        decision = decision.reshape(shape).contiguous()
        dist.broadcast(decision, group=self.group, group_src=0)
        return decision
