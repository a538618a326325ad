"""The cache: cut by the pass, kept by the pass, moved between caches, and continued by a conversation."""

from __future__ import annotations

import pytest
import torch
from helpers import ids_of, naive_greedy, plain_model

from minifer import decode
from minifer.model.cache import Cache
from minifer.model.passes import Pass, Span


def step(*spans: tuple[int, int, list[int]], keep=None) -> Pass:
    ids = [token for _, _, part in spans for token in part]
    return Pass(torch.tensor(ids), tuple(Span(row, start, len(part)) for row, start, part in spans), (0,), keep=keep)


def fill(cache: Cache, pass_: Pass) -> None:
    """Keys are the ids, values their negatives."""
    cache.begin(pass_)
    for layer, keys in enumerate(cache.keys):
        numbers = pass_.ids.to(torch.float32)[:, None, None].expand(-1, keys.shape[1], keys.shape[3])
        cache.append(layer, pass_, numbers, -numbers)
    cache.commit(pass_)


def held(cache: Cache, row: int, layer: int = 0) -> list[int]:
    keys, values = cache.read(layer, (row,), 0, cache.lengths[row])
    assert torch.equal(keys, -values)
    return keys[0, 0, :, 0].int().tolist()


def test_rows_grow_apart_and_are_cut_by_the_next_pass():
    cache = Cache([(2, 4), (1, 6)], rows=3, capacity=8)
    fill(cache, step((0, 0, [1, 2, 3]), (2, 0, [7])))
    fill(cache, step((0, 3, [4]), (1, 0, [5]), (2, 1, [8])))
    assert [held(cache, row, 1) for row in range(3)] == [[1, 2, 3, 4], [5], [7, 8]]
    fill(cache, step((0, 1, [9, 9])))  # the row is cut to one token first
    assert held(cache, 0) == [1, 9, 9] == cache.tokens[0] and cache.lengths == [3, 1, 2]


def test_keep_moves_a_trees_tokens_together():
    cache = Cache([(1, 2)], rows=2, capacity=10)
    fill(cache, step((0, 0, [1, 2])))
    fill(cache, step((0, 2, [10, 11, 12, 13, 14])))
    fill(cache, step((0, 5, [20]), keep={0: [0, 2, 4]}))
    assert held(cache, 0) == [1, 2, 10, 12, 14, 20] == cache.tokens[0]


@pytest.mark.parametrize(
    "pass_, message",
    [
        (step((0, 0, [1] * 9)), "0 \\+ 9 tokens do not fit a cache of 8"),
        (step((0, 3, [1])), "holds 0 tokens: a pass cannot start at 3"),
        (step((2, 0, [1])), "row 2 of a cache of 2 rows"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_is_written(pass_, message):
    cache = Cache([(1, 2)], rows=2, capacity=8)
    with pytest.raises(ValueError, match=message):
        cache.begin(pass_)
    assert cache.lengths == [0, 0]


def test_a_tree_is_not_kept_by_a_pass_that_does_not_fit():
    cache = Cache([(1, 2)], rows=1, capacity=8)
    fill(cache, step((0, 0, [1, 2, 3, 4])))
    with pytest.raises(ValueError, match="cannot start at 3"):
        cache.begin(step((0, 3, [9]), keep={0: [1, 2]}))
    assert held(cache, 0) == [1, 2, 3, 4] == cache.tokens[0]


def test_a_pass_that_was_broken_off_is_not_remembered(checkpoint, tiny64):
    """An interrupt in the middle of a prompt: the next call must not believe that its keys are there."""
    model, cache = plain_model(checkpoint("llama"), torch.float64), tiny64.new_cache(1, 20)
    prompt = [3, 7, 9, 11, 13]

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model.layers[2].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        decode.generate(model, [prompt], 5, cache=cache)
    handle.remove()
    assert cache.lengths == [0]
    assert ids_of(decode.generate(model, [prompt], 5, cache=cache)) == [naive_greedy(tiny64, prompt, 5)]


def test_bad_sizes():
    with pytest.raises(ValueError, match="0 rows, capacity 5"):
        Cache([(1, 2)], 0, 5)


def test_export_and_load_hand_a_row_over(tiny64):
    prompt, [first] = [5, 9, 2, 40], ids_of(decode.generate(tiny64, [[5, 9, 2, 40]], 4))
    cache = tiny64.new_cache(2, 20)
    decode.generate(tiny64, [prompt, [7]], 4, cache=cache)
    other = tiny64.new_cache(3, 30)
    other.load(2, cache.export(0))
    assert other.tokens[2] == prompt + first[:3]
    tail = [prompt + first]
    [alone] = ids_of(decode.generate(tiny64, tail, 6))
    # Row 2 of the other cache goes on where row 0 of the first one was.
    moved = tiny64.new_cache(1, 30)
    moved.load(0, other.export(2))
    [continued] = ids_of(decode.generate(tiny64, tail, 6, cache=moved))
    assert continued == alone == naive_greedy(tiny64, tail[0], 6)
    with pytest.raises(ValueError, match="does not fit"):
        tiny64.new_cache(1, 3).load(0, cache.export(0))
    with pytest.raises(ValueError, match="does not fit"):
        Cache([(1, 8)] * 5, 1, 30).load(0, cache.export(0))


class Counting:
    """Counts the tokens that a model runs."""

    def __init__(self, model):
        self.model, self.tokens = model, 0

    def __call__(self, pass_, cache):
        self.tokens += len(pass_.ids)
        return self.model(pass_, cache)

    def __getattr__(self, name):
        return getattr(self.model, name)


def test_a_conversations_next_turn_continues_on_its_cache(tiny64):
    counting = Counting(tiny64)
    cache = tiny64.new_cache(1, 60)
    text = [3, 1, 4, 1, 5]
    for more in ([9, 2, 6], [5, 3]):
        [answer] = ids_of(decode.generate(counting, [text], 6, cache=cache))
        assert answer == naive_greedy(tiny64, text, 6)
        text = [*text, *answer, *more]
    # 5 prompt tokens, 5 of the 6 answered ones, then what is new since: the last answered one, 3 more, 5 answered ones.
    assert counting.tokens == 5 + 5 + 4 + 5
    # A conversation that is changed in its middle runs again only from there.
    counting.tokens, changed = 0, text[:4] + [60] + text[5:]
    [answer] = ids_of(decode.generate(counting, [changed], 2, cache=cache))
    assert answer == naive_greedy(tiny64, changed, 2) and counting.tokens == len(changed) - 4 + 1


def test_the_same_prompt_again_runs_one_token(tiny64):
    counting, cache = Counting(tiny64), tiny64.new_cache(1, 20)
    first = ids_of(decode.generate(counting, [[3, 1, 4]], 1, cache=cache))
    counting.tokens = 0
    assert ids_of(decode.generate(counting, [[3, 1, 4]], 1, cache=cache)) == first and counting.tokens == 1


def test_nbytes():
    assert Cache([(3, 64)] * 30, 1, 10, torch.bfloat16).nbytes == 10 * 23_040  # SmolLM2: 23 KB a token
