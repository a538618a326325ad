"""What a drafter is trained on: answers as the target reads them, and what every student of them is.

A student learns towards whole distributions instead of drawn tokens, which teaches more a token: acceptance is the overlap of
two distributions, and cross-entropy with the target's is least where they are the same.

Letters: N tokens of a pass, W places whose distributions answers were drawn from, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..drafters.gemma import Gemma
from ..drafters.recurrent import Module
from ..model import weights
from ..model.linear import Linear
from ..model.passes import Pass, Span
from ..model.transformer import Transformer
from .answers import Answer
from .run import Schedule


@dataclass(frozen=True)
class Recipe:
    """Everything that a drafter's training depends on, apart from its target."""

    model: str
    kind: str
    texts: int = 9000
    invented: int = 12_000  # prompts that the target is to invent besides, if it is a chat model; some are dropped
    tokens: int = 160
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    steps: int = 1500
    tokens_per_step: int = 4096
    longest: int = 384
    muon_rate: float = 0.01
    adam_rate: float = 0.002
    seed: int = 0
    layers: int = 2  # of a draft model, and of Gemma's drafter; so are width and inner
    width: int = 128
    inner: int = 320
    heads: int = 3  # of Medusa
    nodes: int = 12  # of its tree, and of EAGLE's
    unrolled: int = 4  # how deep recurrent drafters are trained
    drafted: int = 8192  # most tokens that they draft

    def schedule(self) -> Schedule:
        """Of its steps."""
        return Schedule(self.steps, self.muon_rate, self.adam_rate)


@dataclass(frozen=True)
class Lesson:
    """Some answers as the target reads them.

    pass_: all their tokens. hidden [W, D]: at the places from whose distributions the answers were drawn. states {layer: [N, D]}:
    of the layers that were asked for. sizes: how many places each answer has.
    """

    target: Transformer
    pass_: Pass
    hidden: torch.Tensor
    states: dict[int, torch.Tensor]
    sizes: tuple[int, ...]

    @cached_property
    def logits(self) -> torch.Tensor:
        """[W, V]: what the target says at each place."""
        with torch.no_grad():
            return self.target.logits(self.hidden)


class Student:
    """A drafter that is trained. inside: its matrices that Muon trains. reads: the layers whose states it asks for."""

    module: Any
    inside: Sequence[nn.Parameter]
    reads: tuple[int, ...] = ()

    def loss(self, lesson: Lesson) -> torch.Tensor:
        """Mean over places."""
        raise NotImplementedError

    def save(self, folder: Path, lessons: Iterable[Lesson]) -> dict:
        """Write a folder that drafters.load reads; what is worth reporting. lessons: on prompts that it was not trained on."""
        raise NotImplementedError


class DeepStudent(Student):
    """One that drafts a token after the other, and is trained `recipe.unrolled` depths deep, as it is used."""

    def __init__(self, recipe: Recipe, module: Module | Gemma) -> None:
        self.recipe, self.module = recipe, module
        weights.initialise(module, torch.float32, module.shared.target.device, recipe.seed)

    def judged(self, lesson: Lesson) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """(depth, its logits, the target's distributions over the same ids), over all answers."""
        raise NotImplementedError

    def loss(self, lesson: Lesson) -> torch.Tensor:
        total = torch.zeros(())
        for depth, guess, wanted in self.judged(lesson):
            total = total + 0.8**depth * F.cross_entropy(guess.float(), wanted)
        return total / self.recipe.unrolled

    def accuracy(self, lessons: Iterable[Lesson]) -> list[float]:
        """[depth]: how often its likeliest token is the target's likeliest of those it drafts."""
        right, count = [0.0] * self.recipe.unrolled, [0] * self.recipe.unrolled
        for lesson in lessons:
            for depth, guess, wanted in self.judged(lesson):
                right[depth] += float((guess.argmax(-1) == wanted.argmax(-1)).float().sum())
                count[depth] += len(guess)
        return [round(hits / places, 4) for hits, places in zip(right, count)]


def read(target: Transformer, answers: Sequence[Answer], reads: Sequence[int] = ()) -> Lesson:
    """What the target computes for these answers. reads: layers whose states are wanted."""
    spans = tuple(Span(row, 0, len(one.ids)) for row, one in enumerate(answers))
    wanted: list[int] = []
    at = 0
    for one in answers:
        wanted += range(at + one.prompt - 1, at + len(one.ids))
        at += len(one.ids)
    pass_ = Pass(torch.tensor([token for one in answers for token in one.ids]), spans, tuple(wanted), tuple(reads))
    with torch.no_grad():  # not inference_mode: a drafter's gradients go through what is read here
        output = target(pass_)
    assert output.hidden is not None and output.states is not None
    return Lesson(target, pass_, output.hidden, output.states, tuple(len(one.ids) - one.prompt + 1 for one in answers))


def towards(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the drafter's logits [W, V] with the distributions of the target's [W, V]."""
    return F.cross_entropy(logits.float(), target.softmax(-1))


def matrix(linear: Linear) -> nn.Parameter:
    """Its numbers, to be trained."""
    assert linear.weight is not None, "packed matrices are not trained"
    return linear.weight
