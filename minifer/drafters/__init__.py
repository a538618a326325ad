"""Drafters: who proposes the tokens that a pass of the target verifies. One interface (drafter.py), a module each.

What each needs of a target whose layers or ranks are apart, for each row and pass (D width of the target in elements):

| drafter | reads of the target | where it runs | its own weights there | travels more than the agreed draft |
|---|---|---|---|---|
| prompt lookup | agreed tokens | where the output is | none | nothing |
| draft model | agreed tokens | where the output is | replicated | nothing |
| Medusa | hidden state of the last kept token, D | last stage of a pipeline, each rank of a tensor group | replicated | nothing |

A draft is 8 bytes for each id and each parent, agreed like every decision.
"""

from __future__ import annotations

from pathlib import Path

from ..model import weights
from ..model.checkpoints import SafetensorsFolder
from ..model.config import read_config, read_json
from ..model.load import data_folder
from ..model.tokenizer import Tokenizer
from ..model.tokenizer import from_folder as tokenizer_from_folder
from ..model.transformer import Transformer
from .draft_model import DraftModel
from .drafter import Drafter
from .medusa import Heads, Medusa
from .prompt_lookup import PromptLookup

__all__ = ["DraftModel", "Drafter", "Medusa", "PromptLookup", "available", "load"]

KINDS = ("prompt_lookup", "draft_model", "medusa")


def available(model: str) -> list[str]:
    """The drafters that come with minifer for the model of this name."""
    return [kind for kind in KINDS if kind == "prompt_lookup" or (data_folder() / model / kind).is_dir()]


def load(name: str | Path, target: Transformer, tokenizer: Tokenizer | None = None) -> Drafter:
    """A drafter for this target: the bundled one of that kind, or the one in a folder.

    A folder holds what `minifer train drafters` writes, or any smaller model of a Hugging Face layout. tokenizer: the target's;
    a model with another one is refused. Raises ValueError or FileNotFoundError naming what does not fit.
    """
    if name == "prompt_lookup":
        return PromptLookup()
    folder = Path(name)
    if str(name) in KINDS:
        folder = data_folder() / target.name / str(name)
        if not target.name or not folder.is_dir():
            have = f"{target.name or 'this model'} (there are: {', '.join(available(target.name))})"
            raise FileNotFoundError(f"no {name} is bundled for {have}; a folder of one would do")
    if not folder.is_dir():
        raise FileNotFoundError(f"no drafter {str(name)!r}: neither one of {', '.join(KINDS)} nor a folder")
    if (folder / "drafter.json").is_file():
        return _medusa(folder, target)
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
    weights.check(model.tensors, checkpoint, ("rotary_emb.inv_freq", *(("lm_head.weight",) if model.config.tied else ())))
    weights.fill(model.fuse(), checkpoint, target.dtype, target.device)
    model.finish()
    return drafter


def _medusa(folder: Path, target: Transformer) -> Medusa:
    about, checkpoint = read_json(folder / "drafter.json"), SafetensorsFolder(folder)
    if about.get("drafter") != "medusa":
        raise ValueError(f"{folder / 'drafter.json'} describes a drafter {about.get('drafter')!r}; known: medusa")
    lacking = [key for key in ("heads", "width", "vocabulary", "tree") if key not in about]
    if lacking:
        raise ValueError(f"{folder / 'drafter.json'} does not say: {', '.join(lacking)}")
    sizes, theirs = (about["width"], about["vocabulary"]), (target.config.width, target.config.vocabulary)
    if sizes != theirs:
        raise ValueError(f"the heads in {folder} are for a target of width and vocabulary {sizes}, this one has {theirs}")
    heads = Heads(about["heads"], *sizes)
    weights.check(weights.tensors_of(heads), checkpoint)
    drafter = Medusa(heads, target, [tuple(path) for path in about["tree"]])
    weights.fill(heads, checkpoint, target.dtype, target.device)
    for head in heads.each:
        head.out.pack()
    return drafter
