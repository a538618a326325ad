"""The stops of the tour: each technique as a function that every rank of a world runs, and watched from beside its loop.

Plain decoding is one too, on a world of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.distributed as dist

from . import data_parallel, decode, drafters, mtp, pipeline_parallel, tensor_parallel
from .batch import Batch, Completion
from .model.cache import Cache
from .model.passes import Output, Pass
from .model.transformer import Transformer
from .verdict import Run

Technique = Callable[[Transformer, list[list[int]], int, bool], Run]  # (model, prompts, new tokens, watched?)


@dataclass(frozen=True)
class Stop:
    """A stop of the tour: how a technique is called, on how many ranks, what each rank runs, and where to read about it.

    drafter: the kind that it needs; models for which there is none are not taken there. baseline: the stop whose speed its own
    is held against. shard: what each rank keeps of the model; None: all of it.
    """

    name: str
    ranks: int
    technique: Technique
    module: str = ""
    lesson: str = ""
    drafter: str = ""
    baseline: str = "autoregressive decode"
    shard: Callable[[Transformer], Transformer] | None = None


def plain(model: Transformer, prompts: list[list[int]], tokens: int, watched: bool) -> Run:
    """decode.generate"""
    run = Run([])
    run.completions = _generate(model, prompts, tokens, run if watched else None, range(len(prompts)))
    return run


def speculative(kind: str) -> Technique:
    """mtp.generate with the model's bundled drafter of this kind."""

    return partial(_speculate, kind)


def _speculate(kind: str, model: Transformer, prompts: list[list[int]], tokens: int, watched: bool) -> Run:
    if (kind, id(model)) not in _drafters:
        _drafters[kind, id(model)] = drafters.load(kind, model)
    batch, loop, cache = mtp.start(model, prompts, _drafters[kind, id(model)], max_new_tokens=tokens)
    run = Run([])
    run.completions = decode.run(model, _watch(batch, loop, run, range(len(prompts))) if watched else loop, cache)
    return run


def one_at_a_time(technique: Technique) -> Technique:
    """The same, prompt after prompt: batch 1, where a single user waits and where speculation is made for."""

    return partial(_alone, technique)


def _alone(technique: Technique, model: Transformer, prompts: list[list[int]], tokens: int, watched: bool) -> Run:
    run, before = Run([]), 0.0
    for number, prompt in enumerate(prompts):
        part = technique(model, [prompt], tokens, watched)
        run.completions += [replace(one, seconds=before + one.seconds) for one in part.completions]
        run.row_passes += part.row_passes
        run.margins.update((number, gaps) for gaps in part.margins.values())
        before += part.seconds
    return run


# In a rank: the drafters that were loaded, by kind and model. Functions that use it go there by name, never with its contents.
_drafters: dict[tuple[str, int], drafters.Drafter] = {}


def together(technique: Technique) -> Technique:
    """The same on a model that all ranks run together: a pass of all of them is one pass."""
    return partial(_together, technique)


def _together(technique: Technique, model: Transformer, prompts: list[list[int]], tokens: int, watched: bool) -> Run:
    run = technique(model, prompts, tokens, watched)
    if dist.get_rank():
        run.row_passes = 0  # the first rank counts
    return run


def slices(model: Transformer) -> Transformer:
    """tensor_parallel.shard over all ranks"""
    return tensor_parallel.shard(model, _world())


def slices_and_tokens(model: Transformer) -> Transformer:
    """The same, with norms and residuals on shares of the tokens"""
    return tensor_parallel.shard(model, _world(), sequence_parallel=True)


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def replicas(model: Transformer, prompts: list[list[int]], tokens: int, watched: bool) -> Run:
    """data_parallel.generate over all ranks"""
    group, run = _world(), Run([])
    mine = data_parallel.deal([len(ids) + tokens for ids in prompts], group.size())[group.rank()]

    def serve(model: Transformer, share: list[list[int]], max_new_tokens: int) -> list[Completion]:
        return _generate(model, share, max_new_tokens, run if watched else None, mine)

    run.completions = data_parallel.generate(model, prompts, group, serve, max_new_tokens=tokens)
    return run


def at_rest(model: Transformer) -> Transformer:
    """data_parallel.shard_weights over all ranks"""
    return data_parallel.shard_weights(model, _world())


def stages(model: Transformer) -> Transformer:
    """pipeline_parallel.shard over all ranks"""
    return pipeline_parallel.shard(model, _world())


def stages_that_draft(model: Transformer) -> Transformer:
    """The same, with what drafters read on the last stage"""
    return pipeline_parallel.shard(model, _world(), drafting=True)


def in_flight(micro_batches: int) -> Technique:
    """pipeline_parallel.generate with so many micro-batches"""
    return partial(_in_flight, micro_batches)


def _in_flight(micro_batches: int, model: Transformer, prompts: list[list[int]], tokens: int, watched: bool) -> Run:
    run, begun = Run([]), 0

    def begin(model: Transformer, some: list[list[int]], **options: Any) -> tuple[Batch, decode.Steps, Cache]:
        nonlocal begun
        batch, loop, cache = pipeline_parallel.begin(model, some, **options)
        numbers = range(begun, begun + len(some))
        begun += len(some)
        return batch, _watch(batch, loop, run, numbers) if watched else loop, cache

    run.completions = pipeline_parallel.generate(model, prompts, micro_batches, begin, max_new_tokens=tokens)
    return run


ALONE = "decode, one at a time"
FIRST, LATER = ("speculation", "02_speculative_decoding"), ("multi-token", "03_multi_token_prediction")
DRAFTERS = dict.fromkeys(("prompt_lookup", "draft_model", "medusa"), FIRST) | dict.fromkeys(("eagle", "deepseek", "gemma"), LATER)
TENSOR = ("tensor_parallel", "04_tensor_parallelism")
DATA = ("data_parallel", "05_data_parallelism")
PIPELINE = ("pipeline_parallel", "06_pipeline_parallelism")
STOPS = (
    Stop("autoregressive decode", 1, plain, "decode", "01_autoregressive_decode"),
    Stop(ALONE, 1, one_at_a_time(plain), "decode", "01_autoregressive_decode", baseline=ALONE),
    *(
        Stop(f"{what}: {kind.replace('_', ' ')}", 1, one_at_a_time(speculative(kind)), "mtp", lesson, kind, ALONE)
        for kind, (what, lesson) in DRAFTERS.items()
    ),
    Stop("tensor parallelism", 2, together(plain), *TENSOR, shard=slices),
    Stop("tensor + sequence", 2, together(plain), *TENSOR, shard=slices_and_tokens),
    Stop("tensor × deepseek", 2, together(one_at_a_time(speculative("deepseek"))), *TENSOR, "deepseek", ALONE, slices),
    Stop("data parallelism", 2, replicas, *DATA),
    Stop("weights at rest", 2, replicas, *DATA, shard=at_rest),
    Stop("pipeline, 1 micro-batch", 2, together(in_flight(1)), *PIPELINE, shard=stages),
    Stop("pipeline, 4 micro-batches", 2, together(in_flight(4)), *PIPELINE, shard=stages),
    Stop(
        "pipeline × deepseek", 2, together(one_at_a_time(speculative("deepseek"))), *PIPELINE, "deepseek", ALONE, stages_that_draft
    ),
)


def stops_for(name: str) -> tuple[Stop, ...]:
    """Those that the model of this name can be taken to."""
    there = drafters.available(name)
    return tuple(stop for stop in STOPS if not stop.drafter or stop.drafter in there)


def _generate(
    model: Transformer, prompts: Sequence[Sequence[int]], tokens: int, run: Run | None, numbers: Sequence[int]
) -> list[Completion]:
    """decode.generate; where a run is given, it is told of passes and margins. numbers: of these prompts in the whole tour."""
    if run is None:
        return decode.generate(model, prompts, tokens)
    batch = decode.start(model, prompts, tokens)
    return decode.run(model, _watch(batch, decode.steps(batch), run, numbers), decode.new_cache(model, batch))


def _watch(batch: Batch, loop: decode.Steps, run: Run, numbers: Sequence[int]) -> decode.Steps:
    """The same loop, seen by who stands beside it: how many rows each pass had, and how sure the target was of each token."""
    ended, pass_ = _sent(loop, None)
    if ended:
        return pass_  # there was nothing to do
    while True:
        known = {span.row: len(batch.row(span.row).tokens) for span in pass_.spans}
        output = yield pass_
        # Whoever decides is watched too, all of its group alike, so that logits may be read here.
        gaps = [] if output.hidden is None else output.logits.topk(2).values.diff(dim=-1).neg()[:, 0].tolist()
        ended, following = _sent(loop, output)
        run.row_passes += len(pass_.spans)
        for span, kept in zip(pass_.spans, _kept(batch, pass_, known)):  # by now the rows hold what the pass decided
            if gaps:
                run.margins.setdefault(numbers[span.row], []).extend(gaps[place] for place in kept)
        if ended:
            return following
        pass_ = following


def _sent(loop: decode.Steps, output: Output | None) -> tuple[bool, Any]:
    """(False, the loop's next pass) or (True, what it returned)."""
    try:
        return False, loop.send(output)  # type: ignore[arg-type]  # the first time nothing
    except StopIteration as end:
        return True, end.value


def _kept(batch: Batch, pass_: Pass, known: dict[int, int]) -> list[list[int]]:
    """Of each span the wanted places whose successors are in the row now. known: {row: tokens that it had before}."""
    wanted = {token: place for place, token in enumerate(pass_.wanted)}
    found = []
    for number, (span, offset) in enumerate(zip(pass_.spans, pass_.offsets)):
        text, start = batch.row(span.row).tokens, known[span.row]
        parents = range(-1, span.count - 1) if pass_.parents is None else pass_.parents[number]
        node = start - span.start - 1  # the last token that was known before, as a place in the span
        places = [wanted[offset + node]]
        for token in text[start:-1]:
            node = next(child for child, parent in enumerate(parents) if parent == node and pass_.ids[offset + child] == token)
            places.append(wanted[offset + node])
        found.append(places)
    return found
