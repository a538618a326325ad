"""How drafters are trained: on what the target itself says, towards the distributions it says it from.

    composed prompts ─► the target answers (answers.py) ─► the frozen target reads each answer once more
                                                             ├─ hidden states ──► a drafter's input
                                                             └─ distributions ──► what it should guess: cross-entropy

Training towards whole distributions instead of the drawn tokens teaches more a token: acceptance is the overlap of two
distributions, and this loss is least where they are the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from .. import drafters, mtp
from ..batch import Request
from ..draft import acceptance, tokens_per_pass
from ..drafters.medusa import Heads, grow
from ..model import weights
from ..model.config import Config, to_dict
from ..model.linear import Linear
from ..model.load import load
from ..model.passes import Pass, Span
from ..model.rotary import Rope
from ..model.tokenizer import Tokenizer
from ..model.transformer import Head, Transformer
from ..prompts import WORKLOADS, workload
from .answers import Answer, Plan, answer, batch_of
from .run import Schedule, fit, same_recipe


@dataclass(frozen=True)
class Recipe:
    """Everything that a drafter's training depends on, apart from its target. layers ... inner: of a draft model."""

    model: str
    kind: str
    texts: int = 9000
    tokens: int = 160
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    steps: int = 1500
    tokens_per_step: int = 4096
    longest: int = 384
    muon_rate: float = 0.01
    adam_rate: float = 0.002
    seed: int = 0
    layers: int = 2
    width: int = 128
    inner: int = 320
    heads: int = 3  # of Medusa
    nodes: int = 12  # of its tree

    def schedule(self) -> Schedule:
        """Of its steps."""
        return Schedule(self.steps, self.muon_rate, self.adam_rate)


@dataclass(frozen=True)
class Lesson:
    """Some answers as the target reads them. pass_: all their tokens. hidden [W, D], logits [W, V]: at the places from whose
    distributions the answers were drawn; sizes: how many places each answer has."""

    pass_: Pass
    hidden: torch.Tensor
    logits: torch.Tensor
    sizes: tuple[int, ...]


class Student:
    """A drafter that is trained. inside: its matrices that Muon trains."""

    module: Any
    inside: Sequence[nn.Parameter]

    def loss(self, lesson: Lesson) -> torch.Tensor:
        """Mean over places."""
        raise NotImplementedError

    def save(self, folder: Path, lessons: Iterable[Lesson]) -> dict:
        """Write a folder that drafters.load reads; what is worth reporting. lessons: on prompts that it was not trained on."""
        raise NotImplementedError


def recipe_for(model: str, kind: str, **asked: Any) -> Recipe:
    """The recipe of a drafter, but for what is asked otherwise. Heads have less to learn than a model."""
    usual: dict[str, dict[str, Any]] = {"draft_model": {}, "medusa": {"steps": 700}}
    return Recipe(model, kind, **(usual[kind] | asked))


def train(recipe: Recipe, folder: Path, work: Path, checkpoint_every: int = 100) -> dict:
    """Train, or go on training, and write a folder for drafters.load, with report.json. Returns the report.

    work: where answers, checkpoints and the log stay between runs; drafters of one model may share its answers.
    """
    own = work / recipe.kind
    for place in (folder, own):
        place.mkdir(parents=True, exist_ok=True)
    same_recipe(own, recipe)
    target, tokenizer = load(recipe.model, torch.bfloat16, "cpu")
    plan = Plan(recipe.model, recipe.texts, recipe.tokens, recipe.temperatures, recipe.seed)
    said = answer(target, tokenizer, work / "answers", plan)
    student = STUDENTS[recipe.kind](recipe, target)

    def loss_at(step: int) -> torch.Tensor:
        return student.loss(read(target, batch_of(said, recipe.tokens_per_step, recipe.longest, recipe.seed, step)))

    seconds = fit(student.module, student.inside, loss_at, recipe.schedule(), own, checkpoint_every)
    unseen = Plan(recipe.model, 128, recipe.tokens, (0.0,), recipe.seed + 1)
    fresh = answer(target, tokenizer, own / "unseen", unseen, without=plan)
    with torch.no_grad():
        found = student.save(folder, (read(target, fresh[at : at + 16]) for at in range(0, len(fresh), 16)))
    report = {
        "recipe": asdict(recipe),
        "parameters": sum(parameter.numel() for parameter in student.module.parameters()),
        "answer_tokens": sum(len(one.ids) - one.prompt for one in said),
        "tokens_seen": recipe.steps * recipe.tokens_per_step,
        "minutes": round(seconds / 60, 1),
        **found,
        "workloads": measure(target, tokenizer, folder),
    }
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    return report


def read(target: Transformer, answers: Sequence[Answer]) -> Lesson:
    """What the target computes for these answers."""
    spans = tuple(Span(row, 0, len(one.ids)) for row, one in enumerate(answers))
    wanted: list[int] = []
    at = 0
    for one in answers:
        wanted += range(at + one.prompt - 1, at + len(one.ids))
        at += len(one.ids)
    pass_ = Pass(torch.tensor([token for one in answers for token in one.ids]), spans, tuple(wanted))
    with torch.no_grad():  # not inference_mode: a drafter's gradients go through what is read here
        output = target(pass_)
        return Lesson(pass_, output.hidden.float(), output.logits, tuple(len(one.ids) - one.prompt + 1 for one in answers))


def towards(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the drafter's logits [W, V] with the distributions of the target's [W, V]."""
    return F.cross_entropy(logits.float(), target.softmax(-1))


class SmallModel(Student):
    """A student that is a transformer of its own, with the target's vocabulary and head width."""

    def __init__(self, recipe: Recipe, target: Transformer) -> None:
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

    def __init__(self, recipe: Recipe, target: Transformer) -> None:
        c = target.config
        self.nodes, self.module = recipe.nodes, Heads(recipe.heads, c.width, c.vocabulary)
        weights.initialise(self.module, torch.float32, target.device, recipe.seed)
        head = target.chunks[-1].exit
        assert isinstance(head, Head)
        with torch.no_grad():
            own = head.linear(torch.eye(c.width, dtype=target.dtype)).t()  # [V, D], also where it is packed
            for one in self.module.each:
                _matrix(one.block).zero_()
                _matrix(one.out).copy_(own)
        self.inside = [_matrix(one.block) for one in self.module.each]

    def loss(self, lesson: Lesson) -> torch.Tensor:
        total = torch.zeros(())
        for ahead, guess, wanted in self._pairs(lesson):
            total = total + 0.8**ahead * towards(guess, wanted)
        return total

    def _pairs(self, lesson: Lesson) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """(ahead, a head's logits, the target's logits so many places later), over all answers."""
        for ahead, head in enumerate(self.module.each, 1):
            here: list[int] = []
            there: list[int] = []
            at = 0
            for size in lesson.sizes:
                here += range(at, at + size - ahead)
                there += range(at + ahead, at + size)
                at += size
            yield ahead, head(lesson.hidden[here]), lesson.logits[there]

    def accuracy(self, lessons: Iterable[Lesson], ranks: int = 8) -> list[list[float]]:
        """[head][rank]: how often a head's guess of that rank is what the target would have said."""
        right, count = torch.zeros(len(self.module.each), ranks), torch.zeros(len(self.module.each), 1)
        for lesson in lessons:
            for ahead, guess, wanted in self._pairs(lesson):
                right[ahead - 1] += (guess.topk(ranks).indices == wanted.argmax(-1, keepdim=True)).float().sum(0)
                count[ahead - 1] += len(guess)
        return [[round(share, 4) for share in row] for row in (right / count).tolist()]

    def save(self, folder: Path, lessons: Iterable[Lesson]) -> dict:
        accuracy, (vocabulary, width) = self.accuracy(lessons), _matrix(self.module.each[0].out).shape
        about = {"drafter": "medusa", "heads": len(self.module.each), "width": width, "vocabulary": vocabulary}
        (folder / "drafter.json").write_text(json.dumps(about | {"tree": grow(accuracy, self.nodes)}) + "\n")
        save_file(weights.collect(self.module, torch.bfloat16), folder / "model.safetensors", {"format": "pt"})
        return {"held_out_accuracy_by_rank": accuracy}


def _matrix(linear: Linear) -> nn.Parameter:
    assert linear.weight is not None, "packed matrices are not trained"
    return linear.weight


STUDENTS: dict[str, Callable[[Recipe, Transformer], Student]] = {"draft_model": SmallModel, "medusa": MedusaHeads}


def measure(target: Transformer, tokenizer: Tokenizer, folder: Path, tokens: int = 96) -> dict[str, dict]:
    """Tokens a pass and acceptance by depth on the bundled prompts, greedy: none of them was trained on."""
    drafter = drafters.load(folder, target, tokenizer)
    found = {}
    for kind in WORKLOADS:
        requests = [Request(ids, tokens) for ids in workload(kind).ids(tokenizer)]
        completions = mtp.generate(target, requests, drafter, drafter.usual, tokenizer=tokenizer)
        by_depth = [round(share, 3) for share in acceptance(completions)]
        found[kind] = {"tokens_per_pass": round(tokens_per_pass(completions), 3), "acceptance_by_depth": by_depth}
    return found
