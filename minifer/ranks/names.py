"""Collectives by the names that torch 2.13 gives them; earlier releases have the same ones by other names."""

from __future__ import annotations

import torch.distributed as dist

if hasattr(dist, "all_gather_single"):
    all_gather_single = dist.all_gather_single
    reduce_scatter_single = dist.reduce_scatter_single
else:  # torch 2.11 and 2.12
    all_gather_single = dist.all_gather_into_tensor
    reduce_scatter_single = dist.reduce_scatter_tensor

__all__ = ["all_gather_single", "reduce_scatter_single"]
