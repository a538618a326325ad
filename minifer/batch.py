"""What is asked for, where it stands, and what came of it. The bookkeeping under every decoding loop.

    Request ──► Row ──► Completion          a Batch is some rows on their way together
                 │
                 └ tokens decided, tokens cached, budget, stop rules, text

A Batch knows no model: it makes passes out of what its rows have and lack (`extend`), draws tokens (`sample`), and takes
decided ones (`take`), one a row or several. So every stop rule is checked token by token, in one place, whichever technique
made the tokens.

Letters: R rows of the batch, V vocabulary.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import NamedTuple

import torch

from .draft import Draft, Round, Settled
from .model.passes import Output, Pass, Span
from .model.sampling import Sampling, distributions, draw, new_seed, penalise, uniform
from .model.text import Detokenizer, StopStrings
from .model.tokenizer import Tokenizer


@dataclass(frozen=True)
class Request:
    """What is asked for. ids: the prompt, one token at least.

    max_new_tokens: at most so many new ids; None: up to the model's context. stop_ids: a row ends with the first of them,
    which is its last id; None: what model and tokenizer call an end; (): none. stop_strings: a row ends when its text
    contains one of them, and its text ends before it (needs a tokenizer). min_new_tokens: no stop id is drawn before.
    """

    ids: Sequence[int]
    max_new_tokens: int | None = 64
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: Sequence[int] | None = None
    stop_strings: Sequence[str] = ()
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.stop_strings, str):
            object.__setattr__(self, "stop_strings", (self.stop_strings,))
        for name in ("ids", "stop_ids"):
            value = getattr(self, name)
            if isinstance(value, torch.Tensor):
                object.__setattr__(self, name, value.tolist())
            elif value is not None and (isinstance(value, (int, str)) or not all(_is_whole(token) for token in value)):
                raise ValueError(f"{name} must be a list of whole numbers, it is {value!r:.80}")
        if not isinstance(self.sampling, Sampling):
            raise ValueError(f"sampling must be a Sampling, it is {self.sampling!r}")
        for name in ("max_new_tokens", "min_new_tokens"):
            value = getattr(self, name)
            if value is not None and not (_is_whole(value) and value >= 0):
                raise ValueError(f"{name} must be >= 0 and whole, it is {value!r}")


@dataclass(frozen=True)
class Completion:
    """What came of a request.

    ids: the new ones only, the stop id included. text: theirs, without special tokens (None without a tokenizer).
    finish_reason: "stop" or "length". ttft: seconds from the start of the batch to the first token. tpot: mean seconds a
    token after it (None for fewer than two). seconds: from the start to the last token. rounds: with speculation, what each
    pass after the prompt's drafted and kept.
    """

    ids: list[int]
    text: str | None
    finish_reason: str
    prompt_tokens: int
    ttft: float | None
    tpot: float | None
    seconds: float
    rounds: tuple[Round, ...] = ()


class Fresh(NamedTuple):
    """What a turn added to a row. text: what can be shown of it (pieces joined are Completion.text)."""

    row: int
    ids: list[int]
    text: str


class Row:
    """One request on its way. Everything that decides when it ends is here."""

    def __init__(self, request: Request, budget: int, stop_ids: frozenset[int], tokenizer: Tokenizer | None) -> None:
        self.request, self.budget, self.stop_ids = request, budget, stop_ids
        self.sampling = request.sampling
        self.seed = new_seed() if request.sampling.seed is None else request.sampling.seed
        self.tokens = list(request.ids)  # the prompt, then what was decided
        self.prompt = len(self.tokens)
        self.cached = 0  # how many of them the cache holds, once it has moved together what `keep` names
        self.keep: list[int] | None = None  # slots of the row's last span that stay, where a tree was verified
        self.capacity: int | None = None  # tokens that the cache has room for, where that is known
        self.rounds: list[Round] = []
        self.finish_reason = "length" if budget == 0 else None
        self.first = self.last = None  # type: float | None
        self.pieces: list[str] = []
        self._detokenizer: Detokenizer | None = tokenizer.detokenizer(self.tokens) if tokenizer else None
        self._stops = StopStrings(request.stop_strings)

    @property
    def new(self) -> int:
        """How many ids were decided."""
        return len(self.tokens) - self.prompt

    @property
    def is_adjusted(self) -> bool:
        """Whether its logits depend on its text otherwise than through the model."""
        return self.sampling.repetition_penalty != 1 or self.request.min_new_tokens > 0

    @property
    def left(self) -> int:
        """How many more may be."""
        return self.budget - self.new

    def take(self, token: int) -> str:
        """Append a decided token, see whether the row ends with it, and return the text that may be shown."""
        self.tokens.append(token)
        piece = ""
        if self._detokenizer is not None:
            piece = self._stops.feed(self._detokenizer.feed(token))
        if token in self.stop_ids or self._stops.found:
            self.finish_reason = "stop"
        elif self.left == 0:
            self.finish_reason = "length"
        if self.finish_reason and self._detokenizer is not None and not self._stops.found:
            rest = self._stops.feed(self._detokenizer.flush())
            piece += rest + self._stops.flush()
        self.pieces.append(piece)
        return piece


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


class Batch:
    """Rows on their way together. It knows no model; every array it takes or gives is indexed by row."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = list(rows)
        self.active = [at for at, row in enumerate(self._rows) if row.finish_reason is None]
        self.fresh: list[Fresh] = []  # of the last turn
        self.started = time.perf_counter()

    @property
    def rows(self) -> int:
        return len(self._rows)

    @property
    def going(self) -> list[Row]:
        """The active rows, in the order of `active`."""
        return [self._rows[at] for at in self.active]

    def row(self, at: int) -> Row:
        return self._rows[at]

    def at_most(self, longest: int, chosen: Sequence[int] | None = None) -> list[int]:
        """Of each row how many tokens to draft: what was chosen, but the pass's own token needs a place in the budget too."""
        wanted = [longest] * self.rows if chosen is None else [min(longest, length) for length in chosen]
        return [max(0, min(length, row.left - 1)) if row.finish_reason is None else 0 for length, row in zip(wanted, self._rows)]

    def room(self) -> list[int]:
        """Of each row how many drafted tokens the cache has room for."""
        return [max(0, (row.capacity or sys.maxsize) - len(row.tokens)) for row in self._rows]

    def extend(self, draft: Draft | None = None, states: tuple[int, ...] = ()) -> Pass:
        """The next pass: of every active row what the cache lacks, then its draft.

        At first that is the prompt, later the last token. Wanted are the last decided token of each row and its draft.
        """
        ids: list[int] = []
        spans: list[Span] = []
        wanted: list[int] = []
        keep = {at: self._rows[at].keep for at in self.active if self._rows[at].keep is not None}
        for at in self.active:
            row = self._rows[at]
            drafted = [] if draft is None else draft.ids[at]
            part = row.tokens[row.cached :] + drafted
            ids += part
            spans.append(Span(at, row.cached, len(part)))
            wanted += range(len(ids) - 1 - len(drafted), len(ids))
        parents = None
        if draft is not None and not all(draft.is_chain(at) for at in self.active):
            parents = tuple(self._parents(at, draft) for at in self.active)
        return Pass(torch.tensor(ids), tuple(spans), tuple(wanted), states, parents, keep or None)  # type: ignore[arg-type]

    def _parents(self, at: int, draft: Draft) -> tuple[int, ...]:
        """Of a row's span: what the cache lacks is a chain, and its last token is the root of the draft."""
        root = len(self._rows[at].tokens) - self._rows[at].cached - 1
        return (*range(-1, root), *(root + 1 + parent for parent in draft.parents[at]))

    def sample(self, output: Output) -> torch.Tensor:
        """A token for every active row from its logits, int64 [R], -1 for the others."""
        rows = self.going
        if all(row.sampling.greedy for row in rows):
            adjusted = any(row.is_adjusted for row in rows)
            chosen = self.adjusted(output.logits, rows).argmax(-1) if adjusted else output.best
        else:
            logits = self.adjusted(output.logits, rows)
            numbers = [0.0 if row.sampling.greedy else uniform(row.seed, len(row.tokens)) for row in rows]
            chosen = draw(distributions(logits, [row.sampling for row in rows]), numbers)
        ids = torch.full((self.rows,), -1)
        ids[self.active] = chosen.cpu()
        return ids

    def adjusted(self, logits: torch.Tensor, rows: Sequence[Row], drafts: Sequence[Sequence[int]] | None = None) -> torch.Tensor:
        """Logits [len(rows), V] after repetition penalties, and without stop ids where it is too early for them.

        A row may stand there several times, each time with drafted tokens taken for decided.
        """
        if not any(row.is_adjusted for row in rows):
            return logits
        drafts = drafts or [()] * len(rows)
        texts = [[*row.tokens, *draft] for row, draft in zip(rows, drafts)]
        logits = penalise(logits, [row.sampling for row in rows], texts).clone()
        for at, (row, draft) in enumerate(zip(rows, drafts)):
            if row.new + len(draft) < row.request.min_new_tokens:
                logits[at, [token for token in sorted(row.stop_ids) if token < logits.shape[1]]] = float("-inf")
        return logits

    def take(self, ids: torch.Tensor, settled: Settled | None = None) -> bool:
        """Append what was decided (int64 [R] or [R, k], -1: nothing), as far as each row goes on. True while any row does.

        settled: where drafts were verified, which of them these are.
        """
        now, chosen = time.perf_counter(), ids.reshape(self.rows, -1).tolist()
        self.fresh = []
        for at in self.active:
            row = self._rows[at]
            first_slot, before, text = row.cached, len(row.tokens), ""
            row.cached = before  # the pass has run these; of a draft it keeps what is appended now
            assert max(chosen[at]) >= 0, f"nothing was decided for row {at}"
            for token in chosen[at]:
                if token >= 0 and row.finish_reason is None:
                    text += row.take(token)
            # The last decided token is not in the cache yet: the next pass runs it.
            row.cached = max(row.cached, len(row.tokens) - 1)
            nodes = [] if settled is None else settled.nodes[at][: row.cached - before]
            in_place = nodes == list(range(len(nodes)))
            row.keep = None if in_place else [*range(before - first_slot), *(before - first_slot + node for node in nodes)]
            row.first, row.last = row.first or now, now
            self.fresh.append(Fresh(at, row.tokens[before:], text))
        self.active = [at for at in self.active if self._rows[at].finish_reason is None]
        return bool(self.active)

    def completions(self) -> list[Completion]:
        """One a row, in order."""
        return [self._completion(row) for row in self._rows]

    def _completion(self, row: Row) -> Completion:
        first, last = row.first, row.last
        return Completion(
            ids=row.tokens[row.prompt :],
            text="".join(row.pieces) if row._detokenizer is not None else None,
            finish_reason=row.finish_reason or "unfinished",
            prompt_tokens=row.prompt,
            ttft=None if first is None else first - self.started,
            tpot=None if first is None or last is None or row.new < 2 else (last - first) / (row.new - 1),
            seconds=0.0 if last is None else last - self.started,
            rounds=tuple(row.rounds),
        )
