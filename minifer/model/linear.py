"""y = x W^T + b, in the one place where it may be made faster."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .weights import declare


class Linear(nn.Module):
    """A matrix [out, in] of the checkpoint, and its bias [out] if it has one."""

    def __init__(self, name: str, out: int, width: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = declare((f"{name}.weight", (out, width)))
        self.bias = declare((f"{name}.bias", (out,))) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]"""
        return F.linear(x, self.weight, self.bias)
