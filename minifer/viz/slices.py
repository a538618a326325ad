"""Matrices cut into ranks' slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from matplotlib.patches import Rectangle

from .style import SERIES, Picture, picture, style

Cut = tuple[int, int, str, Sequence[int]]  # (inputs, outputs, "columns" or "rows", where one rank's slice ends and the next begins)


def slices(matrices: Mapping[str, Cut], dark: bool = False) -> Picture:
    """Each matrix as a rectangle, inputs downwards and outputs to the right, a colour a rank. Their proportions are real."""
    with style(dark):
        figure = picture(9.5, 3.4)
        axes = figure.subplots()
        largest = max(inputs for inputs, _, _, _ in matrices.values())
        at = 0.0
        gap = 0.2 * largest
        for name, (inputs, outputs, way, bounds) in matrices.items():
            for rank, (low, high) in enumerate(pairwise(bounds)):
                colour = SERIES[rank % len(SERIES)]
                corner, size = ((at + low, 0), (high - low, inputs)) if way == "columns" else ((at, low), (outputs, high - low))
                axes.add_patch(Rectangle(corner, *size, facecolor=colour, edgecolor="#888888", alpha=0.8))
                middle = corner[0] + size[0] / 2, corner[1] + size[1] / 2
                axes.text(*middle, str(rank), ha="center", va="center", color="white", fontsize=10)
            axes.text(at + outputs / 2, -0.06 * largest, name, ha="center", va="bottom", fontsize=11)
            axes.text(at + outputs / 2, inputs + 0.04 * largest, f"{inputs} × {outputs}", ha="center", va="top", fontsize=9)
            at += outputs + gap
        axes.set(xlim=(-gap, at), ylim=(largest * 1.15, -0.2 * largest), aspect="equal")
        axes.axis("off")
    return figure
