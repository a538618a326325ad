"""Pictures and tables. They draw what they are given; no technique imports them."""

from .drafters import anatomy
from .gantt import gantt
from .map import technique_map
from .pictures import cache_growth, matrix, roofline, visibility
from .slices import slices
from .speculation import Written, draft_tree, overlap
from .style import ACTIVITY, SERIES, picture, style
from .timeline import bytes_table, perfetto, timeline, timelines
from .widgets import play, sliders

__all__ = [
    "ACTIVITY", "SERIES", "Written", "anatomy", "bytes_table", "cache_growth", "draft_tree", "gantt", "matrix", "overlap",
    "perfetto", "picture", "play", "roofline", "slices", "sliders", "style", "technique_map", "timeline", "timelines", "visibility",
]  # fmt: skip
