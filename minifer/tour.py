"""`minifer tour`: real prompts, decoded by every technique there is, and held against plain decoding.

A technique is a function that every rank of a world runs. Plain decoding is one too, on a world of one rank. Their runs
alternate, so that whatever else the machine does hits all of them alike.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from . import data_parallel, decode, viz
from .batch import Completion
from .model.load import load
from .model.passes import Pass
from .model.transformer import Transformer
from .prompts import WORKLOADS, workload
from .ranks import Ranks, trace

LARGEST_TIE = 0.25  # logits: bfloat16 resolves no better around the values that logits have


@dataclass
class Run:
    """One run of a technique, as one rank saw it.

    row_passes: over all passes, how many rows were in them. margins: {prompt: [gap between the two largest logits, a token]}.
    """

    completions: list[Completion]
    seconds: float = 0.0
    row_passes: int = 0
    margins: dict[int, list[float]] = field(default_factory=dict)
    record: trace.Record | None = None


Technique = Callable[[Transformer, list[list[int]], int], Run]


@dataclass(frozen=True)
class Stop:
    """A stop of the tour: how a technique is called, on how many ranks, what each rank runs, and where to read about it."""

    name: str
    ranks: int
    technique: Technique
    module: str = ""
    lesson: str = ""


def plain(model: Transformer, prompts: list[list[int]], tokens: int) -> Run:
    """decode.generate, watched."""
    run = Run([])
    run.completions = watched_generate(model, prompts, tokens, run, range(len(prompts)))
    run.seconds = max((completion.seconds for completion in run.completions), default=0.0)
    return run


def replicas(model: Transformer, prompts: list[list[int]], tokens: int) -> Run:
    """data_parallel.generate, each replica watched."""
    group, run = dist.group.WORLD, Run([])
    assert group is not None
    mine = data_parallel.deal(range(len(prompts)), group.size(), group.rank())

    def serve(model: Transformer, share: list[list[int]]) -> list[Completion]:
        return watched_generate(model, share, tokens, run, mine)

    run.completions = data_parallel.generate(model, prompts, group, serve)
    # The slowest rank's time is the time of the run.
    run.seconds = max((completion.seconds for completion in run.completions), default=0.0)
    return run


STOPS = (
    Stop("autoregressive decode", 1, plain, "decode", "01_autoregressive_decode"),
    Stop("data parallelism", 2, replicas, "data_parallel", "05_data_parallelism"),
)


def watched_generate(
    model: Transformer, prompts: Sequence[Sequence[int]], tokens: int, run: Run, numbers: Sequence[int]
) -> list[Completion]:
    """decode.generate that counts passes and keeps margins. numbers: of these prompts in the whole tour."""
    batch = decode.start(model, prompts, tokens)
    loop = _watched(decode.steps(batch), run, numbers)
    return decode.run(model, loop, decode.new_cache(model, batch))


def _watched(loop: decode.Steps, run: Run, numbers: Sequence[int]) -> decode.Steps:
    """The same loop, seen by who stands beside it."""
    output: Any = None
    while True:
        try:
            pass_: Pass = loop.send(output)
        except StopIteration as end:
            return end.value
        run.row_passes += len(pass_.spans)
        output = yield pass_
        best = output.logits.topk(2).values
        for span, (first, second) in zip(pass_.spans, best.tolist()):
            run.margins.setdefault(numbers[span.row], []).append(first - second)


@dataclass(frozen=True)
class Result:
    """A line of the table. tokens_per_pass: a row. Rates and payload are per generated token, over all ranks."""

    name: str
    ranks: int
    exact: bool
    tokens_per_pass: float
    collectives: float
    payload_bytes: float
    tokens_per_second: float
    ratio: float
    difference: str = ""


def tour(
    name: str = "tiny",
    dtype: torch.dtype = torch.float32,
    tokens: int = 32,
    per_workload: int = 2,
    repeats: int = 3,
    picture: Path | None = None,
    console: Console | None = None,
) -> list[Result]:
    """Run every stop on the model of this name and print a table. A result's `exact` says whether the technique passed.

    dtype: float32 must give the same ids. In bfloat16 a first difference is forgiven where one of the runs was as good as
    undecided (LARGEST_TIE). repeats: how often each stop is run; the table's speeds are medians.
    picture: a file for the timelines of all ranks (.png, .svg, .pdf), and one beside it on a dark ground.
    """
    console = console or Console()
    model, tokenizer = load(name, dtype)
    prompts = [ids for kind in WORKLOADS for ids in workload(kind).ids(tokenizer)[:per_workload]]
    room = model.config.context - tokens
    prompts = [ids[-room:] for ids in prompts]
    sizes = sorted(map(len, prompts))
    shown = f"{name}, {str(dtype).removeprefix('torch.')}, {len(prompts)} prompts of {sizes[0]}–{sizes[-1]} tokens"
    console.print(f"[bold]minifer tour[/]: {shown}, {tokens} new tokens each, greedy")
    runs: dict[str, list[list[Run]]] = {stop.name: [] for stop in STOPS}
    with console.status("starting ranks"):
        worlds = {stop.name: Ranks(stop.ranks) for stop in STOPS}
    try:
        for stop in STOPS:
            with console.status(f"{stop.name}: loading the model on {stop.ranks} rank(s)"):
                worlds[stop.name].run(_settle, name, dtype, prompts, stop.technique)
        for repeat in range(repeats):
            for stop in STOPS:
                with console.status(f"{stop.name}: run {repeat + 1} of {repeats}"):
                    runs[stop.name].append(worlds[stop.name].run(_visit, prompts, tokens, stop.technique))
    finally:
        for world in worlds.values():
            world.close()
    results = [_judge(stop, runs[stop.name], runs[STOPS[0].name], dtype) for stop in STOPS]
    console.print(_table(results))
    console.print(
        "[dim]tokens/pass: a row's. calls: of collectives, a rank's. bytes: payload, all ranks'. × plain: of paired runs.[/]"
    )
    for result in results:
        if result.difference:
            console.print(f"{result.name}: {result.difference}")
    if picture is not None:
        panels = [_title(result, runs[result.name][0]) for result in results]
        for dark, file in ((False, picture), (True, picture.with_stem(picture.stem + "-dark"))):
            viz.timelines(panels, dark).savefig(file)
        console.print(f"[dim]what each rank did: {picture}[/]")
    _show_one(console, tokenizer.decode(prompts[0]), tokenizer.decode(runs[STOPS[0].name][0][0].completions[0].ids))
    return results


_held: dict[str, Transformer] = {}  # in a rank: the model that _settle loaded, for _visit


def _settle(name: str, dtype: torch.dtype, prompts: list[list[int]], technique: Technique) -> None:
    """On a rank: load the model once, and warm up."""
    _held["model"], _ = load(name, dtype)
    technique(_held["model"], prompts, 2)


def _visit(prompts: list[list[int]], tokens: int, technique: Technique) -> Run:
    """On a rank: one run."""
    if dist.get_world_size() > 1:
        dist.barrier()
    with trace.record() as record:
        run = technique(_held["model"], prompts, tokens)
    run.record = record
    return run


def _judge(stop: Stop, runs: list[list[Run]], plain_runs: list[list[Run]], dtype: torch.dtype) -> Result:
    reference = plain_runs[0][0]
    differences = [
        difference
        for run in runs
        for rank, one in enumerate(run)
        for difference in _differences(reference, one, _margins(run), rank)
    ]
    forgiven = dtype != torch.float32
    bad = [d for d in differences if not (forgiven and min(d.margins) <= LARGEST_TIE)]
    first = runs[0]
    tokens = sum(len(completion.ids) for completion in first[0].completions)
    calls = sum(len(one.record.events) for one in first if one.record) / len(first)
    sent = sum(one.record.bytes for one in first if one.record)
    speed = statistics.median(tokens / run[0].seconds for run in runs)
    # Runs alternate: each is held against the plain one beside it.
    ratio = statistics.median(other[0].seconds / run[0].seconds for run, other in zip(runs, plain_runs))
    return Result(
        name=stop.name,
        ranks=stop.ranks,
        exact=not bad,
        tokens_per_pass=tokens / max(1, sum(one.row_passes for one in first)),
        collectives=calls / tokens,
        payload_bytes=sent / tokens,
        tokens_per_second=speed,
        ratio=ratio,
        difference=differences[0].text(bool(bad)) if differences else "",
    )


@dataclass(frozen=True)
class Difference:
    """The first place where a prompt's ids differ from plain decoding's. margins: plain's and the technique's, in logits."""

    prompt: int
    position: int
    ids: tuple[int | None, int | None]
    margins: tuple[float, float]

    def text(self, failed: bool) -> str:
        verdict = "DIFFERS" if failed else f"a tie within {LARGEST_TIE}"
        return (
            f"{verdict}: first at prompt {self.prompt}, token {self.position}: plain {self.ids[0]} (margin {self.margins[0]:.4f}), "
            f"here {self.ids[1]} (margin {self.margins[1]:.4f})"
        )


def _differences(reference: Run, run: Run, margins: dict[int, list[float]], rank: int) -> Iterator[Difference]:
    for number, (plain_one, one) in enumerate(zip(reference.completions, run.completions, strict=True)):
        if plain_one.ids == one.ids:
            continue
        pairs = list(zip(plain_one.ids, one.ids))
        at = next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))
        ids = (dict(enumerate(plain_one.ids)).get(at), dict(enumerate(one.ids)).get(at))
        gaps = [dict(enumerate(held.get(number, []))).get(at, math.inf) for held in (reference.margins, margins)]
        yield Difference(number, at, ids, (gaps[0], gaps[1]))


def _margins(run: list[Run]) -> dict[int, list[float]]:
    """Of all ranks together: each prompt was served by one of them."""
    return {number: margins for one in run for number, margins in one.margins.items()}


def _table(results: list[Result]) -> Table:
    table = Table(title="every technique against plain decoding")
    table.add_column("technique", no_wrap=True)
    table.add_column("same ids", no_wrap=True)
    for column in ("ranks", "tokens\n/pass", "calls\n/token", "bytes\n/token", "tokens\n/s", "×\nplain"):
        table.add_column(column, justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            result.name,
            "[green]yes[/]" if result.exact else "[red]NO[/]",
            str(result.ranks),
            f"{result.tokens_per_pass:.2f}",
            f"{result.collectives:.2f}",
            f"{result.payload_bytes:,.0f}",
            f"{result.tokens_per_second:,.0f}",
            f"{result.ratio:.2f}",
        )
    return table


def _title(result: Result, run: list[Run]) -> tuple[str, list[trace.Record]]:
    ranks = "1 rank" if result.ranks == 1 else f"{result.ranks} ranks"
    title = f"{result.name}, {ranks}: {result.tokens_per_second:,.0f} tokens/s"
    return title, [one.record for one in run if one.record is not None]


def _show_one(console: Console, prompt: str, answer: str) -> None:
    """The first prompt and what the model made of it, so that a reader sees that this is text."""
    console.print("[dim]the first prompt, and what follows:[/]")
    console.print(prompt, end="", style="dim", markup=False, highlight=False)
    console.print(answer, markup=False, highlight=False)
