"""The bundled prompts: six kinds of work, twelve prompts each, written for this project."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from .model.load import data_folder
from .model.tokenizer import Tokenizer

WORKLOADS = ("code", "documentation", "structured", "translation", "story", "chat")


@dataclass(frozen=True)
class Workload:
    """Prompts of one kind. instruction: what a chat model is told before each of them, where the prompt alone would not do."""

    name: str
    instruction: str
    prompts: tuple[str, ...]

    def ids(self, tokenizer: Tokenizer) -> list[list[int]]:
        """Each prompt as ids: as a message to a chat model, as a text to be continued by any other."""
        if tokenizer.template is None:
            return [tokenizer.encode(prompt) for prompt in self.prompts]
        return [tokenizer.encode_chat([self.message(prompt)]) for prompt in self.prompts]

    def message(self, prompt: str) -> dict[str, str]:
        """What a chat model is told with a prompt of this kind."""
        return {"role": "user", "content": f"{self.instruction}\n\n{prompt}".strip()}


def first(tokenizer: Tokenizer, each: int, kinds: Sequence[str] = WORKLOADS) -> list[list[int]]:
    """The first `each` prompts of each of these workloads, as ids."""
    held = [workload(kind) for kind in kinds]
    for one in held:
        if not 1 <= each <= len(one.prompts):
            raise ValueError(f"there are {len(one.prompts)} prompts of each workload, not {each}")
    return [ids for one in held for ids in one.ids(tokenizer)[:each]]


def workload(name: str) -> Workload:
    """One of WORKLOADS."""
    if name not in WORKLOADS:
        raise ValueError(f"no workload {name!r}; there are {', '.join(WORKLOADS)}")
    held = json.loads((data_folder() / "prompts" / f"{name}.json").read_text("utf-8"))
    return Workload(name, held["instruction"], tuple(held["prompts"]))
