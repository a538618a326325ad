"""`minifer tour`: real prompts, decoded by every technique there is, and held against plain decoding.

A technique is a function that every rank of a world runs. Plain decoding is one too, on a world of one rank. Each is
watched once (passes, collectives, margins between logits), then timed several times without anything in its way; these runs
alternate, so that whatever else the machine does hits all of them alike.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from . import data_parallel, decode, viz
from .batch import Completion
from .model.load import load, look_up
from .model.passes import Pass
from .model.tokenizer import Tokenizer
from .model.transformer import Transformer
from .prompts import WORKLOADS, workload
from .ranks import Ranks, trace
from .ranks.launch import a_gpu_each, cores
from .verdict import Result, Run, judge

Technique = Callable[[Transformer, list[list[int]], int, bool], Run]  # (model, prompts, new tokens, watched?)


@dataclass(frozen=True)
class Stop:
    """A stop of the tour: how a technique is called, on how many ranks, what each rank runs, and where to read about it."""

    name: str
    ranks: int
    technique: Technique
    module: str = ""
    lesson: str = ""


def plain(model: Transformer, prompts: list[list[int]], tokens: int, watched: bool) -> Run:
    """decode.generate"""
    run = Run([])
    run.completions = _generate(model, prompts, tokens, run if watched else None, range(len(prompts)))
    return run


def replicas(model: Transformer, prompts: list[list[int]], tokens: int, watched: bool) -> Run:
    """data_parallel.generate over all ranks"""
    group, run = dist.group.WORLD, Run([])
    assert group is not None
    mine = data_parallel.deal(range(len(prompts)), group.size(), group.rank())

    def serve(model: Transformer, share: list[list[int]], max_new_tokens: int) -> list[Completion]:
        return _generate(model, share, max_new_tokens, run if watched else None, mine)

    run.completions = data_parallel.generate(model, prompts, group, serve, max_new_tokens=tokens)
    return run


STOPS = (
    Stop("autoregressive decode", 1, plain, "decode", "01_autoregressive_decode"),
    Stop("data parallelism", 2, replicas, "data_parallel", "05_data_parallelism"),
)


def _generate(
    model: Transformer, prompts: Sequence[Sequence[int]], tokens: int, run: Run | None, numbers: Sequence[int]
) -> list[Completion]:
    """decode.generate; where a run is given, it is told of passes and margins. numbers: of these prompts in the whole tour."""
    if run is None:
        return decode.generate(model, prompts, tokens)
    batch = decode.start(model, prompts, tokens)
    return decode.run(model, _watch(decode.steps(batch), run, numbers), decode.new_cache(model, batch))


def _watch(loop: decode.Steps, run: Run, numbers: Sequence[int]) -> decode.Steps:
    """The same loop, seen by who stands beside it."""
    output: Any = None
    while True:
        try:
            pass_: Pass = loop.send(output)
        except StopIteration as end:
            return end.value
        run.row_passes += len(pass_.spans)
        output = yield pass_
        for span, (first, second) in zip(pass_.spans, output.logits.topk(2).values.tolist()):
            run.margins.setdefault(numbers[span.row], []).append(first - second)


def tour(
    name: str = "tiny",
    dtype: torch.dtype = torch.float32,
    tokens: int = 32,
    per_workload: int = 2,
    repeats: int = 3,
    picture: Path | None = None,
    threads: int | None = None,
    console: Console | None = None,
) -> list[Result]:
    """Run every stop on the model of this name and print a table. A result's `exact` says whether the technique passed.

    dtype: float32 must give the same ids; bfloat16 may differ at ties (see verdict.judge). repeats: how often each stop is
    timed; speeds are medians. picture: a file for the timelines of all ranks (.png, .svg, .pdf), and one on a dark ground
    beside it. threads: of each rank; by default its share of the cores.
    """
    console = console or Console()
    config, tokenizer = look_up(name)
    if tokens >= config.context:
        raise ValueError(f"{tokens} new tokens leave no room for a prompt in a context of {config.context}")
    if not 1 <= per_workload <= 12:
        raise ValueError(f"there are 12 prompts of each workload, not {per_workload}")
    _check_picture(picture)
    prompts = [ids for kind in WORKLOADS for ids in workload(kind).ids(tokenizer)[:per_workload]]
    prompts = [ids[tokens - config.context :] for ids in prompts]
    sizes = sorted(map(len, prompts))
    shown = f"{name}, {str(dtype).removeprefix('torch.')}, {len(prompts)} prompts of {sizes[0]}–{sizes[-1]} tokens"
    console.print(f"[bold]minifer tour[/]: {shown}, {tokens} new tokens each, greedy", soft_wrap=True)
    if hasattr(os, "getloadavg") and os.getloadavg()[0] > 0.75 * cores():
        load = f"load {os.getloadavg()[0]:.1f} on {cores()} cores"
        console.print(f"[yellow]other programs are busy ({load}): speeds below are not this machine's own[/]", soft_wrap=True)
    watched, timed = _run_all(name, dtype, prompts, tokens, repeats, threads, console)
    first = STOPS[0].name
    results = [judge(s.name, watched[s.name], timed[s.name], watched[first], timed[first], dtype) for s in STOPS]
    _show(results, console)
    if picture is not None:
        panels = [(_title(result), [run.record for run in watched[result.name]]) for result in results]
        for dark, file in ((False, picture), (True, picture.with_stem(picture.stem + "-dark"))):
            viz.timelines(panels, dark).savefig(file)
            console.print(f"[dim]what each rank did: {file}[/]", soft_wrap=True)
    _show_one(console, tokenizer, prompts[0], watched[first][0].completions[0].ids)
    return results


Runs = dict[str, list[Run]]  # {stop: a Run a rank}


def _run_all(
    name: str, dtype: torch.dtype, prompts: list[list[int]], tokens: int, repeats: int, threads: int | None, console: Console
) -> tuple[Runs, dict[str, list[list[Run]]]]:
    """Every stop on a world of its own: watched once, then timed `repeats` times in turn."""
    # All on the same kind of device: a GPU each where there are enough for the largest world.
    cuda = a_gpu_each(max(stop.ranks for stop in STOPS))
    worlds: dict[str, Ranks] = {}
    watched: Runs = {}
    timed: dict[str, list[list[Run]]] = {stop.name: [] for stop in STOPS}
    try:
        for stop in STOPS:
            with console.status(f"{stop.name}: the model on {stop.ranks} rank(s)"):
                worlds[stop.name] = Ranks(stop.ranks, cuda=cuda, threads=threads)
                worlds[stop.name].run(_settle, name, dtype)
                watched[stop.name] = worlds[stop.name].run(_visit, prompts, tokens, stop.technique, True)
        for repeat in range(repeats):
            for stop in STOPS:
                with console.status(f"{stop.name}: run {repeat + 1} of {repeats}"):
                    timed[stop.name].append(worlds[stop.name].run(_visit, prompts, tokens, stop.technique, False))
    finally:
        for world in worlds.values():
            world.close()
    return watched, timed


_held: dict[str, Transformer] = {}  # in a rank: the model that _settle loaded, for _visit


def _settle(name: str, dtype: torch.dtype) -> None:
    """On a rank: load the model once."""
    _held["model"], _ = load(name, dtype)


def _visit(prompts: list[list[int]], tokens: int, technique: Technique, watched: bool) -> Run:
    """On a rank: one run."""
    dist.barrier()
    if not watched:
        return technique(_held["model"], prompts, tokens, False)
    technique(_held["model"], prompts, 2, False)  # warm up
    with trace.record() as record:
        run = technique(_held["model"], prompts, tokens, True)
    run.record = record
    return run


def _show(results: list[Result], console: Console) -> None:
    table = Table(title="every technique against plain decoding", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("technique", no_wrap=True)
    table.add_column("same\nids", no_wrap=True)
    for column in ("\nranks", "tokens\n/pass", "calls\n/token", "bytes\n/token", "tokens\n/s", "×\nplain"):
        table.add_column(column, justify="right", no_wrap=True)
    for r in results:
        verdict = "[green]yes[/]" if r.exact else "[red]NO[/]"
        numbers = (f"{r.tokens_per_pass:.2f}", f"{r.collectives:.2f}", f"{r.payload_bytes:,.0f}", f"{r.tokens_per_second:,.0f}")
        table.add_row(r.name, verdict, str(r.ranks), *numbers, f"{r.ratio:.2f}")
    console.print(table)
    notes = (
        "tokens/pass: a row's. calls: of collectives, a rank's. bytes: payload, all ranks'.",
        "tokens/s: median of all runs. × plain: median over runs beside each other.",
    )
    for note in notes:
        console.print(note, style="dim", soft_wrap=True, highlight=False)
    for result in results:
        if result.difference:
            console.print(f"{result.name}: {result.difference}", soft_wrap=True, highlight=False)


def _check_picture(picture: Path | None) -> None:
    if picture is None:
        return
    kinds = viz.picture(1, 1).canvas.get_supported_filetypes()
    if picture.suffix.removeprefix(".") not in kinds:
        raise ValueError(f"{picture} is no picture that can be written; its name must end in one of .{', .'.join(sorted(kinds))}")
    if picture.is_dir() or not picture.absolute().parent.is_dir():
        raise ValueError(f"{picture} is no place for a picture: it must be a file in a folder that exists")


def _title(result: Result) -> str:
    ranks = "1 rank" if result.ranks == 1 else f"{result.ranks} ranks"
    return f"{result.name}, {ranks}: {result.tokens_per_second:,.0f} tokens/s"


def _show_one(console: Console, tokenizer: Tokenizer, prompt: list[int], answer: list[int]) -> None:
    """The first prompt and what the model made of it, so that a reader sees that this is text."""
    console.print("[dim]the first prompt, and what follows:[/]")
    whole = tokenizer.decode(prompt)
    console.print(whole, end="", style="dim", markup=False, highlight=False, soft_wrap=True)
    console.print(tokenizer.decode([*prompt, *answer])[len(whole) :], markup=False, highlight=False, soft_wrap=True)
