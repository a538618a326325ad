"""Worlds of ranks: results, failures, what they leave behind."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from minifer import RankError, Ranks, launch
from minifer.ranks import host

CORES = host.cores()


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
    said = interrupted(
        """
        import psutil
        def rank():
            open(working, "w")
            time.sleep(60)
        try:
            minifer.launch(rank, 2)
        except KeyboardInterrupt:
            me = psutil.Process()
            print("interrupted", [p for p in me.children(recursive=True) if p.parent() != me and p.status() != "zombie"])
        """
    )
    assert said == "interrupted []"


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


# RUN: starting, ending and joining, as tried from outside.


@pytest.fixture
def no_leftovers(tmp_path_factory, monkeypatch):
    """A temporary folder of its own, in which a test leaves nothing; nor does it in shared memory."""
    folder = tmp_path_factory.mktemp("tmp")
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    yield folder
    assert not [path.name for path in folder.iterdir() if path.name.startswith("minifer-")]
    assert not before or not [name for name in set(os.listdir("/dev/shm")) - before if name.startswith("minifer-")]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        *(({"ranks": ranks}, "ranks is a whole number, at least 1") for ranks in ("2", None, 2.5, 2.0, 0, -1, True)),
        *(
            ({"timeout": timeout}, "timeout is a number of seconds above 0, or None")
            for timeout in ("5", 0, -1, float("nan"), True)
        ),
        *(({"threads": threads}, "threads is a whole number, at least 1") for threads in (0, -1, "2", 1.5)),
        ({"backend": "mpi"}, 'backend is "gloo" or "shared_memory"'),
    ],
)
def test_run_05_what_a_world_is_told_is_checked_before_anything_starts(no_leftovers, options, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        Ranks(**({"ranks": 2} | options))
    if "threads" not in options:
        with pytest.raises(ValueError, match=re.escape(told)):
            launch(len, **({"ranks": 2, "args": ([],)} | options))


def test_run_05_what_runs_is_checked_too(no_leftovers):
    async def waits():
        pass

    for function, told in ((3, "a function runs on ranks, not 3"), (waits, "waits is async")):
        with pytest.raises(ValueError, match=told):
            launch(function, 2)
    with pytest.raises(ValueError, match="args is a tuple of the function's arguments, not \\[1\\]"):
        launch(abs, 2, args=[1])


@pytest.mark.parametrize("timeout", [None, float("inf"), 1e20])
def test_run_05_no_timeout_is_none(timeout):
    assert launch(dist.get_rank, 1, timeout=timeout) == [0]


def test_run_01_a_mismatch_is_shown_to_the_caller(on_ranks):
    with pytest.raises(RankError, match="call different things as their collective") as caught:
        launch(lambda: dist.all_reduce(torch.ones(8 + dist.get_rank())), 3)
    assert caught.value.rank == 0 and isinstance(caught.value.__cause__, ValueError)


def interrupted(text: str) -> str:
    """What a script prints that interrupts itself when its ranks are at work. `working` is a path that they make then."""
    begin = """
    import os, signal, sys, tempfile, threading, time, torch, torch.distributed as dist, minifer
    working = tempfile.mkdtemp() + "/working"
    def interrupt_when_working():
        while not os.path.exists(working):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=interrupt_when_working, daemon=True).start()
    """
    done = script(textwrap.dedent(begin) + textwrap.dedent(text))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_run_03_an_interrupted_run_ends_its_world_and_says_so(no_leftovers):
    said = interrupted(
        """
        def work(_):
            open(working, "w")
            time.sleep(60)
        with minifer.Ranks(2) as world:
            try:
                world.run(work, torch.zeros(1 << 20))
            except KeyboardInterrupt:
                print("interrupted")
            try:
                world.run(dist.get_rank)
            except RuntimeError as error:
                print(error)
        print(minifer.launch(dist.get_rank, 2))
        """
    )
    assert said.splitlines() == ["interrupted", "this world of ranks is over (KeyboardInterrupt): start a new one", "[0, 1]"]


def test_run_03_closed_by_another_thread():
    with Ranks(2) as world:
        threading.Timer(0.5, world.close).start()
        with pytest.raises(RuntimeError, match="this world of ranks is over \\(it was closed while a function ran\\)"):
            world.run(time.sleep, 60)
        with pytest.raises(RuntimeError, match="is over \\(it was closed\\): start a new one"):
            world.run(dist.get_rank)


def test_run_03_threads_take_turns():
    with Ranks(2) as world:
        results = {}

        def run(number):
            results[number] = [world.run(lambda: (number, dist.get_rank())) for _ in range(5)]

        threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == {number: [[(number, 0), (number, 1)]] * 5 for number in range(4)}


def test_run_03_a_fork_server_that_is_killed(no_leftovers):
    said = script(
        """
        import os, signal, time, psutil, minifer, torch.distributed as dist
        with minifer.Ranks(2) as world:
            ranks = [process.pid for process in world._processes]
            server = psutil.Process(ranks[0]).parent()
            server.kill()
            try:
                world.run(time.sleep, 60)
            except (minifer.RankError, RuntimeError) as error:
                print(type(error).__name__, str(error).partition(";")[0])
            print([pid for pid in ranks if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"])
        print(minifer.launch(dist.get_rank, 2))
        """
    )
    assert said.returncode == 0, said.stderr
    first, left, again = said.stdout.splitlines()
    assert first.startswith("RankError rank 0 is gone, and so is the fork server") and left == "[]" and again == "[0, 1]"


@pytest.mark.parametrize("trouble", ["no folder to be in", "few files", "a rank"])
def test_run_04_a_start_that_fails_leaves_nothing(no_leftovers, trouble, tmp_path):
    scripts = {
        "no folder to be in": """
            import os, tempfile, minifer
            folder = tempfile.mkdtemp(); os.chdir(folder); os.rmdir(folder)
            minifer.launch(len, 2, args=("ab",))
            """,
        "few files": """
            import resource, minifer
            resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
            minifer.launch(len, 6, args=("ab",))
            """,
        "a rank": """
            import minifer
            minifer.launch(lambda: minifer.Ranks(2), 1)
            """,
    }
    done = script(scripts[trouble])
    told = {
        "no folder to be in": "FileNotFoundError",
        "few files": "this process may open 24 files at once, and 62 are wanted (ulimit -n)",  # PUB-33
        "a rank": "a rank starts no ranks: inside of one, launch runs on the ranks that exist",
    }
    assert done.returncode == 1 and told[trouble] in done.stderr


@pytest.mark.parametrize("times", [1, 2])
def test_run_04_interrupts_at_any_time_leave_nothing(no_leftovers, times):
    """A loop of starts, interrupted at moments that differ from run to run: no folder, no rank."""
    done = script(
        f"""
        import os, random, signal, threading, time, psutil, minifer
        minifer.launch(len, 2, args=("ab",))
        stop = False
        def interrupt():
            while not stop:
                time.sleep(random.uniform(0.02, 0.4))
                for _ in range({times}):
                    if not stop:
                        os.kill(os.getpid(), signal.SIGINT)
        thread = threading.Thread(target=interrupt, daemon=True)
        count = 0
        end = time.monotonic() + 4
        while time.monotonic() < end:
            try:
                if not thread.is_alive():
                    thread.start()
                minifer.launch(len, 2, args=("ab",))
            except KeyboardInterrupt:
                count += 1
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        stop = True
        deadline = time.monotonic() + 20
        def ranks():
            me, left = psutil.Process(), []
            for one in me.children(recursive=True):
                try:
                    if one.parent() != me and one.status() != "zombie":
                        left.append(one)
                except psutil.Error:
                    pass
            return left
        while ranks() and time.monotonic() < deadline:
            time.sleep(0.05)
        print(count > 0, ranks(), minifer.launch(len, 2, args=("ab",)))
        """
    )
    assert done.stdout.strip() == "True [] [2, 2]" and done.stderr == "", done.stdout + done.stderr


def test_run_04_ranks_that_hold_the_interpreter_end_with_their_parent(tmp_path, no_leftovers):
    """And the next start removes the folder of the world whose parent was killed."""
    pid = tmp_path / "pid"
    code = f"""
import ctypes, os, minifer
def rank():
    open({str(pid)!r}, "w").write(str(os.getpid()))
    ctypes.PyDLL(None).sleep(300)  # PyDLL holds the lock of the interpreter
minifer.launch(rank, 1)
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while not (pid.is_file() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    while psutil.pid_exists(int(pid.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(int(pid.read_text()))
    assert len(list(no_leftovers.glob("minifer-ranks-*"))) == 1
    assert launch(len, 1, args=("ab",)) == [2]


@pytest.mark.parametrize("length", [80, 120, 200])
def test_pub_25_a_long_temporary_folder(tmp_path, length):
    folder = tmp_path / "x"
    folder = folder.with_name("x" * max(1, length - len(str(tmp_path)) - 1))
    folder.mkdir()
    code = "import minifer; print(minifer.launch(len, 2, args=('ab',)))"
    environment = os.environ | {"TMPDIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout == "[2, 2]\n" and done.returncode == 0, done.stderr
    assert os.listdir(folder) == [], "also its folder is gone"


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_run_06_printing_never_costs_the_results(encoding):
    code = """
        import sys, minifer
        def talk():
            print("é")
            print("half \\ud83d of a pair")
            sys.stdout.close()
            return 7
        with minifer.Ranks(2) as world:
            print(world.run(talk))
            print(world.run(lambda: print("again")))
        """
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, timeout=120, env=environment)
    accent = {"ascii": "?", "utf-8": "é"}[encoding]
    ranks = "".join(f"[rank {rank}] {accent}\n[rank {rank}] half \\ud83d of a pair\n" for rank in range(2))
    assert done.stdout.decode() == f"{ranks}[7, 7]\n[rank 0] again\n[rank 1] again\n[None, None]\n", done.stderr


def test_run_06_a_closed_stream_of_the_parent(monkeypatch):
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stdout", stream)
    with Ranks(1) as world:
        assert world.run(lambda: print("nobody sees it") or 5) == [5]


def test_pub_29_lines_end_where_a_terminal_ends_them(on_ranks, capfd):
    def talk():
        for percent in range(101):
            print(f"\r{percent:3}%", end="")
        print("\none\u2028two\x0bthree\x85four")
        print("no end", end="")

    on_ranks(2, talk)
    out = capfd.readouterr().out
    assert out == "".join(
        f"[rank {rank}] 100%\n[rank {rank}] one\u2028two\x0bthree\x85four\n[rank {rank}] no end\n" for rank in (0, 1)
    )


def torchrun(tmp_path, text: str) -> subprocess.CompletedProcess:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(path)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


@pytest.mark.parametrize("backend", [None, "gloo"])
def test_run_07_under_torchrun_the_time_is_kept(tmp_path, no_leftovers, backend):
    done = torchrun(
        tmp_path,
        f"""
        import time, torch, torch.distributed as dist, minifer
        def hang():
            if dist.get_rank() == 1:
                time.sleep(600)
            dist.all_reduce(torch.ones(1))
        started = time.monotonic()
        try:
            minifer.launch(hang, 2, timeout=2, backend={backend!r})
        except minifer.RankError as error:
            print(f"rank {{dist.get_rank()}}: {{error}} ({{time.monotonic() - started < 20}})", flush=True)
            raise
        """,
    )
    told = "no answer to run within 2 s from rank 0, 1 of 2"
    assert done.returncode != 0 and told in done.stdout + done.stderr, done.stdout + done.stderr
    assert "rank 1: " + told in done.stdout and "False" not in done.stdout


def test_run_07_a_rank_that_raises_before_it_joins_leaves_nothing(tmp_path, no_leftovers):
    done = torchrun(
        tmp_path,
        """
        import os, minifer
        if os.environ["RANK"] == "1":
            raise ValueError("not today")
        minifer.launch(lambda: 1, 2)
        """,
    )
    assert done.returncode != 0 and "not today" in done.stderr


def test_run_09_the_first_error_is_what_the_caller_sees():
    """A rank tears its group down on its way out, and the others fail because of that."""

    def tear_down():
        group = dist.new_group()
        try:
            if dist.get_rank() == 1:
                raise ValueError("the cause")
            dist.all_reduce(torch.ones(1), group=group)
        finally:
            group.shutdown()

    with pytest.raises(RankError, match="the cause") as caught:
        launch(tear_down, 3)
    assert caught.value.rank == 1
