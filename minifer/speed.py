"""How fast completions came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .batch import Completion


@dataclass(frozen=True)
class Speed:
    """How fast a batch was. Prompt tokens are never counted as output.

    ttft: mean seconds to a row's first token. tpot: mean seconds a token after it. decode_rate: tokens after the first of
    each row, of all rows, a second.
    """

    output_tokens: int
    prompt_tokens: int
    ttft: float
    tpot: float
    decode_rate: float


def speed(completions: Sequence[Completion]) -> Speed:
    """Speed of completions that ran together. Rates are 0 where nothing was decoded after first tokens."""
    first = [c.ttft for c in completions if c.ttft is not None]
    later = [c.tpot for c in completions if c.tpot is not None]
    decoded = sum(max(0, len(c.ids) - 1) for c in completions)
    span = max((c.seconds for c in completions), default=0.0) - min(first, default=0.0)
    return Speed(
        output_tokens=sum(len(c.ids) for c in completions),
        prompt_tokens=sum(c.prompt_tokens for c in completions),
        ttft=sum(first) / len(first) if first else 0.0,
        tpot=sum(later) / len(later) if later else 0.0,
        decode_rate=decoded / span if span > 0 else 0.0,
    )
