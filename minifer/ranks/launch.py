"""Start ranks, run functions on them, get their results: from a notebook cell, a script, or under torchrun.

    parent ── pipe ── rank 0 ─┐
           ── pipe ── rank 1 ─┤ one process group: shared memory, NCCL where each rank has a GPU
           ── pipe ── rank 2 ─┘

    results = launch(function, ranks=3)          # [rank 0's, rank 1's, rank 2's]

    with Ranks(3) as world:                      # the same, and the world stays up between calls
        results = world.run(function)

Processes come from a fork server that has torch already imported, so the second start is quick. Functions travel by
cloudpickle: a closure or a cell's function will do. They meet in a file of a private folder: no port is opened but gloo's
own, on loopback, where the group uses gloo. Under torchrun the ranks exist already: `launch` runs the function here and
gathers everybody's result.

If a rank raises, dies or hangs, the world ends: every process is killed, and the caller gets a RankError with that rank's
traceback. What ranks print is kept and shown when their function has returned, rank by rank.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from .carry import pack
from .outputs import Outputs
from .segment import cores
from .worker import Reply, World, choose_backend, main, registered

START_SECONDS = 120  # for processes to start and meet
GRACE_SECONDS = 0.25  # between the first sign of trouble and the verdict on its cause
_starting = threading.Lock()


class RankError(RuntimeError):
    """A rank raised, died or hung. rank: which one. Its own exception, where it could be sent, is the cause (`__cause__`)."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class Ranks:
    """A world of `ranks` processes that stays up until `close` (or the end of a `with` block, or of the parent).

    timeout: seconds that a `run` may take unless it says otherwise. cuda: a GPU for each rank; by default where there are
    enough of them. threads: of each rank; by default its share of the cores. backend: "shared_memory" (the default on a CPU
    that it works on) or "gloo"; with GPUs NCCL carries their tensors.
    """

    def __init__(
        self, ranks: int, timeout: float = 600, cuda: bool | None = None, threads: int | None = None, backend: str | None = None
    ) -> None:
        if ranks < 1:
            raise ValueError(f"a world has one rank at least, not {ranks}")
        if dist.is_torchelastic_launched():
            raise RuntimeError("Ranks starts processes of its own; under torchrun the ranks exist: use launch")
        enough = a_gpu_each(ranks)
        if cuda and not enough:
            raise ValueError(f"{ranks} ranks want a GPU each, there are {torch.cuda.device_count()}")
        cuda = enough if cuda is None else cuda
        self.ranks, self.timeout, self.backend = ranks, timeout, choose_backend(backend, cuda)
        self._folder = tempfile.mkdtemp(prefix="minifer-ranks-")
        self._outputs = Outputs(self._folder, ranks)
        world = World(ranks, self._folder, threads or max(1, cores() // ranks), cuda, self.backend)
        self._connections, self._processes = _start(world)
        self._closed: set[int] = set()  # ranks that ended the conversation
        self._close = weakref.finalize(self, _end, self._processes, self._connections, self._folder)
        self._collect("start", START_SECONDS)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """Run function(*args) on every rank; their results in rank order. Raises RankError, and the world is over then."""
        if not self._close.alive:
            raise RuntimeError("this world of ranks is over: start a new one")
        payload = pack(function, args)
        for rank, connection in enumerate(self._connections):
            try:
                connection.send_bytes(payload)
            except OSError:
                message = self._death(rank)
                self.close()
                raise RankError(rank, message) from None
        replies = self._collect("run", self.timeout if timeout is None else timeout)
        self._outputs.show()
        return [cloudpickle.loads(reply.value) for reply in replies]

    def close(self) -> None:
        """End all processes."""
        self._close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _collect(self, what: str, seconds: float) -> list[Reply]:
        """A reply of every rank, or the end of this world and an error that says whose fault it was."""
        deadline = time.monotonic() + seconds
        replies: dict[int, Reply] = {}
        try:
            while len(replies) < self.ranks:
                trouble = self._receive(replies, deadline - time.monotonic())
                if trouble:
                    # Others may fail only because this one did, or before it: let all signs come in, then judge.
                    self._receive_more(replies, GRACE_SECONDS)
                    raise self._verdict(replies)
                if time.monotonic() >= deadline:
                    raise self._hung(what, seconds, replies)
        except BaseException:
            self._outputs.show()  # what was printed before it went wrong is wanted now more than ever
            self.close()
            raise
        return [replies[rank] for rank in range(self.ranks)]

    def _receive(self, replies: dict[int, Reply], seconds: float) -> bool:
        """Wait for a reply or a death. True if a rank raised or died."""
        missing = [rank for rank in range(self.ranks) if rank not in replies]
        sources: dict[Any, int] = {self._connections[rank]: rank for rank in missing}
        sentinels = {self._processes[rank].sentinel: rank for rank in missing}
        trouble = False
        ready: Any
        for ready in wait([*sources, *sentinels], max(0.0, seconds)):
            if ready in sources:
                try:
                    replies[sources[ready]] = ready.recv()
                    trouble |= not replies[sources[ready]].ok
                except (EOFError, OSError):
                    self._closed.add(sources[ready])
                    trouble = True
            else:
                trouble |= not self._connections[sentinels[ready]].poll()
        return trouble

    def _receive_more(self, replies: dict[int, Reply], seconds: float) -> None:
        end = time.monotonic() + seconds
        while len(replies) < self.ranks and time.monotonic() < end:
            self._receive(replies, end - time.monotonic())
            time.sleep(0.01)

    def _verdict(self, replies: dict[int, Reply]) -> RankError:
        """The cause among the signs: a rank that died, else the lowest one that raised."""
        silent = [rank for rank in range(self.ranks) if rank not in replies]
        for rank in silent:
            if not self._processes[rank].is_alive():
                return RankError(rank, self._death(rank))
        raised = [(rank, reply) for rank, reply in sorted(replies.items()) if not reply.ok]
        if not raised:
            closed = min(self._closed)
            return RankError(closed, f"rank {closed} closed its connection without an answer")
        rank, reply = raised[0]
        error = RankError(rank, f"rank {rank} raised:\n{reply.text}")
        with contextlib.suppress(Exception):  # an exception need not survive its journey
            error.__cause__ = cloudpickle.loads(reply.value) if reply.value else None
        return error

    def _death(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(1)
        code = process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited with code {code}"
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
    function: Callable[..., Any], ranks: int, timeout: float = 600, args: tuple[Any, ...] = (), backend: str | None = None
) -> list[Any]:
    """Run function(*args) on `ranks` ranks and give their results (copies of them), in rank order. backend: as for Ranks.

    Raises RankError if a rank raises, dies, or takes more than `timeout` seconds. Under torchrun (or inside of a rank) the
    ranks exist already: every one of them gets all results, and `ranks` must be their number. An exception is that process's
    own then, and torchrun ends the others.
    """
    if dist.is_initialized() or dist.is_torchelastic_launched():
        return _launch_here(lambda: function(*args), ranks, backend)
    with Ranks(ranks, timeout, backend=backend) as world:
        return world.run(function, *args)


def _launch_here(function: Callable[[], Any], ranks: int, backend: str | None) -> list[Any]:
    given = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    if given != ranks:
        raise ValueError(f"the function wants {ranks} ranks, but {given} are running")
    if dist.is_initialized() and backend not in (None, *dist.get_backend_config().replace(":", ",").split(",")):
        raise ValueError(f"backend {backend!r} is asked for, but the ranks that are running have {dist.get_backend_config()}")
    if not dist.is_initialized():
        local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        cuda = a_gpu_each(here)
        if cuda:
            torch.cuda.set_device(local)
        torch.set_num_threads(max(1, cores() // here))
        dist.init_process_group(registered(choose_backend(backend, cuda, one_host=here == given)))
        weakref.finalize(_launch_here, _leave)  # at the interpreter's end
    results: list[Any] = [None] * ranks
    dist.all_gather_object(results, function())
    return results


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _start(world: World) -> tuple[list[Connection], list[Any]]:
    """The parent's ends of the pipes, and the processes."""
    method = "forkserver" if "forkserver" in mp.get_all_start_methods() else "spawn"
    with _starting, _without_main():
        context = get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload([main.__module__])
        pipes = [context.Pipe() for _ in range(world.ranks)]
        ours, theirs = [pipe[0] for pipe in pipes], [pipe[1] for pipe in pipes]
        started = mp.start_processes(main, (world, theirs), world.ranks, join=False, daemon=True, start_method=method)
    for connection in theirs:
        connection.close()
    return ours, started.processes


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Starting a process, Python would import the user's script again in it, which a script without a __main__ guard does
    not survive. Ranks need nothing of it (functions travel by value), so it is not mentioned to them."""
    module = sys.modules["__main__"]
    hidden = {name: getattr(module, name) for name in ("__file__", "__spec__") if hasattr(module, name)}
    try:
        for name in hidden:
            setattr(module, name, None)
        yield
    finally:
        for name, value in hidden.items():
            setattr(module, name, value)


def _end(processes: list[Any], connections: list[Connection], folder: str) -> None:
    """Ranks that wait for work leave by themselves when their pipe closes; the others are killed."""
    for connection in connections:
        connection.close()
    deadline = time.monotonic() + 0.5
    idle = all(process.is_alive() for process in processes)
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()) if idle else 0)
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join(5)
    shutil.rmtree(folder, ignore_errors=True)


def a_gpu_each(ranks: int) -> bool:
    """Whether this host has a GPU for each of so many ranks."""
    return torch.cuda.is_available() and torch.cuda.device_count() >= ranks
