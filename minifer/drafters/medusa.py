"""Medusa: heads on the target's last hidden state, each guessing a token further ahead, all at once.

                     ┌─ the target's own head ─► the next token          (decided by the pass itself)
    hidden state h ──┼─ head 1 ─► the token after it ─┐
                     ├─ head 2 ─► the one after that  ├─► a tree of their likeliest guesses, verified in one pass
                     └─ head 3 ─► ...                ─┘

Head i is one residual block, h + silu(W h + b), and a matrix over the vocabulary of its own. It knows nothing of what head
i - 1 guessed; so the likeliest few of each are combined, and the tree keeps the combinations that are most often right.

Guesses are chosen, not drawn, so there is no q. Cost: one product a head, and no cache. Needs of a sharded target: the hidden
state of each row's last kept token, which tensor parallelism has on every rank and a pipeline on its last; the heads are
replicated there.
Source: Cai et al. 2024 (arXiv 2401.10774), section 2.1, without its typical acceptance (that is a rule in mtp.py).

Letters: R rows of the batch, A active ones, D width, V vocabulary, K heads, n nodes of the tree.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from ..batch import Batch
from ..draft import Settled
from ..model.linear import Linear
from ..model.passes import Output
from ..model.transformer import Transformer
from .drafter import Drafter

Branch = tuple[int, ...]  # of a node: which guess of head 1, then of head 2, ...; (1, 0) is head 2's first after head 1's second


class Head(nn.Module):
    """Guesses the token `ahead` places after the next one."""

    def __init__(self, ahead: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.block = Linear(f"medusa.{ahead}.block", width, width, bias=True)
        self.out = Linear(f"medusa.{ahead}.out", vocabulary, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[A, D] -> [A, V]"""
        return self.out(hidden + F.silu(self.block(hidden)))


class Heads(nn.Module):
    """K heads, empty until they are filled."""

    def __init__(self, heads: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList([Head(ahead, width, vocabulary) for ahead in range(1, heads + 1)])

    @property
    def each(self) -> list[Head]:
        return list(self.heads)  # type: ignore[arg-type]


class Medusa(Drafter):
    """heads: filled, of this target. tree: the paths that are drafted, each after its own beginning; None: the likeliest chain."""

    def __init__(self, heads: Heads, target: Transformer, tree: Sequence[Branch] | None = None) -> None:
        self.heads = heads
        self.depth = self.usual = len(heads.each)
        # One pass over the tree lays parents before children, and siblings by how likely they are.
        self.tree = sorted(map(tuple, tree or chain(self.depth)), key=lambda path: (len(path), path))
        for path in self.tree:
            if len(path) > self.depth:
                raise ValueError(f"the tree has a path {path} of depth {len(path)}; there are {self.depth} heads")
            if len(path) > 1 and path[:-1] not in self.tree:
                raise ValueError(f"the tree has a path {path} without its beginning {path[:-1]}")
            if not path or not all(0 <= rank < target.config.vocabulary for rank in path):
                raise ValueError(
                    f"the tree has a path {path}: it needs a rank or more, of a vocabulary of {target.config.vocabulary}"
                )
        self._ranks = 1 + max(max(path) for path in self.tree)

    def check(self, draft_length: int) -> None:
        if draft_length > self.depth:
            raise ValueError(
                f"draft_length {draft_length} is more than the {self.depth} heads can guess ahead; they are not used twice"
            )

    def nodes(self, draft_length: int) -> int:
        return len(self._paths(draft_length))

    def propose(self, batch: Batch, output: Output, settled: Settled, deepest: Sequence[int]) -> torch.Tensor:
        paths = self._paths(self.draft_length)
        found = torch.full((batch.rows, 2, len(paths)), -1)
        rows = [at for at in batch.active if deepest[at]]
        if not rows:
            return found
        assert output.hidden is not None
        with torch.inference_mode():
            hidden = output.hidden[[settled.kept[at][-1] for at in rows]]  # [A, D]
            guesses = [head(hidden).topk(self._ranks).indices.cpu() for head in self.heads.each[: self.draft_length]]
        place = {path: node for node, path in enumerate(paths)}
        heads, ranks = [len(path) - 1 for path in paths], [path[-1] for path in paths]
        found[rows, 0] = torch.stack(guesses, 1)[:, heads, ranks]  # of [A, K, ranks], a guess a node
        found[rows, 1] = torch.tensor([place.get(path[:-1], -1) for path in paths])
        return found

    def _paths(self, draft_length: int) -> list[Branch]:
        return [path for path in self.tree if len(path) <= draft_length]


def chain(depth: int) -> list[Branch]:
    """Each head's first guess."""
    return [(0,) * length for length in range(1, depth + 1)]


def grow(accuracy: Sequence[Sequence[float]], nodes: int) -> list[Branch]:
    """The tree of so many nodes that keeps most tokens, if accuracy[i][j] is how often guess j of head i + 1 is right.

    A node is worth the product of the accuracies along its path: the chance that it is reached and kept. The most valuable
    node that hangs on the tree so far is added, again and again.
    """
    tree: list[Branch] = []
    waiting: list[tuple[float, Branch]] = [(-accuracy[0][0], (0,))]
    while waiting and len(tree) < nodes:
        worth, path = heapq.heappop(waiting)
        tree.append(path)
        head, rank = len(path) - 1, path[-1]
        if rank + 1 < len(accuracy[head]) and accuracy[head][rank] > 0:
            heapq.heappush(waiting, (worth / accuracy[head][rank] * accuracy[head][rank + 1], (*path[:-1], rank + 1)))
        if head + 1 < len(accuracy):
            heapq.heappush(waiting, (worth * accuracy[head + 1][0], (*path, 0)))
    return tree
