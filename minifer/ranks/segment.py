"""A piece of memory that the ranks of a group share, and how they know that all of them still live.

    counters   a line of 64 bytes each, so that no two ranks write to one cache line
      posted   of each rank: how many steps it has put something into its slots for
      taken    of each rank: how many steps it has read, so what stands there may be overwritten
      written  of each pair (from, to): bytes put into its pipe
      read     of each pair: bytes taken out of it
    slots      SLOTS of SLOT_BYTES for each rank, which all others read
    pipes      a ring of bytes for each pair

Each counter has one writer, which only ever raises it. Data is written before the counter that announces it. x86-64 shows
stores to other cores in the order they were made, so nothing else is needed; other processors would want barriers, which Python
has none of, so there the module is not used.

The memory is a file that only its user can open. It is unlinked as soon as every rank has mapped it. Each rank holds a lock on
one byte of it: locks end with their process, however that ends, so whoever can take a rank's lock knows that the rank is gone.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

with contextlib.suppress(ImportError):  # on Windows, where `usable` says no
    import fcntl

LINE = 64  # bytes of a cache line
SLOTS = 2  # a rank may be one step ahead of the slowest reader
SLOT_BYTES = 128 << 10
PIPES_BYTES = 16 << 20  # of all pairs together ...
PIPE_BYTES = 4 << 20  # ... and of one pair at most


class Segment:
    """The memory of one group, mapped. All ranks must make theirs at the same time: it returns when all have."""

    def __init__(self, store: dist.Store, rank: int, ranks: int, timeout: timedelta) -> None:
        self.ranks, self.me = ranks, rank
        self.pipe_bytes = min(PIPE_BYTES, PIPES_BYTES // ranks**2) // LINE * LINE
        counters = (2 * ranks + 2 * ranks**2) * LINE
        self._slots_at = counters
        self._pipes_at = counters + ranks * SLOTS * SLOT_BYTES
        size = self._pipes_at + ranks**2 * self.pipe_bytes
        self._file = _meet(store, rank, ranks, size, timeout)
        self._memory = mmap.mmap(self._file, size)
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.address = self.bytes.data_ptr()
        lines = memoryview(self._memory)[:counters].cast("Q")[:: LINE // 8]
        self.posted, self.taken = lines[:ranks], lines[ranks : 2 * ranks]
        self.written, self.read = lines[2 * ranks : 2 * ranks + ranks**2], lines[2 * ranks + ranks**2 :]
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, rank)
        if store.add("mapped", 1) == ranks:
            os.unlink(store.get("segment").decode())
            store.set("unlinked", "")
        store.wait(["unlinked"], timeout)

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


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable() -> bool:
    """Whether ranks of this host can share memory in this way."""
    return os.name == "posix" and platform.machine() in ("x86_64", "AMD64")


def _meet(store: dist.Store, rank: int, ranks: int, size: int, timeout: timedelta) -> int:
    """The open file of a group's memory, which rank 0 makes and tells the others of."""
    if rank == 0:
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
        file, path = tempfile.mkstemp(prefix="minifer-", dir=folder)
        try:
            os.posix_fallocate(file, 0, size)  # so that it is there when it is written to, whoever else takes of the same memory
        except OSError as error:
            os.close(file)
            os.unlink(path)
            space = os.statvfs(folder)
            raise RuntimeError(
                f"{ranks} ranks would share {size:,} bytes of memory, {folder} has {space.f_bavail * space.f_frsize:,} left: "
                'enlarge it (docker: --shm-size), or use backend="gloo"'
            ) from error
        store.set("segment", path)
        return file
    store.wait(["segment"], timeout)
    path = store.get("segment").decode()
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    if os.fstat(file).st_uid != os.getuid() or os.fstat(file).st_size != size:
        raise RuntimeError(f"{Path(path).name} is not the memory that rank 0 of this group made")
    return file
