"""Pictures: that they show what they are given, in one style."""

from __future__ import annotations

import json

import pytest
import torch
from matplotlib.colors import to_hex

from minifer import viz
from minifer.model.passes import Pass, Span
from minifer.pipeline_schedules import one_forward_one_backward, simulate
from minifer.ranks.trace import Event, Record
from minifer.ranks.trace import Span as TraceSpan
from minifer.viz.drafters import DRAFTERS, PARTS

GROUP = (0, 1)
RECORDS = [
    Record(0, 10.0, 10.010, [Event("all_reduce", GROUP, 800, 10.001, 10.001, 10.004)], [TraceSpan("layer", 10.004, 10.009)]),
    Record(
        1,
        10.0,
        10.010,
        [Event("all_reduce", GROUP, 800, 10.003, 10.003, 10.004), Event("send", GROUP, 8, 10.005, 10.005, 10.006, 0)],
    ),
]


def test_timeline_bars_are_the_ranks_time():
    [axes] = viz.timeline(RECORDS, "title").axes
    found = {to_hex(bars.get_facecolor()[0]).upper(): bars.get_paths() for bars in axes.collections if len(bars.get_paths())}
    assert set(found) <= {colour.upper() for colour in viz.ACTIVITY.values()}
    waiting = found[viz.ACTIVITY["waiting"].upper()]
    assert waiting[0].get_extents().bounds[::2] == pytest.approx((1.0, 2.0), abs=1e-6)  # ms
    assert axes.get_xlabel() == "time (ms)" and [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]
    with pytest.raises(ValueError, match="a record at least"):
        viz.timeline([])


def test_bytes_table():
    from rich.console import Console

    console = Console(width=100, record=True, file=open("/dev/null", "w"))
    console.print(viz.bytes_table(RECORDS, tokens=4))
    text = console.export_text()
    assert "400.0" in text and "all_reduce" in text and "send" in text and "(computed, ring)" in text


def test_perfetto_files_hold_every_event(tmp_path):
    viz.perfetto(RECORDS, tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert {event["ph"] for event in events} == {"X", "M"} and all(event["dur"] >= 0 and event["ts"] >= 0 for event in complete)
    calls = [(event["pid"], event["name"], event["args"]["bytes"]) for event in complete if event["tid"] == 1]
    assert calls == [(0, "all_reduce", 800), (1, "all_reduce", 800), (1, "send", 8)]
    [module] = [event for event in complete if event["tid"] == 0]
    assert module["name"] == "layer" and module["dur"] == pytest.approx(5000)
    assert any(event["name"].startswith("waiting") and event["dur"] == pytest.approx(2000) for event in complete)


def seen(pass_: Pass, window=None) -> list[list[list[int]]]:
    panels = viz.visibility(pass_, window).axes
    return [axes.collections[0].get_array().reshape(span.count, -1).astype(int).tolist() for axes, span in zip(panels, pass_.spans)]


def test_visibility_shows_what_attention_uses():
    pass_ = Pass(torch.zeros(6, dtype=torch.int64), (Span(0, 0, 3), Span(1, 3, 2), Span(2, 4, 1)), (0,))
    assert seen(pass_) == [[[1, 0, 0], [1, 1, 0], [1, 1, 1]], [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], [[1, 1, 1, 1, 1]]]
    assert seen(pass_, 2) == [[[1, 0, 0], [1, 1, 0], [0, 1, 1]], [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]], [[0, 0, 0, 1, 1]]]


def test_every_picture_has_units_and_draws_in_both_grounds():
    pictures = [
        lambda dark: viz.cache_growth([[1, 2], [2, 3]], 1000, "t", dark=dark),
        lambda dark: viz.matrix(torch.eye(3), "t", dark=dark),
        lambda dark: viz.roofline(1e12, 1e10, {"a": (1.0, 5e9)}, "t", dark=dark),
        lambda dark: viz.timelines([("a", RECORDS), ("b", RECORDS)], dark=dark),
        lambda dark: viz.technique_map(dark=dark),
    ]
    for draw in pictures:
        light, dark = draw(False), draw(True)
        assert light._repr_png_().startswith(b"\x89PNG") and light._repr_png_() != dark._repr_png_()
        assert light.get_facecolor() != dark.get_facecolor()
        assert len(light._repr_png_()) < 100_000
    assert "MB" in pictures[0](False).axes[0].get_ylabel() and "GFLOP/s" in pictures[2](False).axes[0].get_ylabel()


def test_play_without_a_kernel_is_the_last_picture():
    drawn = []
    shown = viz.play(lambda step: drawn.append(step) or viz.matrix(torch.eye(2)), 5)
    assert drawn == [4] and shown._repr_png_()


def test_overlap_shows_what_is_kept_and_what_is_left():
    figure = viz.overlap(torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5]), ["a", "b", "c"])
    both, rest = figure.axes
    assert [bar.get_height() for bar in rest.patches] == pytest.approx([1, 0, 0])
    assert [bar.get_height() for bar in both.patches[6:]] == pytest.approx([0.2, 0.3, 0.2])
    assert any("0.70" in text.get_text() for text in figure.legends[0].get_texts())


def test_written_text_is_marked_and_whole():
    text = viz.Written([("def ", "target"), ("f(x<1)", "drafter"), (":", "target")])
    assert repr(text) == "def [f(x<1)]:"
    shown = text._repr_html_()
    assert "f(x&lt;1)" in shown and "target: 2 tokens" in shown and shown.count("underline") == 2  # the legend and the token


def test_a_draft_tree_has_a_box_a_node():
    figure = viz.draft_tree(["a", "b", "c"], [-1, -1, 0], kept=[0], root="r", title="t")
    [axes] = figure.axes
    assert [text.get_text() for text in axes.texts] == ["c", "a", "b", "r"]
    places = {text.get_text(): text.get_position() for text in axes.texts}
    assert places["c"][0] == 2 and places["a"][0] == places["b"][0] == 1 and places["a"][1] != places["b"][1]
    assert to_hex(axes.texts[1].get_bbox_patch().get_facecolor()).upper() == viz.SERIES[0]


def test_drafters_side_by_side():
    figure = viz.anatomy({"EAGLE": "1 M"})
    assert [axes.get_title(loc="left") for axes in figure.axes] == list(DRAFTERS)
    for axes, (reads, _, keeps, _) in zip(figure.axes, DRAFTERS.values()):
        boxes = [text for text in axes.texts if text.get_bbox_patch() is not None]
        filled = [text.get_text() for text in boxes[: len(PARTS)] if text.get_bbox_patch().get_facecolor()[3] > 0]
        assert filled == [PARTS[part] for part in reads]
        assert (boxes[-1].get_text() == "keeps nothing") == (keeps == "nothing")
    assert any(text.get_text() == "1 M" for text in figure.axes[3].texts)


def test_a_gantt_chart_shows_every_step():
    lines = simulate(one_forward_one_backward(3, 4), lambda stage, step: 2.0 if step.backward else 1.0)
    [axes] = viz.gantt(lines, title="1F1B").axes
    assert len(axes.patches) == 3 * 8 and axes.get_xlim()[1] == max(slot.end for line in lines for slot in line)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["stage 0", "stage 1", "stage 2"]


def test_sliders_without_a_kernel_draw_where_they_start():
    drawn = []
    shown = viz.sliders(lambda a, b: drawn.append((a, b)) or viz.matrix(torch.eye(2)), {"a": 2, "b": 3}, a=(1, 4), b=(1, 5))
    assert drawn == [(2, 3)] and shown.axes
