"""Data parallelism: every rank has the whole model and serves its share of the requests.

    requests   0 1 2 3 4 5 6          dealt like cards
    rank 0     0   2   4   6          decode.generate on its own model, no word to the others
    rank 1       1   3   5
    results    0 1 2 3 4 5 6          gathered once, at the end, in the order they came

Invariant: a request's ids are what one rank alone would give it: no rank knows what another one serves.
Cost: nothing while decoding; one gather of ids at the end (8 bytes a token, and a few numbers a request). Memory: a whole
model a rank. It multiplies throughput, and never shortens the time of one request.

Sharding the weights at rest, and gathering each layer's just ahead of its use (ZeRO-3), is the other half of this module's
subject and not here yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from . import decode
from .batch import Completion, Request
from .model.transformer import Transformer

T = TypeVar("T")


def deal(items: Sequence[T], ranks: int, rank: int) -> list[T]:
    """The items that this rank serves: number rank, rank + ranks, rank + 2 ranks, ... Perhaps none."""
    return list(items[rank::ranks])


def gather(mine: Sequence[T], count: int, group: dist.ProcessGroup) -> list[T]:
    """On every rank all `count` items in the order they had before `deal`, from each rank's share in the order it had them."""
    ranks = group.size()
    shares: list[Any] = [None] * ranks
    dist.all_gather_object(shares, list(mine), group=group)
    return [shares[item % ranks][item // ranks] for item in range(count)]


def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int] | Request],
    group: dist.ProcessGroup,
    serve: Callable[..., list[Completion]] = decode.generate,
    **options: Any,
) -> list[Completion]:
    """`serve` over the ranks of `group`, each with a whole model: all completions, in order, on every rank.

    Any number of prompts, fewer than ranks and none included. serve(model, prompts, **options): how a replica serves its
    share; any technique's generate will do. Every rank must call this with the same prompts, and raises the same ValueError
    if one of them cannot be served. Times of a completion are those of the rank that served it.
    """
    decode.requests_of(model, prompts, options.get("max_new_tokens", 64))
    mine = deal(prompts, group.size(), group.rank())
    return gather(serve(model, mine, **options), len(prompts), group)
