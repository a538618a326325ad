"""What a rank asks of its group, in two numbers: ranks compare them before anything moves.

Ranks that call different things (one sums 8 elements and the other 16, one broadcasts from rank 0 and the other from rank 1)
would each take the other's numbers for something they are not. So a collective's first step carries what it is beside the data,
and whoever sees that another rank calls something else raises, naming both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

Summing = Callable[[torch.Tensor, torch.Tensor], object]  # (what all ranks gave [n, elements], where the result goes [elements])

KINDS = ("all_reduce", "reduce", "all_gather", "gather", "reduce_scatter", "all_to_all", "broadcast", "scatter", "barrier")
ROOTED = ("reduce", "gather", "broadcast", "scatter")
DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)  # the same on all ranks
_KIND = {kind: number for number, kind in enumerate(KINDS)}
_DTYPE = {dtype: number for number, dtype in enumerate(DTYPES)}


class Call(NamedTuple):
    """One collective, as far as all ranks must mean the same by it."""

    kind: str
    bytes: int = 0  # of each rank; 0 where they may give different amounts
    dtype: torch.dtype = torch.uint8
    op: int = 0  # its place among REDUCTIONS
    root: int = 0  # a rank of the group

    def code(self) -> int:
        """Everything but the bytes, below 2³²."""
        return _KIND[self.kind] | self.op << 4 | _DTYPE[self.dtype] << 8 | self.root << 16

    @classmethod
    def read(cls, code: int, size: int) -> Call:
        """The call that has this code."""
        return cls(KINDS[code & 15], size, DTYPES[code >> 8 & 255], code >> 4 & 15, code >> 16 & 0xFFFF)

    def told(self, members: tuple[int, ...]) -> str:
        """In words. members: the world's numbers of the group's ranks."""
        if self.kind == "barrier":
            return "a barrier"
        op = f" ({REDUCTIONS[self.op][0]})" if "reduce" in self.kind else ""
        root = f" with rank {members[self.root]} as its root" if self.kind in ROOTED else ""
        size = f"{self.bytes} bytes of " if self.kind != "all_to_all" else ""
        return f"{self.kind}{op} of {size}{dtype_name(self.dtype)}{root}"


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" """
    return str(dtype).removeprefix("torch.")


def dtype_code(dtype: torch.dtype) -> int:
    """A dtype's number, the same on all ranks."""
    return _DTYPE[dtype]


def _add(parts: torch.Tensor, out: torch.Tensor) -> None:
    if len(parts) == 2:  # the quickest there is for two
        torch.add(parts[0], parts[1], out=out)
    else:  # in float32 for narrower dtypes, rounded once
        torch.sum(parts, 0, dtype=out.dtype, out=out)


def _average(parts: torch.Tensor, out: torch.Tensor) -> None:
    _add(parts, out)
    out /= len(parts)


def _by_two(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], parts: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(reduce(function, parts))


REDUCTIONS: tuple[tuple[str, Summing], ...] = (
    ("SUM", _add),
    ("AVG", _average),
    ("PRODUCT", partial(_by_two, torch.mul)),
    ("MIN", partial(_by_two, torch.minimum)),
    ("MAX", partial(_by_two, torch.maximum)),
    ("BAND", partial(_by_two, torch.bitwise_and)),
    ("BOR", partial(_by_two, torch.bitwise_or)),
    ("BXOR", partial(_by_two, torch.bitwise_xor)),
)


def reduction(op: Any) -> int:
    """The place of one of torch's reductions among REDUCTIONS."""
    for at, (name, _) in enumerate(REDUCTIONS):
        if op == getattr(dist.ReduceOp, name):
            return at
    raise ValueError(f"no such reduction over shared memory: {op}")
