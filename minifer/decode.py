"""Autoregressive decode: one token a row a pass, and the loop that every other technique keeps equal to.

    prompts ──► pass over the prompts ──► a token each ──► pass over these tokens ──► a token each ──► ...
                (prefill, many tokens)                     (decode, one token a row)

The loop and the machine are apart. `steps` holds everything that decides (sampling, stopping) and nothing that computes: it
yields a Pass and receives its Output. `turns` and `run` drive it on a model. A pipeline drives several such loops at once,
the tests drive it with a scripted model, and the loop is the same.

Invariant: a row's ids are a function of its request alone, whatever shares the batch.
Cost: the whole model is read once a pass, so once for a token of every row; a pass over N tokens of a model of P weights is
2 P N operations. One row alone uses each weight it reads once: memory bandwidth is the limit, and everything that minifer
shows is a way around that.

Letters: R rows of the batch, N tokens of a pass, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from .batch import Batch, Completion, Fresh, Request, Row
from .model.cache import Cache
from .model.passes import Output, Pass
from .model.sampling import Sampling
from .model.tokenizer import Tokenizer
from .model.transformer import Transformer
from .speed import Speed, speed

__all__ = [
    "Batch", "Completion", "Fresh", "Pass", "Request", "Sampling", "Speed", "fresh", "generate", "run", "speed", "start", "steps",
    "stream", "turns",
]  # fmt: skip

Steps = Generator[Pass, Output, Any]  # what a loop is: yields passes, is sent outputs, returns its result


def steps(batch: Batch) -> Steps:
    """Plain decoding, whole."""
    while batch.active:
        output = yield batch.extend()
        batch.take(output.decide(batch.sample, batch.rows))
    return batch.completions()


def turns(model: Transformer, loop: Steps, cache: Cache) -> Generator[None, None, Any]:
    """Drive a loop on a model, one pass a turn; returns what the loop returns."""
    output: Any = None
    while True:
        with torch.inference_mode():
            try:
                pass_ = loop.send(output)
            except StopIteration as end:
                return end.value
            output = model(pass_, cache)
        yield


def run(model: Transformer, loop: Steps, cache: Cache) -> Any:
    """Drive a loop to its end."""
    driver = turns(model, loop, cache)
    while True:
        try:
            next(driver)
        except StopIteration as end:
            return end.value


def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int] | Request],
    max_new_tokens: int | None = 64,
    *,
    sampling: Sampling | None = None,
    tokenizer: Tokenizer | None = None,
    cache: Cache | None = None,
) -> list[Completion]:
    """Decode prompts (ids, or Requests for options of their own) together; completions in the order of the prompts.

    tokenizer: gives completions a text. cache: of an earlier call on the same model; what a row of it already holds of its
    prompt is not run again, and it must be large enough for what is to come. Raises ValueError, before any pass, for what
    the model or the cache cannot hold.
    """
    batch = start(model, prompts, max_new_tokens, sampling=sampling, tokenizer=tokenizer, cache=cache)
    return run(model, steps(batch), cache or new_cache(model, batch))


def stream(
    model: Transformer,
    prompts: Sequence[Sequence[int] | Request],
    max_new_tokens: int | None = 64,
    *,
    sampling: Sampling | None = None,
    tokenizer: Tokenizer | None = None,
    cache: Cache | None = None,
) -> Iterator[Fresh]:
    """As generate, but what each row gains is handed out as soon as it is decided."""
    batch = start(model, prompts, max_new_tokens, sampling=sampling, tokenizer=tokenizer, cache=cache)
    return fresh(batch, turns(model, steps(batch), cache or new_cache(model, batch)))


def fresh(batch: Batch, driver: Generator[None, None, Any]) -> Iterator[Fresh]:
    """What each turn of a driver adds to the batch's rows."""
    for _ in driver:
        yield from batch.fresh
        batch.fresh = []
    yield from batch.fresh


def start(
    model: Transformer,
    prompts: Sequence[Sequence[int] | Request],
    max_new_tokens: int | None = 64,
    *,
    sampling: Sampling | None = None,
    tokenizer: Tokenizer | None = None,
    cache: Cache | None = None,
) -> Batch:
    """A Batch of these prompts, checked against what the model and the cache can hold."""
    requests = requests_of(model, prompts, max_new_tokens, sampling)
    if cache is not None and cache.rows < len(requests):
        raise ValueError(f"{len(requests)} prompts do not fit a cache of {cache.rows} rows")
    rows = []
    for at, request in enumerate(requests):
        budget = request.max_new_tokens
        assert budget is not None, "requests_of has filled it in"
        if cache is not None and len(request.ids) + budget - 1 > cache.capacity:
            needed = f"{len(request.ids)} tokens + max_new_tokens {budget}"
            raise ValueError(f"prompt {at}: {needed} exceed the cache's capacity of {cache.capacity}")
        ends = (*model.config.end_ids, *(tokenizer.end_ids if tokenizer else ()))
        row = Row(request, budget, frozenset(ends if request.stop_ids is None else request.stop_ids), tokenizer)
        if cache is not None:
            row.cached, row.capacity = min(cache.holds(at, row.tokens), row.prompt - 1), cache.capacity
        if request.stop_strings and tokenizer is None:
            raise ValueError(f"prompt {at} has stop strings: finding them needs a tokenizer")
        rows.append(row)
    return Batch(rows)


def requests_of(
    model: Transformer,
    prompts: Sequence[Sequence[int] | Request],
    max_new_tokens: int | None = 64,
    sampling: Sampling | None = None,
) -> list[Request]:
    """The prompts as Requests, each with a max_new_tokens. Raises a ValueError naming the first that this model cannot serve."""
    requests = []
    for at, prompt in enumerate(prompts):
        if isinstance(prompt, (int, str)):
            raise ValueError(f"prompts are lists of ids, one list a prompt (for a single one: [ids]); number {at} is {prompt!r}")
        request = prompt if isinstance(prompt, Request) else Request(prompt, max_new_tokens, sampling or Sampling())
        budget = _budget(request, model, at)
        requests.append(request if request.max_new_tokens == budget else replace(request, max_new_tokens=budget))
    return requests


def new_cache(model: Transformer, batch: Batch, spare: int = 0) -> Cache:
    """A cache just large enough for these rows. The last token of a row is never run, so it needs no place.

    spare: places more, for drafts of which only some can stay.
    """
    needed = [row.prompt + row.budget - 1 + spare for row in (batch.row(at) for at in range(batch.rows))]
    return model.new_cache(max(1, batch.rows), max([1, *needed]))


def _budget(request: Request, model: Transformer, at: int) -> int:
    """How many tokens this request may add. Raises a ValueError with the numbers if it does not fit."""
    prompt, context, vocabulary = len(request.ids), model.config.context, model.config.vocabulary
    if prompt == 0:
        raise ValueError(f"prompt {at} is empty: there is nothing to continue (a BOS token would do)")
    strange = [token for token in request.ids if not 0 <= token < vocabulary]
    if strange:
        raise ValueError(f"prompt {at} holds id {strange[0]}, outside of the model's vocabulary of {vocabulary}")
    budget = max(0, context - prompt) if request.max_new_tokens is None else request.max_new_tokens
    if prompt + budget > context:
        raise ValueError(f"prompt {at}: {prompt} tokens + max_new_tokens {budget} exceed the model's context of {context}")
    return budget
