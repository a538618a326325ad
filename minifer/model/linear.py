"""y = x W^T + b, in the one place where it is made faster.

A decode step multiplies one row by every matrix, so its speed is how fast the matrices are read. Two things help on a CPU:

    fuse    q, k and v (and gate and up) read the same x: one matrix of all their rows is one call. Done on the empty model,
            so that the rows are read to where they stay
    pack    oneDNN reads a bfloat16 matrix about twice as fast from its own blocked layout as from rows. Done when it is filled

Everything has a plain fallback: other dtypes, devices and processors multiply rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from .weights import declare, stack

BLOCKED_FOR = 1  # rows of x that the blocked layout is chosen for: a decode step; wider passes use it too


class Linear(nn.Module):
    """A matrix [out, in] of the checkpoint, and its bias [out] if it has one."""

    def __init__(self, name: str, out: int, width: int, bias: bool = False) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = declare((f"{name}.weight", (out, width)))
        self.bias = declare((f"{name}.bias", (out,))) if bias else None
        self.packed: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out]"""
        if self.packed is not None:
            return torch.ops.mkldnn._linear_pointwise.default(x, self.packed, self.bias, "none", [], "")
        assert self.weight is not None
        return F.linear(x, self.weight, self.bias)

    @property
    def rows(self) -> torch.Tensor:
        """The matrix [out, in], also where it is packed: then as a copy."""
        if self.weight is not None:
            return self.weight.detach()
        assert self.packed is not None
        unit = torch.eye(self.packed.shape[1], dtype=self.packed.dtype, device=self.packed.device)
        return torch.ops.mkldnn._linear_pointwise.default(unit, self.packed, None, "none", [], "").t()

    def pack(self) -> int:
        """Keep the matrix in oneDNN's layout instead of in rows, where that can be. Returns the bytes of the new copy."""
        if self.weight is None or not packs(self.weight):
            return 0
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), BLOCKED_FOR)
        size, self.weight = self.weight.nbytes, None
        return size


def fuse(parts: Sequence[Linear]) -> Linear:
    """One (still empty) Linear with the outputs of all parts, one behind the other."""
    fused = Linear.__new__(Linear)
    nn.Module.__init__(fused)
    fused.weight = stack([part.weight for part in parts if part.weight is not None])
    biases = [part.bias for part in parts if part.bias is not None]
    assert len(biases) in (0, len(parts)), "either all parts have a bias or none"
    fused.bias = stack(biases) if biases else None
    fused.packed = None
    return fused


def linear_of(weight: torch.Tensor, pack: bool = True) -> Linear:
    """A Linear of numbers that are there already [out, in]. pack: where that pays."""
    made = Linear.__new__(Linear)
    nn.Module.__init__(made)
    made.weight, made.bias, made.packed = nn.Parameter(weight, requires_grad=False), None, None
    if pack:
        made.pack()
    return made


def packs(weight: torch.Tensor) -> bool:
    """Whether oneDNN has a faster layout for this matrix here: bfloat16, on a CPU that multiplies it natively."""
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and torch.backends.mkldnn.is_available()
    return on_cpu and torch.ops.mkldnn._is_mkldnn_bf16_supported()
