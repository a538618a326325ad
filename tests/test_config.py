"""config.json: every option is read or refused by name."""

from __future__ import annotations

import json

import pytest
from helpers import plain_model

from minifer.model.families import from_dict, read_config, to_dict

LLAMA = {
    "model_type": "llama",
    "hidden_size": 20,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 10,
}
# What the folder of a real SmolLM2 says beyond the sizes.
REAL = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "hidden_act": "silu",
    "initializer_range": 0.041666666666666664,
    "is_llama_config": True,
    "mlp_bias": False,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rope_interleaved": False,
    "rope_scaling": None,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "transformers_version": "4.42.3",
    "use_cache": True,
}


def test_a_real_file_is_read():
    sizes = LLAMA | {"hidden_size": 24, "num_key_value_heads": 2}
    config = from_dict(sizes | REAL | {"eos_token_id": 2, "rope_theta": 100000, "tie_word_embeddings": True})
    assert (config.kv_heads, config.head_dim, config.rope.theta, config.tied, config.end_ids) == (2, 6, 100000.0, True, (2,))


@pytest.mark.parametrize(("given", "wanted"), [({}, 6), ({"head_dim": None}, 6), ({"head_dim": 8}, 8)])
def test_hf_07_head_dim_of_the_file_or_derived(given, wanted):
    assert from_dict(LLAMA | {"hidden_size": 24} | given).head_dim == wanted


def test_hf_07_widths_that_are_not_heads_times_head_dim(checkpoint):
    model = plain_model(checkpoint("llama-head-dim"))
    attention = model.layers[0].attention
    assert attention.q.weight.shape == (32, 20) and attention.o.weight.shape == (20, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported; supported: llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"pretraining_tp": 2}, "pretraining_tp=2"),
        ({"rope_interleaved": True}, "rope_interleaved=True"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({"sliding_window": 128}, "sliding_window=128"),
        ({"num_key_value_heads": 3}, "4 query heads are no multiple of 3 key/value heads"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"hidden_size": None}, "hidden_size must be a positive integer, it is None"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor must be a number, it is None"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "original_max_position_embeddings must be a number"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_parameters": {"rope_type": "default"}},
            "two rotary scalings",
        ),
        ({"embedding_multiplier": 0.0}, "embedding_multiplier=0.0"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads must be a positive integer, it is '2'"),
        ({"num_key_value_heads": -2}, "num_key_value_heads must be a positive integer"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be an id"),
    ],
)
def test_what_is_not_supported_is_named(change, message):
    with pytest.raises(ValueError, match=message.replace("(", "\\(")):
        from_dict(LLAMA | {"head_dim": 6} | change)


def test_a_harmless_key_can_be_passed_over():
    from_dict(LLAMA | {"head_dim": 6, "vendor_note": "hello"}, ignore=("vendor_note",))
    with pytest.raises(ValueError, match="ignore=\\('vendor_note',\\)"):
        from_dict(LLAMA | {"head_dim": 6, "vendor_note": "hello"})


def test_windows_of_each_family():
    sizes = LLAMA | {"head_dim": 6, "num_hidden_layers": 4, "num_key_value_heads": 2}
    assert from_dict(sizes | {"model_type": "mistral", "sliding_window": 4}).windows == (4,) * 4
    assert from_dict(sizes | {"model_type": "mistral", "sliding_window": None}).windows == (None,) * 4
    assert from_dict(sizes | {"model_type": "mistral"}).windows == (4096,) * 4  # what the file means by silence
    qwen = sizes | {"model_type": "qwen2", "sliding_window": 4, "max_window_layers": 3}
    assert from_dict(qwen).windows == (None,) * 4
    assert from_dict(qwen | {"use_sliding_window": True}).windows == (None, None, None, 4)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert from_dict(qwen | {"use_sliding_window": True, "layer_types": kinds}).windows == (4, None, 4, None)
    with pytest.raises(ValueError, match="chunked_attention"):
        from_dict(qwen | {"layer_types": ["chunked_attention"] * 4})


def test_biases_of_each_family():
    sizes = LLAMA | {"head_dim": 6, "num_key_value_heads": 2}
    qwen2, qwen3 = (from_dict(sizes | {"model_type": family}) for family in ("qwen2", "qwen3"))
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.qk_norm) == (False, False, True)
    llama = from_dict(sizes | {"attention_bias": True, "mlp_bias": True})
    assert llama.qkv_bias and llama.output_bias and llama.mlp_bias


def test_dec_10_end_ids_of_both_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"head_dim": 6, "eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
    assert read_config(tmp_path).end_ids == (2, 9)


def test_no_config(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no config.json"):
        read_config(tmp_path)


def test_written_and_read_again():
    config = from_dict(LLAMA | {"head_dim": 6, "num_key_value_heads": 2, "tie_word_embeddings": True, "eos_token_id": 0})
    assert from_dict(to_dict(config)) == config
    with pytest.raises(ValueError, match="only plain Llama"):
        to_dict(from_dict(LLAMA | {"head_dim": 6, "model_type": "qwen2"}))


def test_golden_sizes():
    """Parameters and cache bytes of published models."""
    llama = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    llama |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}
    config = from_dict(llama)
    assert round(config.parameters / 1e9, 3) == 8.030 and 2 * config.kv_elements == 131_072
    qwen = {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "head_dim": 128}
    qwen |= {"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936, "tie_word_embeddings": True}
    config = from_dict(qwen)
    assert round(config.parameters / 1e9, 3) == 0.596 and 2 * config.kv_elements == 114_688


@pytest.mark.parametrize(("text", "message"), [("{", "no readable JSON"), ("[]", "no JSON object but a list")])
def test_a_broken_file_is_named(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=f"config.json .*{message}"):
        read_config(tmp_path)
