"""Training: a small run learns, can be stopped and gone on with, and writes a folder that loads."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import minifer
from minifer.training import corpus, pretrain, run

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
