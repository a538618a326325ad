"""What ranks write to their two output streams: kept in files, shown by the parent rank by rank.

Ranks that print as they run would mix their lines, in another order every time. So each has two files, and the parent shows
what is new in them when a function has returned, or failed: first rank 0's lines, then rank 1's, ...

Showing never fails: a character that the parent's stream does not have is shown as a replacement, and results do not depend on it.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO

TORCH_LOG = re.compile(r"(\[rank\d+\]:)?\s*\[[IWE]\d{4} ")  # "[W1129 12:00:00.1 file.cpp:12] ...", perhaps behind "[rank0]:"


def output_file(folder: str, rank: int, number: int) -> Path:
    """Where a rank's stdout (1) or stderr (2) goes."""
    return Path(folder) / f"rank{rank}.{number}"


class Outputs:
    """The output files of a world's ranks. 1 is stdout, 2 is stderr."""

    def __init__(self, folder: str, ranks: int) -> None:
        self.folder, self.ranks = folder, ranks
        self._shown = {(rank, number): 0 for rank in range(ranks) for number in (1, 2)}

    def read(self, rank: int, number: int) -> str:
        """All that a rank wrote so far."""
        try:
            return output_file(self.folder, rank, number).read_bytes().decode("utf-8", "replace")  # "\r" is kept
        except OSError:
            return ""

    def show(self) -> None:
        """What is new, without torch's own log lines."""
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            for rank in range(self.ranks):
                text = self.read(rank, number)
                fresh, self._shown[rank, number] = text[self._shown[rank, number] :], len(text)
                for line in lines(fresh):
                    if not TORCH_LOG.match(line):
                        _print(f"[rank {rank}] {line}", stream)
            with suppress(Exception):
                stream.flush()

    def take_stack(self, rank: int) -> str:
        """Of the stack that faulthandler wrote last, innermost frame first, the caller's own frames. It is not shown again."""
        text = self.read(rank, 2)
        self._shown[rank, 2] = len(text)
        frames = text.rpartition("(most recent call first):")[2].strip("\n").splitlines()
        workers = [at for at, frame in enumerate(frames) if f'{os.sep}worker.py"' in frame]
        return "\n".join(frames[: workers[0]] if workers else frames[:20])


def lines(text: str) -> list[str]:
    """Lines as a terminal shows them in the end: "\\n" ends one, and what stands before a "\\r" is written over."""
    return [line.rstrip("\r").rpartition("\r")[2] for line in text.removesuffix("\n").split("\n")] if text else []


def _print(line: str, stream: TextIO) -> None:
    """On a stream of any encoding, or one that is closed."""
    with suppress(Exception):
        encoding = getattr(stream, "encoding", None) or "utf-8"
        print(line.encode(encoding, "replace").decode(encoding), file=stream)
