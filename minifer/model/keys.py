"""Reading the keys of a config.json one by one, with nothing ignored.

What a key must be is checked where it is read, and what no key of a family says is an error that names it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from .rotary import Rope

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


def refuse_unknown(raw: dict[str, Any], used: frozenset[str], ignore: Sequence[str]) -> None:
    """Raise a ValueError that names every key that is neither used nor known to be harmless."""
    known = HARMLESS | used | set(ignore)
    # A key that says "no" asks for nothing.
    unknown = {k: v for k, v in raw.items() if k not in known and v is not None and v is not False and not k.startswith("_")}
    if unknown:
        shown = ", ".join(f"{key}={json.dumps(value)[:60]}" for key, value in sorted(unknown.items()))
        raise ValueError(
            f"config.json asks for what minifer does not know: {shown}. If it changes nothing in what the model computes, "
            f"pass ignore=({', '.join(repr(key) for key in sorted(unknown))},)"
        )


def supports(raw: dict[str, Any], **supported: Any) -> None:
    """Raise a ValueError where one of these keys is there and says something else."""
    for key, value in supported.items():
        if raw.get(key) not in (None, value):
            raise ValueError(f"{key}={raw[key]!r} is not supported; supported: {value!r}")


def need(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    value = default if raw.get(key) is None else raw[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config.json: {key} must be a positive integer, it is {value!r}")
    return value


def number(options: dict[str, Any], key: str, default: float | None = None) -> float:
    """Take a number out of options; without a default it must be there."""
    value = options.pop(key, None)
    value = default if value is None else value
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ValueError(f"config.json: {key} must be a number, it is {value!r}")
    return float(value)


def as_ids(value: Any) -> list[int]:
    ids = [] if value is None else list(value) if isinstance(value, list) else [value]
    if not all(isinstance(token, int) for token in ids):
        raise ValueError(f"eos_token_id must be an id or a list of ids, it is {value!r}")
    return ids


def rope_of(raw: dict[str, Any], context: int) -> Rope:
    """Both forms: rope_theta beside rope_scaling, and the newer rope_parameters with theta inside."""
    new, old = raw.get("rope_parameters"), raw.get("rope_scaling")
    if new and old and new != old:
        raise ValueError(f"config.json has two rotary scalings: rope_parameters={new} and rope_scaling={old}")
    options = dict(new or old or {})
    theta = number(options, "rope_theta", number(dict(raw), "rope_theta", 10000.0))
    types = [options.pop("rope_type", None), options.pop("type", None)]
    kind = types[0] or types[1] or "default"
    original = options.get("original_max_position_embeddings")
    if kind == "default":
        options.pop("original_max_position_embeddings", None)
        rope = Rope(theta, factor=number(options, "factor", 1.0))
    elif kind == "linear":
        options.pop("original_max_position_embeddings", None)
        rope = Rope(theta, kind, factor=number(options, "factor"))
    elif kind == "llama3":
        rope = Rope(
            theta,
            kind,
            factor=number(options, "factor"),
            original_context=int(number(options, "original_max_position_embeddings")),
            low_frequency=number(options, "low_freq_factor"),
            high_frequency=number(options, "high_freq_factor"),
        )
    elif kind == "proportional":
        rope = Rope(theta, kind, factor=number(options, "factor", 1.0), share=number(options, "partial_rotary_factor", 1.0))
    elif kind == "yarn":
        options.pop("original_max_position_embeddings", None)
        rope = _yarn(theta, options, context, int(original or context))
    else:
        raise ValueError(f"rotary scaling {kind!r} is not supported; supported: default, linear, llama3, yarn, proportional")
    if options.get("partial_rotary_factor") == 1:
        del options["partial_rotary_factor"]
    left = {key: value for key, value in options.items() if value is not None}
    if left:
        raise ValueError(f"rotary options that minifer does not know: {left}")
    return rope


def _yarn(theta: float, options: dict[str, Any], context: int, original: int) -> Rope:
    factor = number(options, "factor", context / original)
    scales = options.pop("mscale", None), options.pop("mscale_all_dim", None)

    def temperature(scale: float) -> float:  # arXiv 2309.00071 §3.4
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    usual = temperature(scales[0]) / temperature(scales[1]) if scales[0] and scales[1] else temperature(1.0)
    return Rope(
        theta,
        "yarn",
        factor=factor,
        original_context=original,
        beta_fast=number(options, "beta_fast", 32.0),
        beta_slow=number(options, "beta_slow", 1.0),
        attention_factor=number(options, "attention_factor", usual),
        truncate=bool(options.pop("truncate", True)),
    )
