"""From logits to a token: what the options mean, and a draw that depends on nothing but the request.

Order of the options, as in transformers: repetition penalty, temperature, top-k, top-p, min-p. Temperature 0 is greedy: the
likeliest token, the lowest id of equals, and no randomness at all.

Randomness has no state. The draw of a request's token at a position is a function of (seed, position): the same whatever
else is in the batch, whichever row the request sits in, and on whichever rank it is made.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are drawn. The default is greedy.

    top_k: of the likeliest k only (None or 0: all). top_p: of the likeliest ones whose probabilities first reach top_p
    together (at least one). min_p: of those at least min_p times as likely as the likeliest. repetition_penalty: logits of
    tokens already in the text are divided by it if positive, else multiplied. seed: None draws a new one for each request.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            if not isinstance(getattr(self, name), (int, float)):
                raise ValueError(f"{name} must be a number, it is {getattr(self, name)!r}")
        if self.top_k is not None and not isinstance(self.top_k, int):
            raise ValueError(f"top_k must be a whole number or None, it is {self.top_k!r}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be a finite number >= 0, it is {self.temperature}")
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"top_k must be >= 0 (0 or None: off), it is {self.top_k}")
        if not 0 <= self.top_p <= 1:
            raise ValueError(f"top_p must lie in 0..1, it is {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must lie in 0..1, it is {self.min_p}")
        if self.seed is not None and not isinstance(self.seed, int):
            raise ValueError(f"seed must be a whole number or None, it is {self.seed!r}")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ValueError(f"repetition_penalty must be > 0, it is {self.repetition_penalty}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def new_seed() -> int:
    """A seed for a request that names none. Neither reads nor moves anybody's random generator."""
    return secrets.randbits(63)


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """A number in [0, 1) that depends on these three only. A counter-based generator: there is no state to share or lose.

    stream: 0 draws tokens; other streams are for whoever needs further independent numbers at the same position.
    """
    key = np.array([seed & (2**64 - 1), stream], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=position)).random())


def penalise(logits: torch.Tensor, samplings: Sequence[Sampling], texts: Sequence[Sequence[int]]) -> torch.Tensor:
    """logits [R, V] with each row's repetition penalty on the tokens of its text (prompt and output). No row asks: unchanged."""
    if all(sampling.repetition_penalty == 1 for sampling in samplings):
        return logits
    logits = logits.clone()
    for row, (sampling, text) in enumerate(zip(samplings, texts)):
        if sampling.repetition_penalty != 1:
            seen = torch.tensor(sorted(set(text)), device=logits.device)
            old = logits[row, seen]
            logits[row, seen] = torch.where(old > 0, old / sampling.repetition_penalty, old * sampling.repetition_penalty)
    return logits


def distributions(logits: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """The distribution [R, V] that each row's token is drawn from, float32 at least. A greedy row is a point mass."""
    greedy = torch.tensor([sampling.greedy for sampling in samplings], device=logits.device)
    temperature = torch.tensor([s.temperature or 1.0 for s in samplings], device=logits.device, dtype=torch.float64)
    # The largest logit becomes 0 first: then no temperature above 0, however small, can make it overflow.
    scaled = ((logits - logits.amax(-1, keepdim=True)) / temperature[:, None]).to(logits.dtype)
    if any(s.top_k or s.top_p < 1 for s in samplings):
        scaled = _top_k_and_p(scaled, samplings)
    probabilities = scaled.softmax(-1)
    if any(s.min_p for s in samplings):
        least = torch.tensor([s.min_p for s in samplings], device=logits.device, dtype=probabilities.dtype)[:, None]
        probabilities = probabilities.where(probabilities >= least * probabilities.amax(-1, keepdim=True), 0.0)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    if bool(greedy.any()):
        point = torch.zeros_like(probabilities).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
        probabilities = torch.where(greedy[:, None], point, probabilities)
    return probabilities


def _top_k_and_p(scaled: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """-inf outside of each row's top-k, then outside of its top-p among what is left. Ties go to the lowest id."""
    width = scaled.shape[-1]
    ordered, order = scaled.sort(stable=True, dim=-1, descending=True)  # [R, V]
    top_k = torch.tensor([min(s.top_k or width, width) for s in samplings], device=scaled.device)[:, None]
    ordered = ordered.masked_fill(torch.arange(width, device=scaled.device) >= top_k, -math.inf)
    top_p = torch.tensor([s.top_p for s in samplings], device=scaled.device, dtype=torch.float64)[:, None]
    probabilities = ordered.to(torch.float64).softmax(-1)
    before = probabilities.cumsum(-1) - probabilities  # of all likelier ones: the token that crosses top_p stays
    outside = (before >= top_p) & (top_p < 1)
    outside[:, 0] = False
    return torch.empty_like(scaled).scatter_(1, order, ordered.masked_fill(outside, -math.inf))


def draw(probabilities: torch.Tensor, numbers: Sequence[float]) -> torch.Tensor:
    """int64 [R]: for each row of [R, V] the token at which the running sum passes the row's number in [0, 1)."""
    running = probabilities.to(torch.float64).cumsum(-1)
    total = running[:, -1:]
    aim = torch.tensor(numbers, dtype=torch.float64, device=probabilities.device)[:, None] * total
    aim = torch.minimum(aim, torch.nextafter(total, torch.zeros_like(total)))  # the product may round up to the total
    # The first token whose running sum exceeds the aim: never one of probability 0.
    return torch.searchsorted(running, aim, right=True)[:, 0]
