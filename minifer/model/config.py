"""What a model is: the numbers of a Hugging Face config.json, under plain names, with nothing ignored.

Each family differs from Llama in a few options, so one Config holds them all and the transformer reads only this. A key
that minifer does not know is an error that names it: a model that runs with one of its options left out gives fluent,
wrong text and nobody notices.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .rotary import Rope

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

# Keys that change nothing in what the model computes: bookkeeping, training, generation defaults, other frameworks' notes.
HARMLESS = frozenset(
    """
    _attn_implementation_autoset _commit_hash _name_or_path add_cross_attention architectures attention_dropout auto_map
    bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id
    diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty
    finetuning_task forced_bos_token_id forced_eos_token_id id2label initializer_range is_decoder is_encoder_decoder
    is_llama_config label2id length_penalty max_length min_length model_type no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_scores pad_token_id prefix problem_type pruned_heads
    remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens
    task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript
    transformers_version transformers.js_config typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache
    """.split()
)
USED = frozenset(
    """
    attention_bias head_dim hidden_act hidden_size intermediate_size layer_types max_position_embeddings max_window_layers
    mlp_bias num_attention_heads num_hidden_layers num_key_value_heads pretraining_tp rms_norm_eps rope_interleaved
    rope_parameters rope_scaling rope_theta sliding_window tie_word_embeddings use_sliding_window vocab_size
    """.split()
)


@dataclass(frozen=True)
class Config:
    """A decoder-only transformer. Widths are numbers of elements; `windows` has an entry a layer (None: sees everything)."""

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

    def __post_init__(self) -> None:
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.layers)
        if len(self.windows) != self.layers:
            raise ValueError(f"{len(self.windows)} windows for {self.layers} layers")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads are no multiple of {self.kv_heads} key/value heads")
        if self.head_dim % 2:
            raise ValueError(f"rotary positions turn pairs: head_dim {self.head_dim} is odd")

    @property
    def parameters(self) -> int:
        """Number of weights, a tied head counted once. Norms and biases are left out (< 0.1 %)."""
        attention = 2 * self.width * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.width * self.inner) + self.vocabulary * self.width * (2 - self.tied)

    @property
    def kv_elements(self) -> int:
        """Elements of keys and values that one token adds to the cache, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises a ValueError that names the file."""
    try:
        held = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no readable JSON: {error}") from None
    if not isinstance(held, dict):
        raise ValueError(f"{path} holds no JSON object but a {type(held).__name__}")
    return held


def read_config(folder: Path, ignore: Sequence[str] = ()) -> Config:
    """The Config of a Hugging Face folder. `ignore`: keys of config.json that the caller knows to be harmless."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no config.json")
    raw = read_json(path)
    ends = _as_ids(raw.get("eos_token_id"))
    generation = folder / "generation_config.json"
    if generation.is_file():
        ends += _as_ids(read_json(generation).get("eos_token_id"))
    return from_dict(raw, ignore, tuple(dict.fromkeys(ends)))


def from_dict(raw: dict[str, Any], ignore: Sequence[str] = (), end_ids: tuple[int, ...] = ()) -> Config:
    """A Config from the contents of a config.json. Raises a ValueError that names what is not supported."""
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}")
    _refuse_unknown(raw, ignore)
    width, heads, layers = (_need(raw, k) for k in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    # Where a file leaves these out, they mean what transformers' own class of the family means by default.
    kv_heads = _need(raw, "num_key_value_heads", 8 if family == "mistral" and "num_key_value_heads" not in raw else heads)
    head_dim = _need(raw, "head_dim", 128 if family == "qwen3" and "head_dim" not in raw else width // heads)
    context = _need(raw, "max_position_embeddings", {"llama": 2048, "mistral": 131072}.get(family, 32768))
    attention_bias = bool(raw.get("attention_bias", False))
    return Config(
        family=family,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        inner=_need(raw, "intermediate_size"),
        vocabulary=_need(raw, "vocab_size"),
        context=context,
        rope=_rope(raw, context),
        norm_eps=_number(dict(raw), "rms_norm_eps", 1e-6),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=family != "qwen2" and attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        windows=_windows(raw, family, layers),
        end_ids=end_ids or tuple(_as_ids(raw.get("eos_token_id"))),
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


def _refuse_unknown(raw: dict[str, Any], ignore: Sequence[str]) -> None:
    known = HARMLESS | USED | set(ignore)
    # A key that says "no" asks for nothing.
    unknown = {k: v for k, v in raw.items() if k not in known and v is not None and v is not False and not k.startswith("_")}
    if unknown:
        shown = ", ".join(f"{key}={json.dumps(value)[:60]}" for key, value in sorted(unknown.items()))
        raise ValueError(
            f"config.json asks for what minifer does not know: {shown}. If it changes nothing in what the model computes, "
            f"pass ignore=({', '.join(repr(key) for key in sorted(unknown))},)"
        )
    for key, supported in (("hidden_act", "silu"), ("pretraining_tp", 1), ("rope_interleaved", False)):
        if raw.get(key) not in (None, supported):
            raise ValueError(f"{key}={raw[key]!r} is not supported; supported: {supported!r}")


def _need(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    value = default if raw.get(key) is None else raw[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config.json: {key} must be a positive integer, it is {value!r}")
    return value


def _number(options: dict[str, Any], key: str, default: float | None = None) -> float:
    """Take a number out of options; without a default it must be there."""
    value = options.pop(key, None)
    value = default if value is None else value
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ValueError(f"config.json: {key} must be a number, it is {value!r}")
    return float(value)


def _as_ids(value: Any) -> list[int]:
    ids = [] if value is None else list(value) if isinstance(value, list) else [value]
    if not all(isinstance(token, int) for token in ids):
        raise ValueError(f"eos_token_id must be an id or a list of ids, it is {value!r}")
    return ids


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


def _rope(raw: dict[str, Any], context: int) -> Rope:
    """Both forms: rope_theta beside rope_scaling, and the newer rope_parameters with theta inside."""
    new, old = raw.get("rope_parameters"), raw.get("rope_scaling")
    if new and old and new != old:
        raise ValueError(f"config.json has two rotary scalings: rope_parameters={new} and rope_scaling={old}")
    options = dict(new or old or {})
    theta = _number(options, "rope_theta", _number(dict(raw), "rope_theta", 10000.0))
    types = [options.pop("rope_type", None), options.pop("type", None)]
    kind = types[0] or types[1] or "default"
    original = options.get("original_max_position_embeddings")
    if kind == "default":
        options.pop("original_max_position_embeddings", None)
        rope = Rope(theta, factor=_number(options, "factor", 1.0))
    elif kind == "linear":
        options.pop("original_max_position_embeddings", None)
        rope = Rope(theta, kind, factor=_number(options, "factor"))
    elif kind == "llama3":
        rope = Rope(
            theta,
            kind,
            factor=_number(options, "factor"),
            original_context=int(_number(options, "original_max_position_embeddings")),
            low_frequency=_number(options, "low_freq_factor"),
            high_frequency=_number(options, "high_freq_factor"),
        )
    elif kind == "yarn":
        options.pop("original_max_position_embeddings", None)
        rope = _yarn(theta, options, context, int(original or context))
    else:
        raise ValueError(f"rotary scaling {kind!r} is not supported; supported: default, linear, llama3, yarn")
    if options.get("partial_rotary_factor") == 1:
        del options["partial_rotary_factor"]
    left = {key: value for key, value in options.items() if value is not None}
    if left:
        raise ValueError(f"rotary options that minifer does not know: {left}")
    return rope


def _yarn(theta: float, options: dict[str, Any], context: int, original: int) -> Rope:
    factor = _number(options, "factor", context / original)
    scales = options.pop("mscale", None), options.pop("mscale_all_dim", None)

    def temperature(scale: float) -> float:  # arXiv 2309.00071 §3.4
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    usual = temperature(scales[0]) / temperature(scales[1]) if scales[0] and scales[1] else temperature(1.0)
    return Rope(
        theta,
        "yarn",
        factor=factor,
        original_context=original,
        beta_fast=_number(options, "beta_fast", 32.0),
        beta_slow=_number(options, "beta_slow", 1.0),
        attention_factor=_number(options, "attention_factor", usual),
        truncate=bool(options.pop("truncate", True)),
    )
