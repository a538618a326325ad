"""Ranks: start them, run functions on them, see what they do. Knows nothing of models.

`launch` and `Ranks` start processes; `trace` records what they compute, send and wait for.
"""

from . import trace
from .errors import RankError
from .launch import Ranks, launch

__all__ = ["RankError", "Ranks", "launch", "trace"]
