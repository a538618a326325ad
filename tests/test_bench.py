"""What the bench measures, on scripted models whose times are known."""

from __future__ import annotations

import time

import pytest
import torch
from helpers import ScriptedModel, in_three_tries, plain_model

from minifer import bench, bench_pipeline, bench_speculation, bench_tensor
from minifer.batch import Completion
from minifer.bench_speculation import Cell
from minifer.drafters import PromptLookup
from minifer.model.tokenizer import Tokenizer
from minifer.ranks import trace
from minifer.training.corpus import train_tokenizer


class SlowStart(ScriptedModel):
    """The first pass of its life takes a second, the others 10 ms."""

    def __call__(self, pass_, cache):
        time.sleep(0.01 if self.passes else 1.0)
        return super().__call__(pass_, cache)


def test_perf_02_what_only_the_first_run_costs_is_not_measured():
    def check():
        taken = bench.take_turns({"x": bench.ours(SlowStart({0: 0}))}, [[0]], 10, 3)["x"]
        assert taken.median == pytest.approx(0.01, rel=0.2) and len(taken.seconds) == 3

    in_three_tries(check)


def test_contestants_take_turns():
    order = []
    contestants = {name: lambda prompts, tokens, name=name: order.append((name, tokens)) or 1.0 for name in "ab"}
    bench.take_turns(contestants, [[0]], 9, 2)
    assert order == [("a", 4), ("b", 4), ("a", 9), ("b", 9), ("a", 9), ("b", 9)]


def test_median_and_spread():
    measured = bench.Measured((1.0, 1.1, 1.3))
    assert measured.median == 1.1 and measured.spread == pytest.approx(0.3 / 2 / 1.1)


def test_bytes_and_matrices_of_a_model(checkpoint):
    model = plain_model(checkpoint("llama"))
    stored = sum(parameter.nbytes for parameter in model.parameters() if parameter.dim() == 2)
    assert bench.weight_bytes(model) == stored - 67 * 32 * 4  # of the embedding only rows are read
    assert 0 < bench.matrix_seconds(plain_model(checkpoint("llama"), finish=True), 3) < 1
    tied = plain_model(checkpoint("llama-biases-tied"))
    assert bench.weight_bytes(tied) == sum(parameter.nbytes for parameter in tied.parameters() if parameter.dim() == 2)


def test_bandwidth_is_a_number_of_this_world():
    assert 1e9 < bench.read_bandwidth(64, 2) < 1e13


def test_prompts_are_equally_long_and_different():
    tokenizer = Tokenizer(train_tokenizer([bench.TEXT], 300))
    prompts = bench.prompts_of(tokenizer, 64)
    assert {len(prompt) for prompt in prompts} == {32} and len({tuple(prompt) for prompt in prompts}) == 64


def test_transformers_is_measured_on_the_same_folder(checkpoint):
    run = bench.transformers_generate(checkpoint("llama"), torch.float32)
    assert 0 < run([[1, 2, 3], [4, 5, 6]], 6) < 1


def test_one_token_has_no_rate():
    for measure in (bench.bench_decode, bench_speculation.bench_speculation):
        with pytest.raises(ValueError, match="two tokens at least"):
            measure("tiny", tokens=1)
    with pytest.raises(ValueError, match="12 prompts of each workload, not 13"):
        bench_speculation.bench_speculation("tiny", each=13)


# Speculation.


def test_cells_hold_gain_and_prediction_against_plain(monkeypatch):
    held = bench_speculation.Bench("tiny", torch.float32, tokens=24, repeats=2)
    cell = held.compare("prompt_lookup", PromptLookup(), 3, held.prompts(["code", "structured"], 1), 1, "x")
    assert len(cell.seconds) == 2 and cell.gain > 0 and 1 <= cell.tokens_per_pass <= 4
    assert cell.predicted == pytest.approx(cell.tokens_per_pass / (cell.draft_cost + cell.verify_cost)), "one row at a time"
    two = held.compare("prompt_lookup", PromptLookup(), 3, held.prompts(["code", "structured"], 1), 2)
    assert two.fewer_passes <= two.tokens_per_pass < 4
    assert all(0 <= share <= 1 for share in cell.acceptance)
    assert Cell("x", 3, 1, "", 2.0, [], [], draft_cost=0.0, verify_cost=1.0, fewer_passes=2.0).bound == "acceptance (4.0)"
    assert Cell("x", 3, 1, "", 3.9, [], [], draft_cost=2.0, verify_cost=1.0, fewer_passes=3.9).bound == "draft cost (3.9)"
    assert Cell("x", 3, 1, "", 3.9, [], [], draft_cost=0.1, verify_cost=3.0, fewer_passes=3.9).bound == "verify cost (3.5)"


def test_seconds_a_token_count_what_came_after_the_first():
    two = [Completion([1, 2, 3], None, "length", 1, 0.5, 0.1, 1.5), Completion([1, 2], None, "length", 1, 0.7, 0.1, 1.0)]
    assert bench_speculation.seconds(two) == (pytest.approx(0.8), 2)


def test_the_gain_of_a_scripted_model_is_what_its_times_say():
    """A pass takes 4 ms whatever its width, drafting nothing, and all drafts are kept: 4 tokens a pass are 4 times as fast."""

    def check():
        held = object.__new__(bench_speculation.Bench)
        held.model, held.tokenizer, held.tokens, held.repeats = ScriptedModel({0: 0}, 16, 256, decode=0.004), None, 61, 2
        held.verify_cost = lambda *_: 1.0
        cell = held.compare("lookup", PromptLookup(), 3, [[0] * 8], 1, "x")
        assert cell.tokens_per_pass == 4 and cell.gain == pytest.approx(4, rel=0.15) and cell.predicted == pytest.approx(4, rel=0.1)

    in_three_tries(check)


def test_the_whole_bench_of_speculation(capsys):
    few = {"lengths": [2, 9], "batches": [2], "tokens": 8, "repeats": 1, "each": 1}
    cells = bench_speculation.bench_speculation("tiny", None, **few)
    assert len(cells) == 8 * 7 + 7 * 2 + 1  # by workload and batch; 9 is more than Medusa's heads can
    out = capsys.readouterr().out
    assert "by workload: tiny" in out and "assisted generation" in out


def test_the_whole_bench_of_slices(capsys):
    found = bench_tensor.bench_tensor("tiny", batches=(1,), tokens=4, prompt=40, repeats=1, dtype=torch.float32)
    assert list(found) == ["decode, batch 1", "prompt of 40"]
    for turns in found.values():
        assert len(turns) == 6 and all(len(taken) == 1 and taken[0] > 0 for taken in turns.values())
    out = capsys.readouterr().out
    assert "transformers, 2 ranks over gloo" in out and "1 all_gather, 17 all_reduce, 1 broadcast" in out
    assert "0.500 + 0.500" in out  # of the weights of a model that divides evenly, but for its norms


def test_the_whole_bench_of_collectives(capsys):
    found = bench_tensor.bench_collectives(ranks=(2,), sizes=(64, 4096), repeats=1)
    assert len(found) == 6 * 2 and all(ours > 0 and gloo > 0 for ours, gloo in found.values())
    assert "reduce_scatter" in capsys.readouterr().out


def test_the_whole_bench_of_stages(capsys):
    few = {"rows": (3,), "groups": (1, 2, 8), "tokens": 4, "prompt": 24, "repeats": 1, "dtype": torch.float32}
    found = bench_pipeline.bench_pipeline("tiny", **few)
    assert list(found) == [(3, 1), (3, 2)]  # no more groups than rows
    assert all(len(taken) == 1 for turns in found.values() for taken in turns.values())
    out = capsys.readouterr().out
    assert (
        f"payload of a boundary, 24 tokens: {24 * 256 * 4:,} bytes" in out and "0.333" in out and "0.200" in out and "0.111" in out
    )


def test_the_whole_bench_of_replicas(capsys):
    found = bench_pipeline.bench_data("tiny", batches=(2,), tokens=4, repeats=1, dtype=torch.float32)
    assert list(found) == [("1 rank", 2), ("2 replicas", 2), ("2 ranks, weights at rest", 2)]
    assert "weights at rest" in capsys.readouterr().out


def test_idle_time_is_what_nobody_works_in():
    """Two ranks over 10 s: one computes for 6 and then ends, the other waits for 2 and computes for 8."""
    receive = trace.Event("recv", (0, 1), 8, 0.0, 0.0, 2.0, peer=0)
    send = trace.Event("isend", (0, 1), 8, 2.0, 2.0, 2.0, peer=1)
    records = [trace.Record(0, 0.0, 6.0, [send]), trace.Record(1, 0.0, 10.0, [receive])]
    assert bench_pipeline.idle_share(records) == pytest.approx(1 - (6 + 8) / 20)
