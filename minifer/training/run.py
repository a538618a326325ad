"""A training that can be stopped at any moment: it goes on from its last checkpoint, on the same data as if it had not stopped.

Matrices inside of layers are trained by Muon, which steps along the nearest orthogonal matrix of the momentum and needs about
half the tokens AdamW does at this size; embeddings, heads and norms by AdamW. Rates rise over a warm-up, stay, and fall
linearly to zero. Checkpoints are safetensors and JSON, no pickles; the new one stands complete before the old one goes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file
from torch import nn


@dataclass(frozen=True)
class Schedule:
    """How many steps, and how large they are. decay_share: of the steps, at the end, over which the rates fall to zero."""

    steps: int
    muon_rate: float = 0.01
    adam_rate: float = 0.003
    warm_up: int = 60
    decay_share: float = 0.45
    weight_decay: float = 0.05

    def share(self, step: int) -> float:
        """Of the full rates, at this step (from 0)."""
        return min(1.0, (step + 1) / self.warm_up, (self.steps - step) / (self.steps * self.decay_share))


def make_optimizers(module: nn.Module, inside: Sequence[nn.Parameter], schedule: Schedule) -> list[torch.optim.Optimizer]:
    """Muon for the matrices among `inside`, AdamW for all other parameters of the module."""
    for parameter in module.parameters():
        parameter.requires_grad_(True)
    matrices = [parameter for parameter in inside if parameter.dim() == 2]
    others = [parameter for parameter in module.parameters() if all(parameter is not matrix for matrix in matrices)]
    found: list[torch.optim.Optimizer] = []
    if matrices:
        rates: dict[str, Any] = {"lr": schedule.muon_rate, "weight_decay": schedule.weight_decay}
        found.append(torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **rates))
    if others:
        found.append(torch.optim.AdamW(others, lr=schedule.adam_rate, betas=(0.9, 0.95), weight_decay=0.0))
    for optimizer in found:
        for group in optimizer.param_groups:
            group["full_rate"] = group["lr"]
    return found


def train_step(loss_at: Callable[[int], torch.Tensor], optimizers: list[torch.optim.Optimizer], share: float, step: int) -> float:
    """One step; returns its loss."""
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_at(step)
    loss.backward()
    parameters = [parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]]
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = share * group["full_rate"]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def fit(
    module: nn.Module,
    inside: Sequence[nn.Parameter],
    loss_at: Callable[[int], torch.Tensor],
    schedule: Schedule,
    work: Path,
    checkpoint_every: int = 100,
) -> float:
    """Train the module, or go on training it; returns the seconds that all its steps took.

    loss_at(step): the loss on the data of that step, a function of the step alone. work: where checkpoints and the log stay.
    """
    console, optimizers = Console(stderr=True), make_optimizers(module, inside, schedule)
    step, seconds = _resume(work, module, optimizers)
    started, losses = time.perf_counter(), []
    with bars(console) as progress, open(work / "log.jsonl", "a") as log:
        bar = progress.add_task("training", total=schedule.steps, completed=step)
        while step < schedule.steps:
            try:
                losses.append(train_step(loss_at, optimizers, schedule.share(step), step))
            except KeyboardInterrupt:
                progress.stop()
                console.print(f"stopped at step {step}: the same command goes on from the last checkpoint in {work}")
                raise
            step += 1
            progress.update(bar, completed=step, description=f"training, loss {np.mean(losses[-50:]):.3f}")
            if step % checkpoint_every == 0 or step == schedule.steps:
                so_far = seconds + time.perf_counter() - started
                entry = {"step": step, "loss": round(float(np.mean(losses[-checkpoint_every:])), 4), "seconds": round(so_far)}
                log.write(json.dumps(entry) + "\n")
                log.flush()
                _save(work, module, optimizers, step, so_far)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    return float(json.loads((work / "progress.json").read_text())["seconds"])


def bars(console: Console) -> Progress:
    """Progress bars of long work, with how many of how many and the time to come."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)


def same_recipe(work: Path, recipe: Any) -> None:
    """A work folder belongs to one recipe (a dataclass). Options that came later count as what they are by default."""
    path, mine = work / "recipe.json", json.loads(json.dumps(asdict(recipe)))
    if path.is_file():
        usual = {field.name: field.default for field in fields(recipe) if field.default is not MISSING}
        if json.loads(json.dumps(usual)) | json.loads(path.read_text()) != mine:
            raise ValueError(f"{work} holds a run of another recipe: give another --work, or remove it")
    path.write_text(json.dumps(mine, indent=1) + "\n")


def _state_tensors(module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """Parameters and what the optimizers remember of them, under flat names. Live tensors, not copies."""
    tensors = {f"model.{at}": parameter.detach() for at, parameter in enumerate(module.parameters())}
    for which, optimizer in enumerate(optimizers):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for at, parameter in enumerate(parameters):
            for key, value in optimizer.state[parameter].items():
                tensors[f"optimizer.{which}.{at}.{key}"] = value
    return tensors


def _save(work: Path, module: nn.Module, optimizers: list[torch.optim.Optimizer], step: int, seconds: float) -> None:
    save_file({k: v.clone() for k, v in _state_tensors(module, optimizers).items()}, work / "new.safetensors")
    (work / "new.safetensors").replace(work / f"step-{step}.safetensors")
    (work / "new.json").write_text(json.dumps({"step": step, "seconds": seconds}))
    (work / "new.json").replace(work / "progress.json")
    for old in work.glob("step-*.safetensors"):
        if old.name != f"step-{step}.safetensors":
            old.unlink()


def _resume(work: Path, module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> tuple[int, float]:
    """(steps done, seconds spent), with the checkpoint's numbers in place."""
    if not (work / "progress.json").is_file():
        return 0, 0.0
    progress = json.loads((work / "progress.json").read_text())
    tensors = load_file(work / f"step-{progress['step']}.safetensors")
    for at, parameter in enumerate(module.parameters()):
        parameter.data.copy_(tensors[f"model.{at}"])
    for which, optimizer in enumerate(optimizers):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for at, parameter in enumerate(parameters):
            prefix = f"optimizer.{which}.{at}."
            optimizer.state[parameter] = {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
    return progress["step"], progress["seconds"]
