"""Collectives between processes of one host through memory that they share: a backend of torch.distributed, in Python.

Small messages decide how fast ranks decode together, and over sockets each costs more than a layer. Here one costs two writes
and a look. Every rank owns slots that all others read:

    rank 0   write my slot ─► posted[0] = step     wait until all have posted     read all slots ─► taken[0] = step
    rank 1   write my slot ─► posted[1] = step                  "                 read all slots ─► taken[1] = step
    rank 2   write my slot ─► posted[2] = step                  "                 read all slots ─► taken[2] = step
                   ▲                                                                                      │
                   └──────── before a slot is written again, all have taken what stood there ◄────────────┘

    rank 0 ══ pipe ══► rank 1      messages, one after the other; the sender goes on as soon as they fit

segment.py is the memory, exchange.py what a rank does for each collective, and this file what torch.distributed calls, and how
ranks wait. Whoever waits for an operation moves all that are open, of all groups of its process, so nothing depends on the
order in which they are waited for. But there is no thread behind it: nothing moves while a rank does something else. A message
that does not fit its pipe stands still while its sender computes, and is stuck if the sender waits elsewhere.

Waiting is spinning at first, then giving way, then sleeping: where there are more ranks than cores, the others must get on. A
peer that has died ends the wait with an error, and so does the timeout.

Invariant: all ranks of a group call its collectives in the same order, with the same sizes, from one thread; messages of a pair
arrive in the order they were sent. A group that has failed on a rank fails there from then on. Cost: a step takes some ten
microseconds, most of them Python's; large tensors move at the speed of memory.
"""

# Methods that torch overloads for callers in C++ are overridden for its Python.
# mypy: disable-error-code="override"
from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from .exchange import Exchange, Steps, flat, summing_of
from .segment import Segment, cores

NAME = "shared_memory"
SPINS, YIELDS = 200, 2000  # looks before giving way, and then before sleeping
NAP, LOOK_SECONDS = 50e-6, 0.05  # of one sleep; between two looks at who still lives
Tensors = list[torch.Tensor]


class Pending(dist.Work):
    """An operation under way."""

    def __init__(self, group: Group, what: str, steps: Steps, results: Tensors) -> None:
        super().__init__()
        self.group, self.what, self.steps, self.results = group, what, steps, results
        self.done, self.awaits = False, 0
        self.error: BaseException | None = None

    def advance(self) -> bool:
        """As far as it goes now. True if it is over."""
        try:
            self.awaits = next(self.steps)
        except StopIteration:
            self.done = True
        except Exception as error:  # whoever waits for it is told
            self.error, self.done = error, True
            self.group.failure = self.group.failure or error
        return self.done

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Until it is over. Raises what went wrong. timeout: that of the group, if none is given."""
        if not self.done:
            self.group.finish(self, timeout or self.group.timeout)
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        """Whether it is over; moves all open operations."""
        advance_all()
        return self.done

    def is_success(self) -> bool:
        """Whether it is over, and well."""
        return self.done and self.error is None

    def result(self) -> Tensors:
        """The tensors that it fills."""
        return self.results

    def get_future(self) -> torch.futures.Future:
        """Of its results, which this waits for."""
        self.wait()
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self.results)
        return future


class Group(dist.ProcessGroup):
    """The ranks of a group, and what is under way between them and this one. Methods are those that torch.distributed calls."""

    open: ClassVar[list[Group]] = []  # of this process: those that have something under way

    def __init__(self, store: dist.Store, rank: int, ranks: int, timeout: timedelta, members: Sequence[int]) -> None:
        super().__init__(rank, ranks)  # type: ignore[call-arg]  # that of a group in Python
        self.me, self.timeout = rank, timeout
        self.members = tuple(members) or tuple(range(ranks))  # as the world numbers them
        self.segment = Segment(store, rank, ranks, timeout)
        self.exchange = Exchange(self.segment, rank)
        self.queues: dict[Any, deque[Pending]] = {}  # under way, in order: collectives; to each rank; from each rank
        self.name_given = self.description = ""
        self.failure: Exception | None = None  # the first one: from then on ranks may be out of step
        world = dist.get_world_size() if dist.is_initialized() else ranks
        self.spins = SPINS if max(world, ranks) <= cores() else 0

    def allreduce(self, tensors: Tensors, opts: Any) -> Pending:
        steps = self.exchange.all_reduce(flat(tensors[0]), summing_of(opts.reduceOp))
        return self._start("all_reduce", steps, tensors)

    def reduce(self, tensors: Tensors, opts: Any) -> Pending:
        whole = tensors[0] if opts.rootRank == self.me else tensors[0].clone()
        return self._start("reduce", self.exchange.all_reduce(flat(whole), summing_of(opts.reduceOp)), tensors)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Pending:
        return self._start("all_gather", self.exchange.all_gather(outputs[0], inputs[0]), outputs[0])

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Pending:
        return self._start("all_gather", self.exchange.all_gather(self._shares(output), input), [output])

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Pending:
        kept = outputs[0] if opts.rootRank == self.me else []
        return self._start("gather", self.exchange.all_gather(kept, inputs[0]), kept)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Pending:
        steps = self.exchange.reduce_scatter(flat(outputs[0]), inputs[0], summing_of(opts.reduceOp))
        return self._start("reduce_scatter", steps, outputs)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Pending:
        return self.reduce_scatter([output], [self._shares(input)], opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Pending:
        return self._start("all_to_all", self.exchange.all_to_all(outputs, inputs), outputs)

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Pending:
        outputs = list(output.split(output_sizes)) if output_sizes else self._shares(output)
        inputs = list(input.split(input_sizes)) if input_sizes else self._shares(input)
        return self._start("all_to_all", self.exchange.all_to_all(outputs, inputs), [output])

    def broadcast(self, tensors: Tensors, opts: Any) -> Pending:
        return self._start("broadcast", self.exchange.broadcast(flat(tensors[0]), opts.rootRank), tensors)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Pending:
        empty, root = outputs[0].new_empty(0), opts.rootRank
        given = inputs[0] if root == self.me else [empty] * self.size()
        wanted = [outputs[0] if rank == root else empty for rank in range(self.size())]
        return self._start("scatter", self.exchange.all_to_all(wanted, given), outputs)

    def barrier(self, opts: Any = None) -> Pending:
        return self._start("barrier", self.exchange.meet(), [])

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> Pending:
        return self._start("send", self.exchange.send(flat(tensors[0]), to, tag), tensors, ("to", to))

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Pending:
        return self._start("recv", self.exchange.receive(flat(tensors[0]), source, tag), tensors, ("from", source))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Pending:
        raise NotImplementedError("over shared memory a receive names its source")

    def shutdown(self) -> None:
        """Leave the group. What is under way fails."""
        with suppress(ValueError):
            Group.open.remove(self)
        self._fail(ConnectionError(f"this rank has left the group of ranks {list(self.members)}"))
        self.segment.close()

    def abort(self) -> None:
        self.shutdown()

    def finish(self, pending: Pending, timeout: timedelta) -> None:
        """Move what can move until this operation is over."""
        looks, deadline, next_look = 0, time.monotonic() + timeout.total_seconds(), 0.0
        while not pending.done:
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
            now = time.monotonic()
            if now > next_look:
                next_look = now + LOOK_SECONDS
                self._judge(pending, now > deadline, timeout)

    def _judge(self, pending: Pending, too_late: bool, timeout: timedelta) -> None:
        """End an operation that cannot end well."""
        first = next(queue[0] for queue in self.queues.values() if pending in queue)
        awaited = first.awaits
        gone = self.segment.gone(awaited)
        advance_all()  # its last words may have come in between
        if pending.done or not (gone or too_late) or first.done:
            return
        where = f"{pending.what} over ranks {list(self.members)}: rank {self.members[awaited]}"
        error = ConnectionError(f"{where} is gone") if gone else TimeoutError(f"{where} did not come within {timeout}")
        self._fail(error)

    def _fail(self, error: Exception) -> None:
        """End all that is under way, and whatever comes."""
        self.failure = self.failure or error
        for queue in self.queues.values():
            for one in queue:
                one.error, one.done = error, True
            queue.clear()

    def _start(self, what: str, steps: Steps, results: Tensors, kind: Any = "collective") -> Pending:
        if self.failure is not None:
            raise ConnectionError(f"{what} over ranks {list(self.members)}, which failed before: {self.failure}")
        pending = Pending(self, what, steps, results)
        queue = self.queues.setdefault(kind, deque())
        if queue or not pending.advance():
            queue.append(pending)
            if self not in Group.open:
                Group.open.append(self)
        return pending

    # As torch before 2.13 calls them.
    _allgather_base, alltoall_base = all_gather_single, all_to_all_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def _shares(self, tensor: torch.Tensor) -> Tensors:
        """A tensor's equal parts, one a rank."""
        flattened, ranks = flat(tensor), self.size()
        if len(flattened) % ranks:
            raise ValueError(f"{len(flattened)} elements cannot be shared out evenly to {ranks} ranks")
        return list(flattened.view(ranks, -1))

    # A group in Python has no backend below it, so its names are its own to keep; C++ and Python each ask in their own way.
    def getBackendName(self) -> str:
        return NAME

    def getGroupName(self) -> str:
        return self.name_given

    def setGroupName(self, name: str) -> None:
        self.name_given = name

    def getGroupDesc(self) -> str:
        return self.description

    def setGroupDesc(self, description: str) -> None:
        self.description = description

    def _set_group_name(self, name: str) -> None:
        self.name_given = name

    def _set_group_desc(self, description: str) -> None:
        self.description = description

    @property
    def group_name(self) -> str:
        return self.name_given

    @property
    def group_desc(self) -> str:
        return self.description


def advance_all() -> bool:
    """Move all that is open in this process as far as it goes. True if something moved."""
    moved = False
    for group in list(Group.open):
        before = group.exchange.moved
        for queue in group.queues.values():
            while queue and queue[0].advance():
                queue.popleft()
        moved |= group.exchange.moved != before
        if not any(group.queues.values()):
            Group.open.remove(group)
    return moved


def _create(options: Any, _: Any) -> Group:
    """What torch.distributed calls for a new group."""
    members = options.global_ranks_in_group
    return Group(options.store, options.group_rank, options.group_size, options.timeout, members)


def register() -> str:
    """Make the backend known to torch.distributed; its name."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    return NAME
