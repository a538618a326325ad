"""Functions, arguments and results on their way between processes: closures, a notebook cell's functions, large tensors.

cloudpickle carries what pickle cannot. It drops the names of source files, though, and a rank has no notebook to look into:
both are put back here, so that a traceback from a rank shows the lines that the user wrote.

    Parcel   data     the pickle, which goes through the pipe
             place    memory in which the bytes of its tensors and arrays stand, one behind the other: written once, read by
                      every rank, so that size costs about what memory costs
"""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import warnings
from collections import ChainMap
from collections.abc import Callable
from pickle import PickleBuffer
from types import CodeType
from typing import Any, ClassVar, NamedTuple

import cloudpickle
import torch
from torch.storage import TypedStorage, UntypedStorage

from . import host

PLACEHOLDER = "<dynamic-code>"  # what cloudpickle writes for every file name
SMALL_BYTES = 4096  # what is smaller goes with the pickle
MUCH_BYTES = 50 << 20  # of a function and its arguments
_code = cloudpickle.Pickler.dispatch_table[CodeType]


class Parcel(NamedTuple):
    """What is sent. file: the sender's own; it stays open until the parcel has been unpacked."""

    data: bytes
    sizes: list[int]
    place: str = ""
    file: int = -1

    def close(self) -> None:
        """Give its memory back."""
        if self.file >= 0:
            with contextlib.suppress(OSError):
                os.close(self.file)
            host.unlink(self.place)


class _Storage:
    """The bytes of one storage. Tensors that share it hold the same object, so they share it where they arrive, too."""

    def __init__(self, storage: UntypedStorage) -> None:
        self.bytes: Any = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _arrived, (PickleBuffer(self.bytes),)


def _arrived(data: Any) -> UntypedStorage:
    return torch.frombuffer(data, dtype=torch.uint8).untyped_storage() if len(data) else UntypedStorage(0)


def _same(storage: UntypedStorage) -> UntypedStorage:
    return storage


def _typed(storage: UntypedStorage, dtype: torch.dtype) -> TypedStorage:
    return TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _code_with_file(code: CodeType) -> tuple[Any, ...]:
    make, args, *rest = _code(code)
    return (make, tuple(code.co_filename if arg == PLACEHOLDER else arg for arg in args), *rest)


class _Pickler(cloudpickle.Pickler):
    dispatch_table: ClassVar = ChainMap({CodeType: _code_with_file}, cloudpickle.Pickler.dispatch_table)

    def __init__(self, file: io.BytesIO, buffers: list[memoryview]) -> None:
        def is_small(buffer: PickleBuffer) -> bool:
            with contextlib.suppress(BufferError):  # not in one piece
                raw = buffer.raw()
                if raw.nbytes >= SMALL_BYTES:
                    buffers.append(raw)
                    return False
            return True

        super().__init__(file, protocol=5, buffer_callback=is_small)
        self._storages: dict[int, _Storage] = {}

    def reducer_override(self, obj: Any) -> Any:
        storage = obj._untyped_storage if isinstance(obj, TypedStorage) else obj
        if isinstance(storage, UntypedStorage) and storage.device.type == "cpu":
            held = self._storages.setdefault(storage._cdata, _Storage(storage))
            return (_typed, (held, obj.dtype)) if isinstance(obj, TypedStorage) else (_same, (held,))
        return super().reducer_override(obj)


def pack(function: Callable[..., Any], args: tuple[Any, ...]) -> Parcel:
    """The function, its arguments, and the source lines that exist only in this process (cells).

    Raises a ValueError if something in them cannot travel.
    """
    only_here = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
    name = getattr(function, "__name__", repr(function))
    try:
        parcel = pack_value((function, args, only_here))
    except Exception as error:
        raise ValueError(
            f"{name} or its arguments hold something that cannot travel to another process ({type(error).__name__}: {error}). "
            "Make such things inside of the function: a model, say, is loaded on each rank"
        ) from error
    much = len(parcel.data) + sum(parcel.sizes)
    if much > MUCH_BYTES:
        warnings.warn(
            f"{name} takes {much >> 20} MiB along to every rank: a model is better loaded inside of the function", stacklevel=3
        )
    return parcel


def pack_value(value: Any) -> Parcel:
    """Whatever it is. Raises what pickling it raises."""
    stream, buffers = io.BytesIO(), list[memoryview]()
    _Pickler(stream, buffers).dump(value)
    if not buffers:
        return Parcel(stream.getvalue(), [])
    file, place = host.shared_file()
    parcel = Parcel(stream.getvalue(), [buffer.nbytes for buffer in buffers], place, file)
    try:
        for buffer in buffers:
            rest = buffer.cast("B") if buffer.nbytes else buffer
            while rest.nbytes:
                rest = rest[os.write(file, rest) :]
    except BaseException:
        parcel.close()
        raise
    return parcel


def unpack(data: bytes, sizes: list[int], place: str) -> Any:
    """What a parcel holds. Its tensors and arrays are copies, and this process's own."""
    buffers: list[Any] = [torch.empty(size, dtype=torch.uint8).numpy() for size in sizes]
    if sizes:
        with open(host.open_shared(place, sum(sizes)), "rb", buffering=0) as file:
            file.seek(0)
            for buffer in buffers:
                into = memoryview(buffer)
                while into.nbytes:
                    got = file.readinto(into)
                    if not got:
                        raise EOFError(f"a parcel of {sum(sizes):,} bytes ends early")
                    into = into[got:]
    return cloudpickle.loads(data, buffers=buffers)
