"""EAGLE's tree, and that its unrolled training sees what drafting sees."""

from __future__ import annotations

import pytest
import torch
from helpers import drafts_of, naive_greedy, plain_model, trained_kind

from minifer.drafters import EagleDrafter
from minifer.drafters.eagle import Growing
from minifer.model.cache import Cache
from minifer.model.passes import Pass, Span
from minifer.training.answers import Answer
from minifer.training.distill import STUDENTS
from minifer.training.lesson import Recipe, read
from minifer.training.recurrent import most_said, pairs, unroll

TEXT = [1, 4, 1, 5, 9, 2, 6, 5, 3, 8, 9]


@pytest.fixture(scope="module")
def target(checkpoint):
    return plain_model(checkpoint("llama"))


def scores_after(drafter: EagleDrafter, target, text: list[int], path: list[int]) -> torch.Tensor:
    """Log probabilities [V] after a text and some drafted tokens, by one chain of its own."""
    module, cache = drafter.module, Cache([drafter.module.attention.cache_shape], 1, 64)
    count = len(text) - 1
    states = target(Pass(torch.tensor(text[:-1]), (Span(0, 0, count),), (0,), drafter.reads)).states
    features = module.read(torch.cat([states[layer] for layer in drafter.reads], -1))
    out = module(Pass(torch.tensor(text[1:]), (Span(0, 0, count),), ()), features, cache)[-1:]
    for depth, token in enumerate(path):
        out = module(Pass(torch.tensor([token]), (Span(0, count + depth, 1),), ()), out, cache)
    return module.logits(out).log_softmax(-1)[0]


@pytest.mark.parametrize("length", [1, 2, 4])
def test_the_tree_is_the_likeliest_part_of_all_that_was_grown(length, target):
    """By hand: at each depth the three likeliest nodes branch into three, and the seven likeliest of all are proposed."""
    said = TEXT + naive_greedy(target, TEXT, 12)
    drafter = trained_kind("eagle tree", target, [said])
    grown, level = {}, [()]
    for _ in range(length):
        children = {}
        for path in level:
            scores, tokens = scores_after(drafter, target, TEXT, list(path)).topk(3)
            children |= {(*path, token): grown.get(path, 0.0) + score for token, score in zip(tokens.tolist(), scores.tolist())}
        grown |= children
        level = sorted(children, key=children.get, reverse=True)[:3]
    wanted = set(sorted(grown, key=grown.get, reverse=True)[: drafter.nodes(length)])
    [[ids, parents]] = drafts_of(target, drafter, length, [TEXT])
    found = []
    for token, parent in zip(ids, parents):
        if token >= 0:
            found.append((*(found[parent] if parent >= 0 else ()), token))
    assert set(found) == wanted and len(found) == len(wanted)


def test_growing():
    tree = Growing()
    tree.branch(-1, [5, 6], [-0.1, -2.0])
    tree.branch(0, [7, 8], [-0.2, -3.0])
    assert tree.best(3) == [0, 1, 2] and tree.best(1, after=2) == [2]
    assert tree.best(9) == [0, 1, 2, 3] and tree.parents == [-1, -1, 0, 0]


@pytest.mark.parametrize("kind", ["eagle", "deepseek"])
def test_training_sees_what_drafting_sees(kind, target):
    """Features of each depth, all at once, are those of drafting step by step: first true features, then its own."""
    said = [Answer([1, 4, 1, 5, 9, 2, 6, 5, 3, 8], 3), Answer([7, 8, 9, 10, 11], 1)]
    student = STUDENTS[kind](Recipe("", kind, drafted=999, unrolled=3), target, said)
    module, lesson = student.module, read(target, said, student.reads)
    states = torch.cat([lesson.states[layer] for layer in student.reads], -1)
    depths = dict(unroll(module, lesson, states, 3))
    flat = entry = 0
    for one in said:
        features, ids = module.read(states[flat : flat + len(one.ids) - 1]), torch.tensor(one.ids[1:])
        for depth, all_at_once in depths.items():
            for last in range(depth, len(ids)):
                true, cache = last - depth + 1, Cache([module.attention.cache_shape], 1, 64)
                out = module(Pass(ids[:true], (Span(0, 0, true),), ()), features[:true], cache)[-1:]
                for place in range(true, last + 1):
                    out = module(Pass(ids[place : place + 1], (Span(0, place, 1),), ()), out, cache)
                assert torch.allclose(out[0], all_at_once[entry + last], atol=1e-4), (depth, last)
        flat, entry = flat + len(one.ids), entry + len(ids)


def test_goals_stand_where_the_drafted_token_would(target):
    """Entry i has read token i + 1, so its goal is what the target says after it."""
    lesson = read(target, [Answer([1, 4, 1, 5, 9, 2, 6], 3), Answer([7, 8, 9, 10], 1)])
    assert lesson.sizes == (5, 4)  # from the prompt's last token on
    assert pairs(lesson, 0) == ([1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 3, 4, 6, 7, 8])
    assert pairs(lesson, 2) == ([2, 3, 4, 5, 8], [1, 2, 3, 4, 8])


def test_most_said(target):
    said = [Answer([9, 9, 5, 6, 5], 2), Answer([1, 6, 5], 1)]
    assert most_said(said, target, 2).tolist() == [5, 6] and most_said(said, target, 67) is None
    assert most_said(said, target, 4).tolist() == [0, 1, 5, 6]  # only two were said
