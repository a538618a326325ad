"""The tour: its verdicts, its numbers, its exit code."""

from __future__ import annotations

import dataclasses
import io

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

import minifer
from minifer import cli, stops, tour, verdict
from minifer.batch import Completion


@pytest.fixture(scope="module")
def seen():
    """One short tour: (results, what it printed)."""
    paper = io.StringIO()
    results = tour.tour("tiny", tokens=24, per_workload=1, repeats=1, console=Console(file=paper, width=80))
    return results, paper.getvalue()


def test_every_technique_is_exact_and_measured(seen):
    results, _ = seen
    assert [result.name for result in results] == [stop.name for stop in stops.stops_for("tiny")]
    for result in results:
        assert result.exact and result.difference == "" and result.tokens_per_second > 0
        speculates = result.name.startswith(("speculation", "multi-token")) or "×" in result.name
        assert result.tokens_per_pass > 1.05 if speculates else result.tokens_per_pass == pytest.approx(1.0), result.name
    by_name = {result.name: result for result in results}
    plain, replicas = results[0], by_name["data parallelism"]
    assert (plain.collectives, plain.payload_bytes, plain.ratio) == (0, 0, 1)
    assert replicas.collectives == pytest.approx(2 / 144) and replicas.payload_bytes > 0  # two gathers, 6 prompts of 24 tokens
    # A layer a pass and its word, 8 layers and 24 passes a rank, two gathers at the end; and a vector forth, an id back.
    assert by_name["weights at rest"].payload_bytes > 24 * 8 * 688_640 * 4 / 144
    naive, flying = by_name["pipeline, 1 micro-batch"], by_name["pipeline, 4 micro-batches"]
    assert naive.payload_bytes == flying.payload_bytes and flying.collectives == pytest.approx(4 * naive.collectives)


def test_the_table_fits_a_terminal(seen):
    text = seen[1]
    table = text[text.index("every technique") : text.index("tokens/pass:")]
    assert "…" not in table and all(len(line) <= 80 for line in table.splitlines())
    assert "autoregressive decode" in text and text.count("yes") == len(stops.stops_for("tiny")) and "def moving_average" in text


def test_margins_are_those_of_the_kept_tokens():
    """Plain decoding and speculation, watched, tell of each token of each prompt how sure the target was of it."""
    model, tokenizer = minifer.load("tiny", torch.float32)
    prompts = [tokenizer.encode(text) for text in ("class Stack:", "import os", "def f(x):\n    return x")]
    plain = stops.plain(model, prompts, 20, True)
    for kind in ("prompt_lookup", "draft_model", "medusa"):
        for technique in (stops.speculative(kind), stops.one_at_a_time(stops.speculative(kind))):
            seen = technique(model, prompts, 20, True)
            assert seen.row_passes < plain.row_passes == 60
            for number in range(3):
                assert seen.margins[number] == pytest.approx(plain.margins[number], abs=1e-3)


def test_one_at_a_time_adds_up_its_times():
    taken = iter((1.0, 2.0, 4.0))

    def slow(model, prompts, tokens, watched):
        assert len(prompts) == 1
        return verdict.Run([dataclasses.replace(completion(1), seconds=next(taken))], 1, {0: [9.0]})

    run = stops.one_at_a_time(slow)(None, [[1], [2], [3]], 1, True)
    assert run.seconds == 7.0 and run.row_passes == 3 and run.margins == {0: [9.0], 1: [9.0], 2: [9.0]}


def completion(*ids: int) -> Completion:
    return Completion(list(ids), None, "length", 3, 0.1, 0.1, 1.0)


def run(*texts: tuple[int, ...], margin: float = 9.0) -> verdict.Run:
    margins = {number: [margin] * len(ids) for number, ids in enumerate(texts)}
    return verdict.Run([completion(*ids) for ids in texts], 4, margins)


GOOD = ((1, 2), (3, 4))
WRONG = ((1, 2), (3, 5))
TWO_WRONG = ((8, 2), (3, 5))


@pytest.mark.parametrize(
    ("other", "margins", "dtype", "exact", "told"),
    [
        (GOOD, (9.0, 9.0), torch.float32, True, ""),
        (WRONG, (9.0, 9.0), torch.float32, False, "DIFFERS: first at prompt 1, token 1: plain 4 (margin 9.0000), here 5"),
        (WRONG, (0.1, 0.1), torch.float32, False, "DIFFERS"),  # float32 forgives nothing
        (WRONG, (0.1, 0.2), torch.bfloat16, True, "a tie within 0.25: first at prompt 1, token 1"),
        (WRONG, (0.1, 0.3), torch.bfloat16, False, "DIFFERS"),  # one of the two was sure
        (WRONG, (0.3, 0.1), torch.bfloat16, False, "DIFFERS"),
        (((1, 2), (3,)), (9.0, 9.0), torch.float32, False, "plain 4 (margin 9.0000), here None"),
    ],
)
def test_verdicts(other, margins, dtype, exact, told):
    plain, technique = run(*GOOD, margin=margins[0]), run(*other, margin=margins[1])
    result = verdict.judge("x", [technique], [[technique]], [plain], [[plain]], dtype)
    assert result.exact is exact and told in result.difference
    # A difference in a run that was only timed counts as well.
    result = verdict.judge("x", [run(*GOOD, margin=margins[1])], [[technique]], [plain], [[plain]], dtype)
    assert result.exact is exact and told[:4] in result.difference


def test_the_difference_that_fails_is_the_one_that_is_told():
    plain, technique = run(*GOOD), run(*TWO_WRONG)
    plain.margins, technique.margins = {0: [0.1, 0.1], 1: [0.1, 5.0]}, {0: [0.1, 0.1], 1: [0.1, 6.0]}
    result = verdict.judge("x", [technique], [[technique]], [plain], [[plain]], torch.bfloat16)
    assert not result.exact and "DIFFERS: first at prompt 1, token 1: plain 4 (margin 5.0000)" in result.difference


def test_perf_04_rates_of_replicas_add_up_and_those_of_one_model_do_not():
    """Two replicas with 10 tokens each in a second are 20 tokens/s; two ranks of one model that both tell its 10 are 10."""
    ten, one_second = tuple(range(10)), lambda *texts: verdict.Run([completion(*ids) for ids in texts])
    plain = [one_second(ten, ten)]
    gathered = verdict.judge("dp", [one_second(ten, ten)] * 2, [[one_second(ten, ten)] * 2], plain, [plain], torch.float32)
    assert gathered.tokens_per_second == 20
    plain = [one_second(ten)]
    shared = verdict.judge("tp", [one_second(ten)] * 2, [[one_second(ten)] * 2], plain, [plain], torch.float32)
    assert shared.tokens_per_second == 10
    late = completion(*ten)
    slow = verdict.Run([completion(*ten), dataclasses.replace(late, seconds=2.0)])
    assert slow.seconds == 2.0  # the slowest, not the first or the sum


def spoilt(model, prompts, tokens, watched):
    """Data parallelism that gets one token of one prompt wrong on rank 1."""
    given = stops.replicas(model, prompts, tokens, watched)
    if dist.get_rank() == 1:
        given.completions[-1].ids[-1] += 1
    return given


def test_a_technique_that_differs_fails_the_command(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(stops, "STOPS", (stops.STOPS[0], stops.Stop("spoilt", 2, spoilt)))
    picture = tmp_path / "tour.png"
    assert cli.main(["tour", "--tokens", "4", "--prompts", "1", "--repeats", "1", "--picture", str(picture)]) == 1
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.with_stem("tour-dark").is_file()
    out = capsys.readouterr().out
    assert "NO" in out and "DIFFERS: first at prompt 5, token 3" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "2048"], "2048 new tokens leave no room for a prompt in a context of 2048"),
        (["--picture", "no/such/folder/x.png"], "no place for a picture"),
        (["--picture", "."], "no picture that can be written"),
        (["--picture", "x.txt"], "no picture that can be written"),
        (["--prompts", "13"], "12 prompts of each workload, not 13"),
    ],
)
def test_mistakes_are_found_before_anything_runs(arguments, message, capsys):
    assert cli.main(["tour", *arguments]) == 2
    out, err = capsys.readouterr()
    assert message in err and out == ""
