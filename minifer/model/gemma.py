"""Gemma 3 and Gemma 4, the text models: what their config.json says, as a Config.

    sliding  sliding  sliding  sliding  sliding  full  sliding ...     most layers see a window, some see everything
    theta 10,000 ──────────────────────────────  1,000,000             each kind turns by its own angles

Both norm what attention and feed-forward give, scale the embedding by the root of its width and use a gelu. Gemma 3's norms
multiply by 1 + weight, Gemma 4's by the weight. Gemma 4's full layers have wider heads, of which a quarter turns, and in the
larger models no value matrix: values are the keys before their norm. The last layers of the smaller models (E2B, E4B) read the
keys and values of earlier ones and have, as all their layers, a small input of their own for each token.

Sources: arXiv 2503.19786 (Gemma 3); for Gemma 4 the configurations that are published with its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .config import OUTSIDE, Config, LayerConfig
from .keys import as_ids, need, number, refuse_unknown, rope_of, supports
from .rotary import Rope

FAMILIES = ("gemma3_text", "gemma3", "gemma4_text", "gemma4")
USED = frozenset(
    """
    attention_bias attention_k_eq_v attn_logit_softcapping enable_moe_block final_logit_softcapping global_head_dim head_dim
    hidden_activation hidden_size hidden_size_per_layer_input intermediate_size layer_types max_position_embeddings
    moe_intermediate_size num_attention_heads num_experts num_global_key_value_heads num_hidden_layers num_key_value_heads
    num_kv_shared_layers per_layer_config query_pre_attn_scalar rms_norm_eps rope_local_base_freq rope_parameters rope_scaling
    rope_theta sliding_window sliding_window_pattern tie_word_embeddings top_k_experts use_bidirectional_attention
    use_double_wide_mlp vocab_size vocab_size_per_layer_input
    """.split()
)
# Where a file leaves these out, they mean what transformers' own classes mean by default.
USUAL = {"hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
USUAL_3 = USUAL | {"num_hidden_layers": 26, "vocab_size": 262_208, "sliding_window": 4096, "query_pre_attn_scalar": 256}
USUAL_4 = USUAL | {"num_hidden_layers": 30, "vocab_size": 262_144, "sliding_window": 512}


def from_dict(raw: dict[str, Any], ignore: Sequence[str] = (), end_ids: tuple[int, ...] = (), drafter: bool = False) -> Config:
    """A Config from the contents of a config.json; of a model that also sees pictures, its text part.

    drafter: of Gemma 4's drafter, whose layers read the keys and values of another model. Raises a ValueError that names what is
    not supported.
    """
    if "text_config" in raw:
        end_ids = end_ids or tuple(as_ids(raw.get("eos_token_id")))
        raw = {"model_type": raw["model_type"]} | raw["text_config"]
    refuse_unknown(raw, USED, ignore)
    supports(raw, hidden_activation="gelu_pytorch_tanh", enable_moe_block=False)
    if raw.get("use_bidirectional_attention") not in (None, False, "vision"):  # "vision": for the tokens of pictures
        raise ValueError(
            f"use_bidirectional_attention={raw['use_bidirectional_attention']!r} is not supported: texts are read forward"
        )
    third = str(raw["model_type"]).startswith("gemma3")
    said = (USUAL_3 if third else USUAL_4) | {key: value for key, value in raw.items() if value is not None}
    each = _layers_of_3(said) if third else _layers_of_4(said, drafter)
    own = {} if third else _own_of_4(said)
    if third:
        own = {"norm_adds_one": True, "score_scale": float(need(said, "query_pre_attn_scalar")) ** -0.5}
    bias = bool(said.get("attention_bias", False))
    return Config(
        family="gemma3" if third else "gemma4",
        layers=len(each),
        width=need(said, "hidden_size"),
        heads=need(said, "num_attention_heads"),
        kv_heads=each[0].kv_heads,
        head_dim=each[0].head_dim,
        inner=each[0].inner,
        vocabulary=need(said, "vocab_size"),
        context=need(said, "max_position_embeddings", 131_072),
        rope=each[0].rope,
        norm_eps=number(dict(said), "rms_norm_eps", 1e-6),
        tied=bool(said.get("tie_word_embeddings", True)),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        end_ids=end_ids or tuple(as_ids(said.get("eos_token_id"))),
        activation="gelu_tanh",
        embedding_scale=need(said, "hidden_size") ** 0.5,
        norms_after=True,
        score_cap=_cap(said, "attn_logit_softcapping"),
        logit_cap=_cap(said, "final_logit_softcapping"),
        described=tuple(each),
        **own,
    )


def _own_of_4(said: dict[str, Any]) -> dict[str, Any]:
    width = said.get("hidden_size_per_layer_input", 256)
    own: dict[str, Any] = {"value_norm": True, "layer_scalar": True, "score_scale": 1.0}
    if width:
        own |= {"per_layer_width": width, "per_layer_vocabulary": need(said, "vocab_size_per_layer_input", 262_144)}
    return own


def _layers_of_3(said: dict[str, Any]) -> list[LayerConfig]:
    sizes = need(said, "num_key_value_heads"), need(said, "head_dim"), need(said, "intermediate_size")
    ropes, window = _ropes(said, {"rope_type": "default"}), need(said, "sliding_window")
    return [LayerConfig(*sizes, ropes[kind], window if kind == "sliding_attention" else None) for kind in _kinds(said)]


def _layers_of_4(said: dict[str, Any], drafter: bool) -> list[LayerConfig]:
    kinds, shared = _kinds(said), said.get("num_kv_shared_layers", 0)
    kinds[-1] = "full_attention"  # whatever the file says
    own = len(kinds) - (len(kinds) if drafter else shared)
    if not 0 <= own <= len(kinds) or (own == 0 and not drafter):
        raise ValueError(f"{shared} of {len(kinds)} layers read the keys of earlier ones, of which there must be some")
    ropes = _ropes(said, {"rope_type": "proportional", "partial_rotary_factor": 0.25})
    found = []
    for layer, kind in enumerate(kinds):
        full, reads = kind == "full_attention", layer >= own
        special = {"head_dim": said.get("global_head_dim", 512)} if full else {}
        if full and said.get("num_global_key_value_heads") and said.get("attention_k_eq_v", False):
            special["num_key_value_heads"] = said["num_global_key_value_heads"]
        special = said["per_layer_config"].get(str(layer), {}) if "per_layer_config" in said else special
        source = None if not reads else OUTSIDE if drafter else _last(kinds[:own], kind)
        wide = 2 if reads and said.get("use_double_wide_mlp", False) else 1
        found.append(
            LayerConfig(
                kv_heads=need(said | special, "num_key_value_heads"),
                head_dim=need(said | special, "head_dim"),
                inner=wide * need(said | special, "intermediate_size"),
                rope=ropes[kind],
                window=None if full else need(said, "sliding_window"),
                keys_of=source,
                keys_are_values=full and bool(said.get("attention_k_eq_v", False)),
            )
        )
    return found


def _kinds(said: dict[str, Any]) -> list[str]:
    """ "sliding_attention" or "full_attention" for each layer."""
    layers, every = need(said, "num_hidden_layers"), said.get("_sliding_window_pattern", said.get("sliding_window_pattern", 6))
    usual = ["full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in range(layers)]
    kinds = list(said.get("layer_types") or usual)
    strange = set(kinds) - {"full_attention", "sliding_attention"}
    if strange or len(kinds) != layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for {layers} layers, unknown kinds: {sorted(strange)}")
    return kinds


def _last(kinds: Sequence[str], kind: str) -> int:
    """The last layer of this kind among those with keys of their own."""
    if kind not in kinds:
        raise ValueError(f"a {kind} layer reads the keys of an earlier one, but no layer of its kind has any")
    return len(kinds) - 1 - list(reversed(kinds)).index(kind)


def _ropes(said: dict[str, Any], full: dict[str, Any]) -> dict[str, Rope]:
    """How each kind of layer turns. full: how full layers do where the file does not say."""
    context = need(said, "max_position_embeddings", 131_072)
    both = said.get("rope_parameters") or {
        "full_attention": full | {"rope_theta": said.get("rope_theta", 1_000_000.0)} | (said.get("rope_scaling") or {}),
        "sliding_attention": {"rope_type": "default", "rope_theta": said.get("rope_local_base_freq", 10_000.0)},
    }
    usual = {"full_attention": 1_000_000.0, "sliding_attention": 10_000.0}
    return {
        kind: rope_of({"rope_parameters": both.get(kind) or {"rope_type": "default"}, "rope_theta": theta}, context)
        for kind, theta in usual.items()
    }


def _cap(said: dict[str, Any], key: str) -> float | None:
    return None if said.get(key) is None else number(dict(said), key)
