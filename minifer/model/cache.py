"""The key/value cache: what the layers computed for earlier tokens, so that a step runs one token and not the whole text.

Contiguous: each layer has keys and values [R, K, capacity, h] and each row its own length.

    row 0   k0 k1 k2 k3 k4 .  .  .      length 5
    row 1   k0 k1 .  .  .  .  .  .      length 2

A pass says where each of its rows starts; whatever the row holds from there on is forgotten first. So rolling back rejected
drafts, or going back in a conversation, is implied by the next pass and costs no call. The cache knows which tokens it
holds (`tokens`), so a conversation's next turn finds by itself how much of its text is already there.

Cost: 2 * layers * K * h * bytes per element, a token (bfloat16 SmolLM2: 23 KB).

Letters: R rows, K key/value heads, h width of a head, S keys of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .passes import Pass

SHORT = 16  # tokens a row, on average: passes up to here are written in one step, longer ones row by row


@dataclass
class RowState:
    """A row taken out of a cache: its tokens and, for each layer, keys and values [K, S, h]."""

    tokens: list[int]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


class Cache:
    """Keys and values of `rows` rows of at most `capacity` tokens. shapes: (K, h) of each layer that this rank runs."""

    def __init__(
        self,
        shapes: list[tuple[int, int]],
        rows: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if rows < 1 or capacity < 1:
            raise ValueError(f"a cache needs at least one row and one token: {rows} rows, capacity {capacity}")
        self.rows, self.capacity = rows, capacity
        # Zeros, not empty: a masked slot still enters a product, and 0 * NaN is NaN.
        self.keys = [torch.zeros(rows, heads, capacity, width, dtype=dtype, device=device) for heads, width in shapes]
        self.values = [torch.zeros_like(keys) for keys in self.keys]
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        # Of each row's last span: where it started, and its tokens.
        self._last_start = [0] * rows
        self._last_ids: list[list[int]] = [[] for _ in range(rows)]

    @property
    def lengths(self) -> list[int]:
        """How many tokens each row holds."""
        return [len(tokens) for tokens in self.tokens]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values, used or not."""
        return sum(x.nbytes for x in (*self.keys, *self.values))

    def holds(self, row: int, tokens: list[int]) -> int:
        """How many of these tokens, from the first on, a row holds: the length of the common beginning."""
        held, size = self.tokens[row], min(len(self.tokens[row]), len(tokens))
        if held[:size] == tokens[:size]:
            return size
        return next(at for at in range(size) if held[at] != tokens[at])

    def begin(self, pass_: Pass) -> None:
        """Once a pass, before its first layer: move together what a tree keeps, and cut each row to its span's start."""
        keep = pass_.keep or {}
        for row, start, count in pass_.spans:
            if not 0 <= row < self.rows:
                raise ValueError(f"row {row} of a cache of {self.rows} rows")
            held = self._last_start[row] + len(keep[row]) if row in keep else len(self.tokens[row])
            if start > held:
                raise ValueError(f"row {row} holds {held} tokens: a pass cannot start at {start}")
            if start + count > self.capacity:
                raise ValueError(f"row {row}: {start} + {count} tokens do not fit a cache of {self.capacity}")
        for row, slots in keep.items():
            self._keep(row, slots)
        for row, start, _ in pass_.spans:
            del self.tokens[row][start:]

    def commit(self, pass_: Pass) -> None:
        """Once a pass, after its last layer: from now on the rows hold its tokens. A pass that was broken off never says so."""
        ids = pass_.ids.tolist()
        for number, (at, (row, start, count)) in enumerate(zip(pass_.offsets, pass_.spans)):
            self._last_ids[row], self._last_start[row] = ids[at : at + count], start
            if pass_.parents is not None:  # of a tree, only what stands in its place in a text: up to where it branches first
                count = next((slot for slot, parent in enumerate(pass_.parents[number]) if parent != slot - 1), count)
            self.tokens[row] += ids[at : at + count]

    def append(self, layer: int, pass_: Pass, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write a layer's keys and values [N, K, h] of the pass that `begin` announced."""
        if len(pass_.spans) > 1 and len(pass_.ids) <= SHORT * len(pass_.spans):
            rows, slots = pass_.once("places in the cache", lambda: _places(pass_, k.device))
            self.keys[layer][rows, :, slots] = k
            self.values[layer][rows, :, slots] = v
            return
        for at, (row, start, count) in zip(pass_.offsets, pass_.spans):
            self.keys[layer][row, :, start : start + count] = k[at : at + count].transpose(0, 1)
            self.values[layer][row, :, start : start + count] = v[at : at + count].transpose(0, 1)

    def read(self, layer: int, rows: tuple[int, ...], first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, K, end - first, h] of these rows: a view where the rows are neighbours, else a copy."""
        neighbours = rows == tuple(range(rows[0], rows[0] + len(rows)))
        which = slice(rows[0], rows[0] + len(rows)) if neighbours else list(rows)
        return self.keys[layer][which, :, first:end], self.values[layer][which, :, first:end]

    def export(self, row: int) -> RowState:
        """A copy of a row, for a hand-over to another cache."""
        length = len(self.tokens[row])
        return RowState(
            list(self.tokens[row]),
            [keys[row, :, :length].clone() for keys in self.keys],
            [values[row, :, :length].clone() for values in self.values],
        )

    def load(self, row: int, state: RowState) -> None:
        """Put an exported row in place of what this row held."""
        length = len(state.tokens)
        mine = [tuple(keys[row, :, :length].shape) for keys in self.keys]
        theirs = [tuple(keys.shape) for keys in state.keys]
        if length > self.capacity or mine != theirs:
            raise ValueError(f"a row of {length} tokens and {theirs} does not fit a cache of {self.capacity} and {mine}")
        for target, source in zip((*self.keys, *self.values), (*state.keys, *state.values)):
            target[row, :, :length] = source
        self.tokens[row] = list(state.tokens)
        self._last_start[row], self._last_ids[row] = length, []

    def _keep(self, row: int, slots: list[int]) -> None:
        """Of the row's last span, keep only these of its tokens, moved together."""
        start = self._last_start[row]
        in_place = next((at for at, slot in enumerate(slots) if slot != at), len(slots))  # nothing before it moves
        source, end = [start + slot for slot in slots[in_place:]], start + len(slots)
        for x in (*self.keys, *self.values) if source else ():
            x[row, :, start + in_place : end] = x[row, :, source]  # the right side is a copy, so overlap does no harm
        self.tokens[row] = self.tokens[row][:start] + [self._last_ids[row][slot] for slot in slots]


def _places(pass_: Pass, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and slot of each token, [N] each."""
    rows = [span.row for span in pass_.spans for _ in range(span.count)]
    slots = [slot for span in pass_.spans for slot in range(span.start, span.start + span.count)]
    return torch.tensor(rows, device=device), torch.tensor(slots, device=device)
