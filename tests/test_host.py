"""What a host has for ranks, and what a process takes over from its caller."""

from __future__ import annotations

import locale
import math
import os
import resource

import pytest

from minifer import Ranks, launch
from minifer.ranks import host
from minifer.ranks.surroundings import Surroundings


def control_group(tmp_path, files: dict[str, str], own: str) -> float:
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "own").write_text(own)
    return host.quota(tmp_path / "cgroup", tmp_path / "own")


@pytest.mark.parametrize(
    ("files", "own", "granted"),
    [
        ({"cpu.max": "150000 100000\n"}, "0::/\n", 1.5),
        ({"cpu.max": "max 100000\n"}, "0::/\n", math.inf),
        ({"a/b/cpu.max": "max 100000\n", "a/cpu.max": "50000 100000\n"}, "0::/a/b\n", 0.5),
        ({"a/cpu.max": "300000 100000\n", "cpu.max": "200000 100000\n"}, "0::/a\n", 2.0),
        (
            {"cpu,cpuacct/x/cpu.cfs_quota_us": "400000", "cpu,cpuacct/x/cpu.cfs_period_us": "100000"},
            "3:cpu,cpuacct:/x\n0::/\n",
            4.0,
        ),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "3:cpu:/\n", math.inf),
        ({"cpu.max": "nonsense"}, "0::/\n", math.inf),
        ({}, "0::/gone\n", math.inf),
    ],
)
def test_cores_of_a_container_are_those_it_is_given_time_for(tmp_path, monkeypatch, files, own, granted):
    assert control_group(tmp_path, files, own) == granted
    monkeypatch.setattr(host, "quota", lambda: granted)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert host.cores() == (8 if math.isinf(granted) else math.ceil(granted))


def test_shared_files_belong_to_their_user_alone_and_are_what_was_announced():
    file, path = host.shared_file()
    os.ftruncate(file, 100)
    assert os.fstat(file).st_mode & 0o777 == 0o600
    os.close(host.open_shared(path, 100))
    with pytest.raises(RuntimeError, match="not the memory that its rank announced"):
        host.open_shared(path, 200)
    os.close(file)
    host.unlink(path)


def test_without_nameless_memory_ranks_share_a_file_and_leave_none(monkeypatch):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    before = set(os.listdir(host.memory_folder()))
    file, path = host.shared_file()
    os.close(host.open_shared(path, 0))
    host.unlink(path)
    os.close(file)
    assert set(os.listdir(host.memory_folder())) <= before


def look() -> tuple:
    names = ("MINIFER_X", "MINIFER_Y", "MINIFER_Z")
    mask = os.umask(0)
    os.umask(mask)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return [os.environ.get(name) for name in names], mask, limit, locale.setlocale(locale.LC_NUMERIC)


def test_pub_24_ranks_have_the_environment_of_their_launch(monkeypatch):
    """Not that of the first launch, with which the fork server was started; the rest of what a caller can change, too."""
    monkeypatch.setenv("MINIFER_X", "first")
    monkeypatch.setenv("MINIFER_Y", "a secret")
    assert launch(look, 1)[0][0] == ["first", "a secret", None]
    monkeypatch.setenv("MINIFER_X", "second")
    monkeypatch.delenv("MINIFER_Y")
    monkeypatch.setenv("MINIFER_Z", "new")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    mask = os.umask(0o027)
    before = locale.setlocale(locale.LC_NUMERIC)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
        locale.setlocale(locale.LC_NUMERIC, "C.UTF-8")
        assert launch(look, 2) == [(["second", None, "new"], 0o027, soft - 1, "C.UTF-8")] * 2
    finally:
        os.umask(mask)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        locale.setlocale(locale.LC_NUMERIC, before)


def test_a_world_that_is_up_keeps_the_surroundings_of_its_start(monkeypatch):
    monkeypatch.setenv("MINIFER_X", "at its start")
    with Ranks(1) as world:
        monkeypatch.setenv("MINIFER_X", "later")
        assert world.run(look)[0][0][0] == "at its start"


def test_the_mask_is_read_without_being_changed():
    assert Surroundings.here().umask == Surroundings.here().umask == look()[1]
