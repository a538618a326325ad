"""Many tokens a pass: greedy ids of plain decoding for every drafter, and the stop rules to the token."""

from __future__ import annotations

from functools import lru_cache, partial

import pytest
import torch
import torch.distributed as dist
from helpers import (
    PieceTokenizer,
    ScriptedModel,
    Truthful,
    TruthfulTree,
    chain,
    ids_of,
    naive_greedy,
    noting,
    plain_model,
    trained_kind,
)

from minifer import data_parallel, decode, mtp
from minifer.batch import Request
from minifer.draft import acceptance, tokens_per_pass
from minifer.drafters import Combined, DraftModel, Medusa, PromptLookup
from minifer.drafters.medusa import Heads, grow
from minifer.model import weights
from minifer.model.sampling import Sampling
from minifer.model.transformer import Transformer
from minifer.pace import Adaptive

PROMPTS = [[3], [1, 4, 1, 5, 9, 2, 6, 5, 3], [9, 2, 6, 5, 3]]
BUDGET = 12


@pytest.fixture(scope="module")
def target(checkpoint) -> Transformer:
    return plain_model(checkpoint("llama"))


@pytest.fixture(scope="module")
def truth(target) -> list[list[int]]:
    return [naive_greedy(target, prompt, BUDGET + 8) for prompt in PROMPTS]


def sometimes(row: int, known: int, depth: int) -> bool:
    return (row * 7 + known * 5 + depth * 3) % 4 != 0


def noisy(target: Transformer, noise: float) -> Transformer:
    """The target with other numbers near its own: a draft model that is often right."""
    torch.manual_seed(5)
    copy = Transformer(target.config)
    tensors = weights.collect(target, torch.float32)
    source = type("Held", (), {"shapes": {}, "read": lambda _, name, box: tensors[name][tuple(slice(*b) for b in box)]})()
    weights.fill(copy, source, torch.float32)
    for parameter in copy.parameters():
        parameter.add_(noise * parameter.std() * torch.randn_like(parameter) if parameter.dim() > 1 else 0.0)
    return copy


def heads_of(target: Transformer, count: int) -> Heads:
    """Heads that guess what the target's own head says, a little turned: often wrong, not always."""
    heads = Heads(count, target.config.width, target.config.vocabulary)
    weights.initialise(heads, torch.float32, "cpu", 3, spread=0.05)
    for head in heads.each:
        head.out.weight.copy_(target.chunks[-1].exit.linear.weight)
    return heads


TREE = grow([[0.5, 0.3, 0.2]] * 6, 24)


def drafter_of(kind: str, target: Transformer, truth: list[list[int]]):
    return {
        "right": lambda: Truthful(truth, 67),
        "wrong": lambda: Truthful(truth, 67, lambda *_: False),
        "sometimes": lambda: Truthful(truth, 67, sometimes),
        "tree": lambda: TruthfulTree(truth, 67, sometimes),
        "prompt lookup": lambda: PromptLookup(3, 1),
        "draft model": lambda: DraftModel(noisy(target, 0.1), target),
        "medusa": lambda: Medusa(heads_of(target, 6), target),
        "medusa tree": lambda: Medusa(heads_of(target, 6), target, TREE),
        "lookup, then deepseek": lambda: Combined(PromptLookup(3, 2), trained("deepseek", target)),
        "eagle": lambda: trained("eagle", target),
        "eagle tree": lambda: trained("eagle tree", target),
        "deepseek": lambda: trained("deepseek", target),
        "gemma": lambda: trained("gemma", target),
    }[kind]()


@lru_cache
def trained(kind: str, target: Transformer):
    """A drafter that has learned what the target says after the prompts."""
    return trained_kind(kind, target, [prompt + naive_greedy(target, prompt, BUDGET) for prompt in PROMPTS])


TRAINED = ("eagle", "eagle tree", "deepseek", "gemma")
PLAIN = ("right", "wrong", "sometimes", "tree", "prompt lookup", "draft model", "medusa", "medusa tree")
KINDS = (*PLAIN, *TRAINED, "lookup, then deepseek")


@pytest.mark.parametrize("length", range(1, 7))
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_ids_are_plain_decodings(kind, length, target, truth):
    drafter = drafter_of(kind, target, truth)
    for budget in range(BUDGET + 1):
        for prompts in (PROMPTS, PROMPTS[:1]):
            completions = mtp.generate(target, prompts, drafter, length, budget)
            assert ids_of(completions) == [ids[:budget] for ids in truth[: len(prompts)]], (budget, len(prompts))
            for one in completions:
                assert sum(round.tokens for round in one.rounds) == max(0, len(one.ids) - 1)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_unequal_budgets(kind, target, truth):
    requests = [Request(prompt, budget) for prompt, budget in zip(PROMPTS, (12, 1, 7))]
    completions = mtp.generate(target, requests, drafter_of(kind, target, truth), 4)
    assert ids_of(completions) == [ids[:n] for ids, n in zip(truth, (12, 1, 7))]


def test_drafts_are_really_kept(target, truth):
    for kind, least in (
        ("right", 3.5),
        ("sometimes", 2),
        ("tree", 2),
        ("draft model", 1.2),
        ("prompt lookup", 1),
        ("medusa", 1),
        ("medusa tree", 1),
        *((kind, 1.2) for kind in TRAINED),
        ("lookup, then deepseek", 1.2),
    ):
        completions = mtp.generate(target, PROMPTS, drafter_of(kind, target, truth), 4, BUDGET)
        assert tokens_per_pass(completions) > least, kind
    assert tokens_per_pass(mtp.generate(target, PROMPTS, drafter_of("wrong", target, truth), 4, BUDGET)) == 1


def test_what_a_pass_costs_is_one_pass(target, truth):
    """In the steady state there is one pass of the target a round, over the last token and the draft."""
    passes = []
    batch = decode.start(target, PROMPTS[:1], 10)
    loop = noting(mtp.steps(batch, Truthful(truth, 67), 4), lambda pass_: passes.append([tuple(span) for span in pass_.spans]))
    decode.run(target, loop, decode.new_cache(target, batch))
    assert passes == [[(0, 0, 1)], [(0, 1, 5)], [(0, 6, 4)]]  # 1 + 5 + 4 tokens; the last draft leaves room for the pass's own


def windows(checkpoint, family):
    model = plain_model(checkpoint(family))
    return model, [naive_greedy(model, prompt, BUDGET) for prompt in PROMPTS]


@pytest.mark.parametrize("family", ["mistral-window", "qwen3-windows"])
def test_trees_under_sliding_windows(family, checkpoint):
    model, said = windows(checkpoint, family)
    for drafter in (Truthful(said, 67, sometimes), TruthfulTree(said, 67, sometimes)):
        assert ids_of(mtp.generate(model, PROMPTS, drafter, 5, BUDGET)) == said


def test_a_fused_and_packed_model(checkpoint, truth):
    model = plain_model(checkpoint("llama"), finish=True)
    assert ids_of(mtp.generate(model, PROMPTS, TruthfulTree(truth, 67, sometimes), 3, BUDGET)) == [ids[:BUDGET] for ids in truth]


def test_spec_14_rows_accept_unequal_numbers(target):
    prompts = [[3], [1, 4, 1, 5, 9], [9, 2, 6, 5, 3, 5, 8, 9, 7]]
    alone = [naive_greedy(target, prompt, 20) for prompt in prompts]
    rounds = []

    class Rotating(Truthful):
        def propose(self, batch, output, settled, deepest):
            rounds.append(0)
            self.good = lambda row, known, depth: depth < (0, 2, 4)[(row + len(rounds)) % 3]
            return super().propose(batch, output, settled, deepest)

    completions = mtp.generate(target, prompts, Rotating(alone, 67), 4, 20)
    assert ids_of(completions) == alone
    kept = [tuple(round.accepted for round in one.rounds[:3]) for one in completions]
    assert kept == [(2, 4, 0), (4, 0, 2), (0, 2, 4)]


def test_a_conversation_goes_on_after_trees(target):
    """What a cache holds after a tree is not one text; the next turn must not take it for one."""
    cache, text = target.new_cache(1, 200), [3]
    for _ in range(3):
        said = naive_greedy(target, text, 9)
        [completion] = mtp.generate(target, [text], TruthfulTree([said], 67, sometimes), 3, 9, cache=cache)
        assert completion.ids == said
        text = [*text, *said, 11]


def test_a_given_cache_has_no_room_to_spare(target, truth):
    [prompt, said] = PROMPTS[0], truth[0][:8]
    cache = target.new_cache(1, len(prompt) + 8 - 1)  # just enough for plain decoding
    for kind in ("right", "tree", "medusa tree"):
        assert ids_of(mtp.generate(target, [prompt], drafter_of(kind, target, truth), 4, 8, cache=cache)) == [said]


# On several ranks.


def on_replicas(folder, prompts, ranks):
    model = plain_model(folder)
    serve = partial(mtp.generate, drafter=PromptLookup(3, 1), draft_length=3)
    return ids_of(data_parallel.generate(model, prompts, dist.group.WORLD, serve=serve, max_new_tokens=BUDGET))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_replicas_of_speculation(ranks, on_ranks, checkpoint, truth):
    assert on_ranks(ranks, on_replicas, checkpoint("llama"), PROMPTS, ranks) == [[ids[:BUDGET] for ids in truth]] * ranks


def of_one_mind(folder, prompts, truth):
    """Each rank computes on its own; the first one's decisions hold. The others' drafter is wrong, and their logits are noise."""
    model, rank = plain_model(folder), dist.get_rank()

    def agree(answer, shape):
        answer = torch.zeros(shape, dtype=torch.int64) if rank else answer
        dist.broadcast(answer, 0)
        return answer

    model.agreements.append(agree)
    drafter = Truthful(truth, 67, sometimes)
    if rank:
        model.logits = lambda hidden: torch.randn(len(hidden), 67)
        drafter = Truthful(truth, 67, lambda *_: False)
    completions = mtp.generate(model, prompts, drafter, Adaptive(5), BUDGET)
    return ids_of(completions), [one.rounds for one in completions]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_go_on_from_what_is_agreed(ranks, on_ranks, checkpoint, truth):
    results = on_ranks(ranks, of_one_mind, checkpoint("llama"), PROMPTS, truth)
    assert results[0][0] == [ids[:BUDGET] for ids in truth]
    assert all(result == results[0] for result in results)  # ids, draft lengths, and times too


# Stop rules, on a model whose every next token is scripted: 5 -> 6 -> 7 -> 2 -> 9 -> 9 ...

SCRIPT = chain(5, 6, 7, 2, 9) | {9: 9}
SAID = [6, 7, 2, *[9] * 30]


def one(model, prompt, drafter, length=4, count=10, **options):
    [completion] = mtp.generate(model, [Request(prompt, count, **options)], drafter, length)
    return completion


@pytest.mark.parametrize("length", range(1, 6))
@pytest.mark.parametrize("spoilt", [lambda *_: True, lambda *_: False, lambda row, known, depth: depth < 2])
def test_spec_01_the_budget_is_exact(length, spoilt):
    for count in range(13):
        completion = one(ScriptedModel(SCRIPT), [5], Truthful([SAID], 16, spoilt), length, count)
        assert completion.ids == SAID[:count] and completion.finish_reason == "length"


@pytest.mark.parametrize("count", range(8, 13))
def test_spec_02_counts_are_what_is_delivered(count):
    model, drafter = ScriptedModel(SCRIPT), Truthful([SAID], 16)
    streamed = [token for fresh in mtp.stream(model, [[5]], drafter, 4, count) for token in fresh.ids]
    completion = one(model, [5], drafter, 4, count)
    assert streamed == completion.ids == SAID[:count]
    assert 1 + sum(round.tokens for round in completion.rounds) == decode.speed([completion]).output_tokens == count


def test_spec_03_an_end_in_the_middle_of_a_draft():
    assert one(ScriptedModel(SCRIPT, end_ids=(2,)), [5], Truthful([SAID], 16)).ids == [6, 7, 2]
    for place in range(1, 7):
        said = [6, 7, 8, 10, 11, 12, 13, 14]
        said[place - 1] = 2
        script = {**chain(5, *said), 2: said[place]}
        for ends in ((2,), (2, 3)):
            completion = one(ScriptedModel(script, end_ids=ends), [5], Truthful([said], 16), 4, 8)
            assert completion.ids == said[:place] and completion.finish_reason == "stop"


def test_spec_18_what_an_end_cuts_off_is_not_counted():
    script = chain(5, 6, 7, 8, 2, 9, 10, 11)
    completion = one(ScriptedModel(script, end_ids=(2,)), [5], Truthful([[6, 7, 8, 2, 9, 10, 11]], 16), 5)
    assert completion.ids == [6, 7, 8, 2]
    [only] = completion.rounds  # of the draft 7 8 2 9 10 and the token after it
    assert (only.tokens, only.accepted, only.depth) == (3, 3, 3) and tokens_per_pass([completion]) == 3.0
    assert acceptance([completion]) == [1.0, 1.0, 1.0]


def test_stop_strings_end_a_row_in_the_middle_of_a_draft():
    pieces = PieceTokenizer(["alpha", " be", "ta", " gam", "ma", " delta", "!"])
    model, said = ScriptedModel(chain(0, 1, 2, 3, 4, 5, 6) | {6: 6}), [1, 2, 3, 4, 5, 6, 6, 6]
    for stops in (("ta gamma",), ("delta",), ("!!",)):
        request = Request([0], 8, stop_strings=stops)
        [plain] = decode.generate(model, [request], tokenizer=pieces)
        fresh = list(mtp.stream(model, [request], Truthful([said], 16), 4, tokenizer=pieces))
        assert [token for part in fresh for token in part.ids] == plain.ids
        assert "".join(part.text for part in fresh) == plain.text


@pytest.mark.parametrize("kind", [Truthful, TruthfulTree])
def test_spec_20_up_to_the_end_of_the_context(kind):
    model = ScriptedModel({0: 0}, context=16)
    [completion] = mtp.generate(model, [[0] * 10], kind([[0] * 9], 16), 4, 6)
    assert completion.ids == [0] * 6
    assert kind is TruthfulTree or max(span.start + span.count for pass_ in model.passes for span in pass_.spans) <= 15
    assert max(int(pass_.positions.max()) for pass_ in model.passes) <= 14
    with pytest.raises(ValueError) as plain:
        decode.generate(model, [[0] * 10], 7)
    with pytest.raises(ValueError) as here:
        mtp.generate(model, [[0] * 10], kind([[0] * 9], 16), 4, 7)
    assert str(here.value) == str(plain.value)


def test_spec_21_a_tie_goes_to_the_lowest_id(checkpoint):
    model = plain_model(checkpoint("llama"))
    head = model.chunks[-1].exit.linear.weight
    head[40] = head[11] = 3 * head[11]
    said = naive_greedy(model, [4, 4], 10)
    assert 11 in said and 40 not in said
    tied = [40 if token == 11 else token for token in said]
    for truth in (said, tied):
        for kind in (Truthful, TruthfulTree):
            assert ids_of(mtp.generate(model, [[4, 4]], kind([truth], 67), 3, 10)) == [said]


def test_spec_22_greedy_draws_nothing(target, truth):
    state = torch.random.get_rng_state()
    runs = []
    for seed in range(10):
        drafter = DraftModel(noisy(target, 0.1), target)
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        runs.append(ids_of(mtp.generate(target, PROMPTS, drafter, 3, BUDGET)))
        assert torch.equal(before, torch.random.get_rng_state())
    torch.random.set_rng_state(state)
    assert all(run == runs[0] for run in runs)


def test_spec_24_no_room_to_draft():
    drafter = Truthful([SAID], 16)
    assert one(ScriptedModel(SCRIPT), [5], drafter, 4, 1).ids == [6] and drafter.calls == []
    assert one(ScriptedModel(SCRIPT), [5], drafter, 0, 6).ids == SAID[:6] and drafter.calls == []
    for length in range(5):
        model = ScriptedModel(SCRIPT, end_ids=(2,))
        request = Request([5], 8, min_new_tokens=5)
        [plain] = decode.generate(model, [request])
        assert one(model, [5], Truthful([plain.ids], 16), length, 8, min_new_tokens=5).ids == plain.ids
        assert one(model, [5], Truthful([SAID], 16), length, 8, min_new_tokens=5).ids == plain.ids


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.6}, {"repetition_penalty": 0.7}])
def test_penalties_see_what_is_drafted(options, target):
    sampling = Sampling(**options)
    plain = ids_of(decode.generate(target, PROMPTS, BUDGET, sampling=sampling))
    assert plain != ids_of(decode.generate(target, PROMPTS, BUDGET))
    for drafter in (Truthful(plain, 67, sometimes), TruthfulTree(plain, 67, sometimes), PromptLookup(2, 1)):
        assert ids_of(mtp.generate(target, PROMPTS, drafter, 4, BUDGET, sampling=sampling)) == plain


def test_a_draft_length_that_is_none():
    for length in (-1, 1.5, True, "4"):
        with pytest.raises(ValueError, match="draft_length must be a whole number >= 0"):
            mtp.generate(ScriptedModel(SCRIPT), [[5]], Truthful([SAID], 16), length)


def test_no_prompts():
    assert mtp.generate(ScriptedModel(SCRIPT), [], Truthful([], 16)) == []
