"""The loop: every stop rule by a scripted model, batches against rows alone, sampling by seeds, times."""

from __future__ import annotations

import pytest
import torch
from helpers import PieceTokenizer, ScriptedModel, chain, ids_of, in_three_tries, naive_greedy

from minifer import decode
from minifer.batch import Request
from minifer.model.sampling import Sampling

PROMPTS = [[3], [1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8]]


def test_plain_greedy_equals_naive_greedy(tiny64):
    assert ids_of(decode.generate(tiny64, PROMPTS, 12)) == [naive_greedy(tiny64, prompt, 12) for prompt in PROMPTS]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0), (0,), (2, 2, 1, 0, 2)])
def test_dec_01_a_row_in_a_batch_is_the_row_alone(order, tiny64):
    alone = [naive_greedy(tiny64, prompt, 12) for prompt in PROMPTS]
    assert ids_of(decode.generate(tiny64, [PROMPTS[at] for at in order], 12)) == [alone[at] for at in order]


def test_rows_that_end_at_different_times_leave_the_others_alone(tiny64):
    budgets = [9, 1, 5]
    requests = [Request(prompt, budget) for prompt, budget in zip(PROMPTS, budgets)]
    assert ids_of(decode.generate(tiny64, requests)) == [naive_greedy(tiny64, p, n) for p, n in zip(PROMPTS, budgets)]


# Stop rules, on a model whose every next token is scripted: 5 -> 6 -> 7 -> 2 -> 9 -> 9 ...
SCRIPT = chain(5, 6, 7, 2, 9) | {9: 9}


def one(model, prompt, count=10, **options):
    [completion] = decode.generate(model, [Request(prompt, count, **options)])
    return completion.ids, completion.finish_reason


@pytest.mark.parametrize("count", range(1, 7))
def test_the_budget_is_exact(count):
    assert one(ScriptedModel(SCRIPT), [5], count) == ([6, 7, 2, 9, 9, 9][:count], "length")


def test_a_stop_id_is_the_last_id():
    assert one(ScriptedModel(SCRIPT, end_ids=(2,)), [5]) == ([6, 7, 2], "stop")
    assert one(ScriptedModel(SCRIPT), [5], stop_ids=(7, 3)) == ([6, 7], "stop")
    assert one(ScriptedModel(SCRIPT, end_ids=(2,)), [5], 3) == ([6, 7, 2], "stop")  # with the last token of its budget


def test_dec_10_several_ends_of_several_sources():
    model, tokenizer = ScriptedModel(SCRIPT, end_ids=(11, 9)), PieceTokenizer(["x"] * 16)
    tokenizer.end_ids = (2,)
    assert one(model, [5]) == ([6, 7, 2, 9], "stop")
    [completion] = decode.generate(model, [[5]], 10, tokenizer=tokenizer)
    assert (completion.ids, completion.finish_reason) == ([6, 7, 2], "stop")
    assert one(model, [5], 6, stop_ids=()) == ([6, 7, 2, 9, 9, 9], "length")  # ends ignored


def test_dec_17_an_end_id_inside_of_a_prompt_is_no_end():
    model = ScriptedModel(SCRIPT | chain(8, 5), end_ids=(2,))
    assert ids_of(decode.generate(model, [[5, 2, 6], [7, 8, 9, 10, 5], [5]], 5)) == [[7, 2], [6, 7, 2], [6, 7, 2]]


def test_min_new_tokens_forbids_an_early_end():
    model = ScriptedModel(SCRIPT, end_ids=(2,))
    ids, reason = one(model, [5], 8, min_new_tokens=5)
    assert ids[:2] == [6, 7] and 2 not in ids[:4] and reason == "length"


def test_dec_08_a_budget_of_nothing():
    model = ScriptedModel(SCRIPT)
    assert one(model, [5], 0) == ([], "length") and model.passes == []
    [first, second] = decode.generate(model, [Request([5], 0), Request([5], 2)])
    assert (first.ids, second.ids) == ([], [6, 7]) and first.ttft is None
    with pytest.raises(ValueError, match="max_new_tokens must be >= 0 and whole, it is -1"):
        one(model, [5], -1)


def test_no_prompts():
    assert decode.generate(ScriptedModel(SCRIPT), []) == []


def test_dec_09_prompt_and_budget_against_the_context():
    model = ScriptedModel(SCRIPT | {0: 0}, context=16)
    assert len(one(model, [0] * 12, 4)[0]) == 4
    for prompt, budget, numbers in ((12, 5, ("12", "5", "16")), (17, 0, ("17", "0", "16")), (17, None, ("17", "16"))):
        model.passes.clear()
        with pytest.raises(ValueError) as error:
            one(model, [0] * prompt, budget)
        assert all(number in str(error.value) for number in numbers) and model.passes == []
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        decode.generate(model, [[5], []], 2)
    assert one(model, [0] * 12, None) == ([0] * 4, "length")  # no budget: up to the context


def test_ids_outside_of_the_vocabulary():
    with pytest.raises(ValueError, match="id 16, outside of the model's vocabulary of 16"):
        one(ScriptedModel(SCRIPT), [5, 16])


def test_a_cache_that_is_too_small():
    model = ScriptedModel(SCRIPT)
    decode.generate(model, [[5, 5]], 4, cache=model.new_cache(1, 5))  # the last token needs no place
    with pytest.raises(ValueError, match="2 tokens \\+ max_new_tokens 5 exceed the cache's capacity of 5"):
        decode.generate(model, [[5, 5]], 5, cache=model.new_cache(1, 5))
    with pytest.raises(ValueError, match="2 prompts do not fit a cache of 1 rows"):
        decode.generate(model, [[5], [5]], 2, cache=model.new_cache(1, 5))


def test_each_pass_after_the_first_runs_one_token_a_row():
    model = ScriptedModel(SCRIPT)
    decode.generate(model, [[5, 5, 5], [6]], 4)
    assert [[tuple(span) for span in pass_.spans] for pass_ in model.passes] == [
        [(0, 0, 3), (1, 0, 1)],
        [(0, 3, 1), (1, 1, 1)],
        [(0, 4, 1), (1, 2, 1)],
        [(0, 5, 1), (1, 3, 1)],
    ]


# Text, stop strings and streaming.

PIECES = PieceTokenizer(["alpha", " be", "ta", " gam", "ma", " delta", "!"])
TEXT_SCRIPT = chain(0, 1, 2, 3, 4, 5, 6) | {6: 6}


def spoken(stops=(), count=6, **options):
    model = ScriptedModel(TEXT_SCRIPT)
    request = Request([6, 0], count, stop_strings=stops, **options)
    fresh = list(decode.stream(model, [request], tokenizer=PIECES))
    [completion] = decode.generate(model, [request], tokenizer=PIECES)
    assert "".join(one.text for one in fresh) == completion.text
    assert [token for one in fresh for token in one.ids] == completion.ids
    return completion


def test_dec_14_a_stop_string_ends_the_row():
    completion = spoken(["ta gamma"])
    assert (completion.text, completion.ids, completion.finish_reason) == (" be", [1, 2, 3, 4], "stop")


def test_dec_14_a_stop_string_that_only_begins():
    completion = spoken(["ta zeta"], 5)
    assert (completion.text, completion.finish_reason) == (" beta gamma delta", "length")
    assert spoken(["be gone"], 1).text == " be"  # held back, then let go at the end


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(ValueError, match="needs a tokenizer"):
        decode.generate(ScriptedModel(SCRIPT), [Request([5], 2, stop_strings=["x"])])


def test_dec_05_a_budget_that_cuts_a_character():
    pieces = list("é👍".encode())
    tokenizer = PieceTokenizer([])
    tokenizer.decode = lambda ids, special_tokens=False: bytes(pieces[token - 1] for token in ids).decode("utf-8", "replace")
    model = ScriptedModel(chain(*range(8)), vocabulary=8)
    [whole] = decode.generate(model, [[0]], 6, tokenizer=tokenizer)
    assert whole.text == "é👍"
    streamed = [fresh.text for fresh in decode.stream(model, [[0]], 4, tokenizer=tokenizer)]
    [cut] = decode.generate(model, [[0]], 4, tokenizer=tokenizer)
    assert streamed[:3] == ["", "é", ""] and cut.text == "".join(streamed) == "é\ufffd"


def test_streams_of_a_batch_say_whose_they_are(tiny64):
    requests = [Request(prompt, budget) for prompt, budget in zip(PROMPTS, (3, 1, 5))]
    rows: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for fresh in decode.stream(tiny64, requests):
        rows[fresh.row] += fresh.ids
    assert list(rows.values()) == ids_of(decode.generate(tiny64, requests))


def test_a_stream_starts_before_it_ends():
    model = ScriptedModel(SCRIPT)
    stream = decode.stream(model, [[5]], 5)
    next(stream)
    assert len(model.passes) <= 2


# Sampling in the loop.

SAMPLED = Sampling(0.8, top_p=0.95)


def with_seed(seed):
    return Sampling(0.8, top_p=0.95, seed=seed)


def test_dec_15_a_seeded_request_is_the_same_in_any_company(tiny64):
    a = Request([3, 1, 4], 16, with_seed(42))
    [alone] = ids_of(decode.generate(tiny64, [a]))
    b, c, short = Request([7], 16, with_seed(7)), Request([9, 9], 16, SAMPLED), Request([5], 3, SAMPLED)
    for company, row in (([a, b], 0), ([a, c], 0), ([b, c, c, a], 3), ([short, a], 1), ([a, Request([8], 9)], 0)):
        assert ids_of(decode.generate(tiny64, company))[row] == alone
    assert len(set(alone)) > 4


def test_without_a_seed_runs_differ_and_nobodys_generator_moves(tiny64):
    before = torch.get_rng_state()
    runs = [ids_of(decode.generate(tiny64, [[3, 1, 4]], 24, sampling=SAMPLED)) for _ in range(3)]
    assert runs[0] != runs[1] or runs[1] != runs[2]
    assert torch.equal(torch.get_rng_state(), before)


def test_spec_22_greedy_is_greedy_whatever_the_global_seed(tiny64):
    runs = []
    for seed in range(4):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        runs.append(ids_of(decode.generate(tiny64, PROMPTS, 8)))
        assert torch.equal(torch.get_rng_state(), before)
    assert runs.count(runs[0]) == 4


def test_dec_06_greedy_and_sampled_rows_in_one_batch(tiny64):
    requests = [Request(PROMPTS[0], 10), Request(PROMPTS[1], 10, Sampling(1.0)), Request(PROMPTS[2], 10)]
    given = ids_of(decode.generate(tiny64, requests))
    assert (given[0], given[2]) == (naive_greedy(tiny64, PROMPTS[0], 10), naive_greedy(tiny64, PROMPTS[2], 10))


def test_a_repetition_penalty_counts_prompt_and_answer():
    model = ScriptedModel({5: 6, 6: 5}, vocabulary=8)
    assert one(model, [5], 4)[0] == [6, 5, 6, 5]
    logits = one(model, [5], 4, sampling=Sampling(repetition_penalty=1e9))[0]
    assert logits[:2] == [6, 0]  # 5 is in the prompt: its logit is as good as gone


def test_sampled_tokens_follow_the_models_distribution(tiny64):
    """First tokens of 3,000 seeds against the softmax, by chi-square over the likely ones."""
    requests = [Request([3, 1, 4], 1, Sampling(1.3, seed=seed)) for seed in range(3000)]
    found = torch.tensor([c.ids[0] for c in decode.generate(tiny64, requests)]).bincount(minlength=67)
    from minifer.model.passes import Pass, Span

    with torch.inference_mode():
        logits = tiny64(Pass(torch.tensor([3, 1, 4]), (Span(0, 0, 3),), (2,))).logits[0]
    p = (logits / 1.3).softmax(-1)
    likely = p > 0.01
    wanted = torch.cat([p[likely], p[~likely].sum()[None]]) * 3000
    counts = torch.cat([found[likely], found[~likely].sum()[None]])
    wanted, counts = wanted[wanted > 5], counts[wanted > 5]
    statistic, freedom = float(((counts - wanted) ** 2 / wanted).sum()), len(wanted) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5 + 8  # beyond the 99.99 % point for these degrees of freedom


# Times.


def test_perf_01_times_of_a_model_that_takes_50_ms():
    def check():
        [completion] = decode.generate(ScriptedModel({0: 0}, prefill=0.05, decode=0.05), [[0]], 10)
        assert completion.seconds == pytest.approx(0.5, rel=0.2) and completion.ttft == pytest.approx(0.05, rel=0.2)
        assert 1 / completion.tpot == pytest.approx(20, rel=0.2)

    in_three_tries(check)


def test_perf_03_prefill_is_no_decode_and_prompts_are_no_output():
    def check():
        model = ScriptedModel({0: 0}, prefill=0.4, decode=0.02)
        speed = decode.speed(decode.generate(model, [[0] * 5, [0] * 9], 11))
        assert speed.ttft == pytest.approx(0.4, rel=0.1) and speed.tpot == pytest.approx(0.02, rel=0.2)
        assert speed.decode_rate == pytest.approx(100, rel=0.2)
        assert (speed.output_tokens, speed.prompt_tokens) == (22, 14)

    in_three_tries(check)


# Requests with something wrong with them.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ids": "hello"}, "ids must be a list of whole numbers"),
        ({"ids": [1.5]}, "ids must be a list of whole numbers"),
        ({"ids": [1], "stop_ids": 5}, "stop_ids must be a list"),
        ({"ids": [1], "max_new_tokens": 2.5}, "max_new_tokens must be >= 0 and whole, it is 2.5"),
        ({"ids": [1], "min_new_tokens": -1}, "min_new_tokens"),
    ],
)
def test_bad_requests(options, message):
    with pytest.raises(ValueError, match=message):
        Request(**options)


@pytest.mark.parametrize("prompts", [[1, 5, 9], ["hello"]])
def test_prompts_that_are_no_lists_of_ids(prompts):
    with pytest.raises(ValueError, match="one list a prompt .*number 0 is"):
        decode.generate(ScriptedModel(SCRIPT), prompts)


def test_one_stop_string_is_one_and_a_tensor_is_a_list():
    assert spoken("ta gamma").text == " be"
    assert one(ScriptedModel(SCRIPT), torch.tensor([5]), 2)[0] == [6, 7]


def test_stop_ids_beyond_the_vocabulary_do_no_harm():
    assert one(ScriptedModel(SCRIPT), [5], 3, stop_ids=[999, 2], min_new_tokens=1)[0] == [6, 7, 2]


def test_a_stream_complains_at_once():
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        decode.stream(ScriptedModel(SCRIPT), [[]])


@pytest.mark.parametrize("temperature", [1e-38, 1e-50, 1e-300])
def test_a_very_small_temperature_is_as_good_as_greedy(temperature, tiny64):
    sampled = ids_of(decode.generate(tiny64, [[3, 1, 4]], 8, sampling=Sampling(temperature, seed=1)))
    assert sampled == [naive_greedy(tiny64, [3, 1, 4], 8)]
