"""DeepSeek's module against a short reference of the published layer, and from a checkpoint that holds one."""

from __future__ import annotations

import json

import pytest
import torch
from helpers import drafts_of, ids_of, naive_greedy, plain_model, trained_kind
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from minifer import drafters, mtp
from minifer.model import weights
from minifer.model.passes import Pass, Span

PROMPTS = [[3], [1, 4, 1, 5, 9, 2, 6, 5, 3], [9, 2, 6, 5, 3]]
EPS = 1e-6


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight


def turned(x: torch.Tensor) -> torch.Tensor:
    """[H, T, h] by its positions, as complex numbers: an own way of writing the rotation."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    pairs = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([pairs.real, pairs.imag], -1)


def reference(w, c, tokens: torch.Tensor, features: torch.Tensor, swap: bool = False) -> torch.Tensor:
    """The published module over whole texts: embeddings [T, D] of tokens 1..T, features [T, D] of 0..T-1 -> features [T, D]."""
    halves = [norm(tokens, w["enorm"]), norm(features, w["hnorm"])]
    x = torch.cat(halves[::-1] if swap else halves, -1) @ w["eh_proj"].t()
    y = norm(x, w["input_layernorm"])
    heads = {part: (y @ w[f"self_attn.{part}_proj"].t()).unflatten(-1, (-1, c.head_dim)).transpose(0, 1) for part in "qkv"}
    q, k, v = turned(heads["q"]), turned(heads["k"]), heads["v"]
    k, v = (part.repeat_interleave(c.heads // c.kv_heads, 0) for part in (k, v))
    seen = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    scores = (q @ k.transpose(1, 2) / c.head_dim**0.5).masked_fill(~seen, float("-inf")).softmax(-1)
    x = x + (scores @ v).transpose(0, 1).flatten(1) @ w["self_attn.o_proj"].t()
    y = norm(x, w["post_attention_layernorm"])
    x = x + (F.silu(y @ w["mlp.gate_proj"].t()) * (y @ w["mlp.up_proj"].t())) @ w["mlp.down_proj"].t()
    return norm(x, w["shared_head.norm"])


@pytest.fixture(scope="module")
def target(checkpoint):
    return plain_model(checkpoint("llama"))


def logits_by_depth(drafter, target, text: list[int]) -> list[torch.Tensor]:
    """[depth]: the logits [V] that each step of one draft had."""
    seen = []

    class Watched(type(drafter)):
        def step(self, *given):
            logits, features = super().step(*given)
            seen.append(logits[0])
            return logits, features

    other = Watched.__new__(Watched)
    other.__dict__.update(drafter.__dict__)
    drafts_of(target, other, 3, [text])
    return seen


def test_spec_12_order_and_states(target):
    """Drafts of three tokens against the reference; halves the other way round would be seen."""
    drafter = trained_kind("deepseek", target, [PROMPTS[1]])
    named = weights.collect(drafter.module, torch.float32)
    prefix = f"model.layers.{target.config.layers}."
    w = {name.removeprefix(prefix).removesuffix(".weight"): value for name, value in named.items()}
    text = [*PROMPTS[1], 7]
    found = logits_by_depth(drafter, target, text)
    for swap in (False, True):
        pass_ = Pass(torch.tensor(text[:-1]), (Span(0, 0, len(text) - 1),), tuple(range(len(text) - 1)))
        features, tokens = target(pass_).hidden, text[1:]
        for depth in range(3):
            out = reference(w, target.config, target.embed(torch.tensor(tokens)), features, swap)
            logits = target.logits(out[-1:])[0]
            distance = float((logits - found[depth]).abs().max())
            assert distance > 1e-2 if swap else distance < 1e-4, (depth, swap, distance)
            tokens = [*tokens, int(found[depth].argmax())]
            features = torch.cat([features, out[-1:]])


@pytest.fixture
def with_module(checkpoint, tmp_path, target):
    """A checkpoint with one module behind its layers, and copies of embedding and head in it, as DeepSeek publishes them."""
    source = checkpoint("llama")
    tensors = load_file(source / "model.safetensors")
    said = [prompt + naive_greedy(target, prompt, 12) for prompt in PROMPTS]
    tensors |= weights.collect(trained_kind("deepseek", target, said).module, torch.float32)
    tensors |= {
        "model.layers.5.embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.5.shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    about = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(about | {"num_nextn_predict_layers": 1}))
    return tmp_path


def test_spec_25_one_module_drafts_any_length(with_module, target):
    model = plain_model(with_module)
    model.name = str(with_module)
    drafter = drafters.load("deepseek", model)
    said = [naive_greedy(target, prompt, 12) for prompt in PROMPTS]
    for length in (1, 2, 4):
        completions = mtp.generate(model, PROMPTS, drafter, length, 12)
        assert ids_of(completions) == said
        if length == 1:  # a round gives two tokens where its one draft is kept
            assert {round.tokens for one in completions for round in one.rounds} == {1, 2}
    about = json.loads((with_module / "config.json").read_text())
    (with_module / "config.json").write_text(json.dumps(about | {"num_nextn_predict_layers": 2}))
    model = plain_model(with_module)
    model.name = str(with_module)
    with pytest.raises(ValueError, match="2 modules for further tokens; 1 is supported, applied again"):
        drafters.load("deepseek", model)


def test_a_checkpoint_without_what_it_promises(with_module):
    tensors = load_file(with_module / "model.safetensors")
    del tensors["model.layers.5.hnorm.weight"]
    save_file(tensors, with_module / "model.safetensors", {"format": "pt"})
    model = plain_model(with_module)
    model.name = str(with_module)
    with pytest.raises(ValueError, match="missing model.layers.5.hnorm.weight"):
        drafters.load("deepseek", model)
