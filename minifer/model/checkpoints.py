"""Tensors of a Hugging Face folder, read box by box.

There is a single model.safetensors, or an index says which files hold what; stray files beside them are not looked at.
All of it is checked on opening: a missing or cut-off shard is found before any number is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .config import read_json
from .weights import Box

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
READABLE = {"F64", "F32", "F16", "BF16", "I64", "I32"}  # the last two for lists of ids, which some drafters have
LM_HEAD = "lm_head.weight"
TEXT_PARTS = ("model.language_model.", "language_model.model.")
REOPEN_BYTES = 32 << 20


class SafetensorsFolder:
    """The tensors of a folder. shapes: {name: shape}."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = _files(folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in sorted(set(self.files.values())):
            self._list(file)
        lost = sorted(self.files.keys() - self.shapes.keys())
        if lost:
            raise ValueError(
                f"{INDEX} places {lost[0]} in {self.files[lost[0]]}, which does not hold it ({len(lost)} such tensors)"
            )
        self._stored = self._text_only()
        self._open: tuple[str, Any] | None = None
        self._since_open = 0

    def read(self, name: str, box: Box) -> torch.Tensor:
        """A box of a tensor, on the CPU, in the dtype of the file.

        The file is mapped into memory, so what was read stays there as long as the file is open: it is closed and opened
        again every REOPEN_BYTES, else loading would need the model twice.
        """
        name = self._stored.get(name, name)
        file = self.files[name]
        if self._open is None or self._open[0] != file or self._since_open > REOPEN_BYTES:
            if self._open is not None:
                self._open[1].__exit__(None, None, None)  # the old mapping goes before the new one comes
            self._open, self._since_open = (file, safe_open(self.folder / file, "pt")), 0
        part = self._open[1].get_slice(name)[tuple(slice(*bounds) for bounds in box)]
        self._since_open += part.nbytes
        return part

    def _text_only(self) -> dict[str, str]:
        """Of a model that also sees or hears keep the text part, under the names it has alone: {such a name: the stored one}."""
        text = next((prefix for prefix in TEXT_PARTS if any(name.startswith(prefix) for name in self.shapes)), None)
        if text is None:
            return {}
        found = {"model." + name.removeprefix(text): name for name in self.shapes if name.startswith(text)}
        heads = [name for name in self.shapes if name in (LM_HEAD, f"language_model.{LM_HEAD}")]
        found |= dict(zip([LM_HEAD], heads))
        self.shapes = {plain: self.shapes[stored] for plain, stored in found.items()}
        return found

    def _list(self, file: str) -> None:
        """Enter the shapes of the tensors that this file is to hold."""
        path = self.folder / file
        if not path.is_file():
            raise FileNotFoundError(f"{INDEX} names {file}, which is not in {self.folder}")
        try:
            opened = safe_open(path, "pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is damaged or cut off: {error}") from None
        held = opened.keys()
        if not self.files or self.files.get("") == file:
            self.files = dict.fromkeys(held, file)
        for name in held:
            if self.files.get(name) == file:
                part = opened.get_slice(name)
                if part.get_dtype() not in READABLE:
                    raise ValueError(f"{name} is stored as {part.get_dtype()}; supported: {', '.join(sorted(READABLE))}")
                self.shapes[name] = tuple(part.get_shape())


def _files(folder: Path) -> dict[str, str]:
    """{tensor name: file name}; {"": file} where a single file holds all."""
    if (folder / SINGLE).is_file():
        return {"": SINGLE}
    if (folder / INDEX).is_file():
        where = read_json(folder / INDEX).get("weight_map")
        if not isinstance(where, dict) or not where:
            raise ValueError(f"{folder / INDEX} has no weight_map")
        return where
    present = sorted(path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".pt", ".pth"))
    raise FileNotFoundError(
        f"{folder} holds neither {SINGLE} nor {INDEX} (weights found: {', '.join(present) or 'none'}); "
        "only safetensors and GGUF are read, never a pickle"
    )
