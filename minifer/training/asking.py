"""The student that asks its target's cache: Gemma's drafter, trained as it is used.

A round stands at the last decided token, place i of an answer: it sees the target's keys of the places before i, starts from the
target's hidden state at i - 1, and drafts what follows i, i + 1, ... All its steps ask from place i, so every place of every answer
is a round, and a depth of all rounds is one pass in which a place sees what is strictly before it.

Letters: E rounds of all answers, T of one, H query and K key/value heads, h width of a head, D width, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from ..drafters.chained import Shared
from ..drafters.gemma import Gemma
from ..model import weights
from ..model.gemma import from_dict
from ..model.passes import Pass, Span
from ..model.transformer import Transformer
from .answers import Answer
from .lesson import DeepStudent, Lesson, Recipe, matrix


class GemmaLayers(DeepStudent):
    """recipe.layers layers of recipe.width, in the layout of Gemma 4's assistants, for a target whose layers are alike."""

    def __init__(self, recipe: Recipe, target: Transformer, said: Sequence[Answer]) -> None:
        c = target.config
        self.about = {
            "model_type": "gemma4_assistant",
            "backbone_hidden_size": c.width,
            "text_config": {
                "model_type": "gemma4_text",
                "hidden_size": recipe.width,
                "intermediate_size": recipe.inner,
                "num_hidden_layers": recipe.layers,
                "num_attention_heads": 2 * c.kv_heads,
                "num_key_value_heads": c.kv_heads,
                "head_dim": c.head_dim,
                "per_layer_config": {},
                "layer_types": ["full_attention"] * recipe.layers,
                "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": c.rope.theta}},
                "max_position_embeddings": c.context,
                "num_kv_shared_layers": recipe.layers,
                "hidden_size_per_layer_input": 0,
                "vocab_size": c.vocabulary,
                "vocab_size_per_layer_input": 0,
                "rms_norm_eps": c.norm_eps,
            },
        }
        super().__init__(recipe, Gemma(Shared(target, trains=True), from_dict(self.about, drafter=True)))
        self.reads = (c.layers - 1,)
        table = matrix(self.module.head)  # a table, though two-dimensional, is not Muon's
        self.inside = [parameter for parameter in self.module.parameters() if parameter.dim() == 2 and parameter is not table]
        with torch.no_grad():
            for layer in self.module.each:  # scores are products of normed queries and keys as they are: at first small ones
                layer.attention.q_norm.weight.fill_(c.head_dim**-0.5)

    def judged(self, lesson: Lesson) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        deep, ids = self.recipe.unrolled, lesson.pass_.ids
        rounds: list[int] = []  # flat places of the last decided tokens
        goals: list[int] = []  # of each, where in the lesson's logits its first goal stands
        spans: list[Span] = []
        at = place = 0
        for span, size in zip(lesson.pass_.spans, lesson.sizes):
            first = max(1, span.count - size)  # the prompt's last token, or the second of all
            last = span.count - deep
            if first <= last:
                rounds += range(at + first, at + last + 1)
                goals += range(place + first - (span.count - size), place + last + 1 - (span.count - size))
                spans.append(Span(span.row, first, last + 1 - first))
            at, place = at + span.count, place + size
        hidden = self._before(lesson, rounds)
        for depth in range(deep):
            logits, hidden = self._step(lesson, Pass(ids[[one + depth for one in rounds]], tuple(spans), ()), hidden)
            yield depth, logits, lesson.logits[[goal + depth for goal in goals]].softmax(-1)

    def _before(self, lesson: Lesson, rounds: list[int]) -> torch.Tensor:
        """The target's last hidden states at the tokens before these [E, D]."""
        [layer] = self.reads
        with torch.no_grad():
            return lesson.target.head.norm(lesson.states[layer][[one - 1 for one in rounds]]).float()

    def _step(self, lesson: Lesson, pass_: Pass, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One depth of all rounds: logits [E, V] and the next hidden states [E, D]."""
        module = self.module
        x, offsets = module.enter(pass_.ids, hidden), {span.row: at for span, at in zip(lesson.pass_.spans, lesson.pass_.offsets)}
        for layer, source in zip(module.each, module.sources):
            q, _, _ = layer.attention.project(layer.attention_norm(x), pass_)
            k, v = lesson.pass_.shared["keys and values", source]
            parts = []
            for span, at in zip(pass_.spans, pass_.offsets):
                row, end = offsets[span.row], span.start + span.count - 1
                parts.append(
                    _earlier(q[at : at + span.count], k[row : row + end], v[row : row + end], span.start, layer.attention.scale)
                )
            x = layer.after(x, layer.attention.o(torch.cat(parts).flatten(1)), pass_)
        x = module.norm(x)
        return module.logits(x), module.post(x)

    def save(self, folder: Path, lessons: Iterable[Lesson]) -> dict:
        (folder / "config.json").write_text(json.dumps(self.about, indent=1) + "\n")
        save_file(weights.collect(self.module, torch.bfloat16), folder / "model.safetensors", {"format": "pt"})
        return {"held_out_accuracy_by_depth": self.accuracy(lessons)}


def _earlier(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, scale: float | None) -> torch.Tensor:
    """Queries [T, H, h] of places first, first + 1, ... over the keys [S, K, h] of places 0, 1, ...: those strictly before each."""
    seen = torch.arange(len(k)) < torch.arange(first, first + len(q))[:, None]
    q, k, v = (x.transpose(0, 1)[None].to(q.dtype) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)[0].transpose(0, 1)
