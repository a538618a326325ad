"""The students that are fed their own features: EAGLE's layer and DeepSeek's module. They are trained as they are used.

While it drafts, a module sees features of the target only up to the last decided token, and behind that its own. So it is run
several times over each answer. At depth 0 every entry has the target's feature. At depth k entry i starts from what depth k - 1
made at entry i - 1, and sees what a k-th drafted token would see:

    depth 2, entry 5:    depth-0 entries 0 1 2 3,  depth-1 entry 4,  itself

which is a band of keys from the diagonals of the depths above. All depths of all answers are trained in one step, each towards
the target's distribution after its token (EAGLE-3 calls this training-time test; arXiv 2503.01840).

Letters: E entries of all answers, T of one, H query and K key/value heads, h width of a head, D width, U drafted ids.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from ..drafters.chained import Shared
from ..drafters.deepseek import DeepSeek
from ..drafters.eagle import Eagle
from ..drafters.recurrent import Module
from ..model import weights
from ..model.passes import Pass, Span
from ..model.transformer import Transformer
from .answers import Answer
from .lesson import DeepStudent, Lesson, Recipe, matrix

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q [E, H, h], k and v [E, K, h] of one depth


class Unrolled(DeepStudent):
    """A module that is fed its own features."""

    module: Module

    def __init__(self, recipe: Recipe, module: Module, reads: Sequence[int]) -> None:
        super().__init__(recipe, module)
        self.reads = tuple(reads)
        self.inside = [parameter for parameter in module.parameters() if parameter.dim() == 2]

    def judged(self, lesson: Lesson) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        states = torch.cat([lesson.states[layer] for layer in self.reads], -1)
        entries, places = pairs(lesson, self.recipe.unrolled - 1)  # the same at all depths: those that mean something at the last
        with torch.no_grad():
            goals = self.module.shared.logits(lesson.hidden[places]).softmax(-1)
        for depth, features in unroll(self.module, lesson, states, self.recipe.unrolled):
            yield depth, self.module.logits(features[entries]), goals

    def save(self, folder: Path, lessons: Iterable[Lesson]) -> dict:
        shared, config = self.module.shared, self.module.shared.target.config
        about = {"drafter": self.recipe.kind, "width": config.width, "vocabulary": config.vocabulary, "reads": list(self.reads)}
        tensors = weights.collect(self.module, torch.bfloat16)
        if shared.ids is not None:
            tensors["ids"], about["drafted"] = shared.ids.to(torch.int32), len(shared.ids)
        (folder / "drafter.json").write_text(json.dumps(about | self.options()) + "\n")
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return {"held_out_accuracy_by_depth": self.accuracy(lessons)}

    def options(self) -> dict:
        """What drafter.json says beside what all say."""
        return {}


class EagleLayer(Unrolled):
    """Reads a low, a middle and the last layer. It begins as the target's own last feature."""

    def __init__(self, recipe: Recipe, target: Transformer, said: Sequence[Answer]) -> None:
        layers = target.config.layers
        reads = sorted({min(1, layers - 1), layers // 2, layers - 1})
        module = Eagle(Shared(target, most_said(said, target, recipe.drafted), trains=True), len(reads))
        super().__init__(recipe, module, reads)
        width = target.config.width
        with torch.no_grad():
            matrix(module.fuse)[:, -width:] = torch.eye(width)
            module.norm.weight.copy_(target.head.norm.weight)

    def options(self) -> dict:
        return {"size": self.recipe.nodes, "beam": 4}


class DeepSeekModule(Unrolled):
    """Reads the last layer; its target stays as it is."""

    def __init__(self, recipe: Recipe, target: Transformer, said: Sequence[Answer]) -> None:
        module = DeepSeek(Shared(target, most_said(said, target, recipe.drafted), trains=True))
        super().__init__(recipe, module, [target.config.layers - 1])
        width = target.config.width
        with torch.no_grad():
            matrix(module.eh_proj)[:, width:] = torch.eye(width)
            module.norm.weight.copy_(target.head.norm.weight)


def most_said(said: Sequence[Answer], target: Transformer, most: int) -> torch.Tensor | None:
    """The ids that stand most often in these answers, in rising order; None if all may be drafted."""
    if most >= target.config.vocabulary:
        return None
    counts = Counter(token for one in said for token in one.ids[one.prompt :])
    likeliest = [token for token, _ in counts.most_common(most)]
    rest = (token for token in range(target.config.vocabulary) if token not in counts)  # fewer were said: lowest ids fill up
    return torch.tensor(sorted([*likeliest, *(token for token, _ in zip(rest, range(most - len(likeliest))))]))


def unroll(module: Module, lesson: Lesson, states: torch.Tensor, depths: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(depth, features [E, D]) for each depth. states [N, F]: the target's, of all tokens of the lesson.

    Of each answer entry 0 is its second token: the first has none before it. Features of entries below the depth mean nothing.
    """
    spans = lesson.pass_.spans
    before = [at for span, offset in zip(spans, lesson.pass_.offsets) for at in range(offset, offset + span.count - 1)]
    ids = lesson.pass_.ids[[at + 1 for at in before]]
    entries = Pass(ids, tuple(Span(span.row, 0, span.count - 1) for span in spans), ())
    dtype = next(module.parameters()).dtype
    features, seen = module.read(states[before].to(dtype)).to(dtype), []
    for depth in range(depths):
        past, x = module.enter(ids, features)
        q, k, v = module.attention.project(x, entries)
        assert k is not None and v is not None
        seen.append((q, k, v))
        scale = module.attention.scale or module.attention.head_dim**-0.5
        parts = [band(seen, slice(at, at + span.count), scale) for at, span in zip(entries.offsets, entries.spans)]
        features = module.leave(past, module.attention.o(torch.cat(parts).flatten(1)), entries)
        yield depth, features
        features = features.roll(1, 0)  # what entry i - 1 made is where entry i starts from


def band(seen: Sequence[Heads], here: slice, scale: float) -> torch.Tensor:
    """Attention of one answer's entries at the last depth of `seen`: [T, H, h]."""
    deepest, group = len(seen) - 1, seen[0][0].shape[1] // seen[0][1].shape[1]
    q = seen[-1][0][here].transpose(0, 1)  # [H, T, h]
    keys, values = (
        [heads[which][here].transpose(0, 1).repeat_interleave(group, 0) for heads in seen] for which in (1, 2)
    )  # [H, T, h]
    place = torch.arange(q.shape[1], device=q.device)
    hidden = place > place[:, None] - deepest
    scores = [(q @ keys[0].transpose(1, 2)).masked_fill(hidden, float("-inf"))]  # [H, T, T]: the target's features
    back = [deepest - depth for depth in range(1, deepest + 1)]  # how many entries earlier each later depth's key stands
    scores += [(q * k.roll(shift, 1)).sum(-1, keepdim=True) for k, shift in zip(keys[1:], back)]
    shares = (torch.cat(scores, -1) * scale).softmax(-1).to(q.dtype)  # [H, T, T + deepest]
    out = shares[..., : q.shape[1]] @ values[0]
    for depth, (v, shift) in enumerate(zip(values[1:], back)):
        out = out + shares[..., q.shape[1] + depth, None] * v.roll(shift, 1)
    return out.transpose(0, 1)


def pairs(lesson: Lesson, depth: int) -> tuple[list[int], list[int]]:
    """Entries that mean something at this depth and have a goal, and the place of that goal in the lesson.

    Entry i of an answer is its token i + 1; goals start with the prompt's last token.
    """
    entries: list[int] = []
    places: list[int] = []
    entry = place = 0
    for span, size in zip(lesson.pass_.spans, lesson.sizes):
        prompt = span.count - size + 1  # tokens
        first = max(depth, prompt - 2)
        entries += range(entry + first, entry + span.count - 1)
        places += range(place + first + 2 - prompt, place + size)
        entry, place = entry + span.count - 1, place + size
    return entries, places
