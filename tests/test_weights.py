"""Pieces of checkpoint tensors, and checkpoints with something wrong with them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from helpers import plain_model, reference
from safetensors.torch import load_file, save_file

import minifer
from minifer.model import weights
from minifer.model.checkpoints import INDEX, SafetensorsFolder
from minifer.model.families import read_config
from minifer.model.transformer import Transformer


class Memory:
    """Tensors in memory as a checkpoint."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def read(self, name, box):
        return self.tensors[name][tuple(slice(*bounds) for bounds in box)]


class Holder(torch.nn.Module):
    def __init__(self, parameter):
        super().__init__()
        self.weight = parameter


def filled(parameter, **tensors) -> torch.Tensor:
    holder = Holder(parameter)
    weights.fill(holder, Memory(**tensors), torch.float32)
    return holder.weight


def rows(first: int, last: int) -> torch.Tensor:
    return torch.arange(first, last, dtype=torch.float32)[:, None].expand(-1, 3).contiguous()


def test_tp_07_fused_parts_are_cut_each_by_itself():
    """Q 16 rows, K and V 8 each, over two ranks: a rank gets its share of each, not a block of the whole."""
    tensors = {"q": rows(0, 16), "k": rows(16, 24), "v": rows(24, 32)}
    fused = weights.declare(("q", (16, 3)), ("k", (8, 3)), ("v", (8, 3)))
    for rank, wanted in enumerate(([*range(8), *range(16, 20), *range(24, 28)], [*range(8, 16), *range(20, 24), *range(28, 32)])):
        mine = [(8 * rank, 8 * rank + 8), (16 + 4 * rank, 20 + 4 * rank), (24 + 4 * rank, 28 + 4 * rank)]
        assert filled(weights.select(fused, 0, mine), **tensors)[:, 0].int().tolist() == wanted
    gate_up = weights.declare(("gate", (6, 3)), ("up", (6, 3)))
    for rank, wanted in enumerate(([0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11])):
        mine = [(3 * rank, 3 * rank + 3), (6 + 3 * rank, 9 + 3 * rank)]
        part = filled(weights.select(gate_up, 0, mine), gate=rows(0, 6), up=rows(6, 12))
        assert part[:, 0].int().tolist() == wanted


def test_selections_of_selections_and_of_columns():
    table = torch.arange(60.0).view(10, 6)
    parameter = weights.select(weights.declare(("t", (10, 6))), 0, [(2, 5), (7, 9)])
    parameter = weights.select(parameter, 1, [(4, 6), (0, 1)])
    parameter = weights.select(parameter, 0, [(1, 4)])
    assert torch.equal(filled(parameter, t=table), table[[3, 4, 7]][:, [4, 5, 0]])
    with pytest.raises(ValueError, match="range 5:11 of a dimension of 10"):
        weights.select(weights.declare(("t", (10, 6))), 0, [(5, 11)])


def test_a_range_twice_is_replicated():
    assert filled(weights.select(weights.declare(("t", (4, 3))), 0, [(1, 2), (1, 2)]), t=rows(0, 4))[:, 0].tolist() == [1, 1]


def test_parameters_without_a_share_keep_their_shapes():
    """Ranks more than rows: nothing is left of either matrix, and still they are two."""
    holder = torch.nn.Module()
    for name, width in (("a", 8), ("b", 6)):
        holder.register_parameter(name, weights.select(weights.declare((name, (4, width))), 0, []))
    weights.fill(holder, Memory(), torch.float32)
    assert holder.a.shape == (0, 8) and holder.b.shape == (0, 6)


def test_blocks_cover_a_large_piece(monkeypatch):
    monkeypatch.setattr(weights, "BLOCK_BYTES", 50)  # 4 rows of 3 float32
    assert torch.equal(filled(weights.declare(("t", (11, 3))), t=rows(0, 11)), rows(0, 11))


def test_equal_pieces_are_one_parameter(checkpoint):
    model = plain_model(checkpoint("llama-biases-tied"))
    assert model.chunks[0].entrance.weight is model.chunks[-1].exit.linear.weight
    untied = plain_model(checkpoint("llama"))
    assert untied.chunks[0].entrance.weight is not untied.chunks[-1].exit.linear.weight


def test_collect_gives_back_what_fill_took(checkpoint):
    folder = checkpoint("qwen2")
    stored, again = load_file(folder / "model.safetensors"), weights.collect(plain_model(folder), torch.float32)
    assert stored.keys() == again.keys() and all(torch.equal(stored[name], again[name]) for name in stored)


# What can be wrong with a folder. Each change of a good one is an error that names the culprit, before any number is read.


@pytest.fixture
def folder(tmp_path, checkpoint):
    """A copy of the tiny Llama's folder with a tokenizer, ready to be spoilt."""
    good = checkpoint("llama")
    (tmp_path / "config.json").write_text((good / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((good / "model.safetensors").read_bytes())
    from minifer.training.corpus import train_tokenizer

    train_tokenizer(["a b c"], 60).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def change(folder, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def shard(folder, parts: int = 3) -> list[str]:
    """Spread the tensors over files, with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = [f"model-{part + 1:05}-of-{parts:05}.safetensors" for part in range(parts)]
    names = sorted(tensors)
    for part, file in enumerate(files):
        save_file({name: tensors[name] for name in names[part::parts]}, folder / file, {"format": "pt"})
    where = {name: files[at % parts] for at, name in enumerate(names)}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return files


def logits(model) -> torch.Tensor:
    from minifer.model.passes import Pass, Span

    with torch.inference_mode():
        return model(Pass(torch.tensor([1, 2, 3]), (Span(0, 0, 3),), (0, 1, 2))).logits


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.layers.3.mlp.up_proj.weight"), "missing model.layers.3.mlp.up_proj.weight"),
        (lambda t: t.update({"model.layers.9.mlp.up_proj.weight": torch.zeros(2)}), "unknown model.layers.9.mlp.up_proj.weight"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(31)}),
            r"model.norm.weight: \[31\] in the checkpoint, \[32\] by the config",
        ),
        (lambda t: t.pop("lm_head.weight"), "missing lm_head.weight"),
    ],
)
def test_missing_unknown_and_misshapen_tensors(folder, edit, message):
    change(folder, edit)
    with pytest.raises(ValueError, match=message):
        minifer.load(folder)


def test_tensors_computed_anyway_may_be_stored(folder):
    change(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    minifer.load(folder)


def test_an_integer_tensor_is_refused(folder):
    change(folder, lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}))
    with pytest.raises(ValueError, match="model.norm.weight is stored as I8"):
        minifer.load(folder)


def test_hf_01_shards(folder):
    whole = logits(minifer.load(folder, torch.float32)[0])
    files = shard(folder)
    assert torch.equal(logits(minifer.load(folder, torch.float32)[0]), whole)
    content = (folder / files[1]).read_bytes()
    (folder / files[1]).write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=f"{files[1]} is damaged or cut off"):
        minifer.load(folder)
    (folder / files[1]).unlink()
    with pytest.raises(FileNotFoundError, match=files[1]):
        minifer.load(folder)
    with pytest.raises(FileNotFoundError, match="safetensors"):
        SafetensorsFolder(folder.parent)


def test_hf_01_a_tensor_that_is_not_where_the_index_says(folder):
    files = shard(folder)
    tensors = load_file(folder / files[0])
    lost = sorted(tensors)[0]
    del tensors[lost]
    save_file(tensors, folder / files[0], {"format": "pt"})
    with pytest.raises(ValueError, match=f"places {lost} in {files[0]}"):
        minifer.load(folder)


def test_hf_02_stray_files_are_not_looked_at(folder):
    wanted = logits(minifer.load(folder, torch.float32)[0])
    shard(folder, 2)
    save_file({"model.norm.weight": torch.zeros(32)}, folder / "consolidated.safetensors")
    (folder / "x.safetensors").mkdir()
    assert torch.equal(logits(minifer.load(folder, torch.float32)[0]), wanted)


def test_only_pickles_are_no_checkpoint(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="pytorch_model.bin.*never a pickle"):
        minifer.load(folder)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stored", [True, False])
def test_hf_10_tied_is_what_the_config_says(folder, tied, stored):
    model = reference("llama", tie_word_embeddings=tied)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors.pop("lm_head.weight")
    own = torch.randn(67, 32)
    if stored:
        tensors["lm_head.weight"] = own
    model.config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if not tied and not stored:
        with pytest.raises(ValueError, match="missing lm_head.weight"):
            minifer.load(folder)
        return
    head = minifer.load(folder, torch.float32)[0].chunks[-1].exit.linear.weight
    assert torch.equal(head, tensors["model.embed_tokens.weight"] if tied else own)


PEAK = """
import sys, torch, minifer
from minifer.model import weights
from minifer.model.checkpoints import SafetensorsFolder
from minifer.model.families import read_config
from minifer.model.transformer import Transformer
from pathlib import Path

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

folder, dtype = Path(sys.argv[1]), getattr(torch, sys.argv[2])
torch.ones(8, 8) @ torch.ones(8, 8)
model, checkpoint = Transformer(read_config(folder)).fuse(), SafetensorsFolder(folder)
open("/proc/self/clear_refs", "w").write("5")  # the peak starts here
before = status("VmRSS")
weights.fill(model, checkpoint, dtype)
held = sum(parameter.nbytes for parameter in model.parameters())
del checkpoint
model.finish()
print((status("VmHWM") - before) / held, held)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_peak_memory_of_loading(tmp_path, dtype):
    """At most 1.2 times the weights it ends with, although the file is as large again."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 10, "vocab_size": 32000}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4}
    from transformers import LlamaConfig

    LlamaConfig(**sizes).save_pretrained(tmp_path)
    shapes = Transformer(read_config(tmp_path)).tensors
    save_file(
        {n: torch.zeros(s, dtype=torch.bfloat16) for n, s in shapes.items()}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    done = subprocess.run([sys.executable, "-c", PEAK, str(tmp_path), dtype], capture_output=True, text=True, check=True)
    ratio, held = map(float, done.stdout.split())
    assert held > 400e6 and ratio < 1.2
