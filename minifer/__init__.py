"""minifer: a small, readable inference engine that runs the techniques by which large language models are served fast.

model, tokenizer = minifer.load("tiny")
print(minifer.generate(model, tokenizer, "def fibonacci(n):", max_new_tokens=64))

def rank():
    ...                                       # runs on every rank, in a process group
results = minifer.launch(rank, ranks=2)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from . import data_parallel, decode, drafters, mtp
from .batch import Completion, Request
from .drafters import Drafter
from .model.load import load
from .model.sampling import Sampling
from .model.tokenizer import Messages, Tokenizer
from .model.transformer import Transformer
from .pace import Adaptive
from .ranks import RankError, Ranks, launch, trace

__version__ = "0.1.0"
__all__ = [
    "Adaptive", "Completion", "Drafter", "RankError", "Ranks", "Request", "Sampling", "Tokenizer", "Transformer", "data_parallel",
    "decode", "drafters", "generate", "launch", "load", "mtp", "stream", "trace",
]  # fmt: skip


def generate(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt: str | Messages,
    max_new_tokens: int | None = 128,
    *,
    sampling: Sampling | None = None,
    stop_strings: Sequence[str] = (),
    drafter: str | Path | Drafter | None = None,
    draft_length: int | Adaptive | None = None,
) -> str:
    """The text that follows a prompt, or the answer to messages ([{"role": "user", "content": "..."}]).

    max_new_tokens: None lets it run to the model's context. sampling: greedy by default. stop_strings: the text ends before
    the first of them. drafter: speculate with this one ("prompt_lookup", a bundled one of the model, a folder); the text stays
    the same (sampled: its distribution). draft_length: how many tokens it drafts; by default as many as it usually does.
    """
    options = {"sampling": sampling, "stop_strings": stop_strings, "drafter": drafter, "draft_length": draft_length}
    return "".join(stream(model, tokenizer, prompt, max_new_tokens, **options))  # type: ignore[arg-type]


def stream(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt: str | Messages,
    max_new_tokens: int | None = 128,
    *,
    sampling: Sampling | None = None,
    stop_strings: Sequence[str] = (),
    drafter: str | Path | Drafter | None = None,
    draft_length: int | Adaptive | None = None,
) -> Iterator[str]:
    """As generate, but in pieces, as soon as they are decided. Pieces hold whole characters only."""
    if not isinstance(prompt, str) and not all(isinstance(message, dict) for message in prompt):
        raise ValueError(f"a prompt is a text or a list of messages, not {prompt!r:.60}; ids go to minifer.decode.generate")
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.encode_chat(prompt)
    request = Request(ids, max_new_tokens, sampling or Sampling(), stop_strings=stop_strings)
    # Either complains now, not when the first piece is asked for.
    if drafter is None:
        fresh = decode.stream(model, [request], tokenizer=tokenizer)
    else:
        loaded = drafter if isinstance(drafter, Drafter) else drafters.load(drafter, model, tokenizer)
        fresh = mtp.stream(model, [request], loaded, draft_length, tokenizer=tokenizer)
    return (one.text for one in fresh if one.text)
