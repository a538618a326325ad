"""Sampling options and stateless draws."""

from __future__ import annotations

import math

import pytest
import torch

from minifer.model.sampling import Sampling, distributions, draw, new_seed, penalise, uniform

LOGITS = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()


def support(**options) -> set[int]:
    options.setdefault("temperature", 1.0)
    return set(distributions(LOGITS, [Sampling(**options)])[0].nonzero()[:, 0].tolist())


@pytest.mark.parametrize(
    ("top_p", "wanted"),
    [(0.39, {0}), (0.41, {0, 1}), (0.69, {0, 1}), (0.71, {0, 1, 2}), (1.0, {0, 1, 2, 3}), (1e-9, {0}), (0.0, {0})],
)
def test_dec_07_top_p(top_p, wanted):
    assert support(top_p=top_p) == wanted


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.9, 1.0])
def test_dec_07_one_hot(top_p):
    one_hot = torch.tensor([[-math.inf, 0.0, -math.inf]])
    assert distributions(one_hot, [Sampling(1.0, top_p=top_p)])[0].tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("top_k", "wanted"), [(10, {0, 1, 2, 3}), (0, {0, 1, 2, 3}), (None, {0, 1, 2, 3}), (1, {0}), (3, {0, 1, 2})]
)
def test_dec_07_top_k(top_k, wanted):
    assert support(top_k=top_k) == wanted


def test_min_p():
    assert support(min_p=0.6) == {0, 1} and support(min_p=1.0) == {0} and support(min_p=0.26) == {0, 1, 2}


def test_top_k_first_then_top_p_of_what_is_left():
    assert support(top_k=2, top_p=0.6) == {0, 1}  # 0.4 and 0.3 of 0.7: 0.57 does not reach 0.6
    assert support(top_k=2, top_p=0.5) == {0}


def test_values_after_temperature_and_cuts():
    given = distributions(LOGITS, [Sampling(0.5, top_k=3)])[0]
    assert torch.allclose(given, torch.tensor([16.0, 9.0, 4.0, 0.0]) / 29)


def test_equal_to_transformers():
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    torch.manual_seed(0)
    logits, text = torch.randn(1, 50) * 3, [3, 7, 7, 20]
    steps = [RepetitionPenaltyLogitsProcessor(1.3), TemperatureLogitsWarper(0.7), TopKLogitsWarper(20), TopPLogitsWarper(0.8)]
    wanted = LogitsProcessorList([*steps, MinPLogitsWarper(0.05)])(torch.tensor([text]), logits.clone()).softmax(-1)
    sampling = [Sampling(0.7, top_k=20, top_p=0.8, min_p=0.05, repetition_penalty=1.3)]
    given = distributions(penalise(logits, sampling, [text]), sampling)
    assert torch.allclose(given, wanted, atol=1e-6)


def test_rows_have_their_own_options():
    logits = LOGITS.expand(3, 4)
    given = distributions(logits, [Sampling(), Sampling(1.0), Sampling(1.0, top_k=2)])
    assert given[0].tolist() == [1, 0, 0, 0]
    assert torch.allclose(given[1], LOGITS[0].exp()) and given[2][2:].tolist() == [0, 0]
    assert given.isfinite().all()


@pytest.mark.parametrize("options", [{"top_p": 0.1}, {"top_k": 2}, {}])
def test_dec_06_temperature_zero(options):
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert distributions(logits, [Sampling(0.0, **options)])[0].tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"seed": 1.5}, "seed"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"top_k": 2.5}, "top_k must be a whole number"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


def test_uniform_is_a_function_of_its_arguments():
    assert uniform(7, 3) == uniform(7, 3)
    assert len({uniform(seed, position, stream) for seed in range(5) for position in range(5) for stream in range(3)}) == 75
    assert 0 <= uniform(2**63, 10**6) < 1 and 0 <= uniform(-1, 0) < 1
    numbers = torch.tensor([uniform(1, position) for position in range(4000)])
    assert abs(float(numbers.mean()) - 0.5) < 0.02 and abs(float(numbers.var()) - 1 / 12) < 0.005


def test_draw_takes_each_token_for_its_share_of_numbers():
    p = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    numbers = [at / 1000 for at in range(1000)]
    drawn = draw(p.expand(1000, 5), numbers)
    assert drawn.bincount(minlength=5).tolist() == [0, 250, 0, 750, 0]
    assert draw(p, [1 - 2**-53]).tolist() == [3]  # never a token of probability 0, at either end
    assert draw(p, [0.0]).tolist() == [1]


def test_draws_follow_the_distribution():
    """Chi-square over 20,000 positions of one seed: with 4 degrees of freedom 23.5 is passed once in 10,000."""
    p = torch.tensor([0.35, 0.3, 0.2, 0.1, 0.05])
    count = 20_000
    found = draw(p.expand(count, 5), [uniform(11, position) for position in range(count)]).bincount(minlength=5)
    assert float(((found - count * p) ** 2 / (count * p)).sum()) < 23.5


def test_seeds_and_draws_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    new_seed(), uniform(1, 2), draw(LOGITS.exp(), [0.5])
    assert torch.equal(torch.get_rng_state(), before)
    assert new_seed() != new_seed()
