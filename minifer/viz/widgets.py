"""Something to move, where a kernel runs; its last picture, where none does (the site, a printed page)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure


def play(draw: Callable[[int], Figure], count: int, label: str = "step") -> Any:
    """A slider over draw(0) ... draw(count - 1). Without ipywidgets, or without a kernel, the last picture.

    The last picture is what a saved notebook shows too: it is displayed below the slider, and stays when the slider is gone.
    """
    try:
        import ipywidgets
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        return draw(count - 1)
    if getattr(get_ipython(), "kernel", None) is None:
        return draw(count - 1)
    slider = ipywidgets.IntSlider(value=count - 1, min=0, max=count - 1, description=label, continuous_update=False)
    handle = display(draw(count - 1), display_id=True)

    def moved(change: dict[str, Any]) -> None:
        handle.update(draw(change["new"]))

    slider.observe(moved, "value")
    return slider
