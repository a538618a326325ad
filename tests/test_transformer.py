"""The plain model against transformers: every family, with and without cache, ragged rows, greedy over 64 tokens."""

from __future__ import annotations

import pytest
import torch
from helpers import FAMILIES, ids_of, naive_greedy, plain_model

from minifer import decode
from minifer.model.passes import Pass, Span

every_family = pytest.mark.parametrize("family", FAMILIES)


def whole(rows: list[list[int]], states: tuple[int, ...] = ()) -> Pass:
    """One pass over whole texts, every token wanted."""
    ids = [token for row in rows for token in row]
    return Pass(torch.tensor(ids), tuple(Span(at, 0, len(row)) for at, row in enumerate(rows)), tuple(range(len(ids))), states)


def near(given: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal up to float32's rounding (1.2e-7) some hundred times over: it grows with the logits, and with how a processor adds."""
    return bool((given - wanted).abs().max() < 4e-5 * wanted.abs().max())


def texts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(67, (length,), generator=generator).tolist() for length in lengths]


def expected(reference, rows: list[list[int]]) -> torch.Tensor:
    """transformers' logits of each row alone, flat [N, V]."""
    with torch.no_grad():
        return torch.cat([reference(torch.tensor([row])).logits[0] for row in rows])


@every_family
@torch.inference_mode()
def test_logits_without_cache(family, checkpoint):
    model, rows = plain_model(checkpoint(family)), texts(13, 1, 6)
    wanted = expected(checkpoint.reference(family), rows)
    assert near(model(whole(rows)).logits, wanted)
    assert wanted.abs().mean() > 0.3  # logits that could hide a fault in their smallness would prove little


@every_family
@torch.inference_mode()
def test_logits_with_cache_and_ragged_rows(family, checkpoint):
    """Rows of different lengths grow by spans of different lengths, down to single tokens and rows that rest.

    RUN-12: in float64, where the order of sums does not show, the cache changes nothing; and that is what transformers gives.
    """
    model, rows = plain_model(checkpoint(family), torch.float64), texts(14, 9, 12)
    everything = model(whole(rows)).logits
    assert near(everything, expected(checkpoint.reference(family), rows))
    wanted = everything.split([len(row) for row in rows])
    cache, at = model.new_cache(3, 14), [0, 0, 0]
    plan = [(3, 1, 4), (1, 1, 1), (1, 1, 1), (4, 0, 2), (0, 5, 0), (1, 1, 1), (1, 0, 1), (3, 0, 2)]
    for counts in plan:
        spans, ids = [], []
        for row, count in enumerate(counts):
            if count:
                spans.append(Span(row, at[row], count))
                ids += rows[row][at[row] : at[row] + count]
        output = model(Pass(torch.tensor(ids), tuple(spans), tuple(range(len(ids)))), cache)
        here = torch.cat([wanted[span.row][span.start : span.start + span.count] for span in spans])
        assert (output.logits - here).abs().max() < 1e-10, (counts, family)
        for span in spans:
            at[span.row] += span.count
    assert at == [14, 9, 12] == cache.lengths


@every_family
def test_greedy_ids_over_64_tokens(family, checkpoint):
    model, reference, [prompt] = plain_model(checkpoint(family)), checkpoint.reference(family), texts(7)
    [completion] = decode.generate(model, [prompt], 64)
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(64):
            ids.append(int(reference(torch.tensor([ids])).logits[0, -1].argmax()))
    assert completion.ids == ids[7:]
    assert len(set(completion.ids)) > 4  # a text, not one token for ever


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_other_dtypes_run_and_stay_near(dtype, checkpoint):
    rows = texts(9, 4)
    wanted = plain_model(checkpoint("llama"))(whole(rows)).logits
    given = plain_model(checkpoint("llama"), dtype)(whole(rows)).logits
    assert given.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    off = (given - wanted).abs().mean() / wanted.abs().mean()
    assert off < (1e-6 if dtype == torch.float64 else 0.05)


@torch.inference_mode()
def test_states_are_what_the_layers_put_out(checkpoint):
    model, rows = plain_model(checkpoint("llama")), texts(5, 3)
    output = model(whole(rows, states=(3, 0)))
    held = {}
    for layer in model.layers:
        layer.register_forward_hook(lambda layer, _, out: held.__setitem__(layer.number, out))
    model(whole(rows))
    assert set(output.states) == {0, 3}
    for number in (0, 3):
        assert output.states[number].shape == (8, 32)
        assert torch.equal(output.states[number], held[number])


@torch.inference_mode()
def test_only_wanted_tokens_reach_the_head(checkpoint):
    model, rows = plain_model(checkpoint("llama")), texts(6, 4)
    all_of_them = model(whole(rows))
    some = model(Pass(whole(rows).ids, whole(rows).spans, (5, 9)))
    assert some.hidden.shape == (2, 32)
    assert torch.allclose(some.logits, all_of_them.logits[[5, 9]], atol=1e-5)


@pytest.mark.parametrize("chunks", [[5, 3], [1] * 8, [3, 5], [8]])
@torch.inference_mode()
def test_dec_02_chunks_of_a_prompt_give_the_same(chunks, tiny64):
    """A causal flag aligned to the wrong corner would forget earlier chunks."""
    [row] = texts(8)
    cache, at = tiny64.new_cache(1, 8), 0
    for count in chunks:
        output = tiny64(Pass(torch.tensor(row[at : at + count]), (Span(0, at, count),), (count - 1,)), cache)
        at += count
    assert (output.logits[0] - tiny64(whole([row])).logits[-1]).abs().max() < 1e-9


@pytest.mark.parametrize("length", [3, 4, 5, 8, 9, 12])
@torch.inference_mode()
def test_dec_04_window_in_steps_equals_window_at_once(length, checkpoint):
    model = plain_model(checkpoint("mistral-window"), torch.float64)
    assert model.config.windows == (4,) * 5
    [row] = texts(length)
    cache = model.new_cache(1, length)
    for at, token in enumerate(row):
        output = model(Pass(torch.tensor([token]), (Span(0, at, 1),), (0,)), cache)
    assert (output.logits[0] - model(whole([row])).logits[-1]).abs().max() < 1e-9


@torch.inference_mode()
def test_tree_of_drafts_equals_its_paths(tiny64):
    """Each node of a tree sees the context and its ancestors: its logits are those of its own path, run as a text."""
    [context] = texts(6)
    tree, parents = [10, 11, 12, 13, 14, 15], (-1, 0, 0, 1, 1, 2)
    cache = tiny64.new_cache(1, 20)
    tiny64(Pass(torch.tensor(context), (Span(0, 0, 6),), (5,)), cache)
    output = tiny64(Pass(torch.tensor(tree), (Span(0, 6, 6),), tuple(range(6)), parents=(parents,)), cache)
    for node in range(6):
        path, at = [], node
        while at >= 0:
            path.insert(0, tree[at])
            at = parents[at]
        wanted = tiny64(whole([context + path])).logits[-1]
        assert (output.logits[node] - wanted).abs().max() < 1e-9
    # Keep the path 10, 12, 15 (slots 0, 2, 5) and go on behind it.
    output = tiny64(Pass(torch.tensor([20]), (Span(0, 9, 1),), (0,), keep={0: [0, 2, 5]}), cache)
    wanted = tiny64(whole([[*context, 10, 12, 15, 20]])).logits[-1]
    assert (output.logits[0] - wanted).abs().max() < 1e-9
    assert cache.tokens[0] == [*context, 10, 12, 15, 20]


def test_tree_in_a_window(checkpoint):
    model = plain_model(checkpoint("mistral-window"), torch.float64)
    [context] = texts(6)
    cache = model.new_cache(1, 20)
    with torch.inference_mode():
        model(Pass(torch.tensor(context), (Span(0, 0, 6),), (5,)), cache)
        tree, parents = [10, 11, 12, 13, 14, 15], (-1, 0, 1, 2, 3, 0)  # a path longer than the window, and a branch
        output = model(Pass(torch.tensor(tree), (Span(0, 6, 6),), tuple(range(6)), parents=(parents,)), cache)
        for node, path in ((4, tree[:5]), (5, [10, 15])):
            wanted = model(whole([context + path])).logits[-1]
            assert (output.logits[node] - wanted).abs().max() < 1e-9


def test_spec_21_of_equal_logits_the_lowest_id_wins(tiny64):
    head = tiny64.chunks[-1].exit.linear.weight
    saved = head.clone()
    try:
        ids = naive_greedy(tiny64, [3, 1, 4], 12)
        with torch.no_grad():
            head[11] = head[40] = head[max(set(ids), key=ids.count)]  # an exact tie, wherever this row wins
            head[max(set(ids), key=ids.count)] = saved[11]
        tied = naive_greedy(tiny64, [3, 1, 4], 12)
        assert 11 in tied and 40 not in tied
        assert ids_of(decode.generate(tiny64, [[3, 1, 4], [8]], 12))[0] == tied
    finally:
        with torch.no_grad():
            head.copy_(saved)


def test_without_a_cache_spans_start_at_zero(tiny64):
    with pytest.raises(ValueError, match="without a cache"):
        tiny64(Pass(torch.tensor([1]), (Span(0, 3, 1),), (0,)))


@torch.inference_mode()
def test_wanted_tokens_come_in_the_order_they_were_asked_for(tiny64):
    straight, turned = (tiny64(Pass(torch.tensor([4, 5]), (Span(0, 0, 2),), wanted)).hidden for wanted in ((0, 1), (1, 0)))
    assert torch.equal(turned, straight[[1, 0]])


def test_states_of_layers_that_are_not_there(tiny64):
    for states in ((-1, 3), (99,)):
        with pytest.raises(ValueError, match="of a model of 5"):
            tiny64(whole([[1, 2]], states))
