"""The backend of processes that share memory, against gloo and against plain sums."""

import os
import random
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minifer import Ranks, launch
from minifer.ranks import host, segment, shared_memory

pytestmark = pytest.mark.skipif(not host.usable(), reason="needs POSIX and an x86-64 processor")

KINDS = ["all_reduce", "all_gather", "all_gather_list", "reduce_scatter", "reduce_scatter_list", "all_to_all", "all_to_all_list",
         "broadcast", "reduce", "gather", "scatter", "ring", "object"]  # fmt: skip
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8]
OPS = ["SUM", "PRODUCT", "MIN", "MAX"]
cases = st.tuples(
    st.sampled_from(KINDS), st.sampled_from(DTYPES), st.lists(st.integers(0, 9), min_size=0, max_size=3), st.integers(0, 2**20),
    st.sampled_from(OPS), st.booleans(),
)  # fmt: skip


def perform(kind, dtype, shape, seed, op, group):
    """One collective, with numbers that follow from the seed and the rank; what it leaves here."""
    rank, n = group.rank(), group.size()
    root, op = seed % n, getattr(dist.ReduceOp, op)

    def numbers(*size, of=rank):
        generator = torch.Generator().manual_seed(seed * 8 + of)
        return torch.randint(0, 3, size, generator=generator).to(dtype)  # products stay exact in every dtype

    def empty(*size):
        return torch.full(size, 7).to(dtype)

    x = numbers(*shape)
    match kind:
        case "all_reduce":
            dist.all_reduce(x, op, group=group)
        case "reduce":
            dist.reduce(x, op=op, group=group, group_dst=root)
            if rank != root:  # elsewhere it is undefined
                return [torch.empty(0)]
        case "broadcast":
            dist.broadcast(x, group=group, group_src=root)
        case "all_gather":
            x = dist.all_gather_single(out := empty(n * x.numel()), x.flatten(), group=group) or out
        case "all_gather_list":
            dist.all_gather(out := [empty(*shape) for _ in range(n)], x, group=group)
            return out
        case "reduce_scatter":
            dist.reduce_scatter_single(x := empty(x.numel()), numbers(n * x.numel()), op, group=group)
        case "reduce_scatter_list":
            dist.reduce_scatter(x := empty(*shape), [numbers(*shape) for _ in range(n)], op, group=group)
        case "all_to_all":
            sizes = [[(seed >> (3 * (source + to))) % 6 for to in range(n)] for source in range(n)]
            mine, into = sizes[rank], [sizes[source][rank] for source in range(n)]
            dist.all_to_all_single(x := empty(sum(into)), numbers(sum(mine)), into, mine, group=group)
        case "all_to_all_list":
            out = [empty(*shape) for _ in range(n)]
            sent = [numbers(*shape) + to for to in range(n)]
            if dist.get_backend(group) == "gloo":  # which has no all_to_all of lists
                for r in range(n):
                    dist.scatter(out[r], sent if r == rank else None, group=group, group_src=r)
            else:
                dist.all_to_all(out, sent, group=group)
            return out
        case "gather":
            out = [empty(*shape) for _ in range(n)] if rank == root else None
            dist.gather(x, out, group=group, group_dst=root)
            return out or []
        case "scatter":
            given_ = [numbers(*shape) + to for to in range(n)] if rank == root else None
            dist.scatter(x := empty(*shape), given_, group=group, group_src=root)
        case "ring":
            out = empty(*shape)
            both = [
                dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % n),
                dist.P2POp(dist.irecv, out, group=group, group_peer=(rank - 1) % n),
            ]
            for work in dist.batch_isend_irecv(both):
                work.wait()
            x = out
        case "object":
            dist.all_gather_object(out := [None] * n, {"rank": rank, "numbers": x.tolist()}, group=group)
            return [torch.tensor([one["rank"] for one in out]), *(torch.tensor(one["numbers"]) for one in out)]
    return [x]


def beside_gloo(some):
    """The same collectives on both backends; those that differ."""
    if "gloo" not in groups:
        groups["gloo"] = dist.new_group(backend="gloo")
    assert dist.get_backend() == shared_memory.NAME
    wrong = []
    for kind, dtype, shape, seed, op, in_parts in some:
        if in_parts and shape:
            shape = [*shape[:-1], shape[-1] * 3001]  # more than one chunk
        ours, theirs = (perform(kind, dtype, shape, seed, op, group) for group in (dist.group.WORLD, groups["gloo"]))
        if len(ours) != len(theirs) or not all(map(torch.equal, ours, theirs)):
            wrong.append((kind, dtype, shape, seed, op))
    return wrong


groups: dict = {}  # in a rank


@pytest.mark.parametrize("ranks", [2, 3])
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(some=st.lists(cases, min_size=5, max_size=12))
def test_every_collective_gives_what_gloo_gives(on_ranks, ranks, some):
    assert on_ranks(ranks, beside_gloo, some) == [[]] * ranks


@pytest.mark.parametrize("kind", KINDS)
def test_each_collective_at_least_once(on_ranks, kind):
    some = [(kind, dtype, [3, 5], seed, "SUM", large) for seed, dtype in enumerate(DTYPES) for large in (False, True)]
    assert on_ranks(3, beside_gloo, some) == [[]] * 3


@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_hold_the_same_bits_on_all_ranks(on_ranks, ranks):
    def sums():
        found = []
        for dtype in (torch.float32, torch.bfloat16):
            for count in (3, 1000, 100_001):
                x = torch.randn(count, generator=torch.Generator().manual_seed(dist.get_rank())).to(dtype)
                dist.all_reduce(x)
                found.append(x)
        return found

    first, *rest = on_ranks(ranks, sums)
    for other in rest:
        assert all(map(torch.equal, first, other))
    numbers = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks)]
    torch.testing.assert_close(first[1], sum(numbers))
    exact = sum(one.to(torch.bfloat16).to(torch.float32) for one in numbers)
    assert torch.equal(first[4], exact.to(torch.bfloat16)), "bfloat16 is added in float32 and rounded once"


@pytest.mark.parametrize("ranks", [2, 4])
def test_ten_thousand_mixed_operations(on_ranks, ranks):
    def mixed(count):
        rank, n, choice = dist.get_rank(), dist.get_world_size(), random.Random(1)
        for number in range(count):
            size, kind = choice.choice((1, 7, 64, 500, 20_000)), choice.randrange(6)
            x = torch.full((size,), rank + number)
            if kind == 0:
                dist.all_reduce(x)
                assert x[0] == x[-1] == n * number + n * (n - 1) // 2, number
            elif kind == 1:
                root = number % n
                dist.broadcast(x, root)
                assert x[0] == x[-1] == root + number, number
            elif kind == 2:
                out = torch.empty(n * size, dtype=torch.int64)
                dist.all_gather_single(out, x)
                assert out.view(n, size)[:, -1].tolist() == [number + r for r in range(n)], number
            elif kind == 3:
                sent = dist.isend(x, (rank + 1) % n)
                dist.recv(x := torch.empty_like(x), (rank - 1) % n)
                sent.wait()
                assert x[0] == x[-1] == (rank - 1) % n + number, number
            elif kind == 4:
                out = torch.empty(size, dtype=torch.int64)
                dist.reduce_scatter_single(out, x.repeat(n))
                assert out[0] == out[-1] == n * number + n * (n - 1) // 2, number
            else:
                sizes = [(number + r) % 3 for r in range(n)]
                out = torch.empty(sizes[rank] * n, dtype=torch.int64)
                dist.all_to_all_single(out, torch.full((sum(sizes),), rank + number), [sizes[rank]] * n, sizes)
                assert out.view(n, -1).sum(1).tolist() == [(number + r) * sizes[rank] for r in range(n)], number
        return count

    assert on_ranks(ranks, mixed, 10_000, timeout=120) == [10_000] * ranks


def test_operations_are_waited_for_in_any_order(on_ranks):
    def shuffled():
        rank, n = dist.get_rank(), dist.get_world_size()
        works, wanted = [], []
        for number in range(40):
            x = torch.full((30_000,), float(rank + number))
            works.append(dist.all_reduce(x, async_op=True))
            wanted.append((x, n * number + n * (n - 1) / 2))
            works.append(dist.isend(torch.full((30_000,), 100.0 * number + rank), (rank + 1) % n))  # more than the pipe holds
            got = torch.empty(30_000)
            works.append(dist.irecv(got, (rank - 1) % n))
            wanted.append((got, 100.0 * number + (rank - 1) % n))
        random.Random(rank).shuffle(works)
        for work in works:
            work.wait()
        assert all(work.is_completed() for work in works)
        return all((x == value).all().item() for x, value in wanted)

    assert on_ranks(3, shuffled) == [True] * 3


def test_a_ring_of_64_mib(on_ranks):
    """Far more than a pipe holds, sent by all at once."""

    def ring():
        rank, n = dist.get_rank(), dist.get_world_size()
        x, got = torch.full((16 << 20,), float(rank)), torch.empty(16 << 20)
        works = [dist.isend(x, (rank + 1) % n), dist.irecv(got, (rank - 1) % n)]
        works[0].wait()  # which needs the receiving to go on as well
        works[1].wait()
        return float(got.min()), float(got.max())

    assert on_ranks(3, ring) == [(2.0, 2.0), (0.0, 0.0), (1.0, 1.0)]


def test_two_groups_interleaved(on_ranks):
    """Rank 1 is in both. What it owes one group moves while it waits in the other."""

    def interleaved():
        rank = dist.get_rank()
        low, high = dist.new_group([0, 1]), dist.new_group([1, 2])
        big = torch.arange(8 << 20, dtype=torch.float32)  # more than fits into a pipe
        x = torch.tensor([float(rank)])
        if rank == 0:
            got = torch.empty_like(big)
            dist.recv(got, group=low, group_src=1)
            dist.send(torch.tensor([5.0]), 2)
            return float(got[-1])
        if rank == 1:
            sent = dist.isend(big, group=low, group_dst=0)
            dist.all_reduce(x, group=high)  # rank 2 comes only when rank 0 has everything
            sent.wait()
            return float(x)
        dist.recv(y := torch.empty(1), 0)
        dist.all_reduce(x, group=high)
        return float(x + y)

    assert on_ranks(3, interleaved) == [float((8 << 20) - 1), 3.0, 8.0]


ALONE = """
import os, signal, sys, torch, torch.distributed as dist
from minifer.ranks.shared_memory import register
rank = int(sys.argv[1])
dist.init_process_group(register(), store=dist.FileStore(sys.argv[2], 3), rank=rank, world_size=3)
for number in range(100_000):
    if rank == 1 and number == 500:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(torch.ones(20_000))
    except ConnectionError as error:
        print(number, error)
        break
"""


def test_a_rank_that_is_killed_in_the_middle_ends_the_wait_of_the_others(tmp_path):
    """Processes that nobody watches, as under torchrun."""
    command = [sys.executable, "-c", ALONE]
    started = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "meet")], stdout=subprocess.PIPE, text=True) for rank in range(3)
    ]
    said = [process.communicate(timeout=60)[0] for process in started]
    assert started[1].returncode == -signal.SIGKILL
    for rank in (0, 2):
        assert said[rank].strip() == "500 all_reduce over ranks [0, 1, 2]: rank 1 is gone"


def test_gone_and_late_are_told_apart(on_ranks):
    def left():
        rank = dist.get_rank()
        group = dist.new_group(timeout=timedelta(seconds=0.5))
        pair = dist.new_group()
        errors = []
        if rank == 1:
            pair.shutdown()  # as its end would
        else:
            for one in (pair, group):
                started = time.monotonic()
                try:
                    dist.all_reduce(torch.ones(2), group=one)
                except (ConnectionError, TimeoutError) as error:
                    errors.append((type(error).__name__, str(error), time.monotonic() - started < 5))
        dist.barrier()
        return errors

    first, second = on_ranks(2, left)
    assert second == []
    assert first == [
        ("PeerLost", "all_reduce over ranks [0, 1]: rank 1 is gone", True),
        ("TimeoutError", "all_reduce over ranks [0, 1]: rank 1 did not come within 0:00:00.500000", True),
    ]


def test_what_was_sent_before_leaving_still_arrives(on_ranks):
    def left():
        group = dist.new_group()
        if dist.get_rank() == 1:
            dist.send(torch.tensor([4]), group=group, group_dst=0)
            group.shutdown()
            return 4
        time.sleep(0.1)
        dist.recv(x := torch.empty(1, dtype=torch.int64), group=group, group_src=1)
        return int(x)

    assert on_ranks(2, left) == [4, 4]


def test_messages_that_do_not_fit_are_errors_with_the_numbers(on_ranks):
    def misfit():
        errors, rank = [], dist.get_rank()
        group = dist.new_group()
        if rank == 0:
            dist.send(torch.ones(3), group=group, group_dst=1)
        else:
            try:
                dist.recv(torch.ones(4), group=group, group_src=0)
            except ValueError as error:
                errors.append(str(error))
        for attempt in (
            lambda: dist.all_reduce(torch.ones(4, 4).t()[:2]),
            lambda: dist.reduce_scatter_single(torch.ones(2), torch.ones(5)),
            lambda: dist.recv(torch.ones(1)),
        ):
            try:
                attempt()
            except (ValueError, NotImplementedError, RuntimeError) as error:
                errors.append(str(error))
        return errors

    first, second = on_ranks(2, misfit)
    assert "rank 0 sent 12 bytes of float32 with tag 0, rank 1 awaits 16 of float32 with tag 0" in second[0]
    assert len(first) == 3 and "contiguous" in first[0] and "names its source" in first[2]


def test_memory_is_its_users_alone_and_leaves_nothing_behind(on_ranks):
    def look():
        group = dist.new_group()
        file = group.traffic.segment._file
        return oct(os.fstat(file).st_mode & 0o777), os.fstat(file).st_nlink

    assert on_ranks(3, look) == [("0o600", 0)] * 3
    if os.path.isdir("/dev/shm"):
        assert not [name for name in os.listdir("/dev/shm") if name.startswith("minifer-")]


def test_more_ranks_than_cores_get_on():
    def sums():
        x = torch.ones(10)
        for _ in range(50):
            dist.all_reduce(x)
            x /= dist.get_world_size()
        return float(x.sum())

    ranks = host.cores() + 3
    assert launch(sums, ranks, timeout=60) == [10.0] * ranks


def test_gloo_stays():
    assert launch(dist.get_backend, 2, backend="gloo") == ["gloo"] * 2
    with Ranks(2) as world:
        assert world.backend == shared_memory.NAME
    with pytest.raises(ValueError, match='backend is "gloo" or "shared_memory", not \'mpi\''):
        Ranks(2, backend="mpi")


def test_other_processors_use_gloo_and_say_so(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    with pytest.warns(UserWarning, match="ranks talk over gloo: sharing memory needs an x86-64 processor"):
        assert launch(dist.get_backend, 2) == ["gloo"] * 2
    with pytest.raises(ValueError, match="shared memory joins ranks of one host"):
        Ranks(2, backend="shared_memory")


@pytest.mark.parametrize("named", [False, True], ids=["memory without a name", "a file"])
def test_memory_that_does_not_fit_is_said_before_it_is_used(monkeypatch, named):
    class Full:
        f_bavail, f_frsize = 10, 4096

    def full(*_):
        raise OSError(28, "No space left on device")

    if named:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    before = set(os.listdir(host.memory_folder()))
    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(os, "fstatvfs", lambda _: Full)
    left = ".* has 40,960 left" if named else ", and there is no room for them"
    with pytest.raises(RuntimeError, match=f"2 ranks would share 4,096 bytes of memory{left}.*--shm-size.*gloo"):
        segment._meet(dist.HashStore(), 0, 2, 1 << 20, 4096, None)
    assert not {name for name in set(os.listdir(host.memory_folder())) - before if "minifer-" in name}


def test_a_group_that_has_failed_stays_failed(on_ranks):
    """Ranks may be out of step by then: rather an error than another call's numbers."""

    def failing():
        rank, errors = dist.get_rank(), []
        for trouble in (lambda group: dist.recv(torch.ones(4), group=group, group_src=0), lambda group: group.shutdown()):
            group = dist.new_group()
            if rank == 0:
                dist.send(torch.ones(3), group=group, group_dst=1)
                dist.barrier()
                continue
            try:
                trouble(group)
            except ValueError as error:
                errors.append(str(error))
            group.shutdown() if not errors else None
            group.shutdown()  # once more does no harm
            for _ in range(2):
                try:
                    dist.all_reduce(torch.ones(2), group=group)
                except ConnectionError as error:
                    errors.append(str(error))
            dist.barrier()
        return errors

    first, second = on_ranks(2, failing)
    assert first == [] and len(second) == 5
    assert "12 bytes" in second[0] and all("which failed before: rank 0 sent 12 bytes" in text for text in second[1:3])
    assert all("has left the group" in text for text in second[3:])


def test_reductions_that_gloo_does_not_have(on_ranks):
    """Means, bits, narrow floats, booleans, and tensors that gradients go through."""

    def reduced():
        rank, n, found = dist.get_rank(), dist.get_world_size(), []
        for value, op in ((rank + 1.0, "AVG"), (6 + rank, "BAND"), (1 << rank, "BOR"), (5 + rank, "BXOR")):
            dist.all_reduce(x := torch.full((3,), value), getattr(dist.ReduceOp, op))
            found.append(x.tolist()[0])
        dist.all_reduce(half := torch.full((5,), 0.5, dtype=torch.float16))
        dist.all_reduce(flag := torch.tensor([rank == n - 1, False]), dist.ReduceOp.MAX)
        dist.all_reduce(learned := torch.ones(2, requires_grad=True))
        return [*found, half.tolist()[0], flag.tolist(), learned.tolist()]

    for found in on_ranks(3, reduced):
        assert found == [2.0, 6 & 7 & 8, 7, 5 ^ 6 ^ 7, 1.5, [True, False], [3.0, 3.0]]


def test_uneven_shares_of_many_chunks(on_ranks):
    def shared():
        rank, n = dist.get_rank(), dist.get_world_size()
        sizes = [[(source + 1) * (to + 2) * 7001 for to in range(n)] for source in range(n)]
        mine, into = sizes[rank], [sizes[source][rank] for source in range(n)]
        given_ = torch.cat([torch.full((size,), float(10 * rank + to)) for to, size in enumerate(mine)])
        dist.all_to_all_single(out := torch.empty(sum(into)), given_, into, mine)
        return all((part == 10 * source + rank).all().item() for source, part in enumerate(out.split(into)))

    assert on_ranks(3, shared) == [True] * 3


# Collectives that do not match, each as two ranks would call them: (rank 0's, rank 1's, what both are told of).


def ones(count, dtype=torch.float32):
    return torch.ones(count, dtype=dtype)


MISMATCHES = {
    "bytes": (lambda: dist.all_reduce(ones(8)), lambda: dist.all_reduce(ones(16)), "32 bytes of float32", "64 bytes of float32"),
    "dtype": (lambda: dist.all_reduce(ones(8)), lambda: dist.all_reduce(ones(8, torch.int32)), "float32", "int32"),
    "reduction": (
        lambda: dist.all_reduce(ones(8)),
        lambda: dist.all_reduce(ones(8), dist.ReduceOp.PRODUCT),
        "all_reduce (SUM)",
        "all_reduce (PRODUCT)",
    ),
    "root": (
        lambda: dist.broadcast(ones(8), 0),
        lambda: dist.broadcast(ones(8), 1),
        "with rank 0 as its root",
        "with rank 1 as its root",
    ),
    "bytes of a broadcast": (lambda: dist.broadcast(ones(8), 0), lambda: dist.broadcast(ones(16), 0), "32 bytes", "64 bytes"),
    "kind": (lambda: dist.all_reduce(ones(8)), lambda: dist.broadcast(ones(8), 0), "rank 0 all_reduce", "rank 1 broadcast"),
    "barrier": (dist.barrier, lambda: dist.all_reduce(ones(1)), "rank 0 a barrier", "rank 1 all_reduce"),
    "many steps against one": (
        lambda: dist.all_reduce(ones(400_000)),
        lambda: dist.all_reduce(ones(6)),
        "1600000 bytes",
        "24 bytes",
    ),
    "nothing against something": (
        lambda: dist.all_gather_single(ones(0), ones(0)),
        lambda: dist.all_gather_single(ones(2), ones(1)),
        "0 bytes",
        "4 bytes",
    ),
    "all_gather_single": (
        lambda: dist.all_gather_single(ones(8), ones(4)),
        lambda: dist.all_gather_single(ones(12), ones(6)),
        "16 bytes",
        "24 bytes",
    ),
    "reduce_scatter": (
        lambda: dist.reduce_scatter_single(ones(4), ones(8)),
        lambda: dist.reduce_scatter_single(ones(6), ones(12)),
        "16 bytes",
        "24 bytes",
    ),
    "gather": (
        lambda: dist.gather(ones(4), [ones(4), ones(4)], dst=0),
        lambda: dist.gather(ones(6), dst=0),
        "gather of 16 bytes",
        "gather of 24 bytes",
    ),
    "scatter": (
        lambda: dist.scatter(ones(4), [ones(4), ones(4)], src=0),
        lambda: dist.scatter(ones(6), src=0),
        "scatter of 16 bytes",
        "scatter of 24 bytes",
    ),
    "shares": (
        lambda: dist.all_to_all_single(ones(3), ones(4), [2, 1], [2, 2]),
        lambda: dist.all_to_all_single(ones(3), ones(2), [1, 2], [1, 1]),
        "rank 0 gives 8 bytes",
        "rank 1 awaits 4",
    ),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_run_01_collectives_that_do_not_match_are_an_error_on_every_rank(on_ranks, name):
    """A group of its own each time: it is broken from then on, and says so."""

    def call():
        group = dist.new_group()
        errors = []
        for operation in (MISMATCHES[name][dist.get_rank()], lambda: dist.all_reduce(ones(1))):
            try:
                with_group(operation, group)
            except (ValueError, ConnectionError) as error:
                errors.append((type(error).__name__, str(error)))
        return errors

    found = on_ranks(2, call, timeout=20)
    assert found[0] == found[1]
    [(kind, text), (later, _)] = found[0]
    assert kind == "ValueError" and later == "PeerLost" and "ranks [0, 1]" in text
    for part in MISMATCHES[name][2:]:
        assert part in text, text


def with_group(operation, group):
    """What operation calls in the world's group is called in this one."""
    world = dist.distributed_c10d.GroupMember.WORLD
    dist.distributed_c10d.GroupMember.WORLD = group
    dist.distributed_c10d._update_default_pg(group)
    try:
        operation()
    finally:
        dist.distributed_c10d.GroupMember.WORLD = world
        dist.distributed_c10d._update_default_pg(world)


def test_run_01_which_call_it_was_and_of_which_ranks(on_ranks):
    def third():
        group = dist.new_group([0, 2])
        if dist.get_rank() == 1:
            return ""
        for count in (3, 4, 5 + dist.get_rank()):
            try:
                dist.all_reduce(ones(count), group=group)
            except ValueError as error:
                return str(error)
        return "no error"

    told = (
        "ranks [0, 2] call different things as their collective 3: "
        "rank 0 all_reduce (SUM) of 20 bytes of float32; rank 2 all_reduce (SUM) of 28 bytes of float32"
    )
    assert on_ranks(3, third) == [told, "", told]


@pytest.mark.parametrize("wrong", ["bytes", "dtype", "tag"])
def test_run_01_messages_are_compared_too_and_the_sender_learns_of_it(on_ranks, wrong):
    def call():
        group = dist.new_group()
        errors = []
        try:
            if dist.get_rank() == 0:
                dist.send(ones(4), group=group, group_dst=1, tag=1)
                dist.recv(ones(1), group=group, group_src=1)  # what never comes
            else:
                sizes = {"bytes": (6, torch.float32, 1), "dtype": (4, torch.int32, 1), "tag": (4, torch.float32, 2)}
                count, dtype, tag = sizes[wrong]
                dist.recv(ones(count, dtype), group=group, group_src=0, tag=tag)
        except (ValueError, ConnectionError) as error:
            errors.append(str(error))
        dist.barrier()
        return errors

    [[sender], [receiver]] = on_ranks(2, call, timeout=20)
    assert receiver.startswith("rank 0 sent 16 bytes of float32 with tag 1, rank 1 awaits ")
    assert sender == f"recv over ranks [0, 1]: rank 1 has failed: ValueError: {receiver}"


def test_operations_behind_a_failed_one_do_not_run(on_ranks):
    def queued():
        group = dist.new_group()
        if dist.get_rank() == 0:
            dist.barrier()
            first = dist.isend(ones(3), group=group, group_dst=1)
            second = dist.isend(torch.full((4,), 7.0), group=group, group_dst=1)
            first.wait(), second.wait()
            dist.barrier()
            return []
        works = [dist.irecv(ones(4), group=group, group_src=0), dist.irecv(mine := ones(4), group=group, group_src=0)]
        dist.barrier()
        errors = []
        for work in works:
            try:
                work.wait()
            except (ValueError, ConnectionError) as error:
                errors.append((type(error).__name__, work.is_completed(), work.is_success()))
        dist.barrier()
        return [*errors, mine.tolist()]

    first, second = on_ranks(2, queued)
    assert first == [] and second == [("ValueError", True, False), ("PeerLost", True, False), [1.0] * 4]


@pytest.mark.parametrize("how", ["gone", "failed", "late"])
def test_those_who_only_ask_are_told(on_ranks, how):
    """`is_completed` again and again, and never `wait`: a dead peer, a failed one, and a time that is over all end it."""

    def ask():
        group = dist.new_group(timeout=timedelta(seconds=0.5 if how == "late" else 100))
        if dist.get_rank() == 1:
            if how == "gone":
                group.shutdown()
            elif how == "failed":
                with pytest.raises(ValueError):
                    dist.reduce_scatter(ones(3), [ones(3), ones(4)], group=group)
            dist.barrier()
            return ""
        work = dist.all_reduce(ones(2), group=group, async_op=True)
        while not work.is_completed():
            time.sleep(0.001)
        dist.barrier()
        return f"{type(work.exception()).__name__}: {work.exception()}"

    told = on_ranks(2, ask, timeout=20)[0]
    wanted = {
        "gone": "PeerLost: all_reduce over ranks [0, 1]: rank 1 is gone",
        "failed": "PeerLost: all_reduce over ranks [0, 1]: rank 1 has failed: ValueError: all shares are alike",
        "late": "TimeoutError: all_reduce over ranks [0, 1]: rank 1 did not come within 0:00:00.500000",
    }
    assert told.startswith(wanted[how])


def test_memory_is_taken_when_it_is_needed():
    """Eight ranks in a 2 x 2 x 2 layout, all of whose groups and pairs have been used: far below Docker's 64 MB of shared memory."""

    def layout():
        mesh = dist.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("data", "pipeline", "tensor"))
        groups = [dist.group.WORLD, *(mesh.get_group(name) for name in ("data", "pipeline", "tensor"))]
        before = blocks(groups[2])
        for group in groups:
            dist.all_reduce(ones(100_000), group=group)
        pipeline, other = groups[2], 1 - groups[2].rank()
        for count in (10, 2_000_000):  # more than a pipe holds
            sent = dist.isend(ones(count), group=pipeline, group_dst=other)
            dist.recv(ones(count), group=pipeline, group_src=other)
            sent.wait()
        return [(group.rank(), blocks(group)) for group in groups], before

    def blocks(group):
        return os.fstat(group.traffic.segment._file).st_blocks * 512

    found = launch(layout, 8)
    total = sum(size for groups, _ in found for rank, size in groups if rank == 0)  # of each group once
    assert found[0][1] < 1 << 20, "a pipe that nothing has gone through takes nothing"
    assert total <= 40 << 20, f"{total:,} bytes"


def test_meshes_and_what_is_made_of_them(on_ranks):
    def total():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        found = []
        for one in (mesh["a"], mesh["b"], mesh["a", "b"]._flatten("ab")):
            x = torch.tensor([1 << dist.get_rank()])
            dist.all_reduce(x, group=one.get_group())
            found.append(int(x))
        return found

    assert on_ranks(4, total) == [[0b0101, 0b0011, 15], [0b1010, 0b0011, 15], [0b0101, 0b1100, 15], [0b1010, 0b1100, 15]]
