"""How drafters are trained: on what the target itself says, towards the distributions it says it from.

    composed prompts ─► the target answers (answers.py) ─► the frozen target reads each answer once more
                                                             ├─ hidden states ──► a drafter's input
                                                             └─ distributions ──► what it should guess: cross-entropy

lesson.py says what is read, students.py and recurrent.py what each kind of drafter makes of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from .. import drafters, mtp
from ..batch import Request
from ..draft import acceptance, tokens_per_pass
from ..model.load import load
from ..model.tokenizer import Tokenizer
from ..model.transformer import Transformer
from ..prompts import WORKLOADS, workload
from .answers import Answer, Plan, answer, batch_of
from .asking import GemmaLayers
from .lesson import Recipe, Student, read
from .recurrent import DeepSeekModule, EagleLayer
from .run import fit, same_recipe
from .students import MedusaHeads, SmallModel

STUDENTS: dict[str, Callable[[Recipe, Transformer, Sequence[Answer]], Student]] = {
    "draft_model": SmallModel,
    "medusa": MedusaHeads,
    "eagle": EagleLayer,
    "deepseek": DeepSeekModule,
    "gemma": GemmaLayers,
}


def recipe_for(model: str, kind: str, **asked: Any) -> Recipe:
    """The recipe of a drafter, but for what is asked otherwise. Heads have less to learn than a model."""
    usual: dict[str, dict[str, Any]] = {
        "draft_model": {"steps": 1500},
        "medusa": {"steps": 700},
        "eagle": {"steps": 1200},
        "deepseek": {"steps": 1200},
        "gemma": {"steps": 1200, "layers": 4, "width": 96, "inner": 256},
    }
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
    if tokenizer.template is not None and recipe.invented:
        said += answer(target, tokenizer, work / "invented", replace(plan, texts=recipe.invented, invented=True))
    student = STUDENTS[recipe.kind](recipe, target, said)

    def loss_at(step: int) -> torch.Tensor:
        batch = batch_of(said, recipe.tokens_per_step, recipe.longest, recipe.seed, step)
        return student.loss(read(target, batch, student.reads))

    seconds = fit(student.module, student.inside, loss_at, recipe.schedule(), own, checkpoint_every)
    unseen = Plan(recipe.model, 128, recipe.tokens, (0.0,), recipe.seed + 1)
    fresh = answer(target, tokenizer, own / "unseen", unseen, without=plan)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):  # as it was trained
        found = student.save(folder, (read(target, fresh[at : at + 16], student.reads) for at in range(0, len(fresh), 16)))
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
