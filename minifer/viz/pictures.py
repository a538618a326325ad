"""Pictures of models and caches: matrices and who holds them, what tokens see, how a cache grows, a roofline."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from ..model.attention import views
from ..model.passes import Pass
from .style import SEQUENTIAL, SERIES, Picture, picture, style


def matrix(values: torch.Tensor, title: str = "", rows: str = "row", columns: str = "column", dark: bool = False) -> Picture:
    """A matrix [rows, columns] as colours, with their scale."""
    with style(dark):
        figure = picture(6, 4)
        axes = figure.subplots()
        shown = axes.imshow(values.detach().float().cpu().numpy(), aspect="auto", cmap=SEQUENTIAL, interpolation="nearest")
        figure.colorbar(shown, ax=axes, label="value")
        axes.set(xlabel=columns, ylabel=rows)
        axes.set_title(title)
    return figure


def visibility(pass_: Pass, window: int | None = None, title: str = "", dark: bool = False) -> Picture:
    """Which keys each token of a pass sees: a panel a row of the batch."""
    with style(dark):
        widths = [max(span.start + span.count, 3) for span in pass_.spans]
        figure = picture(1.5 + 0.28 * sum(widths), 1.6 + 0.28 * max(span.count for span in pass_.spans))
        panels = np.atleast_1d(figure.subplots(1, len(pass_.spans), width_ratios=widths))
        for axes, span, view in zip(panels, pass_.spans, views(pass_, window)):
            end = span.start + span.count
            seen = torch.zeros(span.count, end, dtype=torch.bool)
            if view.visible.mask is not None:
                seen[:, view.first :] = view.visible.mask[0]
            elif view.visible.causal:
                seen[:] = torch.ones(span.count, end, dtype=torch.bool).tril()
            else:
                seen[:, view.first :] = True
            axes.pcolormesh(seen.numpy(), cmap=ListedColormap(["#BBBBBB44", SERIES[0]]), vmin=0, vmax=1, edgecolors="white", lw=1)
            axes.invert_yaxis()
            axes.set_aspect("equal")
            axes.set_xticks(np.arange(end)[:: max(1, end // 8)] + 0.5, np.arange(end)[:: max(1, end // 8)])
            axes.set_yticks(np.arange(span.count) + 0.5, [str(span.start + at) for at in range(span.count)])
            axes.set_xlabel(f"row {span.row}: key (slot)")
        panels[0].set_ylabel("token (slot)")
        figure.suptitle(title, x=0.02, ha="left", fontweight="bold")
        figure.legend(
            handles=[Patch(color=SERIES[0], label="sees"), Patch(color="#BBBBBB", label="does not")], loc="outside right upper"
        )
    return figure


def cache_growth(lengths: Sequence[Sequence[int]], bytes_per_token: int, title: str = "", dark: bool = False) -> Picture:
    """Bytes of keys and values over the passes, stacked by row. lengths: after each pass, tokens that each row holds."""
    with style(dark):
        figure = picture(8, 3.4)
        axes = figure.subplots()
        megabytes = np.array(lengths).T * bytes_per_token / 1e6  # [rows, passes]
        axes.stackplot(range(1, len(lengths) + 1), megabytes, colors=SERIES, labels=[f"row {row}" for row in range(len(megabytes))])
        axes.set(xlabel="pass", ylabel="cache (MB)", xlim=(1, max(2, len(lengths))))
        axes.set_title(title)
        figure.legend(loc="outside right upper")
    return figure


def roofline(peak: float, bandwidth: float, points: dict[str, tuple[float, float]], title: str = "", dark: bool = False) -> Picture:
    """Operations a second over operations a byte, under the two ceilings of a machine.

    peak: operations a second. bandwidth: bytes a second. points: {name: (operations a byte, operations a second)}.
    """
    with style(dark):
        figure = picture(8, 4)
        axes = figure.subplots()
        draw_roofline(axes, peak, bandwidth, points)
        axes.set_title(title)
        figure.legend(loc="outside right upper")
    return figure


def draw_roofline(axes: Axes, peak: float, bandwidth: float, points: dict[str, tuple[float, float]]) -> None:
    """The same on axes of the caller's own."""
    ridge = peak / bandwidth
    low = min([ridge / 100, *(x / 2 for x, _ in points.values())])
    high = max([ridge * 10, *(x * 2 for x, _ in points.values())])
    x = np.geomspace(low, high, 200)
    axes.loglog(x, np.minimum(peak, bandwidth * x) / 1e9, color="#888888", lw=2)
    axes.axvline(ridge, color="#888888", lw=1, ls=":")
    slope, flat = (ridge / 6, bandwidth * ridge / 6 / 1e9), (high, peak / 1e9)
    axes.annotate(f"{bandwidth / 1e9:.0f} GB/s", slope, xytext=(-8, 4), textcoords="offset points", ha="right")
    axes.annotate(f"{peak / 1e9:.0f} GFLOP/s", flat, xytext=(-4, 5), textcoords="offset points", ha="right")
    for (name, (at, speed)), colour, mark in zip(points.items(), SERIES * 4, "osD^vP*X" * 4):
        axes.plot(at, speed / 1e9, mark, color=colour, ms=9, label=name)
    axes.set(xlabel="operations a byte (FLOP/B)", ylabel="speed (GFLOP/s)", xlim=(low, high))
    axes.set_ylim(top=3 * peak / 1e9)
    axes.grid(alpha=0.4)
