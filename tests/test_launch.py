"""Worlds of ranks: results, failures, what they leave behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from minifer import RankError, Ranks, launch

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def rank_processes() -> set[int]:
    """Processes of this process's ranks: grandchildren, started by the fork server, that are alive."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.parent().pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.add(process.pid)
    return found


@pytest.fixture(autouse=True)
def nothing_is_left(on_ranks):
    """Every test's own ranks are gone when it ends; those of the shared worlds may be more than before, never stray."""
    before = rank_processes()
    yield
    shared = on_ranks.processes()
    assert rank_processes() <= before | shared


def script(text: str) -> subprocess.CompletedProcess:
    """Run a script's text as a program of its own."""
    command = [sys.executable, "-c", textwrap.dedent(text)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_results_come_in_rank_order_from_closures_lambdas_and_local_classes(on_ranks):
    k = 3

    class Point:
        def __init__(self, x):
            self.x = x

        def __eq__(self, other):
            return self.x == other.x

    assert on_ranks(2, lambda: dist.get_rank() * 10) == [0, 10]
    assert on_ranks(2, lambda: dist.get_rank() + k) == [3, 4]
    assert [type(result).__name__ for result in on_ranks(2, lambda: Point(dist.get_rank()))] == ["Point", "Point"]
    assert on_ranks(3, lambda x, y: (x, y, dist.get_world_size()), 1, "a") == [(1, "a", 3)] * 3


def test_one_rank_and_many(on_ranks):
    def total():
        tensor = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(tensor)
        return float(tensor)

    for ranks in (1, 2, 3, 4):
        assert on_ranks(ranks, total) == [ranks * (ranks + 1) / 2] * ranks


def test_each_rank_gets_its_share_of_the_cores(on_ranks):
    for ranks in (1, 2, 4):
        assert on_ranks(ranks, torch.get_num_threads) == [max(1, CORES // ranks)] * ranks


def test_a_world_of_no_ranks():
    with pytest.raises(ValueError, match="not 0"):
        launch(lambda: None, 0)


# Failures.


def test_rt_01_a_rank_that_raises_ends_its_world():
    def boom():
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        if dist.get_rank() == 1:
            raise ValueError("boom")
        dist.all_reduce(tensor)

    started = time.monotonic()
    with pytest.raises(RankError, match="boom") as caught:
        launch(boom, 3)
    assert time.monotonic() - started < 15  # the world's start included; its end takes under 5 s, see below
    message = str(caught.value)
    assert "rank 1" in message and 'raise ValueError("boom")' in message and caught.value.rank == 1
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_rt_01_a_rank_that_dies_is_named(how):
    def die():
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        if dist.get_rank() == 1:
            os._exit(3) if how == "exit" else os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(tensor)

    with Ranks(3) as world:
        world.run(lambda: None)
        started = time.monotonic()
        with pytest.raises(RankError, match="rank 1 exited with code 3" if how == "exit" else "rank 1 was killed by SIGKILL"):
            world.run(die)
        assert time.monotonic() - started < 5
        with pytest.raises(RuntimeError, match="is over"):
            world.run(die)


def test_a_rank_that_hangs_is_ended_and_its_place_is_shown():
    def sleep_on_rank_1():
        if dist.get_rank() == 1:
            time.sleep(100)
        dist.barrier()

    with Ranks(2) as world, pytest.raises(RankError, match="within 1 s from rank 0, 1 of 2") as caught:
        world.run(sleep_on_rank_1, timeout=1)
    assert "in sleep_on_rank_1" in str(caught.value) and "barrier" in str(caught.value)


def test_the_same_error_on_all_ranks_is_shown_once():
    with pytest.raises(RankError, match="rank 0 raised") as caught:
        launch(lambda: {}["missing"], 3)
    assert str(caught.value).count("KeyError") == 1


def test_what_a_failing_rank_printed_is_shown(capfd):
    def speak_and_fail():
        print("the value was", 42)
        raise ValueError("boom")

    with pytest.raises(RankError):
        launch(speak_and_fail, 2)
    assert "[rank 1] the value was 42" in capfd.readouterr().out


def test_a_rank_that_closes_its_connection():
    def close_everything():
        if dist.get_rank() == 1:
            os.closerange(3, 200)
        time.sleep(20)

    with pytest.raises(RankError, match="rank 1"):
        launch(close_everything, 2)


def test_an_interrupt_of_something_else_leaves_idle_ranks_alone():
    with Ranks(2) as world:
        for process in world._processes:
            os.kill(process.pid, signal.SIGINT)
        time.sleep(0.2)
        assert world.run(dist.get_rank) == [0, 1]


def test_a_function_that_cannot_travel_says_what_to_do():
    lock = threading.Lock()
    with pytest.raises(ValueError, match="hold something that cannot travel.*is loaded on each rank"):
        launch(lambda: lock, 2)


def test_launch_hands_arguments_on():
    assert launch(lambda a, b: (a, b, dist.get_rank()), 2, args=(1, "x")) == [(1, "x", 0), (1, "x", 1)]


def test_a_result_that_cannot_travel():
    with pytest.raises(RankError, match="pickle"):
        launch(threading.Lock, 2)


def test_an_interrupt_ends_the_ranks():
    done = script(
        """
        import os, signal, threading, time, psutil, minifer
        threading.Timer(3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        try:
            minifer.launch(lambda: __import__("time").sleep(60), 2)
        except KeyboardInterrupt:
            time.sleep(0.5)
            me = psutil.Process()
            print("interrupted", [p for p in me.children(recursive=True) if p.parent() != me and p.status() != "zombie"])
        """
    )
    assert done.stdout.strip() == "interrupted []" and done.returncode == 0, done.stderr


def test_ranks_end_with_their_parent(tmp_path):
    """Even if it is killed and they are in a collective that nobody will ever join."""
    pids = tmp_path / "pids"
    code = f"""
import os, torch, torch.distributed as dist, minifer
def rank():
    open({str(pids)!r} + str(dist.get_rank()), "w").write(str(os.getpid()))
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    __import__("time").sleep(100)
minifer.launch(rank, 2)
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    files = [pids.with_name(f"pids{rank}") for rank in range(2)]
    deadline = time.monotonic() + 60
    while not all(file.is_file() and file.read_text() for file in files) and time.monotonic() < deadline:
        time.sleep(0.1)
    parent.kill()
    parent.wait()
    while any(psutil.pid_exists(int(file.read_text())) for file in files) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(psutil.pid_exists(int(file.read_text())) for file in files)


# Ports, environment, worlds side by side.


def test_rt_03_taken_ports_do_no_harm_and_the_environment_stays():
    before = dict(os.environ)
    with socket.socket() as a, socket.socket() as b:
        for taken, port in ((a, 29500), (b, 12355)):
            with contextlib.suppress(OSError):  # taken by somebody else: as good
                taken.bind(("127.0.0.1", port))
                taken.listen()
        assert launch(dist.get_rank, 2) == [0, 1]
    assert dict(os.environ) == before


def test_rt_03_eight_worlds_at_the_same_moment():
    results: dict[int, list] = {}

    def start(number):
        results[number] = launch(lambda: (number, dist.get_rank()), 2)

    threads = [threading.Thread(target=start, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [(number, 0), (number, 1)] for number in range(8)}


def test_again_and_again_and_with_another_size():
    for ranks in (2, 2, 4, 1):
        assert launch(dist.get_rank, ranks) == list(range(ranks))


def test_nothing_listens_beyond_loopback(on_ranks):
    def listening():
        connections = psutil.Process().net_connections("inet")
        return [connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN]

    for addresses in on_ranks(2, listening):
        assert all(address in ("127.0.0.1", "::1") for address in addresses)


# What ranks print.


def test_outputs_are_shown_rank_by_rank(on_ranks, capfd):
    def talk():
        for line in range(3):
            print("line", line, flush=True)
            dist.barrier()
        print("to stderr", file=sys.stderr)

    for _ in range(3):
        on_ranks(4, talk)
        out, err = capfd.readouterr()
        assert out == "".join(f"[rank {rank}] line {line}\n" for rank in range(4) for line in range(3))
        assert err == "".join(f"[rank {rank}] to stderr\n" for rank in range(4))


def test_a_script_without_a_main_guard_and_with_a_quiet_stderr(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        textwrap.dedent(
            """
            import torch, torch.distributed as dist, minifer
            print("once")
            def rank():
                tensor = torch.ones(1)
                dist.all_reduce(tensor)
                return int(tensor)
            print(minifer.launch(rank, ranks=2))
            def fail():
                if dist.get_rank():
                    raise ValueError("boom")
                dist.barrier()
            try:
                minifer.launch(fail, ranks=2)
            except minifer.RankError as error:
                print(error.rank, f'{__file__}", line 11' in str(error))
            """
        )
    )
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["once", "[2, 2]", "1 True"] and done.stderr == ""


TORCHRUN = """
import os, sys, torch, torch.distributed as dist, minifer
def rank():
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return dist.get_rank(), int(tensor), torch.get_num_threads()
results = minifer.launch(rank, ranks=2)
assert minifer.launch(rank, ranks=2) == results
try:
    minifer.launch(rank, ranks=3)
except ValueError as error:
    results.append(str(error))
print(results)
"""


def test_under_torchrun(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(path)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    threads = max(1, CORES // 2)
    wanted = f"[(0, 2, {threads}), (1, 2, {threads}), 'the function wants 3 ranks, but 2 are running']"
    assert done.stdout.count(wanted) == 2 and done.returncode == 0, done.stderr


# Groups and operations that every technique relies on.


def test_rt_04_the_source_is_a_rank_of_the_group(on_ranks):
    def broadcast():
        rank = dist.get_rank()
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        tensor = torch.tensor([10 * rank])
        dist.broadcast(tensor, group=groups[rank // 2], group_src=0)
        pair = dist.new_group([1, 3])
        received = torch.tensor([-1])
        if rank == 3:
            dist.send(torch.tensor([33]), group=pair, group_dst=0)
        if rank == 1:
            dist.recv(received, group=pair, group_src=1)
        return int(tensor), int(received)

    assert on_ranks(4, broadcast) == [(0, -1), (0, 33), (20, -1), (20, -1)]


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rt_09_operations_that_gloo_has_for_a_dtype(on_ranks, ranks, dtype):
    """What the techniques call, against plain sums and copies: or an error, the same on all ranks, that says what is missing."""

    def operations():
        n, rank = dist.get_world_size(), dist.get_rank()
        given = lambda r, size=4: (torch.arange(size) + r).to(dtype)  # noqa: E731
        results = {}

        def attempt(name, run, wanted):
            try:
                results[name] = bool(torch.equal(run(), wanted))
            except RuntimeError as error:
                results[name] = str(error)

        def in_place(operation, tensor):
            operation(tensor)
            return tensor

        total = sum((given(r).to(torch.float64) for r in range(n)), torch.zeros(4, dtype=torch.float64)).to(dtype)
        attempt("all_reduce", lambda: in_place(dist.all_reduce, given(rank)), total)
        attempt("broadcast", lambda: in_place(lambda t: dist.broadcast(t, 0), given(rank)), given(0))
        gathered = torch.cat([given(r) for r in range(n)])
        out = torch.empty(4 * n, dtype=dtype)
        attempt("all_gather", lambda: in_place(lambda t: dist.all_gather_single(t, given(rank)), out), gathered)
        part = torch.empty(2, dtype=dtype)
        whole = sum((given(r, 2 * n).to(torch.float64) for r in range(n)), torch.zeros(2 * n, dtype=torch.float64))
        wanted = whole[2 * rank : 2 * rank + 2].to(dtype)
        attempt("reduce_scatter", lambda: in_place(lambda t: dist.reduce_scatter_single(t, given(rank, 2 * n)), part), wanted)
        # Rank r sends r' tokens to rank r': uneven, and nothing at all to rank 0.
        mine = torch.cat([given(rank, to) for to in range(n)])
        into = torch.empty(rank * n, dtype=dtype)
        exchange = lambda t: dist.all_to_all_single(t, mine, [rank] * n, list(range(n)))  # noqa: E731
        attempt("all_to_all", lambda: in_place(exchange, into), torch.cat([given(r, rank) for r in range(n)]))
        work = dist.isend(given(rank), (rank + 1) % n)
        received = torch.empty(4, dtype=dtype)
        dist.recv(received, (rank - 1) % n)
        work.wait()
        results["send"] = bool(torch.equal(received, given((rank - 1) % n)))
        return results

    results = on_ranks(ranks, operations)
    assert all(one.keys() == results[0].keys() for one in results)
    for name in results[0]:
        outcomes = {one[name] for one in results}
        if outcomes != {True}:
            # Not there: then on every rank, with an error that says so.
            assert all(isinstance(one[name], str) and re.search("nsupported|[Ii]nvalid", one[name]) for one in results), (
                name,
                outcomes,
            )
            assert dtype == torch.bool and name in ("all_reduce", "reduce_scatter"), (name, outcomes)


def test_rt_05_two_groups_work_independently(on_ranks):
    """A collective that slipped into the world's group would make the quick pair wait for the slow one."""

    def pairs():
        rank = dist.get_rank()
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        total = torch.zeros(1)
        started = time.monotonic()
        for _ in range(5 if rank < 2 else 20):
            if rank >= 2:
                time.sleep(0.02)
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=groups[rank // 2])
            total += tensor
        return float(total), time.monotonic() - started

    results = on_ranks(4, pairs)
    assert [total for total, _ in results] == [10, 10, 40, 40]
    assert min(results[2][1], results[3][1]) >= 0.4 > max(results[0][1], results[1][1])
