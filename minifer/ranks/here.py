"""A function on ranks that exist already: under torchrun, or inside of a rank.

Each process runs the function and all get everybody's result. The time is kept here as in a world of its own: a rank that is
late is interrupted where it stands, and those that wait for it are told which one it was. What cannot be interrupted (a
collective of another backend) is left by the process's end, a little later.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from .errors import RankError
from .host import cores
from .worker import choose_backend, registered

MORE_SECONDS = 5  # until a process that could not be interrupted ends


def launch_here(function: Callable[[], Any], ranks: int, seconds: float, backend: str | None) -> list[Any]:
    """Everybody's result of function(), on every rank. Raises what it raises here, and RankError where a rank is late."""
    given = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    if given != ranks:
        raise ValueError(f"the function wants {ranks} ranks, but {given} are running")
    if dist.is_initialized() and backend not in (None, *dist.get_backend_config().replace(":", ",").split(",")):
        raise ValueError(f"backend {backend!r} is asked for, but the ranks that are running have {dist.get_backend_config()}")
    if not dist.is_initialized():
        _join(given, backend)
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    number = store.add(f"minifer: launches of rank {rank}", 1)  # the same on all ranks

    def done(one: int) -> str:
        return f"minifer: launch {number} of rank {one}"

    def late() -> RankError:
        missing = [one for one in range(ranks) if not store.check([done(one)])]
        names = ", ".join(map(str, missing)) or "some rank"
        return RankError(min(missing, default=rank), f"no answer to run within {seconds:g} s from rank {names} of {ranks}")

    results: list[Any] = [None] * ranks
    with _in_time(seconds, late):
        result = function()
        store.set(done(rank), "")
        dist.all_gather_object(results, result)
    return results


def _join(ranks: int, backend: str | None) -> None:
    """The group of torchrun's ranks."""
    local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    cuda = a_gpu_each(here)
    if cuda:
        torch.cuda.set_device(local)
    torch.set_num_threads(max(1, cores() // here))
    dist.init_process_group(registered(choose_backend(backend, cuda, one_host=here == ranks)))
    weakref.finalize(_join, _leave)  # at the interpreter's end


@contextlib.contextmanager
def _in_time(seconds: float, late: Callable[[], Exception]) -> Iterator[None]:
    """Interrupt what is inside when its time is over, with the error that late() makes."""
    if math.isinf(seconds):
        yield
        return

    def interrupt(*_: object) -> None:
        raise late()

    def leave() -> None:
        print(f"minifer: {late()}; this rank could not be interrupted:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.stderr)
        os._exit(1)

    alarm = hasattr(signal, "SIGALRM") and threading.current_thread() is threading.main_thread()
    last = threading.Timer(min(seconds + MORE_SECONDS, threading.TIMEOUT_MAX), leave)
    last.daemon = True
    before = signal.signal(signal.SIGALRM, interrupt) if alarm else None
    try:
        last.start()
        if alarm:
            signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        last.cancel()
        if alarm:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def a_gpu_each(ranks: int) -> bool:
    """Whether this host has a GPU for each of so many ranks."""
    return torch.cuda.is_available() and torch.cuda.device_count() >= ranks
