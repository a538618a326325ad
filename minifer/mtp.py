"""Many tokens a pass: a drafter proposes, one pass of the target verifies, and what the target would have said is kept.

    draft       root ─ a ─ b ─ c          tokens that may come next: a chain, or a tree
    one pass    p0    p1   p2  p3         the target's distributions after root, a, b, c: as many as plain passes would give
    accept      a, b kept, c not          from left to right, by a rule that leaves the target's distribution as it is
    one more    d, from p2                what the target says where the draft went wrong, or after its end

So a pass gives between one token and one more than the draft is long, and what is rejected costs no further pass: the next
one cuts the cache by itself. The pass that verifies also gives the hidden states from which the next draft is made; there is
no second pass of the target.

Invariant: greedy, the ids of plain decoding. Sampled, its distribution: a drafted x is kept with probability min(1, p(x) / q(x)),
where q is exactly what x was drawn from; after a rejection the token comes from max(p - q, 0), normalised. The options of
Sampling shape p as they do in plain decoding.
Cost: a pass over 1 + n tokens a row instead of 1, and the draft. It pays while both kinds of pass take about as long, that is
while reading the weights is what takes the time: small batches.
Sources: Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (2302.01318); several candidates a place: SpecInfer
(2305.09781, recursive rejection); typical acceptance: Medusa (2401.10774, section 2.3.1).

Letters: R rows of the batch, W wanted tokens of a pass, n nodes of a row's draft, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from . import decode
from .batch import Batch, Completion, Fresh, Request, Row
from .draft import Draft, Round, Settled
from .model.cache import Cache
from .model.passes import Output
from .model.sampling import distributions, draw, uniform
from .model.transformer import Transformer
from .pace import Adaptive, pace_of

if TYPE_CHECKING:
    from .drafters.drafter import Drafter

COIN = 1000  # the stream of random numbers that decide about a node's first child; its next children have the next streams

# A rule walks a row's draft and gives the tokens decided, one at least. p [1 + n, V]: the target's distributions after the root
# and after each node. q [n, V]: what each node was drawn from; None: nodes were not drawn but chosen.
Rule = Callable[[Row, "Tree", torch.Tensor, "torch.Tensor | None"], "list[int]"]


def steps(batch: Batch, drafter: Drafter, draft_length: int | Adaptive | None = None, rule: Rule | None = None) -> decode.Steps:
    """Propose, verify, accept, whole."""
    pace = pace_of(draft_length, drafter)
    nodes, width = drafter.nodes(pace.longest), max(2, pace.longest + 1)
    drafter = drafter.start(batch, pace.longest)
    draft, drafting = Draft.nothing(batch.rows), 0.0
    while batch.active:
        started = time.perf_counter()
        output = yield batch.extend(draft, drafter.reads)
        times = (drafting, output.finished - started)
        # The times of the rank that decides travel with the decision, so that all ranks go on from the same ones.
        decision = partial(verify, batch, draft=draft, q=drafter.q, rule=rule, times=times, width=width)
        verdict = output.decide(decision, batch.rows + 1, width)
        settled = settle(batch, draft, verdict[:-1])
        took = take(batch, draft, settled, verdict)
        started = time.perf_counter()
        deepest = pace.lengths(batch, took)
        draft = Draft.nothing(batch.rows)
        if any(row.left > 1 for row in batch.going) and pace.longest:
            proposal = partial(drafter.propose, batch, settled=settled, deepest=deepest)
            proposed = output.decide(proposal, batch.rows, 2, nodes)
            draft = Draft.of(proposed, deepest, batch.room())
        drafting = time.perf_counter() - started
    return batch.completions()


def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int] | Request],
    drafter: Drafter,
    draft_length: int | Adaptive | None = None,
    max_new_tokens: int | None = 64,
    *,
    rule: Rule | None = None,
    **options: Any,
) -> list[Completion]:
    """As decode.generate (options: its own), verifying up to draft_length drafted tokens in each pass.

    A completion's `rounds` tell what was drafted and kept. rule: None is exact; `typical` is not. Raises ValueError for a draft
    length that the drafter cannot give, and whatever decode.generate raises.
    """
    _, loop, cache = start(model, prompts, drafter, draft_length, rule, max_new_tokens=max_new_tokens, **options)
    return decode.run(model, loop, cache)


def stream(
    model: Transformer,
    prompts: Sequence[Sequence[int] | Request],
    drafter: Drafter,
    draft_length: int | Adaptive | None = None,
    max_new_tokens: int | None = 64,
    *,
    rule: Rule | None = None,
    **options: Any,
) -> Iterator[Fresh]:
    """As generate, but what each row gains is handed out as soon as it is decided."""
    batch, loop, cache = start(model, prompts, drafter, draft_length, rule, max_new_tokens=max_new_tokens, **options)
    return decode.fresh(batch, decode.turns(model, loop, cache))


def start(
    model: Transformer,
    prompts: Sequence[Sequence[int] | Request],
    drafter: Drafter,
    draft_length: int | Adaptive | None = None,
    rule: Rule | None = None,
    **options: Any,
) -> tuple[Batch, decode.Steps, Cache]:
    """What generate runs: the batch, its loop, and a cache with room for drafts that do not stay."""
    longest = pace_of(draft_length, drafter).longest
    drafter.check(longest)
    batch = decode.start(model, prompts, **options)
    # Near the end of a budget drafts are shallow, but a shallow tree may still be wide.
    spare = max([0, *(drafter.nodes(depth) - depth for depth in range(1, longest + 1))])
    cache = options.get("cache") or decode.new_cache(model, batch, spare)
    return batch, steps(batch, drafter, draft_length, rule), cache


def settle(batch: Batch, draft: Draft, decided: torch.Tensor) -> Settled:
    """What decided tokens (int64 [R, any], -1 behind) mean for the draft: the same on every rank, from agreed numbers alone."""
    settled, place, rows = Settled({}, {}, {}), 0, decided.tolist()
    for at in batch.active:
        tokens = settled.tokens[at] = [token for token in rows[at] if token >= 0]
        nodes = settled.nodes[at] = draft.follow(at, tokens[:-1])
        settled.kept[at] = [place, *(place + 1 + node for node in nodes)]
        place += 1 + len(draft.ids[at])
    return settled


def take(batch: Batch, draft: Draft, settled: Settled, verdict: torch.Tensor) -> dict[int, Round]:
    """Let the batch take what was decided. {row: its round}, also kept with the row; a prompt's pass is none."""
    had = {at: batch.row(at).new for at in batch.active}
    batch.take(verdict[:-1], settled)
    draft_seconds, verify_seconds = (microseconds / 1e6 for microseconds in verdict[-1, :2].tolist())
    took = {}
    for at, before in had.items():
        added = batch.row(at).new - before
        accepted = min(len(settled.nodes[at]), added)
        depth = draft.depth(at) if added == len(settled.tokens[at]) else accepted
        if before:
            took[at] = Round(len(draft.ids[at]), depth, accepted, added, draft_seconds, verify_seconds)
            batch.row(at).rounds.append(took[at])
    return took


class Tree:
    """A row's draft as a rule walks it. ids: of the nodes. children: {node: its children}, -1 is the root."""

    def __init__(self, draft: Draft, row: int) -> None:
        self.ids, self.children = draft.ids[row], draft.children(row)


def verify(
    batch: Batch,
    output: Output,
    draft: Draft,
    q: dict[int, torch.Tensor],
    rule: Rule | None,
    times: tuple[float, float],
    width: int,
) -> torch.Tensor:
    """What a pass decides: int64 [R + 1, width], the tokens of each row and -1 behind them; in the last row the times in µs.

    q: {row: [n, V]}, the distributions that a row's nodes were drawn from. Without an entry they were not drawn but chosen.
    times: of drafting, and of the pass so far; its logits, and on a GPU all that it still computes, are added here.
    """
    rows, started = batch.going, time.perf_counter()
    repeated = [row for at, row in zip(batch.active, rows) for _ in range(1 + len(draft.ids[at]))]
    adjusted = any(row.is_adjusted for row in rows)
    paths = [path for at in batch.active for path in ([], *draft.paths(at))] if adjusted else None
    simple = rule is None and all(row.sampling.greedy for row in rows)
    said: Any  # [W] ids or [W, V] probabilities
    if simple and not adjusted:
        said = output.best.tolist()
    else:
        logits = batch.adjusted(output.logits, repeated, paths)  # [W, V]
        said = logits.argmax(-1).tolist() if simple else distributions(logits, [row.sampling for row in repeated])
    times = (times[0], times[1] + time.perf_counter() - started)
    decided: list[list[int]] = [[] for _ in range(batch.rows)]
    place = 0  # of a row's root among the wanted tokens
    for at, row in zip(batch.active, rows):
        here, tree = said[place : place + 1 + len(draft.ids[at])], Tree(draft, at)
        decided[at] = greedy(tree, here) if simple else (rule or exact)(row, tree, here, q.get(at))
        place += 1 + len(draft.ids[at])
    decided.append([round(1e6 * seconds) for seconds in times])
    return torch.tensor([[*tokens, *[-1] * (width - len(tokens))] for tokens in decided])


def greedy(tree: Tree, said: list[int]) -> list[int]:
    """Keep what the target would have said. said: its likeliest token after the root and after each node."""
    node = -1
    tokens: list[int] = []
    while True:
        token = said[node + 1]
        tokens.append(token)
        following = [child for child in tree.children.get(node, ()) if tree.ids[child] == token]
        if not following:
            return tokens
        node = following[0]


def exact(row: Row, tree: Tree, p: torch.Tensor, q: torch.Tensor | None) -> list[int]:
    """Speculative sampling. Candidates for one place are tried in turn; each rejected one takes its q out of the target's p."""
    node = -1
    tokens: list[int] = []
    while True:
        left, position = p[node + 1], len(row.tokens) + len(tokens)
        for number, child in enumerate(tree.children.get(node, ())):
            token = tree.ids[child]
            guess = point(token, left) if q is None else q[child]
            if uniform(row.seed, position, COIN + number) * float(guess[token]) < float(left[token]):
                tokens.append(token)
                node = child
                break
            left = residual(left, guess)
        else:
            return [*tokens, int(draw(left[None], [uniform(row.seed, position)]))]


def point(token: int, like: torch.Tensor) -> torch.Tensor:
    """All probability on one token: what a token was drawn from that was not drawn but chosen. [V]"""
    mass = torch.zeros_like(like)
    mass[token] = 1.0
    return mass


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """What is left for the target to say after a token drawn from q was rejected: max(p - q, 0), normalised. [V]"""
    left = (p - q).clamp(min=0)
    total = left.sum()
    # p = q rejects nothing, but rounding may leave nothing of p either.
    return left / total if float(total) > 0 else p


def typical(epsilon: float = 0.09, delta: float = 0.3) -> Rule:
    """Medusa's typical acceptance: keep x if p(x) > min(epsilon, delta * exp(-entropy of p)), on the longest path that allows.

    Not exact: it draws less likely tokens more rarely than the target does. At temperature 0 it is plain greedy.
    """

    def rule(row: Row, tree: Tree, p: torch.Tensor, q: torch.Tensor | None) -> list[int]:
        threshold = torch.exp(torch.special.entr(p).sum(-1).neg()).mul(delta).clamp(max=epsilon)  # [1 + n]

        def longest(node: int) -> list[int]:
            good = [child for child in tree.children.get(node, ()) if p[node + 1, tree.ids[child]] > threshold[node + 1]]
            return max(([child, *longest(child)] for child in good), key=len, default=[])

        path = longest(-1)
        last = p[(path[-1] if path else -1) + 1]
        number = uniform(row.seed, len(row.tokens) + len(path))
        return [*(tree.ids[node] for node in path), int(draw(last[None], [number]))]

    return rule
