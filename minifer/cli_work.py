"""The commands that measure and train: `minifer bench` and `minifer train`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
MODEL_HELP = (
    'a bundled name ("tiny"), "smollm2" (fetched once, 98 MB), a Hugging Face folder, a .gguf file, or a hub name (owner/name)'
)


def bench_command(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure on this machine. Contestants take turns; figures are medians with their spread."
    kinds = parser.add_subparsers(title="what to measure", metavar="KIND", required=True)
    decoding = kinds.add_parser("decode", help="plain decoding, beside transformers, llama.cpp and the bound")
    decoding.add_argument("--batches", type=positive, nargs="+", default=[1, 8, 32], metavar="N", help="default: 1 8 32")
    decoding.add_argument("--threads", type=positive, nargs="+", default=[1, 2], metavar="N", help="default: 1 2")
    _of_a_model(decoding, 128, 5, "runs of each contestant")
    decoding.set_defaults(run=_run_bench_decode)
    speculating = kinds.add_parser("speculation", help="each drafter beside plain decoding: by workload, draft length and batch")
    names = "names, folders, or two with a plus (prompt_lookup+eagle); default: all that are bundled for the model"
    speculating.add_argument("--drafters", nargs="+", metavar="NAME", help=names)
    speculating.add_argument("--lengths", type=positive, nargs="+", default=range(1, 9), metavar="N", help="default: 1 to 8")
    speculating.add_argument(
        "--batches", type=positive, nargs="+", default=[1, 2, 4, 8, 16, 32], metavar="N", help="default: 1 to 32"
    )
    speculating.add_argument("--prompts", type=positive, default=2, metavar="N", help="of each workload, 1-12 (default: 2)")
    _of_a_model(speculating, 96, 3, "turns of each")
    speculating.set_defaults(run=_run_bench_speculation)
    slicing = kinds.add_parser("tensor", help="ranks with slices of a model, beside one rank, one process, gloo and transformers")
    slicing.add_argument("--ranks", type=positive, default=2, metavar="N", help="default: 2, of one thread each")
    slicing.add_argument("--batches", type=positive, nargs="+", default=[1, 8, 32], metavar="N", help="default: 1 8 32")
    slicing.add_argument("--prompt", type=positive, default=512, metavar="N", help="tokens of the long prompt (default: 512)")
    _of_a_model(slicing, 64, 5, "turns")
    slicing.set_defaults(run=_run_bench_tensor)
    collectives = kinds.add_parser("collectives", help="each collective over shared memory and over gloo")
    collectives.add_argument("--ranks", type=positive, nargs="+", default=[2, 4], metavar="N", help="default: 2 4")
    collectives.set_defaults(run=_run_bench_collectives)
    staging = kinds.add_parser(
        "pipeline", help="groups of rows in flight over stages, beside one rank; idle time by formula and measured"
    )
    staging.add_argument("--stages", type=positive, default=2, metavar="N", help="default: 2, of one thread each")
    staging.add_argument("--rows", type=positive, nargs="+", default=[8, 32, 128], metavar="N", help="default: 8 32 128")
    staging.add_argument("--groups", type=positive, nargs="+", default=[1, 2, 4, 8], metavar="N", help="default: 1 2 4 8")
    staging.add_argument("--prompt", type=positive, default=256, metavar="N", help="tokens of each prompt (default: 256)")
    _of_a_model(staging, 32, 3, "turns of each")
    staging.set_defaults(run=_run_bench_pipeline)
    replicating = kinds.add_parser("data", help="replicas, and weights at rest, beside one rank")
    replicating.add_argument("--ranks", type=positive, default=2, metavar="N", help="default: 2, of one thread each")
    replicating.add_argument(
        "--batches", type=positive, nargs="+", default=[1, 8, 32], metavar="N", help="rows a rank (default: 1 8 32)"
    )
    _of_a_model(replicating, 32, 5, "turns of each")
    replicating.set_defaults(run=_run_bench_data)
    launching = kinds.add_parser("launch", help="starting and ending worlds of ranks, first and warm")
    launching.add_argument("--ranks", type=positive, nargs="+", default=[2, 4], metavar="N", help="default: 2 4")
    launching.set_defaults(run=_run_bench_launch)


def _of_a_model(parser: argparse.ArgumentParser, tokens: int, repeats: int, of: str) -> None:
    """What every bench of a model may be told. tokens, repeats: its defaults; of: what is repeated."""
    parser.add_argument("--model", default="smollm2", help=f"default: smollm2; {MODEL_HELP}")
    parser.add_argument("--tokens", type=positive, default=tokens, metavar="N", help=f"new tokens a prompt (default: {tokens})")
    parser.add_argument("--repeats", type=positive, default=repeats, metavar="N", help=f"{of} (default: {repeats})")
    parser.add_argument("--dtype", choices=DTYPES, help="default: as load chooses")


def _run_bench_decode(options: argparse.Namespace) -> int:
    from .bench import bench_decode

    dtype = DTYPES.get(options.dtype)
    bench_decode(options.model, options.batches, options.threads, options.tokens, options.repeats, dtype)
    return 0


def _run_bench_speculation(options: argparse.Namespace) -> int:
    from .bench_speculation import bench_speculation

    dtype = DTYPES.get(options.dtype)
    sizes = {"tokens": options.tokens, "repeats": options.repeats, "each": options.prompts}
    bench_speculation(options.model, options.drafters, options.lengths, options.batches, dtype=dtype, **sizes)
    return 0


def _run_bench_tensor(options: argparse.Namespace) -> int:
    from .bench_tensor import bench_tensor

    dtype = DTYPES.get(options.dtype)
    bench_tensor(options.model, options.ranks, options.batches, options.tokens, options.prompt, options.repeats, dtype)
    return 0


def _run_bench_collectives(options: argparse.Namespace) -> int:
    from .bench_tensor import bench_collectives

    bench_collectives(options.ranks)
    return 0


def _run_bench_pipeline(options: argparse.Namespace) -> int:
    from .bench_pipeline import bench_pipeline

    dtype = DTYPES.get(options.dtype)
    sizes = {"tokens": options.tokens, "prompt": options.prompt, "repeats": options.repeats}
    bench_pipeline(options.model, options.stages, options.rows, options.groups, dtype=dtype, **sizes)
    return 0


def _run_bench_data(options: argparse.Namespace) -> int:
    from .bench_pipeline import bench_data

    dtype = DTYPES.get(options.dtype)
    bench_data(options.model, options.ranks, options.batches, options.tokens, options.repeats, dtype)
    return 0


def _run_bench_launch(options: argparse.Namespace) -> int:
    from .bench import bench_launch

    bench_launch(options.ranks)
    return 0


def train_command(parser: argparse.ArgumentParser) -> None:
    parser.description = "Train what comes with minifer. Runs show their progress, and go on where they were stopped."
    kinds = parser.add_subparsers(title="what to train", metavar="KIND", required=True)
    tiny = kinds.add_parser("tiny", help="the bundled model, on this machine's Python standard library: about an hour on two cores")
    small = kinds.add_parser("drafters", help="a drafter for a model, on what that model itself says: some minutes for tiny")
    small.add_argument("--model", default="tiny", help=f"the target (default: tiny); {MODEL_HELP}")
    small.add_argument(
        "--kind",
        choices=("draft_model", "medusa", "eagle", "deepseek", "gemma"),
        required=True,
        help="what to train: see minifer.drafters",
    )
    small.add_argument("--texts", type=positive, metavar="N", help="composed prompts that the target answers (default: 9000)")
    small.add_argument("--invented", type=positive, metavar="N", help="prompts that a chat model invents besides (default: 12000)")
    for one in (tiny, small):
        one.add_argument("--out", type=Path, metavar="FOLDER", help="where the result goes (default: below ./trained)")
        one.add_argument("--work", type=Path, metavar="FOLDER", help="where data and checkpoints stay (default: beside it)")
        one.add_argument("--steps", type=positive, metavar="N", help="another number of steps than the recipe's, to try it out")
    tiny.set_defaults(run=_run_train)
    small.set_defaults(run=_run_train_drafters)


def _run_train(options: argparse.Namespace) -> int:
    from .training.pretrain import Recipe, train

    out = options.out or Path("trained") / "tiny"
    work = options.work or out.with_name(out.name + "-work")
    report = train(out, work, Recipe(steps=options.steps) if options.steps else Recipe())
    scores = ", ".join(f"{name} {score}" for name, score in report["held_out_bits_per_byte"].items())
    print(f"{out}: {report['parameters']:,} parameters, {report['minutes']} minutes; bits per byte on files never seen: {scores}")
    return 0


def _run_train_drafters(options: argparse.Namespace) -> int:
    from .training.distill import recipe_for, train

    name = Path(options.model).name
    out = options.out or Path("trained") / f"{name}-{options.kind}"
    work = options.work or Path("trained") / f"{name}-drafters-work"
    asked = {key: getattr(options, key) for key in ("steps", "texts", "invented") if getattr(options, key)}
    report = train(recipe_for(options.model, options.kind, **asked), out, work)
    print(f"{out}: {report['parameters']:,} parameters, {report['minutes']} minutes; tokens a pass on prompts never seen:")
    for kind, found in report["workloads"].items():
        print(f"  {kind:14} {found['tokens_per_pass']:.2f}   kept by depth: {', '.join(map(str, found['acceptance_by_depth']))}")
    return 0


def positive(text: str) -> int:
    """A number of something, of one at least."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)
