"""Start ranks, run functions on them, get their results: from a notebook cell, a script, or under torchrun.

    parent ── pipe ── rank 0 ─┐
           ── pipe ── rank 1 ─┤ one process group: shared memory, NCCL where each rank has a GPU
           ── pipe ── rank 2 ─┘

    results = launch(function, ranks=3)          # [rank 0's, rank 1's, rank 2's]

    with Ranks(3) as world:                      # the same, and the world stays up between calls
        results = world.run(function)

Processes come from a fork server that has torch already imported, so the second start is quick (processes.py). Functions travel
by cloudpickle: a closure or a cell's function will do; their tensors and arrays through memory (carry.py). Ranks meet in a
file of a private folder: no port is opened but gloo's own, on loopback, where the group uses gloo. Under torchrun the ranks
exist already: `launch` runs the function here and gathers everybody's result (here.py).

If a rank raises, dies or hangs, the world ends: every process is killed, and the caller gets a RankError with that rank's
traceback. What ranks print is kept and shown when their function has returned, rank by rank.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist

from .carry import Parcel, pack, unpack
from .errors import RankError
from .here import a_gpu_each, launch_here
from .host import cores
from .outputs import Outputs
from .processes import Processes, undisturbed
from .surroundings import Surroundings
from .worker import Reply, World, choose_backend

START_SECONDS = 120  # for processes to start and meet
GRACE_SECONDS = 0.25  # between the first sign of trouble and the verdict on its cause
LONGEST_WAIT = 3600  # of one call of the system


class Ranks:
    """A world of `ranks` processes that stays up until `close` (or the end of a `with` block, or of the parent).

    timeout: seconds that a `run` may take unless it says otherwise; None for as long as it likes. cuda: a GPU for each rank; by
    default where there are enough of them. threads: of each rank; by default its share of the cores. backend: "shared_memory"
    (the default on a CPU that it works on) or "gloo"; with GPUs NCCL carries their tensors.

    Ranks have the caller's environment, working directory, umask, limits and locale of this moment. (What libraries read while
    they are imported, OMP_NUM_THREADS for one, they have read at the first start.)
    """

    def __init__(
        self,
        ranks: int,
        timeout: float | None = 600,
        cuda: bool | None = None,
        threads: int | None = None,
        backend: str | None = None,
    ) -> None:
        self.ranks, self.timeout = whole_number("ranks", ranks), seconds_of(timeout)
        threads = max(1, cores() // ranks) if threads is None else whole_number("threads", threads)
        if dist.is_torchelastic_launched():
            raise RuntimeError("Ranks starts processes of its own; under torchrun the ranks exist: use launch")
        if multiprocessing.current_process().daemon:
            raise RuntimeError("a rank starts no ranks: inside of one, launch runs on the ranks that exist")
        enough = a_gpu_each(ranks)
        if cuda and not enough:
            raise ValueError(f"{ranks} ranks want a GPU each, there are {torch.cuda.device_count()}")
        cuda = enough if cuda is None else cuda
        self.backend = choose_backend(backend, cuda)
        self._turn = threading.RLock()  # one function at a time
        self._over = ""  # why
        self._closed: set[int] = set()  # ranks that ended the conversation
        self._held = Processes()
        self._close = weakref.finalize(self, self._held.end)
        try:
            self._outputs = Outputs(self._held.folder, ranks)
            self._held.start(World(ranks, self._held.folder, threads, cuda, self.backend, Surroundings.here()))
            self._collect("start", START_SECONDS)
        except BaseException:
            self._close()
            raise

    def run(self, function: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """Run function(*args) on every rank; their results in rank order. timeout: seconds, that of the world by default.

        Raises RankError, and the world is over then; so it is after an interrupt.
        """
        function_of(function)
        seconds = self.timeout if timeout is None else seconds_of(timeout)
        with self._turn:
            if not self._close.alive:
                raise RuntimeError(f"this world of ranks is over ({self._over}): start a new one")
            parcel = pack(function, args)
            try:
                self._send(parcel)
                replies = self._collect("run", seconds)
                results = [unpack(*reply.value[:3]) if reply.value else None for reply in replies]
            except BaseException as error:
                with undisturbed():
                    self._outputs.show()  # what was printed before it went wrong is wanted now more than ever
                    self._end(f"{type(error).__name__} {error}".strip().partition("\n")[0])
                raise
            finally:
                parcel.close()
            self._outputs.show()
            return results

    def close(self) -> None:
        """End all processes; a function that another thread runs on them, too."""
        self._over = self._over or "it was closed"
        if not self._turn.acquire(blocking=False):
            self._held.kill()
            self._turn.acquire()
        try:
            self._close()
        finally:
            self._turn.release()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _processes(self) -> list[Any]:
        return self._held.started

    def _end(self, why: str) -> None:
        self._over = self._over or why
        self._close()

    def _send(self, parcel: Parcel) -> None:
        order = ForkingPickler.dumps(parcel[:3])
        for rank, connection in enumerate(self._held.connections):
            try:
                connection.send_bytes(order)
            except OSError:
                raise RankError(rank, self._death(rank)) from None

    def _collect(self, what: str, seconds: float) -> list[Reply]:
        """A reply of every rank, or an error that says whose fault it was."""
        deadline = time.monotonic() + seconds
        replies: dict[int, Reply] = {}
        while len(replies) < self.ranks:
            trouble = self._receive(replies, deadline - time.monotonic())
            if self._over:
                raise RuntimeError(f"this world of ranks is over ({self._over} while a function ran)")
            if trouble:
                # Others may fail only because this one did, or before it: let all signs come in, then judge.
                self._receive_more(replies, GRACE_SECONDS)
                raise self._verdict(replies)
            if time.monotonic() >= deadline:
                raise self._hung(what, seconds, replies)
        return [replies[rank] for rank in range(self.ranks)]

    def _receive(self, replies: dict[int, Reply], seconds: float) -> bool:
        """Wait for a reply or a death. True if a rank raised or died."""
        missing = [rank for rank in range(self.ranks) if rank not in replies]
        sources: dict[Any, int] = {self._held.connections[rank]: rank for rank in missing}
        sentinels = {self._processes[rank].sentinel: rank for rank in missing}
        trouble = False
        ready: Any
        for ready in wait([*sources, *sentinels], min(max(0.0, seconds), LONGEST_WAIT)):
            if ready in sources:
                try:
                    replies[sources[ready]] = ready.recv()
                    trouble |= not replies[sources[ready]].ok
                except (EOFError, OSError):
                    self._closed.add(sources[ready])
                    trouble = True
            else:
                trouble |= not self._held.connections[sentinels[ready]].poll()
        return trouble

    def _receive_more(self, replies: dict[int, Reply], seconds: float) -> None:
        end = time.monotonic() + seconds
        while len(replies) < self.ranks and time.monotonic() < end:
            self._receive(replies, end - time.monotonic())
            time.sleep(0.01)

    def _verdict(self, replies: dict[int, Reply]) -> RankError:
        """The cause among the signs: a rank that died; else the lowest one that raised something of its own."""
        silent = [rank for rank in range(self.ranks) if rank not in replies]
        for rank in silent:
            if not self._processes[rank].is_alive():
                return RankError(rank, self._death(rank))
        raised = [(reply.follows, rank, reply) for rank, reply in sorted(replies.items()) if not reply.ok]
        if not raised:
            closed = min(self._closed or silent)
            return RankError(closed, f"rank {closed} closed its connection without an answer")
        _, rank, reply = min(raised, key=lambda one: one[:2])
        error = RankError(rank, f"rank {rank} raised:\n{reply.text}")
        with contextlib.suppress(Exception):  # an exception need not survive its journey
            error.__cause__ = unpack(*reply.value[:3]) if reply.value else None
        return error

    def _death(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(1)
        code = process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited with code {code}"
        if code == 255:  # so says multiprocessing when nobody is left who could say
            how = "is gone, and so is the fork server that started it (or it exited with code 255)"
        written = self._outputs.read(rank, 2).strip()
        return f"rank {rank} {how}" + (f"; its last words:\n{written[-2000:]}" if written else "")

    def _hung(self, what: str, seconds: float, replies: dict[int, Reply]) -> RankError:
        """Say which ranks did not come back, and where each of them is."""
        late = [rank for rank in range(self.ranks) if rank not in replies]
        if hasattr(signal, "SIGUSR1"):
            for rank in late:
                with contextlib.suppress(OSError):
                    os.kill(self._processes[rank].pid, signal.SIGUSR1)
            time.sleep(GRACE_SECONDS)
        places = "".join(f"\nrank {rank} is here:\n{self._outputs.take_stack(rank)}" for rank in late)
        names = ", ".join(map(str, late))
        return RankError(late[0], f"no answer to {what} within {seconds:g} s from rank {names} of {self.ranks}{places}")


def launch(
    function: Callable[..., Any],
    ranks: int,
    timeout: float | None = 600,
    args: tuple[Any, ...] = (),
    backend: str | None = None,
) -> list[Any]:
    """Run function(*args) on `ranks` ranks and give their results (copies of them), in rank order. backend: as for Ranks.

    Raises RankError if a rank raises, dies, or takes more than `timeout` seconds (None: as long as it likes). Under torchrun
    (or inside of a rank) the ranks exist already: every one of them gets all results, and `ranks` must be their number. An
    exception is that process's own then, and torchrun ends the others.
    """
    function_of(function)
    if not isinstance(args, tuple):
        raise ValueError(f"args is a tuple of the function's arguments, not {args!r:.60}")
    ranks, seconds = whole_number("ranks", ranks), seconds_of(timeout)
    if dist.is_initialized() or dist.is_torchelastic_launched():
        return launch_here(lambda: function(*args), ranks, seconds, backend)
    with Ranks(ranks, seconds, backend=backend) as world:
        return world.run(function, *args)


def whole_number(name: str, value: Any) -> int:
    """Of ranks or threads: one at least."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is a whole number, at least 1, not {value!r}")
    return value


def seconds_of(timeout: Any) -> float:
    """A time to wait; None is for ever."""
    if timeout is None:
        return math.inf
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ValueError(f"timeout is a number of seconds above 0, or None, not {timeout!r}")
    return float(timeout)


def function_of(function: Any) -> None:
    """Raises what is wrong with it."""
    if not callable(function):
        raise ValueError(f"a function runs on ranks, not {function!r:.60}")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise ValueError(f"{function.__name__} is async: ranks run plain functions (asyncio.run inside of one will do)")
