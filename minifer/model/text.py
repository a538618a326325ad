"""Text out of a stream of ids, piece by piece: never half a character, never a piece of a stop string.

A byte-level token can hold any part of a character's bytes, and a stop string can begin in one piece and end in a later
one. Both are solved alike: what cannot be told yet is held back, and no longer than it must be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no character
UNFINISHED = 3  # bytes at most of a character that is not complete, so at most as many replacements
CONTEXT = 8  # ids kept in front, because decoders treat the first one specially


class Detokenizer:
    """Feed ids, get text. decode: a list of ids -> text. before: the ids that the stream continues, a prompt's, say."""

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(before[-CONTEXT:])
        self._shown = len(decode(self._ids)) if self._ids else 0  # characters of their text that need not be shown (again)

    def feed(self, new: int) -> str:
        """The text that this id completes, perhaps none."""
        self._ids.append(new)
        text = self._decode(self._ids)
        # A character that is not complete yet shows as replacements at the end: so few can still turn into one.
        held = min(len(text) - len(text.rstrip(REPLACEMENT)), UNFINISHED)
        end = len(text) - held
        piece, self._shown = text[self._shown : end], max(self._shown, end)
        if not held and len(self._ids) > 2 * CONTEXT:
            self._forget()
        return piece

    def flush(self) -> str:
        """What is held back at the end of the stream: an unfinished character becomes one replacement."""
        text = self._decode(self._ids)
        rest, self._shown = text[self._shown :], len(text)
        return rest.rstrip(REPLACEMENT) + REPLACEMENT if rest.endswith(REPLACEMENT) else rest

    def _forget(self) -> None:
        """Keep the last few ids only, if they have a text to stand behind."""
        text = self._decode(self._ids[-CONTEXT:])
        if text:
            self._ids, self._shown = self._ids[-CONTEXT:], len(text)


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
