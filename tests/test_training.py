"""Training: a small run learns, can be stopped and gone on with, and writes a folder that loads."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import minifer
from minifer import drafters
from minifer.model.tokenizer import Tokenizer
from minifer.prompts import WORKLOADS, workload
from minifer.training import corpus, distill, pretrain, run, templates
from minifer.training.answers import Answer, Plan, answer, batch_of, beginnings, prompts_for, runs_of_words, whole_prompts
from minifer.training.corpus import train_tokenizer
from minifer.training.lesson import Recipe, read
from minifer.training.students import MedusaHeads

SMALL = pretrain.Recipe(
    vocabulary=400, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, inner=64, context=128, steps=24, tokens_per_step=256,
    window=64, long_share=0.25, warm_up=2,
)  # fmt: skip


@pytest.fixture
def few_texts(monkeypatch):
    texts = {f"a/{at}.py": f"def f{at}(x):\n    return x + {at}\n" * 12 for at in range(60)}
    monkeypatch.setattr(pretrain, "documents", lambda: texts)
    return texts


def test_it_learns_and_writes_what_loads(few_texts, tmp_path):
    report = pretrain.train(tmp_path / "out", tmp_path / "work", SMALL, checkpoint_every=8)
    log = [json.loads(line) for line in (tmp_path / "work" / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log] == [8, 16, 24] and log[-1]["loss"] < 0.8 * log[0]["loss"]
    assert report["tokens_seen"] == 24 * 256 and set(report["held_out_bits_per_byte"]) == {"library"}
    model, tokenizer = minifer.load(tmp_path / "out", torch.float32)
    assert model.config.end_ids == (tokenizer.core.token_to_id(corpus.END_OF_TEXT),) == (0,)
    assert minifer.generate(model, tokenizer, "def f", 5)
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report
    assert [path.name for path in (tmp_path / "work").glob("step-*")] == ["step-24.safetensors"]


def test_a_stopped_run_goes_on_where_it_was(few_texts, tmp_path, monkeypatch):
    straight = pretrain.train(tmp_path / "a", tmp_path / "a-work", SMALL, checkpoint_every=8)
    step_of, done = run.train_step, []

    def dies_at_13(*args):
        done.append(args[-1])
        if len(done) == 13:
            raise KeyboardInterrupt
        return step_of(*args)

    monkeypatch.setattr(run, "train_step", dies_at_13)
    with pytest.raises(KeyboardInterrupt):
        pretrain.train(tmp_path / "b", tmp_path / "b-work", SMALL, checkpoint_every=8)
    monkeypatch.setattr(run, "train_step", lambda *args: (done.append(args[-1]), step_of(*args))[1])
    resumed = pretrain.train(tmp_path / "b", tmp_path / "b-work", SMALL, checkpoint_every=8)
    assert done[13:] == list(range(8, 24))
    # The same steps on the same numbers: what differs is rounding, should two threads add in another order.
    assert resumed["held_out_bits_per_byte"]["library"] == pytest.approx(straight["held_out_bits_per_byte"]["library"], abs=0.01)


def test_a_work_folder_belongs_to_one_recipe(few_texts, tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "recipe.json").write_text("{}")
    with pytest.raises(ValueError, match="another recipe"):
        pretrain.train(tmp_path / "out", tmp_path / "work", replace(SMALL, steps=2))


def test_the_standard_library_is_split_by_file():
    names = corpus.documents().keys()
    held_out = [name for name in names if corpus.is_held_out(name)]
    assert len(names) > 500 and 0.02 < len(held_out) / len(names) < 0.07
    assert any(name.startswith("pydoc_data/topics/") for name in names)
    assert not any("site-packages" in name for name in names)


def test_every_byte_has_a_token():
    tokenizer = corpus.train_tokenizer(["abc"], 300)
    text = "".join(map(chr, range(1, 300))) + "日本 👍"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.token_to_id(corpus.END_OF_TEXT) == 0


# Drafters.


def small_recipe(kind: str, **more) -> Recipe:
    return Recipe("tiny", kind, texts=70, tokens=12, steps=40, tokens_per_step=256, longest=64, width=32, inner=48, nodes=5, **more)


@pytest.mark.parametrize("kind", ["draft_model", "medusa", "eagle", "deepseek", "gemma"])
def test_a_drafter_is_trained_and_loads(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(
        distill, "measure", lambda target, tokenizer, folder: {"code": drafters.load(folder, target, tokenizer).usual}
    )
    report = distill.train(small_recipe(kind), tmp_path / "out", tmp_path / "work", checkpoint_every=20)
    assert report["workloads"] == {"code": 3 if kind == "medusa" else 4} and report["answer_tokens"] > 500
    log = [json.loads(line) for line in (tmp_path / "work" / kind / "log.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] < log[0]["loss"]
    assert json.loads((tmp_path / "out" / "report.json").read_text())["recipe"]["kind"] == kind
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("answers-*")}
    assert distill.train(small_recipe(kind), tmp_path / "out", tmp_path / "work")["minutes"] == report["minutes"]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("answers-*")} == before  # read, not made again
    with pytest.raises(ValueError, match="another recipe"):
        distill.train(small_recipe(kind, seed=1), tmp_path / "out", tmp_path / "work")


def test_heads_are_trained_towards_what_comes_so_many_tokens_later(checkpoint):
    """A target that always says the next number: head i's goal at a place is the number i further on."""
    answers = [Answer([1, 2, 3, 4, 5, 6, 7], 2), Answer([3, 4, 5, 6], 1)]
    target = minifer.load("tiny", torch.float32)[0]
    student = MedusaHeads(replace(small_recipe("medusa"), heads=2), target, answers)
    lesson = read(target, answers)
    assert lesson.sizes == (6, 4) and lesson.pass_.wanted == (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    lesson.__dict__["logits"] = torch.nn.functional.one_hot(torch.tensor([3, 4, 5, 6, 7, 8, 4, 5, 6, 7]), 4096) * 50.0
    goals = {ahead: wanted.argmax(-1).tolist() for ahead, _, wanted in student._pairs(lesson)}
    assert goals == {1: [4, 5, 6, 7, 8, 5, 6, 7], 2: [5, 6, 7, 8, 6, 7]}
    first = next(guess for ahead, guess, _ in student._pairs(lesson))
    own = lesson.hidden[[0, 1, 2, 3, 4, 6, 7, 8]]
    assert torch.allclose(first, target.logits(own), atol=1e-3)  # each head begins as the target's own


def test_prompts_to_train_on_are_many_and_not_the_measured_ones():
    pairs = templates.compose_all(3000, 0)
    assert len({prompt for _, prompt in pairs}) == 3000 and {kind for kind, _ in pairs} == set(WORKLOADS)
    assert pairs == templates.compose_all(3000, 0) and pairs != templates.compose_all(3000, 1)
    assert not [prompt for _, prompt in pairs if prompt != prompt.rstrip() or "{verb}" in prompt]
    measured = [prompt for kind in WORKLOADS for prompt in workload(kind).prompts]

    shared = runs_of_words(measured) & runs_of_words(prompt for _, prompt in pairs)
    # What is left are turns of phrase of the genre, no subjects.
    assert shared <= {
        ("write", "a", "short", "story", "about"), ("a", "short", "story", "about", "a"),
        ("write", "the", "beginning", "of", "a"), ("the", "beginning", "of", "a", "story"),
    }, shared  # fmt: skip


def test_unseen_prompts_are_not_among_those_trained_on():
    _, tokenizer = minifer.load("tiny")
    plan = Plan("tiny", 2000, 9, (0.0,))
    trained = {tuple(ids) for ids in prompts_for(tokenizer, plan.texts, plan.seed)}
    assert trained & {tuple(ids) for ids in prompts_for(tokenizer, 128, 1)}  # another seed alone does not do it
    unseen = prompts_for(tokenizer, 128, 1, without=plan)
    assert len(unseen) == 128 and not trained & {tuple(ids) for ids in unseen}


def test_answers_belong_to_one_plan(tmp_path):
    model, tokenizer = minifer.load("tiny")
    assert len(answer(model, tokenizer, tmp_path, Plan("tiny", 3, 4, (0.0,)))) == 3
    for other in (Plan("tiny", 4, 4, (0.0,)), Plan("small", 3, 4, (0.0,)), Plan("tiny", 3, 4, (1.0,))):
        with pytest.raises(ValueError, match="another recipe"):
            answer(model, tokenizer, tmp_path, other)
    held = json.loads((tmp_path / "recipe.json").read_text())
    (tmp_path / "recipe.json").write_text(json.dumps({key: value for key, value in held.items() if key != "invented"}))
    assert len(answer(model, tokenizer, tmp_path, Plan("tiny", 3, 4, (0.0,)))) == 3  # written before there was such an option


def test_a_batch_of_answers_depends_on_its_step_alone():
    answers = [Answer(list(range(size)), 3) for size in range(2, 60)]
    one = batch_of(answers, 200, 32, seed=0, step=5)
    assert one == batch_of(answers, 200, 32, seed=0, step=5) != batch_of(answers, 200, 32, seed=0, step=6)
    assert sum(len(answer.ids) for answer in one) >= 200 and max(len(answer.ids) for answer in one) <= 32
    assert all(answer.prompt < len(answer.ids) - 1 for answer in one)
    with pytest.raises(ValueError, match="none of 1 answers"):
        batch_of([Answer([1, 2, 3], 3)], 200, 32, 0, 0)


def test_invented_prompts():
    """Written where a user's message begins: whole ones only, each once, none that shares a run of words with a measured one."""
    _, plain = minifer.load("tiny")
    template = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|model|>{% endif %}"
    core = train_tokenizer(["<|user|> what is a tree <|end|> <|model|>"], 300)
    core.add_special_tokens(["<|end|>"])
    tokenizer = Tokenizer(core, (core.token_to_id("<|end|>"),), {}, template)
    starts = beginnings(tokenizer)
    assert len(starts) == len(WORKLOADS) and tokenizer.decode(starts[0]).startswith("<|user|>Continue this Python code")
    assert tokenizer.decode(starts[-1]) == "<|user|>"  # chats are told nothing

    def written(text: str) -> Answer:
        return Answer(starts[-1] + tokenizer.encode(text), len(starts[-1]))

    measured = workload("chat").prompts[0]
    texts = ["What is a tree?<|end|>", " What is a tree?\n<|end|>", "never ending", f"{measured}<|end|>", "<|end|>", "Why?<|end|>"]
    prompts = whole_prompts(tokenizer, [written(text) for text in texts])
    assert [tokenizer.decode(ids, special_tokens=True) for ids in prompts] == [
        f"<|user|>{text}<|end|><|model|>" for text in ("What is a tree?", "Why?")
    ]
    assert plain.template is None
