"""Data parallelism: every rank serves its own requests. Each has the whole model, or they keep it between them.

    requests   0 1 2 3 4 5 6          each to the rank with the least work so far
    rank 0     0     3   5            decode.generate on its own model, no word to the others
    rank 1       1 2   4   6
    results    0 1 2 3 4 5 6          gathered once, at the end, in the order they came

Replicas multiply throughput and never shorten the time of one request; a whole model a rank is what they cost. `shard_weights`
keeps only a share of every layer on each rank, and gathers a layer just ahead of its use:

    rank 0   keeps 1/2 of each   │ gather 0 │ run 0, gather 1 ─► run 1, gather 2 ─► run 2 ...      whole layers: two at a time
    rank 1   keeps 1/2 of each   │          │      its own requests

That is ZeRO-3, made for training, where a gathered layer serves thousands of tokens. A decode step gathers as much for one. All
ranks must then pass together: who has nothing left to run goes on gathering for the others. (How far gathering and running overlap
is up to the backend: NCCL moves by itself, minifer's shared memory only while somebody waits.)

Invariant: a request's ids are what one rank alone would give it: no rank knows what another one serves.
Cost: replicas send nothing while decoding; one gather of results at the end (8 bytes a token, and a few numbers a request). Weights
at rest: every layer's bytes, each pass, and an all-reduce of one number.
Source: Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054, section 5.3).

Letters: n ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from . import decode
from .batch import Completion, Request
from .model.layers import Hidden, Layer
from .model.linear import Linear
from .model.passes import Pass
from .model.transformer import Embedding, Head, Transformer
from .model.weights import select
from .ranks.names import all_gather_single

T = TypeVar("T")


def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int] | Request],
    group: dist.ProcessGroup,
    serve: Callable[..., list[Completion]] = decode.generate,
    **options: Any,
) -> list[Completion]:
    """`serve` over the ranks of `group`: all completions, in the order of the prompts, on every rank.

    Any number of prompts, fewer than ranks and none included. serve(model, prompts, **options): how a rank serves its share; any
    technique's generate will do. Every rank must call this with the same prompts, and raises the same ValueError if one of them
    cannot be served. Times of a completion are those of the rank that served it.
    """
    requests = decode.requests_of(model, prompts, options.get("max_new_tokens", 64))
    decode.start(model, requests, tokenizer=options.get("tokenizer"))  # whatever is wrong with one is an error everywhere
    dealt = deal([len(request.ids) + (request.max_new_tokens or 0) for request in requests], group.size())
    done = serve(model, [prompts[at] for at in dealt[group.rank()]], **options)
    stand_by(model)
    return gather(done, dealt, group)


def deal(work: Sequence[int], ranks: int) -> list[list[int]]:
    """Who serves which: each in turn goes to the rank with the least work so far. work: of each, in tokens."""
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for number, tokens in enumerate(work):
        rank = loads.index(min(loads))
        dealt[rank].append(number)
        loads[rank] += tokens
    return dealt


def gather(mine: Sequence[T], dealt: Sequence[Sequence[int]], group: dist.ProcessGroup) -> list[T]:
    """On every rank all results in order, from each rank's in the order in which they were dealt to it."""
    shares: list[Any] = [None] * group.size()
    dist.all_gather_object(shares, list(mine), group=group)
    found = {number: one for numbers, share in zip(dealt, shares) for number, one in zip(numbers, share, strict=True)}
    return [found[number] for number in range(len(found))]


def shard_weights(model: Transformer, group: dist.ProcessGroup) -> Transformer:
    """Of an empty model: keep a share of each layer's weights. Embedding, norms between layers and head stay whole.

    It is called as before, but by all ranks together: each pass of one is a pass of all (`generate` sees to that).
    """
    if not all(isinstance(chunk.entrance, Embedding) and isinstance(chunk.exit, Head) for chunk in model.chunks):
        raise ValueError("weights at rest are those of a whole model, which no pipeline has cut")
    for chunk in model.chunks:
        layers: Any = chunk.layers
        resting = [Resting(layer, group) for layer in layers]
        for one, following in pairwise(resting):
            one.ahead.append(following)
        chunk.layers = nn.ModuleList(resting)
        chunk.entrance = Announced(chunk.entrance, group)  # type: ignore[arg-type]
    return model


class Resting(nn.Module):
    """A layer of which this rank keeps a share: of each parameter as many rows as the others, the last ones filled up."""

    def __init__(self, layer: Layer, group: dist.ProcessGroup) -> None:
        super().__init__()
        layer.fuse()
        self.layer, self.group = layer, group
        self.ahead: list[Resting] = []  # the next one; in a list it is no part of this one
        self.shares = nn.ParameterList()
        self.places: list[tuple[nn.Module, str, torch.Size]] = []  # where each goes when it is whole
        for module in layer.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                first, last = (min(len(parameter), rank * self._rows(parameter.shape)) for rank in (group.rank(), group.rank() + 1))
                self.shares.append(select(parameter, 0, [(first, last)]))
                self.places.append((module, name, parameter.shape))
                setattr(module, name, None)
        self._flat: torch.Tensor | None = None  # the shares, one behind the other: what is gathered
        self._coming: tuple[torch.Tensor, dist.Work] | None = None

    def _rows(self, shape: Sequence[int]) -> int:
        return -(-shape[0] // self.group.size())

    def start(self) -> None:
        """Begin to gather, unless that is under way."""
        if self._coming is None:
            flat = self._rest()
            whole = flat.new_empty(self.group.size() * len(flat))
            work = all_gather_single(whole, flat, group=self.group, async_op=True)
            assert work is not None
            self._coming = whole, work

    def _rest(self) -> torch.Tensor:
        """All shares in one tensor, in whose memory they stand from the first time on."""
        if self._flat is None:
            sizes = [self._rows(shape) * shape[1:].numel() for _, _, shape in self.places]
            self._flat = self.shares[0].new_zeros(sum(sizes))
            for share, part in zip(self.shares, self._flat.split(sizes)):
                here = part[: share.numel()].view_as(share)
                share.data = here.copy_(share.data)
        return self._flat

    def arrive(self) -> None:
        """Wait until the layer is whole, and begin with the next one."""
        self.start()
        assert self._coming is not None
        whole, work = self._coming
        work.wait()
        self._coming, at = None, 0
        by_rank = whole.view(self.group.size(), -1)
        for module, name, shape in self.places:
            size = self._rows(shape) * shape[1:].numel()
            rows = by_rank[:, at : at + size].reshape(-1, *shape[1:])[: shape[0]]
            setattr(module, name, nn.Parameter(rows, requires_grad=False))
            at += size
        del whole, by_rank  # its rows are in their places
        for following in self.ahead:
            following.start()

    def leave(self) -> None:
        """Forget the whole layer."""
        for module, name, _ in self.places:
            setattr(module, name, None)

    def forward(self, hidden: Hidden, *given: Any) -> Hidden:
        self.arrive()
        hidden = self.layer(hidden, *given)
        self.leave()
        return hidden

    def fuse(self) -> None:
        """It has been done."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


class Announced(Embedding):
    """Says to the other ranks that a pass begins, or that this rank has none."""

    def __init__(self, whole: Embedding, group: dist.ProcessGroup) -> None:
        nn.Module.__init__(self)
        self.weight, self.scale, self.group = whole.weight, whole.scale, group

    def forward(self, pass_: Pass) -> tuple[Hidden, list[torch.Tensor]]:
        self.say(1)
        return super().forward(pass_)

    def say(self, passes: int) -> int:
        """How many ranks have a pass to run."""
        count = torch.tensor(passes, device=self.weight.device)
        dist.all_reduce(count, group=self.group)
        return int(count)


def stand_by(model: Transformer) -> None:
    """Of weights at rest: gather for the others until none of them has a pass to run. On a whole model nothing."""
    for chunk in model.chunks:
        entrance: Any = chunk.entrance
        if isinstance(entrance, Announced):
            while entrance.say(0):
                for layer in chunk.layers:  # type: ignore[union-attr]
                    layer.arrive()
                    layer.leave()


def resident_bytes(model: Transformer) -> int:
    """Of the weights that this rank keeps between passes, each tensor counted once."""
    packed = [module.packed for module in model.modules() if isinstance(module, Linear) and module.packed is not None]
    plain = [parameter.untyped_storage() for parameter in model.parameters()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in plain}.values()) + sum(one.nbytes for one in packed)
