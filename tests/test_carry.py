"""Functions, arguments and results on their way: what arrives is what was sent, and size costs what memory costs."""

from __future__ import annotations

import os
import tempfile
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist

from minifer import launch
from minifer.ranks import carry, host

BIG = 1 << 20


def there_and_back(value):
    parcel = carry.pack_value(value)
    try:
        return carry.unpack(*parcel[:3]), parcel
    finally:
        parcel.close()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(BIG),
        torch.randn(1000, 30).to(torch.bfloat16),
        torch.randn(300, 200).t(),
        torch.randn(5000)[::3],
        torch.ones(3),
        torch.ones(0, 5),
        torch.randn(2000, requires_grad=True),
        torch.nn.Parameter(torch.randn(40, 50)),
        torch.randn(2000, dtype=torch.complex64),
        torch.rand(9000) > 0.5,
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)
def test_tensors_arrive_as_they_were(tensor):
    [got], parcel = there_and_back([tensor])
    assert type(got) is type(tensor) and got.dtype == tensor.dtype and torch.equal(got, tensor)
    assert got.stride() == tensor.stride() and got.requires_grad == tensor.requires_grad
    assert len(parcel.data) < 8000, "its numbers are not in the pickle"
    with torch.no_grad():
        got.zero_()  # its own memory, and it can be written


def test_arrays_and_everything_else():
    value = {"a": np.arange(BIG), "b": np.ones((300, 400), order="F"), "c": np.array(["x", None], dtype=object), "d": [1, "e", {2}]}
    value["readonly"] = np.arange(5000)
    value["readonly"].flags.writeable = False
    got, parcel = there_and_back(value)
    assert all(np.array_equal(got[name], value[name]) for name in ("a", "b", "c", "readonly")) and got["d"] == value["d"]
    assert sum(parcel.sizes) >= 8 * BIG and len(parcel.data) < 5000


def test_tensors_that_share_memory_still_do():
    whole = torch.zeros(100, 100)
    (a, b, module), parcel = there_and_back((whole[:50], whole, torch.nn.Linear(100, 100)))
    b[0, 0] = 7
    assert a[0, 0] == 7
    assert sum(parcel.sizes) == 2 * 40_000
    assert isinstance(module, torch.nn.Linear)


@pytest.mark.parametrize("nameless", [True, False])
def test_run_02_what_is_large_goes_through_memory(monkeypatch, nameless):
    """Written once for all ranks, read by each; nothing of it stays."""
    if not nameless:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    captured, given = torch.arange(BIG), np.arange(BIG)
    files, before = len(os.listdir("/proc/self/fd")) if nameless else 0, set(os.listdir(host.memory_folder()))

    def sums(array):
        return int(captured.sum()) + int(array.sum()), torch.full((BIG,), dist.get_rank())

    results = launch(sums, 2, args=(given,))
    for rank, (total, tensor) in enumerate(results):
        assert total == BIG * (BIG - 1)
        assert tensor.shape == (BIG,) and (tensor == rank).all()
    assert set(os.listdir(host.memory_folder())) <= before
    if nameless:
        assert len(os.listdir("/proc/self/fd")) <= files + 6, "of the fork server, not of parcels"


def test_run_02_much_of_it_is_remarked_upon():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        much = torch.zeros(carry.MUCH_BYTES, dtype=torch.uint8)
        carry.pack(lambda: much.sum(), ()).close()
        carry.pack(len, ([1],)).close()
    [warning] = caught
    assert "takes 50 MiB along to every rank: a model is better loaded inside of the function" in str(warning.message)


def test_what_cannot_travel_leaves_no_file_open():
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with pytest.raises(ValueError, match="hold something that cannot travel"):
        carry.pack(print, (torch.zeros(BIG), tempfile.TemporaryFile()))
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before + 1
