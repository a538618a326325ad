"""What came out of runs of a technique, held against plain decoding's: the same ids or not, how fast, at what price."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from .batch import Completion
from .ranks import trace

LARGEST_TIE = 0.25  # logits: bfloat16 resolves no better around the values that logits have


@dataclass
class Run:
    """One run of a technique, as one rank saw it.

    The rest is filled in a watched run only. row_passes: over all passes, how many rows were in them. margins: {prompt: for
    each of its tokens the gap between the two largest logits}. record: calls of collectives and times.
    """

    completions: list[Completion]
    row_passes: int = 0
    margins: dict[int, list[float]] = field(default_factory=dict)
    record: trace.Record = field(default_factory=trace.Record)

    @property
    def seconds(self) -> float:
        """Of the slowest prompt, whichever rank served it."""
        return max((completion.seconds for completion in self.completions), default=0.0)

    @property
    def tokens(self) -> int:
        return sum(len(completion.ids) for completion in self.completions)


@dataclass(frozen=True)
class Result:
    """A line of the table. tokens_per_pass: a row's. collectives: a rank's, payload_bytes: all ranks', per generated token."""

    name: str
    ranks: int
    exact: bool
    tokens_per_pass: float
    collectives: float
    payload_bytes: float
    tokens_per_second: float
    ratio: float
    difference: str = ""
    model: str = ""


def judge(
    name: str, watched: list[Run], timed: list[list[Run]], plain: list[Run], plain_timed: list[list[Run]], dtype: torch.dtype
) -> Result:
    """watched: a run, one Run a rank. timed: more of them, only to be timed. plain, plain_timed: the same of plain decoding.

    In float32 every id must be plain's. In a narrower dtype a first difference is forgiven where neither run was surer of
    its token than LARGEST_TIE.
    """
    margins = [{number: gaps for run in ranks for number, gaps in run.margins.items()} for ranks in (plain, watched)]
    runs = [run for ranks in (watched, *timed) for run in ranks]
    differences = [difference for run in runs for difference in _differences(plain[0], run, margins[0], margins[1])]
    forgiving = dtype != torch.float32
    bad = [difference for difference in differences if not (forgiving and max(difference.margins) <= LARGEST_TIE)]
    shown = (bad or differences)[:1]
    tokens = max(1, watched[0].tokens)
    return Result(
        name=name,
        ranks=len(watched),
        exact=not bad,
        tokens_per_pass=watched[0].tokens / max(1, sum(run.row_passes for run in watched)),
        collectives=sum(len(run.record.events) for run in watched) / len(watched) / tokens,
        payload_bytes=sum(run.record.bytes for run in watched) / tokens,
        tokens_per_second=statistics.median(ranks[0].tokens / ranks[0].seconds for ranks in timed),
        # Runs alternate: each is held against the plain one beside it.
        ratio=statistics.median(theirs[0].seconds / ranks[0].seconds for ranks, theirs in zip(timed, plain_timed)),
        difference=shown[0].text(bool(bad)) if shown else "",
    )


@dataclass(frozen=True)
class Difference:
    """The first place where a prompt's ids are not plain decoding's. margins: plain's and the technique's, in logits."""

    prompt: int
    position: int
    ids: tuple[int | None, int | None]
    margins: tuple[float, float]

    def text(self, failed: bool) -> str:
        verdict = "DIFFERS" if failed else f"a tie within {LARGEST_TIE}"
        plain, here = (f"{token} (margin {margin:.4f})" for token, margin in zip(self.ids, self.margins))
        return f"{verdict}: first at prompt {self.prompt}, token {self.position}: plain {plain}, here {here}"


def _differences(
    plain: Run, run: Run, plain_margins: dict[int, list[float]], margins: dict[int, list[float]]
) -> Iterator[Difference]:
    for number, (theirs, own) in enumerate(zip(plain.completions, run.completions, strict=True)):
        if theirs.ids == own.ids:
            continue
        shorter = min(len(theirs.ids), len(own.ids))
        at = next((at for at in range(shorter) if theirs.ids[at] != own.ids[at]), shorter)
        ids = (_at(theirs.ids, at), _at(own.ids, at))
        gaps = (_at(plain_margins.get(number, []), at), _at(margins.get(number, []), at))
        yield Difference(number, at, ids, (math.inf if gaps[0] is None else gaps[0], math.inf if gaps[1] is None else gaps[1]))


def _at(values: list, place: int):  # type: ignore[no-untyped-def, type-arg]
    return values[place] if place < len(values) else None
