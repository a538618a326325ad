"""`minifer tour`: real prompts, decoded by every technique there is, and held against plain decoding.

The techniques are in stops.py. Each is watched once (passes, collectives, margins between logits), then timed several times
without anything in its way; these runs alternate, so that whatever else the machine does hits all of them alike.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from . import viz
from .model.load import load, look_up
from .model.tokenizer import Tokenizer
from .model.transformer import Transformer
from .prompts import first
from .ranks import Ranks, trace
from .ranks.here import a_gpu_each
from .ranks.host import cores
from .stops import STOPS, Stop, stops_for
from .verdict import Result, Run, judge


def tour(
    name: str = "tiny",
    dtype: torch.dtype = torch.float32,
    tokens: int = 32,
    per_workload: int = 2,
    repeats: int = 3,
    picture: Path | None = None,
    threads: int | None = None,
    console: Console | None = None,
    only: Sequence[str] | None = None,
) -> list[Result]:
    """Run every stop on the model of this name and print a table. A result's `exact` says whether the technique passed.

    dtype: float32 must give the same ids; bfloat16 may differ at ties (see verdict.judge). repeats: how often each stop is
    timed; speeds are medians. picture: a file for the timelines of plain decoding and of all that runs on several ranks (.png,
    .svg, .pdf), and one on a dark ground beside it. threads: of each rank; by default its share of the cores. only: names of
    stops, besides plain decoding.
    """
    console = console or Console()
    config, tokenizer = look_up(name)
    if tokens >= config.context:
        raise ValueError(f"{tokens} new tokens leave no room for a prompt in a context of {config.context}")
    prompts = first(tokenizer, per_workload)
    _check_picture(picture)
    prompts = [ids[tokens - config.context :] for ids in prompts]
    sizes = sorted(map(len, prompts))
    shown = f"{name}, {str(dtype).removeprefix('torch.')}, {len(prompts)} prompts of {sizes[0]}–{sizes[-1]} tokens"
    console.print(f"[bold]minifer tour[/]: {shown}, {tokens} new tokens each, greedy", soft_wrap=True)
    if hasattr(os, "getloadavg") and os.getloadavg()[0] > 0.75 * cores():
        load = f"load {os.getloadavg()[0]:.1f} on {cores()} cores"
        console.print(f"[yellow]other programs are busy ({load}): speeds below are not this machine's own[/]", soft_wrap=True)
    stops = [stop for stop in stops_for(name) if only is None or stop.name == stop.baseline or stop.name in only]
    watched, timed = _run_all(stops, (name, dtype), (prompts, tokens), repeats, threads, console)
    plain = STOPS[0].name
    results = [judge(s.name, watched[s.name], timed[s.name], watched[plain], timed[s.baseline], dtype) for s in stops]
    results = [replace(result, model=name) for result in results]
    _show(results, console)
    if picture is not None:
        drawn = [result for result in results if result.ranks > 1 or result.name == plain]  # one rank alone always computes
        panels = [(_title(result), [run.record for run in watched[result.name]]) for result in drawn]
        for dark, file in ((False, picture), (True, picture.with_stem(picture.stem + "-dark"))):
            viz.timelines(panels, dark).savefig(file)
            console.print(f"[dim]what each rank did: {file}[/]", soft_wrap=True)
    _show_one(console, tokenizer, prompts[0], watched[plain][0].completions[0].ids)
    return results


Runs = dict[str, list[Run]]  # {stop: a Run a rank}


def _run_all(
    stops: Sequence[Stop],
    model: tuple[str, torch.dtype],
    asked: tuple[list[list[int]], int],
    repeats: int,
    threads: int | None,
    console: Console,
) -> tuple[Runs, dict[str, list[list[Run]]]]:
    """Every stop on a world of its size: watched once, then timed `repeats` times in turn. asked: prompts, new tokens."""
    # All on the same kind of device: a GPU each where there are enough for the largest world.
    cuda = a_gpu_each(max(stop.ranks for stop in stops))
    worlds: dict[int, Ranks] = {}
    watched: Runs = {}
    timed: dict[str, list[list[Run]]] = {stop.name: [] for stop in stops}
    try:
        for stop in stops:
            with console.status(f"{stop.name}: the model on {stop.ranks} rank(s)"):
                if stop.ranks not in worlds:
                    worlds[stop.ranks] = Ranks(stop.ranks, cuda=cuda, threads=threads)
                watched[stop.name] = worlds[stop.ranks].run(_look, *model, *asked, stop)
        for repeat in range(repeats):
            for stop in stops:
                with console.status(f"{stop.name}: run {repeat + 1} of {repeats}"):
                    timed[stop.name].append(worlds[stop.ranks].run(_visit, *asked, stop, False))
    finally:
        for world in worlds.values():
            world.close()
    return watched, timed


_held: dict[Any, Transformer] = {}  # in a rank: the models that it has loaded, by what it keeps of them


def _look(name: str, dtype: torch.dtype, prompts: list[list[int]], tokens: int, stop: Stop) -> Run:
    """On a rank: load what it needs; a run that is watched, and one that is recorded, since watching may need calls of its own."""
    if stop.shard not in _held:
        _held[stop.shard], _ = load(name, dtype, shard=stop.shard)
    run = _visit(prompts, tokens, stop, True)
    with trace.record() as record:
        _visit(prompts, tokens, stop, False)
    run.record = record
    return run


def _visit(prompts: list[list[int]], tokens: int, stop: Stop, watched: bool) -> Run:
    """On a rank: one run."""
    dist.barrier()
    return stop.technique(_held[stop.shard], prompts, tokens, watched)


def _show(results: list[Result], console: Console) -> None:
    table = Table(title="every technique against plain decoding", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("technique", no_wrap=True)
    table.add_column("same\nids", no_wrap=True)
    for column in ("\nranks", "tokens\n/pass", "calls\n/token", "bytes\n/token", "tokens\n/s", "×\nplain"):
        table.add_column(column, justify="right", no_wrap=True)
    for r in results:
        verdict = "[green]yes[/]" if r.exact else "[red]NO[/]"
        numbers = (f"{r.tokens_per_pass:.2f}", f"{r.collectives:.2f}", _short(r.payload_bytes), f"{r.tokens_per_second:,.0f}")
        table.add_row(r.name, verdict, str(r.ranks), *numbers, f"{r.ratio:.2f}")
    console.print(table)
    notes = (
        "tokens/pass: a row's. calls: of collectives, a rank's. bytes: payload, all ranks'.",
        "tokens/s: median of all runs. × plain: median over runs beside each other, of as many prompts at a time.",
    )
    for note in notes:
        console.print(note, style="dim", soft_wrap=True, highlight=False)
    for result in results:
        if result.difference:
            console.print(f"{result.name}: {result.difference}", soft_wrap=True, highlight=False)


def _short(number: float) -> str:
    """In thousands, or millions, where it is long."""
    if number < 10_000:
        return f"{number:,.0f}"
    return f"{number / 1000:,.0f} k" if number < 1e6 else f"{number / 1e6:.1f} M"


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
