"""What a target itself says: the text that its drafters are trained on.

Prompts are answered by the target in large batches, at several temperatures. A drafter that learns from this text learns the
target's habits, which is all that it is asked for; text written by others would teach it less. There are two sources of prompts:
some are composed from templates, and a chat model also invents its own, by writing on where a user's message would begin (arXiv
2406.08464). Those are far more varied.

Prompts and answers are kept in a work folder, a file a batch, so an interrupted run goes on with the next batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
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
from ..prompts import WORKLOADS, workload
from .run import bars, same_recipe
from .templates import compose_all

WORDS = "\0"  # in place of a user's own words, to find where they stand
LONGEST = 96  # tokens of an invented prompt
ROWS = 64  # a batch: by then a pass costs little more than a pass over one row


@dataclass(frozen=True)
class Plan:
    """What answers depend on. texts: how many prompts. tokens: of an answer, at most. temperatures: in turn, a batch each.

    invented: the model itself writes the prompts, of which some are dropped.
    """

    model: str
    texts: int
    tokens: int
    temperatures: tuple[float, ...]
    seed: int = 0
    invented: bool = False


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
    held = {kind: workload(kind) for kind in WORKLOADS}
    return [tokenizer.encode_chat([held[kind].message(text)]) for kind, text in pairs]


def answer(
    model: Transformer, tokenizer: Tokenizer, work: Path, plan: Plan, without: Plan | None = None, console: Console | None = None
) -> list[Answer]:
    """The model's answers to the prompts of a plan, but for those of another. What `work` already holds is only read."""
    work.mkdir(parents=True, exist_ok=True)
    same_recipe(work, plan)
    console = console or Console(stderr=True)
    if plan.invented:
        begun = [begin for begin in beginnings(tokenizer) for _ in range(plan.texts // len(WORKLOADS))]
        title = "the target invents prompts"
        invented = _said(
            model, tokenizer, work, replace(plan, tokens=LONGEST, temperatures=(1.0,)), begun, "prompts", title, console
        )
        prompts = whole_prompts(tokenizer, invented)
    else:
        prompts = prompts_for(tokenizer, plan.texts, plan.seed, without)
    prompts = sorted(prompts, key=len)  # alike lengths share a batch
    return _said(model, tokenizer, work, plan, prompts, "answers", "the target answers prompts", console)


def beginnings(tokenizer: Tokenizer) -> list[list[int]]:
    """For each workload, a chat up to where the user's own words would begin: behind what such prompts are told."""
    texts = [tokenizer.chat_text([workload(kind).message(WORDS)]) for kind in WORKLOADS]
    return [tokenizer.encode(text.split(WORDS)[0], special_tokens=False) for text in texts]


def whole_prompts(tokenizer: Tokenizer, invented: Sequence[Answer]) -> list[list[int]]:
    """What was written where a user's message begins, as prompts: whole ones only, each once, none like a measured one."""
    measured = runs_of_words(prompt for kind in WORKLOADS for prompt in workload(kind).prompts)
    rest = tokenizer.chat_text([workload("chat").message(WORDS)]).split(WORDS)[1]
    found: dict[tuple[int, ...], None] = {}
    for one in invented:
        text = tokenizer.decode(one.ids[one.prompt :]).strip()
        if one.ids[-1] in tokenizer.end_ids and text and not runs_of_words([text]) & measured:
            start = tokenizer.decode(one.ids[: one.prompt], special_tokens=True)
            found[tuple(tokenizer.encode(start + text + rest, special_tokens=False))] = None
    return [list(ids) for ids in found]


def runs_of_words(texts: Iterable[str], words: int = 5) -> set[tuple[str, ...]]:
    """All that stand beside each other in one of these texts, so many at a time."""
    found: set[tuple[str, ...]] = set()
    for text in texts:
        said = re.findall(r"\w+", text.lower())
        found |= {tuple(said[at : at + words]) for at in range(len(said) - words + 1)}
    return found


def _said(
    model: Transformer,
    tokenizer: Tokenizer,
    work: Path,
    plan: Plan,
    prompts: Sequence[list[int]],
    stem: str,
    title: str,
    console: Console,
) -> list[Answer]:
    """What the model writes after these prompts, a file a batch."""
    starts = range(0, len(prompts), ROWS)
    found: list[Answer] = []
    with bars(console) as progress:
        bar = progress.add_task(title, total=len(starts))
        for batch, start in enumerate(starts):
            file = work / f"{stem}-{batch:05d}.safetensors"
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
