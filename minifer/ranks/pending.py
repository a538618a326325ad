"""What is under way between a rank and the others of a group: operations in their order, and how a rank waits for them.

Whoever waits for an operation moves all that are open, of all groups of its process, so nothing depends on the order in which
they are waited for. But there is no thread behind it: nothing moves while a rank does something else. A message that does not
fit its pipe stands still while its sender computes, and is stuck if the sender waits elsewhere.

Waiting is spinning at first, then giving way, then sleeping: where there are more ranks than cores, the others must get on.
Whoever waits, or asks again and again whether something is over, is told when a rank of the group has died, when one has
failed (with its own words), and when the time is over. What fails on a rank ends the group there, and the others learn of it:
ranks may be out of step by then, and a later operation would take another one's numbers.
"""

# Methods that torch overloads for callers in C++ are overridden for its Python.
# mypy: disable-error-code="override"
from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Hashable
from contextlib import suppress
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist

from .exchange import Exchange, Steps
from .host import cores
from .segment import Segment

SPINS, YIELDS = 200, 2000  # looks before giving way, and then before sleeping
NAP, LOOK_SECONDS = 50e-6, 0.05  # of one sleep; between two looks at who still lives
Tensors = list[torch.Tensor]


class PeerLost(ConnectionError):
    """Another rank of the group has died, has left, or has failed: whatever the cause of it is, it is not here."""


class PendingOp(dist.Work):
    """An operation under way."""

    def __init__(self, traffic: Traffic, what: str, steps: Steps, results: Tensors) -> None:
        super().__init__()
        self.traffic, self.what, self.steps, self.results = traffic, what, steps, results
        self.done, self.awaits, self.began = False, 0, 0.0
        self.error: BaseException | None = None

    def advance(self) -> bool:
        """As far as it goes now. True if it is over."""
        try:
            self.awaits = next(self.steps)
        except StopIteration:
            self.done = True
        except BaseException as error:  # whoever waits for it is told, and nothing behind it goes on
            self.error, self.done = error, True
            self.traffic.fail(error, self)
            if not isinstance(error, Exception):
                raise
        return self.done

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Until it is over. Raises what went wrong. timeout: that of the group, if none is given."""
        if not self.done:
            self.traffic.finish(self, timeout or self.traffic.timeout)
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        """Whether it is over, well or not; moves all open operations. Those who only ever ask learn of trouble as others do."""
        advance_all()
        if not self.done:
            self.traffic.look(self, self.began, self.traffic.timeout)
        return self.done

    def is_success(self) -> bool:
        """Whether it is over, and well."""
        return self.done and self.error is None

    def exception(self) -> BaseException | None:
        """What went wrong."""
        return self.error

    def result(self) -> Tensors:
        """The tensors that it fills."""
        return self.results

    def get_future(self) -> torch.futures.Future:
        """Of its results, which this waits for."""
        self.wait()
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self.results)
        return future


class Traffic:
    """All that is under way between this rank and the others of one group."""

    open: ClassVar[list[Traffic]] = []  # of this process: those that have something under way

    def __init__(self, segment: Segment, members: tuple[int, ...], timeout: timedelta) -> None:
        """members: the group's ranks as the world numbers them."""
        self.segment, self.members, self.timeout = segment, members, timeout
        self.exchange = Exchange(segment, segment.me, members)
        self.queues: dict[Hashable, deque[PendingOp]] = {}  # in order: collectives; to each rank; from each rank
        self.failure: BaseException | None = None  # the first one
        self._next_look = 0.0
        world = dist.get_world_size() if dist.is_initialized() else len(members)
        self.spins = SPINS if max(world, len(members)) <= cores() else 0

    def start(self, what: str, steps: Steps, results: Tensors, kind: Hashable = "collective") -> PendingOp:
        """Begin an operation; it runs after those of its kind that are open."""
        if self.failure is not None:
            raise PeerLost(self._after_failure(what))
        op = PendingOp(self, what, steps, results)
        queue = self.queues.setdefault(kind, deque())
        if queue or not op.advance():
            op.began = time.monotonic()
            queue.append(op)
            if self not in Traffic.open:
                Traffic.open.append(self)
        return op

    def advance(self) -> bool:
        """Everything that is open here, as far as it goes now. True if something moved."""
        before = self.exchange.moved
        for queue in self.queues.values():
            while queue and queue[0].advance():
                if queue:  # a failure has emptied it
                    queue.popleft()
        return self.exchange.moved != before

    def finish(self, op: PendingOp, timeout: timedelta) -> None:
        """Move what can move until this operation is over."""
        looks, began = 0, time.monotonic()
        while not op.done:
            if advance_all():
                looks = 0
                continue
            looks += 1
            if looks <= self.spins:
                continue
            if looks <= self.spins + YIELDS:
                os.sched_yield()
                continue
            time.sleep(NAP)
            self.look(op, began, timeout)

    def look(self, op: PendingOp, began: float, timeout: timedelta) -> None:
        """Now and then: end the group if this operation, awaited since `began`, cannot end well."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        first = next(queue[0] for queue in self.queues.values() if op in queue)
        awaited = first.awaits
        error = self._trouble(op, awaited, now - began > timeout.total_seconds(), timeout)
        advance_all()  # its last words may have come in between
        if error is not None and not first.done and first.awaits == awaited:
            self.fail(error, op, first)

    def _trouble(self, op: PendingOp, awaited: int, too_late: bool, timeout: timedelta) -> Exception | None:
        """Why waiting for this rank would be in vain. A cause goes before what follows from it."""
        what = f"{op.what} over ranks {list(self.members)}: rank"
        ranks = self.exchange.others if op in self.queues.get("collective", ()) else [awaited]
        words = {rank: self.segment.last_words(rank) for rank in ranks if self.segment.failed[rank]}
        for follows in (False, True):
            for rank, said in words.items():
                if said.startswith(PeerLost.__name__) == follows:
                    return PeerLost(f"{what} {self.members[rank]} has failed: {said}")
            for rank in ranks:
                if self.segment.gone(rank):
                    return PeerLost(f"{what} {self.members[rank]} is gone")
        return TimeoutError(f"{what} {self.members[awaited]} did not come within {timeout}") if too_late else None

    def fail(self, error: BaseException, *by: PendingOp) -> None:
        """End all that is under way, and whatever comes; tell the others. by: the operations that it is the error of."""
        if self.failure is None:
            self.failure = error
            self.segment.fail(f"{type(error).__name__}: {error}")
        self._end_all(error, by)

    def leave(self) -> None:
        """End all that is under way: this rank leaves the group. The others see that it is gone."""
        self.failure = self.failure or PeerLost(f"this rank has left the group of ranks {list(self.members)}")
        self._end_all(self.failure, ())
        with suppress(ValueError):
            Traffic.open.remove(self)
        self.segment.close()

    def _end_all(self, error: BaseException, by: tuple[PendingOp, ...]) -> None:
        for queue in self.queues.values():
            for op in queue:
                if not op.done:
                    op.error, op.done = error if op in by else PeerLost(self._after_failure(op.what)), True
            queue.clear()

    def _after_failure(self, what: str) -> str:
        return f"{what} over ranks {list(self.members)}, which failed before: {self.failure}"


def advance_all() -> bool:
    """Move all that is open in this process as far as it goes. True if something moved."""
    moved = False
    for traffic in list(Traffic.open):
        moved |= traffic.advance()
        if not any(traffic.queues.values()) and traffic in Traffic.open:
            Traffic.open.remove(traffic)
    return moved
