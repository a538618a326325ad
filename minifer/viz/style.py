"""One look for every picture: colours that colour-blind readers can tell apart, units on every axis, light and dark.

The three things that a rank does have one colour each, the same in every picture. The colours are Okabe and Ito's.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.figure import Figure
from PIL import Image

ACTIVITY = {"computing": "#0072B2", "communicating": "#E69F00", "waiting": "#BBBBBB"}
# For things that are told apart otherwise: ranks, techniques, rows.
SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#999933")
SEQUENTIAL = "cividis"  # for values; readable in grey too


class Picture(Figure):
    """A figure that a notebook shows when it is a cell's last value, with no pyplot and no global state behind it."""

    def _repr_png_(self) -> bytes:
        full, small = io.BytesIO(), io.BytesIO()
        self.savefig(full, format="png")
        Image.open(full).convert("RGB").quantize(256).save(small, format="png", optimize=True)  # a third of the bytes
        return small.getvalue()


_COMMON: dict[str, Any] = {
    "figure.constrained_layout.use": True,
    "figure.dpi": 110,
    "savefig.dpi": 110,
    "font.size": 12,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.hashsalt": "minifer",  # the same picture is the same file
    "axes.prop_cycle": cycler(color=SERIES),
}
_INKS = {False: ("#222222", "#ffffff", "#dddddd"), True: ("#e6e6e6", "#0d1117", "#444444")}  # text, ground, lines


@contextlib.contextmanager
def style(dark: bool = False) -> Iterator[None]:
    """Pictures made in this block look like minifer's."""
    ink, ground, lines = _INKS[dark]
    colours = {
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": ink,
        "xtick.color": ink,
        "ytick.color": ink,
        "figure.facecolor": ground,
        "axes.facecolor": ground,
        "savefig.facecolor": ground,
        "grid.color": lines,
    }
    look: Any = _COMMON | colours
    with matplotlib.rc_context(look):
        yield


def picture(width: float, height: float) -> Picture:
    """An empty picture of this size in inches. Called inside of `style`."""
    return Picture(figsize=(width, height))
