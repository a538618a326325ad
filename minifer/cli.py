"""The command `minifer`."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from .cli_work import DTYPES, MODEL_HELP, bench_command, positive, train_command
from .model.load import bundled

DRAFTER_HELP = (
    "speculate: prompt_lookup, draft_model, medusa, eagle, deepseek, gemma, a drafter's folder, or two of these with a plus"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.run is None:
        parser.print_help()
        return 0
    from .ranks import RankError

    try:
        return options.run(options)
    except BrokenPipeError:  # who read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError, RankError) as error:
        print(f"minifer: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="minifer",
        description="A small, readable LLM inference engine that runs every technique by which models are served fast.",
        epilog="Start with: minifer tour",
    )
    from . import __version__

    parser.add_argument("--version", action="version", version=f"minifer {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    parser.set_defaults(run=None)
    _tour(commands.add_parser("tour", help="decode real prompts by every technique and compare them with plain decoding"))
    _generate(commands.add_parser("generate", help="continue a prompt, or answer it with --chat, as it is decoded"))
    _lessons(commands.add_parser("lessons", help="copy the lessons to a folder of yours and open them in JupyterLab"))
    bench_command(commands.add_parser("bench", help="measure plain decoding, speculation, or the start of ranks, on this machine"))
    train_command(commands.add_parser("train", help="train a bundled model, or drafters for a model"))
    return parser


def _tour(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Decode real prompts by every technique there is. Exit code 1 if any of them gives other ids than plain decoding."
    )
    parser.add_argument("--model", default="tiny", help=f"default: tiny; {MODEL_HELP}")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="default: float32, where ids must be equal"
    )
    parser.add_argument("--tokens", type=positive, default=32, metavar="N", help="new tokens a prompt (default: 32)")
    parser.add_argument("--prompts", type=positive, default=2, metavar="N", help="of each of the six workloads, 1-12 (default: 2)")
    parser.add_argument("--repeats", type=positive, default=3, metavar="N", help="runs of each technique, alternated (default: 3)")
    parser.add_argument(
        "--picture",
        type=_path_or_none,
        metavar="FILE",
        default=Path("minifer-tour.png"),
        help="what each rank did (default: minifer-tour.png)",
    )
    parser.add_argument("--threads", type=positive, metavar="N", help="threads of each rank (default: its share of the cores)")
    parser.add_argument("--readme", type=Path, metavar="FILE", help="write the results into the status table of this file")
    parser.set_defaults(run=_run_tour)


def _run_tour(options: argparse.Namespace) -> int:
    from .stops import STOPS, stops_for
    from .tour import tour

    results = tour(
        options.model,
        DTYPES[options.dtype],
        options.tokens,
        options.prompts,
        options.repeats,
        options.picture,
        options.threads,
    )
    if options.readme is not None:
        from .status import write

        # A technique that this model has no drafter for is shown on tiny.
        missing = [stop.name for stop in STOPS if stop not in stops_for(options.model)]
        more = []
        if missing:
            elsewhere = tour("tiny", DTYPES[options.dtype], options.tokens, options.prompts, picture=None, only=missing)
            more = [result for result in elsewhere if result.name in missing]
        write([*results, *more], options.readme, f"{options.model}, {options.dtype}, greedy")
        results += more
    return 0 if all(result.exact for result in results) else 1


def _generate(parser: argparse.ArgumentParser) -> None:
    parser.description = "Continue a prompt and show the text as it comes. Greedy unless a temperature is given."
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument("prompt", help="the text to continue; - reads it from standard input")
    parser.add_argument("--chat", action="store_true", help="take the prompt as a message and apply the model's chat template")
    parser.add_argument("--system", metavar="TEXT", help="with --chat: a system message before it")
    parser.add_argument("-n", "--max-new-tokens", type=int, default=128, metavar="N", help="default: 128")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (default) is greedy")
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens only")
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest tokens that reach P together"
    )
    parser.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="drop tokens less than P times as likely as the likeliest"
    )
    parser.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help="above 1: fewer repetitions")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed draws the same text")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text (may be given again)")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 where this machine multiplies it natively, else float32")
    parser.add_argument("--drafter", metavar="NAME", help=DRAFTER_HELP)
    parser.add_argument("--draft-length", type=positive, metavar="N", help="tokens to draft (default: the drafter's own)")
    parser.add_argument("--quiet", action="store_true", help="no line about speed")
    parser.set_defaults(run=_run_generate)


def _run_generate(options: argparse.Namespace) -> int:
    from . import decode, drafters, mtp
    from .batch import Request
    from .model.load import load
    from .model.sampling import Sampling

    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.min_p, options.repetition_penalty, options.seed)
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    if options.system and not options.chat:
        raise ValueError("--system goes with --chat")
    dtype = DTYPES[options.dtype] if options.dtype else None
    model, tokenizer = load(options.model, dtype)
    if options.chat:
        system = [{"role": "system", "content": options.system}] if options.system else []
        ids = tokenizer.encode_chat([*system, {"role": "user", "content": prompt}])
    else:
        ids = tokenizer.encode(prompt)
    request = Request(ids, options.max_new_tokens, sampling, stop_strings=options.stop)
    if options.drafter is None and options.draft_length:
        raise ValueError("--draft-length goes with --drafter")
    if options.drafter is None:
        stream = decode.stream(model, [request], tokenizer=tokenizer)
    else:
        drafter = drafters.load(options.drafter, model, tokenizer)
        stream = mtp.stream(model, [request], drafter, options.draft_length, tokenizer=tokenizer)
    if not options.chat:
        print(prompt, end="", flush=True)
    started, first, count, passes = time.perf_counter(), 0.0, 0, 0
    for fresh in stream:
        passes += 1
        first, count = first or time.perf_counter() - started, count + len(fresh.ids)
        print(fresh.text, end="", flush=True)
    print()
    if not options.quiet:
        rate = (count - 1) / (time.perf_counter() - started - first) if count > 1 else 0.0
        threads, kind = torch.get_num_threads(), str(model.dtype).removeprefix("torch.")
        where = f"{threads} threads" if model.device.type == "cpu" else str(model.device)
        print(
            f"\n[{len(ids)} prompt tokens, first token after {first:.2f} s, {count} tokens in {passes} passes, "
            f"{rate:.1f} tokens/s, {kind}, {where}]",
            file=sys.stderr,
        )
    return 0


def _lessons(parser: argparse.ArgumentParser) -> None:
    parser.description = "Copy the lessons to a folder of yours, to run and change them, and open JupyterLab there."
    parser.add_argument("folder", type=Path, nargs="?", default=Path("minifer-lessons"), help="default: ./minifer-lessons")
    parser.add_argument("--no-open", action="store_true", help="copy only")
    parser.set_defaults(run=_run_lessons)


def _run_lessons(options: argparse.Namespace) -> int:
    copied, kept = copy_lessons(options.folder)
    print(f"{options.folder}: {copied} files copied" + (f", {kept} left as they were (yours)" if kept else ""))
    if options.no_open:
        return 0
    if importlib.util.find_spec("jupyterlab") is None:
        raise ValueError("JupyterLab is not installed: pip install 'minifer[lessons]', or open the folder with what you have")
    return subprocess.call([sys.executable, "-m", "jupyterlab", str(options.folder)])


def copy_lessons(folder: Path) -> tuple[int, int]:
    """Copy the lessons that came with minifer; what is there already stays. (files copied, files kept)"""
    source, copied, kept = bundled("lessons"), 0, 0
    wanted = [
        path for path in source.rglob("*") if path.suffix in (".ipynb", ".md", ".png") and ".ipynb_checkpoints" not in path.parts
    ]
    for path in sorted(wanted):
        target = folder / path.relative_to(source)
        if target.exists():
            kept += 1
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
        copied += 1
    return copied, kept


def _path_or_none(text: str) -> Path | None:
    return Path(text) if text else None


if __name__ == "__main__":
    sys.exit(main())
