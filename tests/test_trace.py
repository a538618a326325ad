"""The trace: what it counts, how it times, how it cuts a rank's time."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from helpers import plain_model

from minifer import decode, trace
from minifer.ranks.trace import Event, Record


def test_kinds_bytes_and_groups(on_ranks):
    def rank():
        n, me = dist.get_world_size(), dist.get_rank()
        pair = dist.new_group([0, 2])
        with trace.record() as record:
            dist.all_reduce(torch.ones(100))
            dist.all_gather_single(torch.empty(4 * n, dtype=torch.int64), torch.ones(4, dtype=torch.int64))
            dist.all_gather([torch.empty(5) for _ in range(n)], torch.ones(5))
            dist.reduce_scatter_single(torch.empty(2), torch.ones(2 * n))
            dist.all_to_all_single(torch.empty(n), torch.ones(n))
            dist.broadcast(torch.ones(7, dtype=torch.bfloat16), 0)
            if me in (0, 2):
                dist.all_reduce(torch.ones(1), group=pair)
            if me == 0:
                dist.send(torch.ones(3), 1)
            if me == 1:
                dist.recv(torch.empty(3), 0)
        dist.all_reduce(torch.ones(1))  # outside: not recorded
        return record

    records = on_ranks(3, rank)
    common = [("all_reduce", 400), ("all_gather_single", 96), ("all_gather", 60), ("reduce_scatter_single", 24)]
    common += [("all_to_all_single", 12), ("broadcast", 14)]
    for record in records:
        assert [(event.kind, event.bytes) for event in record.events[:6]] == common
        assert all(event.group == (0, 1, 2) for event in record.events[:6])
        assert record.start <= record.events[0].start <= record.events[0].end <= record.end
    last = [[(event.kind, event.bytes, event.group, event.peer) for event in record.events[6:]] for record in records]
    assert last[0] == [("all_reduce", 4, (0, 2), None), ("send", 12, (0, 1, 2), 1)]
    assert last[1] == [("recv", 12, (0, 1, 2), 0)] and last[2] == [("all_reduce", 4, (0, 2), None)]
    assert records[0].bytes == 606 + 16 and records[1].bytes == 606 and records[0].count("all_reduce") == 2


def test_wire_bytes_of_a_ring():
    def of(kind, size=1000):
        return Event(kind, (0, 1, 2, 3), size, 0, 0, 0).wire_bytes

    assert (of("all_reduce"), of("all_gather_single"), of("reduce_scatter"), of("all_to_all_single")) == (1500, 750, 750, 750)
    assert (of("broadcast"), of("send"), of("recv")) == (1000, 1000, 0)


def test_a_late_rank_makes_the_other_wait(on_ranks):
    def rank():
        dist.all_reduce(torch.ones(1))
        with trace.record() as record:
            if dist.get_rank() == 1:
                time.sleep(0.3)
            dist.all_reduce(torch.ones(1))
            time.sleep(0.05)
        return record

    lines = trace.timeline(on_ranks(2, rank))
    assert trace.seconds(lines[0], "waiting") >= 0.29
    assert trace.seconds(lines[1], "waiting") < 0.05 and trace.seconds(lines[1], "computing") >= 0.34
    for line in lines:  # a rank's time has no holes and no overlaps
        assert all(a.end == pytest.approx(b.start) for a, b in zip(line, line[1:]))


def test_an_asynchronous_call_ends_when_it_was_waited_for(on_ranks):
    def rank():
        me = dist.get_rank()
        with trace.record() as record:
            if me == 1:
                time.sleep(0.2)
            buffer = torch.empty(4)
            works = [dist.isend(torch.full((4,), float(me)), 1 - me), dist.irecv(buffer, 1 - me)]
            time.sleep(0.1)  # computing while it travels
            for work in works:
                work.wait()
            reduced = dist.all_reduce(buffer, async_op=True)
            assert reduced.wait()
        return record, buffer.tolist()

    results = on_ranks(2, rank)
    assert [values for _, values in results] == [[1.0] * 4] * 2
    records = [record for record, _ in results]
    received = records[0].events[1]
    assert received.kind == "irecv" and received.wait - received.start >= 0.09 and received.end - received.start >= 0.19
    line = trace.timeline(records)[0]
    # Rank 0 computed for 0.1 s, then waited for a sender that came 0.2 s late.
    assert line[0].what == "computing" and line[0].seconds >= 0.09
    waited = next(stretch for stretch in line if stretch.what == "waiting" and stretch.kind == "irecv")
    assert 0.05 < waited.seconds < 0.19


def test_spans_of_modules_and_hooks_that_go(checkpoint):
    model = plain_model(checkpoint("llama"))
    with trace.record(model) as record:
        decode.generate(model, [[1, 2, 3]], 3)
    assert [span.name for span in record.spans] == [
        *["chunks.0.entrance", *(f"chunks.0.layers.{layer}" for layer in range(5)), "chunks.0.exit"] * 3
    ]
    assert all(span.end > span.start for span in record.spans) and record.events == []
    decode.generate(model, [[1, 2, 3]], 3)
    assert len(record.spans) == 21 and not any(module._forward_hooks for module in model.modules())


def test_timeline_of_made_up_records():
    """Two all-reduces; rank 1 comes 2 s late to the first, rank 0 1 s late to the second."""
    group = (0, 1)
    first = Record(0, 0, 10, [Event("all_reduce", group, 8, 1, 1, 4), Event("all_reduce", group, 8, 7, 7, 8)])
    second = Record(1, 0, 10, [Event("all_reduce", group, 8, 3, 3, 4), Event("all_reduce", group, 8, 6, 6, 8)])
    shown = [[(stretch.what, stretch.start, stretch.end) for stretch in line] for line in trace.timeline([first, second])]
    computing, waiting, moving = "computing", "waiting", "communicating"
    assert shown[0] == [(computing, 0, 1), (waiting, 1, 3), (moving, 3, 4), (computing, 4, 7), (moving, 7, 8), (computing, 8, 10)]
    assert shown[1] == [(computing, 0, 3), (moving, 3, 4), (computing, 4, 6), (waiting, 6, 7), (moving, 7, 8), (computing, 8, 10)]


def test_a_transfer_is_not_taken_for_a_collective_of_two():
    """Rank 1 posts its receive early; the all-reduce between is on time."""
    group = (0, 1)
    first = Record(0, 0, 8, [Event("all_reduce", group, 8, 1, 1, 2), Event("send", group, 4, 5, 5, 6, peer=1)])
    second = Record(1, 0, 8, [Event("irecv", group, 4, 0, 5, 6, peer=0), Event("all_reduce", group, 8, 1, 1, 2)])
    assert [trace.seconds(line, "waiting") for line in trace.timeline([first, second])] == [0, 0]
