"""Schedules of a pipeline as data: what each stage does, in which order. And one executor that runs any of them.

A schedule is a list of steps for each stage; a step is forward or backward through one of its chunks, for one micro-batch. Over
two stages, four micro-batches (F forward, B backward):

    all forward   0   F0 F1 F2 F3                              serving: prompts in a row
                  1      F0 F1 F2 F3
    GPipe         0   F0 F1 F2 F3             B0 B1 B2 B3      training: keeps the activations of all micro-batches
                  1      F0 F1 F2 F3 B0 B1 B2 B3
    1F1B          0   F0 F1    B0 F2 B1 F3 B2    B3            keeps those of two at most: stage s of p, min(m, p - s)
                  1      F0 B0 F1 B1 F2 B2 F3 B3

`simulate` says when each step would run if it took a given time, and nothing else took any. `execute` runs a stage's list for
real. What a stage receives, and in which order, follows from the lists of the others: so messages need no labels.

Sources: Huang et al. 2019 (arXiv 1811.06965); Narayanan et al. 2021 (arXiv 2104.04473, section 2.2).

Letters: p stages, m micro-batches, v chunks a stage; part c p + s is chunk c of stage s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .model.cache import Cache
from .model.passes import Output, Pass
from .model.transformer import Chunk, Transformer
from .pipeline_parallel import Post, post_of


class Step(NamedTuple):
    """What a stage does at a time."""

    backward: bool
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{'B' if self.backward else 'F'}{self.micro_batch}"


Schedule = list[list[Step]]  # of each stage


def all_forward(stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """Micro-batches in groups as large as there are stages; each group goes through chunk after chunk."""
    order = [Step(False, micro, chunk) for micro, chunk in _forwards(stages, micro_batches, chunks)]
    return [list(order) for _ in range(stages)]


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """All forward, then all backward."""
    order = [Step(backward, micro) for backward in (False, True) for micro in range(micro_batches)]
    return [list(order) for _ in range(stages)]


def one_forward_one_backward(stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """1F1B; with chunks interleaved, for which micro-batches must be a multiple of the stages (ValueError)."""
    if chunks > 1 and micro_batches % stages:
        raise ValueError(f"interleaved 1F1B deals micro-batches in groups of {stages} stages: {micro_batches} are no multiple")
    forwards = [Step(False, micro, chunk) for micro, chunk in _forwards(stages, micro_batches, chunks)]
    backwards = [Step(True, micro, chunks - 1 - chunk) for micro, chunk in _forwards(stages, micro_batches, chunks)]
    found = []
    for stage in range(stages):
        ahead = stages - stage - 1 if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * stages
        ahead = min(ahead, len(forwards))
        steady = [step for pair in zip(forwards[ahead:], backwards) for step in pair]
        found.append([*forwards[:ahead], *steady, *backwards[len(forwards) - ahead :]])
    return found


def _forwards(stages: int, micro_batches: int, chunks: int) -> Iterator[tuple[int, int]]:
    """(micro-batch, chunk) in the order in which a stage meets them."""
    for first in range(0, micro_batches, stages):
        for chunk in range(chunks):
            for micro in range(first, min(first + stages, micro_batches)):
                yield micro, chunk


class Slot(NamedTuple):
    """A step and when it ran."""

    step: Step
    start: float
    end: float


def simulate(schedule: Schedule, seconds: Callable[[int, Step], float]) -> list[list[Slot]]:
    """When each stage's steps run. seconds(stage, step): how long one takes. Raises a ValueError if stages wait for each other."""
    p, parts = len(schedule), _parts(schedule)
    left, lines = [deque(steps) for steps in schedule], [[] for _ in schedule]  # type: list[deque[Step]], list[list[Slot]]
    ends: dict[tuple[bool, int, int], float] = {}  # of (backward, micro-batch, part)
    while any(left):
        moved = False
        for stage, steps in enumerate(left):
            while steps:
                step = steps[0]
                needed = _needed(step, step.chunk * p + stage, parts)
                if any(one not in ends for one in needed):
                    break
                free = lines[stage][-1].end if lines[stage] else 0.0
                start = max([free, *(ends[one] for one in needed)])
                lines[stage].append(Slot(step, start, start + seconds(stage, step)))
                ends[step.backward, step.micro_batch, step.chunk * p + stage] = lines[stage][-1].end
                steps.popleft()
                moved = True
        if not moved:
            raise ValueError(f"the stages wait for each other: next would be {[str(steps[0]) for steps in left if steps]}")
    return lines


def idle_share(lines: Sequence[Sequence[Slot]]) -> float:
    """Of all stages' time from the first start to the last end, the share in which they run nothing."""
    first = min(slot.start for line in lines for slot in line)
    last = max(slot.end for line in lines for slot in line)
    busy = sum(slot.end - slot.start for line in lines for slot in line)
    return 1 - busy / (len(lines) * (last - first))


def _parts(schedule: Schedule) -> int:
    return len(schedule) * (1 + max((step.chunk for steps in schedule for step in steps), default=0))


def _needed(step: Step, part: int, parts: int) -> list[tuple[bool, int, int]]:
    """What must have run before a step, as (backward, micro-batch, part)."""
    if not step.backward:
        return [(False, step.micro_batch, part - 1)] if part else []
    later = [(True, step.micro_batch, part + 1)] if part + 1 < parts else []
    return [(False, step.micro_batch, part), *later]


@dataclass
class Executed:
    """What a stage has to show.

    outputs, losses: {micro-batch: ...} on the stage that holds the head. most_kept: micro-batches (times chunks) whose
    activations it kept at once.
    """

    outputs: dict[int, Output]
    losses: dict[int, float]
    most_kept: int


Loss = Callable[[Output, int], torch.Tensor]


class Executor:
    """A stage that goes through its list. passes: one a micro-batch, without `states`; caches: likewise, or none."""

    def __init__(
        self, model: Transformer, schedule: Schedule, passes: Sequence[Pass], caches: Sequence[Cache] | None, loss: Loss | None
    ) -> None:
        self.model, self.schedule, self.passes, self.caches, self.loss = model, schedule, passes, caches, loss
        self.post: Post = post_of(model)
        self.parts = _parts(schedule)
        self.kept: dict[tuple[int, int], tuple[torch.Tensor | None, Any]] = {}  # (micro-batch, part): what came in and went out
        self.done = Executed({}, {}, 0)
        # What each other stage will send here, in its order, and what came before it was due.
        stages = range(self.post.stages)
        self.awaited = {stage: deque(self._sends(stage, self.post.stage)) for stage in stages if stage != self.post.stage}
        self.early: dict[tuple[bool, int, int], torch.Tensor] = {}

    def run(self) -> Executed:
        before = self._untie()
        for step in self.schedule[self.post.stage]:
            part = step.chunk * self.post.stages + self.post.stage
            (self._backward if step.backward else self._forward)(step, part)
            self.done.most_kept = max(self.done.most_kept, len(self.kept))
        if before is not None:
            self._tie(*before)
        self.post.settle()
        return self.done

    def _forward(self, step: Step, part: int) -> None:
        chunk, pass_ = self.model.chunks[step.chunk], self.passes[step.micro_batch]
        assert isinstance(chunk, Chunk)
        cache = None if self.caches is None else self.caches[step.micro_batch]
        if cache is not None and step.chunk == 0:
            cache.begin(pass_)
        came = None if part == 0 else self._take((False, step.micro_batch, part), part - 1)
        if came is not None and self.loss is not None:
            came.requires_grad_()
        went: Any = chunk.through(chunk.entrance(pass_)[0] if came is None else came, [], pass_, cache)
        if cache is not None and step.chunk == len(self.model.chunks) - 1:
            cache.commit(pass_)
        if part + 1 < self.parts:
            self.post.send(went.detach(), part + 1)
        else:
            hidden, states = chunk.exit(went, [], pass_)
            output = Output(self.model, pass_, hidden, states, cache)
            if self.loss is None:
                self.done.outputs[step.micro_batch] = output
            else:
                went = self.loss(output, step.micro_batch)
                self.done.losses[step.micro_batch] = float(went.detach())
        if self.loss is not None:
            self.kept[step.micro_batch, part] = came, went

    def _backward(self, step: Step, part: int) -> None:
        came, went = self.kept.pop((step.micro_batch, part))
        gradient = None if part + 1 == self.parts else self._take((True, step.micro_batch, part), part + 1)
        if went.requires_grad:  # not where all layers up to here are frozen
            torch.autograd.backward(went, gradient)
        if came is not None:
            self.post.send(torch.zeros_like(came) if came.grad is None else came.grad, part - 1)
        if all(micro != step.micro_batch for micro, _ in self.kept):
            self.passes[step.micro_batch].shared.clear()  # layers have left keys and values there, whose graphs are over

    def _untie(self) -> tuple[torch.nn.Parameter, torch.Tensor | None] | None:
        """Of an embedding that is the head too, and stands on both ends: the parameter, and the gradient that it had before."""
        trains = any(step.backward for step in self.schedule[self.post.stage])
        if not (trains and self.model.config.tied and self.post.stages > 1 and (self.post.stage == 0 or self.post.last)):
            return None
        weight: Any = self.model.head.linear.weight if self.post.last else self.model.chunks[0].entrance.weight  # type: ignore[union-attr]
        before, weight.grad = weight.grad, None
        return weight, before

    def _tie(self, weight: torch.nn.Parameter, before: torch.Tensor | None) -> None:
        """Each end has found a part of the gradient: both take the sum."""
        other = 0 if self.post.last else self.post.stages - 1
        mine = torch.zeros_like(weight) if weight.grad is None else weight.grad
        self.post.send(mine.clone(), other)
        total = mine + self.post.receive(torch.empty_like(mine), other)
        weight.grad = total if before is None else before + total

    def _take(self, what: tuple[bool, int, int], source: int) -> torch.Tensor:
        """A message for this stage; those that come before it are kept until they are due."""
        stage, width = source % self.post.stages, self.model.config.width
        while what not in self.early:
            now = self.awaited[stage].popleft()
            like = torch.empty(len(self.passes[now[1]].ids), width, dtype=self.model.dtype, device=self.model.device)
            self.early[now] = self.post.receive(like, stage)
        return self.early.pop(what)

    def _sends(self, sender: int, to: int) -> Iterator[tuple[bool, int, int]]:
        """What a stage sends to another, as (backward, micro-batch, part that it is for)."""
        for step in self.schedule[sender]:
            part = step.chunk * self.post.stages + sender + (-1 if step.backward else 1)
            if 0 <= part < self.parts and part % self.post.stages == to:
                yield step.backward, step.micro_batch, part


def execute(
    model: Transformer,
    schedule: Schedule,
    passes: Sequence[Pass],
    caches: Sequence[Cache] | None = None,
    loss: Loss | None = None,
) -> Executed:
    """Run this stage's part of a schedule; all stages call it with the same one, and models that have as many chunks.

    With a loss(output, micro-batch) -> a scalar, backward steps leave gradients in the stage's parameters. Raises a ValueError
    if passes do not fit the schedule.
    """
    stages, post = len(schedule), post_of(model)
    if stages != post.stages:
        raise ValueError(f"a schedule for {stages} stages, and {post.stages} of them")
    if model.config.per_layer_width or any(pass_.states for pass_ in passes):
        raise ValueError("schedules carry hidden states only: no per-layer inputs, and no states for drafters")
    counted = {step.micro_batch for steps in schedule for step in steps}
    if counted != set(range(len(passes))):
        raise ValueError(f"a schedule of {len(counted)} micro-batches, and {len(passes)} passes")
    if _parts(schedule) != stages * len(model.chunks):
        raise ValueError(f"a schedule of {_parts(schedule) // stages} chunks, and a model with {len(model.chunks)}")
    with torch.set_grad_enabled(loss is not None):
        return Executor(model, schedule, passes, caches, loss).run()
