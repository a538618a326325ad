"""Sampled speculation has the target's distribution: a chi-square test that every drafter passes and every wrong rule fails.

The target is a real transformer with six tokens, so the exact distribution of the first three new ones is known: it is read off
the model, text by text. Thousands of requests, each with a seed of its own, must spread over the 216 texts accordingly.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from helpers import trained_kind
from torch.nn import functional as F

from minifer import decode, mtp
from minifer.batch import Request, Row
from minifer.draft import acceptance
from minifer.drafters import Combined, DraftModel, Medusa, PromptLookup
from minifer.drafters.drafter import GUESS, Drafter
from minifer.drafters.medusa import Heads, grow
from minifer.model import weights
from minifer.model.config import Config
from minifer.model.passes import Pass, Span
from minifer.model.rotary import Rope
from minifer.model.sampling import Sampling, distributions, draw, penalise, uniform
from minifer.model.transformer import Transformer

V, NEW, TRIALS = 6, 3, 6000
PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]


def small(layers: int, seed: int) -> Transformer:
    sizes = {"layers": layers, "width": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "inner": 24, "vocabulary": V, "context": 32}
    model = Transformer(Config(family="llama", rope=Rope(10000.0), windows=(None,) * layers, **sizes))
    weights.initialise(model, torch.float32, "cpu", seed, spread=0.35)
    return model


@pytest.fixture(scope="module")
def target() -> Transformer:
    return small(2, 1)


def probabilities(model: Transformer, texts: list[list[int]], sampling: Sampling) -> torch.Tensor:
    """[texts, V]: what the next token is drawn from, by one pass over whole texts."""
    ids = [token for text in texts for token in text]
    spans = tuple(Span(row, 0, len(text)) for row, text in enumerate(texts))
    ends = torch.tensor([len(text) for text in texts]).cumsum(0) - 1
    with torch.inference_mode():
        logits = model(Pass(torch.tensor(ids), spans, tuple(ends.tolist()))).logits
    logits = penalise(logits, [sampling] * len(texts), texts)
    return distributions(logits, [sampling] * len(texts)).double()


def exactly(model: Transformer, sampling: Sampling) -> torch.Tensor:
    """[V ** NEW]: how likely each continuation is."""
    texts, chance = [list(PROMPT)], torch.ones(1, dtype=torch.float64)
    for _ in range(NEW):
        chance = (chance[:, None] * probabilities(model, texts, sampling)).flatten()
        texts = [[*text, token] for text in texts for token in range(V)]
    return chance


def p_value(counts: torch.Tensor, chance: torch.Tensor) -> float:
    """Of a chi-square test; cells that expect fewer than 5 become one."""
    expected = chance * counts.sum()
    if bool((counts[chance == 0] > 0).any()):
        return 0.0
    rare = expected < 5
    pairs = [(counts[~rare], expected[~rare])]
    if float(expected[rare].sum()) > 0:
        pairs.append((counts[rare].sum()[None], expected[rare].sum()[None]))
    seen, wanted = (torch.cat(column) for column in zip(*pairs))
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    return float(torch.special.gammaincc(torch.tensor((len(seen) - 1) / 2, dtype=torch.float64), statistic / 2))


def spread(target: Transformer, drafter: Drafter | None, sampling: Sampling, length: int = 3, rule=None) -> torch.Tensor:
    """[V ** NEW]: how often each continuation came, over TRIALS requests with seeds of their own."""
    counts = torch.zeros(V**NEW, dtype=torch.float64)
    for start in range(0, TRIALS, 1000):
        options = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
        # Longer than what is counted, so that the first drafts are not cut short by the budget.
        requests = [Request(PROMPT, NEW + 2, Sampling(**options, seed=seed)) for seed in range(start, start + 1000)]
        if drafter is None:
            completions = decode.generate(target, requests)
        else:
            completions = mtp.generate(target, requests, drafter, length, rule=rule)
            kept = acceptance(completions)
            assert len(kept) == length and kept[1] > 0, "drafts of two tokens must be kept at times, or the test sees too little"
        for completion in completions:
            a, b, c = completion.ids[:NEW]
            counts[(a * V + b) * V + c] += 1
    return counts


class DrawingTree(Drafter):
    """Two siblings under every node, drawn from some distribution without putting back: q of the second is what was left then."""

    usual = 2

    def nodes(self, draft_length: int) -> int:
        return 2 ** (draft_length + 1) - 2

    def propose(self, batch, output, settled, deepest):
        found, self.q = torch.full((batch.rows, 2, self.nodes(self.draft_length)), -1), {}
        for at in batch.active:
            row, ids, parents, q = batch.row(at), [], [], []
            level = [-1]
            for depth in range(deepest[at]):
                following = []
                for parent in level:
                    base = torch.tensor([1.0, 3.0, 2.0, 1.0, 1.0, 4.0]).roll(parent + depth)
                    for sibling in range(2):
                        q.append(base / base.sum())
                        number = uniform(row.seed, len(row.tokens) + depth, GUESS + 2 * (parent + 1) + sibling)
                        token = int(draw(q[-1][None], [number]))
                        base = base.index_fill(0, torch.tensor([token]), 0.0)
                        following.append(len(ids))
                        ids.append(token)
                        parents.append(parent)
                level = following
            found[at, 0, : len(ids)], found[at, 1, : len(ids)] = torch.tensor(ids), torch.tensor(parents)
            if q:
                self.q[at] = torch.stack(q)
        return found


def medusa(target: Transformer, tree) -> Medusa:
    heads = Heads(3, target.config.width, V)
    weights.initialise(heads, torch.float32, "cpu", 3, spread=0.6)
    return Medusa(heads, target, tree)


DRAFTERS = {
    "prompt lookup": lambda target: PromptLookup(3, 1),
    "draft model": lambda target: DraftModel(small(1, 2), target),
    "medusa": lambda target: medusa(target, None),
    "medusa tree": lambda target: medusa(target, grow([[0.4, 0.3, 0.2]] * 3, 12)),
    "drawn tree": lambda target: DrawingTree(),
    "eagle": lambda target: trained_kind("eagle", target),
    "deepseek, five of six ids": lambda target: trained_kind("deepseek", target, drafted=5),
    "gemma": lambda target: trained_kind("gemma", target),
    "lookup, then gemma": lambda target: Combined(PromptLookup(4, 4), trained_kind("gemma", target)),
}
SAMPLINGS = {
    "as it is": Sampling(1.0),
    "warm, top-p": Sampling(1.4, top_p=0.85),
    "cool, top-k, penalty": Sampling(0.6, top_k=4, repetition_penalty=1.3),
    "min-p": Sampling(0.9, min_p=0.15),
}


def test_plain_sampling_has_the_targets_distribution(target):
    for sampling in SAMPLINGS.values():
        assert p_value(spread(target, None, sampling), exactly(target, sampling)) > 1e-4


# Those that share all their code with another are tried with two samplings.
CASES = [
    (kind, sampling)
    for kind in DRAFTERS
    for sampling in (list(SAMPLINGS)[1:3] if kind in ("eagle", "lookup, then gemma") else SAMPLINGS)
]


@pytest.mark.parametrize(("kind", "sampling"), CASES)
def test_speculation_has_the_targets_distribution(kind, sampling, target):
    drafter = DRAFTERS[kind](target)
    counts = spread(target, drafter, SAMPLINGS[sampling], min(3, drafter.usual))
    assert p_value(counts, exactly(target, SAMPLINGS[sampling])) > 1e-4


# Wrong rules, each of which somebody has shipped. The same test must see them all.


def wrongly(row: Row, tree, p, q, *, after="residual", guess=None, unchecked=False):
    """`exact`, but for one thing."""
    node, tokens = -1, []
    while True:
        left, position = p[node + 1], len(row.tokens) + len(tokens)
        for number, child in enumerate(tree.children.get(node, ())):
            token = tree.ids[child]
            drawn_from = mtp.point(token, left) if q is None else q[child]
            drawn_from = drawn_from if guess is None else guess(drawn_from, left)
            sure = unchecked and node == -1
            if sure or uniform(row.seed, position, mtp.COIN + number) * float(drawn_from[token]) < float(left[token]):
                tokens.append(token)
                node = child
                break
            left = left if after == "p" else mtp.residual(left, drawn_from)
        else:
            return [*tokens, int(draw(left[None], [uniform(row.seed, position)]))]


def hotter(q, p):
    return F.normalize(q**0.4, p=1, dim=0)


def smoothed(q, p):
    """What a network would have said where its argmax was taken for certain."""
    return F.normalize(q + 0.15, p=1, dim=0)


WRONG = {
    "drawn again from p after a rejection": ("draft model", partial(wrongly, after="p")),
    "q of another temperature": ("draft model", partial(wrongly, guess=hotter)),
    "q a softmax for a token that was chosen": ("medusa", partial(wrongly, guess=smoothed)),
    "the first draft unchecked": ("draft model", partial(wrongly, unchecked=True)),
    "chosen ones drawn again from p": ("medusa tree", partial(wrongly, after="p")),
    "typical acceptance": ("medusa", mtp.typical()),
}


def test_the_scaffold_of_wrong_rules_is_right(target):
    for kind in ("draft model", "medusa tree", "drawn tree"):
        drafter = DRAFTERS[kind](target)
        right = spread(target, drafter, Sampling(1.0), min(3, drafter.usual), rule=wrongly)
        assert torch.equal(right, spread(target, drafter, Sampling(1.0), min(3, drafter.usual)))


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_rules_are_seen(fault, target):
    kind, rule = WRONG[fault]
    drafter = DRAFTERS[kind](target)
    assert p_value(spread(target, drafter, Sampling(1.0), rule=rule), exactly(target, Sampling(1.0))) < 1e-4


def test_typical_acceptance_is_greedy_at_temperature_0(target):
    plain = [one.ids for one in decode.generate(target, [PROMPT], 12)]
    drafter = DRAFTERS["medusa tree"](target)
    assert [one.ids for one in mtp.generate(target, [PROMPT], drafter, 3, 12, rule=mtp.typical())] == plain


# One place, numbers known by hand.


class Star:
    """A tree of one depth."""

    def __init__(self, *ids):
        self.ids, self.children = list(ids), {-1: list(range(len(ids)))}


def rows(count):
    return (Row(Request([0], 9, Sampling(1.0, seed=seed)), 9, frozenset(), None) for seed in range(count))


P, Q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])


def test_spec_06_acceptance_and_frequencies():
    first, kept, after, count = torch.zeros(3), 0, set(), 60_000
    for row in rows(count):
        token = int(draw(Q[None], [uniform(row.seed, 1, GUESS)]))
        said = mtp.exact(row, Star(token), P.expand(2, 3), Q[None])
        first[said[0]] += 1
        kept += len(said) == 2
        if len(said) == 1:
            after.add(said[0])
    assert torch.allclose(first / count, P, atol=0.005) and kept / count == pytest.approx(0.7, abs=0.005)
    assert after == {0}  # the residual is [1, 0, 0]


def test_spec_06_a_chosen_draft():
    first, kept, count = torch.zeros(3), 0, 60_000
    for row in rows(count):
        said = mtp.exact(row, Star(2), P.expand(2, 3), None)
        first[said[0]] += 1
        kept += len(said) == 2
    assert torch.allclose(first / count, P, atol=0.005) and kept / count == pytest.approx(0.2, abs=0.005)


def test_spec_06_tokens_a_round():
    total, count = 0, 30_000
    chain = Star(0, 0)
    chain.children = {-1: [0], 0: [1]}
    for row in rows(count):
        chain.ids = [int(draw(Q[None], [uniform(row.seed, position, GUESS)])) for position in (1, 2)]
        total += len(mtp.exact(row, chain, P.expand(3, 3), Q.expand(2, 3)))
    assert total / count == pytest.approx(2.19, abs=0.01)


def test_spec_07_nothing_is_left():
    [row] = rows(1)
    sure = torch.tensor([0.0, 1.0, 0.0])
    assert mtp.exact(row, Star(1), sure.expand(2, 3), sure[None])[0] == 1
    p = torch.tensor([0.25, 0.75])
    assert torch.equal(mtp.residual(p, p), p)
    assert mtp.exact(row, Star(2), sure.expand(2, 3), sure[None]) == [1]  # q(x) = p(x) = 0: rejected


def test_a_row_that_drafts_nothing_draws_as_plain_decoding_does(target):
    """Seeds keep their meaning where there is no draft: with draft length 0 the very ids are plain decoding's."""
    requests = [Request(PROMPT, 8, Sampling(1.0, seed=seed)) for seed in range(20)]
    plain = [one.ids for one in decode.generate(target, requests)]
    assert [one.ids for one in mtp.generate(target, requests, PromptLookup(), 0)] == plain


def test_a_row_in_a_batch_draws_what_it_draws_alone(target):
    requests = [Request(PROMPT[: 4 + seed % 5], 8, Sampling(1.0, seed=seed)) for seed in range(6)]
    for kind in DRAFTERS:
        drafter = DRAFTERS[kind](target)
        together = [one.ids for one in mtp.generate(target, requests, drafter)]
        assert together == [mtp.generate(target, [one], drafter)[0].ids for one in requests], kind


def test_greedy_and_sampled_rows_share_a_batch(target):
    requests = [Request(PROMPT, 8, Sampling(0.9 * (seed % 2), seed=seed)) for seed in range(6)]
    greedy = decode.generate(target, [PROMPT], 8)[0].ids
    for kind in DRAFTERS:
        completions = mtp.generate(target, requests, DRAFTERS[kind](target))
        assert [one.ids for one in completions[::2]] == [greedy] * 3, kind
