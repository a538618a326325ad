"""Attention over a cache: which keys a token may see, and the sum over them.

Two halves. *Visibility* is decided here from a pass's host integers, once a pass, never by reading a device:

    one token of a row             sees everything cached: no mask at all (a window only moves the first key)
    a prompt from position 0       sees what precedes it: SDPA's own causal flag
    anything else                  an explicit mask: a second chunk, drafts to verify, a window, a tree, rows of unequal size

The *sum* returns its log-sum-exp beside the result, so that parts computed over different keys, on different ranks, can be
merged exactly: a part that sees nothing has log-sum-exp -inf and weighs nothing.

Letters: B batch of one call, Q queries, S keys, H query heads, K key/value heads, h width of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch.nn import functional as F

from .cache import Cache
from .passes import Pass, Span, depths


@dataclass(frozen=True)
class Visible:
    """Which keys each query may see: all, those up to its own place (Q = S), or those of a mask (bool [B, Q, S])."""

    causal: bool = False
    mask: torch.Tensor | None = None

    def grouped(self, group: int, device: torch.device) -> torch.Tensor | None:
        """The mask as [B, 1, group * Q, S], each of a group's query heads its own rows. Made once, however many layers ask."""
        if self.mask is None:
            return None
        key = (group, device)
        if key not in self._made:
            self._made[key] = self.mask.repeat(1, group, 1)[:, None].to(device, non_blocking=True)
        return self._made[key]

    def bias(self, group: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """The same as numbers to add to scores: 0 where a key is seen, -inf where it is not."""
        mask, key = self.grouped(group, device), (group, device, dtype)
        if mask is None:
            return None
        if key not in self._made:
            self._made[key] = torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill_(~mask, -math.inf)
        return self._made[key]

    @cached_property
    def _made(self) -> dict[Any, torch.Tensor]:
        return {}

    @cached_property
    def leaves_some_blind(self) -> bool:
        """Whether there are queries that see nothing. Found out once, however many layers ask."""
        return self.mask is not None and not bool(self.mask.any(-1).all())


ALL = Visible()
CAUSAL = Visible(causal=True)


@dataclass(frozen=True)
class View:
    """What a span sees: its row's keys from `first` on, as `visible` says."""

    first: int
    visible: Visible


def views(pass_: Pass, window: int | None) -> list[View]:
    """One View a span. `window`: a token sees itself and the window - 1 tokens before it; None: all before it."""
    if pass_.parents is None:
        return [_view(span, window) for span in pass_.spans]
    return [_tree_view(span, parents, window) for span, parents in zip(pass_.spans, pass_.parents)]


def _view(span: Span, window: int | None) -> View:
    end = span.start + span.count
    # The oldest key that the span's first token can see; older ones are not even read.
    first = 0 if window is None else max(0, span.start - window + 1)
    if span.count == 1:
        return View(first, ALL)
    if span.start == 0 and (window is None or end <= window):
        return View(0, CAUSAL)
    keys = torch.arange(first, end)
    queries = torch.arange(span.start, end)[:, None]
    mask = keys <= queries
    if window is not None:
        mask &= keys > queries - window
    return View(first, Visible(mask=mask[None]))


def _tree_view(span: Span, parents: tuple[int, ...], window: int | None) -> View:
    """In a tree a token sees the context, its ancestors and itself. Its slot in the cache is not its position."""
    mask = F.pad(_ancestors(parents), (span.start, 0), value=True)
    if window is not None:  # ancestors can be out of a short window too
        positions = torch.tensor(depths(parents)) + span.start
        mask &= torch.cat([torch.arange(span.start), positions]) > positions[:, None] - window
    return View(0, Visible(mask=mask[None]))


@lru_cache(maxsize=64)  # one shape of tree is verified again and again
def _ancestors(parents: tuple[int, ...]) -> torch.Tensor:
    """bool [Q, Q]: whether a token is another's ancestor, or itself. Not to be written to."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    for token, parent in enumerate(parents):
        if parent >= 0:
            seen[token] |= seen[parent]
    return seen


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: Visible, scale: float | None = None, cap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention and its log-sum-exp.

    q: [B, H, Q, h]. k: [B, K, S, h], v: [B, K, S, hv], H a multiple of K; query head i reads key/value head i // (H/K).
    scale: of the scores, h^-1/2 by default. cap: scores are bent to cap * tanh(score / cap). Returns out [B, H, Q, hv] in q's
    dtype and lse [B, H, Q] in float32 at least; a query that sees nothing gives 0 and -inf.
    """
    batch, heads, queries, _ = q.shape
    group = heads // k.shape[1]
    if group > 1 and not visible.causal:
        # The query heads of a group read the same keys: seen as more queries of one head, the keys are read once.
        q = q.reshape(batch, k.shape[1], group * queries, q.shape[-1])
    elif group > 1:
        k, v, group = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), 1
    if q.device.type == "cpu" and q.shape[-1] == v.shape[-1] and cap is None:
        # The kernel under `scaled_dot_product_attention` on the CPU, called by name because only so it hands out its lse.
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        bias = visible.bias(group, q.dtype, q.device)
        out, lse = kernel(q, k, v, 0.0, visible.causal, attn_mask=bias, scale=scale)
    else:
        out, lse = _plain(q, k, v, visible.causal, visible.grouped(group, q.device), scale, cap)
    if visible.leaves_some_blind:
        mask = visible.grouped(group, q.device)
        assert mask is not None
        blind = ~mask.any(-1)  # [B, 1, Q]
        out, lse = out.masked_fill(blind[..., None], 0.0), lse.masked_fill(blind, -math.inf)
    return out.reshape(batch, heads, queries, -1), lse.reshape(batch, heads, queries)


def _plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    mask: torch.Tensor | None,
    scale: float | None,
    cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, in float32 at least: scores, their log-sum-exp, the weighted sum. Any device, any head widths."""
    exact = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.transpose(-1, -2)).to(exact) * (scale or q.shape[-1] ** -0.5)  # [B, H, Q, S]
    if cap is not None:
        scores = (scores / cap).tanh() * cap
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    lse = scores.logsumexp(-1)  # [B, H, Q]
    weights = (scores - lse[..., None]).exp()
    return (weights.to(v.dtype) @ v), lse


@dataclass(frozen=True)
class Call:
    """One call of `attention` within a pass: `rows` rows of `count` tokens each.

    They stand in the pass from `at` on, or, where rows are of unequal size, at `tokens` [rows * count], the shorter ones
    filled up with their last token; `real` [N] are the places of the call's result that are no filling.
    """

    at: int
    rows: tuple[int, ...]
    count: int
    first: int  # keys from here ...
    end: int  # ... to here (of the longest row)
    visible: Visible
    tokens: torch.Tensor | None = None
    real: torch.Tensor | None = None

    def by_row(self, x: torch.Tensor) -> torch.Tensor:
        """[N, H, h] -> [B, H, Q, h]"""
        here = x[self.at : self.at + len(self.rows) * self.count] if self.tokens is None else x[self.tokens.to(x.device)]
        return here.unflatten(0, (len(self.rows), self.count)).transpose(1, 2)

    def flat(self, out: torch.Tensor) -> torch.Tensor:
        """[B, H, Q, h] -> [tokens of the call, H, h]"""
        flat = out.transpose(1, 2).flatten(0, 1)
        return flat if self.real is None else flat[self.real.to(out.device)]


SHORT = 64  # tokens: rows up to here are filled up to one call; longer ones are prompts, where a call each does not matter


def calls(pass_: Pass, window: int | None, alone: bool = False) -> list[Call]:
    """The fewest calls that serve a pass: one where all rows are alike or short, else one a span. alone: without a cache."""
    spans = pass_.spans
    alike = pass_.parents is None and all(span[1:] == spans[0][1:] for span in spans)
    if len(spans) > 1 and alike:
        view = _view(spans[0], window)
        rows, (_, start, count) = tuple(span.row for span in spans), spans[0]
        return [Call(0, rows, count, view.first, start + count, view.visible)]
    if len(spans) > 1 and not alone and max(span.count for span in spans) <= SHORT:
        return [_padded(pass_, window)]
    return [
        Call(at, (span.row,), span.count, view.first, span.start + span.count, view.visible)
        for at, span, view in zip(pass_.offsets, spans, views(pass_, window))
    ]


def _padded(pass_: Pass, window: int | None) -> Call:
    """All rows in one call: those with fewer keys get masked ones, those with fewer tokens their last one again."""
    rows, starts, counts = (torch.tensor(column) for column in zip(*pass_.spans))
    count, end = int(counts.max()), int((starts + counts).max())
    token = torch.minimum(torch.arange(count), counts[:, None] - 1)  # [B, Q], as a place in its span
    if pass_.parents is None:
        first = 0 if window is None else max(0, int(starts.min()) - window + 1)
        keys, positions = torch.arange(first, end), (starts[:, None] + token)[..., None]  # [S], [B, Q, 1]
        mask = keys <= positions
        if window is not None:
            mask &= keys > positions - window
    else:
        first, mask = 0, torch.zeros(len(pass_.spans), count, end, dtype=torch.bool)
        for at, (span, view) in enumerate(zip(pass_.spans, views(pass_, window))):
            seen = view.visible.mask
            assert seen is not None and view.first == 0, "a tree's mask is over all of its row's keys"
            mask[at, :, : span.start + span.count] = seen[0, token[at]]
    whole = Call(0, tuple(rows.tolist()), count, first, end, Visible(mask=mask))
    if int(counts.min()) == count:
        return whole
    tokens = (torch.tensor(pass_.offsets)[:, None] + token).flatten()
    return replace(whole, tokens=tokens, real=(torch.arange(count) < counts[:, None]).flatten().nonzero()[:, 0])


def attend(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    pass_: Pass,
    cache: Cache | None,
    layer: int,
    window: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
) -> torch.Tensor:
    """Store the pass's keys and values in the cache's `layer` and let each token see what it may.

    q: [N, H, h], k: [N, K, h], v: [N, K, hv] -> [N, H, hv]. k and v None: the cache has them already. Without a cache (training,
    a single look at a text) every span must start at 0 and sees the keys of the pass itself.
    """
    if cache is not None and k is not None and v is not None:
        cache.append(layer, pass_, k, v)
    results = []
    for call in pass_.once(("attention", window), lambda: calls(pass_, window, alone=cache is None)):
        if cache is None:
            assert k is not None and v is not None
            keys, values = (call.by_row(x)[:, :, call.first :] for x in (k, v))
        else:
            keys, values = cache.read(layer, call.rows, call.first, call.end)
        out, _ = attention(call.by_row(q), keys, values, call.visible, scale, cap)  # [B, H, Q, hv]
        results.append(call.flat(out))
    return results[0] if len(results) == 1 else torch.cat(results)


def look(
    q: torch.Tensor, pass_: Pass, cache: Cache, layer: int, most: int | None = None, scale: float | None = None
) -> torch.Tensor:
    """Let tokens that are not in the cache look at what it holds of their rows before them, and leave nothing there.

    q: [A, H, h], of a pass of one token a row. most: only the last so many keys. -> [A, H, hv]
    """
    ends = [span.start for span in pass_.spans]
    firsts = [max(0, end - (most or end)) for end in ends]
    first, end = min(firsts), max(ends)
    if len(set(ends)) == 1:
        visible = ALL
    else:
        bounds, keys = torch.tensor([firsts, ends])[..., None, None], torch.arange(first, end)
        visible = pass_.once(("look", most), lambda: Visible(mask=(keys >= bounds[0]) & (keys < bounds[1])))
    keys, values = cache.read(layer, tuple(span.row for span in pass_.spans), first, end)
    return attention(q[:, :, None], keys, values, visible, scale)[0][:, :, 0]
