"""Visibility from host integers, and the weighted sum with its log-sum-exp."""

from __future__ import annotations

import math

import pytest
import torch

from minifer.model.attention import ALL, CAUSAL, Visible, _plain, attention, calls, look, views
from minifer.model.cache import Cache
from minifer.model.passes import Pass, Span


def pass_of(*spans: tuple[int, int, int], parents=None) -> Pass:
    count = sum(span[2] for span in spans)
    return Pass(torch.zeros(count, dtype=torch.int64), tuple(Span(*span) for span in spans), (count - 1,), parents=parents)


def test_one_token_needs_no_mask():
    [view] = views(pass_of((0, 9, 1)), None)
    assert view.visible is ALL and view.first == 0


def test_dec_02_two_queries_over_five_keys():
    [view] = views(pass_of((0, 3, 2)), None)
    assert view.visible.mask[0].int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_a_prompt_uses_the_causal_flag():
    [view] = views(pass_of((0, 0, 5)), None)
    assert view.visible is CAUSAL


def test_dec_04_window_of_four_sees_exactly_four():
    [step] = views(pass_of((0, 9, 1)), 4)
    assert step.visible is ALL and step.first == 6  # decode: keys 6, 7, 8, 9
    [prefill] = views(pass_of((0, 0, 12)), 4)
    assert prefill.visible.mask[0, 9].nonzero()[:, 0].tolist() == [6, 7, 8, 9]
    [short] = views(pass_of((0, 0, 4)), 4)
    assert short.visible is CAUSAL  # nothing is out of the window yet
    [chunk] = views(pass_of((0, 7, 3)), 4)
    assert chunk.first == 4 and (chunk.visible.mask[0, 2].nonzero()[:, 0] + chunk.first).tolist() == [6, 7, 8, 9]


def test_dec_01_positions_of_ragged_rows():
    assert pass_of((0, 0, 1), (1, 0, 4), (2, 0, 7)).positions.tolist() == [0, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6]
    assert pass_of((0, 1, 1), (1, 4, 1), (2, 7, 1)).positions.tolist() == [1, 4, 7]


def test_spec_17_tree_mask_and_positions():
    # root, (0), (1), (0,0), (0,1), (1,0)
    tree = pass_of((0, 3, 6), parents=((-1, 0, 0, 1, 1, 2),))
    [view] = views(tree, None)
    assert (tree.positions - 3).tolist() == [0, 1, 1, 2, 2, 2]
    assert view.visible.mask[0, 5].int().tolist() == [1, 1, 1, 1, 0, 1, 0, 0, 1]  # context, root, (1), (1,0)


def test_how_many_calls_a_pass_needs():
    assert len(calls(pass_of((0, 0, 5), (1, 0, 5), (2, 0, 5)), None)) == 1  # alike
    assert len(calls(pass_of((0, 4, 1), (1, 9, 1), (3, 2, 1)), None)) == 1  # one token each
    assert len(calls(pass_of((0, 0, 5), (1, 0, 4)), None)) == 1  # ragged: the shorter one is filled up
    assert len(calls(pass_of((0, 4, 5), (1, 9, 2), (3, 2, 4)), 3)) == 1
    assert len(calls(pass_of((0, 3, 3), (1, 7, 2), parents=((-1, 0, 0), (-1, 0))), None)) == 1  # trees
    assert len(calls(pass_of((0, 0, 500), (1, 0, 400)), None)) == 2  # prompts: nothing is gained by filling up
    assert len(calls(pass_of((0, 0, 5), (1, 0, 4)), None, alone=True)) == 2  # training: keys of the pass itself


def test_a_pass_checks_its_spans():
    with pytest.raises(ValueError, match="spans of a pass hold 3 tokens, its ids 2"):
        Pass(torch.tensor([1, 2]), (Span(0, 0, 3),), (0,))
    with pytest.raises(ValueError, match="twice"):
        Pass(torch.tensor([1, 2]), (Span(0, 0, 1), Span(0, 1, 1)), (0,))
    two = torch.tensor([1, 2])
    for spans, wanted, parents, message in (
        ((Span(0, 0, 2), Span(1, 3, 0)), (0,), None, "one token at least"),
        ((Span(0, -1, 2),), (0,), None, "starts at 0 or later"),
        ((Span(0, 0, 2),), (2,), None, "of a pass of 2"),
        ((Span(0, 0, 2),), (0,), ((-1,),), "of 2 tokens"),
        ((Span(0, 0, 2),), (0,), ((1, 0),), "each comes after its parent"),
    ):
        with pytest.raises(ValueError, match=message):
            Pass(two, spans, wanted, parents=parents)


def random_qkv(queries: int, keys: int, heads: int = 4, kv_heads: int = 2, dtype=torch.float32, batch: int = 2):
    torch.manual_seed(1)
    shape = lambda n, count: torch.randn(batch, n, count, 8, dtype=dtype)  # noqa: E731
    return shape(heads, queries), shape(kv_heads, keys), shape(kv_heads, keys)


def by_definition(q, k, v, mask):
    """Softmax in float64, head by head."""
    group = q.shape[1] // k.shape[1]
    out, lse = torch.zeros_like(q, dtype=torch.float64), torch.zeros(q.shape[:3], dtype=torch.float64)
    for head in range(q.shape[1]):
        scores = q[:, head].double() @ k[:, head // group].double().transpose(1, 2) / 8**0.5
        scores = scores.masked_fill(~mask, -math.inf)
        lse[:, head] = scores.logsumexp(-1)
        weights = (scores - lse[:, head, :, None]).exp().nan_to_num(0.0)
        out[:, head] = weights @ v[:, head // group].double()
    return out, lse


MASKS = {
    "all": (ALL, lambda q, k: torch.ones(2, q, k, dtype=torch.bool)),
    "causal": (CAUSAL, lambda q, k: torch.ones(2, q, k, dtype=torch.bool).tril()),
    "explicit": (None, lambda q, k: torch.rand(2, q, k, generator=torch.Generator().manual_seed(3)) > 0.4),
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (6, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_out_and_log_sum_exp(kind, heads, dtype):
    q, k, v = random_qkv(5, 5 if kind == "causal" else 9, *heads, dtype=dtype)
    visible, make = MASKS[kind]
    mask = make(q.shape[2], k.shape[2])
    mask[:, 0, 0] = True
    visible = visible or Visible(mask=mask)
    wanted_out, wanted_lse = by_definition(q, k, v, mask)
    out, lse = attention(q, k, v, visible)
    assert out.dtype == dtype and lse.dtype == dtype
    assert (out - wanted_out).abs().max() < 2e-6 and (lse - wanted_lse).abs().max() < 2e-6
    group = q.shape[1] // k.shape[1]
    spread = [x.repeat_interleave(group, 1) for x in (k, v)]
    out, lse = _plain(q, *spread, visible.causal, None if visible.mask is None else mask[:, None], None)
    assert (out - wanted_out).abs().max() < 2e-6 and (lse - wanted_lse).abs().max() < 2e-6


def test_who_sees_nothing_gets_nothing():
    q, k, v = random_qkv(3, 4)
    mask = torch.ones(2, 3, 4, dtype=torch.bool)
    mask[1, 2] = False
    out, lse = attention(q, k, v, Visible(mask=mask))
    assert (out[1, :, 2] == 0).all() and (lse[1, :, 2] == -math.inf).all()
    assert lse[0].isfinite().all() and lse[1, :, :2].isfinite().all() and out.isfinite().all()


def test_log_sum_exp_is_float32_in_low_precision():
    q, k, v = random_qkv(3, 4, dtype=torch.bfloat16)
    out, lse = attention(q, k, v, ALL)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32


def test_values_wider_than_keys():
    q, k, _ = random_qkv(3, 4)
    v = torch.randn(2, 2, 4, 5)
    out, _ = attention(q, k, v, ALL)
    for head in range(4):
        weights = (q[:, head] @ k[:, head // 2].transpose(1, 2) / 8**0.5).softmax(-1)
        assert torch.allclose(out[:, head], weights @ v[:, head // 2], atol=1e-6)


def test_cp_08_query_heads_read_their_own_group():
    q, k, v = random_qkv(1, 6)
    v[:, 0], v[:, 1] = 0.0, 1.0
    for visible in (ALL, Visible(mask=torch.ones(2, 1, 6, dtype=torch.bool))):
        out, _ = attention(q, k, v, visible)
        assert torch.allclose(out[:, :2], torch.zeros(())) and torch.allclose(out[:, 2:], torch.ones(()))


def test_scale():
    q, k, v = random_qkv(2, 4)
    out, _ = attention(q, k, v, ALL, scale=0.25)
    wanted, _ = attention(q * 0.25 * 8**0.5, k, v, ALL)
    assert torch.allclose(out, wanted, atol=1e-6)


def test_capped_scores():
    """cap * tanh(score / cap), by hand."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    out, lse = attention(q, k, v, Visible(), scale=1.0, cap=2.0)
    for head in range(4):
        scores = 2 * (q[0, head] @ k[0, head // 2].t() / 2).tanh()
        assert torch.allclose(out[0, head], scores.softmax(-1) @ v[0, head // 2], atol=1e-6)
        assert torch.allclose(lse[0, head], scores.logsumexp(-1), atol=1e-6)


@pytest.mark.parametrize("most", [None, 3])
def test_tokens_that_are_not_in_the_cache_look_at_it(most):
    """Rows of unequal lengths in one call: each sees its own last keys, and the cache stays as it is."""
    torch.manual_seed(0)
    cache = Cache([(2, 8)], 3, 16)
    for x in (*cache.keys, *cache.values):
        x.normal_()
    before, ends = [x.clone() for x in (*cache.keys, *cache.values)], [7, 2, 5]
    spans = tuple(Span(row, end, 1) for row, end in enumerate(ends))
    q = torch.randn(3, 4, 8)
    out = look(q, Pass(torch.zeros(3, dtype=torch.int64), spans, (0, 1, 2)), cache, 0, most, 0.5)
    for row, end in enumerate(ends):
        seen = slice(max(0, end - (most or end)), end)
        for head in range(4):
            k, v = cache.keys[0][row, head // 2, seen], cache.values[0][row, head // 2, seen]
            assert torch.allclose(out[row, head], (q[row, head] @ k.t() * 0.5).softmax(-1) @ v, atol=1e-6)
    assert all(map(torch.equal, before, (*cache.keys, *cache.values)))
