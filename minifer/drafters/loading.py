"""From a name or a folder to a drafter of a target.

A folder holds a smaller model (config.json, as any model), Gemma 4's assistant as it is published, or what `minifer train drafters`
writes: drafter.json says what it is and for which sizes, model.safetensors holds its numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..model import weights
from ..model.checkpoints import SafetensorsFolder
from ..model.config import read_json
from ..model.families import read_config
from ..model.gemma import from_dict as gemma_config
from ..model.keys import need, refuse_unknown
from ..model.linear import Linear
from ..model.load import data_folder, find
from ..model.tokenizer import Tokenizer
from ..model.tokenizer import from_folder as tokenizer_from_folder
from ..model.transformer import Transformer
from .chained import Shared
from .combined import Combined
from .deepseek import DeepSeek
from .draft_model import DraftModel
from .drafter import Drafter
from .eagle import Eagle, EagleDrafter
from .gemma import Gemma, GemmaDrafter
from .medusa import Heads, Medusa
from .prompt_lookup import PromptLookup
from .recurrent import Recurrent

KINDS = ("prompt_lookup", "draft_model", "medusa", "eagle", "deepseek", "gemma")

ORDER = "masked_embedding.token_ordering"
ASSISTANT_KEYS = frozenset(
    """
    backbone_hidden_size centroid_intermediate_top_k num_centroids text_config tie_word_embeddings use_ordered_embeddings
    """.split()
)
ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")


def available(model: str) -> list[str]:
    """The drafters that come with minifer for the model of this name."""
    return [kind for kind in KINDS if kind == "prompt_lookup" or (data_folder() / model / kind).is_dir()]


def load(name: str | Path, target: Transformer, tokenizer: Tokenizer | None = None) -> Drafter:
    """A drafter for this target: the bundled one of that kind, or the one in a folder; two of them joined by a plus.

    "deepseek" for a target whose own checkpoint has such a module behind its layers is that one.

    A folder holds what `minifer train drafters` writes, or any smaller model of a Hugging Face layout. tokenizer: the target's;
    a model with another one is refused. On a rank that does not decide (an earlier stage of a pipeline) it stays empty: there it
    only says what it reads and how long its drafts are. Raises ValueError or FileNotFoundError naming what does not fit.
    """
    first, plus, then = str(name).partition("+")
    if plus and not Path(name).is_dir():
        return Combined(load(first, target, tokenizer), load(then, target, tokenizer))
    if name == "prompt_lookup":
        return PromptLookup()
    folder = Path(name)
    if name == "deepseek" and target.config.next_layers:
        return _own_module(find(target.name), target)
    if str(name) in KINDS:
        folder = data_folder() / target.name / str(name)
        if not target.name or not folder.is_dir():
            have = f"{target.name or 'this model'} (there are: {', '.join(available(target.name))})"
            raise FileNotFoundError(f"no {name} is bundled for {have}; a folder of one would do")
    if not folder.is_dir():
        raise FileNotFoundError(f"no drafter {str(name)!r}: neither one of {', '.join(KINDS)} nor a folder")
    if (folder / "drafter.json").is_file():
        return _trained(folder, target)
    if str(read_json(folder / "config.json").get("model_type")) in ASSISTANTS:
        return _gemma(folder, target)
    return _draft_model(folder, target, tokenizer)


def _draft_model(folder: Path, target: Transformer, tokenizer: Tokenizer | None) -> DraftModel:
    model, checkpoint, common = Transformer(read_config(folder)), SafetensorsFolder(folder), None
    if tokenizer is not None and (folder / "tokenizer.json").is_file():
        own = tokenizer_from_folder(folder)
        if own.core.get_vocab() != tokenizer.core.get_vocab():
            sizes = f"{own.vocabulary} tokens, the target's {tokenizer.vocabulary}"
            raise ValueError(f"the draft model in {folder} has another tokenizer: {sizes}, and they do not mean the same")
        common = own.vocabulary
    drafter = DraftModel(model, target, common)
    weights.check(model.tensors, checkpoint, model.config.may_be_extra)
    model.fuse()
    if target.decides:
        weights.fill(model, checkpoint, target.dtype, target.device)
        model.finish()
    return drafter


def _trained(folder: Path, target: Transformer) -> Drafter:
    about, checkpoint = read_json(folder / "drafter.json"), SafetensorsFolder(folder)
    kind, made = about.get("drafter"), {"medusa": _medusa, "eagle": _eagle, "deepseek": _deepseek}
    if kind not in made:
        raise ValueError(f"{folder / 'drafter.json'} describes a drafter {kind!r}; known: {', '.join(made)}")
    _fits(folder, about.get("width"), about.get("vocabulary"), target)
    return made[kind](_Said(folder / "drafter.json", about), checkpoint, target)


def _fits(folder: Path, width: Any, vocabulary: Any, target: Transformer) -> None:
    """Raise a ValueError if a drafter for a target of these sizes is not for this one."""
    sizes, theirs = (width, vocabulary), (target.config.width, target.config.vocabulary)
    if sizes != theirs:
        raise ValueError(f"the drafter in {folder} is for a target of width and vocabulary {sizes}, this one has {theirs}")


class _Said:
    """What a drafter.json says, asked for by key."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path, self.about = path, about

    def __getitem__(self, key: str) -> Any:
        if key not in self.about:
            raise ValueError(f"{self.path} does not say: {key}")
        return self.about[key]


def _medusa(said: _Said, checkpoint: SafetensorsFolder, target: Transformer) -> Medusa:
    heads = Heads(said["heads"], said["width"], said["vocabulary"])
    drafter = Medusa(heads, target, [tuple(path) for path in said["tree"]])
    _check_and_fill(heads, checkpoint, target)
    return drafter


def _eagle(said: _Said, checkpoint: SafetensorsFolder, target: Transformer) -> EagleDrafter:
    module = Eagle(Shared(target, _drafted(checkpoint)), len(said["reads"]))
    module.attention.fuse()
    module.feed_forward.fuse()
    _check_and_fill(module, checkpoint, target)
    return EagleDrafter(module, said["reads"], said["size"], said["beam"])


def _deepseek(said: _Said, checkpoint: SafetensorsFolder, target: Transformer) -> Recurrent:
    return _deepseek_of(checkpoint, target, said["reads"])


def _deepseek_of(
    checkpoint: SafetensorsFolder, target: Transformer, reads: Sequence[int], may_be_extra: Sequence[str] = ("ids",)
) -> Recurrent:
    module = DeepSeek(Shared(target, _drafted(checkpoint)))
    module.layer.fuse()
    _check_and_fill(module, checkpoint, target, may_be_extra)
    return Recurrent(module, reads)


def _own_module(folder: Path, target: Transformer) -> Recurrent:
    if target.config.next_layers != 1:
        raise ValueError(f"{folder} has {target.config.next_layers} modules for further tokens; 1 is supported, applied again")
    return _deepseek_of(SafetensorsFolder(folder), target, [target.config.layers - 1], may_be_extra=("",))


def _gemma(folder: Path, target: Transformer) -> GemmaDrafter:
    raw, checkpoint = read_json(folder / "config.json"), SafetensorsFolder(folder)
    refuse_unknown(raw, ASSISTANT_KEYS, ())
    config = gemma_config(raw, drafter=True)
    _fits(folder, raw.get("backbone_hidden_size"), config.vocabulary, target)
    clusters = None
    if raw.get("use_ordered_embeddings"):
        clusters = need(raw, "num_centroids", 2048), need(raw, "centroid_intermediate_top_k", 32)
        if config.vocabulary % clusters[0] or clusters[1] > clusters[0]:
            raise ValueError(
                f"{clusters[1]} of {clusters[0]} clusters of a vocabulary of {config.vocabulary}: they are of one size"
            )
    module = Gemma(Shared(target), config, clusters)
    weights.check(weights.tensors_of(module), checkpoint, ("lm_head.weight", ORDER))
    module.follow()
    for layer in module.each:
        layer.fuse()
    # A head of clusters is looked up row by row, so it stays in rows.
    _fill(module, checkpoint, target, unpacked=() if clusters is None else (module.head,))
    if clusters is not None:
        if ORDER not in checkpoint.shapes:
            raise ValueError(f"{folder} has clusters of tokens, but does not say which: {ORDER}")
        module.members = checkpoint.read(ORDER, ((0, config.vocabulary),)).long().view(clusters[0], -1)
    return GemmaDrafter(module)


def _drafted(checkpoint: SafetensorsFolder) -> torch.Tensor | None:
    """The ids of a reduced vocabulary, which the checkpoint holds beside the weights."""
    size = checkpoint.shapes.get("ids")
    return None if size is None else checkpoint.read("ids", ((0, size[0]),)).long()


def _check_and_fill(
    module: nn.Module, checkpoint: SafetensorsFolder, target: Transformer, may_be_extra: Sequence[str] = ("ids",)
) -> None:
    weights.check(weights.tensors_of(module), checkpoint, may_be_extra)
    _fill(module, checkpoint, target)


def _fill(module: nn.Module, checkpoint: SafetensorsFolder, target: Transformer, unpacked: Sequence[Linear] = ()) -> None:
    if not target.decides:
        return
    weights.fill(module, checkpoint, target.dtype, target.device)
    for part in module.modules():
        if isinstance(part, Linear) and part not in unpacked:
            part.pack()
