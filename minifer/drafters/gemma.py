"""Gemma 4's drafter: small layers that ask the target's own cache, and leave nothing in it.

    the target's last hidden state ───┐
                                      ├─ pre ─► 4 layers, queries only ─ norm ─┬─► its own head ─► token
    embedding of the last token ──────┘              │                         └─ post ─► in place of the hidden state
    (the target's table)                             └─ reads keys and values that the target has cached

It is narrower than its target and has no keys and values: each layer reads those of the target's last layer of its kind (a sliding
or a full one) that has any. So there is nothing to prefill and nothing to roll back, and what it has drafted reaches the next step
only through the hidden state and the last token's embedding. All steps of a round ask from one position, that of the last decided
token, which the cache does not hold yet.

Small variants do not look at the whole vocabulary: tokens lie in clusters, and only those of the likeliest clusters get a logit.

Cost: a pass of the small layers for each drafted token. Needs of a sharded target: keys and values of two of its layers, the hidden
state of each row's last kept token, the embedding.
Source: the published assistant checkpoints of Gemma 4, in whose layout it is read (config.json: gemma4_assistant).

Letters: A active rows, D width of the target, d of the drafter, V vocabulary, C clusters, H heads, h width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from ..batch import Batch
from ..draft import Settled
from ..model.attention import look
from ..model.cache import Cache
from ..model.config import OUTSIDE, Config
from ..model.layers import Layer, Norm
from ..model.linear import Linear
from ..model.passes import Output, Pass, Span
from .chained import Chained, Shared


class Gemma(nn.Module):
    """Empty until it is filled. config: of the small layers. clusters: (how many there are, how many of them are looked at)."""

    def __init__(self, shared: Shared, config: Config, clusters: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.shared, target, width = shared, shared.target.config, shared.target.config.width
        self.pre = Linear("pre_projection", config.width, 2 * width)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.layers))
        self.norm = Norm("model.norm", config)
        self.post = Linear("post_projection", width, config.width)
        self.head = Linear("model.embed_tokens", config.vocabulary, config.width)
        self.clusters = None if clusters is None else Linear("masked_embedding.centroids", clusters[0], config.width)
        self.looked_at = 0 if clusters is None else clusters[1]
        self.members: torch.Tensor | None = None  # [C, V / C]: the ids of each cluster
        self.sources = [_source(target, number, one.window is None) for number, one in enumerate(config.each)]
        # In the target's cache; on a rank that does not decide, nothing is drafted.
        self.slots = [shared.target.slot(source) for source in self.sources] if shared.target.decides else []
        for number, (own, source) in enumerate(zip(config.each, self.sources)):
            theirs = target.each[source]
            if own.keys_of != OUTSIDE or (own.kv_heads, own.head_dim) != (theirs.kv_heads, theirs.head_dim):
                raise ValueError(
                    f"the drafter's layer {number} asks {own.kv_heads} key/value heads of width {own.head_dim}; "
                    f"layer {source} of the target has {theirs.kv_heads} of width {theirs.head_dim}"
                )

    @property
    def each(self) -> list[Layer]:
        return list(self.layers)  # type: ignore[arg-type]

    def follow(self) -> None:
        """Of the empty module: where a rank has some of its target's keys and values, ask with the queries of those only."""
        for cut in self.shared.target.cuts:
            for layer in self.each:
                cut(layer)

    def enter(self, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Tokens [A] and hidden states [A, D] -> what the first layer reads [A, d]"""
        return self.pre(torch.cat([self.shared.target.embed(ids).to(hidden.dtype), hidden], -1))

    def forward(self, pass_: Pass, hidden: torch.Tensor, cache: Cache) -> tuple[torch.Tensor, torch.Tensor]:
        """A step of each row of a pass, one token each: logits [A, V] and the next hidden states [A, D]. cache: the target's."""
        x = self.enter(pass_.ids, hidden)
        for layer, slot in zip(self.each, self.slots):
            q, _, _ = layer.attention.project(layer.attention_norm(x), pass_)  # [A, H, h]
            # The window is counted from the last cached token, itself included, as the published drafter does it.
            most = None if layer.attention.window is None else layer.attention.window + 1
            attended = look(q, pass_, cache, slot, most, layer.attention.scale)
            x = layer.after(x, layer.attention.o(attended.flatten(1)), pass_)
        x = self.norm(x)
        return self.logits(x), self.post(x)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[A, d] -> [A, V] in float32"""
        if self.clusters is None or self.members is None:
            return self.head(x).float()
        ids = self.members[self.clusters(x).topk(self.looked_at).indices].flatten(1)  # [A, n]
        some = (F.embedding(ids, self.head.rows) @ x[..., None])[..., 0].float()
        rest = (some.min() - 1).expand(len(x), len(self.head.rows))
        return rest.scatter(1, ids, some)


def _source(target: Config, number: int, full: bool) -> int:
    """The target's last layer of this kind that has keys and values of its own."""
    found = [layer for layer, one in enumerate(target.each) if one.keys_of is None and (one.window is None) == full]
    if not found:
        raise ValueError(
            f"the drafter's layer {number} reads a {'full' if full else 'sliding'} layer, of which the target has none"
        )
    return found[-1]


class GemmaDrafter(Chained):
    """module: filled, of this target."""

    def __init__(self, module: Gemma) -> None:
        self.module, self.shared = module, module.shared

    def propose(self, batch: Batch, output: Output, settled: Settled, deepest: Sequence[int]) -> torch.Tensor:
        assert output.hidden is not None and output.cache is not None
        self._cache = output.cache
        # Behind a tree that another drafter drew, kept keys are not in their places before the next pass moves them.
        deepest = [0 if batch.row(at).keep is not None else depth for at, depth in enumerate(deepest)]
        with torch.inference_mode():
            return self.chain(batch, output.hidden[[settled.kept[at][-1] for at in batch.active]], deepest)

    def step(
        self, batch: Batch, rows: list[int], tokens: list[int], features: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        spans = tuple(Span(at, len(batch.row(at).tokens) - 1, 1) for at in rows)  # the same in all steps of a round
        return self.module(Pass(torch.tensor(tokens), spans, tuple(range(len(rows)))), features, self._cache)
