"""`minifer bench speculation`: what drafting is worth on real prompts, beside plain decoding and beside what theory predicts.

Plain decoding and the drafters take turns on the same prompts. A gain is seconds a token after the first, plain's over the
drafter's, the median over turns beside each other. Predicted is E / (c + v): E passes of plain decoding for one of speculation, as
counted (for a single row its tokens a pass); c the time to make a draft and v the time of a pass over it, both in plain steps. v is
measured alone: passes over as many tokens and over one, in turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from . import decode, drafters, mtp
from .batch import Completion, Request
from .contestants import transformers_generate
from .draft import acceptance, tokens_per_pass
from .model.cache import Cache
from .model.load import data_folder, find, load
from .model.passes import Output, Pass, Span
from .model.transformer import Transformer
from .pace import Adaptive
from .prompts import WORKLOADS, first, workload

Prompts = list[list[int]]


@dataclass(frozen=True)
class Cell:
    """What one drafter did on some prompts.

    seconds: a token after the first, of the plain run beside it and its own, each turn. fewer_passes: plain decoding's passes for
    one of its own; a batch needs as many as its slowest row.
    """

    drafter: str
    draft_length: int | Adaptive
    batch: int
    what: str
    tokens_per_pass: float
    acceptance: list[float]
    seconds: list[tuple[float, float]]
    draft_cost: float
    verify_cost: float
    fewer_passes: float

    @property
    def gain(self) -> float:
        return statistics.median(plain / own for plain, own in self.seconds)

    @property
    def predicted(self) -> float:
        return self.fewer_passes / (self.draft_cost + self.verify_cost)

    @property
    def bound(self) -> str:
        """What would raise the prediction most: drafts that are always right, drafts that cost nothing, or wide passes that do
        not cost more than narrow ones. With the prediction that it would lead to."""
        longest = self.draft_length.longest if isinstance(self.draft_length, Adaptive) else self.draft_length
        could = {
            "acceptance": self.fewer_passes * (longest + 1) / self.tokens_per_pass / (self.draft_cost + self.verify_cost),
            "draft cost": self.fewer_passes / self.verify_cost,
            "verify cost": self.fewer_passes / (self.draft_cost + min(1.0, self.verify_cost)),
        }
        name = max(could, key=lambda one: could[one])
        return f"{name} ({could[name]:.1f})"


class Bench:
    """A model, the prompts it is measured on, and what its passes cost."""

    def __init__(self, name: str, dtype: torch.dtype | None, tokens: int, repeats: int) -> None:
        self.model, self.tokenizer = load(name, dtype, "cpu")
        self.tokens, self.repeats, self._verify_costs = tokens, repeats, {}  # type: ignore[var-annotated]

    def prompts(self, kinds: Sequence[str], each: int) -> Prompts:
        """The first `each` of each workload."""
        return first(self.tokenizer, each, kinds)

    def compare(
        self, name: str, drafter: drafters.Drafter, length: int | Adaptive, prompts: Prompts, batch: int = 1, what: str = ""
    ) -> Cell:
        """The drafter and plain decoding in turns, `batch` prompts at a time."""

        def plain(some: Prompts) -> list[Completion]:
            return decode.generate(self.model, [Request(ids, self.tokens) for ids in some], tokenizer=self.tokenizer)

        def speculating(some: Prompts, model: Any = self.model) -> list[Completion]:
            requests = [Request(ids, self.tokens) for ids in some]
            return mtp.generate(model, requests, drafter, length, tokenizer=self.tokenizer)

        groups = [prompts[at : at + batch] for at in range(0, len(prompts), batch)]
        turns = []
        for _ in range(self.repeats):
            both = [[seconds(decoder(group)) for decoder in (plain, speculating)] for group in groups]
            turns.append((_per_token(both, 0), _per_token(both, 1)))
        watching = Watching(self.model)
        done = [speculating(group, watching) for group in groups]
        completions = [one for group in done for one in group]
        rounds = [one for completion in completions for one in completion.rounds]
        plain_passes = sum(max(len(one.ids) for one in group) - 1 for group in done)
        context = int(statistics.mean(len(ids) for ids in prompts) + self.tokens / 2)
        return Cell(
            name, length, batch, what, tokens_per_pass(completions), acceptance(completions), turns,
            draft_cost=statistics.mean(one.draft_seconds for one in rounds) / statistics.median(plain for plain, _ in turns),
            verify_cost=self._mean_verify_cost(watching.passes, context),
            fewer_passes=plain_passes / sum(max(len(one.rounds) for one in group) for group in done),
        )  # fmt: skip

    def _mean_verify_cost(self, passes: Sequence[Pass], context: int) -> float:
        """Over these passes, the prompts' left out. Rows that share one count with their mean width."""
        later = [pass_ for pass_ in passes if all(span.start for span in pass_.spans)]
        if any(len(pass_.spans) > 1 for pass_ in later):
            rows = max(len(pass_.spans) for pass_ in later)
            low, share = divmod(statistics.mean(span.count for pass_ in later for span in pass_.spans), 1)
            less, more = (self.verify_cost(int(low) + step, rows, context) for step in (0, 1))
            return less + share * (more - less)
        shapes = [pass_.parents[0] if pass_.parents else range(-1, pass_.spans[0].count - 1) for pass_ in later]
        return statistics.mean(self.verify_cost(len(shape), 1, context, tuple(shape)) for shape in shapes)

    def verify_cost(self, width: int, rows: int, context: int, parents: tuple[int, ...] | None = None, repeats: int = 25) -> float:
        """How many passes over one token of each row a pass over `width` takes, logits included, behind `context` tokens.

        parents: of the tree that the tokens are; None: a chain.
        """
        if parents == tuple(range(-1, width - 1)):
            parents = None
        key = (width, rows, context // 64, parents)
        if key not in self._verify_costs:
            cache, taken = self.model.new_cache(rows, context + width), []
            cache.tokens = [[0] * context for _ in range(rows)]  # as if they were there
            for _ in range(repeats):
                wide = self._pass_seconds(width, rows, context, cache, parents)
                taken.append(wide / self._pass_seconds(1, rows, context, cache))
            self._verify_costs[key] = statistics.median(taken)
        return self._verify_costs[key]

    def _pass_seconds(self, width: int, rows: int, context: int, cache: Cache, parents: tuple[int, ...] | None = None) -> float:
        ids = torch.arange(rows * width) % self.model.config.vocabulary
        spans = tuple(Span(row, context, width) for row in range(rows))
        started = time.perf_counter()
        with torch.inference_mode():
            pass_ = Pass(ids, spans, tuple(range(len(ids))), parents=None if parents is None else (parents,) * rows)
            self.model(pass_, cache).logits.argmax(-1).tolist()
        return time.perf_counter() - started


class Watching:
    """A model that keeps the passes it ran."""

    def __init__(self, model: Transformer) -> None:
        self.model, self.passes = model, []  # type: ignore[var-annotated]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, pass_: Pass, cache: Cache) -> Output:
        self.passes.append(pass_)
        return self.model(pass_, cache)


def seconds(completions: Sequence[Completion]) -> tuple[float, int]:
    """Of completions that ran together: seconds from the first token to the last, and how many tokens a row came in them."""
    span = max(one.seconds for one in completions) - max(one.ttft or 0.0 for one in completions)
    return span, max(len(one.ids) for one in completions) - 1


def _per_token(groups: Sequence[Sequence[tuple[float, int]]], which: int) -> float:
    return sum(group[which][0] for group in groups) / max(1, sum(group[which][1] for group in groups))


def bench_speculation(
    name: str = "smollm2",
    kinds: Sequence[str] | None = None,
    lengths: Sequence[int] = range(1, 9),
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32),
    tokens: int = 96,
    repeats: int = 3,
    each: int = 2,
    dtype: torch.dtype | None = None,
    console: Console | None = None,
) -> list[Cell]:
    """Each drafter by workload, by draft length and by batch; prints tables and returns their cells.

    kinds: names or folders of drafters; None: those there are, and prompt lookup before EAGLE and before DeepSeek's module.
    each: prompts of each workload.
    """
    if tokens < 2:
        raise ValueError("a rate of tokens after the first needs two tokens at least")
    console = console or Console()
    console.width = max(125, console.width)
    bench = Bench(name, dtype, tokens, repeats)
    there = drafters.available(name)
    usual = [*there, *(f"prompt_lookup+{kind}" for kind in ("eagle", "deepseek") if kind in there)]
    loaded = {kind: drafters.load(kind, bench.model, bench.tokenizer) for kind in kinds or usual}
    mixed = bench.prompts(WORKLOADS, each)
    jobs: list[tuple[str, str, int, Prompts, int]] = []
    for kind, drafter in loaded.items():
        jobs += [(kind, work, drafter.usual, bench.prompts([work], each), 1) for work in WORKLOADS]
        jobs += [(kind, "length", length, mixed, 1) for length in lengths if _can(drafter, length)]
        jobs += [(kind, "batch", drafter.usual, _many(bench, batch), batch) for batch in batches]
    cells = []
    bench.compare("warm-up", next(iter(loaded.values())), 1, mixed[:1], 1, "")
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("measuring", total=len(jobs))
        for kind, what, length, prompts, batch in jobs:
            progress.update(bar, description=f"{kind}: {what}, draft length {length}, batch {batch}")
            cells.append(bench.compare(kind, loaded[kind], length, prompts, batch, what))
            progress.advance(bar)
    title = f"{name}, {str(bench.model.dtype).removeprefix('torch.')}, {torch.get_num_threads()} threads, {tokens} tokens, greedy"
    console.print(_table([cell for cell in cells if cell.what in WORKLOADS], f"by workload: {title}, batch 1", "workload"))
    console.print(_table([cell for cell in cells if cell.what == "length"], "by draft length, all workloads, batch 1", "length"))
    console.print(_table([cell for cell in cells if cell.what == "batch"], "by batch, all workloads", "batch"))
    _beside_transformers(name, bench, mixed, console)
    return cells


def _can(drafter: drafters.Drafter, length: int) -> bool:
    try:
        drafter.check(length)
    except ValueError:
        return False
    return True


def _many(bench: Bench, batch: int) -> Prompts:
    """Two batches, and six prompts at least, the workloads mixed; all different as long as there are enough."""
    held = [workload(kind).ids(bench.tokenizer) for kind in WORKLOADS]
    mixed = [ids for row in zip(*held) for ids in row]
    return [mixed[at % len(mixed)] for at in range(max(2 * batch, 6))]


def _table(cells: Sequence[Cell], title: str, what: str) -> Table:
    table = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("drafter", what):
        table.add_column(column, no_wrap=True)
    for column in ("tokens\n/pass", "draft\ncost", "verify\ncost", "gain", "pre-\ndicted", "plain\ntokens/s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("bound by\n(without it)", no_wrap=True)
    table.add_column("kept by depth", no_wrap=True)
    for cell in cells:
        label = {"workload": cell.what, "length": str(cell.draft_length), "batch": str(cell.batch)}[what]
        plain = cell.batch / statistics.median(plain for plain, _ in cell.seconds)
        numbers = (cell.tokens_per_pass, cell.draft_cost, cell.verify_cost, cell.gain, cell.predicted)
        kept = " ".join(f"{share:.2f}".lstrip("0") for share in cell.acceptance)
        table.add_row(cell.drafter, label, *(f"{number:.2f}" for number in numbers), f"{plain:.0f}", cell.bound, kept)
    return table


def _beside_transformers(name: str, bench: Bench, prompts: Prompts, console: Console) -> None:
    """transformers' own speculation on the same prompts, against its own plain generate, where it is installed."""
    place, dtype = find(name), bench.model.dtype
    plain = transformers_generate(place, dtype)
    if plain is None:
        return
    others = {"prompt lookup": transformers_generate(place, dtype, prompt_lookup_num_tokens=4)}
    assistant = data_folder() / name / "draft_model"
    if assistant.is_dir():
        others["assisted generation"] = transformers_generate(place, dtype, assistant)
    table = Table(title="transformers, against its own generate", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("", "gain", "tokens/s"):
        table.add_column(column)
    for what, contestant in others.items():
        assert contestant is not None
        pairs = [(plain([ids], bench.tokens), contestant([ids], bench.tokens)) for ids in prompts]
        own, theirs = (sum(column) for column in zip(*pairs))
        table.add_row(what, f"{own / theirs:.2f}", f"{len(pairs) / theirs:.0f}")
    console.print(table)
