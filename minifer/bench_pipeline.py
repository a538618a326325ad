"""`minifer bench pipeline` and `minifer bench data`: what stages, replicas and weights at rest gain here, and what they cost.

A pipeline's gain depends on what it is held against. Several groups of rows in flight are faster than the same groups in turn on
one rank; but one rank could also run all their rows as one batch, and where decoding is bound by reading weights that costs it
little. Both are measured, for few and for many rows, so that one sees where it turns.

Contestants are worlds that stay up and take turns. A gain is the median over turns of one rank's seconds by the contestant's.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from . import data_parallel, decode, pipeline_parallel, trace
from .batch import Completion, Request
from .bench import prompts_of
from .bench_speculation import seconds
from .model.load import find, load
from .model.passes import Pass, Span
from .pipeline_schedules import all_forward, execute, simulate
from .pipeline_schedules import idle_share as ideal_share
from .ranks.launch import Ranks

Turns = dict[str, list[float]]  # {contestant: what it measured in each turn}
_held: dict[str, Any] = {}  # in a rank: models, and the tokenizer


def hold(name: str, dtype: torch.dtype | None, how: str) -> tuple[int, int]:
    """On a rank: load a model cut in one way, and keep it under that name. (Layers, resident bytes.)"""
    group = dist.group.WORLD
    assert group is not None
    shard = {
        "stages": partial(pipeline_parallel.shard, group=group),
        "even": partial(pipeline_parallel.shard, group=group, split="even"),
        "interleaved": partial(pipeline_parallel.shard, group=group, split="even", chunks=2),
        "at rest": partial(data_parallel.shard_weights, group=group),
        "whole": None,
    }[how]
    _held[how], _held["tokenizer"] = load(name, dtype, "cpu", shard)
    return len(_held[how].layers), data_parallel.resident_bytes(_held[how])


def step_seconds(completions: Sequence[Completion]) -> float:
    """Of a decode step of all rows: from the last row's first token to the end."""
    span, tokens = seconds(completions)
    return span / tokens


def decode_step(how: str, rows: int, micro_batches: int, tokens: int) -> float:
    """On a rank: seconds a step of all rows, in so many groups."""
    requests = [Request(ids, tokens, stop_ids=()) for ids in prompts_of(_held["tokenizer"], rows)]
    return step_seconds(pipeline_parallel.generate(_held[how], requests, micro_batches))


def prefill(how: str, micro_batches: int, tokens: int) -> trace.Record:
    """On a rank: equal prompts through the stages, recorded."""
    model, group = _held[how], dist.group.WORLD
    assert group is not None
    ids = torch.arange(1, tokens + 1)
    passes = [Pass(ids, (Span(0, 0, tokens),), (tokens - 1,)) for _ in range(micro_batches)]
    caches = [model.new_cache(1, tokens) for _ in passes]
    schedule = all_forward(group.size(), micro_batches, len(model.chunks))
    dist.barrier()
    with torch.inference_mode(), trace.record() as record:
        execute(model, schedule, passes, caches)
    return record


def idle_share(records: Sequence[trace.Record]) -> float:
    """Of all ranks' time between the first start and the last end, the share in which they wait or have nothing left to do."""
    first, last = min(record.start for record in records), max(record.end for record in records)
    busy = sum(stretch.seconds for line in trace.timeline(records) for stretch in line if stretch.what != "waiting")
    return 1 - busy / (len(records) * (last - first))


def bench_pipeline(
    name: str = "smollm2",
    stages: int = 2,
    rows: Sequence[int] = (8, 32, 128),
    groups: Sequence[int] = (1, 2, 4, 8),
    tokens: int = 32,
    prompt: int = 256,
    repeats: int = 3,
    dtype: torch.dtype | None = None,
    console: Console | None = None,
) -> dict[tuple[int, int], Turns]:
    """Print tables: decoding in groups, and idle time while prompts pass. {(rows, groups): seconds a step of each contestant}."""
    console = console or Console()
    console.width = max(140, console.width)
    find(name)
    with Ranks(1, cuda=False, threads=1) as one, Ranks(stages, cuda=False, threads=1) as some:
        one.run(hold, name, dtype, "stages")
        split = [layers for layers, _ in some.run(hold, name, dtype, "stages")]
        found = _decoding(one, some, rows, groups, tokens, repeats, console)
        console.print(
            _groups_table(found, f"{name}, {stages} stages of {split} layers, one thread each, medians of {repeats} turns")
        )
        for how in ("even", "interleaved"):
            some.run(hold, name, dtype, how)
        console.print(_idle_table(some, groups, prompt, repeats))
        payload = some.run(prefill, "even", 1, prompt)[0].bytes
    console.print(f"payload of a boundary, {prompt} tokens: {payload:,} bytes")
    return found


def _decoding(
    one: Ranks, some: Ranks, rows: Sequence[int], groups: Sequence[int], tokens: int, repeats: int, console: Console
) -> dict[tuple[int, int], Turns]:
    """Seconds a step of all rows: over stages, on one rank in as many groups in turn, and on one rank at once."""
    found: dict[tuple[int, int], Turns] = {}
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("decoding", total=len(rows) * len(groups) * (repeats + 1))
        for count in rows:
            cells: dict[int, Turns] = {m: {"stages": [], "in turn": [], "at once": []} for m in groups if m <= count}
            for turn in range(repeats + 1):
                whole = max(one.run(decode_step, "stages", count, 1, tokens))
                for m, turns in cells.items():
                    progress.update(bar, description=f"{count} rows in {m} groups", advance=1)
                    in_turn = whole if m == 1 else max(one.run(decode_step, "stages", count, m, tokens))
                    piped = max(some.run(decode_step, "stages", count, m, tokens))
                    if turn:  # the first is for what only a first run costs
                        for title, taken in (("stages", piped), ("in turn", in_turn), ("at once", whole)):
                            turns[title].append(taken)
            found |= {(count, m): turns for m, turns in cells.items()}
    return found


def _idle_table(some: Ranks, groups: Sequence[int], prompt: int, repeats: int) -> Table:
    columns = ("prompts in flight", "ideal", "measured", "2 chunks a stage: ideal", "measured")
    table = _table(f"idle share, prompts of {prompt} tokens", *columns)
    for m in groups:
        cells = []
        for chunks, how in ((1, "even"), (2, "interleaved")):
            measured = statistics.median(idle_share(some.run(prefill, how, m, prompt)) for _ in range(repeats + 2))
            ideal = ideal_share(simulate(all_forward(some.ranks, m, chunks), lambda *_: 1.0))
            cells += [f"{ideal:.3f}", f"{measured:.3f}"]
        table.add_row(str(m), *cells)
    return table


def _groups_table(found: dict[tuple[int, int], Turns], title: str) -> Table:
    table = _table(title, "rows", "groups", "stages, tokens/s", "one rank, in turn", "× in turn", "one rank, at once", "× at once")
    for (rows, m), turns in found.items():
        speeds = [f"{rows / statistics.median(turns[one]):,.0f}" for one in ("stages", "in turn", "at once")]
        gains = [
            f"{statistics.median(b / a for a, b in zip(turns['stages'], turns[other])):.2f}" for other in ("in turn", "at once")
        ]
        table.add_row(str(rows), str(m), speeds[0], speeds[1], gains[0], speeds[2], gains[1])
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def replica_step(how: str, rows: int, tokens: int) -> float:
    """On a rank: seconds a step of its own rows, while the others decode theirs."""
    requests = [Request(ids, tokens, stop_ids=()) for ids in prompts_of(_held["tokenizer"], rows)]
    dist.barrier()
    return step_seconds(decode.generate(_held[how], requests))


def step_payload(how: str) -> int:
    """On a rank: payload of a decode step of one row."""
    model = _held[how]
    with torch.inference_mode():
        cache = model.new_cache(1, 8)
        model(Pass(torch.tensor([1]), (Span(0, 0, 1),), (0,)), cache)
        with trace.record() as record:
            model(Pass(torch.tensor([2]), (Span(0, 1, 1),), (0,)), cache)
    return record.bytes


def bench_data(
    name: str = "smollm2",
    ranks: int = 2,
    batches: Sequence[int] = (1, 8, 32),
    tokens: int = 32,
    repeats: int = 5,
    dtype: torch.dtype | None = None,
    console: Console | None = None,
) -> dict[tuple[str, int], list[float]]:
    """Replicas and weights at rest, with as many rows a rank as one rank alone has. Print a table.

    Returns {(contestant, rows a rank): tokens a second of all ranks, of each turn}.
    """
    console = console or Console()
    console.width = max(140, console.width)
    find(name)
    ways = {"1 rank": (1, "whole"), f"{ranks} replicas": (ranks, "whole"), f"{ranks} ranks, weights at rest": (ranks, "at rest")}
    found: dict[tuple[str, int], list[float]] = {(title, rows): [] for title in ways for rows in batches}
    with (
        Ranks(1, cuda=False, threads=1) as alone,
        Ranks(ranks, cuda=False, threads=1) as together,
        Progress(console=console, transient=True) as progress,
    ):
        worlds = {1: alone, ranks: together} if ranks > 1 else {1: alone}
        kept = {title: worlds[count].run(hold, name, dtype, how) for title, (count, how) in ways.items()}
        payload = {title: worlds[count].run(step_payload, how)[0] for title, (count, how) in ways.items()}
        bar = progress.add_task("measuring", total=len(batches) * (repeats + 1))
        for rows in batches:
            for turn in range(repeats + 1):
                progress.update(bar, description=f"{rows} rows a rank", advance=1)
                for title, (count, how) in ways.items():
                    taken = max(worlds[count].run(replica_step, how, rows, tokens))
                    if turn:
                        found[title, rows].append(count * rows / taken)
    table = _table(
        f"{name}, one thread a rank, medians of {repeats} turns",
        "",
        *(f"{rows} rows a rank:\ntokens/s, ×" for rows in batches),
        "weights kept\na rank, MB",
        "payload of a\nstep, bytes",
    )
    for title in ways:
        cells = []
        for rows in batches:
            mine, base = found[title, rows], found["1 rank", rows]
            cells.append(f"{statistics.median(mine):,.0f}  {statistics.median(a / b for a, b in zip(mine, base)):.2f}")
        weights = " + ".join(f"{size / 1e6:.0f}" for _, size in kept[title])
        table.add_row(title, *cells, weights, f"{payload[title]:,}")
    console.print(table)
    return found
