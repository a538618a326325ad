"""Drafters that keep something of the target: after any round they draft what a fresh one drafts after the same text."""

from __future__ import annotations

import pytest
import torch
from helpers import TruthfulTree, drafts_of, ids_of, naive_greedy, plain_model, trained_kind

from minifer import decode, mtp
from minifer.batch import Request
from minifer.draft import tokens_per_pass
from minifer.drafters import Combined, PromptLookup
from minifer.drafters.chained import Shared
from minifer.model.sampling import Sampling

PROMPTS = [[3], [1, 4, 1, 5, 9, 2, 6, 5, 3], [9, 2, 6, 5, 3]]
KINDS = ("eagle", "eagle tree", "deepseek", "gemma")


@pytest.fixture(scope="module")
def target(checkpoint):
    return plain_model(checkpoint("llama"))


@pytest.fixture(scope="module")
def truth(target):
    return [naive_greedy(target, prompt, 24) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def drafter_of(target, truth):
    made = {kind: trained_kind(kind, target, [p + t[:12] for p, t in zip(PROMPTS, truth)]) for kind in KINDS}
    return made.__getitem__


def watched(drafter, seen):
    """The same drafter, which also keeps each text that it drafted for and what it drafted."""

    class Watched(type(drafter)):
        def propose(self, batch, output, settled, deepest):
            found = super().propose(batch, output, settled, deepest)
            seen.append([(list(batch.row(at).tokens), deepest[at], found[at].tolist()) for at in batch.active])
            return found

    other = Watched.__new__(Watched)
    other.__dict__.update(drafter.__dict__)
    return other


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_after_any_round_are_a_fresh_drafters(kind, target, truth, drafter_of):
    """Rows accept unequal numbers, in unequal rounds; each text is then given to a fresh drafter, alone."""
    seen = []
    completions = mtp.generate(target, PROMPTS, watched(drafter_of(kind), seen), 4, 24)
    assert ids_of(completions) == truth
    kept = {round.accepted for one in completions for round in one.rounds}
    assert len(kept) > 2, f"this test is to see rounds of several kinds, it saw {kept}"
    for rounds in seen:
        for text, deepest, draft in rounds:
            if deepest == 4:
                assert draft == drafts_of(target, drafter_of(kind), 4, [text])[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_in_a_batch_drafts_as_it_does_alone(kind, target, truth, drafter_of):
    texts = [prompt + ids[:count] for prompt, ids, count in zip(PROMPTS, truth, (9, 3, 1))]
    together = drafts_of(target, drafter_of(kind), 5, texts)
    assert together == [drafts_of(target, drafter_of(kind), 5, [text])[0] for text in texts]


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_goes_on(kind, target, truth, drafter_of):
    """On a cache that holds the text before, the drafter has not seen that text; the target's ids stay plain."""
    cache = target.new_cache(1, 128)
    first = mtp.generate(target, [PROMPTS[1]], drafter_of(kind), 3, 8, cache=cache)[0].ids
    text = [*PROMPTS[1], *first, 7, 7]
    assert mtp.generate(target, [text], drafter_of(kind), 3, 12, cache=cache)[0].ids == naive_greedy(target, text, 12)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_and_sampled_rows_share_a_batch(kind, target, truth, drafter_of):
    requests = [Request(PROMPTS[0], 20), Request(PROMPTS[1], 20, Sampling(0.8, seed=4)), Request(PROMPTS[2], 20)]
    completions = mtp.generate(target, requests, drafter_of(kind), 3)
    assert [ids_of(completions)[at] for at in (0, 2)] == [truth[0][:20], truth[2][:20]]
    again = mtp.generate(target, requests[1:2], drafter_of(kind), 3)
    assert ids_of(again) == ids_of(completions)[1:2]  # alone, it draws the same


@pytest.mark.parametrize("family", ["qwen2-windows", "qwen3-windows", "mistral-window", "gemma3", "gemma4-shared"])
@pytest.mark.parametrize("kind", ["eagle", "eagle tree", "deepseek"])
def test_other_families(kind, family, checkpoint):
    model = plain_model(checkpoint(family))
    if kind == "deepseek" and model.config.described:
        with pytest.raises(ValueError, match="layers of several kinds"):
            trained_kind(kind, model)
        return
    said = [naive_greedy(model, prompt, 16) for prompt in PROMPTS]
    drafter = trained_kind(kind, model, [prompt + ids for prompt, ids in zip(PROMPTS, said)])
    for length in (1, 4):
        completions = mtp.generate(model, PROMPTS, drafter, length, 16)
        assert ids_of(completions) == said and tokens_per_pass(completions) > 1.2


def test_a_reduced_vocabulary(target, truth):
    """Nothing is drafted outside of its ids, and what is drafted is still verified."""
    few = trained_kind("eagle", target, [p + t for p, t in zip(PROMPTS, truth)], drafted=30)
    assert few.shared.ids.tolist() != list(range(30)) and len(few.shared.ids) == 30  # those that were said most
    seen = []
    completions = mtp.generate(target, PROMPTS, watched(few, seen), 4, 24)
    assert ids_of(completions) == truth and tokens_per_pass(completions) > 1.2
    drafted = {token for rounds in seen for _, _, (ids, _) in rounds for token in ids if token >= 0}
    assert drafted <= set(few.shared.ids.tolist())
    logits = few.shared.logits(torch.eye(32))
    assert torch.equal(logits, target.logits(torch.eye(32))[:, few.shared.ids])
    assert torch.equal(few.shared.spread(torch.full((30,), 1 / 30)).nonzero()[:, 0], few.shared.ids)
    with pytest.raises(ValueError, match="2 ids to draft must be ids of the target's vocabulary of 67"):
        Shared(target, torch.tensor([1, 67]))


def test_the_second_of_two_sees_every_pass(target, truth, drafter_of):
    """Where prompt lookup drafts, the module still follows: later it drafts what a fresh one drafts."""
    seen, asked = [], []

    class Lookup(PromptLookup):
        def propose(self, batch, output, settled, deepest):
            found = super().propose(batch, output, settled, deepest)
            asked.append([bool(ids[0] >= 0) for ids in found[:, 0]])
            return found

    both = Combined(Lookup(3, 1), watched(drafter_of("deepseek"), seen))
    assert ids_of(mtp.generate(target, PROMPTS, both, 4, 24)) == truth
    assert any(any(has) for has in asked) and not all(all(has) for has in asked)
    checked = 0
    for rounds in seen:
        for text, deepest, draft in rounds:
            if deepest == 4:
                assert draft == drafts_of(target, drafter_of("deepseek"), 4, [text])[0]
                checked += 1
    assert checked
    assert both.nodes(4) == 4 and both.reads == drafter_of("deepseek").reads


@pytest.mark.parametrize("kind", KINDS)
def test_behind_another_drafters_trees(kind, target, truth, drafter_of):
    """A tree where the first has one, else what the second drafts; each goes on from what the other's drafts have left."""

    class Now(TruthfulTree):
        def propose(self, batch, output, settled, deepest):
            found = super().propose(batch, output, settled, deepest)
            found[[at for at in batch.active if batch.row(at).new % 3 == 0]] = -1
            return found

    good = Now(truth, 67, lambda row, known, depth: depth < 2)
    completions = mtp.generate(target, PROMPTS, Combined(good, drafter_of(kind)), 3, 24)
    assert ids_of(completions) == truth and tokens_per_pass(completions) > 1.5


def test_one_drafter_serves_batches_at_the_same_time(target, truth, drafter_of):
    for kind in KINDS:
        batches = [decode.start(target, [prompt], 24) for prompt in PROMPTS]
        drafter = drafter_of(kind)
        drivers = [decode.turns(target, mtp.steps(batch, drafter, 3), decode.new_cache(target, batch, 16)) for batch in batches]
        while drivers:
            drivers = [driver for driver in drivers if next(driver, "over") != "over"]
        assert [batch.completions()[0].ids for batch in batches] == truth
