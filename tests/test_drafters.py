"""Drafters one by one: what they propose, what they refuse, and that their state follows what was really kept."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from helpers import ScriptedModel, Truthful, chain, ids_of, naive_greedy, plain_model, reference
from safetensors.torch import save_file
from test_mtp import heads_of, noisy

import minifer
from minifer import decode, drafters, mtp
from minifer.batch import Request
from minifer.draft import tokens_per_pass
from minifer.drafters import DraftModel, Medusa, PromptLookup
from minifer.drafters.medusa import grow
from minifer.model import weights
from minifer.model.sampling import Sampling
from minifer.training.corpus import train_tokenizer

PROMPTS = [[3], [1, 4, 1, 5, 9, 2, 6, 5, 3], [9, 2, 6, 5, 3]]


def looked_up(text, length=4, **sizes):
    """What a fresh prompt lookup drafts after this text."""
    batch = decode.Batch([decode.Row(Request(text[:-1]), 64, frozenset(), None)])
    batch.take(torch.tensor([text[-1]]))
    drafter = PromptLookup(**sizes).start(batch, length)
    return [token for token in drafter.propose(batch, None, None, [length])[0, 0].tolist() if token >= 0]


def test_prompt_lookup_copies_what_followed():
    assert looked_up([1, 2, 3, 4, 5, 6, 9, 1, 2]) == [3, 4, 5, 6]
    assert looked_up([1, 2, 3, 4, 9, 1, 2, 7, 8, 1, 2]) == [7, 8, 1, 2]  # the last time counts
    assert looked_up([7, 1, 2, 3, 4, 9, 8, 1, 2, 5, 5, 7, 1, 2]) == [3, 4, 9, 8]  # but a longer n-gram counts more
    assert looked_up([1, 2, 3, 4, 5]) == [] and looked_up([1, 2, 3, 2]) == []  # single tokens are not looked up ...
    assert looked_up([1, 2, 3, 2], shortest=1) == [3, 2, 3, 2]  # ... unless asked for; a loop goes on as a loop
    assert looked_up([5, 5, 5], length=6) == [5] * 6
    with pytest.raises(ValueError, match="3 to 2 tokens"):
        PromptLookup(2, 3)


def test_prompt_lookup_finds_the_prompt_in_the_first_round():
    said = [1, 2, 3, 4, 5, 6, 7, 8]
    script = chain(8, 1, 2, 3, 4, 5, 6, 7, 8)
    [completion] = mtp.generate(ScriptedModel(script), [[*said, *said[:2]]], PromptLookup(), 4, 6)
    assert completion.ids == said[2:] and [round.accepted for round in completion.rounds] == [4]


# The draft model.


def test_a_perfect_draft_model_is_always_kept(checkpoint):
    target = plain_model(checkpoint("llama"))
    for sampling in (Sampling(), Sampling(0.8, seed=3), Sampling(1.2, top_p=0.7, seed=4)):
        completions = mtp.generate(target, PROMPTS, DraftModel(target, target), 4, 21, sampling=sampling)
        assert [[round.accepted for round in one.rounds] for one in completions] == [[4, 4, 4, 4]] * 3


class Fresh(DraftModel):
    """Forgets its cache before each draft: what it proposes must be the same."""

    def propose(self, batch, output, settled, deepest):
        self.prepare(batch)
        return super().propose(batch, output, settled, deepest)


def test_its_cache_follows_what_was_kept(checkpoint):
    target = plain_model(checkpoint("llama"))
    small = noisy(target, 0.1)

    def drafts_of(kind):
        seen = []

        class Seen(kind):
            def propose(self, *given, **named):
                seen.append(super().propose(*given, **named).tolist())
                return torch.tensor(seen[-1])

        completions = mtp.generate(target, PROMPTS, Seen(small, target), 4, 30)
        return seen, {round.accepted for one in completions for round in one.rounds}

    (kept, numbers), (fresh, _) = drafts_of(DraftModel), drafts_of(Fresh)
    assert kept == fresh and len(numbers) > 2, "rounds that kept none, some and all"


def test_a_draft_model_with_a_shorter_context(checkpoint):
    target = plain_model(checkpoint("llama"))
    small = noisy(target, 0.1)
    small.config = SimpleNamespace(**{**vars(small.config), "context": 12, "vocabulary": 67})
    said = naive_greedy(target, PROMPTS[1], 20)
    [completion] = mtp.generate(target, [PROMPTS[1]], DraftModel(small, target), 4, 20)
    assert completion.ids == said
    drafted = [round.drafted for round in completion.rounds]
    assert drafted[0] == 3 and set(drafted[4:]) == {0}  # 10 tokens stand there, 12 can, and a last draft is never run


def test_spec_16_vocabularies_padded_unequally():
    """The tokenizer has 60 ids, the target 64 rows of logits, the draft model 68."""
    target = ScriptedModel(chain(*range(5, 30)), vocabulary=64)
    small = ScriptedModel(chain(*range(5, 12), 63, 67, 5), vocabulary=68)
    small.logits = lambda hidden: torch.nn.functional.one_hot((hidden + 1) % 68, 68).float() * 9 + torch.eye(68)[67] * 50
    with pytest.raises(ValueError, match="68 ids, the target 64"):
        DraftModel(small, target)
    drafter = DraftModel(small, target, common=60)
    [completion] = mtp.generate(target, [[5]], drafter, 4, 20)
    assert completion.ids == decode.generate(target, [[5]], 20)[0].ids and tokens_per_pass([completion]) > 3
    seen = []

    class Seen(DraftModel):
        def propose(self, *given, **named):
            seen.append(super().propose(*given, **named))
            assert all(q.shape[1] == 64 and float(q[:, 60:].sum()) == 0 for q in self.q.values())
            return seen[-1]

    requests = [Request([5], 12, Sampling(1.5, seed=seed)) for seed in range(40)]
    completions = mtp.generate(target, requests, Seen(small, target, common=60), 3)
    assert all(len(one.ids) == 12 for one in completions) and max(int(draft[:, 0].max()) for draft in seen) < 60


def test_a_target_may_say_what_a_smaller_table_does_not_hold(checkpoint, tmp_path):
    """The draft model has 60 rows, the target 67: a text with id 62 is not drafted for, and nothing breaks."""
    target = plain_model(checkpoint("llama"))
    reference("llama", seed=3, vocab_size=60).save_pretrained(tmp_path)
    drafter = DraftModel(plain_model(tmp_path), target, common=60)
    prompts = [[3, 62, 5], [3, 5], [1, 4]]
    completions = mtp.generate(target, prompts, drafter, 3, 12)
    assert ids_of(completions) == [naive_greedy(target, prompt, 12) for prompt in prompts]
    assert sum(round.drafted for round in completions[0].rounds) == 0 < sum(round.drafted for round in completions[1].rounds)


# Medusa.


def test_medusa_guesses_from_the_last_kept_token(checkpoint):
    """Its drafts are those of the hidden state that plain decoding has at the same place."""
    target = plain_model(checkpoint("llama"))
    heads, text, seen = heads_of(target, 3), list(PROMPTS[1]), []

    class Seen(Medusa):
        def propose(self, batch, output, settled, deepest):
            draft = super().propose(batch, output, settled, deepest)
            seen.append((list(batch.row(0).tokens), draft[0, 0].tolist()))
            return draft

    tree = grow([[0.5, 0.3, 0.2]] * 3, 10)
    mtp.generate(target, [text], Seen(heads, target, tree), 3, 16)
    for tokens, draft in seen[:-1]:
        pass_ = minifer.model.passes.Pass(
            torch.tensor(tokens[:-1]), (minifer.model.passes.Span(0, 0, len(tokens) - 1),), (len(tokens) - 2,)
        )
        guesses = [head(target(pass_).hidden)[0].topk(3).indices.tolist() for head in heads.each]
        paths = sorted(tree, key=lambda path: (len(path), path))
        assert draft == [guesses[len(path) - 1][path[-1]] for path in paths]


def test_spec_17_trees_and_heads(checkpoint):
    target = plain_model(checkpoint("llama"))
    with pytest.raises(ValueError, match="depth 4; there are 3 heads"):
        Medusa(heads_of(target, 3), target, [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)])
    with pytest.raises(ValueError, match="without its beginning"):
        Medusa(heads_of(target, 3), target, [(0,), (1, 0)])
    drafter = Medusa(heads_of(target, 2), target, [(0,), (1,), (0, 0), (0, 1), (1, 0)])
    assert drafter.nodes(2) == 5 and drafter.nodes(1) == 2
    batch = decode.start(target, [PROMPTS[0]], 8)
    mine, passes = drafter.start(batch, 2), []

    def loop():
        output = yield batch.extend()
        batch.take(output.decide(batch.sample, 1))
        settled = SimpleNamespace(kept={0: [0]})
        passes.append((mine.propose(batch, output, settled, [2]), output.hidden))

    decode.run(target, loop(), decode.new_cache(target, batch))
    [(draft, hidden)] = passes
    first, second = (head(hidden)[0].topk(2).indices.tolist() for head in drafter.heads.each)
    assert draft[0].tolist() == [[first[0], first[1], second[0], second[1], second[0]], [-1, -1, 0, 0, 1]]


def test_spec_25_heads_are_not_used_twice(checkpoint):
    target = plain_model(checkpoint("llama"))
    with pytest.raises(ValueError, match="draft_length 4 is more than the 3 heads can guess ahead"):
        mtp.generate(target, PROMPTS, Medusa(heads_of(target, 3), target), 4)


def test_grow_takes_the_most_valuable_nodes():
    assert grow([[0.6, 0.2], [0.5, 0.3]], 4) == [(0,), (0, 0), (1,), (0, 1)]
    assert grow([[0.5]], 9) == [(0,)]  # no more than there are


# Loading.


def test_the_bundled_ones():
    model, tokenizer = minifer.load("tiny")
    assert drafters.available("tiny") == ["prompt_lookup", "draft_model", "medusa", "eagle", "deepseek", "gemma"]
    plain = ids_of(decode.generate(minifer.load("tiny", torch.float32)[0], [tokenizer.encode("class Stack:")], 48))
    for kind in drafters.available("tiny"):
        exact = minifer.load("tiny", torch.float32)[0]
        completions = mtp.generate(exact, [tokenizer.encode("class Stack:")], drafters.load(kind, exact, tokenizer), None, 48)
        assert ids_of(completions) == plain and tokens_per_pass(completions) > 1.2, kind


def test_what_is_not_there(tmp_path, checkpoint):
    model, _ = minifer.load("tiny")
    with pytest.raises(
        FileNotFoundError, match="neither one of prompt_lookup, draft_model, medusa, eagle, deepseek, gemma nor a folder"
    ):
        drafters.load("eagle9", model)
    nameless = plain_model(checkpoint("llama"))
    with pytest.raises(FileNotFoundError, match="no medusa is bundled for this model"):
        drafters.load("medusa", nameless)
    (tmp_path / "drafter.json").write_text(json.dumps({"drafter": "oracle"}))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="describes a drafter 'oracle'"):
        drafters.load(tmp_path, model)
    (tmp_path / "drafter.json").write_text(json.dumps({"drafter": "medusa", "heads": 2}))
    with pytest.raises(ValueError, match=r"for a target of width and vocabulary \(None, None\)"):
        drafters.load(tmp_path, model)
    (tmp_path / "drafter.json").write_text(json.dumps({"drafter": "medusa", "heads": 2, "width": 256, "vocabulary": 4096}))
    with pytest.raises(ValueError, match="does not say: tree"):
        drafters.load(tmp_path, model)


def test_heads_of_another_target(tmp_path, checkpoint):
    target = plain_model(checkpoint("llama"))
    heads = heads_of(target, 2)
    about = {"drafter": "medusa", "heads": 2, "width": 32, "vocabulary": 67, "tree": [[0], [0, 0]]}
    (tmp_path / "drafter.json").write_text(json.dumps(about))
    save_file(weights.collect(heads, torch.float32), tmp_path / "model.safetensors")
    loaded = drafters.load(tmp_path, target)
    assert loaded.tree == [(0,), (0, 0)]
    said = [naive_greedy(target, prompt, 12) for prompt in PROMPTS]
    assert ids_of(mtp.generate(target, PROMPTS, loaded, 2, 12)) == said
    with pytest.raises(ValueError, match="\\(32, 67\\), this one has \\(256, 4096\\)"):
        drafters.load(tmp_path, minifer.load("tiny")[0])


def test_a_folder_of_another_model(tmp_path, checkpoint):
    target = plain_model(checkpoint("llama"))
    reference("llama", seed=7, num_hidden_layers=1).save_pretrained(tmp_path)
    said = [naive_greedy(target, prompt, 12) for prompt in PROMPTS]
    assert ids_of(mtp.generate(target, PROMPTS, drafters.load(tmp_path, target), 3, 12)) == said


def test_another_tokenizer_is_refused(tmp_path):
    model, tokenizer = minifer.load("tiny")
    reference("llama", vocab_size=300).save_pretrained(tmp_path)
    other = train_tokenizer(["abc"], 300)
    other.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="another tokenizer: .* the target's 4096"):
        drafters.load(tmp_path, model, tokenizer)


def test_one_drafter_serves_batches_at_the_same_time(checkpoint):
    """Two loops in turns with one drafter: each has its own state."""
    target = plain_model(checkpoint("llama"))
    said = [naive_greedy(target, prompt, 12) for prompt in PROMPTS]
    drafter = DraftModel(noisy(target, 0.1), target)
    batches = [decode.start(target, [prompt], 12) for prompt in PROMPTS]
    drivers = [decode.turns(target, mtp.steps(batch, drafter, 3), decode.new_cache(target, batch)) for batch in batches]
    while drivers:
        drivers = [driver for driver in drivers if next(driver, "over") != "over"]
    assert [batch.completions()[0].ids for batch in batches] == said


def test_truthful_is_what_it_says():
    model = ScriptedModel(chain(5, 6, 7, 8, 9))
    [completion] = mtp.generate(model, [[5]], Truthful([[6, 7, 8, 9]], 16), 3, 4)
    assert tokens_per_pass([completion]) == 3
