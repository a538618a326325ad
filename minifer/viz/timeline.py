"""Pictures and tables of what ranks did, from their trace records."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch
from rich.table import Table

from ..ranks.trace import Record
from ..ranks.trace import timeline as stretches
from .style import ACTIVITY, Picture, picture, style


def timeline(records: Sequence[Record], title: str = "", dark: bool = False) -> Picture:
    """Each rank's time as a bar: computing, communicating, waiting. records: one a rank, of one host."""
    with style(dark):
        figure = picture(9, 1.4 + 0.5 * len(records))
        draw_timeline(figure.subplots(), records, title)
        figure.legend(handles=legend(), loc="outside lower left", ncols=3)
    return figure


def timelines(runs: Sequence[tuple[str, Sequence[Record]]], dark: bool = False) -> Picture:
    """Several runs below each other, (title, records of all ranks) each, on one scale of time. Many stand in two columns."""
    columns = 1 if len(runs) <= 4 else 2
    rows = -(-len(runs) // columns)
    with style(dark):
        heights = [max(0.9 + 0.42 * len(records) for _, records in runs[row::rows]) for row in range(rows)]
        figure = picture(9 if columns == 1 else 13, 0.7 + sum(heights))
        panels = figure.subplots(rows, columns, sharex=True, squeeze=False, height_ratios=heights).T.flatten()
        longest = max(max(r.end for r in records) - min(r.start for r in records) for _, records in runs)
        for axes, (title, records) in zip(panels, runs):
            draw_timeline(axes, records, title)
            axes.label_outer()
            axes.set_xlim(0, 1000 * longest)
        for axes in panels[len(runs) :]:
            axes.axis("off")
        figure.legend(handles=legend(), loc="outside lower left", ncols=3)
    return figure


def draw_timeline(axes: Axes, records: Sequence[Record], title: str = "") -> None:
    """The same on axes of the caller's own."""
    if not records:
        raise ValueError("a timeline needs a record at least")
    origin = min(record.start for record in records)
    for row, line in enumerate(stretches(records)):
        for what, colour in ACTIVITY.items():
            bars = [(1000 * (s.start - origin), 1000 * s.seconds) for s in line if s.what == what]
            axes.broken_barh(bars, (row - 0.38, 0.76), facecolors=colour, linewidth=0)
    axes.set_yticks(range(len(records)), [f"rank {record.rank}" for record in records])
    axes.invert_yaxis()
    axes.set_xlabel("time (ms)")
    axes.set_xlim(0, 1000 * (max(record.end for record in records) - origin))
    axes.set_title(title)


def legend() -> list[Patch]:
    """The three colours and their names."""
    return [Patch(color=colour, label=what) for what, colour in ACTIVITY.items()]


def bytes_table(records: Sequence[Record], tokens: int | None = None) -> Table:
    """Calls and bytes by kind and group size, of all ranks; per token where their number is given.

    Payload is what was recorded. Wire bytes are computed for a ring, not measured. A transfer counts where it is sent.
    """
    sums: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0, 0, 0])
    for record in records:
        for event in record.events:
            if event.kind not in ("recv", "irecv"):
                entry = sums[event.kind, len(event.group)]
                entry[0] += 1
                entry[1] += event.bytes
                entry[2] += event.wire_bytes
    per = tokens or 1
    unit = " a token" if tokens else ""
    table = Table(title=f"what {len(records)} ranks sent")
    table.add_column("operation")
    for column in ("ranks", f"calls{unit}", f"payload bytes{unit}", f"wire bytes{unit}\n(computed, ring)"):
        table.add_column(column, justify="right")
    for (kind, ranks), (calls, payload, wire) in sorted(sums.items()):
        table.add_row(kind, str(ranks), f"{calls / per:,.2f}", f"{payload / per:,.1f}", f"{wire / per:,.1f}")
    return table


def perfetto(records: Sequence[Record], path: str | Path) -> None:
    """Write a trace file that ui.perfetto.dev and chrome://tracing open: a process a rank, rows for modules and for calls."""
    origin = min(record.start for record in records)
    events: list[dict[str, Any]] = []

    def add(rank: int, row: int, name: str, start: float, end: float, **more: Any) -> None:
        place = {"ph": "X", "pid": rank, "tid": row, "ts": 1e6 * (start - origin), "dur": 1e6 * (end - start)}
        events.append(place | {"name": name, "args": more})

    for record in records:
        name = {"name": f"rank {record.rank}"}
        events.append({"ph": "M", "pid": record.rank, "name": "process_name", "args": name})
        for row, what in enumerate(("modules", "calls", "waiting and communicating")):
            events.append({"ph": "M", "pid": record.rank, "tid": row, "name": "thread_name", "args": {"name": what}})
        for span in record.spans:
            add(record.rank, 0, span.name, span.start, span.end)
        for event in record.events:
            add(record.rank, 1, event.kind, event.start, event.end, bytes=event.bytes, group=list(event.group), peer=event.peer)
    for record, line in zip(records, stretches(records)):
        for stretch in line:
            if stretch.what != "computing":
                add(record.rank, 2, f"{stretch.what}: {stretch.kind}", stretch.start, stretch.end)
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
