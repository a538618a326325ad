"""Life of a rank: join the group, run the functions that the parent sends, send back results or a traceback.

A rank listens to nobody but its parent (a pipe) and its group (shared memory, gloo on loopback, or NCCL). Whatever it writes
to its two output streams goes to files; the parent shows them. It ends with its parent, however that ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import linecache
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

import cloudpickle
import torch
import torch.distributed as dist

from . import segment, shared_memory

LONG = timedelta(days=7)  # the parent keeps the time: it knows what it asked for


@dataclass(frozen=True)
class World:
    """What every rank of a world is told."""

    ranks: int
    folder: str  # of the parent: rendezvous file and outputs
    threads: int
    cuda: bool
    backend: str


@dataclass(frozen=True)
class Reply:
    """What a rank sends back. ok: value is the pickled result; else it is the pickled exception (or b"") and text its traceback."""

    ok: bool
    value: bytes
    text: str = ""


def main(rank: int, world: World, connections: list[Connection]) -> None:
    """What a rank's process runs. It never raises: what goes wrong is sent to the parent."""
    for other, connection in enumerate(connections):
        if other != rank:
            connection.close()  # held open here, it would hide from its owner that the parent is gone
    mine = connections[rank]
    # An interrupt reaches every process of a terminal or a notebook. It is the parent's: it ends its ranks, or lets them be.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _redirect(rank, world)
    with contextlib.suppress(EOFError, OSError):  # the parent closed its end: the world is over
        try:
            _join(rank, world)
        except BaseException as error:  # sent, not printed
            mine.send(_failure(error))
            return
        mine.send(Reply(True, b""))
        while True:
            mine.send(_run(mine.recv_bytes()))
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def _run(payload: bytes) -> Reply:
    try:
        function, args, sources = cloudpickle.loads(payload)
        linecache.cache.update(sources)  # of notebook cells, which no file holds: a traceback shows their lines
        return Reply(True, cloudpickle.dumps(function(*args)))
    except BaseException as error:
        return _failure(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _failure(error: BaseException) -> Reply:
    # The first frame is this file's call of the function, which tells the reader nothing.
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, frames))
    try:
        pickled = cloudpickle.dumps(error)
    except Exception:
        pickled = b""
    return Reply(False, pickled, text)


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
    if wanted == shared_memory.NAME and not (segment.usable() and one_host and not cuda):
        raise ValueError('shared memory joins ranks of one host that compute on an x86-64 CPU; backend="gloo" runs anywhere')
    if cuda:
        return "cpu:gloo,cuda:nccl"
    if wanted is None and one_host and not segment.usable():
        warnings.warn("ranks talk over gloo: sharing memory needs an x86-64 processor and POSIX", stacklevel=3)
    return wanted or (shared_memory.NAME if segment.usable() and one_host else "gloo")


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
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)
    if hasattr(signal, "SIGUSR1"):  # the parent asks so where a rank hangs
        faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=False)


def output_file(folder: str, rank: int, number: int) -> Path:
    """Where a rank's stdout (1) or stderr (2) goes."""
    return Path(folder) / f"rank{rank}.{number}"


def _end_with_parent() -> None:
    """A rank may sit in a collective that never returns. When the parent dies, nobody waits for it any more."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
