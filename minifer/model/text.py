"""Text out of a stream of ids, piece by piece: never half a character, never a piece of a stop string.

A byte-level token can hold any part of a character's bytes, and a stop string can begin in one piece and end in a later
one. Both are solved alike: what cannot be told yet is held back, and no longer than it must be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no character
LONGEST_CHARACTER = 4  # bytes, so at most as many tokens


class Detokenizer:
    """Feed ids, get text. `decode` turns a list of ids into text."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []  # the last piece that left, as context, and what is held back
        self._sent = 0  # how many of them have left

    def feed(self, new: int) -> str:
        """The text that this id completes, perhaps none."""
        self._ids.append(new)
        text = self._fresh()
        held = len(self._ids) - self._sent
        # An unfinished character shows as a replacement at the end. Bytes that never become one are let go in the end.
        if text.endswith(REPLACEMENT) and held < LONGEST_CHARACTER:
            return ""
        self._ids, self._sent = self._ids[self._sent :], held
        return text

    def flush(self) -> str:
        """What is held back at the end of the stream: an unfinished character becomes one replacement."""
        text = self._fresh() if len(self._ids) > self._sent else ""
        self._sent = len(self._ids)
        return text.rstrip(REPLACEMENT) + REPLACEMENT if text.endswith(REPLACEMENT) else text

    def _fresh(self) -> str:
        """Text of the ids not yet sent. Decoded behind the ids before them, because decoders treat the first one specially."""
        return self._decode(self._ids)[len(self._decode(self._ids[: self._sent])) :]


class StopStrings:
    """Feed pieces of text, get what may leave. After a stop string was found, nothing more does; it does not leave itself."""

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise ValueError("an empty stop string would stop everything")
        self._stops, self._held, self.found = tuple(stops), "", False

    def feed(self, piece: str) -> str:
        """The text that cannot belong to a stop string any more."""
        if self.found:
            return ""
        text = self._held + piece
        places = [place for place in (text.find(stop) for stop in self._stops) if place >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        keep = max((self._overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back and turned out harmless, at the end of the stream."""
        text, self._held = self._held, ""
        return text

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that begins `stop`."""
        for size in range(min(len(text), len(stop) - 1), 0, -1):
            if stop.startswith(text[-size:]):
                return size
        return 0
