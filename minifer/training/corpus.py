"""A corpus that every reader has: the Python standard library of the machine, its code, its tests and its prose.

Nothing is downloaded and no text is shipped. Files are split into training and held-out by a hash of their path, so no
file is on both sides and the split is the same on every machine.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
HELD_OUT_PERCENT = 4
LARGEST_FILE = 200_000  # bytes; beyond that it is a table, not code
TABLES = {"site-packages", "dist-packages", "encodings", "lib2to3", "__pycache__"}


def documents() -> dict[str, str]:
    """{path: text} of the standard library, sorted by path. The topics of `help()` come as texts of their own."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if TABLES & set(name.split("/")) or path.stat().st_size > LARGEST_FILE or name == "pydoc_data/topics.py":
            continue
        try:
            found[name] = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue  # a test of other encodings
    topics = root / "pydoc_data" / "topics.py"
    if topics.is_file():
        for topic, text in _topics(topics.read_text("utf-8")).items():
            found[f"pydoc_data/topics/{topic}"] = text
    return {name: text for name, text in found.items() if text.strip()}


def _topics(source: str) -> dict[str, str]:
    """The one dictionary of strings in pydoc_data/topics.py, read as a literal: nothing is run."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            return ast.literal_eval(node.value)
    return {}


def is_held_out(name: str) -> bool:
    """Decided by the path alone."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 100 < HELD_OUT_PERCENT


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE: every byte has a token, so there is no unknown text. END_OF_TEXT is id 0."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
