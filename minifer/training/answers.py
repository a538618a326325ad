"""What a target itself says: the text that its drafters are trained on.

Prompts composed from templates are answered by the target in large batches, at several temperatures. A drafter that learns
from this text learns the target's habits, which is all that it is asked for; text written by others would teach it less.

Answers are kept in a work folder, a file a batch, so an interrupted run goes on with the next batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from .. import decode
from ..batch import Request
from ..model.sampling import Sampling
from ..model.tokenizer import Tokenizer
from ..model.transformer import Transformer
from ..prompts import workload
from .run import bars, same_recipe
from .templates import compose_all

ROWS = 64  # a batch: by then a pass costs little more than a pass over one row


@dataclass(frozen=True)
class Plan:
    """What answers depend on. texts: how many prompts. tokens: of an answer, at most. temperatures: in turn, a batch each."""

    model: str
    texts: int
    tokens: int
    temperatures: tuple[float, ...]
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """ids: prompt and answer. prompt: how many of them are the prompt."""

    ids: list[int]
    prompt: int


def prompts_for(tokenizer: Tokenizer, number: int, seed: int, without: Plan | None = None) -> list[list[int]]:
    """Composed prompts as ids, as the measured ones are given: messages for a chat model, texts for any other.

    without: a plan whose prompts are not among them.
    """
    pairs = compose_all(
        number, seed, without={prompt for _, prompt in compose_all(without.texts, without.seed)} if without else set()
    )
    if tokenizer.template is None:
        return [tokenizer.encode(text) for _, text in pairs]
    told = {kind: workload(kind).instruction for kind in {kind for kind, _ in pairs}}
    return [tokenizer.encode_chat([{"role": "user", "content": f"{told[kind]}\n\n{text}".strip()}]) for kind, text in pairs]


def answer(
    model: Transformer, tokenizer: Tokenizer, work: Path, plan: Plan, without: Plan | None = None, console: Console | None = None
) -> list[Answer]:
    """The model's answers to the prompts of a plan, but for those of another. What `work` already holds is only read."""
    work.mkdir(parents=True, exist_ok=True)
    same_recipe(work, plan)
    prompts = sorted(prompts_for(tokenizer, plan.texts, plan.seed, without), key=len)  # alike lengths share a batch
    starts = range(0, len(prompts), ROWS)
    found: list[Answer] = []
    with bars(console or Console(stderr=True)) as progress:
        bar = progress.add_task("the target answers prompts", total=len(starts))
        for batch, start in enumerate(starts):
            file = work / f"answers-{batch:05d}.safetensors"
            if not file.is_file():
                temperature = plan.temperatures[batch % len(plan.temperatures)]
                requests = [
                    Request(ids, plan.tokens, Sampling(temperature, seed=plan.seed * 1_000_003 + start + at))
                    for at, ids in enumerate(prompts[start : start + ROWS])
                ]
                _write(file, requests, decode.generate(model, requests, tokenizer=tokenizer))
            found += _read(file)
            progress.advance(bar)
    return found


def _write(file: Path, requests: Sequence[Request], completions: Sequence[decode.Completion]) -> None:
    rows = [[*request.ids, *completion.ids] for request, completion in zip(requests, completions)]
    tensors = {
        "ids": torch.tensor([token for row in rows for token in row], dtype=torch.int32),
        "sizes": torch.tensor([len(row) for row in rows], dtype=torch.int32),
        "prompts": torch.tensor([len(request.ids) for request in requests], dtype=torch.int32),
    }
    save_file(tensors, file.with_suffix(".new"))
    file.with_suffix(".new").replace(file)


def _read(file: Path) -> list[Answer]:
    tensors = load_file(file)
    rows = np.split(tensors["ids"].numpy(), np.cumsum(tensors["sizes"].numpy())[:-1])
    return [Answer(row.tolist(), prompt) for row, prompt in zip(rows, tensors["prompts"].tolist())]


def batch_of(answers: Sequence[Answer], tokens: int, longest: int, seed: int, step: int) -> list[Answer]:
    """Answers drawn by (seed, step) alone, of about `tokens` tokens in all; each cut to its first `longest`."""
    if not any(_usable(one, longest) for one in answers):
        raise ValueError(f"none of {len(answers)} answers has a token to learn from within its first {longest}")
    chance = np.random.default_rng((seed, step))
    found: list[Answer] = []
    size = 0
    while size < tokens:
        one = answers[int(chance.integers(len(answers)))]
        if _usable(one, longest):
            found.append(Answer(one.ids[:longest], one.prompt))
            size += len(found[-1].ids)
    return found


def _usable(one: Answer, longest: int) -> bool:
    return one.prompt < min(len(one.ids), longest) - 1
