"""Pictures of speculation: two distributions and their overlap, who wrote which token, a tree of drafts."""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np
import torch

from .style import SERIES, Picture, picture, style

WRITERS = {"target": SERIES[1], "drafter": SERIES[0]}


def overlap(p: torch.Tensor, q: torch.Tensor, labels: Sequence[str], title: str = "", dark: bool = False) -> Picture:
    """Target p and drafter q over a few tokens [V]: what is kept (their overlap), and what is left for the target to say."""
    x, kept = np.arange(len(labels)), torch.minimum(p, q)
    left = (p - q).clamp(min=0)
    with style(dark):
        figure = picture(9.5, 3.4)
        both, rest = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        both.bar(x - 0.2, p.numpy(), 0.38, color=SERIES[1], label="target p")
        both.bar(x + 0.2, q.numpy(), 0.38, color=SERIES[0], label="drafter q")
        both.bar(x, kept.numpy(), 0.78, fill=False, edgecolor="#888888", lw=2, hatch="//", label=f"kept: {float(kept.sum()):.2f}")
        rest.bar(x, (left / left.sum().clamp(min=1e-9)).numpy(), 0.6, color=SERIES[1])
        rest.set_title("after a rejection")
        both.set(ylabel="probability", title=title or "one draft")
        for axes in (both, rest):
            axes.set_xticks(x, labels)
            axes.set_xlabel("token")
        figure.legend(loc="outside right upper")
    return figure


class Written:
    """A text whose tokens are marked by who wrote them. pieces: (text, "target" or "drafter"), in order.

    A notebook shows it in colour; printed, what a drafter wrote stands in [brackets].
    """

    def __init__(self, pieces: Sequence[tuple[str, str]]) -> None:
        self.pieces = list(pieces)

    def __repr__(self) -> str:
        return "".join(f"[{text}]" if writer == "drafter" else text for text, writer in self.pieces)

    def _repr_html_(self) -> str:
        shares = {writer: sum(who == writer for _, who in self.pieces) for writer in WRITERS}
        legend = " ".join(f"{_mark(f'{writer}: {count} tokens', writer)}" for writer, count in shares.items())
        body = "".join(_mark(text, writer) for text, writer in self.pieces)
        look = "white-space:pre-wrap;font-family:monospace;line-height:1.7"
        return f'<div style="{look}">{legend}\n\n{body}</div>'


def _mark(text: str, writer: str) -> str:
    # Besides their colour, the drafter's tokens are underlined.
    line = "underline" if writer == "drafter" else "none"
    return f'<span style="background:{WRITERS[writer]}44;text-decoration:{line}">{html.escape(text)}</span>'


def draft_tree(
    ids: Sequence[str], parents: Sequence[int], kept: Sequence[int], root: str, title: str = "", dark: bool = False
) -> Picture:
    """A draft from left to right: the root, then the tokens `ids`, each behind its parent (-1: the root); kept ones stand out."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    places: dict[int, tuple[float, float]] = {}
    lines = 0

    def place(node: int, depth: int) -> float:
        nonlocal lines
        heights = [place(child, depth + 1) for child in children.get(node, [])]
        if not heights:
            lines += 1
        places[node] = (depth, sum(heights) / len(heights) if heights else float(lines))
        return places[node][1]

    place(-1, 0)
    with style(dark):
        deepest = max(x for x, _ in places.values())
        figure = picture(2.2 + 1.9 * deepest, 1.2 + 0.42 * lines)
        axes = figure.subplots()
        for node, parent in enumerate(parents):
            (x0, y0), (x1, y1) = places[parent], places[node]
            colour = SERIES[0] if node in kept else "#AAAAAA"
            axes.plot([x0, x1], [y0, y1], "-", color=colour, lw=2.5 if node in kept else 1, zorder=1)
        for node, (x, y) in places.items():
            text = root if node < 0 else ids[node]
            face = SERIES[1] if node < 0 else SERIES[0] if node in kept else "#CCCCCC"
            ink = "#222222" if face == "#CCCCCC" else "white"
            shape = {"boxstyle": "round,pad=0.3", "facecolor": face, "edgecolor": "none"}
            axes.text(x, y, text, ha="center", va="center", family="monospace", fontsize=11, color=ink, bbox=shape)
        axes.set(xlim=(-0.5, deepest + 0.5), ylim=(lines + 0.7, 0.3))
        axes.set_xticks(range(int(deepest) + 1), ["decided", *(f"depth {depth}" for depth in range(1, int(deepest) + 1))])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
        axes.set_title(title)
    return figure
