"""What a caller of ranks is told when one of them failed."""

from __future__ import annotations


class RankError(RuntimeError):
    """A rank raised, died or hung. rank: which one. Its own exception, where it could be sent, is the cause (`__cause__`)."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type[RankError], tuple[int, str]]:
        return type(self), (self.rank, str(self))
