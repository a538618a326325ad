"""`minifer bench`: how fast plain decoding and the start of ranks are, beside what others do and what the machine allows.

Contestants take turns within one run, so that whatever else the machine does hits all of them alike, and every figure is a
median with its spread. Where the time of a pass goes is measured by running its matrices alone.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from .contestants import Contestant, llama_cpp, ours, transformers_generate
from .model.linear import Linear
from .model.load import find, load
from .model.tokenizer import Tokenizer
from .model.transformer import Transformer

TEXT = "The quick brown fox jumps over the lazy dog while seven wizards mix a potion of quartz, jade and old tin in a box."


@dataclass(frozen=True)
class Measured:
    """Seconds of repeated runs."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance of the extremes, as a share of the median."""
        return (max(self.seconds) - min(self.seconds)) / 2 / self.median


def read_bandwidth(megabytes: int = 512, repeats: int = 7) -> float:
    """Bytes a second that torch's threads read from memory: the best of some sums over an array larger than any cache."""
    array = torch.ones(megabytes * 250_000)
    best = 0.0
    for _ in range(repeats):
        started = time.perf_counter()
        array.sum()
        best = max(best, array.nbytes / (time.perf_counter() - started))
    return best


def peak_memory() -> int:
    """The most bytes that this process has held so far."""
    import resource  # not on every platform

    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else 1024 * size


def weight_bytes(model: Transformer) -> int:
    """Bytes of weights that a decode step reads: all matrices once, of an untied embedding only its rows (not counted)."""
    c, size = model.config, torch.empty(0, dtype=model.dtype).element_size()
    embedding = 0 if c.tied else c.vocabulary * c.width
    return (c.parameters - embedding) * size


def matrix_seconds(model: Transformer, rows: int, repeats: int = 5) -> float:
    """Seconds of all matrices of a pass over `rows` tokens, run one after the other and nothing between: the best of some runs."""
    matrices = [module for module in model.modules() if isinstance(module, Linear)]
    c = model.config
    widths = {c.width, c.heads * c.head_dim, c.inner}
    inputs = {width: torch.randn(rows, width).to(model.device, model.dtype) for width in widths}
    plan = [(matrix, inputs[_width(matrix, model)]) for matrix in matrices]
    best = float("inf")
    with torch.inference_mode():
        for _ in range(repeats):
            started = time.perf_counter()
            for matrix, x in plan:
                matrix(x)
            best = min(best, time.perf_counter() - started)
    return best


def _width(matrix: Linear, model: Transformer) -> int:
    """The input width of a matrix, which a packed one does not tell."""
    for layer in model.layers:
        if matrix is layer.attention.o:
            return model.config.heads * model.config.head_dim
        if matrix is layer.feed_forward.down:
            return model.config.inner
    return model.config.width


def take_turns(
    contestants: dict[str, Contestant],
    prompts: list[list[int]],
    tokens: int,
    repeats: int,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Measured]:
    """Each contestant's runs, in turns. A short run before (a prompt and some steps) takes what only the first one costs."""
    for run in contestants.values():
        run(prompts, 4)
    taken: dict[str, list[float]] = {key: [] for key in contestants}
    for _ in range(repeats):
        for key, run in contestants.items():
            taken[key].append(run(prompts, tokens))
        advance()
    return {key: Measured(tuple(seconds)) for key, seconds in taken.items()}


def prompts_of(tokenizer: Tokenizer, batch: int, length: int = 32) -> list[list[int]]:
    """Equally long prompts, all different."""
    ids = tokenizer.encode(TEXT)
    # Rotated by one token a row; beyond a full turn the last token tells them apart.
    return [[*[*ids[row % len(ids) :], *ids, *ids][: length - 1], ids[row // len(ids)]] for row in range(batch)]


def bench_decode(
    name: str = "smollm2",
    batches: Sequence[int] = (1, 8, 32),
    threads: Sequence[int] = (1, 2),
    tokens: int = 128,
    repeats: int = 5,
    dtype: torch.dtype | None = None,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """Decode `tokens` tokens with every contestant in turn, `repeats` times; print a table and return its rows."""
    if tokens < 2:
        raise ValueError("a rate of tokens after the first needs two tokens at least")
    console = console or Console()
    place = find(name)
    started, before_loading = time.perf_counter(), peak_memory()
    model, tokenizer = load(name, dtype, "cpu")
    loading, grown = time.perf_counter() - started, peak_memory() - before_loading
    theirs = transformers_generate(place, model.dtype)
    others: dict[str, Contestant] = {} if theirs is None else {"transformers": theirs}
    rows: list[dict[str, Any]] = []
    before = torch.get_num_threads()
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("measuring", total=len(threads) * len(batches) * repeats)
        for count in threads:
            torch.set_num_threads(count)
            bandwidth = read_bandwidth()
            native = llama_cpp(place, count)
            for batch in batches:
                contestants = {"minifer": ours(model), **others}
                if native is not None and batch == 1:
                    contestants["llama.cpp"] = native
                prompts = prompts_of(tokenizer, batch)
                taken = take_turns(contestants, prompts, tokens, repeats, lambda: progress.advance(bar))
                limits = {"bound": weight_bytes(model) / bandwidth, "matrices": matrix_seconds(model, batch)}
                rows.append({"threads": count, "batch": batch, **limits, **taken})
    torch.set_num_threads(before)
    console.print(_decode_table(rows, f"{name}, {str(model.dtype).removeprefix('torch.')}, {tokens} tokens, greedy"))
    kept = weight_bytes(model) + model.bytes_kept_twice
    twice = f"of which {model.bytes_kept_twice / 1e6:.0f} MB are kept twice: a tied head, packed"
    console.print(
        f"loading: {loading:.1f} s, peak memory +{grown / 1e6:.0f} MB for {kept / 1e6:.0f} MB of weights ({twice})", soft_wrap=True
    )
    return rows


def _decode_table(rows: list[dict[str, Any]], title: str) -> Table:
    """tokens/s of all rows of the batch; × transformers of paired runs."""
    table = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    columns = ("thr.", "batch", "minifer\ntokens/s", "transf.\ntokens/s", "×", "llama.cpp\ntokens/s")
    for column in (*columns, "of\nbound", "pass\nms", "matr.\nms", "rest\nms"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        mine: Measured = row["minifer"]
        cells = [str(row["threads"]), str(row["batch"]), _rate(mine, row["batch"])]
        other = row.get("transformers")
        paired = [theirs / own for own, theirs in zip(mine.seconds, other.seconds)] if other else []
        cells += [_rate(other, row["batch"]) if other else "–", f"{statistics.median(paired):.2f}" if paired else "–"]
        cells.append(_rate(row["llama.cpp"], 1) if "llama.cpp" in row else "–")
        cells.append(f"{row['bound'] / mine.median:.2f}")
        cells += [f"{1000 * seconds:.1f}" for seconds in (mine.median, row["matrices"], mine.median - row["matrices"])]
        table.add_row(*cells)
    return table


def _rate(measured: Measured, batch: int) -> str:
    return f"{batch / measured.median:.0f} ±{100 * measured.spread:.0f}%"


LAUNCH = """
import json, sys, time, minifer
def nothing(): pass
times = []
for _ in range(int(sys.argv[2])):
    started = time.perf_counter()
    minifer.launch(nothing, int(sys.argv[1]))
    times.append(time.perf_counter() - started)
print(json.dumps(times))
"""


def bench_launch(sizes: Sequence[int] = (2, 4), repeats: int = 6, console: Console | None = None) -> dict[int, list[float]]:
    """Seconds to start ranks, run nothing on them and end them: the first time in a fresh process, then warm."""
    console = console or Console()
    table = Table(title="starting and ending ranks")
    for column in ("ranks", "first (s)", "warm, median (s)", "warm, slowest (s)"):
        table.add_column(column, justify="right")
    found = {}
    for ranks in sizes:
        command = [sys.executable, "-c", LAUNCH, str(ranks), str(repeats + 1)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        first, *warm = found[ranks] = json.loads(done.stdout)
        table.add_row(str(ranks), f"{first:.2f}", f"{statistics.median(warm):.2f}", f"{max(warm):.2f}")
    console.print(table)
    return found
