"""Who decodes in `minifer bench`: minifer, and beside it transformers and llama.cpp where they are installed.

Each is a function of prompts and a number of tokens that gives the seconds a token after the first.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import decode
from .batch import Request
from .model.gguf import GGUFFile
from .model.load import default_dtype
from .model.transformer import Transformer
from .ranks.launch import Ranks

Contestant = Callable[[list[list[int]], int], float]  # (prompts, tokens) -> seconds a token after the first


def ours(model: Transformer) -> Contestant:
    def run(prompts: list[list[int]], tokens: int) -> float:
        completions = decode.generate(model, [Request(ids, tokens, stop_ids=()) for ids in prompts])
        tpot = completions[0].tpot
        assert tpot is not None
        return tpot

    return run


def transformers_generate(place: Path, dtype: torch.dtype, assistant: Path | None = None, **options: Any) -> Contestant | None:
    """transformers' own generate, with a cache, on the same weights, where transformers is installed.

    assistant: the folder of a draft model for its assisted generation. options: more of generate's.
    """
    if importlib.util.find_spec("transformers") is None:
        return None
    import transformers

    transformers.logging.set_verbosity_error()
    if place.is_dir():
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=dtype)
    else:
        model = _from_gguf(GGUFFile(place), dtype)
    model.eval()
    if assistant is not None:
        options["assistant_model"] = transformers.AutoModelForCausalLM.from_pretrained(assistant, dtype=dtype).eval()

    def seconds(ids: torch.Tensor, tokens: int) -> float:
        lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        started = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **lengths, **options)
        return time.perf_counter() - started

    def run(prompts: list[list[int]], tokens: int) -> float:
        ids = torch.tensor(prompts)
        return (seconds(ids, tokens) - seconds(ids, 1)) / (tokens - 1)

    return run


def transformers_tensor_parallel(place: Path, folder: Path, world: Ranks, dtype: torch.dtype | None) -> Contestant | None:
    """transformers' own tensor parallelism on the ranks of a world, where it is installed. folder: an empty one, to put weights in.

    With tokens = 0 the seconds of a prompt's pass. Raises RankError if it cannot.
    """
    if importlib.util.find_spec("transformers") is None:
        return None
    dtype = dtype or default_dtype(torch.device("cpu"))
    if place.is_dir():
        folder = place
    else:
        _from_gguf(GGUFFile(place), dtype).save_pretrained(folder)
    world.run(_hold_sharded, str(folder), dtype)

    def run(prompts: list[list[int]], tokens: int) -> float:
        return max(world.run(_sharded_seconds, prompts, tokens))

    return run


_sharded: dict[str, Any] = {}  # in a rank: transformers' model


def _hold_sharded(folder: str, dtype: torch.dtype) -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    _sharded["model"] = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, tp_plan="auto").eval()


def _sharded_seconds(prompts: list[list[int]], tokens: int) -> float:
    ids, model = torch.tensor(prompts), _sharded["model"]
    with torch.inference_mode():
        started = time.perf_counter()
        output = model(ids, use_cache=True)
        if not tokens:
            return time.perf_counter() - started
        started = time.perf_counter()
        for _ in range(tokens - 1):
            ids = output.logits[:, -1:].argmax(-1)
            output = model(ids, past_key_values=output.past_key_values, use_cache=True)
        return (time.perf_counter() - started) / (tokens - 1)


def _from_gguf(file: GGUFFile, dtype: torch.dtype) -> Any:
    """A Llama of transformers with a GGUF file's dequantised weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c = file.config
    config = LlamaConfig(
        vocab_size=c.vocabulary,
        hidden_size=c.width,
        intermediate_size=c.inner,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.context,
        rms_norm_eps=c.norm_eps,
        tie_word_embeddings=c.tied,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
    )
    model = LlamaForCausalLM(config)
    stored = {name: file.read(name, tuple((0, size) for size in shape)) for name, shape in file.shapes.items()}
    if c.tied:
        stored["lm_head.weight"] = stored["model.embed_tokens.weight"]
    model.load_state_dict(stored)
    converted: Any = model
    return converted.to(dtype)


def llama_cpp(place: Path, threads: int) -> Contestant | None:
    """llama.cpp on the same GGUF file (its own, quantised arithmetic), where llama-cpp-python is installed. Batch 1 only."""
    if place.is_dir() or importlib.util.find_spec("llama_cpp") is None:
        return None
    from llama_cpp import Llama

    engine = Llama(str(place), n_ctx=512, n_threads=threads, n_threads_batch=threads, verbose=False)

    def run(prompts: list[list[int]], tokens: int) -> float:
        stamps = []
        engine.reset()
        for _ in engine.generate(prompts[0], temp=0.0):
            stamps.append(time.perf_counter())
            if len(stamps) == tokens:
                break
        return (stamps[-1] - stamps[0]) / (tokens - 1)

    return run
