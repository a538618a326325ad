"""The map: where on a request's way each technique acts."""

from __future__ import annotations

from matplotlib.lines import Line2D

from .style import SERIES, Picture, picture, style

STATIONS = (
    "which\nreplica?",
    "prompt\npass",
    "decode\npass",
    "embedding",
    "attention",
    "cache",
    "feed-\nforward",
    "head",
    "next\ntoken",
)
# technique: (the stations at which it changes something, whether minifer has it yet)
TECHNIQUES: dict[str, tuple[tuple[int, ...], bool]] = {
    "autoregressive decode": ((1, 2, 5, 8), True),
    "speculative decoding": ((2, 5, 8), True),
    "multi-token prediction": ((2, 5, 8), True),
    "tensor, sequence parallelism": ((3, 4, 5, 6, 7), True),
    "data parallelism": ((0,), True),
    "pipeline parallelism": ((1, 2, 3, 7, 8), True),
    "expert parallelism": ((6,), False),
    "context parallelism": ((1, 4, 5), False),
    "disaggregation": ((0, 1, 2, 5), False),
}


def technique_map(dark: bool = False) -> Picture:
    """Stations of a request from left to right, a line a technique, a mark where it acts: full where minifer has it."""
    with style(dark):
        figure = picture(9.5, 4.6)
        axes = figure.subplots()
        for row, (stations, here) in enumerate(TECHNIQUES.values()):
            colour = SERIES[row % len(SERIES)]
            axes.plot(stations, [row] * len(stations), "-", color=colour, lw=1.5, alpha=0.5)
            face = colour if here else "none"
            axes.plot(stations, [row] * len(stations), "o", ms=13, markerfacecolor=face, markeredgecolor=colour, markeredgewidth=2)
        axes.set_xticks(range(len(STATIONS)), STATIONS, fontsize=10)
        axes.xaxis.tick_top()
        axes.set_yticks(range(len(TECHNIQUES)), TECHNIQUES)
        axes.set_xlim(-0.5, len(STATIONS) - 0.5)
        axes.invert_yaxis()
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.axvspan(2.55, 7.45, color="#888888", alpha=0.12, lw=0)
        axes.text(5, len(TECHNIQUES) - 0.35, "inside every pass", ha="center", style="italic")
        axes.set_ylim(len(TECHNIQUES) - 0.1, -0.6)
        marks = [
            Line2D([], [], marker="o", ls="", ms=11, color="#888888", label="in minifer"),
            Line2D([], [], marker="o", ls="", ms=11, markerfacecolor="none", color="#888888", label="to come"),
        ]
        figure.legend(handles=marks, loc="outside lower left", ncols=2)
    return figure
