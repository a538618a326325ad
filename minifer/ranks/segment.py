"""A piece of memory that the ranks of a group share, and how they know that all of them still live.

    counters   a line of 64 bytes each, so that no two ranks write to one cache line
      posted   of each rank: how many steps it has put something into its slots for
      taken    of each rank: how many steps it has read, so what stands there may be overwritten
      failed   of each rank: bytes of its last words, 0 while all is well
      written  of each pair (from, to): bytes put into its pipe
      read     of each pair: bytes taken out of it
      calls    two of each rank: what its collective is (call.py), of an odd and of an even number
    words      what a rank that failed has to say to the others
    slots      SLOTS of SLOT_BYTES for each rank, which all others read
    pipes      a ring of bytes for each pair; memory is taken for it as messages come to need it

Each counter has one writer, which only ever raises it. Data is written before the counter that announces it. x86-64 shows
stores to other cores in the order they were made, so nothing else is needed; other processors would want barriers, which Python
has none of, so there the module is not used.

Each rank holds a lock on one byte of the file: locks end with their process, however that ends, so whoever can take a rank's
lock knows that the rank is gone.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist

from . import host

with contextlib.suppress(ImportError):  # on Windows, where `host.usable` says no
    import fcntl

LINE = 64  # bytes of a cache line
SLOTS = 2  # a rank may be one step ahead of the slowest reader
SLOT_BYTES = 128 << 10
WORD_BYTES = 1024  # of last words
PIPE_BYTES = 15 * (256 << 10)  # of one pair ...
PIPES_BYTES = 1 << 30  # ... and addresses of all pairs together, at most
PIECE_BYTES = 256 << 10  # of a pipe: what is taken at once


class Segment:
    """The memory of one group, mapped. All ranks must make theirs at the same time: it returns when all have."""

    def __init__(self, store: dist.Store, rank: int, ranks: int, timeout: timedelta) -> None:
        self.ranks, self.me = ranks, rank
        self.pipe_bytes = min(PIPE_BYTES, PIPES_BYTES // ranks**2) // LINE * LINE
        counts = (ranks, ranks, ranks, ranks**2, ranks**2, 2 * ranks)
        self._words_at = sum(counts) * LINE
        self._slots_at = self._words_at + ranks * WORD_BYTES
        self._pipes_at = self._slots_at + ranks * SLOTS * SLOT_BYTES
        size = self._pipes_at + ranks**2 * self.pipe_bytes
        self._file = _meet(store, rank, ranks, size, self._pipes_at, timeout)
        self._taken_to = [0] * ranks  # bytes of each of my pipes that memory was taken for
        self._memory = mmap.mmap(self._file, size)
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.address = self.bytes.data_ptr()
        numbers = memoryview(self._memory)[: self._words_at].cast("Q")
        ends = [sum(counts[:at]) for at in range(len(counts) + 1)]
        self.posted, self.taken, self.failed, self.written, self.read, self.codes = (
            numbers[:: LINE // 8][low:high] for low, high in pairwise(ends)
        )
        self.sizes = numbers[1 :: LINE // 8][ends[-2] :]  # the second number of the lines of `codes`
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, rank)
        if store.add("mapped", 1) == ranks:
            host.unlink(store.get("segment").decode())
            store.set("all mapped", "")
        store.wait(["all mapped"], timeout)

    def slot(self, rank: int, step: int) -> int:
        """The address of a rank's slot of this step."""
        return self.address + self._slots_at + (rank * SLOTS + step % SLOTS) * SLOT_BYTES

    def slots(self, step: int, dtype: torch.dtype) -> torch.Tensor:
        """All ranks' slots of this step, as one tensor [ranks, elements]."""
        end = self._slots_at + self.ranks * SLOTS * SLOT_BYTES
        return self.bytes[self._slots_at : end].view(self.ranks, SLOTS, SLOT_BYTES)[:, step % SLOTS].view(dtype)

    def pipe(self, pair: int) -> int:
        """The address of a pair's pipe. pair: from * ranks + to."""
        return self.address + self._pipes_at + pair * self.pipe_bytes

    def take_pipe(self, to: int, end: int) -> None:
        """See to it that my pipe to a rank has memory up to here. A pipe that is never used takes none."""
        while self._taken_to[to] < end:
            start = self._taken_to[to]
            size = min(PIECE_BYTES, self.pipe_bytes - start)
            pair = self.me * self.ranks + to
            host.allocate(self._file, self._pipes_at + pair * self.pipe_bytes + start, size, f"{self.ranks} ranks")
            self._taken_to[to] = start + size

    def fail(self, text: str) -> None:
        """My last words, and that they are."""
        said = text.encode()[:WORD_BYTES]
        start = self._words_at + self.me * WORD_BYTES
        self._memory[start : start + len(said)] = said
        self.failed[self.me] = max(1, len(said))

    def last_words(self, rank: int) -> str:
        """Of a rank that has failed."""
        start = self._words_at + rank * WORD_BYTES
        return self._memory[start : start + self.failed[rank]].decode(errors="ignore")

    def gone(self, rank: int) -> bool:
        """Whether another rank has closed its segment, or has died."""
        if rank == self.me:  # its own lock it could take, and would lose
            return False
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        return True

    def close(self) -> None:
        """Leave: to the others this rank is gone from now on.

        Once only: the number of a closed file may be another's by now, and closing a file gives up this process's locks on it.
        """
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def _meet(store: dist.Store, rank: int, ranks: int, size: int, at_once: int, timeout: timedelta) -> int:
    """The open file of a group's memory, which rank 0 makes and tells the others of. at_once: bytes that are taken now."""
    if rank == 0:
        file, path = host.shared_file()
        try:
            os.ftruncate(file, size)
            host.allocate(file, 0, at_once, f"{ranks} ranks")
        except BaseException:
            os.close(file)
            host.unlink(path)
            raise
        store.set("segment", path)
        return file
    store.wait(["segment"], timeout)
    return host.open_shared(store.get("segment").decode(), size)
