"""Text to ids and back, by the `tokenizers` library, and chat templates, by sandboxed jinja2.

The tokenizer comes from tokenizer.json, or is put together from what a GGUF file holds. Special tokens are added in one
place only: `encode` adds what the tokenizer's own post-processor adds; `encode_chat` adds nothing, since a template writes
them itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from .config import read_json
from .text import Detokenizer

Messages = Sequence[dict[str, Any]]  # [{"role": "user", "content": "..."}, ...]

# How pre-tokenizers that GGUF files name cut a text before the merges; patterns as the models' own tokenizer.json has them.
DIGITS_APART = ("smollm", "starcoder", "refact", "command-r")
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {"llama-bpe": LLAMA3, "qwen2": LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")}
CONTROL, USER_DEFINED = 3, 4  # GGUF's token types that matter here


class Tokenizer:
    """end_ids: what the tokenizer itself calls the end of a text. special: {"bos_token": "<s>", ...}, for templates."""

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        end_ids: Sequence[int] = (),
        special: dict[str, str] | None = None,
        template: str | None = None,
    ) -> None:
        self.core, self.end_ids, self.special, self.template = core, tuple(end_ids), special or {}, template

    @property
    def vocabulary(self) -> int:
        """Number of ids that have a text; a model's own vocabulary may be padded beyond it."""
        return self.core.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """ids of a text; with what the tokenizer puts around a text (a BOS, say) unless special_tokens is False."""
        return self.core.encode(text, add_special_tokens=special_tokens).ids

    def decode(self, ids: Sequence[int], special_tokens: bool = False) -> str:
        """Text of ids, special tokens left out unless asked for."""
        return self.core.decode(list(ids), skip_special_tokens=not special_tokens)

    def detokenizer(self, before: Sequence[int] = ()) -> Detokenizer:
        """For a stream of ids that continues `before`."""
        return Detokenizer(self.decode, before)

    def chat_text(self, messages: Messages, answer: bool = True) -> str:
        """The messages as the model was trained to see them; with `answer`, up to where its answer begins."""
        if self.template is None:
            raise ValueError("this model has no chat template: it continues texts, it does not answer messages")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            template = environment.from_string(self.template)
            return template.render(messages=list(messages), add_generation_prompt=answer, **self.special)
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template fails on these messages: {error}") from error

    def encode_chat(self, messages: Messages, answer: bool = True) -> list[int]:
        """ids of `chat_text`. The template writes special tokens itself, so none are added."""
        return self.encode(self.chat_text(messages, answer), special_tokens=False)


def from_folder(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no tokenizer.json, the only tokenizer format that is read")
    try:
        core = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path} is no readable tokenizer: {error}") from None
    core.no_padding()
    core.no_truncation()  # both are training's settings, and would change a prompt silently
    options: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            options |= read_json(folder / name)
    special = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = options.get(key)
        content = value["content"] if isinstance(value, dict) else value
        if isinstance(content, str):
            special[key] = content
    template = options.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {one["name"]: one["template"] for one in template}.get("default")
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text("utf-8")
    end = core.token_to_id(special["eos_token"]) if "eos_token" in special else None
    return Tokenizer(core, () if end is None else (end,), special, template)


def from_gguf(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer inside a GGUF file: a byte-level BPE ("gpt2") or a sentencepiece one ("llama")."""
    options = {key[15:]: value for key, value in metadata.items() if key.startswith("tokenizer.ggml.")}
    kind = options.get("model")
    if kind == "gpt2":
        core = _byte_level(options)
    elif kind == "llama":
        core = _sentencepiece(options)
    else:
        raise ValueError(f"tokenizer.ggml.model={kind!r} is not supported in GGUF files; supported: gpt2, llama")
    tokens, types = options["tokens"], options.get("token_type", [])
    core.add_special_tokens([AddedToken(token, normalized=False) for token, type_ in zip(tokens, types) if type_ == CONTROL])
    core.add_tokens([AddedToken(token, normalized=False) for token, type_ in zip(tokens, types) if type_ == USER_DEFINED])
    ids = {name: options.get(f"{name}_token_id") for name in ("bos", "eos", "unknown", "padding")}
    special = {
        f"{short}_token": tokens[ids[name]]
        for name, short in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad"))
        if ids[name] is not None
    }
    # What files leave out, llama.cpp takes for granted for these.
    if options.get("add_bos_token", kind == "llama" or options.get("pre") == "llama-bpe") and ids["bos"] is not None:
        bos = special["bos_token"]
        core.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, ids["bos"])]
        )
    ends = () if ids["eos"] is None else (ids["eos"],)
    return Tokenizer(core, ends, special, metadata.get("tokenizer.chat_template"))


def _byte_level(options: dict[str, Any]) -> tokenizers.Tokenizer:
    vocabulary = {token: at for at, token in enumerate(options["tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in options["merges"]]
    for left, right in merges:  # the library below would not survive one
        for token in (left, right, left + right):
            if token not in vocabulary:
                raise ValueError(f"the tokenizer's merge {left + ' ' + right!r} needs what it lacks: there is no token {token!r}")
    kind = options.get("pre")
    core = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=kind == "llama-bpe"))
    if kind == "gpt-2":
        before: Any = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif kind in DIGITS_APART:
        digits = pre_tokenizers.Digits(individual_digits=True)
        before = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    elif kind in PATTERNS:
        cut = pre_tokenizers.Split(Regex(PATTERNS[kind]), "isolated")
        before = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    else:
        supported = ", ".join(("gpt-2", *DIGITS_APART, *PATTERNS))
        raise ValueError(f"tokenizer.ggml.pre={kind!r} is not supported; supported: {supported}")
    core.pre_tokenizer = before
    core.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return core


def _sentencepiece(options: dict[str, Any]) -> tokenizers.Tokenizer:
    """A sentencepiece BPE: scores order the merges, spaces are written as U+2581, unknown characters fall back to bytes."""
    tokens, scores = options["tokens"], options["scores"]
    vocabulary = {token: at for at, token in enumerate(tokens)}
    merges = []
    for token, score in zip(tokens, scores):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-score, vocabulary[left], vocabulary[right], left, right))
    merges.sort()
    ordered = [(left, right) for *_, left, right in merges]
    unknown = tokens[options.get("unknown_token_id", 0)]
    core = tokenizers.Tokenizer(models.BPE(vocabulary, ordered, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = [normalizers.Prepend("\u2581")] if options.get("add_space_prefix", True) else []
    core.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "\u2581")])  # type: ignore[assignment]
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    core.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return core


def _refuse(message: str) -> None:
    raise TemplateError(message)
