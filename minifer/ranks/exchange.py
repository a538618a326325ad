"""How data goes round between ranks that share memory: each collective as the steps that one rank takes.

A step: write my slot; wait until all have; read theirs; say so. Before a slot is written again all must have said so, which with
two slots a rank means that the fastest is one step ahead of the slowest and no more:

    slot 0    step 2           step 4           step 6
    slot 1             step 3           step 5
                       └─ written while others still read step 2

What fits into a slot takes one step, in which everyone adds up everything ("one shot"). More goes in chunks. If more than two
ranks sum a large tensor, a chunk takes two steps: each rank sums its share, then all read all shares. Sums go in the order of
ranks everywhere, so all ranks hold the same bits.

Every collective is a generator: it yields the rank that it waits for, and goes on when it is resumed. All ranks take the steps of
their collectives in the same order. Messages from rank to rank have a pipe for each pair and know nothing of steps.

Bytes through the slots, S those of the tensor, n ranks: all-reduce writes S and reads n S (shared out: S + S/n, and 2 S at most);
all-gather, S a rank's share, writes S and reads n S.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist

from .segment import SLOT_BYTES, SLOTS, Segment

ONE_SHOT_BYTES = 32 << 10  # a sum over more than two ranks is shared out above this
HEADER = ctypes.c_int64 * 2  # before a message: its bytes, its tag

Steps = Generator[int, None, None]  # yields the rank that it waits for
Summing = Callable[[torch.Tensor, torch.Tensor], object]  # (what all ranks gave [n, elements], where the result goes [elements])
copy = ctypes.memmove  # (to, from, bytes), addresses


class Exchange:
    """What one rank does for its part of each collective."""

    def __init__(self, segment: Segment, rank: int) -> None:
        self.segment, self.me, self.ranks = segment, rank, segment.ranks
        self.others = [other for other in range(segment.ranks) if other != rank]
        self.posted, self.taken = segment.posted, segment.taken
        self.step = 0  # the same on all ranks
        self.moved = 0  # grows with every step taken and every message moved

    def all_reduce(self, tensor: torch.Tensor, summing: Summing) -> Steps:
        size, n = tensor.element_size(), self.ranks
        shared = n > 2 and tensor.nbytes > ONE_SHOT_BYTES
        for part in tensor.split(SLOT_BYTES // size) if tensor.nbytes > SLOT_BYTES else [tensor]:
            yield from self._put((0, part.data_ptr(), part.nbytes))
            yield from self._there(self.others)
            slots = self.segment.slots(self.step, tensor.dtype)
            if not shared:
                summing(slots[:, : len(part)], part)
                self._took()
                continue
            bounds = [len(part) * rank // n for rank in range(n + 1)]
            mine = part[bounds[self.me] : bounds[self.me + 1]]
            summing(slots[:, bounds[self.me] : bounds[self.me + 1]], mine)
            self._took()
            yield from self._put((0, mine.data_ptr(), mine.nbytes))
            yield from self._there(self.others)
            for rank in self.others:
                low, high = bounds[rank : rank + 2]
                copy(part.data_ptr() + low * size, self.segment.slot(rank, self.step), (high - low) * size)
            self._took()

    def all_gather(self, outputs: Sequence[torch.Tensor], given: torch.Tensor) -> Steps:
        """outputs: one a rank, or none where nothing is to be kept."""
        into, start = [flat(output) for output in outputs], flat(given).data_ptr()
        if any(output.nbytes != given.nbytes for output in into):
            raise ValueError(f"all ranks give as much: {given.nbytes} bytes here, room for {[one.nbytes for one in into]}")
        for at, size in cut(given.nbytes, SLOT_BYTES):
            yield from self._put((0, start + at, size))
            yield from self._there(self.others)
            for rank, output in enumerate(into):
                copy(output.data_ptr() + at, self.segment.slot(rank, self.step), size)
            self._took()

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], summing: Summing) -> Steps:
        given, size = [flat(one) for one in inputs], output.element_size()
        if any(one.nbytes != output.nbytes for one in given):
            raise ValueError(f"all shares are alike: {[one.nbytes for one in given]} bytes given, {output.nbytes} awaited")
        room = SLOT_BYTES // self.ranks // size  # elements of each share in a slot
        for at, count in cut(len(output), room):
            pieces = [(rank * room * size, one.data_ptr() + at * size, count * size) for rank, one in enumerate(given)]
            yield from self._put(*pieces)
            yield from self._there(self.others)
            slots = self.segment.slots(self.step, output.dtype)
            summing(slots[:, self.me * room : self.me * room + count], output[at : at + count])
            self._took()

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Steps:
        """First how much goes where, which nobody else knows; then the shares, in as many steps as the largest needs."""
        given, into, n = [flat(one) for one in inputs], [flat(one) for one in outputs], self.ranks
        sizes = torch.tensor([one.nbytes for one in given])
        table = [torch.empty(n, dtype=torch.int64) for _ in range(n)]
        yield from self.all_gather(table, sizes)
        for rank, (row, output) in enumerate(zip(table, into)):
            if row[self.me] != output.nbytes:
                raise ValueError(f"rank {rank} gives {row[self.me]} bytes, {output.nbytes} are awaited")
        room, largest = SLOT_BYTES // n, max(int(row.max()) for row in table)
        for at, _ in cut(largest, room):

            def left(one: torch.Tensor, at: int = at) -> int:
                return max(0, min(room, one.nbytes - at))

            yield from self._put(*[(rank * room, one.data_ptr() + at, left(one)) for rank, one in enumerate(given)])
            yield from self._there(self.others)
            for rank, output in enumerate(into):
                copy(output.data_ptr() + at, self.segment.slot(rank, self.step) + self.me * room, left(output))
            self._took()

    def broadcast(self, tensor: torch.Tensor, root: int) -> Steps:
        for at, size in cut(tensor.nbytes, SLOT_BYTES):
            if self.me == root:
                yield from self._put((0, tensor.data_ptr() + at, size))
            else:
                self.step += 1
                yield from self._there([root])
                copy(tensor.data_ptr() + at, self.segment.slot(root, self.step), size)
            self._took()

    def meet(self) -> Steps:
        yield from self._put()
        yield from self._there(self.others)
        self._took()

    def _put(self, *pieces: tuple[int, int, int]) -> Steps:
        """Begin a step: (offset, address, bytes) each into my slot, as soon as all have read what stood there."""
        self.step += 1
        for rank in self.others:
            while self.taken[rank] < self.step - SLOTS:
                yield rank
        slot = self.segment.slot(self.me, self.step)
        for offset, address, size in pieces:
            copy(slot + offset, address, size)
        self.posted[self.me] = self.step

    def _there(self, ranks: Sequence[int]) -> Steps:
        """Until these have posted this step."""
        for rank in ranks:
            while self.posted[rank] < self.step:
                yield rank

    def _took(self) -> None:
        """End the step: others may write again."""
        self.taken[self.me] = self.step
        self.moved += 1

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Steps:
        header = HEADER(tensor.nbytes, tag)
        yield from self._write(to, ctypes.addressof(header), ctypes.sizeof(header))
        yield from self._write(to, tensor.data_ptr(), tensor.nbytes)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Steps:
        header = HEADER()
        yield from self._read(source, ctypes.addressof(header), ctypes.sizeof(header))
        if tuple(header) != (tensor.nbytes, tag):
            raise ValueError(
                f"rank {source} sent {header[0]} bytes with tag {header[1]}, rank {self.me} awaits {tensor.nbytes} with tag {tag}"
            )
        yield from self._read(source, tensor.data_ptr(), tensor.nbytes)

    def _write(self, to: int, address: int, size: int) -> Steps:
        pair, room = self.me * self.ranks + to, self.segment.pipe_bytes
        pipe, done = self.segment.pipe(pair), self.segment.written[pair]
        while size:
            at = done % room
            now = min(size, room - at, room - (done - self.segment.read[pair]))
            if not now:
                yield to
                continue
            copy(pipe + at, address, now)
            done, address, size = done + now, address + now, size - now
            self.segment.written[pair] = done
            self.moved += 1

    def _read(self, source: int, address: int, size: int) -> Steps:
        pair, room = source * self.ranks + self.me, self.segment.pipe_bytes
        pipe, done = self.segment.pipe(pair), self.segment.read[pair]
        while size:
            at = done % room
            now = min(size, room - at, self.segment.written[pair] - done)
            if not now:
                yield source
                continue
            copy(address, pipe + at, now)
            done, address, size = done + now, address + now, size - now
            self.segment.read[pair] = done
            self.moved += 1


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in a row."""
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"contiguous tensors on the CPU, please: {list(tensor.shape)} on {tensor.device}, strides {tensor.stride()}"
        )
    return tensor.detach().view(-1)


def cut(size: int, most: int) -> Iterator[tuple[int, int]]:
    """(start, size) of the chunks of at most `most`."""
    for start in range(0, size, most):
        yield start, min(most, size - start)


def _add(parts: torch.Tensor, out: torch.Tensor) -> None:
    if len(parts) == 2:  # the quickest there is for two
        torch.add(parts[0], parts[1], out=out)
    else:  # in float32 for narrower dtypes, rounded once
        torch.sum(parts, 0, dtype=out.dtype, out=out)


def _average(parts: torch.Tensor, out: torch.Tensor) -> None:
    _add(parts, out)
    out /= len(parts)


def _by_two(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], parts: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(reduce(function, parts))


SUMMING: tuple[tuple[Any, Summing], ...] = (
    (dist.ReduceOp.SUM, _add),
    (dist.ReduceOp.AVG, _average),
    (dist.ReduceOp.PRODUCT, partial(_by_two, torch.mul)),
    (dist.ReduceOp.MIN, partial(_by_two, torch.minimum)),
    (dist.ReduceOp.MAX, partial(_by_two, torch.maximum)),
    (dist.ReduceOp.BAND, partial(_by_two, torch.bitwise_and)),
    (dist.ReduceOp.BOR, partial(_by_two, torch.bitwise_or)),
    (dist.ReduceOp.BXOR, partial(_by_two, torch.bitwise_xor)),
)


def summing_of(op: Any) -> Summing:
    """How to reduce in this way."""
    for known, summing in SUMMING:
        if op == known:
            return summing
    raise ValueError(f"no such reduction over shared memory: {op}")
