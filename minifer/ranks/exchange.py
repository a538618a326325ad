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
their collectives in the same order, and the first step of each also compares what it is (`agreed`): nobody takes a number for
something that it is not. Messages from rank to rank have a pipe for each pair and know nothing of steps; before each stands what
it is.

Bytes through the slots, S those of the tensor, n ranks: all-reduce writes S and reads n S (shared out: S + S/n, and 2 S at most);
all-gather, S a rank's share, writes S and reads n S.
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Iterator, Sequence

import torch

from .call import DTYPES, Call, Summing, dtype_code, dtype_name
from .segment import SLOT_BYTES, SLOTS, Segment

ONE_SHOT_BYTES = 32 << 10  # a sum over more than two ranks is shared out above this
HEADER = ctypes.c_int64 * 3  # before a message: its bytes, its tag, its dtype

Steps = Generator[int, None, None]  # yields the rank that it waits for
copy = ctypes.memmove  # (to, from, bytes), addresses


class Exchange:
    """What one rank does for its part of each collective."""

    def __init__(self, segment: Segment, rank: int, members: tuple[int, ...]) -> None:
        self.segment, self.me, self.ranks, self.members = segment, rank, segment.ranks, members
        self.others = [other for other in range(segment.ranks) if other != rank]
        self.posted, self.taken = segment.posted, segment.taken
        self.step = 0  # the same on all ranks
        self.number = 0  # of collectives; the same on all ranks
        self.call: Call | None = None  # that was not compared yet
        self.moved = 0  # grows with every step taken and every message moved

    def agreed(self, call: Call, steps: Steps) -> Steps:
        """The steps of a collective; with the first one all ranks see that all call the same."""
        self.number += 1
        self.call = call
        yield from steps

    def _announce(self, call: Call) -> None:
        """Beside what the first step puts into my slot. Two lines a rank: all have read the one before last by now."""
        line = 2 * self.me + self.number % 2
        self.segment.codes[line], self.segment.sizes[line] = self.number % 2**32 << 32 | call.code(), call.bytes

    def _compare(self) -> None:
        """What all ranks call, now that all have said it."""
        codes, sizes, parity = self.segment.codes, self.segment.sizes, self.number % 2
        mine = 2 * self.me + parity
        self.call = None
        for rank in self.others:
            line = 2 * rank + parity
            if codes[line] != codes[mine] or sizes[line] != sizes[mine]:
                both = {one: Call.read(codes[one] % 2**32, sizes[one]) for one in sorted((line, mine))}
                said = "; ".join(f"rank {self.members[one // 2]} {call.told(self.members)}" for one, call in both.items())
                raise ValueError(f"ranks {list(self.members)} call different things as their collective {self.number}: {said}")

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
        """First who gives and awaits how much, which nobody else knows; then the shares, in as many steps as the largest needs."""
        given, into, n = [flat(one) for one in inputs], [flat(one) for one in outputs], self.ranks
        sizes = torch.tensor([one.nbytes for one in given] + [one.nbytes for one in into])
        table = torch.empty(n, 2 * n, dtype=torch.int64)
        yield from self.all_gather(list(table), sizes)
        gives, awaits = table[:, :n], table[:, n:].t()  # [from, to]
        for source, to in (gives != awaits).nonzero().tolist():
            raise ValueError(
                f"all_to_all over ranks {list(self.members)}: rank {self.members[source]} gives {gives[source, to]} bytes, "
                f"rank {self.members[to]} awaits {awaits[source, to]} of it"
            )
        room, largest = SLOT_BYTES // n, int(gives.max())
        for at in range(0, largest, room):

            def left(one: torch.Tensor, at: int = at) -> int:
                return max(0, min(room, one.nbytes - at))

            yield from self._put(*[(rank * room, one.data_ptr() + at, left(one)) for rank, one in enumerate(given)])
            yield from self._there(self.others)
            for rank, output in enumerate(into):
                copy(output.data_ptr() + at, self.segment.slot(rank, self.step) + self.me * room, left(output))
            self._took()

    def broadcast(self, tensor: torch.Tensor, root: int) -> Steps:
        for at, size in cut(tensor.nbytes, SLOT_BYTES):
            first = at == 0  # in which all say what they call; from then on only the root writes
            if self.me == root or first:
                yield from self._put(*[(0, tensor.data_ptr() + at, size)] if self.me == root else [])
            else:
                self.step += 1
            yield from self._there(self.others if first else [root] if self.me != root else [])
            if self.me != root:
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
        if self.call is not None:
            self._announce(self.call)
        self.posted[self.me] = self.step

    def _there(self, ranks: Sequence[int]) -> Steps:
        """Until these have posted this step."""
        for rank in ranks:
            while self.posted[rank] < self.step:
                yield rank
        if self.call is not None:
            self._compare()

    def _took(self) -> None:
        """End the step: others may write again."""
        self.taken[self.me] = self.step
        self.moved += 1

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Steps:
        header = HEADER(tensor.nbytes, tag, dtype_code(tensor.dtype))
        yield from self._write(to, ctypes.addressof(header), ctypes.sizeof(header))
        yield from self._write(to, tensor.data_ptr(), tensor.nbytes)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Steps:
        header = HEADER()
        yield from self._read(source, ctypes.addressof(header), ctypes.sizeof(header))
        size, sent_tag, dtype = header
        if (size, sent_tag, dtype) != (tensor.nbytes, tag, dtype_code(tensor.dtype)):
            raise ValueError(
                f"rank {self.members[source]} sent {size} bytes of {dtype_name(DTYPES[dtype])} with tag {sent_tag}, "
                f"rank {self.members[self.me]} awaits {tensor.nbytes} of {dtype_name(tensor.dtype)} with tag {tag}"
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
            self.segment.take_pipe(to, at + now)
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
    """(start, size) of the chunks of at most `most`; of nothing, one chunk of nothing: ranks meet over that, too."""
    for start in range(0, max(size, 1), most):
        yield start, min(most, size - start)
