"""What several test files use: small random checkpoints as transformers writes them, and a model that follows a script."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers

import minifer
from minifer import decode
from minifer.draft import Settled
from minifer.drafters import EagleDrafter, GemmaDrafter, Recurrent
from minifer.drafters.drafter import Drafter, chains
from minifer.model import weights
from minifer.model.cache import Cache
from minifer.model.checkpoints import SafetensorsFolder
from minifer.model.families import read_config
from minifer.model.passes import Output, Pass, Span
from minifer.model.transformer import Transformer
from minifer.training import distill
from minifer.training.answers import Answer
from minifer.training.lesson import Recipe, read

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

GEMMA: dict[str, Any] = {
    "head_dim": 8,
    "sliding_window": 4,
    "tie_word_embeddings": False,  # tied, a random model repeats its last token for ever
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}
GEMMA4 = GEMMA | {"global_head_dim": 16, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
GEMMA_LINEAR = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}

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
    "gemma3": ("Gemma3", GEMMA | {"final_logit_softcapping": 6.0}),
    "gemma3-linear": ("Gemma3", GEMMA | {"rope_parameters": GEMMA_LINEAR, "query_pre_attn_scalar": 8, "attention_bias": True}),
    "gemma4": ("Gemma4", GEMMA4),
    "gemma4-keys-as-values": (
        "Gemma4",
        GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 6.0},
    ),
    "gemma4-shared": (
        "Gemma4",
        GEMMA4
        | {"tie_word_embeddings": True, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
        | {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 67},
    ),
}


def reference(family: str, seed: int = 0, **more: Any) -> transformers.PreTrainedModel:
    """A random model of transformers, float32, with norms and biases that are not their neutral values."""
    prefix, options = FAMILIES[family]
    part = "TextConfig" if prefix.startswith("Gemma") else "Config"
    config = getattr(transformers, prefix + part)(**(SIZES | options | more))
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    randomise(model, 0.3 if prefix.startswith("Gemma") else 1.0, adds_one=prefix == "Gemma3")
    return model


def randomise(model: torch.nn.Module, table: float = 1.0, adds_one: bool = False) -> None:
    """Other numbers for a model of transformers. table: spread of its embedding. adds_one: its norms multiply by 1 + weight."""
    scalars = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("layer_scalar")]
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *scalars]:
            if parameter.dim() > 1:
                # Large enough that attention is not flat and that next tokens vary.
                parameter.normal_(0, table if "embed" in name or "lm_head" in name else 1.6 * parameter.shape[1] ** -0.5)
            else:
                parameter.normal_(0, 0.2).add_(0.0 if name.endswith("bias") or adds_one else 1.0)


def plain_model(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    finish: bool = False,
    shard: Callable[[Transformer], Transformer] = lambda model: model,
) -> Transformer:
    """A folder's model without its tokenizer; fused and packed only if asked for. shard: what a technique does to it."""
    model = Transformer(read_config(folder))
    checkpoint = SafetensorsFolder(folder)
    weights.check(model.tensors, checkpoint, model.config.may_be_extra)
    model = shard(model)
    if finish:
        model.fuse()
    weights.fill(model, checkpoint, dtype)
    return model.finish() if finish else model


def noting(loop: decode.Steps, note: Callable[[Pass], object]) -> decode.Steps:
    """The same loop; note(pass) is called whenever a pass has run."""
    output: Any = None
    while True:
        try:
            pass_ = loop.send(output)
        except StopIteration as end:
            return end.value
        output = yield pass_
        note(pass_)


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

    def best(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits(hidden).argmax(-1)

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


def trained_kind(kind: str, target: Transformer, texts: Sequence[list[int]] = (), seed: int = 0, **options: Any) -> Drafter:
    """A drafter of a kind that is trained: "eagle", "eagle tree", "deepseek" or "gemma".

    texts: what it learns by heart, a little: right at times. Without them it says anything. options: of its recipe.
    """
    name = kind.split()[0]
    sizes: dict[str, Any] = {"drafted": 999, "layers": 2, "width": 16, "inner": 24, "seed": seed} | options
    said = [Answer(text, 1) for text in texts]
    student = distill.STUDENTS[name](Recipe("", name, **sizes), target, said)
    module: Any = student.module
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.requires_grad_(True).add_(0.1 * torch.randn_like(parameter))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    lesson = read(target, said, student.reads) if texts else None
    for _ in range(40 if texts else 0):
        optimizer.zero_grad()
        student.loss(lesson).backward()
        optimizer.step()
    module.requires_grad_(False)
    if name == "gemma":
        return GemmaDrafter(module)
    if name == "deepseek":
        return Recurrent(module, student.reads)
    return EagleDrafter(module, student.reads, size=7 if kind == "eagle tree" else 0, beam=3)


def drafts_of(target: Transformer, drafter: Drafter, length: int, texts: list[list[int]]) -> list[list[list[int]]]:
    """What a fresh drafter proposes after each of these texts, whose last token was decided just now: ids and parents."""
    batch = decode.start(target, [text[:-1] for text in texts], 64)
    mine, found = drafter.start(batch, length), []

    def loop() -> decode.Steps:
        output = yield batch.extend(None, mine.reads)
        last = {at: text[-1] for at, text in enumerate(texts)}
        settled = Settled({at: [token] for at, token in last.items()}, {at: [] for at in last}, {at: [at] for at in last})
        batch.take(torch.tensor(list(last.values())), settled)
        found.extend(mine.propose(batch, output, settled, [length] * len(texts)).tolist())
        return []

    decode.run(target, loop(), decode.new_cache(target, batch))
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
