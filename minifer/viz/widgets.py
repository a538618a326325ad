"""Something to move, where a kernel runs; its last picture, where none does (the site, a printed page)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure


def play(draw: Callable[[int], Figure], count: int, label: str = "step") -> Any:
    """A slider over draw(0) ... draw(count - 1). Without ipywidgets, or without a kernel, the last picture.

    The last picture is what a saved notebook shows too: it is displayed below the slider, and stays when the slider is gone.
    """
    return _moved(lambda **at: draw(at[label]), {label: (0, count - 1)}, {label: count - 1})


def sliders(draw: Callable[..., Figure], start: dict[str, int], **ranges: tuple[int, int]) -> Any:
    """A slider for each argument of draw, from its smallest to its largest value.

    start: what is drawn first, and where there is no kernel.
    """
    return _moved(draw, ranges, start)


def _moved(draw: Callable[..., Figure], ranges: dict[str, tuple[int, int]], start: dict[str, int]) -> Any:
    try:
        import ipywidgets
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        return draw(**start)
    if getattr(get_ipython(), "kernel", None) is None:
        return draw(**start)
    handles = {
        name: ipywidgets.IntSlider(value=start[name], min=low, max=high, description=name, continuous_update=False)
        for name, (low, high) in ranges.items()
    }
    shown = display(draw(**start), display_id=True)

    def moved(_: dict[str, Any]) -> None:
        shown.update(draw(**{name: handle.value for name, handle in handles.items()}))

    for handle in handles.values():
        handle.observe(moved, "value")
    return next(iter(handles.values())) if len(handles) == 1 else ipywidgets.VBox(list(handles.values()))
