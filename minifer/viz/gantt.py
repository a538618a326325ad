"""Which stage runs which micro-batch when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.patches import Rectangle

from .style import SERIES, Picture, picture, style


def gantt(lines: Sequence[Sequence[Any]], title: str = "", dark: bool = False) -> Picture:
    """lines: of each stage, what it runs: (step, start, end) with step.backward, step.micro_batch and step.chunk.

    A colour a micro-batch; backward steps are paler, further chunks hatched.
    """
    end = max(slot.end for line in lines for slot in line)
    with style(dark):
        figure = picture(9.5, 0.9 + 0.5 * len(lines))
        axes = figure.subplots()
        for stage, line in enumerate(lines):
            for step, start, stop in line:
                colour = SERIES[step.micro_batch % len(SERIES)]
                bar = Rectangle(
                    (start, stage - 0.42), stop - start, 0.84, facecolor=colour, edgecolor="white", hatch="//" * step.chunk
                )
                bar.set_alpha(0.5 if step.backward else 0.95)
                axes.add_patch(bar)
                axes.text((start + stop) / 2, stage, str(step.micro_batch), ha="center", va="center", fontsize=9, color="white")
        axes.set(xlim=(0, end), ylim=(len(lines) - 0.4, -0.6), xlabel="turns")
        axes.set_yticks(range(len(lines)), [f"stage {stage}" for stage in range(len(lines))])
        axes.set_title(title)
    return figure
