"""What this host has for ranks: cores, and memory that several processes map.

Shared memory is a file without a name (Linux' memfd): others of the same user open it by its place among its maker's open
files. So nothing of it can be left behind, however processes end, and it takes no part of /dev/shm, which containers keep
small. Where there is no such thing it is a file of the temporary folder, which is unlinked as soon as all have opened it.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import tempfile
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def cores() -> int:
    """Cores that this process may use: those it may run on, and no more than its container is given time for."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(allowed, quota())))


def quota(root: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> float:
    """Cores' worth of time that the control groups around this process grant it, or infinity."""
    granted = [math.inf]
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            base = root / controllers if controllers else root
            inside = base / path.lstrip("/")
            for folder in (inside, *inside.parents):
                if folder == base or base in folder.parents:
                    granted.append(_granted(folder))
    return min(granted)


def _granted(folder: Path) -> float:
    """Of one control group, in the words of its second version ("200000 100000", "max 100000") or its first (two files)."""
    with contextlib.suppress(OSError, ValueError):
        most, period = (folder / "cpu.max").read_text().split()
        return math.inf if most == "max" else int(most) / int(period)
    with contextlib.suppress(OSError, ValueError):
        most, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(most) / int(period) if int(most) > 0 else math.inf
    return math.inf


def usable() -> bool:
    """Whether ranks of this host can share memory: shared_memory wants the order of stores that x86-64 has."""
    return os.name == "posix" and platform.machine() in ("x86_64", "AMD64")


def shared_file() -> tuple[int, str]:
    """A new empty file that only this user can open: its number here, and the path by which others open it."""
    if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
        file = os.memfd_create("minifer")
        os.fchmod(file, 0o600)
        return file, f"/proc/{os.getpid()}/fd/{file}"
    return tempfile.mkstemp(prefix="minifer-", dir=memory_folder())


def open_shared(path: str, size: int | None = None) -> int:
    """Another process's shared file. size: what it must have."""
    file = os.open(path, os.O_RDWR)
    found = os.fstat(file)
    if found.st_uid != os.getuid() or (size is not None and found.st_size != size):
        os.close(file)
        raise RuntimeError(f"{Path(path).name} is not the memory that its rank announced")
    return file


def unlink(path: str) -> None:
    """Take a shared file's name away, if it has one: it lives on until nobody has it open."""
    if not path.startswith("/proc/"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def allocate(file: int, start: int, size: int, what: str) -> None:
    """Take memory for a part of a shared file, so that it is there when it is written to, whoever else takes of the same memory.

    Without this the first write to memory that has run out would kill the process.
    """
    try:
        os.posix_fallocate(file, start, size)
    except OSError as error:
        raise RuntimeError(
            f"{what} would share {size:,} bytes of memory{_left(file)}: free some, enlarge it (docker: --memory, --shm-size), "
            'use fewer ranks, or backend="gloo"'
        ) from error


def _left(file: int) -> str:
    """Of the file system that a file with a name lies in."""
    with contextlib.suppress(OSError):
        if os.fstat(file).st_nlink:
            space = os.fstatvfs(file)
            return f", {memory_folder()} has {space.f_bavail * space.f_frsize:,} left"
    return ", and there is no room for them"


def memory_folder() -> str:
    """Where shared files with names lie."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
