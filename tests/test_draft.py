"""Drafts as trees, what is said about them, and how long they are to be."""

from __future__ import annotations

import pytest
import torch
from helpers import ScriptedModel, Truthful

from minifer import mtp
from minifer.batch import Request
from minifer.draft import Draft, Round, acceptance, expected_tokens, gain, tokens_per_pass
from minifer.pace import Adaptive

# root -> 10, 11; 10 -> 12, 13; 11 -> 12; 13 -> 14
IDS, PARENTS = [10, 11, 12, 13, 12, 14], [-1, -1, 0, 0, 1, 3]


def draft_of(ids, parents, deepest=9, room=99):
    return Draft.of(torch.tensor([[ids, parents]]), [deepest], [room])


def test_a_tree_and_its_paths():
    draft = draft_of(IDS, PARENTS)
    assert (draft.ids, draft.parents) == ([IDS], [PARENTS]) and not draft.is_chain(0) and draft.depth(0) == 3
    assert draft.children(0) == {-1: [0, 1], 0: [2, 3], 1: [4], 3: [5]}
    assert draft.paths(0) == [[10], [11], [10, 12], [10, 13], [11, 12], [10, 13, 14]]
    assert draft.follow(0, [10, 13, 14, 5]) == [0, 3, 5] and draft.follow(0, [11, 12]) == [1, 4] and draft.follow(0, [9]) == []


def test_a_draft_is_cut_to_depth_and_room():
    cut = draft_of(IDS, PARENTS, deepest=2)
    assert (cut.ids, cut.parents) == ([IDS[:5]], [PARENTS[:5]])
    assert draft_of(IDS, PARENTS, deepest=0).ids == [[]]
    assert draft_of(IDS, PARENTS, room=3).ids == [IDS[:3]]
    # Depth first, as a tree may come: what stays is renumbered.
    cut = draft_of([1, 2, 3, 4, 5], [-1, 0, 1, 0, -1], deepest=2)
    assert (cut.ids, cut.parents) == ([[1, 2, 4, 5]], [[-1, 0, 0, -1]])
    assert draft_of([7, 8, -1, -1], [-1, 0, 1, 2]).ids == [[7, 8]]


@pytest.mark.parametrize(
    "rate, length, tokens",
    [(0.5, 1, 1.5), (0.5, 3, 1.875), (0.6, 2, 1.96), (0.7, 3, 2.533), (0.7, 5, 2.9412), (0.8, 2, 2.44), (0.8, 5, 3.6893),
     (0.9, 2, 2.71), (0.9, 8, 6.1258), (1.0, 4, 5.0), (0.3, 0, 1.0)],
)  # fmt: skip
def test_expected_tokens(rate, length, tokens):
    assert expected_tokens(rate, length) == pytest.approx(tokens, abs=5e-5)


# facts: the best draft length for an acceptance rate and a draft's cost, and the gain there
@pytest.mark.parametrize(
    "rate, cost, length, factor",
    [(0.4, 0.01, 4, 1.586), (0.5, 0.05, 3, 1.630), (0.7, 0.05, 6, 2.353), (0.7, 0.1, 4, 1.981), (0.8, 0.2, 4, 1.868), (0.9, 0.3, 5, 1.874)],
)  # fmt: skip
def test_the_best_draft_length(rate, cost, length, factor):
    found = max(range(30), key=lambda k: gain(expected_tokens(rate, k), k, cost))
    assert found == length and gain(expected_tokens(rate, length), length, cost) == pytest.approx(factor, abs=5e-4)
    # An Adaptive that is told both finds the same.
    assert Adaptive(29, cost)._best(rate * 1000, 1000, cost) == length


def test_a_rate_is_a_share():
    with pytest.raises(ValueError, match=r"0\.\.1, it is 1\.2"):
        expected_tokens(1.2, 3)


class Told:
    def __init__(self, *rounds):
        self.rounds = [Round(drafted, depth, accepted, tokens, 0.0, 0.0) for drafted, depth, accepted, tokens in rounds]


def test_acceptance_by_depth():
    told = [Told((3, 3, 3, 4), (3, 3, 1, 2), (0, 0, 0, 1)), Told((2, 2, 0, 1), (12, 3, 2, 3))]
    assert tokens_per_pass(told) == 11 / 5
    assert acceptance(told) == [3 / 4, 2 / 4, 1 / 3]
    assert acceptance([]) == [] and tokens_per_pass([]) == 1.0


# Draft lengths that adapt.

SAID = [(token * 5 + 3) % 16 for token in range(200)]
SCRIPT = {token: (token + 1) % 16 for token in range(16)}


def lengths(spoilt, pace, count=60, **times):
    said = [(5 + at) % 16 for at in range(1, count + 9)]
    [completion] = mtp.generate(
        ScriptedModel(SCRIPT, context=256, **times), [Request([5], count)], Truthful([said], 16, spoilt), pace
    )
    assert completion.ids == said[:count]
    return [round.drafted for round in completion.rounds]


def test_adaptive_grows_where_all_is_kept_and_stops_where_none_is():
    assert max(lengths(lambda *_: True, Adaptive(8, 0.1))) == 8
    drafted = lengths(lambda *_: False, Adaptive(8, 0.1))
    assert set(drafted[12:-1]) == {0, 1} and drafted[12:-1].count(1) <= len(drafted) // 7  # now and then it is tried again


def test_adaptive_comes_back_when_it_pays_again():
    drafted = lengths(lambda row, known, depth: known > 30, Adaptive(6, 0.1), 120)
    assert max(drafted[-8:-2]) >= 4


def test_adaptive_weighs_measured_times():
    """Half of all drafts are kept; where drafting takes as long as a pass it does not pay, where it costs nothing it does."""
    import time

    class Slow(Truthful):
        def propose(self, *given, **named):
            time.sleep(0.004)
            return super().propose(*given, **named)

    said, half = [(5 + at) % 16 for at in range(1, 70)], (lambda row, known, depth: depth == 0 and known % 2 == 0)

    def drafted(kind):
        model = ScriptedModel(SCRIPT, context=256, decode=0.002)
        [completion] = mtp.generate(model, [Request([5], 60)], kind([said], 16, half), Adaptive(4))
        return sum(round.drafted for round in completion.rounds[10:])

    assert drafted(Truthful) > 2 * drafted(Slow)


def test_an_adaptive_has_bounds():
    with pytest.raises(ValueError, match="not 0"):
        Adaptive(0)
    with pytest.raises(ValueError, match="it is -1"):
        Adaptive(4, -1)
