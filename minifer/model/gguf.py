"""A GGUF file: config, tensors and tokenizer in one, the tensors usually quantised.

The `gguf` package reads the header and turns quantised blocks into float32. What is done here: names become Hugging
Face's, and the rows of q and k go back to their order. llama.cpp pairs neighbouring rows of a head for the rotary
embedding where Hugging Face pairs row i with row i + h/2, so its converter interleaves the two halves of each head:

    Hugging Face    a0 a1 a2 a3 b0 b1 b2 b3        (pairs a_i, b_i)
    GGUF            a0 b0 a1 b1 a2 b2 a3 b3
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch

from .config import Config
from .rotary import Rope
from .weights import Box

OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
INNER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
KNOWN = frozenset(
    """
    block_count context_length embedding_length feed_forward_length vocab_size attention.head_count attention.head_count_kv
    attention.layer_norm_rms_epsilon attention.key_length attention.value_length rope.freq_base rope.dimension_count
    rope.scaling.type rope.scaling.factor rope.scaling.original_context_length rope.scaling.attn_factor rope.scaling.finetuned
    """.split()
)


class Place(NamedTuple):
    """Where a tensor lies in the file, and how. size, offset: in bytes."""

    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    size: int
    offset: int


class GGUFFile:
    """config, metadata and tensors of a llama-architecture GGUF. shapes: {Hugging Face name: shape}."""

    def __init__(self, path: Path, ignore: Sequence[str] = ()) -> None:
        if not path.is_file():
            raise FileNotFoundError(f"no file {path}")
        try:
            reader = gguf.GGUFReader(str(path))
        except (ValueError, IndexError) as error:
            raise ValueError(f"{path} is no readable GGUF file: {error}") from None
        self.path = path
        self.metadata: dict[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
        # Only where tensors lie is kept: the reader maps the whole file and holds an object for every token's text.
        self._tensors = {
            _hugging_face_name(tensor.name): Place(
                tensor.tensor_type, tuple(int(n) for n in reversed(tensor.shape)), int(tensor.n_bytes), int(tensor.data_offset)
            )
            for tensor in reader.tensors
        }
        del reader
        factors = self._tensors.pop("rope_freqs.weight", None)
        self.config = _config(self.metadata, self._tensors.keys(), ignore)
        self.shapes = {name: place.shape for name, place in self._tensors.items()}
        if factors is not None:  # Llama 3.1: how much slower each pair turns, as numbers
            self._tensors["rope_freqs.weight"] = factors
            numbers = self.read("rope_freqs.weight", ((0, factors.shape[0]),))
            self.config = _with_factors(self.config, tuple(numbers.tolist()))
            del self._tensors["rope_freqs.weight"]

    def read(self, name: str, box: Box) -> torch.Tensor:
        """A box of a tensor, dequantised to float32. Only the rows of the box are read from the file."""
        first, last = box[0]
        if ".self_attn.q_proj." in name or ".self_attn.k_proj." in name:
            rows = _interleaved_rows(first, last, self.config.head_dim)
            low = int(rows.min())
            part = self._rows(name, low, int(rows.max()) + 1)[rows - low]
        else:
            part = self._rows(name, first, last)
        return torch.from_numpy(part[(slice(None), *(slice(*bounds) for bounds in box[1:]))])

    def _rows(self, name: str, first: int, last: int) -> np.ndarray:
        """Rows first:last of a tensor, float32. Read with plain file reads: a mapping would keep the file in memory."""
        place = self._tensors[name]
        row_bytes = place.size // place.shape[0]
        data = np.fromfile(self.path, np.uint8, (last - first) * row_bytes, offset=place.offset + first * row_bytes)
        if len(data) != (last - first) * row_bytes:
            raise ValueError(f"{self.path} is cut off: {name} ends before its row {last}")
        try:
            numbers = gguf.dequantize(data.reshape(last - first, row_bytes), place.kind)
        except NotImplementedError:
            raise ValueError(f"{name} is stored as {place.kind.name}, which the gguf package cannot read") from None
        return numbers.reshape(last - first, *place.shape[1:])


def _interleaved_rows(first: int, last: int, head_dim: int) -> np.ndarray:
    """The GGUF rows of Hugging Face's rows first:last of q or k."""
    row = np.arange(first, last)
    head, place = row // head_dim, row % head_dim
    half, pair = place // (head_dim // 2), place % (head_dim // 2)
    return head * head_dim + 2 * pair + half


def _hugging_face_name(name: str) -> str:
    """Names that are not known stay as they are, and are then reported as unknown."""
    inner = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if inner and inner[2] in INNER:
        return f"model.layers.{inner[1]}.{INNER[inner[2]]}.{inner[3]}"
    return OUTER.get(name, name)


def _config(metadata: dict[str, Any], tensors: Collection[str], ignore: Sequence[str]) -> Config:
    """The header's numbers; whether there is a head of its own, and biases, only the tensors tell."""
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ValueError(f"GGUF architecture {architecture!r} is not supported; supported: llama")
    options = {key[6:]: value for key, value in metadata.items() if key.startswith("llama.")}
    passed = {key.removeprefix("llama.") for key in ignore}
    unknown = [f"llama.{key}" for key in sorted(options.keys() - KNOWN - passed) if options[key] not in (0, "")]
    if unknown:
        raise ValueError(
            f"the GGUF file asks for what minifer does not know: {', '.join(unknown)}. If it changes nothing in what the model "
            f"computes, pass ignore={tuple(unknown)}"
        )
    needed = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count")
    for key in (*needed, "attention.layer_norm_rms_epsilon"):
        if not isinstance(options.get(key), (int, float)):
            raise ValueError(f"the GGUF file must say llama.{key} as a number, it says {options.get(key)!r}")
    heads, width = options["attention.head_count"], options["embedding_length"]
    head_dim = options.get("attention.key_length", width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if options.get(key, head_dim) != head_dim:
            raise ValueError(f"llama.{key}={options[key]} differs from the heads' width {head_dim}, which is not supported")
    end = metadata.get("tokenizer.ggml.eos_token_id")
    ends = [metadata[key] for key in ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id") if key in metadata]
    return Config(
        family="llama",
        layers=options["block_count"],
        width=width,
        heads=heads,
        kv_heads=options.get("attention.head_count_kv", heads),
        head_dim=head_dim,
        inner=options["feed_forward_length"],
        vocabulary=options.get("vocab_size") or len(metadata["tokenizer.ggml.tokens"]),
        context=options["context_length"],
        rope=_rope(options),
        norm_eps=options["attention.layer_norm_rms_epsilon"],
        tied="lm_head.weight" not in tensors,
        qkv_bias="model.layers.0.self_attn.q_proj.bias" in tensors,
        output_bias="model.layers.0.self_attn.o_proj.bias" in tensors,
        mlp_bias="model.layers.0.mlp.gate_proj.bias" in tensors,
        end_ids=tuple(dict.fromkeys([end, *ends] if end is not None else ends)),
    )


def _rope(options: dict[str, Any]) -> Rope:
    theta, factor = float(options.get("rope.freq_base", 10000.0)), float(options.get("rope.scaling.factor", 1.0))
    kind = options.get("rope.scaling.type", "linear" if factor != 1 else "none")  # as llama.cpp takes it
    if options.get("rope.scaling.attn_factor", 1.0) != 1.0:
        raise ValueError(f"llama.rope.scaling.attn_factor={options['rope.scaling.attn_factor']} is not supported")
    if kind == "none":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", factor=factor)
    raise ValueError(f"llama.rope.scaling.type={kind!r} is not supported in GGUF files; supported: none, linear")


def _with_factors(config: Config, factors: tuple[float, ...]) -> Config:
    if config.rope.kind != "default":
        raise ValueError(f"the GGUF file holds both rotary factors and {config.rope.kind} scaling")
    return replace(config, rope=Rope(config.rope.theta, "factors", factors=factors))
