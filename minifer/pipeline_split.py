"""Which stage of a pipeline runs which layers.

A pipeline is as fast as its slowest stage, and the last one has more to do than its layers: the head, a matrix over the whole
vocabulary, weighs several layers. So by default layers are dealt by what they were measured to take.

    30 layers, head as heavy as 3      even   [15 15]      stages 15 and 18
                                       by time [17 13]      stages 17 and 16

A *part* is what stands between two boundaries: with v chunks a stage there are v parts for each, dealt like cards, so that part
i belongs to stage i mod p. A boundary cannot part a layer from the one whose keys and values it reads (Gemma 4).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import nn

from .model.config import Config, LayerConfig
from .model.layers import Layer
from .model.linear import Linear
from .model.load import default_device, default_dtype
from .model.passes import Pass, Span
from .model.transformer import Head, Transformer

REPEATS = 15  # how often layers are timed
COPIES = 6  # of a layer, one after the other: a single one would stay in the processor's caches, which no real step finds there


def counts(model: Transformer, group: dist.ProcessGroup, split: str | Sequence[int] | None = None, chunks: int = 1) -> list[int]:
    """How many layers each part has, the same on all ranks.

    split: "even"; None: by measured time; or the counts themselves. Raises a ValueError with the numbers if there are more parts
    than layers, if counts do not add up, or if a boundary falls where none can be.
    """
    layers, parts = len(model.layers), group.size() * chunks
    if chunks < 1 or parts > layers:
        raise ValueError(f"{group.size()} stages of {chunks} chunks need {parts} layers at least: the model has {layers}")
    if split is not None and not isinstance(split, str):
        found = list(split)
        if len(found) != parts or sum(found) != layers or min(found) < 1:
            raise ValueError(f"a split of {layers} layers over {parts} parts names as many counts of 1 or more: {found}")
    elif split == "even":
        found = even(layers, parts)
    elif split is None:
        found = _agreed(balanced(*seconds(model.config), parts, boundaries(model.config)), model, group)
    else:
        raise ValueError(f'split is "even", None (by time) or counts, it is {split!r}')
    _check(found, model.config)
    return found


def even(layers: int, parts: int) -> list[int]:
    """Counts that differ by one at most. 7 over 2: [4, 3]; 10 over 3: [4, 3, 3]."""
    return [layers // parts + (part < layers % parts) for part in range(parts)]


def boundaries(config: Config) -> list[int]:
    """The layers that a part can begin with: no later layer reads keys and values from before them."""
    sources = [(number, one.keys_of) for number, one in enumerate(config.each) if one.keys_of is not None]
    return [at for at in range(1, config.layers) if not any(source < at <= number for number, source in sources)]


def balanced(layers: Sequence[float], last: float, parts: int, allowed: Sequence[int] | None = None) -> list[int]:
    """Counts for which the slowest part is as fast as can be. layers: seconds of each; last: of what the last part has besides.

    allowed: where parts can begin; all places by default. Of equally good ones, those whose first parts are larger.
    """
    count, places = len(layers), set(range(1, len(layers)) if allowed is None else allowed)

    @cache
    def best(first: int, left: int) -> tuple[float, tuple[int, ...]]:
        """Of the layers from `first` on, in `left` parts: (the slowest part, counts)."""
        if left == 1:
            return sum(layers[first:]) + last, (count - first,)
        found = [
            (max(sum(layers[first:at]), best(at, left - 1)[0]), -(at - first), at)
            for at in range(first + 1, count)
            if at in places and count - at >= left - 1 and best(at, left - 1)[0] < float("inf")
        ]
        if not found:
            return float("inf"), ()
        slowest, _, at = min(found)
        return slowest, (at - first, *best(at, left - 1)[1])

    slowest, found = best(0, parts)
    if slowest == float("inf"):
        raise ValueError(f"{count} layers cannot be cut into {parts} parts: parts can begin with layers {sorted(places)} only")
    return list(found)


def seconds(config: Config) -> tuple[list[float], float]:
    """Measured on this machine, with zeros for weights: what a decode step takes in each layer, and in the head."""
    device = default_device()
    kinds: dict[LayerConfig, float] = {}
    for number, own in enumerate(config.each):
        if own not in kinds:
            kinds[own] = _layer_seconds(config, number, device)
    head, hidden = Head(config), torch.zeros(1, config.width, dtype=default_dtype(device), device=device)
    _make_real(head, device)
    return [kinds[own] for own in config.each], _median_seconds(lambda: head.raw(head.norm(hidden)))


def _layer_seconds(config: Config, number: int, device: torch.device) -> float:
    layers = [Layer(config, number) for _ in range(COPIES)]
    for layer in layers:
        layer.fuse()
        _make_real(layer, device)
    pass_ = Pass(torch.zeros(1, dtype=torch.int64), (Span(0, 0, 1),), (0,))
    hidden = torch.zeros(1, config.width, dtype=default_dtype(device), device=device)
    heads, width = layers[0].attention.cache_shape
    other = torch.zeros(1, heads, width, dtype=hidden.dtype, device=device)
    pass_.shared.update({"embedded": (pass_.ids, hidden), ("keys and values", layers[0].attention.keys_of): (other, other)})
    return _median_seconds(lambda: [layer(hidden, pass_, None, 0) for layer in layers]) / COPIES


def _make_real(module: nn.Module, device: torch.device) -> None:
    """Fill an empty module with zeros, packed as a loaded one is."""
    module.to(default_dtype(device)).to_empty(device=device)
    for parameter in module.parameters():
        parameter.data.zero_()
    for part in module.modules():
        if isinstance(part, Linear):
            part.pack()


def _median_seconds(run: Callable[[], object]) -> float:
    taken = []
    with torch.inference_mode():
        for _ in range(REPEATS):
            started = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def _agreed(found: list[int], model: Transformer, group: dist.ProcessGroup) -> list[int]:
    """The first rank's, since each has measured for itself: of the pipeline, and then of those who run a stage together."""
    first = torch.tensor(found)
    dist.broadcast(first, group=group, group_src=0)
    told: torch.Tensor | None = first
    for agree in model.agreements:
        told = agree(told, (len(found),))
    assert told is not None
    return told.tolist()


def _check(found: Sequence[int], config: Config) -> None:
    allowed, at = boundaries(config), 0
    for count in found[:-1]:
        at += count
        if at not in allowed:
            raise ValueError(f"a part cannot begin with layer {at}: later layers read keys and values from before it ({found})")
