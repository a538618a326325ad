"""What the loop hands to the model, and what it gets back.

A *pass* runs N tokens of some rows through the model once. The tokens of all rows lie flat behind each other, so a pass
over one long prompt, over one token of each of 32 rows, or over 5 draft tokens of one row and 2 of another is the same
thing, and nothing but attention ever pads:

    ids      [ 11 12 13 14 | 21 | 31 32 ]        N = 7
    spans    (row 0, start 0, count 4)  (row 1, start 9, count 1)  (row 2, start 5, count 2)
    wanted   [ 3, 4, 6 ]                         the tokens whose successor somebody asks for

Everything here is host data (lists, integers, a CPU tensor): which keys a token may see, how long a row is and where its
tokens go is known without reading a device.

Letters: N tokens of a pass, W wanted tokens, R rows of the batch, D model width, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from .cache import Cache
    from .transformer import Transformer


class Span(NamedTuple):
    """Consecutive tokens of one row. `start` is also the length to which the row's cache is cut before the pass."""

    row: int
    start: int
    count: int  # type: ignore[assignment]  # a tuple's own method of this name is not needed


def depths(parents: Sequence[int]) -> list[int]:
    """How deep each token of a tree stands below the context; 0 for those whose parent is the context itself (-1)."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


@dataclass(frozen=True)
class Pass:
    """N tokens of some rows, each row at most once.

    ids: int64 [N] on the CPU. spans: whose tokens they are, in the order of ids. wanted: flat indices of the tokens whose
    hidden states and logits are wanted. states: numbers of the layers whose output (all N tokens) a drafter reads.
    parents: only for trees of drafts: for each span, each token's parent as an index in the span (-1: the last token before
    the span). keep: only after a tree: row -> the slots of its last span that stay, in order; the cache moves them together
    before this pass.
    """

    ids: torch.Tensor
    spans: tuple[Span, ...]
    wanted: tuple[int, ...]
    states: tuple[int, ...] = ()
    parents: tuple[tuple[int, ...], ...] | None = None
    keep: dict[int, list[int]] | None = None
    # What layers compute once a pass and share: masks, rotary cosines. Empty at first, dies with the pass.
    shared: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        total = sum(span.count for span in self.spans)
        if total != len(self.ids):
            raise ValueError(f"the spans of a pass hold {total} tokens, its ids {len(self.ids)}")
        if any(span.count < 1 or span.start < 0 for span in self.spans):
            raise ValueError(f"a span has one token at least and starts at 0 or later: {self.spans}")
        if self.wanted and not (min(self.wanted) >= 0 and max(self.wanted) < total):
            raise ValueError(f"wanted tokens {self.wanted} of a pass of {total}")
        if self.parents is not None:
            for span, parents in zip(self.spans, self.parents, strict=True):
                if len(parents) != span.count or any(not -1 <= parent < token for token, parent in enumerate(parents)):
                    raise ValueError(f"parents {parents} of {span.count} tokens: each comes after its parent, -1 is the context")
        if len({span.row for span in self.spans}) != len(self.spans):
            raise ValueError(f"a row appears twice in one pass: {[span.row for span in self.spans]}")

    @cached_property
    def positions(self) -> torch.Tensor:
        """int64 [N] on the CPU: each token's position in its row. In a tree, siblings share one."""
        if self.parents is None:
            ranges = [range(span.start, span.start + span.count) for span in self.spans]
            return torch.tensor([position for one in ranges for position in one])
        pairs = zip(self.spans, self.parents)
        return torch.tensor([span.start + depth for span, parents in pairs for depth in depths(parents)])

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each span begins in ids."""
        found, at = [], 0
        for span in self.spans:
            found.append(at)
            at += span.count
        return tuple(found)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` returns, made once a pass: the first layer pays, the others share."""
        if key not in self.shared:
            self.shared[key] = make()
        return self.shared[key]


class Output:
    """What a pass gave.

    hidden: [W, D] after the last norm, of the wanted tokens; None on a rank that does not hold the last layer.
    states: {layer number: [N, D]}, what came out of the layers that the pass asked for. cache: in which the pass left its keys
    and values.
    """

    def __init__(
        self,
        model: Transformer,
        pass_: Pass,
        hidden: torch.Tensor | None = None,
        states: dict[int, torch.Tensor] | None = None,
        cache: Cache | None = None,
    ) -> None:
        self.model, self.pass_, self.hidden, self.states, self.cache = model, pass_, hidden, states, cache
        self.finished = time.perf_counter()  # whoever is shown something before the loop goes on may take its time

    @cached_property
    def logits(self) -> torch.Tensor:
        """[W, V] float32. Where the head is sharded this is a collective: call it inside `decide` only."""
        assert self.hidden is not None, "this rank holds no head: read logits inside decide"
        return self.model.logits(self.hidden)

    @cached_property
    def best(self) -> torch.Tensor:
        """int64 [W], what is likeliest after each wanted token. As with logits: inside `decide` only."""
        assert self.hidden is not None, "this rank holds no head: read what is best inside decide"
        return self.model.best(self.hidden)

    def decide(self, decision: Callable[[Output], torch.Tensor], *shape: int) -> torch.Tensor:
        """Run `decision(self)` where the output is, and give every rank the same answer: int64 of this shape, on the CPU.

        On a plain model this is the call and nothing else. A technique adds to `model.agreements` how an answer travels.
        """
        answer = None if self.hidden is None else decision(self).reshape(shape).cpu()
        for agree in self.model.agreements:
            answer = agree(answer, shape)
        assert answer is not None
        return answer
