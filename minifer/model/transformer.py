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

from .attention import attend
from .cache import Cache
from .config import Config
from .linear import Linear, fuse
from .passes import Output, Pass
from .rotary import angles, rotate
from .weights import declare, tensors_of

Hidden = torch.Tensor  # [N, D]


class Norm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32 at least."""

    def __init__(self, name: str, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = declare((f"{name}.weight", (width,))), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Project to queries, keys and values, turn them by their positions, attend over the cache, project back."""

    def __init__(self, config: Config, number: int) -> None:
        super().__init__()
        name = f"model.layers.{number}.self_attn"
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.rope, self.window = config.rope, config.windows[number]
        self.q = Linear(f"{name}.q_proj", self.heads * self.head_dim, config.width, config.qkv_bias)
        self.k = Linear(f"{name}.k_proj", self.kv_heads * self.head_dim, config.width, config.qkv_bias)
        self.v = Linear(f"{name}.v_proj", self.kv_heads * self.head_dim, config.width, config.qkv_bias)
        self.o = Linear(f"{name}.o_proj", config.width, self.heads * self.head_dim, config.output_bias)
        self.q_norm = Norm(f"{name}.q_norm", self.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = Norm(f"{name}.k_norm", self.head_dim, config.norm_eps) if config.qk_norm else None
        self.qkv: Linear | None = None  # q, k and v as one

    def fuse(self) -> None:
        """Make one (still empty) matrix of q, k and v."""
        self.qkv = fuse([self.q, self.k, self.v])
        del self.q, self.k, self.v

    @property
    def cache_shape(self) -> tuple[int, int]:
        """(K, h): what this layer stores of a token, once for keys and once for values."""
        return self.kv_heads, self.head_dim

    def forward(self, x: Hidden, pass_: Pass, cache: Cache | None, index: int) -> Hidden:
        flat = torch.cat([self.q(x), self.k(x), self.v(x)], -1) if self.qkv is None else self.qkv(x)
        heads = flat.unflatten(-1, (-1, self.head_dim))  # [N, H + 2 K, h]
        turning, v = heads.split([self.heads + self.kv_heads, self.kv_heads], 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = turning.split([self.heads, self.kv_heads], 1)
            turning = torch.cat([self.q_norm(q), self.k_norm(k)], 1)
        cos, sin = pass_.once(
            ("rotary", self.rope, self.head_dim, turning.dtype, x.device),
            lambda: angles(self.rope, self.head_dim, pass_.positions.to(x.device), turning.dtype),
        )
        q, k = rotate(turning, cos, sin).split([self.heads, self.kv_heads], 1)
        return self.o(attend(q, k, v, pass_, cache, index, self.window).flatten(1))


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, config: Config, number: int) -> None:
        super().__init__()
        name = f"model.layers.{number}.mlp"
        self.gate = Linear(f"{name}.gate_proj", config.inner, config.width, config.mlp_bias)
        self.up = Linear(f"{name}.up_proj", config.inner, config.width, config.mlp_bias)
        self.down = Linear(f"{name}.down_proj", config.width, config.inner, config.mlp_bias)
        self.gate_up: Linear | None = None  # both as one

    def fuse(self) -> None:
        """Make one (still empty) matrix of gate and up."""
        self.gate_up = fuse([self.gate, self.up])
        del self.gate, self.up

    def forward(self, x: Hidden) -> Hidden:
        gate, up = (self.gate(x), self.up(x)) if self.gate_up is None else self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Layer(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)). `number`: its place in the whole model."""

    def __init__(self, config: Config, number: int) -> None:
        super().__init__()
        name = f"model.layers.{number}"
        self.number = number
        self.attention_norm = Norm(f"{name}.input_layernorm", config.width, config.norm_eps)
        self.attention = Attention(config, number)
        self.feed_forward_norm = Norm(f"{name}.post_attention_layernorm", config.width, config.norm_eps)
        self.feed_forward = FeedForward(config, number)

    def forward(self, x: Hidden, pass_: Pass, cache: Cache | None, index: int) -> Hidden:
        x = x + self.attention(self.attention_norm(x), pass_, cache, index)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Embedding(nn.Module):
    """The entrance of the first chunk: ids [N] -> hidden [N, D], and no states yet."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.weight = declare(("model.embed_tokens.weight", (config.vocabulary, config.width)))

    def forward(self, pass_: Pass) -> tuple[Hidden, list[torch.Tensor]]:
        return F.embedding(pass_.ids.to(self.weight.device), self.weight), []


class Head(nn.Module):
    """The exit of the last chunk: the last norm over the wanted tokens. `linear` turns them into logits on demand."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = Norm("model.norm", config.width, config.norm_eps)
        name = "model.embed_tokens" if config.tied else "lm_head"
        self.linear = Linear(name, config.vocabulary, config.width)

    def forward(self, hidden: Hidden, states: list[torch.Tensor], pass_: Pass) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        if pass_.wanted != tuple(range(len(hidden))):
            hidden = hidden[list(pass_.wanted)]
        return self.norm(hidden), dict(zip(sorted(pass_.states), states))


class Chunk(nn.Module):
    """Consecutive layers with what stands before and after them. `first_slot`: the cache layer of its first layer."""

    def __init__(self, entrance: nn.Module, layers: Sequence[Layer], exit: nn.Module, first_slot: int = 0) -> None:
        super().__init__()
        self.entrance, self.layers, self.exit = entrance, nn.ModuleList(layers), exit
        self.first_slot = first_slot

    def forward(self, pass_: Pass, cache: Cache | None) -> tuple[torch.Tensor | None, dict[int, torch.Tensor] | None]:
        hidden, states = self.entrance(pass_)
        for index, layer in enumerate(self.layers, self.first_slot):
            hidden = layer(hidden, pass_, cache, index)
            if layer.number in pass_.states:
                states.append(hidden)
        return self.exit(hidden, states, pass_)


Agreement = Callable[[torch.Tensor | None, tuple[int, ...]], torch.Tensor | None]


class Transformer(nn.Module):
    """A whole model, empty (on the meta device) until `weights.fill`.

    chunks: what this rank runs. agreements: how a decision travels to the other ranks, innermost group first; empty on a
    plain model. tensors: {checkpoint tensor: shape} of the whole model, whatever a technique cuts from it later. name: by
    which it was loaded.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        layers = [Layer(config, number) for number in range(config.layers)]
        self.chunks = nn.ModuleList([Chunk(Embedding(config), layers, Head(config))])
        self.agreements: list[Agreement] = []
        self.tensors = tensors_of(self)
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
        return Output(self, pass_, *given)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[W, D] -> [W, V] in float32 at least."""
        logits = self.chunks[-1].exit.linear(hidden)  # type: ignore[union-attr, operator]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def fuse(self) -> Transformer:
        """Of the empty model, after every technique has taken its part: matrices that read the same become one."""
        for layer in self.layers:
            layer.attention.fuse()
            layer.feed_forward.fuse()
        return self

    def finish(self) -> Transformer:
        """Of the filled model: pack matrices where that pays. Not where weights still move or train.

        A tied head is packed too, beside the rows that the embedding looks up: `bytes_kept_twice` says what that costs.
        """
        embedding = {id(chunk.entrance.weight) for chunk in self.chunks if isinstance(chunk.entrance, Embedding)}
        matrices = [module for module in self.modules() if isinstance(module, Linear) and module.weight is not None]
        # Equal sizes one after the other: each takes the room that the one before it has left.
        for matrix in sorted(matrices, key=lambda matrix: matrix.weight.nbytes, reverse=True):  # type: ignore[union-attr]
            tied = id(matrix.weight) in embedding
            size = matrix.pack()
            self.bytes_kept_twice += size if tied else 0
        return self

    def new_cache(self, rows: int, capacity: int) -> Cache:
        """An empty cache for the layers and heads that this rank runs."""
        shapes = [layer.attention.cache_shape for layer in self.layers]
        return Cache(shapes, rows, capacity, self.dtype, self.device)
