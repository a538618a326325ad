"""What a process takes over from its caller: environment, file mode mask, limits, locale.

Ranks come from a fork server that was started once, so by themselves they would have what their caller had then. Each launch
tells them what it has now. (What a library reads only while it is imported stays as it was: torch is imported already.)
"""

from __future__ import annotations

import contextlib
import locale
import os
import time
from dataclasses import dataclass
from pathlib import Path

with contextlib.suppress(ImportError):  # not on Windows
    import resource

LIMITS = [f"RLIMIT_{name}" for name in ("AS", "CORE", "CPU", "DATA", "FSIZE", "MEMLOCK", "NOFILE", "NPROC", "STACK")]


@dataclass(frozen=True)
class Surroundings:
    """Of one process, at one time."""

    environment: dict[str, str]
    umask: int
    limits: dict[str, tuple[int, int]]  # soft, hard
    locale: str

    @classmethod
    def here(cls) -> Surroundings:
        """This process's own, now."""
        limits = {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS if hasattr(resource, name)}
        return cls(dict(os.environ), _umask(), limits, locale.setlocale(locale.LC_ALL))

    def adopt(self) -> None:
        """Make them this process's own."""
        os.environ.clear()
        os.environ.update(self.environment)
        if hasattr(time, "tzset"):
            time.tzset()
        os.umask(self.umask)
        for name, wanted in self.limits.items():
            if resource.getrlimit(getattr(resource, name)) != wanted:
                with contextlib.suppress(ValueError, OSError):  # a hard limit that was lower once stays so
                    resource.setrlimit(getattr(resource, name), wanted)
        with contextlib.suppress(locale.Error):
            locale.setlocale(locale.LC_ALL, self.locale)


def _umask() -> int:
    """It can only be read by setting it, which other threads might notice; Linux shows it."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path("/proc/self/status").read_text().partition("\nUmask:")[2].split()[0], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
