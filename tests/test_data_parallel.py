"""Replicas: every request once, in its place, as one rank would have served it."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from helpers import ids_of, plain_model

from minifer import data_parallel, decode, trace
from minifer.batch import Request
from minifer.model.sampling import Sampling

PROMPTS = [[3], [1, 4], [1, 5, 9], [2, 6, 5, 3], [5, 8, 9, 7, 9], [3, 2, 3, 8, 4, 6], [2, 6, 4]]


def served(folder, prompts, ranks_of_group=None, **options):
    """On a rank: what data parallelism over the world (or over this rank's group) gives."""
    torch.manual_seed(dist.get_rank())  # ranks are free to differ in everything but their requests
    model, group = plain_model(folder, torch.float64), dist.group.WORLD
    with trace.record() as record:
        completions = data_parallel.generate(model, prompts, group, **options)
    return completions, record


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 7])
def test_dsp_01_02_every_request_once_and_in_order(ranks, count, on_ranks, checkpoint, tiny64):
    prompts = PROMPTS[:count]
    wanted = ids_of(decode.generate(tiny64, prompts, 10))
    for completions, _ in on_ranks(ranks, served, checkpoint("llama"), prompts, timeout=60):
        assert ids_of(completions) == ids_of(decode.generate(tiny64, prompts, 64))
        assert [ids[:10] for ids in ids_of(completions)] == wanted


def test_dsp_03_replicas_without_work_and_budgets_apart(on_ranks, checkpoint, tiny64):
    requests = [Request([3, 1], 1), Request([4], 9)]
    wanted = ids_of(decode.generate(tiny64, requests))
    started = time.monotonic()
    assert all(ids_of(completions) == wanted for completions, _ in on_ranks(4, served, checkpoint("llama"), requests))
    assert time.monotonic() - started < 20


def test_sampled_requests_draw_the_same_on_any_rank(on_ranks, checkpoint, tiny64):
    requests = [Request(prompt, 8, Sampling(0.9, seed=at)) for at, prompt in enumerate(PROMPTS)]
    wanted = ids_of(decode.generate(tiny64, requests))
    assert all(ids_of(completions) == wanted for completions, _ in on_ranks(3, served, checkpoint("llama"), requests))


def test_no_word_while_decoding(on_ranks, checkpoint):
    """Two gathers (sizes, contents) at the end are all there is, however long the texts."""
    for completions, record in on_ranks(2, served, checkpoint("llama"), PROMPTS):
        assert [event.kind for event in record.events] == ["all_gather", "all_gather"]
        assert all(len(ids) == 64 for ids in ids_of(completions))
        assert min(event.start for event in record.events) - record.start > 0.5 * (record.end - record.start)


def test_any_way_of_serving_can_be_replicated(on_ranks, checkpoint):
    def rank(folder):
        def serve(model, prompts, max_new_tokens):
            return [(dist.get_rank(), prompt, max_new_tokens) for prompt in prompts]

        prompts = [[1], [2], [3]]
        return data_parallel.generate(plain_model(folder), prompts, dist.group.WORLD, serve, max_new_tokens=5)

    assert on_ranks(2, rank, checkpoint("llama")) == [[(0, [1], 5), (1, [2], 5), (0, [3], 5)]] * 2


def test_a_prompt_that_cannot_be_served_is_the_same_error_on_every_rank(on_ranks, checkpoint):
    def rank(folder):
        try:
            data_parallel.generate(plain_model(folder), [[1], [1], [1], []], dist.group.WORLD)
        except ValueError as error:
            return str(error)

    messages = on_ranks(2, rank, checkpoint("llama"))
    assert messages[0] == messages[1] and "prompt 3 is empty" in messages[0]


def test_rt_05_a_replica_of_two_groups_may_finish_first(on_ranks, checkpoint, tiny64):
    """World 4 as two pairs; one pair's requests are short, the other's long."""

    def pair(folder):
        rank = dist.get_rank()
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        model = plain_model(folder, torch.float64)
        prompts, tokens = (PROMPTS[:3], 5) if rank < 2 else (PROMPTS[3:], 20)
        return data_parallel.generate(model, [Request(prompt, tokens) for prompt in prompts], groups[rank // 2])

    results = [ids_of(completions) for completions in on_ranks(4, pair, checkpoint("llama"))]
    assert results[0] == results[1] == ids_of(decode.generate(tiny64, PROMPTS[:3], 5))
    assert results[2] == results[3] == ids_of(decode.generate(tiny64, PROMPTS[3:], 20))
