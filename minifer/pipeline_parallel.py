"""Pipeline parallelism: every rank has some consecutive layers, and hands what it has computed to the next.

    stage 0   embedding, layers 0-14 ──hidden──► stage 1   layers 15-29, norm, head ──► decides
        ▲                                                                                  │
        └───────────────────────────── the tokens decided ◄────────────────────────────────┘

One batch alone keeps one stage busy at a time. So several micro-batches are in flight, each with its own cache and its own
loop (decode's, or mtp's), and stages give them turns in one fixed order:

    stage 0   A0  B0 │ A1  B1 │ A2  B2          A1 needs what was decided after A0
    stage 1       A0   B0 │ A1  B1 │ A2

The last stage goes on with a micro-batch's loop right after its pass, so that its decision leaves at once; an earlier stage does
so when its turn comes again, and finds the decision there. Sends never block (tested over shared memory and gloo). All stages take
turns in the same order, so what a pair exchanges is awaited in the order in which it was sent, and messages need no labels, also
where chunks send them round the ring.

With v chunks a stage has v stretches of layers, and each micro-batch comes round v times (interleaving): a pass takes v turns.

Invariant: ids are those of one device; every stage takes the same decisions, and its caches have the same lengths.
Cost: N D elements a boundary and pass (and as many for each state that a drafter reads), and 8 bytes a decided number to each
earlier stage. A rank reads and keeps its own layers and their caches. Time between two tokens of a row: never less than on one
rank. Idle share of one pass of m equal micro-batches over p stages: (p - 1) / (v m + p - 1) of the whole, with chunks where m is a
multiple of p. Decoding goes on and on, so that only 1 - m / p stays idle, and nothing from m = p on.
Sources: Huang et al. 2019 (GPipe, arXiv 1811.06965); Narayanan et al. 2021 (arXiv 2104.04473, section 2.2: interleaving).

Letters: N tokens of a pass, D width, p stages, m micro-batches, v chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from . import decode
from .batch import Batch, Completion, Request
from .model.cache import Cache
from .model.layers import Hidden
from .model.passes import Output, Pass
from .model.transformer import Chunk, Embedding, Transformer
from .pipeline_split import counts

States = list[torch.Tensor]
Begin = Callable[..., tuple[Batch, decode.Steps, Cache]]


def shard(
    model: Transformer,
    group: dist.ProcessGroup,
    split: str | Sequence[int] | None = None,
    chunks: int = 1,
    drafting: bool = False,
) -> Transformer:
    """Keep this stage's layers of an empty model; it is called as before, by all stages together, and its output decided on.

    split: layers of each part, "even", or None: by measured time (pipeline_split.py). chunks: parts a stage. drafting: the last
    stage keeps the embedding too, which drafters that run there may read. Raises the same ValueError on all ranks if the layers
    cannot be cut so.
    """
    [whole] = model.chunks
    assert isinstance(whole, Chunk)
    sizes, post = counts(model, group, split, chunks), Post(group)
    if post.stages == 1:
        sizes = [len(model.layers)]  # with itself a stage exchanges nothing
    mine, parts, slot = [], len(sizes), 0
    for part in range(post.stage, parts, post.stages):  # dealt like cards
        first = sum(sizes[:part])
        layers = model.layers[first : first + sizes[part]]
        entrance = whole.entrance if part == 0 else Receive(post, model, first)
        mine.append(Chunk(entrance, layers, whole.exit if part == parts - 1 else Send(post, model), slot))
        slot += sum(layer.attention.keys_of is None for layer in layers)
    if drafting and post.last and post.stages > 1:
        assert isinstance(whole.entrance, Embedding)
        model.lookup = whole.entrance
    model.chunks = nn.ModuleList(mine)
    model.agreements.append(FromLast(post))  # behind those of groups within a stage
    return model


class Post:
    """A stage's messages. Those that leave keep their tensors until they are gone."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.stage, self.stages = group, group.rank(), group.size()
        self.last = self.stage == self.stages - 1
        self._leaving: deque[tuple[Any, torch.Tensor]] = deque()

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Without waiting. to: a stage; behind the last comes the first."""
        tensor = tensor.contiguous()
        self._leaving.append((dist.isend(tensor, group=self.group, group_dst=to % self.stages), tensor))
        while self._leaving and self._leaving[0][0].is_completed():
            self._leaving.popleft()

    def receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        """Into this tensor."""
        dist.recv(like, group=self.group, group_src=source % self.stages)
        return like

    def settle(self) -> None:
        """Until all has left."""
        while self._leaving:
            self._leaving.popleft()[0].wait()


class Receive(nn.Module):
    """The entrance of a later part: hidden states, and with them what was read on the way for drafters and later layers."""

    def __init__(self, post: Post, model: Transformer, first: int) -> None:
        super().__init__()
        self.post, self.first = post, first
        self.width, self.embeds = model.config.width, bool(model.config.per_layer_width)
        self._whose = [model]  # in a list: a model is no part of its entrance

    def forward(self, pass_: Pass) -> tuple[Hidden, States]:
        [model], before = self._whose, sum(layer < self.first for layer in pass_.states)
        message = torch.empty(1 + self.embeds + before, len(pass_.ids), self.width, dtype=model.dtype, device=model.device)
        hidden, *more = self.post.receive(message, self.post.stage - 1).unbind()
        if self.embeds:
            pass_.shared["embedded"] = pass_.ids, more.pop(0)
        return hidden, more


class Send(nn.Module):
    """The exit of an earlier part. Nothing is left to read here."""

    def __init__(self, post: Post, model: Transformer) -> None:
        super().__init__()
        self.post, self.embeds = post, bool(model.config.per_layer_width)

    def forward(self, hidden: Hidden, states: States, pass_: Pass) -> tuple[None, None]:
        embedded = [pass_.shared["embedded"][1]] if self.embeds else []
        self.post.send(torch.stack([hidden, *embedded, *states]), self.post.stage + 1)
        return None, None


class FromLast:
    """The last stage decides, and tells the others."""

    def __init__(self, post: Post) -> None:
        self.post = post

    def __call__(self, decision: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor:
        if not self.post.last:
            return self.post.receive(torch.empty(shape, dtype=torch.int64), self.post.stages - 1)
        assert decision is not None, "the last stage holds the head"
        for stage in range(self.post.stages - 1):
            self.post.send(decision.reshape(shape), stage)
        return decision


def run(model: Transformer, loops: Sequence[decode.Steps], caches: Sequence[Cache]) -> list[Any]:
    """Drive several loops at once, each on its own cache; what each returns. All stages call this with the same loops.

    One loop alone is the naive pipeline, which decode.run drives just as well. Loops that have ended make room for the others.
    """
    post, turns = post_of(model), deque(range(len(loops)))
    passes: dict[int, tuple[Pass, deque[Chunk]]] = {}  # under way: the pass, and the parts of it that are still to come
    outputs: dict[int, Output] = {}
    results: dict[int, Any] = {}

    def resume(at: int) -> None:
        try:
            pass_ = loops[at].send(outputs.pop(at, None))  # type: ignore[arg-type]
        except StopIteration as end:
            results[at] = end.value
        else:
            caches[at].begin(pass_)
            passes[at] = pass_, deque(model.chunks)  # type: ignore[arg-type]

    with torch.inference_mode():
        while turns:
            at = turns.popleft()
            if at not in passes and at not in results:
                resume(at)  # its first turn; on an earlier stage every one: what the last stage decided is due
            if at in passes:
                pass_, chunks = passes[at]
                hidden, states = chunks.popleft()(pass_, caches[at])
                if not chunks:
                    del passes[at]
                    caches[at].commit(pass_)
                    outputs[at] = Output(model, pass_, hidden, states, caches[at])
                    if post.last:
                        resume(at)  # so that its decision leaves at once
            if at not in results:
                turns.append(at)
    post.settle()
    return [results[at] for at in range(len(loops))]


def begin(model: Transformer, prompts: Sequence[Sequence[int] | Request], **options: Any) -> tuple[Batch, decode.Steps, Cache]:
    """Of plain decoding: a batch, its loop and its cache."""
    batch = decode.start(model, prompts, **options)
    return batch, decode.steps(batch), decode.new_cache(model, batch)


def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int] | Request],
    micro_batches: int = 1,
    begin: Begin = begin,
    **options: Any,
) -> list[Completion]:
    """Decode prompts in so many micro-batches at once; completions in the order of the prompts, with the same ids on every stage.

    Sizes differ by one at most; more micro-batches than prompts are as many as prompts. begin(model, prompts, **options) -> (batch,
    loop, cache): decode's by default; mtp.start with a drafter speculates. Raises what that raises, and a ValueError for no
    micro-batches and for a cache, of which each needs its own.
    """
    if micro_batches < 1:
        raise ValueError(f"{micro_batches} micro-batches: one at least")
    if options.get("cache") is not None:
        raise ValueError("each micro-batch makes a cache of its own: none can be given")
    decode.start(model, prompts, options.get("max_new_tokens", 64), tokenizer=options.get("tokenizer"))  # errors name prompts
    m = min(micro_batches, max(1, len(prompts)))
    bounds = [len(prompts) * at // m for at in range(m + 1)]
    begun = [begin(model, prompts[first:end], **options) for first, end in pairwise(bounds)]
    done = run(model, [loop for _, loop, _ in begun], [cache for _, _, cache in begun])
    return [completion for completions in done for completion in completions]


def post_of(model: Transformer) -> Post:
    """Of a model that `shard` has cut."""
    found = [agreement.post for agreement in model.agreements if isinstance(agreement, FromLast)]
    if not found:
        raise ValueError("this model is no pipeline: load it with shard=lambda empty: pipeline_parallel.shard(empty, group)")
    return found[0]
