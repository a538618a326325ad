"""The students that are fed nothing of their own: a smaller model, and Medusa's heads.

Those that are fed their own features are in recurrent.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from ..drafters.medusa import Heads, grow
from ..model import weights
from ..model.config import Config
from ..model.families import to_dict
from ..model.passes import Pass
from ..model.rotary import Rope
from ..model.transformer import Transformer
from .answers import Answer
from .lesson import Lesson, Recipe, Student, matrix, towards


class SmallModel(Student):
    """A student that is a transformer of its own, with the target's vocabulary and head width."""

    def __init__(self, recipe: Recipe, target: Transformer, said: Sequence[Answer]) -> None:
        c = target.config
        heads = max(1, recipe.width // c.head_dim)
        config = Config(
            family="llama",
            layers=recipe.layers,
            width=recipe.width,
            heads=heads,
            kv_heads=max(1, heads // 2),
            head_dim=c.head_dim,
            inner=recipe.inner,
            vocabulary=c.vocabulary,
            context=c.context,
            rope=Rope(10000.0),
            norm_eps=c.norm_eps,
            tied=True,
            end_ids=c.end_ids,
        )
        self.module = Transformer(config)
        weights.initialise(self.module, torch.float32, "cpu", recipe.seed)
        self.inside = [parameter for layer in self.module.layers for parameter in layer.parameters()]

    def loss(self, lesson: Lesson) -> torch.Tensor:
        # The same tokens as another pass: what the target's layers shared in theirs (rotary turns) is of its own widths.
        pass_ = Pass(lesson.pass_.ids, lesson.pass_.spans, lesson.pass_.wanted)
        return towards(self.module(pass_).logits, lesson.logits)

    def save(self, folder: Path, lessons: Iterable[Lesson]) -> dict:
        config = to_dict(self.module.config) | {"dtype": "bfloat16", "bos_token_id": None}
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        save_file(weights.collect(self.module, torch.bfloat16), folder / "model.safetensors", {"format": "pt"})
        losses = [float(self.loss(one)) for one in lessons]
        return {"held_out_cross_entropy": round(sum(losses) / len(losses), 4)}


class MedusaHeads(Student):
    """A student of K heads. Each starts as the target's own head behind a block that does nothing yet."""

    def __init__(self, recipe: Recipe, target: Transformer, said: Sequence[Answer]) -> None:
        c = target.config
        self.nodes, self.module = recipe.nodes, Heads(recipe.heads, c.width, c.vocabulary)
        weights.initialise(self.module, torch.float32, target.device, recipe.seed)
        with torch.no_grad():
            own = target.head.rows  # [V, D]
            for one in self.module.each:
                matrix(one.block).zero_()
                matrix(one.out).copy_(own)
        self.inside = [matrix(one.block) for one in self.module.each]

    def loss(self, lesson: Lesson) -> torch.Tensor:
        total = torch.zeros(())
        for ahead, guess, wanted in self._pairs(lesson):
            total = total + 0.8**ahead * towards(guess, wanted)
        return total

    def _pairs(self, lesson: Lesson) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """(ahead, a head's logits, the target's logits so many places later), over all answers."""
        hidden = lesson.hidden.float()
        for ahead, head in enumerate(self.module.each, 1):
            here: list[int] = []
            there: list[int] = []
            at = 0
            for size in lesson.sizes:
                here += range(at, at + size - ahead)
                there += range(at + ahead, at + size)
                at += size
            yield ahead, head(hidden[here]), lesson.logits[there]

    def accuracy(self, lessons: Iterable[Lesson], ranks: int = 8) -> list[list[float]]:
        """[head][rank]: how often a head's guess of that rank is what the target would have said."""
        right, count = torch.zeros(len(self.module.each), ranks), torch.zeros(len(self.module.each), 1)
        for lesson in lessons:
            for ahead, guess, wanted in self._pairs(lesson):
                right[ahead - 1] += (guess.topk(ranks).indices == wanted.argmax(-1, keepdim=True)).float().sum(0)
                count[ahead - 1] += len(guess)
        return [[round(share, 4) for share in row] for row in (right / count).tolist()]

    def save(self, folder: Path, lessons: Iterable[Lesson]) -> dict:
        accuracy, (vocabulary, width) = self.accuracy(lessons), matrix(self.module.each[0].out).shape
        about = {"drafter": "medusa", "heads": len(self.module.each), "width": width, "vocabulary": vocabulary}
        (folder / "drafter.json").write_text(json.dumps(about | {"tree": grow(accuracy, self.nodes)}) + "\n")
        save_file(weights.collect(self.module, torch.bfloat16), folder / "model.safetensors", {"format": "pt"})
        return {"held_out_accuracy_by_rank": accuracy}
