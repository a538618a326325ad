"""`minifer bench tensor` and `minifer bench collectives`: what slicing a model over ranks gains here, and what a collective costs.

Every contestant is a world of ranks that stays up: one rank, one process with more threads, ranks over shared memory, ranks over
gloo, and transformers' own tensor parallelism. They take turns; while one runs, the others sleep on their pipes. A gain is the
median over turns of one rank's seconds by those of the contestant in the same turn.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from . import decode, tensor_parallel, trace
from .batch import Request
from .bench import prompts_of
from .contestants import ours, transformers_tensor_parallel
from .model.load import find, load
from .model.passes import Pass, Span
from .ranks.launch import RankError, Ranks

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send and receive")


@dataclass(frozen=True)
class Work:
    """What is timed: decoding `tokens` tokens of `batch` rows, or one pass over a prompt of `prompt` tokens."""

    name: str
    batch: int = 1
    tokens: int = 0
    prompt: int = 32


@dataclass(frozen=True)
class Share:
    """What a rank holds of a model, and what a decode step of one row sends. In bytes; calls by kind."""

    read: int
    kept: int
    calls: dict[str, int]
    payload: int


_held: dict[str, Any] = {}  # in a rank: its model


def hold(name: str, dtype: torch.dtype | None, sequence_parallel: bool) -> Share:
    """On a rank: load its slices and keep them. What they are, and what a step with them sends."""
    group = dist.group.WORLD
    assert group is not None
    shard = partial(tensor_parallel.shard, group=group, sequence_parallel=sequence_parallel)
    read: list[int] = []
    model, _held["tokenizer"] = load(name, dtype, "cpu", shard if group.size() > 1 else None, progress=read.append)
    _held["model"] = model
    with torch.inference_mode():
        cache = model.new_cache(1, 8)
        model(Pass(torch.tensor([1]), (Span(0, 0, 1),), (0,)), cache)
        with trace.record() as record:
            output = model(Pass(torch.tensor([2]), (Span(0, 1, 1),), (0,)), cache)
            output.decide(lambda output: output.best, 1)
    kinds = {event.kind for event in record.events}
    return Share(sum(read), sum(read) + model.bytes_kept_twice, {kind: record.count(kind) for kind in kinds}, record.bytes)


def seconds(work: Work) -> float:
    """On a rank: of one step, or of the prompt's pass."""
    model, tokenizer = _held["model"], _held["tokenizer"]
    prompts = prompts_of(tokenizer, work.batch, work.prompt) if work.prompt <= 32 else [list(range(1, work.prompt + 1))]
    if work.tokens:
        return ours(model)(prompts, work.tokens)
    started = time.perf_counter()
    decode.generate(model, [Request(ids, 1, stop_ids=()) for ids in prompts])
    return time.perf_counter() - started


def bench_tensor(
    name: str = "smollm2",
    ranks: int = 2,
    batches: Sequence[int] = (1, 8, 32),
    tokens: int = 64,
    prompt: int = 512,
    repeats: int = 5,
    dtype: torch.dtype | None = None,
    console: Console | None = None,
) -> dict[str, dict[str, list[float]]]:
    """Time ranks of one thread each against one rank, and against one process of as many threads; print tables.

    Returns {work: {contestant: seconds of each turn}}.
    """
    console = console or Console()
    console.width = max(140, console.width)
    works = [*(Work(f"decode, batch {batch}", batch, tokens) for batch in batches), Work(f"prompt of {prompt}", prompt=prompt)]
    one, threaded = "1 rank, 1 thread", f"1 process, {ranks} threads"
    plans = {
        one: (1, 1, None, False),
        threaded: (1, ranks, None, False),
        f"{ranks} ranks": (ranks, 1, None, False),
        f"{ranks} ranks, sequence parallel": (ranks, 1, None, True),
        f"{ranks} ranks over gloo": (ranks, 1, "gloo", False),
    }
    find(name)  # fetched by one, not by all at once
    with ExitStack() as stack, Progress(console=console, transient=True) as progress:
        bar = progress.add_task("loading", total=len(works) * repeats)
        worlds: dict[str, Ranks] = {}
        shares: dict[str, list[Share]] = {}
        for title, (size, threads, backend, sequence_parallel) in plans.items():
            worlds[title] = stack.enter_context(Ranks(size, cuda=False, threads=threads, backend=backend))
            shares[title] = worlds[title].run(hold, name, dtype, sequence_parallel)
        run: dict[str, Callable[[Work], float]] = {title: partial(_slowest, world) for title, world in worlds.items()}
        said = _transformers(name, ranks, dtype, stack, run)
        found: dict[str, dict[str, list[float]]] = {work.name: {title: [] for title in run} for work in works}
        for work in works:
            progress.update(bar, description=work.name)
            for turn in range(repeats + 1):
                taken = {title: measure(work) for title, measure in run.items()}
                if turn:  # the first is for what only a first run costs
                    for title, one_run in taken.items():
                        found[work.name][title].append(one_run)
                    progress.advance(bar)
    console.print(_gains(found, works, one, threaded, f"{name}, one thread a rank, medians of {repeats} turns"))
    if said:
        console.print(said, soft_wrap=True)
    console.print(_shares(shares, one))
    return found


def _slowest(world: Ranks, work: Work) -> float:
    return max(world.run(seconds, work))


def _transformers(
    name: str, ranks: int, dtype: torch.dtype | None, stack: ExitStack, run: dict[str, Callable[[Work], float]]
) -> str:
    """Add transformers' tensor parallelism to those that run, or say why it cannot."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    title = f"transformers, {ranks} ranks over gloo"
    try:
        world = stack.enter_context(Ranks(ranks, cuda=False, threads=1, backend="gloo"))
        measure = transformers_tensor_parallel(find(name), folder, world, dtype)
        if measure is None:
            return ""
        measure([[1, 2, 3]], 2)
    except RankError as error:
        return f"{title}: cannot run; {str(error).strip().splitlines()[-1]}"

    def of_theirs(work: Work) -> float:
        rows = [list(range(1 + row, 1 + row + work.prompt)) for row in range(work.batch)]
        return measure(rows, work.tokens)

    run[title] = of_theirs
    return ""


def _gains(found: dict[str, dict[str, list[float]]], works: Sequence[Work], one: str, threaded: str, title: str) -> Table:
    """Each cell: the speed, and how many times that of one rank and of one process with threads it is."""
    table = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("", no_wrap=True)
    for work in works:
        table.add_column(f"{work.name}\n{'tokens/s' if work.tokens else 'ms'}, × rank, × threads", justify="right", no_wrap=True)
    for contestant in next(iter(found.values())):
        cells = []
        for work in works:
            mine = found[work.name][contestant]
            median = statistics.median(mine)
            speed = f"{work.batch / median:.0f}" if work.tokens else f"{1000 * median:.0f}"
            ratios = [statistics.median(b / a for a, b in zip(mine, found[work.name][other])) for other in (one, threaded)]
            cells.append(f"{speed}  {ratios[0]:.2f}  {ratios[1]:.2f}")
        table.add_row(contestant, *cells)
    return table


def _shares(shares: dict[str, list[Share]], one: str) -> Table:
    """What each rank reads, keeps and sends a step."""
    table = Table(title="a rank's part, and a step of one row", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("", "weights, MB", "of one rank's", "kept, MB", "calls", "payload, bytes"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    [whole] = shares[one]
    for title, ranks in shares.items():
        calls = ", ".join(f"{count} {kind.removesuffix('_single')}" for kind, count in sorted(ranks[0].calls.items()))
        read = " + ".join(f"{share.read / 1e6:.0f}" for share in ranks)
        parts = " + ".join(f"{share.read / whole.read:.3f}" for share in ranks)
        kept = " + ".join(f"{share.kept / 1e6:.0f}" for share in ranks)
        table.add_row(title, read, parts, kept, calls or "none", f"{ranks[0].payload:,}")
    return table


def timed(kind: str, size: int, seconds_each: float) -> float:
    """On a rank: seconds of one call over a tensor of `size` bytes: the whole one, as formulas count it."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    count = max(ranks, size // 4 // ranks * ranks)
    whole, part = torch.zeros(count), torch.zeros(count // ranks)  # sums stay what they are
    call: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather(list(whole.chunk(ranks)), part),
        "reduce_scatter": lambda: dist.reduce_scatter(part, list(whole.chunk(ranks))),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "send and receive": lambda: _round(whole, rank, ranks),
    }
    run = call[kind]
    run()
    started = time.perf_counter()
    run()
    once = torch.tensor([time.perf_counter() - started])
    dist.all_reduce(once, dist.ReduceOp.MAX)  # so that all repeat it equally often
    repeats = int(min(2000, max(3, seconds_each / max(float(once), 1e-6))))
    started = time.perf_counter()
    for _ in range(repeats):
        run()
    dist.barrier()  # who only sends is not done before the others have it
    return (time.perf_counter() - started) / repeats


def _round(whole: torch.Tensor, rank: int, ranks: int) -> None:
    """Everybody sends to the next rank."""
    sent = dist.isend(whole, (rank + 1) % ranks)
    dist.recv(torch.empty_like(whole), (rank - 1) % ranks)
    assert sent is not None
    sent.wait()


def bench_collectives(
    ranks: Sequence[int] = (2, 4),
    sizes: Sequence[int] = (64, 2048, 65_536, 1 << 20, 16 << 20),
    repeats: int = 3,
    console: Console | None = None,
) -> dict[tuple[str, int, int], tuple[float, float]]:
    """Each collective over shared memory and over gloo, in turns. {(kind, ranks, bytes): seconds of both}."""
    console = console or Console()
    found = {}
    table = Table(title="µs a call, shared memory / gloo, and how many times as fast", box=SIMPLE, pad_edge=False)
    table.add_column("ranks", no_wrap=True)
    table.add_column("", no_wrap=True)
    for size in sizes:
        table.add_column(f"{size:,} B", justify="right", no_wrap=True)
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("measuring", total=len(ranks) * len(KINDS) * len(sizes))
        for count in ranks:
            with Ranks(count, cuda=False, threads=1) as ours_, Ranks(count, cuda=False, threads=1, backend="gloo") as gloo:
                for kind in KINDS:
                    cells = []
                    for size in sizes:
                        turns = [[max(world.run(timed, kind, size, 0.05)) for world in (ours_, gloo)] for _ in range(repeats)]
                        mine, theirs = (statistics.median(column) for column in zip(*turns))
                        found[kind, count, size] = mine, theirs
                        ratio = statistics.median(b / a for a, b in turns)
                        cells.append(f"{1e6 * mine:,.0f} / {1e6 * theirs:,.0f}: {ratio:.0f} ×")
                        progress.advance(bar)
                    table.add_row(str(count), kind, *cells)
    console.width = max(140, console.width)
    console.print(table)
    return found
