"""EAGLE: one decoder layer that continues the target's features, and a tree that follows its confidence.

    states of some layers ─ fuse ─► feature f0 ─ norm ─┐
                                                       ├─► attention ─ (+ feature) ─► feed-forward ─► feature g1 ─► logits
    embedding of x1 (the target's table) ────── norm ──┘        │                                          └► next entry
                                                        a cache of its own

The feature says what the target thought at the token before, the embedding which token came of it; without the second the
layer would have to guess the draw as well. It is fed its own features while it drafts, and is trained in that way (unrolled).

As in EAGLE-3 the feature is fused of several layers, attention reads both inputs side by side, and logits are taken over a
reduced vocabulary: the tokens that the target says most often, whose rows of the target's head are used as they are.
As in EAGLE-2 a greedy row's draft is a tree: at each depth the likeliest nodes are continued, the likeliest of all are proposed.

Cost: see recurrent.py; a tree's later passes run all nodes continued so far, since a node must see its ancestors.
Needs of a sharded target: the states of its layers for all tokens of a pass, embedding and head; replicated where it runs.
Sources: Li et al. 2024 (arXiv 2401.15077; 2406.16858), 2025 (2503.01840).

Letters: as in recurrent.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ..batch import Batch
from ..model.layers import Attention, FeedForward, Norm
from ..model.linear import Linear
from ..model.passes import Pass, Span
from .chained import Shared
from .recurrent import Module, Recurrent


class Eagle(Module):
    """Empty until it is filled. layers: of how many of the target's layers the states are fused."""

    def __init__(self, shared: Shared, layers: int) -> None:
        super().__init__(shared)
        given = shared.target.config
        c = replace(given, layers=1, windows=(None,), described=(), per_layer_width=0)
        self.fuse = Linear("eagle.fuse", c.width, layers * c.width)
        self.token_norm, self.feature_norm = Norm("eagle.token_norm", c), Norm("eagle.feature_norm", c)
        self.attention = Attention(c, 0, reads=2 * c.width)
        self.feed_forward_norm, self.feed_forward = Norm("eagle.feed_forward_norm", c), FeedForward(c, 0)
        self.norm = Norm("eagle.norm", c)

    def read(self, states: torch.Tensor) -> torch.Tensor:
        return self.fuse(states)

    def enter(self, ids: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self.token_norm(self.shared.target.embed(ids).to(features.dtype))
        return features, torch.cat([tokens, self.feature_norm(features)], -1)

    def leave(self, past: torch.Tensor, attended: torch.Tensor, pass_: Pass) -> torch.Tensor:
        x = past + attended
        return x + self.feed_forward(self.feed_forward_norm(x))

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        return self.shared.logits(self.norm(features))


@dataclass
class Growing:
    """A row's tree on its way. continued: the nodes that were run, in the order of their entries."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)  # log probability of the path to each
    continued: list[int] = field(default_factory=list)

    def branch(self, node: int, tokens: list[int], scores: list[float]) -> None:
        """New children of a node (-1: the root)."""
        before = 0.0 if node < 0 else self.scores[node]
        self.tokens += tokens
        self.parents += [node] * len(tokens)
        self.scores += [before + score for score in scores]

    def best(self, count: int, after: int = 0) -> list[int]:
        """The likeliest nodes from `after` on, parents before children."""
        return sorted(sorted(range(after, len(self.tokens)), key=lambda node: (-self.scores[node], node))[:count])


class EagleDrafter(Recurrent):
    """size: nodes of a tree; 0 drafts chains. beam: how many nodes are continued at each depth, by how many tokens each."""

    def __init__(self, module: Eagle, reads: Sequence[int], size: int = 0, beam: int = 4) -> None:
        super().__init__(module, reads)
        self.size, self.beam = size, beam

    def nodes(self, draft_length: int) -> int:
        return max(self.size, draft_length) if draft_length else 0

    def spare(self) -> int:
        return max(1, self.beam if self.size else 1) * self.draft_length

    def draft(self, batch: Batch, features: torch.Tensor, deepest: Sequence[int]) -> torch.Tensor:
        if not self.size or not all(row.sampling.greedy for row in batch.going):
            return super().draft(batch, features, deepest)
        trees = [Growing() for _ in batch.active]
        fresh: list[list[int]] = [[-1] for _ in trees]  # of each row, nodes that have features but no children
        known = {(place, -1): one for place, one in enumerate(features)}  # {(row, node): its feature}
        for depth in range(max(deepest)):
            if depth:
                before = [len(tree.tokens) - len(nodes) * self.beam for tree, nodes in zip(trees, fresh)]
                fresh = [tree.best(self.beam, after) for tree, after in zip(trees, before)]
                self._continue(batch.active, trees, fresh, known)
            self._branch(trees, fresh, known)
        return self._proposed(batch, trees)

    def _branch(self, trees: list[Growing], fresh: list[list[int]], known: dict[tuple[int, int], torch.Tensor]) -> None:
        """The likeliest tokens after each fresh node become its children."""
        asked = [(place, node) for place, nodes in enumerate(fresh) for node in nodes]
        logits = self.module.logits(torch.stack([known[key] for key in asked]))
        scores, places = logits.log_softmax(-1).topk(self.beam)
        for (place, node), row, score in zip(asked, places.tolist(), scores.tolist()):
            trees[place].branch(node, self.shared.tokens(row), score)

    def _continue(
        self, rows: Sequence[int], trees: list[Growing], fresh: list[list[int]], known: dict[tuple[int, int], torch.Tensor]
    ) -> None:
        """Features of fresh nodes. All nodes that were continued so far are run: each sees its ancestors among them."""
        ids: list[int] = []
        spans: list[Span] = []
        parents: list[tuple[int, ...]] = []
        wanted: list[int] = []
        inputs: list[torch.Tensor] = []
        for place, (at, tree, nodes) in enumerate(zip(rows, trees, fresh)):
            wanted += range(len(ids) + len(tree.continued), len(ids) + len(tree.continued) + len(nodes))
            tree.continued += nodes
            entry = {node: number for number, node in enumerate(tree.continued)}
            ids += [tree.tokens[node] for node in tree.continued]
            spans.append(Span(at, self._entered[at], len(tree.continued)))
            parents.append(tuple(entry.get(tree.parents[node], -1) for node in tree.continued))
            inputs += [known[place, tree.parents[node]] for node in tree.continued]
        pass_ = Pass(torch.tensor(ids), tuple(spans), tuple(wanted), parents=tuple(parents))
        new = iter(self.module(pass_, torch.stack(inputs), self._cache)[wanted])
        known.update({(place, node): next(new) for place, nodes in enumerate(fresh) for node in nodes})

    def _proposed(self, batch: Batch, trees: list[Growing]) -> torch.Tensor:
        found = torch.full((batch.rows, 2, self.nodes(self.draft_length)), -1)
        for at, tree in zip(batch.active, trees):
            best = tree.best(self.size)
            place = {-1: -1, **{node: new for new, node in enumerate(best)}}
            found[at, 0, : len(best)] = torch.tensor([tree.tokens[node] for node in best])
            found[at, 1, : len(best)] = torch.tensor([place[tree.parents[node]] for node in best])
        return found
