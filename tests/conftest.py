"""Worlds of ranks and random checkpoints that the whole run shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch

from minifer import Ranks
from minifer.model.transformer import Transformer


@pytest.fixture(scope="session")
def on_ranks() -> Iterator[Callable[..., list[Any]]]:
    """on_ranks(n, function, *args): run it on a world of n ranks. One world a size serves all tests; a broken one is replaced."""
    worlds: dict[int, Ranks] = {}

    def run(ranks: int, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        if ranks not in worlds:
            worlds[ranks] = Ranks(ranks)
        try:
            return worlds[ranks].run(function, *args, timeout=timeout)
        except BaseException:
            worlds.pop(ranks).close()
            raise

    run.processes = lambda: {process.pid for world in worlds.values() for process in world._processes}  # type: ignore[attr-defined]
    yield run
    for world in worlds.values():
        world.close()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """checkpoint(family): a folder of that family, written by transformers. checkpoint.reference(family): its model."""
    folders: dict[str, Path] = {}
    models: dict[str, Any] = {}

    def make(family: str) -> Path:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(family)
            models[family] = helpers.reference(family)
            models[family].save_pretrained(folders[family])
        return folders[family]

    def reference(family: str) -> Any:
        make(family)
        return models[family]

    make.reference = reference  # type: ignore[attr-defined]
    return make


@pytest.fixture(scope="session")
def tiny64(checkpoint: Callable[..., Path]) -> Transformer:
    """The tiny Llama in float64, where equal means equal."""
    return helpers.plain_model(checkpoint("llama"), torch.float64)
