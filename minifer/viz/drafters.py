"""The drafters opened side by side: what each reads of its target, what it holds itself, and what it keeps between rounds."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb

from .style import SERIES, Picture, picture, style

PARTS = ("text so far", "embedding", "layers' states", "last hidden state", "keys and values", "head")
# drafter: (the parts of the target that it reads, what it holds itself, what it keeps between rounds, how it drafts)
DRAFTERS: dict[str, tuple[tuple[int, ...], str, str, str]] = {
    "prompt lookup": ((0,), "nothing", "where n-grams end", "copies"),
    "draft model": ((0,), "a whole small model", "keys and values\nof all its layers", "one by one"),
    "Medusa": ((3,), "heads with\ntheir own tables", "nothing", "all at once"),
    "EAGLE": ((1, 2, 5), "fuse, one layer", "keys and values\nof its one layer", "one by one, a tree"),
    "DeepSeek": ((1, 3, 5), "join, one full layer", "keys and values\nof its one layer", "one by one"),
    "Gemma": ((1, 3, 4), "four small layers,\na small table", "nothing", "one by one"),
}


def anatomy(numbers: Mapping[str, str] | None = None, dark: bool = False) -> Picture:
    """A panel a drafter: parts of the target on the left, filled where it reads them; itself; what it keeps.

    numbers: {drafter: a line to write under its name}.
    """
    with style(dark):
        figure = picture(10.5, 7.2)
        panels = figure.subplots(2, 3).flatten()
        for axes, (name, parts), colour in zip(panels, DRAFTERS.items(), SERIES):
            _panel(axes, parts, colour)
            axes.set_title(name, color=colour)
            axes.text(0, -0.3, (numbers or {}).get(name, ""), fontsize=10, va="center")
            for x, what in ((1.0, "target"), (4.1, "drafter")):
                axes.text(x, 6.65, what, ha="center", fontsize=10, alpha=0.7)
    return figure


def _panel(axes: Axes, drafter: tuple[tuple[int, ...], str, str, str], colour: str) -> None:
    reads, holds, keeps, how = drafter
    for at, part in enumerate(PARTS):
        y, read = 6 - at, at in reads
        _box(axes, 1.0, y, part, colour if read else "none", read)
        if read:
            axes.annotate("", (3.05, 4.6), (1.95, y), arrowprops={"arrowstyle": "->", "color": colour, "lw": 1.6})
    _box(axes, 4.1, 4.6, holds, colour, True)
    axes.text(4.1, 5.75, how, ha="center", fontsize=10, style="italic")
    filled = keeps != "nothing"
    _box(axes, 4.1, 2.2, keeps if filled else "keeps nothing", colour if filled else "none", filled)
    if filled:
        axes.annotate("", (4.1, 2.9), (4.1, 3.9), arrowprops={"arrowstyle": "<->", "color": colour, "lw": 1.6})
    axes.set(xlim=(0, 5.4), ylim=(-0.7, 6.9))
    axes.axis("off")


def _box(axes: Axes, x: float, y: float, text: str, face: str, filled: bool) -> None:
    shape = {"boxstyle": "round,pad=0.35", "facecolor": face, "edgecolor": "#888888", "lw": 1.0}
    ink = {"color": "white" if sum(to_rgb(face)) < 1.6 else "#222222"} if filled else {"alpha": 0.55}
    axes.text(x, y, text, ha="center", va="center", fontsize=9, bbox=shape, **ink)  # type: ignore[arg-type]
