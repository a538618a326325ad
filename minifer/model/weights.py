"""Where a parameter's numbers come from: pieces of checkpoint tensors, cut to what this rank needs, read slice by slice.

A model is built empty, on the meta device. Each parameter carries a list of pieces: a box of a named tensor of the
checkpoint, and the box of the parameter that it fills. A technique that keeps a part of a parameter selects from the
pieces; it touches no numbers. Fused, stacked, replicated and unevenly cut parameters are then all the same thing:

    checkpoint    k_proj [16, 32]    v_proj [16, 32]
    declare       kv [32, 32]:   k_proj[0:16] -> kv[0:16],  v_proj[0:16] -> kv[16:32]
    select        heads 8:16 of both:  k_proj[8:16] -> kv[0:8],  v_proj[8:16] -> kv[8:16]

`fill` then reads exactly those boxes, in blocks, straight into the parameter's dtype: the most memory it ever needs is the
finished weights and one block. Everything that can be wrong with a checkpoint is found before the first number is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

Box = tuple[tuple[int, int], ...]  # (start, stop) for each dimension
BLOCK_BYTES = 8 << 20  # of the checkpoint, read at a time


@dataclass(frozen=True)
class Piece:
    """The box `source` of the checkpoint tensor `name` fills the box `target` of the parameter."""

    name: str
    source: Box
    target: Box


class Checkpoint(Protocol):
    """A set of named tensors on disk (checkpoints.py has one for safetensors, gguf.py one for GGUF)."""

    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str, box: Box) -> torch.Tensor:
        """A box of a tensor, on the CPU, in any floating dtype."""
        ...


def declare(*parts: tuple[str, tuple[int, ...]]) -> nn.Parameter:
    """An empty parameter made of whole checkpoint tensors (name, shape), stacked along their first dimension."""
    wholes = []
    for name, shape in parts:
        everything = tuple((0, size) for size in shape)
        wholes.append(_empty(shape, (Piece(name, everything, everything),)))
    return stack(wholes)


def pieces_of(parameter: torch.Tensor) -> tuple[Piece, ...]:
    """The pieces that `declare` or `select` gave a parameter."""
    return parameter.pieces  # type: ignore[attr-defined]


def select(parameter: torch.Tensor, dim: int, ranges: Sequence[tuple[int, int]]) -> nn.Parameter:
    """The (still empty) parameter with only these index ranges of one dimension, in this order."""
    pieces, at = [], 0
    for start, stop in ranges:
        if not 0 <= start <= stop <= parameter.shape[dim]:
            raise ValueError(f"range {start}:{stop} of a dimension of {parameter.shape[dim]}")
        for piece in pieces_of(parameter):
            low, high = max(start, piece.target[dim][0]), min(stop, piece.target[dim][1])
            if low < high:
                shift = piece.source[dim][0] - piece.target[dim][0]
                source = _replaced(piece.source, dim, (low + shift, high + shift))
                target = _replaced(piece.target, dim, (low - start + at, high - start + at))
                pieces.append(Piece(piece.name, source, target))
        at += stop - start
    shape = list(parameter.shape)
    shape[dim] = at
    return _empty(tuple(shape), tuple(pieces))


def stack(parameters: Sequence[torch.Tensor]) -> nn.Parameter:
    """One (still empty) parameter with the rows of all of these, one behind the other: filled at once, never copied together."""
    pieces, at = [], 0
    for parameter in parameters:
        for piece in pieces_of(parameter):
            start, stop = piece.target[0]
            pieces.append(Piece(piece.name, piece.source, _replaced(piece.target, 0, (start + at, stop + at))))
        at += parameter.shape[0]
    return _empty((at, *parameters[0].shape[1:]), tuple(pieces))


def tensors_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """{checkpoint tensor: shape} of a whole model. Recorded before any technique cuts it: the checkpoint is checked against it."""
    sizes: dict[str, tuple[int, ...]] = {}
    for parameter in model.parameters():
        for piece in pieces_of(parameter):
            held = sizes.get(piece.name, (0,) * len(piece.source))
            sizes[piece.name] = tuple(max(stop, size) for (_, stop), size in zip(piece.source, held))
    return sizes


def check(wanted: dict[str, tuple[int, ...]], checkpoint: Checkpoint, may_be_extra: Sequence[str] = ()) -> None:
    """Raise a ValueError that names every missing, misshapen and unknown tensor. Run on every rank, over the whole checkpoint.

    may_be_extra: ends of names that are no fault, and beginnings, which end in a dot.
    """
    found, ends = checkpoint.shapes, tuple(may_be_extra)
    beginnings = tuple(part for part in ends if part.endswith("."))
    missing = sorted(wanted.keys() - found.keys())
    extra = sorted(name for name in found.keys() - wanted.keys() if not (name.endswith(ends) or name.startswith(beginnings)))
    misshapen = [
        f"{name}: {list(found[name])} in the checkpoint, {list(shape)} by the config"
        for name, shape in wanted.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    faults = []
    if missing:
        faults.append(f"missing {_some(missing)}")
    if extra:
        faults.append(f"unknown {_some(extra)}")
    if misshapen:
        faults.append(f"misshapen {_some(misshapen)}")
    if faults:
        raise ValueError(f"the checkpoint does not fit the config: {'; '.join(faults)}")


def fill(
    model: nn.Module,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> None:
    """Give every empty parameter its numbers. Parameters with equal pieces (a tied embedding and head) become one.

    progress: called with the number of bytes of parameters filled since its last call.
    """

    def read(parameter: nn.Parameter) -> torch.Tensor:
        real = torch.empty(parameter.shape, dtype=dtype, device=device)
        for piece in pieces_of(parameter):
            for source, target in _blocks(piece):
                real[_slices(target)].copy_(checkpoint.read(piece.name, source))
        if progress is not None:
            progress(real.nbytes)
        return real

    _make_real(model, read)


def initialise(model: nn.Module, dtype: torch.dtype, device: torch.device | str, seed: int, spread: float = 0.02) -> None:
    """Random numbers instead of a checkpoint, for training and for tests: matrices normal, norms one, biases zero."""
    generator = torch.Generator().manual_seed(seed)

    def draw(parameter: nn.Parameter) -> torch.Tensor:
        if parameter.dim() > 1:
            return torch.empty(parameter.shape).normal_(0, spread, generator=generator).to(device, dtype)
        value = 0.0 if pieces_of(parameter)[0].name.endswith("bias") else 1.0
        return torch.full(parameter.shape, value, dtype=dtype, device=device)

    _make_real(model, draw)


def collect(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The reverse of fill, on a whole model: {checkpoint tensor: its numbers}, to be saved."""
    tensors: dict[str, torch.Tensor] = {}
    for parameter in model.parameters():
        for piece in pieces_of(parameter):
            tensors[piece.name] = parameter.detach()[_slices(piece.target)].to("cpu", dtype, copy=True).contiguous()
    return tensors


def _make_real(model: nn.Module, make: Callable[[nn.Parameter], torch.Tensor]) -> None:
    """Put make(parameter) in place of every empty parameter. Those with equal pieces become one."""
    made: dict[tuple[torch.Size, tuple[Piece, ...]], nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.is_meta:
                continue
            key = (parameter.shape, pieces_of(parameter))
            if key not in made:
                made[key] = nn.Parameter(make(parameter), requires_grad=False)
                made[key].pieces = key[1]  # type: ignore[attr-defined]
            setattr(module, name, made[key])


def _empty(shape: tuple[int, ...], pieces: tuple[Piece, ...]) -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
    parameter.pieces = pieces  # type: ignore[attr-defined]
    return parameter


def _blocks(piece: Piece) -> Iterator[tuple[Box, Box]]:
    """The piece cut along its first dimension into blocks of about BLOCK_BYTES (counted as float32)."""
    row_bytes = 4
    for start, stop in piece.source[1:]:
        row_bytes *= stop - start
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    (first, last), offset = piece.source[0], piece.target[0][0] - piece.source[0][0]
    for start in range(first, last, step):
        stop = min(last, start + step)
        yield _replaced(piece.source, 0, (start, stop)), _replaced(piece.target, 0, (start + offset, stop + offset))


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _replaced(box: Box, dim: int, value: tuple[int, int]) -> Box:
    return (*box[:dim], value, *box[dim + 1 :])


def _some(names: Sequence[str]) -> str:
    """The first ten, and how many more."""
    shown = ", ".join(names[:10])
    return shown if len(names) <= 10 else f"{shown} and {len(names) - 10} more"
