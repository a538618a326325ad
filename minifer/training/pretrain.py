"""How the bundled model `tiny` was made: next-token training of minifer's own transformer on the standard library.

    documents -> byte-level BPE -> one long row of ids -> random windows -> cross-entropy -> Muon and AdamW

Most steps see windows of 512 tokens, the last fifth windows of 2,048, so that the model knows positions up to there. How the
steps are made, and how a run is stopped and goes on, is in run.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn import functional as F

from ..model import weights
from ..model.config import Config
from ..model.families import to_dict
from ..model.passes import Pass, Span
from ..model.rotary import Rope
from ..model.transformer import Transformer
from .corpus import END_OF_TEXT, documents, is_held_out, train_tokenizer
from .run import Schedule, fit, same_recipe


@dataclass(frozen=True)
class Recipe:
    """Everything that a run depends on, apart from the machine's standard library and its arithmetic."""

    vocabulary: int = 4096
    width: int = 256
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    inner: int = 640
    context: int = 2048
    steps: int = 3000
    tokens_per_step: int = 4096
    window: int = 512
    long_share: float = 0.2  # of the steps, at the end, with windows of `context` tokens
    muon_rate: float = 0.01
    adam_rate: float = 0.003
    warm_up: int = 60
    decay_share: float = 0.45  # of the steps, at the end, over which the rates fall to zero
    weight_decay: float = 0.05
    seed: int = 0

    def config(self) -> Config:
        """The model's shape: a plain Llama."""
        return Config(
            family="llama",
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            inner=self.inner,
            vocabulary=self.vocabulary,
            context=self.context,
            rope=Rope(10000.0),
            norm_eps=1e-5,
            tied=True,
            end_ids=(0,),
        )

    def schedule(self) -> Schedule:
        """Of its steps."""
        return Schedule(self.steps, self.muon_rate, self.adam_rate, self.warm_up, self.decay_share, self.weight_decay)


def train(folder: Path, work: Path, recipe: Recipe, checkpoint_every: int = 100) -> dict:
    """Train, or go on training, and write a Hugging Face folder: config, tokenizer, bfloat16 weights, report.json.

    work: where corpus, checkpoints and the log stay between runs. Returns the report.
    """
    folder.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    same_recipe(work, recipe)
    console = Console(stderr=True)
    console.print("reading the standard library" + ("" if (work / "ids.npy").is_file() else " and training a tokenizer on it"))
    tokenizer, ids, held_out = prepare(work, recipe)
    model = Transformer(recipe.config())
    weights.initialise(model, torch.float32, "cpu", recipe.seed)
    inside = [parameter for layer in model.layers for parameter in layer.parameters()]

    def loss_at(step: int) -> torch.Tensor:
        return loss_of(model, batch_of(ids, recipe, step))

    seconds = fit(model, inside, loss_at, recipe.schedule(), work, checkpoint_every)
    console.print(f"measuring it on {len(held_out)} files that it has not seen")
    report = make_report(model, tokenizer, held_out, recipe, seconds)
    export(model, tokenizer, folder, report)
    return report


def prepare(work: Path, recipe: Recipe) -> tuple[Tokenizer, np.ndarray, dict[str, str]]:
    """The tokenizer, the training ids (uint16, every document followed by END_OF_TEXT) and the held-out documents."""
    texts = documents()
    held_out = {name: text for name, text in texts.items() if is_held_out(name)}
    training = [text for name, text in texts.items() if not is_held_out(name)]
    if not (work / "ids.npy").is_file():
        tokenizer = train_tokenizer(training, recipe.vocabulary)
        [end] = tokenizer.encode(END_OF_TEXT).ids
        rows = [[*encoding.ids, end] for encoding in tokenizer.encode_batch(training)]
        tokenizer.save(str(work / "tokenizer.json"))
        np.save(work / "ids.npy", np.array([i for row in rows for i in row], dtype=np.uint16))
    return Tokenizer.from_file(str(work / "tokenizer.json")), np.load(work / "ids.npy"), held_out


def batch_of(ids: np.ndarray, recipe: Recipe, step: int) -> torch.Tensor:
    """int64 [rows, window + 1], windows drawn by (seed, step) alone: a resumed run sees the same ones."""
    is_long = step >= recipe.steps * (1 - recipe.long_share)
    window = recipe.context if is_long else recipe.window
    rows = max(1, recipe.tokens_per_step // window)
    starts = np.random.default_rng((recipe.seed, step)).integers(0, len(ids) - window - 1, rows)
    return torch.from_numpy(np.stack([ids[start : start + window + 1] for start in starts]).astype(np.int64))


def loss_of(model: Transformer, batch: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of each window's next tokens. batch: [rows, window + 1]."""
    rows, window = batch.shape[0], batch.shape[1] - 1
    spans = tuple(Span(row, 0, window) for row in range(rows))
    output = model(Pass(batch[:, :-1].reshape(-1), spans, tuple(range(rows * window))))
    return F.cross_entropy(output.logits, batch[:, 1:].reshape(-1))


def bits_per_byte(model: Transformer, tokenizer: Tokenizer, texts: Iterator[str] | list[str], window: int) -> float:
    """Cross-entropy in bits over the UTF-8 bytes of the texts, each read in windows, its first one begins with END_OF_TEXT."""
    bits, size = 0.0, 0
    end = tokenizer.token_to_id(END_OF_TEXT)
    with torch.inference_mode():
        for text in texts:
            ids = [end, *tokenizer.encode(text).ids]
            size += len(text.encode())
            for start in range(0, len(ids) - 1, window):
                part = torch.tensor([ids[start : start + window + 1]])
                bits += float(loss_of(model, part)) * (part.shape[1] - 1) / math.log(2)
    return bits / size


def make_report(model: Transformer, tokenizer: Tokenizer, held_out: dict[str, str], recipe: Recipe, seconds: float) -> dict:
    """What was trained, for how long, how well it does on files it never saw, and how it continues a few prompts."""
    groups = {
        "library": [text for name, text in held_out.items() if not name.startswith(("test/", "pydoc_data/"))],
        "tests": [text for name, text in held_out.items() if name.startswith("test/")],
        "prose": [text for name, text in held_out.items() if name.startswith("pydoc_data/")],
    }
    scores = {name: round(bits_per_byte(model, tokenizer, texts, recipe.window), 3) for name, texts in groups.items() if texts}
    return {
        "recipe": asdict(recipe),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens_seen": recipe.steps * recipe.tokens_per_step,
        "minutes": round(seconds / 60, 1),
        "held_out_files": len(held_out),
        "held_out_bits_per_byte": scores,
        "samples": {prompt: sample(model, tokenizer, prompt) for prompt in SAMPLE_PROMPTS},
    }


# None ends in white space: in the corpus a line break and the indentation after it are one token.
SAMPLE_PROMPTS = (
    "import os\n\nfor name in os.listdir(path):",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):",
    "def read_lines(path):\n    with open(path) as f:",
    "class TestParser(unittest.TestCase):\n    def setUp(self):\n        self.parser = Parser()\n\n    def test_empty(self):",
)


def sample(model: Transformer, tokenizer: Tokenizer, prompt: str, count: int = 64) -> str:
    """A greedy continuation, with a cache and nothing else: training must not lean on the loops that it serves."""
    ids = tokenizer.encode(prompt).ids
    cache, length = model.new_cache(1, len(ids) + count), 0
    with torch.inference_mode():
        for _ in range(count):
            part = torch.tensor(ids[length:])
            output = model(Pass(part, (Span(0, length, len(part)),), (len(part) - 1,)), cache)
            length = len(ids)
            ids.append(int(output.logits.argmax()))
    return tokenizer.decode(ids)[len(prompt) :]


def export(model: Transformer, tokenizer: Tokenizer, folder: Path, report: dict) -> None:
    """A folder that minifer, and transformers, load by name."""
    config = to_dict(model.config) | {"dtype": "bfloat16", "bos_token_id": None}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    special = {"eos_token": END_OF_TEXT, "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.config.context}
    (folder / "tokenizer_config.json").write_text(json.dumps(special, indent=1) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file(weights.collect(model, torch.bfloat16), folder / "model.safetensors", {"format": "pt"})
    (folder / "report.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
