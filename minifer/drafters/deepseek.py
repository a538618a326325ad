"""DeepSeek-V3's multi-token prediction: a whole layer of the target's kind that sees one token further.

    feature h0 (what the target's head reads) ── hnorm ─┐
                                                        ├─ eh_proj ─► layer ─ norm ─► feature h1 ─► the target's own head
    embedding of x1 (the target's table) ─────── enorm ─┘               │                └► next entry
                                                              a cache of its own

It shares embedding and head with the target and is trained together with it, to one token further; longer drafts apply it
again, on its own feature. The released weights join [embedding, feature] in this order; the paper writes the other. Features are
taken behind the norm that stands before the head, the target's and the module's own, as engines that serve it take them.

Cost: see recurrent.py; each drafted token pays for the target's whole head. Needs of a sharded target: the states of its last
layer for all tokens of a pass, embedding and head.
Source: DeepSeek-AI 2024 (arXiv 2412.19437, section 2.2); names are those of its checkpoints, where the module stands behind the
last layer.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..model.layers import Layer, Norm
from ..model.linear import Linear
from ..model.passes import Pass
from .chained import Shared
from .recurrent import Module


class DeepSeek(Module):
    """Empty until it is filled. It stands behind the target's layers, and is named so."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        c = shared.target.config
        if c.described or c.per_layer_width:
            raise ValueError(f"a {c.family} target has layers of several kinds; DeepSeek's module is one more of one kind")
        name = f"model.layers.{c.layers}"
        self.enorm, self.hnorm = Norm(f"{name}.enorm", c), Norm(f"{name}.hnorm", c)
        self.eh_proj = Linear(f"{name}.eh_proj", c.width, 2 * c.width)
        self.layer = Layer(replace(c, layers=c.layers + 1, windows=(*c.windows, None)), c.layers)
        self.attention = self.layer.attention
        self.norm = Norm(f"{name}.shared_head.norm", c)

    def read(self, states: torch.Tensor) -> torch.Tensor:
        norm = self.shared.target.head.norm
        return norm(states.to(norm.weight.dtype))

    def enter(self, ids: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self.shared.target.embed(ids).to(features.dtype)
        x = self.eh_proj(torch.cat([self.enorm(tokens), self.hnorm(features)], -1))
        return x, self.layer.attention_norm(x)

    def leave(self, past: torch.Tensor, attended: torch.Tensor, pass_: Pass) -> torch.Tensor:
        return self.norm(self.layer.after(past, attended, pass_))

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        return self.shared.logits(features)
