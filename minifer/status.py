"""The status table of the README, written from a tour's results: every number in it was measured by that command."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch

from .ranks.host import cores
from .stops import STOPS
from .verdict import Result

BEGIN, END = "<!-- status: written by `minifer tour --readme` -->", "<!-- end of status -->"
HEAD = "| technique | module | lesson | ranks | exact? | payload bytes a token | tokens/s, × plain |"


def write(results: Sequence[Result], path: Path, what: str) -> None:
    """Put the table of these results between the marks of a file. what: model, dtype, way of drawing."""
    text = path.read_text("utf-8")
    if BEGIN not in text or END not in text:
        raise ValueError(f"{path} has no place for a status table: it needs the lines {BEGIN!r} and {END!r}")
    before, rest = text.split(BEGIN, 1)
    path.write_text(f"{before}{BEGIN}\n{table(results, path.parent)}\n\n{caption(what)}\n{END}{rest.split(END, 1)[1]}", "utf-8")


def table(results: Sequence[Result], root: Path) -> str:
    """Markdown: a row a technique, its module and its lesson as links where they exist."""
    stops = {stop.name: stop for stop in STOPS}
    rows = [HEAD, "|---|---|---|---|---|---|---|"]
    for result in sorted(results, key=lambda result: list(stops).index(result.name)):
        stop = stops[result.name]
        lesson = root / "lessons" / f"{stop.lesson}.ipynb"
        shown = f"[{stop.lesson[:2]}](lessons/{stop.lesson}.ipynb)" if lesson.is_file() else "to come"
        exact = "yes" if result.exact else "**no**"
        elsewhere = f" ({result.model})" if result.model != results[0].model else ""
        speed = f"{result.tokens_per_second:,.0f}, {result.ratio:.2f}{elsewhere}"
        module = f"[`{stop.module}`](minifer/{stop.module}.py)"
        rows.append(f"| {result.name} | {module} | {shown} | {result.ranks} | {exact} | {result.payload_bytes:,.0f} | {speed} |")
    return "\n".join(rows)


def caption(what: str) -> str:
    """Where, when and on what it was measured."""
    versions = f"torch {torch.__version__.split('+')[0]}, Python {platform.python_version()}"
    return f"*Measured {date.today().isoformat()} on {cores()} CPU cores ({versions}): {what}.*"
