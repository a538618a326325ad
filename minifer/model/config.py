"""What a model is: the numbers of a Hugging Face config.json, under plain names.

Each family differs from Llama in a few options, so one Config holds them all and the transformer reads only this. families.py
and gemma.py make one from a file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .rotary import Rope

OUTSIDE = -1  # in place of a layer's number: another model's


@dataclass(frozen=True)
class LayerConfig:
    """What may differ from layer to layer.

    window: a token sees itself and the window - 1 tokens before it; None: all before it. keys_of: the layer whose keys and
    values it reads instead of its own, or OUTSIDE. keys_are_values: one matrix makes both.
    """

    kv_heads: int
    head_dim: int
    inner: int
    rope: Rope
    window: int | None = None
    keys_of: int | None = None
    keys_are_values: bool = False


@dataclass(frozen=True)
class Config:
    """A decoder-only transformer. Widths are numbers of elements.

    described: its layers one by one, where they are not alike but for their windows. `each` are its layers in any case.
    """

    family: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    context: int
    rope: Rope
    norm_eps: float = 1e-6
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # over the width of each head
    windows: tuple[int | None, ...] = ()
    end_ids: tuple[int, ...] = ()  # what config.json and generation_config.json call the end of a text
    next_layers: int = 0  # modules behind its layers that draft further tokens (drafters/deepseek.py)
    # What Gemma does otherwise.
    activation: str = "silu"  # or "gelu_tanh"
    embedding_scale: float = 1.0
    norm_adds_one: bool = False  # norms multiply by 1 + weight
    norms_after: bool = False  # what attention and feed-forward give is normed too
    value_norm: bool = False  # values are normed, by no weight
    layer_scalar: bool = False  # what a layer gives is multiplied by a number of its own
    score_scale: float | None = None  # of attention, in place of head_dim^-1/2
    score_cap: float | None = None  # scores are bent to stay below it
    logit_cap: float | None = None
    per_layer_width: int = 0  # of each layer's own view of a token; 0: none
    per_layer_vocabulary: int = 0
    described: tuple[LayerConfig, ...] = ()

    def __post_init__(self) -> None:
        if not self.windows:
            windows = tuple(one.window for one in self.described) or (None,) * self.layers
            object.__setattr__(self, "windows", windows)
        for what, count in (("windows", len(self.windows)), ("described layers", len(self.described or self.windows))):
            if count != self.layers:
                raise ValueError(f"{count} {what} for {self.layers} layers")
        each = self.each
        for number, one in enumerate(each):
            if self.heads % one.kv_heads:
                raise ValueError(f"{self.heads} query heads are no multiple of {one.kv_heads} key/value heads")
            if one.head_dim % 2:
                raise ValueError(f"rotary positions turn pairs: head_dim {one.head_dim} is odd")
            if one.keys_of not in (None, OUTSIDE) and not (0 <= one.keys_of < number and each[one.keys_of].keys_of is None):
                raise ValueError(f"layer {number} reads the keys of layer {one.keys_of}, which is no earlier one with its own")

    @property
    def each(self) -> tuple[LayerConfig, ...]:
        """What each layer is."""
        alike = LayerConfig(self.kv_heads, self.head_dim, self.inner, self.rope)
        return self.described or tuple(replace(alike, window=window) for window in self.windows)

    @property
    def may_be_extra(self) -> tuple[str, ...]:
        """What a checkpoint may hold although the model does not ask for it: ends of names, and beginnings, which end in a dot."""
        found = ["rotary_emb.inv_freq", *(["lm_head.weight"] if self.tied else [])]
        found += [f"model.layers.{self.layers + ahead}." for ahead in range(self.next_layers)]
        parts = ("k_proj.weight", "v_proj.weight", "k_norm.weight", "v_norm.weight")
        reading = [layer for layer, one in enumerate(self.each) if one.keys_of is not None]
        return (*found, *(f"layers.{layer}.self_attn.{part}" for layer in reading for part in parts))

    @property
    def parameters(self) -> int:
        """Number of weights, a tied head counted once. Norms and biases are left out (< 0.1 %)."""
        total = self.vocabulary * self.width * (2 - self.tied)
        for one in self.each:
            made = 0 if one.keys_of is not None else 1 if one.keys_are_values else 2  # of keys and values
            total += self.width * one.head_dim * (2 * self.heads + made * one.kv_heads) + 3 * self.width * one.inner
            total += self.per_layer_width * (self.per_layer_vocabulary + 3 * self.width)
        return total

    @property
    def kv_elements(self) -> int:
        """Elements of keys and values that one token adds to the cache, over all layers."""
        return sum(2 * one.kv_heads * one.head_dim for one in self.each if one.keys_of is None)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises a ValueError that names the file."""
    try:
        held = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no readable JSON: {error}") from None
    if not isinstance(held, dict):
        raise ValueError(f"{path} holds no JSON object but a {type(held).__name__}")
    return held
