"""Rotary position embedding: a query or key is turned, pair by pair, by an angle that grows with its position.

Pair i of a head of width h turns by position * theta^(-2i/h): the first pairs fast, the last ones slowly. The product of a
turned query and a turned key then depends on the distance of their positions only. The two numbers of a pair stand half a
head apart (i and i + h/2), as Hugging Face checkpoints have them.

Longer contexts than a model was trained on are reached by slowing the turns down: all alike ("linear"), only the slow ones
("llama3": Llama 3.1, "yarn": arXiv 2309.00071), or by a factor a pair, as GGUF files store it ("factors"). Or only some pairs turn
at all ("proportional": Gemma 4).

Letters: N tokens, H heads, h width of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

KINDS = ("default", "linear", "llama3", "yarn", "factors", "proportional")


@dataclass(frozen=True)
class Rope:
    """How positions turn heads. `kind` is one of KINDS; what a kind does not use keeps its default."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_context: int = 0
    low_frequency: float = 1.0  # llama3
    high_frequency: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn: cosines and sines are scaled by it
    truncate: bool = True  # yarn: whole numbers as the ends of its ramp
    share: float = 1.0  # proportional: only so many of the pairs turn, the fastest
    factors: tuple[float, ...] = ()  # factors: pair i turns factors[i] times slower


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """float32 [h/2]: the angle by which pair i turns from one position to the next."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "proportional":
        turning = torch.arange(head_dim // 2) < int(rope.share * head_dim // 2)
        return torch.where(turning, plain / rope.factor, 0.0)
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain, head_dim)
    if rope.kind == "factors":
        if len(rope.factors) != len(plain):
            raise ValueError(f"{len(rope.factors)} rotary factors for {len(plain)} pairs of a head of width {head_dim}")
        return plain / torch.tensor(rope.factors)
    raise ValueError(f"rotary scaling {rope.kind!r} is not supported; supported: {', '.join(KINDS)}")


def _llama3(rope: Rope, plain: torch.Tensor) -> torch.Tensor:
    """Slow pairs (a turn is longer than the trained context / low) slow down by `factor`, fast ones stay, a ramp between."""
    turns = rope.original_context * plain / (2 * math.pi)  # full turns over the trained context
    ramp = (turns - rope.low_frequency) / (rope.high_frequency - rope.low_frequency)
    ramp = ramp.clamp(0, 1)
    return (1 - ramp) * plain / rope.factor + ramp * plain


def _yarn(rope: Rope, plain: torch.Tensor, head_dim: int) -> torch.Tensor:
    """As llama3, with the ramp laid over the index of the pair: between beta_fast and beta_slow turns (arXiv 2309.00071 §3.2)."""

    def pair_with(turns: float) -> float:
        angle = rope.original_context / (turns * 2 * math.pi)
        return head_dim * math.log(angle) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    ramp = ramp.clamp(0, 1)
    return ramp * plain / rope.factor + (1 - ramp) * plain


@lru_cache(maxsize=64)
def _frequencies_on(rope: Rope, head_dim: int, device: torch.device) -> torch.Tensor:
    return inverse_frequencies(rope, head_dim).to(device)


def angles(rope: Rope, head_dim: int, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [N, 1, h] for these positions (int64 [N]), computed in float32 at least and rounded to dtype.

    The first half of the sines is negative, as `rotate` needs it.
    """
    exact = torch.promote_types(dtype, torch.float32)
    turn = positions[:, None].to(exact) * _frequencies_on(rope, head_dim, positions.device).to(exact)  # [N, h/2]
    cos, sin = turn.cos() * rope.attention_factor, turn.sin() * rope.attention_factor
    # Both numbers of a pair turn alike.
    return torch.cat([cos, cos], -1)[:, None].to(dtype), torch.cat([-sin, sin], -1)[:, None].to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [N, H, h] turned: (a, b) -> (a cos - b sin, b cos + a sin) for the pairs (i, i + h/2)."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
