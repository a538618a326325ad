"""What several test files use: small random checkpoints as transformers writes them, and a model that follows a script."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers

import minifer
from minifer.drafters.drafter import Drafter, chains
from minifer.model import weights
from minifer.model.cache import Cache
from minifer.model.checkpoints import SafetensorsFolder
from minifer.model.families import read_config
from minifer.model.passes import Output, Pass, Span
from minifer.model.transformer import Transformer

# The tiny model of the case log: odd sizes everywhere.
SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
QWEN_WINDOWS = ["full_attention", "sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]

# name: (class prefix in transformers, options)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-head-dim": ("Llama", {"hidden_size": 20, "head_dim": 8}),
    "llama-biases-tied": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN | {"rope_theta": 10000.0}}),
    "mistral-window": ("Mistral", {"sliding_window": 4, "head_dim": 8}),
    "mistral-full": ("Mistral", {"sliding_window": None, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {}),
    "qwen2-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 16, "num_attention_heads": 6, "num_key_value_heads": 3, "tie_word_embeddings": True}),
    "qwen3-windows": (
        "Qwen3",
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 4, "layer_types": QWEN_WINDOWS, "attention_bias": True},
    ),
}


def reference(family: str, seed: int = 0, **more: Any) -> transformers.PreTrainedModel:
    """A random model of transformers, float32, with norms and biases that are not their neutral values."""
    prefix, options = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(**(SIZES | options | more))
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                # Large enough that attention is not flat and that next tokens vary.
                parameter.normal_(0, 1.0 if "embed" in name or "lm_head" in name else 1.6 * parameter.shape[1] ** -0.5)
            else:
                parameter.normal_(0, 0.2).add_(0.0 if name.endswith("bias") else 1.0)
    return model


def plain_model(folder: Path, dtype: torch.dtype = torch.float32, finish: bool = False) -> Transformer:
    """A folder's model without its tokenizer; fused and packed only if asked for."""
    model = Transformer(read_config(folder))
    checkpoint = SafetensorsFolder(folder)
    weights.check(model.tensors, checkpoint, ("lm_head.weight",) if model.config.tied else ())
    if finish:
        model.fuse()
    weights.fill(model, checkpoint, dtype)
    return model.finish() if finish else model


def naive_greedy(model: Transformer, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding with no cache, no batch and no loop of minifer's: the whole text again for every token."""
    ids = list(prompt)
    for _ in range(count):
        pass_ = Pass(torch.tensor(ids), (Span(0, 0, len(ids)),), (len(ids) - 1,))
        with torch.inference_mode():
            ids.append(int(model(pass_).logits.argmax()))
    return ids[len(prompt) :]


class ScriptedModel:
    """Next-token logits depend on the last token only, by a table {token: next token}. It also keeps the passes it saw."""

    def __init__(
        self, table: dict[int, int], vocabulary: int = 16, context: int = 64, end_ids: tuple[int, ...] = (), **times: float
    ):
        self.config = SimpleNamespace(vocabulary=vocabulary, context=context, end_ids=end_ids)
        self.table, self.agreements, self.passes, self.times = table, [], [], times

    def __call__(self, pass_: Pass, cache: Cache) -> Output:
        cache.begin(pass_)
        cache.commit(pass_)
        self.passes.append(pass_)
        is_prefill = any(span.start == 0 for span in pass_.spans)
        time.sleep(self.times.get("prefill" if is_prefill else "decode", 0.0))
        return Output(self, pass_, pass_.ids[list(pass_.wanted)], {})  # type: ignore[arg-type]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.ones(len(hidden), self.config.vocabulary)
        for row, token in enumerate(hidden.tolist()):
            logits[row, self.table.get(token, 0)] = 5.0
        return logits

    def new_cache(self, rows: int, capacity: int) -> Cache:
        return Cache([], rows, capacity)


class Truthful(Drafter):
    """Knows each row's continuation, and spoils it where `good(row, decided, depth)` says no. `calls` counts its proposals."""

    def __init__(self, truth: list[list[int]], vocabulary: int, good: Callable[[int, int, int], bool] = lambda *_: True) -> None:
        self.truth, self.vocabulary, self.good = truth, vocabulary, good
        self.calls: list[list[int]] = []

    def propose(self, batch: Any, output: Any, settled: Any, deepest: Any) -> torch.Tensor:
        self.calls.append(list(deepest))
        drafts = {}
        for at in batch.active:
            known = batch.row(at).new
            following = self.truth[at][known : known + deepest[at]]
            drafts[at] = [
                token if self.good(at, known, depth) else (token + 1) % self.vocabulary for depth, token in enumerate(following)
            ]
        return chains(drafts, batch.rows, self.draft_length)


class TruthfulTree(Truthful):
    """The same, as trees: at each depth three siblings, of which one at most is right, under every node but the wrong ones' children."""

    def nodes(self, draft_length: int) -> int:
        return 3 * draft_length

    def propose(self, batch: Any, output: Any, settled: Any, deepest: Any) -> torch.Tensor:
        found = torch.full((batch.rows, 2, 3 * self.draft_length), -1)
        for at in batch.active:
            known, parent = batch.row(at).new, -1
            for depth, token in enumerate(self.truth[at][known : known + deepest[at]]):
                place = (at + known + depth) % 3  # of the right one
                first = token if self.good(at, known, depth) else token + 5
                for sibling in range(3):
                    node = 3 * depth + sibling
                    found[at, 0, node] = (first + (sibling - place) % 3) % self.vocabulary
                    found[at, 1, node] = parent
                parent = 3 * depth + place
        return found


class PieceTokenizer:
    """A tokenizer whose id i means pieces[i]; enough of one for the loop."""

    end_ids: tuple[int, ...] = ()

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def decode(self, ids: Any, special_tokens: bool = False) -> str:
        return "".join(self.pieces[token] for token in ids)

    def detokenizer(self, before: Any = ()) -> Any:
        from minifer.model.text import Detokenizer

        return Detokenizer(self.decode, before)


def in_three_tries(check: Callable[[], None]) -> None:
    """Run a check of times, again if it fails: a machine that is busy elsewhere passes in the end, a wrong clock never."""
    for attempt in range(3):
        try:
            return check()
        except AssertionError:
            if attempt == 2:
                raise


def chain(*tokens: int) -> dict[int, int]:
    """{a: b, b: c, ...}"""
    return dict(zip(tokens, tokens[1:]))


def ids_of(completions: list[minifer.Completion]) -> list[list[int]]:
    return [completion.ids for completion in completions]
