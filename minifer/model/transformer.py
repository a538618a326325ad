"""The plain model: a decoder-only transformer over flat passes. It knows nothing of ranks.

    ids [N] -> Embedding -> Layer, Layer, ... -> Head -> hidden states of the wanted tokens [W, D] -> logits [W, V]
               '-------------- a Chunk --------------'

A chunk is an entrance, some consecutive layers and an exit. The plain model is one chunk. A pipeline replaces entrance and
exit by receiving and sending; tensor parallelism replaces the matrices inside the layers; nothing else changes.

Letters: N tokens of a pass, W wanted tokens, D model width, H query heads, K key/value heads, h width of a head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from .cache import Cache
from .config import Config
from .layers import Hidden, Layer, Norm, scaled
from .linear import Linear
from .passes import Output, Pass
from .weights import declare, tensors_of


class Embedding(nn.Module):
    """The entrance of the first chunk: ids [N] -> hidden [N, D], and no states yet."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.weight = declare(("model.embed_tokens.weight", (config.vocabulary, config.width)))
        self.scale = config.embedding_scale

    def look_up(self, ids: torch.Tensor) -> Hidden:
        """[N] -> [N, D], as they stand in the table."""
        return F.embedding(ids.to(self.weight.device), self.weight)

    def embed(self, ids: torch.Tensor) -> Hidden:
        """[N] -> [N, D]"""
        return scaled(self.look_up(ids), self.scale)

    def forward(self, pass_: Pass) -> tuple[Hidden, list[torch.Tensor]]:
        hidden = self.embed(pass_.ids)
        pass_.shared["embedded"] = pass_.ids, hidden
        return hidden, []


class Head(nn.Module):
    """The exit of the last chunk: the last norm over the wanted tokens. `linear` turns them into logits on demand."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = Norm("model.norm", config)
        name = "model.embed_tokens" if config.tied else "lm_head"
        self.linear = Linear(name, config.vocabulary, config.width)

    def forward(self, hidden: Hidden, states: list[torch.Tensor], pass_: Pass) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        if pass_.wanted != tuple(range(len(hidden))):
            hidden = hidden[list(pass_.wanted)]
        return self.norm(hidden), dict(zip(sorted(pass_.states), states))

    def raw(self, hidden: torch.Tensor) -> torch.Tensor:
        """[W, D] -> [W, V] as the matrix gives them."""
        return self.linear(hidden)

    def best(self, hidden: torch.Tensor, bent: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """[W, D] -> [W], each token's likeliest successor, the lowest id of equals. bent: what makes logits of `raw`."""
        return bent(self.raw(hidden)).argmax(-1)

    @property
    def rows(self) -> torch.Tensor:
        """Its matrix [V, D]."""
        return self.linear.rows


class Chunk(nn.Module):
    """Consecutive layers with what stands before and after them. `first_slot`: the cache layer of its first layer."""

    def __init__(self, entrance: nn.Module, layers: Sequence[Layer], exit: nn.Module, first_slot: int = 0) -> None:
        super().__init__()
        self.entrance, self.layers, self.exit = entrance, nn.ModuleList(layers), exit
        own = [layer.number for layer in layers if layer.attention.keys_of is None]
        place = {number: slot for slot, number in enumerate(own, first_slot)}
        # Of each layer, the cache layer that it reads: its own, or that of the layer whose keys and values it reads.
        self.slots = [place[layer.number if layer.attention.keys_of is None else layer.attention.keys_of] for layer in layers]

    def forward(self, pass_: Pass, cache: Cache | None) -> tuple[torch.Tensor | None, dict[int, torch.Tensor] | None]:
        hidden, states = self.entrance(pass_)
        return self.exit(self.through(hidden, states, pass_, cache), states, pass_)

    def through(self, hidden: Hidden, states: list[torch.Tensor], pass_: Pass, cache: Cache | None) -> Hidden:
        """Its layers alone. states: what the pass asks for is added to it."""
        for slot, layer in zip(self.slots, self.layers):
            hidden = layer(hidden, pass_, cache, slot)
            if layer.number in pass_.states:
                states.append(hidden)
        return hidden


Agreement = Callable[[torch.Tensor | None, tuple[int, ...]], torch.Tensor | None]


class Transformer(nn.Module):
    """A whole model, empty (on the meta device) until `weights.fill`.

    chunks: what this rank runs. agreements: how a decision travels to the other ranks, innermost group first; empty on a
    plain model. cuts: what techniques do to a layer, for those who build layers that read this model's cache. tensors:
    {checkpoint tensor: shape} of the whole model, whatever a technique cuts from it later. name: by which it was loaded.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        layers = [Layer(config, number) for number in range(config.layers)]
        self.chunks = nn.ModuleList([Chunk(Embedding(config), layers, Head(config))])
        self.agreements: list[Agreement] = []
        self.cuts: list[Callable[[Layer], None]] = []
        self.tensors = tensors_of(self)
        self.lookup: Embedding | None = None  # of a rank that runs no embedding but is asked to embed all the same
        self.bytes_kept_twice = 0
        self.name = ""

    @property
    def layers(self) -> list[Layer]:
        """The layers that this rank runs, in order."""
        return [layer for chunk in self.chunks for layer in chunk.layers]  # type: ignore[union-attr]

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def forward(self, pass_: Pass, cache: Cache | None = None) -> Output:
        """Run a pass. Without a cache every span must start at 0, and nothing is remembered."""
        if any(not 0 <= number < self.config.layers for number in pass_.states):
            raise ValueError(f"states of layers {pass_.states} of a model of {self.config.layers}")
        if cache is not None:
            cache.begin(pass_)
        elif any(span.start for span in pass_.spans):
            raise ValueError(f"without a cache every span starts at 0: {[span.start for span in pass_.spans]}")
        given: tuple[torch.Tensor | None, dict[int, torch.Tensor] | None] = None, None
        for chunk in self.chunks:
            given = chunk(pass_, cache)
        if cache is not None:
            cache.commit(pass_)
        return Output(self, pass_, *given, cache)

    @property
    def decides(self) -> bool:
        """Whether this rank holds the head, so that outputs can be decided on here."""
        return isinstance(self.chunks[-1].exit, Head)

    @property
    def head(self) -> Head:
        """The exit of its last layer. On the ranks that hold it."""
        assert isinstance(self.chunks[-1].exit, Head), "this rank holds no head"
        return self.chunks[-1].exit

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[W, D] -> [W, V] in float32 at least."""
        return self.bent(self.head.raw(hidden))

    def best(self, hidden: torch.Tensor) -> torch.Tensor:
        """[W, D] -> [W], the arguments of the largest logits, the lowest id of equals."""
        return self.head.best(hidden, self.bent)

    def bent(self, logits: torch.Tensor) -> torch.Tensor:
        """What a head gives, as logits: in float32 at least, and below the cap if the model has one."""
        logits, cap = logits.to(torch.promote_types(logits.dtype, torch.float32)), self.config.logit_cap
        return logits if cap is None else (logits / cap).tanh() * cap

    def embed(self, ids: torch.Tensor) -> Hidden:
        """[N] -> [N, D], as the first layer is given them. On the ranks that hold the embedding."""
        entrance = self.chunks[0].entrance
        table = entrance if isinstance(entrance, Embedding) else self.lookup
        if table is None:
            raise ValueError("this rank holds no embedding, which is to be read here: shard its model with drafting=True")
        return table.embed(ids)

    def fuse(self) -> Transformer:
        """Of the empty model, after every technique has taken its part: matrices that read the same become one."""
        for layer in self.layers:
            layer.fuse()
        return self

    def finish(self) -> Transformer:
        """Of the filled model: pack matrices where that pays. Not where weights still move or train.

        A tied head is packed too, beside the rows that the embedding looks up: `bytes_kept_twice` says what that costs.
        """
        tables = [self.lookup, *(chunk.entrance for chunk in self.chunks)]
        embedding = {id(table.weight) for table in tables if isinstance(table, Embedding)}
        matrices = [module for module in self.modules() if isinstance(module, Linear) and module.weight is not None]
        # Equal sizes one after the other: each takes the room that the one before it has left.
        for matrix in sorted(matrices, key=lambda matrix: matrix.weight.nbytes, reverse=True):  # type: ignore[union-attr]
            tied = id(matrix.weight) in embedding
            size = matrix.pack()
            self.bytes_kept_twice += size if tied else 0
        return self

    def slot(self, number: int) -> int:
        """The cache layer that this layer of the model reads. On the rank that runs it."""
        places = [(chunk.layers, chunk.slots) for chunk in self.chunks]
        found = {layer.number: slot for layers, slots in places for layer, slot in zip(layers, slots)}  # type: ignore[arg-type]
        if number not in found:
            raise ValueError(f"the keys and values of layer {number} are not on this rank, which runs layers {sorted(found)}")
        return found[number]

    def new_cache(self, rows: int, capacity: int) -> Cache:
        """An empty cache for the layers and heads that this rank runs."""
        shapes = [layer.attention.cache_shape for layer in self.layers if layer.attention.keys_of is None]
        return Cache(shapes, rows, capacity, self.dtype, self.device)
