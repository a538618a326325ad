"""The processes of one world: how they are started, how they are ended, and that nothing of them stays.

Each world has a private folder (its meeting point, its outputs), which its parent holds a lock on. A lock ends with its
process, so whoever can take a folder's lock knows that its world is dead, and removes it: every start does so.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from .worker import World, main

with contextlib.suppress(ImportError):  # not on Windows
    import fcntl

PREFIX, NEW_PREFIX = "minifer-ranks-", "minifer-new-"
YOUNG_SECONDS = 60  # a folder without its final name is somebody's who is just about to give it one
SOCKET_PATH = 100  # characters that the path of a socket may have, and a few to spare
SOCKET_NAME = len("/pymp-12345678/listener-12345678")
FILES_A_RANK, FILES = 5, 32  # open files that a parent needs, about
_starting = threading.Lock()


class Processes:
    """Of one world. It can be ended at any time, also half started."""

    def __init__(self) -> None:
        remove_leftovers()
        self.folder, self._lock = new_folder()
        self.started: list[Any] = []
        self.connections: list[Connection] = []  # the parent's ends

    def start(self, world: World) -> None:
        """Start them all. Raises an OSError that says what the system lacks."""
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        try:
            # An interrupt waits for the end of this: a process that was half started would be nobody's.
            with _starting, undisturbed(), _without_main(), _short_temporary_folder():
                context: Any = get_context(method)
                if method == "forkserver":
                    context.set_forkserver_preload([main.__module__])
                for rank in range(world.ranks):
                    ours, theirs = context.Pipe()
                    self.connections.append(ours)
                    process = context.Process(target=main, args=(rank, world, theirs), name=f"rank {rank}", daemon=True)
                    self.started.append(process)
                    process.start()
                    theirs.close()
        except (EOFError, OSError) as error:
            raise _explained(error, world.ranks) from error

    def kill(self) -> None:
        """End them now, whatever they do."""
        for process in self.started:
            if process.pid is not None and process.is_alive():
                process.kill()

    def end(self) -> None:
        """Ranks that wait for work leave by themselves when their pipe closes; the others are killed."""
        with undisturbed():
            idle = all(process.pid is not None and process.is_alive() for process in self.started)
            for connection in self.connections:
                connection.close()
            deadline = time.monotonic() + (0.5 if idle else 0)
            begun = [process for process in self.started if process.pid is not None]
            for process in begun:
                process.join(max(0.0, deadline - time.monotonic()))
            self.kill()
            for process in begun:
                process.join(5)
            shutil.rmtree(self.folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.close(self._lock)


def new_folder() -> tuple[str, int]:
    """A new folder that only this user can enter, and the lock on it. It has its name from when it is locked."""
    made = tempfile.mkdtemp(prefix=NEW_PREFIX)
    lock = _locked(made)
    folder = made.replace(NEW_PREFIX, PREFIX)
    os.rename(made, folder)
    return folder, -1 if lock is None else lock


def remove_leftovers() -> None:
    """Folders of this user's worlds whose parent was killed."""
    if not hasattr(os, "getuid"):
        return
    for folder in Path(tempfile.gettempdir()).glob("minifer-*"):
        with contextlib.suppress(OSError):
            about = folder.lstat()
            young = time.time() - about.st_mtime < YOUNG_SECONDS
            ours = folder.name.startswith(PREFIX) or (folder.name.startswith(NEW_PREFIX) and not young)
            if not ours or about.st_uid != os.getuid() or not folder.is_dir():
                continue
            lock = _locked(str(folder))
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _locked(folder: str) -> int | None:
    """A lock on a folder, as an open file; None if another one has it, or where there are no such locks."""
    if os.name != "posix":
        return None
    file = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return None
    return file


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """An interrupt waits until this is over: what is ended half-way would leave something behind."""
    if threading.current_thread() is not threading.main_thread():
        yield  # interrupts are the main thread's
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)
        if came:
            signal.raise_signal(signal.SIGINT)


def _explained(error: Exception, ranks: int) -> OSError:
    """Why processes could not be started."""
    few = f"{ranks} ranks could not be started ({type(error).__name__}: {error})"
    with contextlib.suppress(ImportError):
        import resource

        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if getattr(error, "errno", None) == errno.EMFILE or files < FILES + FILES_A_RANK * ranks:
            wanted = FILES + FILES_A_RANK * ranks
            return OSError(errno.EMFILE, f"{few}: this process may open {files} files at once, and {wanted} are wanted (ulimit -n)")
    return OSError(getattr(error, "errno", None) or errno.EAGAIN, few)


@contextlib.contextmanager
def _short_temporary_folder() -> Iterator[None]:
    """The fork server listens at a path, which the system wants short. Where the temporary folder's is long, another one serves."""
    given = tempfile.gettempdir()
    if len(os.fsencode(given)) + SOCKET_NAME <= SOCKET_PATH or os.name != "posix":
        yield
        return
    fitting = next((folder for folder in ("/tmp", "/var/tmp", "/dev/shm") if os.access(folder, os.W_OK | os.X_OK)), None)
    if fitting is None:
        raise OSError(
            errno.ENAMETOOLONG, f"the temporary folder's path is too long for a socket: set TMPDIR to a shorter one ({given})"
        )
    before, tempfile.tempdir = tempfile.tempdir, fitting
    try:
        yield
    finally:
        tempfile.tempdir = before


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
