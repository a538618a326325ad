"""Life of a rank: join the group, run the functions that the parent sends, send back results or a traceback.

A rank listens to nobody but its parent (a pipe) and its group (shared memory, gloo on loopback, or NCCL). Whatever it writes
to its two output streams goes to files; the parent shows them. It ends with its parent, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import linecache
import os
import select
import signal
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import host, shared_memory
from .carry import Parcel, pack_value, unpack
from .outputs import output_file
from .pending import PeerLost
from .surroundings import Surroundings

LONG = timedelta(days=7)  # the parent keeps the time: it knows what it asked for
GRACE_SECONDS = 0.3  # for a rank to leave by itself
LOOK_MILLISECONDS = 500
DIE_WITH_PARENT = 1  # of Linux' prctl


@dataclass(frozen=True)
class World:
    """What every rank of a world is told."""

    ranks: int
    folder: str  # of the parent: rendezvous file and outputs
    threads: int
    cuda: bool
    backend: str
    surroundings: Surroundings


@dataclass(frozen=True)
class Reply:
    """What a rank sends back. ok: value is its packed result; else the packed exception (or None) and text its traceback.

    follows: it fails only because another rank does.
    """

    ok: bool
    value: Parcel | None = None
    text: str = ""
    follows: bool = False


def main(rank: int, world: World, mine: Connection) -> None:
    """What a rank's process runs. It never raises: what goes wrong is sent to the parent."""
    # An interrupt reaches every process of a terminal or a notebook. It is the parent's: it ends its ranks, or lets them be.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_parent(mine)
    with contextlib.suppress(EOFError, OSError):  # the parent closed its end: the world is over
        try:
            world.surroundings.adopt()
            _redirect(rank, world)
            _join(rank, world)
        except BaseException as error:  # sent, not printed
            mine.send(_failure(error))
            return
        reply = Reply(True)
        while True:
            mine.send(reply)
            order = mine.recv()
            if reply.value is not None:
                reply.value.close()  # the parent has read it, or it would not ask for more
            reply = _run(order)
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def _run(order: tuple[bytes, list[int], str]) -> Reply:
    try:
        function, args, sources = unpack(*order)
        linecache.cache.update(sources)  # of notebook cells, which no file holds: a traceback shows their lines
        return Reply(True, pack_value(function(*args)))
    except BaseException as error:
        return _failure(error)
    finally:
        _streams()


def _failure(error: BaseException) -> Reply:
    # The first frame is this file's call of the function, which tells the reader nothing.
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, frames))
    packed = None
    with contextlib.suppress(Exception):
        packed = pack_value(error)
    return Reply(False, packed, text, isinstance(error, PeerLost))


def _join(rank: int, world: World) -> None:
    torch.set_num_threads(world.threads)
    if world.cuda:
        torch.cuda.set_device(rank)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # fewer GPUs than ranks: all of them compute on the CPU
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    dist.init_process_group(
        registered(world.backend),
        store=dist.FileStore(str(Path(world.folder) / "rendezvous"), world.ranks),
        rank=rank,
        world_size=world.ranks,
        timeout=LONG,
    )


def choose_backend(wanted: str | None, cuda: bool, one_host: bool = True) -> str:
    """What carries collectives: NCCL where each rank has a GPU (and gloo for tensors on the CPU); else shared memory, or gloo."""
    if wanted not in (None, "gloo", shared_memory.NAME):
        raise ValueError(f'backend is "gloo" or "{shared_memory.NAME}", not {wanted!r}')
    if wanted == shared_memory.NAME and not (host.usable() and one_host and not cuda):
        raise ValueError('shared memory joins ranks of one host that compute on an x86-64 CPU; backend="gloo" runs anywhere')
    if cuda:
        return "cpu:gloo,cuda:nccl"
    if wanted is None and one_host and not host.usable():
        warnings.warn("ranks talk over gloo: sharing memory needs an x86-64 processor and POSIX", stacklevel=3)
    return wanted or (shared_memory.NAME if host.usable() and one_host else "gloo")


def registered(backend: str) -> str:
    """The same name, known to torch."""
    return shared_memory.register() if backend == shared_memory.NAME else backend


def _redirect(rank: int, world: World) -> None:
    """Both output streams, of Python and of the libraries below it, into files of the world's folder."""
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    for number in (1, 2):
        file = os.open(output_file(world.folder, rank, number), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    sys.stdout = sys.stderr = None  # the fork server's
    _streams()
    if hasattr(signal, "SIGUSR1"):  # the parent asks so where a rank hangs
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)


def _streams() -> None:
    """Flush them; make them anew if the last function closed or replaced them. They take any character."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream: Any = getattr(sys, name)
        try:
            stream.flush()
            if stream.fileno() == number:
                continue
        except Exception:  # closed, replaced, or none
            pass
        buffering = 1 if number == 2 else -1
        fresh = open(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=buffering)
        setattr(sys, name, fresh)


def _end_with_parent(mine: Connection) -> None:
    """A rank may sit in a collective that never returns. When the parent dies, or closes its end, nobody waits for it any more.

    On Linux the system sees to it, too: with the parent the fork server ends, and with that, whatever they do, its children.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        with contextlib.suppress(AttributeError, OSError, TypeError):  # held open here, it would keep the fork server alive
            os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    if not hasattr(select, "poll"):
        return
    poll = select.poll()
    poll.register(mine.fileno(), getattr(select, "POLLRDHUP", 0))

    def watch() -> None:
        while not poll.poll(LOOK_MILLISECONDS):  # the other end is closed, or this one (which a call under way does not see)
            pass
        time.sleep(GRACE_SECONDS)  # a rank that waits for work leaves by itself
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
