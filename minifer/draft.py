"""What is drafted for a row, what came of it, and what that is worth.

A draft is a tree of tokens that may come next; a chain is a tree that never branches. Node numbers are places in `ids`, a
parent comes before its children, and -1 is the last decided token, which every pass runs again as the tree's root:

    ids      [ a, b, c, d ]          root ┬ a ┬ c
    parents  [-1,-1, 0, 0 ]               │   └ d
                                          └ b

Letters: R rows of the batch, n nodes of the largest draft, a acceptance rate, k draft length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from .model.passes import depths


@dataclass(frozen=True)
class Draft:
    """Drafted tokens of each row and their parents; an empty list: nothing. Siblings differ."""

    ids: list[list[int]]
    parents: list[list[int]]

    @classmethod
    def nothing(cls, rows: int) -> Draft:
        return cls([[] for _ in range(rows)], [[] for _ in range(rows)])

    @classmethod
    def of(cls, decided: torch.Tensor, deepest: Sequence[int], room: Sequence[int]) -> Draft:
        """From ids and parents, int64 [R, 2, n], ids -1 behind a row's last node.

        Of each row only nodes at depth < deepest[row] stay, and of those the first room[row].
        """
        ids, parents = [], []
        for (tokens, above), depth, places in zip(decided.tolist(), deepest, room, strict=True):
            count = next((at for at, token in enumerate(tokens) if token < 0), len(tokens))
            place: dict[int, int] = {-1: -1}  # of the nodes that stay
            for node, level in enumerate(depths(above[:count])):
                if level < depth and len(place) <= places and above[node] in place:
                    place[node] = len(place) - 1
            kept = list(place)[1:]
            ids.append([tokens[node] for node in kept])
            parents.append([place[above[node]] for node in kept])
        return cls(ids, parents)

    def is_chain(self, row: int) -> bool:
        return self.parents[row] == list(range(-1, len(self.ids[row]) - 1))

    def children(self, row: int) -> dict[int, list[int]]:
        """{node: its children}, the root is -1; nodes without children are left out."""
        found: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents[row]):
            found.setdefault(parent, []).append(node)
        return found

    def paths(self, row: int) -> list[list[int]]:
        """Of each node the drafted tokens on the way to it, itself included."""
        found: list[list[int]] = []
        for token, parent in zip(self.ids[row], self.parents[row]):
            found.append([*(found[parent] if parent >= 0 else ()), token])
        return found

    def follow(self, row: int, tokens: Sequence[int]) -> list[int]:
        """The nodes that these tokens pass from the root on, as far as the draft has them."""
        node, found, children = -1, [], self.children(row)
        for token in tokens:
            node = next((child for child in children.get(node, ()) if self.ids[row][child] == token), -2)
            if node == -2:
                break
            found.append(node)
        return found

    def depth(self, row: int) -> int:
        """Tokens on the longest path."""
        return max(depths(self.parents[row]), default=-1) + 1


@dataclass(frozen=True)
class Settled:
    """What a pass has settled, by row. tokens: decided now, one at least. nodes: the drafted nodes among them.

    kept: rows of the pass's hidden states, for the root and each of those nodes: in this order they stand for the tokens
    whose successors are decided now, so the next draft starts from the last of them.
    """

    tokens: dict[int, list[int]]
    nodes: dict[int, list[int]]
    kept: dict[int, list[int]]


class Round(NamedTuple):
    """A pass of one row after the prompt's. What a stop rule cut off is not counted.

    drafted: nodes that were verified. depth: tokens on the draft's longest path; where a stop rule ended the row, only as far as
    it came. accepted: drafted tokens that stayed. tokens: all that were added. Seconds are the batch's: to make the draft before
    the pass, and the pass with its logits.
    """

    drafted: int
    depth: int
    accepted: int
    tokens: int
    draft_seconds: float
    verify_seconds: float


class HasRounds(Protocol):
    """What a Completion is here."""

    @property
    def rounds(self) -> tuple[Round, ...]: ...


def tokens_per_pass(completions: Sequence[HasRounds]) -> float:
    """Mean tokens that a pass after the prompt's added to a row: the acceptance length. 1 without any round."""
    rounds = [one for completion in completions for one in completion.rounds]
    return sum(one.tokens for one in rounds) / len(rounds) if rounds else 1.0


def acceptance(completions: Sequence[HasRounds]) -> list[float]:
    """[i]: of the rounds that drafted to depth i + 1 or deeper, the share that kept all drafted tokens up to there."""
    rounds = [one for completion in completions for one in completion.rounds]
    found = []
    for depth in range(1, max((one.depth for one in rounds), default=0) + 1):
        judged = [one for one in rounds if one.depth >= depth]
        found.append(sum(one.accepted >= depth for one in judged) / len(judged))
    return found


def expected_tokens(rate: float, draft_length: int) -> float:
    """Tokens a pass where each draft is accepted with this probability, whatever came before (Leviathan et al. 2023, eq. 1)."""
    if not 0 <= rate <= 1:
        raise ValueError(f"an acceptance rate lies in 0..1, it is {rate}")
    return float(draft_length + 1) if rate == 1 else (1 - rate ** (draft_length + 1)) / (1 - rate)


def gain(tokens: float, draft_length: int, draft_cost: float, verify_cost: float = 1.0) -> float:
    """Times faster than plain decoding (Leviathan et al. 2023, theorem 3.8, with a verify pass that may cost more than one).

    tokens: a pass. draft_cost: of a drafted token, verify_cost: of a pass over all drafts; both in plain steps.
    """
    return tokens / (draft_length * draft_cost + verify_cost)
