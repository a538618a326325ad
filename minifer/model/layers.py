"""What a transformer is built of: norms, attention, feed-forward, and the layer that joins them.

    x ─┬─ norm ─ attention ─ (norm) ─ + ─┬─ norm ─ feed-forward ─ (norm) ─ + ─► x
       └────────────────────────────────┘└────────────────────────────────┘

Norms in brackets, and per-layer inputs, are Gemma's. Everything here works on the flat tokens of a pass; only the sum over keys
(attention.py) knows of rows.

Letters: N tokens of a pass, D model width, H query heads, K key/value heads, h width of a head, P width of a per-layer input.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from .attention import attend
from .cache import Cache
from .config import Config
from .linear import Linear, fuse
from .passes import Pass
from .rotary import angles, rotate
from .weights import declare, select

Hidden = torch.Tensor  # [N, D]
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


class Norm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32 at least."""

    def __init__(self, name: str, config: Config, width: int | None = None) -> None:
        super().__init__()
        self.weight = declare((f"{name}.weight", (width or config.width,)))
        self.eps, self.adds_one = config.norm_eps, config.norm_adds_one

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.adds_one:  # in float32 before anything is rounded, as Gemma was trained
            exact = torch.promote_types(x.dtype, torch.float32)
            return F.rms_norm(x.to(exact), self.weight.shape, 1 + self.weight.to(exact), self.eps).to(x.dtype)
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Project to queries, keys and values, turn them by their positions, attend over the cache, project back.

    reads: width of its input, where that is not the model's. A layer that reads the keys and values of another has none.
    """

    def __init__(self, config: Config, number: int, reads: int | None = None) -> None:
        super().__init__()
        name, own, width = f"model.layers.{number}.self_attn", config.each[number], reads or config.width
        self.number, self.keys_of = number, own.keys_of
        self.heads, self.kv_heads, self.head_dim = config.heads, own.kv_heads, own.head_dim
        self.rope, self.window = own.rope, own.window
        self.scale, self.cap = config.score_scale, config.score_cap
        makes_keys, makes_values = own.keys_of is None, own.keys_of is None and not own.keys_are_values
        size = self.kv_heads * self.head_dim
        self.q = Linear(f"{name}.q_proj", self.heads * self.head_dim, width, config.qkv_bias)
        self.k = Linear(f"{name}.k_proj", size, width, config.qkv_bias) if makes_keys else None
        self.v = Linear(f"{name}.v_proj", size, width, config.qkv_bias) if makes_values else None
        self.o = Linear(f"{name}.o_proj", config.width, self.heads * self.head_dim, config.output_bias)
        self.q_norm = Norm(f"{name}.q_norm", config, self.head_dim) if config.qk_norm else None
        self.k_norm = Norm(f"{name}.k_norm", config, self.head_dim) if config.qk_norm and makes_keys else None
        self.value_norm = config.norm_eps if config.value_norm else None
        self.qkv: Linear | None = None  # q, k and v as one

    def fuse(self) -> None:
        """Make one (still empty) matrix of q, k and v."""
        self.qkv = fuse([part for part in (self.q, self.k, self.v) if part is not None])
        del self.q, self.k, self.v

    @property
    def cache_shape(self) -> tuple[int, int]:
        """(K, h): what this layer stores of a token, once for keys and once for values."""
        return self.kv_heads, self.head_dim

    def project(self, x: Hidden, pass_: Pass) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Queries [N, H, h], keys and values [N, K, h]; none of those where it reads another layer's."""
        parts = (self.q, self.k, self.v) if self.qkv is None else (self.qkv,)
        flat = torch.cat([part(x) for part in parts if part is not None], -1) if len(parts) > 1 else self.qkv(x)  # type: ignore
        heads = flat.unflatten(-1, (-1, self.head_dim))  # [N, H + 2 K, h], where all are made
        keys = self.kv_heads if self.keys_of is None else 0
        turning, v = heads.split([self.heads + keys, heads.shape[1] - self.heads - keys], 1)
        if keys and not v.shape[1]:
            v = turning[:, self.heads :]
        if self.q_norm is not None:
            q, k = turning.split([self.heads, keys], 1)
            turning = torch.cat([self.q_norm(q), self.k_norm(k)], 1) if self.k_norm is not None else self.q_norm(q)
        cos, sin = pass_.once(
            ("rotary", self.rope, self.head_dim, turning.dtype, x.device),
            lambda: angles(self.rope, self.head_dim, pass_.positions.to(x.device), turning.dtype),
        )
        q, k = rotate(turning, cos, sin).split([self.heads, keys], 1)
        if not keys:
            return q, None, None
        return q, k, v if self.value_norm is None else F.rms_norm(v, (self.head_dim,), eps=self.value_norm)

    def forward(self, x: Hidden, pass_: Pass, cache: Cache | None, slot: int) -> Hidden:
        q, k, v = self.project(x, pass_)
        if cache is None:  # then the pass itself holds what other layers and drafters may read
            if k is None:
                k, v = pass_.shared["keys and values", self.keys_of]
            else:
                pass_.shared["keys and values", self.number] = k, v
        return self.o(attend(q, k, v, pass_, cache, slot, self.window, self.scale, self.cap).flatten(1))


class FeedForward(nn.Module):
    """down(activation(gate(x)) * up(x))"""

    def __init__(self, config: Config, number: int) -> None:
        super().__init__()
        name, inner = f"model.layers.{number}.mlp", config.each[number].inner
        self.gate = Linear(f"{name}.gate_proj", inner, config.width, config.mlp_bias)
        self.up = Linear(f"{name}.up_proj", inner, config.width, config.mlp_bias)
        self.down = Linear(f"{name}.down_proj", config.width, inner, config.mlp_bias)
        self.activation = ACTIVATIONS[config.activation]
        self.gate_up: Linear | None = None  # both as one

    def fuse(self) -> None:
        """Make one (still empty) matrix of gate and up."""
        self.gate_up = fuse([self.gate, self.up])
        del self.gate, self.up

    def forward(self, x: Hidden) -> Hidden:
        gate, up = (self.gate(x), self.up(x)) if self.gate_up is None else self.gate_up(x).chunk(2, -1)
        return self.down(self.activation(gate) * up)


class PerLayerInput(nn.Module):
    """A layer's own view of each token (Gemma 4 E2B and E4B): from a table of its own and from the embedding, through a gate.

    All layers' parts lie side by side in one table and one projection of the checkpoint; each layer reads only its columns.
    """

    def __init__(self, config: Config, number: int) -> None:
        super().__init__()
        name, size, all_of_them = f"model.layers.{number}", config.per_layer_width, config.layers * config.per_layer_width
        columns = [(number * size, (number + 1) * size)]
        table = declare(("model.embed_tokens_per_layer.weight", (config.per_layer_vocabulary, all_of_them)))
        self.table = select(table, 1, columns)
        self.projection = select(declare(("model.per_layer_model_projection.weight", (all_of_them, config.width))), 0, columns)
        self.norm = Norm("model.per_layer_projection_norm", config, size)
        self.gate = Linear(f"{name}.per_layer_input_gate", size, config.width)
        self.out = Linear(f"{name}.per_layer_projection", config.width, size)
        self.after = Norm(f"{name}.post_per_layer_input_norm", config)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Hidden, pass_: Pass) -> Hidden:
        ids, embedded = pass_.shared["embedded"]
        said = scaled(F.embedding(ids.to(x.device), self.table), self.table.shape[1] ** 0.5)
        seen = self.norm(F.linear(embedded, self.projection) * embedded.shape[1] ** -0.5)
        return self.after(self.out(self.activation(self.gate(x)) * ((seen + said) * 2**-0.5)))


class Layer(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)). `number`: its place in the whole model."""

    def __init__(self, config: Config, number: int) -> None:
        super().__init__()
        name, twice = f"model.layers.{number}", config.norms_after
        self.number = number
        self.attention_norm = Norm(f"{name}.input_layernorm", config)
        self.attention = Attention(config, number)
        # With norms on both sides of each part, the name of Llama's second norm belongs to the one behind attention.
        self.after_attention = Norm(f"{name}.post_attention_layernorm", config) if twice else None
        self.feed_forward_norm = Norm(f"{name}.{'pre_feedforward' if twice else 'post_attention'}_layernorm", config)
        self.feed_forward = FeedForward(config, number)
        self.after_feed_forward = Norm(f"{name}.post_feedforward_layernorm", config) if twice else None
        self.per_layer_input = PerLayerInput(config, number) if config.per_layer_width else None
        self.scalar = declare((f"{name}.layer_scalar", (1,))) if config.layer_scalar else None

    def fuse(self) -> None:
        """Of the empty layer: matrices that read the same become one."""
        self.attention.fuse()
        self.feed_forward.fuse()

    def forward(self, x: Hidden, pass_: Pass, cache: Cache | None, slot: int) -> Hidden:
        return self.after(x, self.attention(self.attention_norm(x), pass_, cache, slot), pass_)

    def after(self, x: Hidden, attended: Hidden, pass_: Pass) -> Hidden:
        """All that follows attention. Tokens do not see each other here."""
        x = x + (attended if self.after_attention is None else self.after_attention(attended))
        fed = self.feed_forward(self.feed_forward_norm(x))
        x = x + (fed if self.after_feed_forward is None else self.after_feed_forward(fed))
        if self.per_layer_input is not None:
            x = x + self.per_layer_input(x, pass_)
        return x if self.scalar is None else x * self.scalar


def scaled(x: torch.Tensor, scale: float) -> torch.Tensor:
    """x times a number that is rounded to x's dtype first, as Gemma was trained: in bfloat16 the root of 3072 is 55.5."""
    return x if scale == 1 else x * torch.tensor(scale, dtype=x.dtype, device=x.device)
