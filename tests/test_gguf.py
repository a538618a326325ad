"""GGUF files, written here by the gguf package: tensors, rotary order, config, tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from helpers import reference
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import minifer
from minifer.model.gguf import GGUFFile
from minifer.model.passes import Pass, Span
from minifer.model.tokenizer import from_gguf

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def interleave(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """As llama.cpp's converter does to q and k: (head, half, pair) becomes (head, pair, half)."""
    return rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write(path: Path, model, kind=gguf.GGMLQuantizationType.F32, spoil=None, **more: Any) -> dict[str, np.ndarray]:
    """A llama GGUF of a transformers model. Returns its tensors as they are after quantisation, under Hugging Face names."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.head_dim)
    if config.head_dim != config.hidden_size // config.num_attention_heads:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    letters = [chr(0x100 + at) for at in range(config.vocab_size)]
    writer.add_token_list([*letters[:-1], letters[0] + letters[1]])
    writer.add_token_merges([letters[0] + " " + letters[1]])
    if spoil:
        spoil(writer)
    kept = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        numbers = tensor.numpy()
        if ".layers." in name:
            _, _, layer, *rest, last = name.split(".")
            inner = ".".join(rest)
            if inner in ("self_attn.q_proj", "self_attn.k_proj"):
                numbers = interleave(numbers, config.head_dim)
            stored = f"blk.{layer}.{NAMES[inner]}.{last}"
        else:
            outer, _, last = name.rpartition(".")
            stored = f"{OUTER[outer]}.{last}"
        quantised = kind if numbers.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quantize(numbers, quantised)
        numbers = gguf.dequantize(data, quantised)
        if ".attn_q." in stored or ".attn_k." in stored:
            half = config.head_dim // 2
            numbers = numbers.reshape(-1, half, 2, *numbers.shape[1:]).swapaxes(1, 2).reshape(numbers.shape)
        kept[name] = numbers
        writer.add_tensor(stored, data, raw_dtype=quantised)
    for name, tensor in more.items():
        writer.add_tensor(name.replace("__", "."), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


WRITABLE = [gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")]


@pytest.mark.parametrize("kind", WRITABLE, ids=lambda kind: kind.name)
@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_transformers_on_the_same_dequantised_weights(tmp_path, kind, tied):
    model = reference("llama", tie_word_embeddings=tied, attention_bias=tied, **SIZES)
    kept = write(tmp_path / "m.gguf", model, kind)
    model.load_state_dict({name: torch.from_numpy(numbers.copy()) for name, numbers in kept.items()}, strict=not tied)
    if tied:
        model.tie_weights()
    ours, _ = minifer.load(tmp_path / "m.gguf", torch.float32)
    assert ours.config.tied == tied
    ids = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    with torch.inference_mode():
        wanted = model(ids[None]).logits[0]
        given = ours(Pass(ids, (Span(0, 0, 8),), tuple(range(8)))).logits
    assert (given - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("kind", gguf.quants._type_traits, ids=lambda kind: kind.name)
def test_every_quantisation_is_read_in_slices_as_in_one(tmp_path, kind):
    """Random blocks of every kind that the package can turn into numbers: any box equals that box of the whole."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = 32, 2 * max(block, 64)
    data = np.random.default_rng(0).integers(0, 255, (rows, columns // block * size), dtype=np.uint8)
    model = reference("llama", hidden_size=columns, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, head_dim=8)
    path = tmp_path / "m.gguf"
    write(path, model)
    file = GGUFFile(path)
    with open(tmp_path / "raw", "wb") as raw:
        raw.write(b"head" + data.tobytes())
    file.path = tmp_path / "raw"
    fake = file._tensors["model.layers.0.self_attn.v_proj.weight"]._replace(
        kind=kind, shape=(rows, columns), size=data.nbytes, offset=4
    )
    for name in ("v", "q"):
        file._tensors[f"model.layers.0.self_attn.{name}_proj.weight"] = fake
    with np.errstate(all="ignore"):
        whole = torch.from_numpy(gguf.dequantize(data, kind).astype(np.float32))
        unmixed = whole.view(4, 4, 2, columns).transpose(1, 2).reshape(rows, columns)
        for name, wanted in (("v", whole), ("q", unmixed)):
            part = file.read(f"model.layers.0.self_attn.{name}_proj.weight", ((5, 19), (3, columns - 1)))
            assert torch.equal(part.nan_to_num(7.0), wanted[5:19, 3:-1].nan_to_num(7.0))


def add(key, value):
    return lambda writer: writer.add_string(key, value) if isinstance(value, str) else writer.add_uint32(key, value)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (add("llama.expert_count", 8), "llama.expert_count"),
        (add("llama.attention.key_length", 6), "llama.rope.dimension_count=16 differs from the heads' width 6"),
        (add("llama.rope.scaling.type", "yarn"), "llama.rope.scaling.type='yarn'"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, spoil, message):
    write(tmp_path / "m.gguf", reference("llama", **SIZES), spoil=spoil)
    with pytest.raises(ValueError, match=message):
        GGUFFile(tmp_path / "m.gguf")


def test_a_harmless_option_can_be_passed_over_by_its_name(tmp_path):
    write(tmp_path / "m.gguf", reference("llama", **SIZES), spoil=add("llama.vendor_note", 8))
    with pytest.raises(ValueError, match=r"ignore=\('llama.vendor_note',\)"):
        GGUFFile(tmp_path / "m.gguf")
    assert GGUFFile(tmp_path / "m.gguf", ignore=("llama.vendor_note",)).config.layers == 2


def test_a_factor_alone_means_linear_scaling(tmp_path):
    write(tmp_path / "m.gguf", reference("llama", **SIZES), spoil=lambda writer: writer.add_rope_scaling_factor(4.0))
    assert GGUFFile(tmp_path / "m.gguf").config.rope.kind == "linear"


def test_other_architectures_unknown_tensors_and_no_gguf(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "g.gguf", "gemma")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="architecture 'gemma' is not supported"):
        GGUFFile(tmp_path / "g.gguf")
    write(tmp_path / "m.gguf", reference("llama", **SIZES), blk__0__surprise__weight=np.zeros(3, np.float32))
    with pytest.raises(ValueError, match=r"unknown blk\.0\.surprise\.weight"):
        minifer.load(tmp_path / "m.gguf")
    (tmp_path / "x.gguf").write_bytes(b"no such thing" * 10)
    with pytest.raises(ValueError, match="no readable GGUF"):
        minifer.load(tmp_path / "x.gguf")


def test_a_file_that_ends_too_early(tmp_path):
    path = tmp_path / "m.gguf"
    write(path, reference("llama", **SIZES))
    path.write_bytes(path.read_bytes()[:-6000])
    with pytest.raises(ValueError, match=r"m\.gguf"):
        minifer.load(path)


def test_linear_scaling_and_rotary_factors(tmp_path):
    model = reference("llama", **SIZES)

    def linear(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    write(tmp_path / "l.gguf", model, spoil=linear)
    rope = GGUFFile(tmp_path / "l.gguf").config.rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)
    factors = np.array([1, 1, 1, 2, 4, 8, 8, 8], np.float32)
    write(tmp_path / "f.gguf", model, rope_freqs__weight=factors)
    rope = minifer.load(tmp_path / "f.gguf")[0].config.rope
    assert rope.kind == "factors" and rope.factors == tuple(factors.tolist())


TEXTS = ["def f(x):\n    return x + 1234\n", "It's   a test—naïve 日本 👍", " leading and trailing ", "tab\tand\r\nline", ""]


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_a_byte_level_tokenizer_comes_back_from_its_gguf(pre):
    from tokenizers import Regex

    from minifer.model.tokenizer import PATTERNS

    core = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in ("gpt-2", "smollm"))
    before = {"smollm": [pre_tokenizers.Digits(individual_digits=True)], "gpt-2": []}.get(pre)
    before = [pre_tokenizers.Split(Regex(PATTERNS[pre]), "isolated")] if before is None else before
    core.pre_tokenizer, core.decoder = pre_tokenizers.Sequence([*before, level]), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        TEXTS * 3,
        trainers.BpeTrainer(vocab_size=320, special_tokens=["<s>", "<end>"], initial_alphabet=alphabet, show_progress=False),
    )
    import json

    model = json.loads(core.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in ("<s>", "<end>") else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
    }
    ours = from_gguf(metadata)
    for text in TEXTS:
        assert ours.encode(text, special_tokens=False) == core.encode(text).ids
        assert ours.decode(ours.encode(text)) == text
    if pre == "llama-bpe":  # files of Llama 3 leave it out and mean it
        assert ours.encode("x")[0] == 0
        return
    assert ours.end_ids == (1,) and ours.encode("a<end>b")[1] == 1
    assert ours.encode_chat([{"role": "user", "content": "x"}]) == [0, *ours.encode("x")]
    with_bos = from_gguf(metadata | {"tokenizer.ggml.add_bos_token": True})
    assert with_bos.encode("x") == [0, *ours.encode("x")]
    # The template writes the BOS itself: it must not come twice.
    assert with_bos.encode_chat([{"role": "user", "content": "x"}]) == with_bos.encode("x")


def test_a_sentencepiece_tokenizer_comes_back_from_its_gguf(tmp_path):
    import sentencepiece

    lines = [text for text in TEXTS for text in text.splitlines() if text.strip()] * 20
    options = {"vocab_size": 330, "model_type": "bpe", "byte_fallback": True, "character_coverage": 1.0}
    options |= {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "hard_vocab_limit": False}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(tmp_path / "sp"), minloglevel=2, **options
    )
    piece = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "sp.model"))
    count = piece.vocab_size()
    kinds = [6 if piece.is_byte(i) else 2 if piece.is_unknown(i) else 3 if piece.is_control(i) else 1 for i in range(count)]
    ours = from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": [piece.id_to_piece(i) for i in range(count)],
            "tokenizer.ggml.scores": [piece.get_score(i) for i in range(count)],
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
        }
    )
    for text in [*lines[: len(lines) // 20], "hello unseen ω words", "x  y"]:
        if text:
            assert ours.encode(text) == [1, *piece.encode(text)], text
            assert ours.decode(ours.encode(text)) == text


def test_unknown_tokenizers_are_named():
    with pytest.raises(ValueError, match="'bert' is not supported"):
        from_gguf({"tokenizer.ggml.model": "bert"})
    base = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.merges": []}
    with pytest.raises(ValueError, match="pre='deepseek-llm' is not supported"):
        from_gguf(base | {"tokenizer.ggml.pre": "deepseek-llm"})
    with pytest.raises(ValueError, match="merge 'a b' .* no token 'ab'"):
        from_gguf(base | {"tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": ["a b"]})
