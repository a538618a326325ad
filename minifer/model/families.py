"""From a Hugging Face config.json to a Config, and back.

A key that minifer does not know is an error that names it: a model that runs with one of its options left out gives fluent,
wrong text and nobody notices.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import gemma
from .config import Config, read_json
from .keys import as_ids, need, number, refuse_unknown, rope_of, supports
from .rotary import Rope

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
FAMILIES = (*LLAMA_LIKE, *gemma.FAMILIES)
USED = frozenset(
    """
    attention_bias head_dim hidden_act hidden_size intermediate_size layer_types max_position_embeddings max_window_layers mlp_bias
    num_attention_heads num_hidden_layers num_key_value_heads num_nextn_predict_layers pretraining_tp rms_norm_eps rope_interleaved
    rope_parameters rope_scaling rope_theta sliding_window tie_word_embeddings use_sliding_window vocab_size
    """.split()
)


def read_config(folder: Path, ignore: Sequence[str] = ()) -> Config:
    """The Config of a Hugging Face folder. `ignore`: keys of config.json that the caller knows to be harmless."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no config.json")
    raw = read_json(path)
    ends = as_ids(raw.get("eos_token_id"))
    generation = folder / "generation_config.json"
    if generation.is_file():
        ends += as_ids(read_json(generation).get("eos_token_id"))
    return from_dict(raw, ignore, tuple(dict.fromkeys(ends)))


def from_dict(raw: dict[str, Any], ignore: Sequence[str] = (), end_ids: tuple[int, ...] = ()) -> Config:
    """A Config from the contents of a config.json. Raises a ValueError that names what is not supported."""
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}")
    if family in gemma.FAMILIES:
        return gemma.from_dict(raw, ignore, end_ids or tuple(as_ids(raw.get("eos_token_id"))))
    refuse_unknown(raw, USED, ignore)
    supports(raw, hidden_act="silu", pretraining_tp=1, rope_interleaved=False)
    width, heads, layers = (need(raw, k) for k in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    # Where a file leaves these out, they mean what transformers' own class of the family means by default.
    kv_heads = need(raw, "num_key_value_heads", 8 if family == "mistral" and "num_key_value_heads" not in raw else heads)
    head_dim = need(raw, "head_dim", 128 if family == "qwen3" and "head_dim" not in raw else width // heads)
    context = need(raw, "max_position_embeddings", {"llama": 2048, "mistral": 131072}.get(family, 32768))
    attention_bias = bool(raw.get("attention_bias", False))
    return Config(
        family=family,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        inner=need(raw, "intermediate_size"),
        vocabulary=need(raw, "vocab_size"),
        context=context,
        rope=rope_of(raw, context),
        norm_eps=number(dict(raw), "rms_norm_eps", 1e-6),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=family != "qwen2" and attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        windows=_windows(raw, family, layers),
        end_ids=end_ids or tuple(as_ids(raw.get("eos_token_id"))),
        next_layers=raw.get("num_nextn_predict_layers") or 0,
    )


def to_dict(config: Config) -> dict[str, Any]:
    """The config.json of a plain Llama-family model, as training writes it."""
    plain = config.family == "llama" and config.rope == Rope(config.rope.theta) and not any(config.windows)
    if not plain or config.qkv_bias != config.output_bias:
        raise ValueError("only plain Llama configs are written")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.inner,
        "vocab_size": config.vocabulary,
        "max_position_embeddings": config.context,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "hidden_act": "silu",
        "eos_token_id": list(config.end_ids) if len(config.end_ids) != 1 else config.end_ids[0],
    }


def _windows(raw: dict[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    """A window a layer. Mistral: the same for all. Qwen: for the layers that layer_types names, or from max_window_layers on."""
    size = raw.get("sliding_window", 4096 if family == "mistral" else None)
    if family == "llama":
        if size is not None or raw.get("layer_types"):
            raise ValueError(f"sliding_window={size!r} and layer_types are not options of the llama family")
        return (None,) * layers
    if family == "mistral":
        return (size,) * layers
    if not raw.get("use_sliding_window", False):
        size = None
    kinds = raw.get("layer_types")
    if kinds is None:
        first = raw.get("max_window_layers", 28)
        return tuple(size if layer >= first else None for layer in range(layers))
    strange = set(kinds) - {"full_attention", "sliding_attention"}
    if strange or len(kinds) != layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for {layers} layers, unknown kinds: {sorted(strange)}")
    return tuple(size if kind == "sliding_attention" else None for kind in kinds)
