"""Functions on their way to a rank: closures, lambdas and a notebook cell's functions too, with their places in the source.

cloudpickle carries what pickle cannot. It drops the names of source files, though, and a rank has no notebook to look into:
both are put back here, so that a traceback from a rank shows the lines that the user wrote.
"""

from __future__ import annotations

import io
import linecache
from collections import ChainMap
from collections.abc import Callable
from types import CodeType
from typing import Any, ClassVar

import cloudpickle

PLACEHOLDER = "<dynamic-code>"  # what cloudpickle writes for every file name
_code = cloudpickle.Pickler.dispatch_table[CodeType]


def _code_with_file(code: CodeType) -> tuple[Any, ...]:
    make, args, *rest = _code(code)
    return (make, tuple(code.co_filename if arg == PLACEHOLDER else arg for arg in args), *rest)


class _Pickler(cloudpickle.Pickler):
    dispatch_table: ClassVar = ChainMap({CodeType: _code_with_file}, cloudpickle.Pickler.dispatch_table)


def pack(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """The function, its arguments, and the source lines that exist only in this process (cells).

    Raises a ValueError if something in them cannot travel.
    """
    only_here = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump((function, args, only_here))
    except Exception as error:
        name = getattr(function, "__name__", repr(function))
        raise ValueError(
            f"{name} or its arguments hold something that cannot travel to another process ({type(error).__name__}: {error}). "
            "Make such things inside of the function: a model, say, is loaded on each rank"
        ) from error
    return buffer.getvalue()
