"""Replicas: every request once, in its place, as one rank would have served it."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from helpers import FAMILIES, ids_of, plain_model

import minifer
from minifer import data_parallel, decode, trace
from minifer.batch import Request
from minifer.model.passes import Pass, Span
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

    def unfindable(folder):
        try:
            data_parallel.generate(plain_model(folder), [[1], Request([2], stop_strings=("x",))], dist.group.WORLD)
        except ValueError as error:
            return str(error)

    messages = on_ranks(2, unfindable, checkpoint("llama"))
    assert messages[0] == messages[1] and "prompt 1 has stop strings" in messages[0]


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


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_at_rest_give_the_logits_of_whole_ones(on_ranks, checkpoint, family, ranks):
    folder = checkpoint(family)
    pass_ = Pass(torch.tensor([5, 6, 7, 8, 9, 66, 33]), (Span(0, 0, 5), Span(1, 0, 2)), (1, 4, 6), states=(1, 3))

    def numbers(model):
        cache = model.new_cache(2, 16)
        with torch.inference_mode():
            first = model(pass_, cache)
            second = model(Pass(torch.tensor([10, 11, 12]), (Span(1, 2, 3),), (0, 2)), cache)
        return [first.logits, second.logits, *first.states.values()]

    def rank():
        model = plain_model(folder, torch.float64, shard=at_rest)
        before = data_parallel.resident_bytes(model)
        found = numbers(model)
        return found, before, data_parallel.resident_bytes(model)

    whole = plain_model(folder, torch.float64)
    wanted, everything = numbers(whole), data_parallel.resident_bytes(whole)
    outside = sum(x.nbytes for name, x in whole.named_parameters() if ".layers." not in name)
    if whole.config.tied:
        outside = whole.config.vocabulary * whole.config.width * 8 + whole.config.width * 8
    for found, before, after in on_ranks(ranks, rank):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)
        # A share of the layers, rows rounded up; nothing whole is left behind.
        assert outside < after <= outside + 1.3 * (everything - outside) / ranks and before <= 1.05 * after


def at_rest(empty):
    return data_parallel.shard_weights(empty, dist.group.WORLD)


@pytest.mark.parametrize("ranks", [2, 3])
def test_weights_at_rest_serve_ranks_that_end_at_different_times(on_ranks, checkpoint, ranks):
    """Requests of their own on each rank, some with none: who is done gathers for the others."""
    folder = checkpoint("llama")
    requests = [Request(prompt, budget) for prompt, budget in zip(PROMPTS, (1, 9, 3, 14, 2, 5, 7))]
    whole = plain_model(folder, torch.float64)

    def rank():
        model = plain_model(folder, torch.float64, shard=at_rest)
        found = [ids_of(data_parallel.generate(model, requests[:count], dist.group.WORLD)) for count in (7, 1, 0)]
        return found, ids_of(decode.generate(model, requests)), ids_of(data_parallel.generate(model, requests, dist.group.WORLD))

    wanted = ids_of(decode.generate(whole, requests))
    for dealt, together, again in on_ranks(ranks, rank):
        assert dealt == [wanted, wanted[:1], []] and together == again == wanted


def test_loaded_as_any_model(on_ranks):
    """Fused by `load`; and each step gathers every layer's bytes once."""
    whole, tokenizer = minifer.load("tiny", torch.float32, "cpu")
    prompt = tokenizer.encode("def read(path):")
    wanted = ids_of(decode.generate(whole, [prompt], 6))

    def rank():
        model, _ = minifer.load("tiny", torch.float32, "cpu", at_rest)
        with trace.record() as record:
            found = ids_of(decode.generate(model, [prompt], 6))
        return found, record.count("all_gather_single"), record.bytes

    layers = sum(x.nbytes for name, x in whole.named_parameters() if ".layers." in name)
    for found, gathers, payload in on_ranks(2, rank):
        assert found == wanted and gathers == 6 * whole.config.layers
        assert payload == 6 * (layers + 8)  # and a number that announces each pass


def test_the_least_work_is_next():
    assert data_parallel.deal([5, 1, 1, 1, 9, 1], 2) == [[0, 5], [1, 2, 3, 4]]
    assert data_parallel.deal([1, 1], 4) == [[0], [1], [], []]
    assert data_parallel.deal([], 2) == [[], []]
