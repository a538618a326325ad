"""What a rank does: when it computes, when it communicates, what it sends. One record feeds pictures, tables and tests.

    with trace.record(model) as record:          # on each rank
        decode.generate(model, prompts)
    return record                                # to the parent, like any result
    ...
    lines = trace.timeline(records)              # in the parent: each rank's computing, waiting, communicating

Techniques call plain torch.distributed and know nothing of this. A function mode sees every call of one of its functions on
the way in, whatever the backend: a dispatch mode would see neither a backend written in Python nor the end of a transfer.
An asynchronous call's event ends when its `wait` has returned, so when the data is there. Modules named by the caller are
spans of computing, by hooks that are gone when the record ends.

Payload bytes are what the call is about, as formulas count it: the full tensor of an all-reduce, the gathered result of an
all-gather, the unreduced input of a reduce-scatter, what a rank hands to an all-to-all. Bytes on the wire depend on the
backend's algorithm, so they are never recorded, only computed (`wire_bytes`, for rings).

Not seen: calls without a tensor (`barrier`), which look like computing. Techniques make none.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

# Which argument of a call is its payload: (position, keyword).
PAYLOAD = {
    "all_reduce": (0, "tensor"),
    "broadcast": (0, "tensor"),
    "reduce": (0, "tensor"),
    "all_gather": (0, "tensor_list"),
    "all_gather_single": (0, "output"),
    "all_gather_into_tensor": (0, "output_tensor"),
    "reduce_scatter": (1, "input_list"),
    "reduce_scatter_single": (1, "input"),
    "reduce_scatter_tensor": (1, "input"),
    "all_to_all": (1, "input_tensor_list"),
    "all_to_all_single": (1, "input"),
    "gather": (0, "tensor"),
    "scatter": (0, "tensor"),
    "send": (0, "tensor"),
    "isend": (0, "tensor"),
    "recv": (0, "tensor"),
    "irecv": (0, "tensor"),
}
SENDS, RECEIVES = ("send", "isend"), ("recv", "irecv")
_FUNCTIONS = {getattr(dist, name): name for name in PAYLOAD if hasattr(dist, name)}


@dataclass
class Event:
    """One call. Times are seconds of this host's monotonic clock, which all its processes share.

    start: the call. wait: when this rank began to wait for it (the call itself, unless it is asynchronous). end: the data
    is there. group: global ranks. peer: of a send or receive, the other side's global rank.
    """

    kind: str
    group: tuple[int, ...]
    bytes: int
    start: float
    wait: float
    end: float
    peer: int | None = None

    @property
    def wire_bytes(self) -> float:
        """Bytes that this rank sends if a ring does it: computed, not measured."""
        n = len(self.group)
        if self.kind == "all_reduce":
            return 2 * (n - 1) / n * self.bytes
        if self.kind.startswith(("all_gather", "reduce_scatter", "all_to_all")):
            return (n - 1) / n * self.bytes
        return 0.0 if self.kind in RECEIVES else float(self.bytes)


@dataclass
class Span:
    """A stretch of computing with a name."""

    name: str
    start: float
    end: float


@dataclass
class Record:
    """What one rank did between `start` and `end`."""

    rank: int = 0
    start: float = 0.0
    end: float = 0.0
    events: list[Event] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def count(self, kind: str) -> int:
        """Number of calls of this kind."""
        return sum(event.kind == kind for event in self.events)

    @property
    def bytes(self) -> int:
        """Payload of all calls; a transfer from rank to rank counts where it is sent."""
        return sum(event.bytes for event in self.events if event.kind not in RECEIVES)


@contextlib.contextmanager
def record(model: nn.Module | None = None, named: Callable[[str, nn.Module], bool] | None = None) -> Iterator[Record]:
    """Record this process's calls of torch.distributed until the block ends.

    model: its modules for which named(name, module) is true become spans; by default its chunks' layers, entrance and exit.
    """
    held = Record(rank=dist.get_rank() if dist.is_initialized() else 0)
    handles = [] if model is None else _hook(model, named or _by_layer, held)
    mode = _Mode(held)
    held.start = time.perf_counter()
    try:
        with mode:
            yield held
    finally:
        mode.settle()
        held.end = time.perf_counter()
        for handle in handles:
            handle.remove()


class _Mode(TorchFunctionMode):
    """Sees torch's Python functions on their way in, and times those of torch.distributed."""

    def __init__(self, held: Record) -> None:
        super().__init__()
        self.held = held
        # On a GPU a call returns when it is enqueued: its end is an event on the stream, read when all is over.
        self.on_gpu: list[tuple[Event, torch.cuda.Event, torch.cuda.Event]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _FUNCTIONS.get(function)
        if name is None:
            return function(*args, **kwargs)
        tensors = _payload(name, args, kwargs)
        on_gpu = bool(tensors) and tensors[0].is_cuda
        if on_gpu:
            began = torch.cuda.Event(enable_timing=True)
            began.record()
        start = time.perf_counter()
        work = function(*args, **kwargs)
        now = time.perf_counter()
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        event = Event(name, _members(kwargs), size, start, start, now, _peer(name, args, kwargs))
        self.held.events.append(event)
        asynchronous = isinstance(work, dist.Work)
        if on_gpu and not asynchronous:
            self.mark(event, began)
        return _Work(work, event, (lambda: self.mark(event, began)) if on_gpu else None) if asynchronous else work

    def mark(self, event: Event, began: torch.cuda.Event) -> None:
        ended = torch.cuda.Event(enable_timing=True)
        ended.record()
        self.on_gpu.append((event, began, ended))

    def settle(self) -> None:
        """Ends of what ran on a GPU."""
        if self.on_gpu:
            torch.cuda.synchronize()
        for event, began, ended in self.on_gpu:
            event.end = event.start + began.elapsed_time(ended) / 1000


class _Work:
    """The work of an asynchronous call, which notes when it is waited for and when that is over."""

    def __init__(self, work: dist.Work, event: Event, on_gpu: Callable[[], None] | None) -> None:
        self._work, self._event, self._on_gpu = work, event, on_gpu

    def wait(self, *args: Any) -> Any:
        self._event.wait = time.perf_counter()
        done = self._work.wait(*args)
        self._event.end = time.perf_counter()
        if self._on_gpu is not None:
            self._on_gpu()
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _payload(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    position, keyword = PAYLOAD[name]
    value = args[position] if len(args) > position else kwargs.get(keyword)
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def _members(kwargs: dict[str, Any]) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(kwargs.get("group") or dist.group.WORLD))


def _peer(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> int | None:
    if name not in SENDS + RECEIVES:
        return None
    side = "dst" if name in SENDS else "src"
    in_group = kwargs.get(f"group_{side}")
    if in_group is not None:
        return _members(kwargs)[in_group]
    return args[1] if len(args) > 1 else kwargs.get(side)


def _by_layer(name: str, module: nn.Module) -> bool:
    parts = name.split(".")
    return len(parts) > 1 and (parts[-1] in ("entrance", "exit") or parts[-2] == "layers")


def _hook(model: nn.Module, named: Callable[[str, nn.Module], bool], held: Record) -> list[Any]:
    """Spans around the forward of the modules that `named` picks."""
    handles, began = [], {}

    def before(module: nn.Module, _: Any) -> None:
        began[module] = time.perf_counter()

    for name, module in model.named_modules():
        if named(name, module):

            def after(module: nn.Module, _: Any, __: Any, name: str = name) -> None:
                held.spans.append(Span(name, began.pop(module), time.perf_counter()))

            handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    return handles


@dataclass
class Stretch:
    """A part of a rank's time. what: "computing", "waiting" (for another rank to come) or "communicating"."""

    what: str
    start: float
    end: float
    kind: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.start


def timeline(records: Sequence[Record]) -> list[list[Stretch]]:
    """Each rank's time, cut into computing, waiting and communicating, from records of all ranks of one host.

    A collective cannot move before its last member has called it: until then the others wait. Calls are matched across
    ranks by their group and order; a receive is matched with the sends of its peer.
    """
    ready = _ready(records)
    lines = []
    for record in records:
        line: list[Stretch] = []
        at = record.start
        for event in sorted(record.events, key=lambda event: event.wait):
            begin, end = max(at, event.wait), max(at, event.end)
            if end <= begin:
                continue  # it went on behind another event or behind computing: this rank lost nothing by it
            moves = min(max(ready.get(id(event), begin), begin), end)
            line.append(Stretch("computing", at, begin))
            line.append(Stretch("waiting", begin, moves, event.kind))
            line.append(Stretch("communicating", moves, end, event.kind))
            at = end
        line.append(Stretch("computing", at, record.end))
        lines.append([stretch for stretch in line if stretch.seconds > 0])
    return lines


def _ready(records: Sequence[Record]) -> dict[int, float]:
    """{id(event): when all whom it needs had called}."""
    calls: dict[tuple[Any, ...], dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        for event in record.events:
            if event.kind in SENDS:
                key: tuple[Any, ...] = ("transfer", record.rank, event.peer)
            elif event.kind in RECEIVES:
                key = ("transfer", event.peer, record.rank)
            else:
                key = ("together", *event.group)
            calls[key][record.rank].append(event)
    ready: dict[int, float] = {}
    for by_rank in calls.values():
        for together in zip(*by_rank.values()):
            last = max(event.start for event in together)
            ready |= {id(event): last for event in together}
    return ready


def seconds(line: Sequence[Stretch], what: str) -> float:
    """How long a rank did this."""
    return sum(stretch.seconds for stretch in line if stretch.what == what)
