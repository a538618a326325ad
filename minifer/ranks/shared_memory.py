"""Collectives between processes of one host through memory that they share: a backend of torch.distributed, in Python.

Small messages decide how fast ranks decode together, and over sockets each costs more than a layer. Here one costs two writes
and a look. Every rank owns slots that all others read:

    rank 0   write my slot ─► posted[0] = step     wait until all have posted     read all slots ─► taken[0] = step
    rank 1   write my slot ─► posted[1] = step                  "                 read all slots ─► taken[1] = step
    rank 2   write my slot ─► posted[2] = step                  "                 read all slots ─► taken[2] = step
                   ▲                                                                                      │
                   └──────── before a slot is written again, all have taken what stood there ◄────────────┘

    rank 0 ══ pipe ══► rank 1      messages, one after the other; the sender goes on as soon as they fit

segment.py is the memory, exchange.py what a rank does for each collective, call.py what ranks compare before they do it,
pending.py how they wait, and this file what torch.distributed calls.

Invariant: all ranks of a group call its collectives in the same order, with the same sizes, from one thread (what differs is an
error on all of them); messages of a pair arrive in the order they were sent. A group that has failed on a rank has failed on
all. Cost: a step takes some ten microseconds, most of them Python's; large tensors move at the speed of memory.
"""

# Methods that torch overloads for callers in C++ are overridden for its Python.
# mypy: disable-error-code="override"
from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .call import REDUCTIONS, Call, Summing, reduction
from .exchange import Steps, flat
from .pending import PendingOp, Tensors, Traffic
from .segment import Segment

NAME = "shared_memory"


class Group(dist.ProcessGroup):
    """The ranks of a group. Methods are those that torch.distributed calls."""

    def __init__(self, store: dist.Store, rank: int, ranks: int, timeout: timedelta, members: Sequence[int]) -> None:
        super().__init__(rank, ranks)  # type: ignore[call-arg]  # that of a group in Python
        self.me = rank
        self.members = tuple(members) or tuple(range(ranks))  # as the world numbers them
        self.traffic = Traffic(Segment(store, rank, ranks, timeout), self.members, timeout)
        self.exchange = self.traffic.exchange
        self.name_given = self.description = ""

    def _start(self, call: Call, steps: Steps, results: Tensors) -> PendingOp:
        return self.traffic.start(call.kind, self.exchange.agreed(call, steps), results)

    def allreduce(self, tensors: Tensors, opts: Any) -> PendingOp:
        given, op, summing = flat(tensors[0]), *summing_of(opts)
        return self._start(Call("all_reduce", given.nbytes, given.dtype, op), self.exchange.all_reduce(given, summing), tensors)

    def reduce(self, tensors: Tensors, opts: Any) -> PendingOp:
        root, op, summing = opts.rootRank, *summing_of(opts)
        whole = flat(tensors[0] if root == self.me else tensors[0].clone())
        return self._start(Call("reduce", whole.nbytes, whole.dtype, op, root), self.exchange.all_reduce(whole, summing), tensors)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> PendingOp:
        call = Call("all_gather", inputs[0].nbytes, inputs[0].dtype)
        return self._start(call, self.exchange.all_gather(outputs[0], inputs[0]), outputs[0])

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> PendingOp:
        call = Call("all_gather", input.nbytes, input.dtype)
        return self._start(call, self.exchange.all_gather(self._shares(output), input), [output])

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> PendingOp:
        kept, root = outputs[0] if opts.rootRank == self.me else [], opts.rootRank
        call = Call("gather", inputs[0].nbytes, inputs[0].dtype, root=root)
        return self._start(call, self.exchange.all_gather(kept, inputs[0]), kept)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> PendingOp:
        mine, op, summing = flat(outputs[0]), *summing_of(opts)
        steps = self.exchange.reduce_scatter(mine, inputs[0], summing)
        return self._start(Call("reduce_scatter", mine.nbytes, mine.dtype, op), steps, outputs)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> PendingOp:
        return self.reduce_scatter([output], [self._shares(input)], opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> PendingOp:
        call = Call("all_to_all", dtype=inputs[0].dtype)  # sizes may differ: they are told as the first thing
        return self._start(call, self.exchange.all_to_all(outputs, inputs), outputs)

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> PendingOp:
        outputs = list(output.split(output_sizes)) if output_sizes else self._shares(output)
        inputs = list(input.split(input_sizes)) if input_sizes else self._shares(input)
        return self._start(Call("all_to_all", dtype=input.dtype), self.exchange.all_to_all(outputs, inputs), [output])

    def broadcast(self, tensors: Tensors, opts: Any) -> PendingOp:
        given, root = flat(tensors[0]), opts.rootRank
        return self._start(Call("broadcast", given.nbytes, given.dtype, root=root), self.exchange.broadcast(given, root), tensors)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> PendingOp:
        mine, root = outputs[0], opts.rootRank
        empty = mine.new_empty(0)
        given = inputs[0] if root == self.me else [empty] * self.size()
        wanted = [mine if rank == root else empty for rank in range(self.size())]
        return self._start(Call("scatter", mine.nbytes, mine.dtype, root=root), self.exchange.all_to_all(wanted, given), outputs)

    def barrier(self, opts: Any = None) -> PendingOp:
        return self._start(Call("barrier"), self.exchange.meet(), [])

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> PendingOp:
        return self.traffic.start("send", self.exchange.send(flat(tensors[0]), to, tag), tensors, ("to", to))

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> PendingOp:
        return self.traffic.start("recv", self.exchange.receive(flat(tensors[0]), source, tag), tensors, ("from", source))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> PendingOp:
        raise NotImplementedError("over shared memory a receive names its source")

    def shutdown(self) -> None:
        """Leave the group. What is under way fails."""
        self.traffic.leave()

    def abort(self) -> None:
        self.shutdown()

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


def summing_of(opts: Any) -> tuple[int, Summing]:
    """The place of a call's reduction, and how it is computed."""
    op = reduction(opts.reduceOp)
    return op, REDUCTIONS[op][1]


def _create(options: Any, _: Any) -> Group:
    """What torch.distributed calls for a new group."""
    members = options.global_ranks_in_group
    return Group(options.store, options.group_rank, options.group_size, options.timeout, members)


def register() -> str:
    """Make the backend known to torch.distributed; its name."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    return NAME
