"""Slices of a model on ranks: the logits and ids of the whole one, on every rank."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers import FAMILIES, ids_of, plain_model
from torch import nn

import minifer
from minifer import decode, drafters, mtp, tensor_parallel, trace
from minifer.batch import Request
from minifer.model import weights
from minifer.model.checkpoints import SafetensorsFolder
from minifer.model.config import Config, Rope
from minifer.model.families import read_config
from minifer.model.linear import Linear
from minifer.model.passes import Pass, Span
from minifer.model.sampling import Sampling
from minifer.model.transformer import Transformer

PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5]]


def sharded(folder, dtype=torch.float64, tokens=False, finish=False):
    """On a rank: its part of a folder's model."""
    group = dist.group.WORLD
    return plain_model(folder, dtype, finish, partial(tensor_parallel.shard, group=group, sequence_parallel=tokens))


def everything(model):
    """Logits with and without a cache, states of layers, and ids of batches of 3 and of 1."""
    pass_ = Pass(torch.tensor([5, 6, 7, 8, 9, 66, 33]), (Span(0, 0, 5), Span(1, 0, 2)), (1, 4, 6), states=(1, 3))
    cache = model.new_cache(2, 16)
    with torch.inference_mode():
        alone = model(pass_)
        first, second = model(pass_, cache), model(Pass(torch.tensor([10, 11, 12]), (Span(1, 2, 3),), (0, 2)), cache)
        numbers = [alone.logits, first.logits, second.logits, *alone.states.values()]
        assert torch.equal(alone.best, alone.logits.argmax(-1))
    ids = [ids_of(decode.generate(model, some, 12)) for some in (PROMPTS, PROMPTS[:1])]
    return numbers, ids


def run(folder, tokens):
    return everything(sharded(folder, tokens=tokens))


def config_of(**sizes):
    return Config(family="llama", rope=Rope(), **sizes)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_ids_are_those_of_one_device(on_ranks, checkpoint, family, ranks):
    folder = checkpoint(family)
    wanted, wanted_ids = everything(plain_model(folder, torch.float64))
    for tokens in (False, True):
        for numbers, ids in on_ranks(ranks, run, folder, tokens):
            assert ids == wanted_ids
            for mine, one in zip(numbers, wanted, strict=True):
                torch.testing.assert_close(mine, one, rtol=0, atol=1e-9)


def test_over_gloo_it_is_the_same(checkpoint):
    folder = checkpoint("llama")
    wanted, wanted_ids = everything(plain_model(folder, torch.float64))
    with minifer.Ranks(2, backend="gloo") as world:
        for tokens in (False, True):
            for numbers, ids in world.run(run, folder, tokens):
                assert ids == wanted_ids
                torch.testing.assert_close(numbers, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("tokens", [False, True])
def test_five_ranks_fused_and_in_float32(on_ranks, checkpoint, tokens):
    folder = checkpoint("qwen3")  # 6 query heads over 3 key/value heads
    exact = plain_model(folder)
    for ids in on_ranks(
        5, lambda: ids_of(decode.generate(sharded(folder, torch.float32, tokens, finish=True), PROMPTS, 12)), timeout=100
    ):
        assert ids == ids_of(decode.generate(exact, PROMPTS, 12))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("tokens", [False, True])
def test_dsp_05_any_number_of_tokens(on_ranks, checkpoint, ranks, tokens):
    """Fewer tokens than ranks, and numbers that they do not divide."""
    folder = checkpoint("llama")

    def passes(model):
        found = []
        for count in (1, 2, 3, 4, 5, 7):
            cache = model.new_cache(1, 16)
            with torch.inference_mode():
                ids = torch.arange(count) + 3
                found.append(model(Pass(ids, (Span(0, 0, count),), (count - 1,)), cache).logits)
                found.append(model(Pass(torch.tensor([9]), (Span(0, count, 1),), (0,)), cache).logits)
        return torch.cat(found)

    wanted = passes(plain_model(folder, torch.float64))
    for logits in on_ranks(ranks, lambda: passes(sharded(folder, tokens=tokens))):
        torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("vocabulary, ranks", [(67, 2), (67, 4), (5, 4)])
def test_tp_01_11_any_vocabulary_tied_or_not(on_ranks, vocabulary, ranks):
    """Each id is embedded by the rank that has it; a rank may have none. A tied table and its head are one."""
    ids = list(range(vocabulary))

    def logits(shard=None, tied=True):
        config = config_of(
            vocabulary=vocabulary, width=16, layers=1, heads=4, kv_heads=2, head_dim=4, inner=10, context=128, tied=tied
        )
        model = Transformer(config)
        if shard:
            shard(model)
        generator = torch.Generator().manual_seed(1)
        tensors = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in model.tensors.items()}

        class Held:
            shapes = model.tensors

            def read(self, name, box):
                return tensors[name][tuple(slice(*one) for one in box)]

        weights.fill(model, Held(), torch.float64)
        if tied:
            assert model.head.linear.weight is model.chunks[0].entrance.weight
        assert ("lm_head.weight" in model.tensors) != tied
        with torch.inference_mode():
            output = model(Pass(torch.tensor(ids), (Span(0, 0, vocabulary),), tuple(ids)))
            assert torch.equal(output.best, output.logits.argmax(-1))
            return output.logits, model.embed(torch.tensor(ids)), model.head.rows

    for tied in (True, False):
        wanted = logits(tied=tied)
        assert wanted[0].shape == (vocabulary, vocabulary)
        for found in on_ranks(ranks, lambda tied=tied: logits(lambda m: tensor_parallel.shard(m, dist.group.WORLD), tied)):
            for mine, one in zip(found, wanted):
                torch.testing.assert_close(mine, one, rtol=0, atol=1e-9)


def test_tp_03_key_value_heads_are_dealt_or_shared():
    """Of SmolLM2's 9 query heads over 3 key/value heads, and of others."""
    deal = tensor_parallel.deal_heads
    assert [deal(9, 3, 2, rank) for rank in range(2)] == [((0, 3), (0, 1)), ((3, 9), (1, 3))]
    assert [deal(9, 3, 3, rank) for rank in range(3)] == [((0, 3), (0, 1)), ((3, 6), (1, 2)), ((6, 9), (2, 3))]
    assert [deal(4, 2, 4, rank) for rank in range(4)] == [((0, 1), (0, 1)), ((1, 2), (0, 1)), ((2, 3), (1, 2)), ((3, 4), (1, 2))]
    assert [deal(4, 1, 2, rank) for rank in range(2)] == [((0, 2), (0, 1)), ((2, 4), (0, 1))]
    for heads, kv_heads in ((9, 3), (4, 2), (4, 1), (6, 3), (32, 8), (12, 12)):
        for ranks in range(1, heads + 1):
            shares = [deal(heads, kv_heads, ranks, rank) for rank in range(ranks)]
            assert [head for (first, last), _ in shares for head in range(first, last)] == list(range(heads))
            for (first, last), (low, high) in shares:
                assert last > first and (last - first) % (high - low) == 0
                assert {head // (heads // kv_heads) for head in range(first, last)} == set(range(low, high))


def test_tp_03_each_rank_caches_its_own_heads(on_ranks, checkpoint):
    def shapes(family):
        model = sharded(checkpoint_of[family])
        return model.new_cache(1, 4).keys[0].shape[1], model.layers[0].attention.heads

    checkpoint_of = {family: checkpoint(family) for family in ("llama", "mistral-full")}
    assert on_ranks(4, shapes, "llama") == [(1, 1)] * 4
    assert on_ranks(2, shapes, "mistral-full") == [(1, 2)] * 2  # one key/value head, two query heads each


@pytest.mark.parametrize(
    "heads, kv_heads, ranks, message",
    [
        (4, 3, 2, "4 query heads are no multiple of 3 key/value heads"),
        (2, 2, 3, "tensor parallelism over 3 ranks needs a query head for each: the model has 2"),
        (2, 1, 4, "tensor parallelism over 4 ranks needs a query head for each: the model has 2"),
    ],
)
def test_tp_04_what_cannot_be_dealt_is_said_by_all_ranks(on_ranks, heads, kv_heads, ranks, message):
    def attempt():
        sizes = {"vocabulary": 9, "width": 16, "layers": 1, "head_dim": 4, "inner": 10, "context": 128, "tied": True}
        try:
            tensor_parallel.shard(Transformer(config_of(heads=heads, kv_heads=kv_heads, **sizes)), dist.group.WORLD)
        except ValueError as error:
            return str(error)

    assert on_ranks(ranks, attempt) == [message] * ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_tp_05_a_bias_is_added_once(on_ranks, ranks):
    def product():
        linear = Linear("w", 3, 4, bias=True)
        mine = [tensor_parallel.deal(4, ranks, dist.get_rank())]
        row = tensor_parallel.Row(linear, mine, dist.group.WORLD)
        linear.weight = nn.Parameter(torch.ones(linear.weight.shape), requires_grad=False)
        if linear.bias is not None:
            linear.bias = nn.Parameter(torch.tensor([100.0, 200.0, 300.0]), requires_grad=False)
        return row(torch.tensor([[1.0, 2.0, 3.0, 4.0]])[:, slice(*mine[0])]).tolist()

    assert on_ranks(ranks, product) == [[[110.0, 210.0, 310.0]]] * ranks


def test_tp_07_fused_matrices_hold_slices_of_each_part(on_ranks):
    def rows():
        config = config_of(vocabulary=9, width=4, layers=1, heads=4, kv_heads=2, head_dim=4, inner=6, context=16, tied=True)
        model = tensor_parallel.shard(Transformer(config), dist.group.WORLD).fuse()
        attention, block = model.layers[0].attention, model.layers[0].feed_forward
        found = []
        for linear, starts in ((attention.qkv, {"q": 0, "k": 16, "v": 24}), (block.gate_up, {"gate": 0, "up": 6})):
            pieces = weights.pieces_of(linear.weight)
            first = [starts[piece.name.split(".")[-2].removesuffix("_proj")] for piece in pieces]
            found.append([at + row for at, piece in zip(first, pieces) for row in range(*piece.source[0])])
        return found

    assert on_ranks(2, rows) == [
        [[*range(8), *range(16, 20), *range(24, 28)], [0, 1, 2, 6, 7, 8]],
        [[*range(8, 16), *range(20, 24), *range(28, 32)], [3, 4, 5, 9, 10, 11]],
    ]


@pytest.mark.parametrize("ranks", [2, 3])
def test_tp_09_one_draw_for_all_ranks(on_ranks, checkpoint, ranks):
    folder = checkpoint("llama")
    seeded = [Request(ids, 24, Sampling(1.0, seed=5 + at)) for at, ids in enumerate(PROMPTS)]
    wanted = ids_of(decode.generate(plain_model(folder, torch.float64), seeded))

    def drawn():
        torch.manual_seed(dist.get_rank())
        model = sharded(folder)
        free = decode.generate(model, [Request(PROMPTS[0], 64, Sampling(1.0))])  # each rank makes up its own seed
        return ids_of(decode.generate(model, seeded)), ids_of(free)

    results = on_ranks(ranks, drawn)
    assert all(ids == wanted for ids, _ in results)
    assert len({str(free) for _, free in results}) == 1


def test_tp_09_exact_ties_go_to_the_lowest_id_wherever_it_is(on_ranks):
    """Logits that are equal on several ranks: the head's rows are all the same."""

    def best():
        config = config_of(vocabulary=67, width=8, layers=1, heads=4, kv_heads=4, head_dim=2, inner=8, context=16, tied=False)
        model = tensor_parallel.shard(Transformer(config), dist.group.WORLD)
        weights.initialise(model, torch.float32, "cpu", seed=1)
        model.head.linear.weight.fill_(0.5)
        return model(Pass(torch.tensor([3, 4]), (Span(0, 0, 2),), (0, 1))).best.tolist()

    assert on_ranks(4, best) == [[0, 0]] * 4


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_drafters_on_a_sharded_target(on_ranks, ranks, tokens):
    """All that come with tiny: ids of plain decoding on every rank, and as much accepted as on the whole model."""
    texts = ["def read(path):\n    with", "class Stack:", "import os\n\nfor name in"]

    def rounds(shard=None):
        model, tokenizer = minifer.load("tiny", torch.float32, "cpu", shard)
        prompts, found = [tokenizer.encode(text) for text in texts], {}
        for kind in drafters.available("tiny"):
            done = mtp.generate(model, prompts, drafters.load(kind, model, tokenizer), 3, 24)
            found[kind] = ids_of(done), sum(one.accepted for each in done for one in each.rounds)
        return ids_of(decode.generate(model, prompts, 24)), found

    def on_rank():
        return rounds(partial(tensor_parallel.shard, group=dist.group.WORLD, sequence_parallel=tokens))

    plain, whole = rounds()
    for ids, found in on_ranks(ranks, on_rank, timeout=100):
        assert ids == plain
        for kind, (drafted, accepted) in found.items():
            assert drafted == plain, kind
            assert abs(accepted - whole[kind][1]) <= 2, kind  # of some fifty: other sums may flip a draft


@pytest.mark.parametrize("ranks", [2, 3])
def test_calls_and_payload_are_those_of_the_formula(on_ranks, checkpoint, ranks):
    """Two all-reduces of N D elements a layer and one for the embedding; with shares of tokens twice as many calls of that size."""
    folder, count = checkpoint("llama"), 6

    def calls(tokens):
        model = sharded(folder, torch.float32, tokens)
        pass_ = Pass(torch.arange(count) + 1, (Span(0, 0, count),), (count - 1,))
        with torch.inference_mode(), trace.record() as record:
            model(pass_)
        return record.count("all_reduce"), record.count("reduce_scatter_single"), record.count("all_gather_single"), record.bytes

    layers, one = 5, count * 32 * 4
    assert on_ranks(ranks, calls, False) == [(2 * layers + 1, 0, 0, (2 * layers + 1) * one)] * ranks
    assert on_ranks(ranks, calls, True) == [(0, 2 * layers + 1, 2 * layers + 1, 2 * (2 * layers + 1) * one)] * ranks


def test_greedy_ranks_exchange_candidates_and_not_logits(on_ranks, checkpoint):
    folder = checkpoint("llama")

    def bytes_of_head(sampling):
        model = sharded(folder, torch.float32)
        with trace.record() as record:
            decode.generate(model, [Request([1, 2, 3], 1, sampling)])
        return [event.bytes for event in record.events if event.kind == "all_gather_single"]

    assert on_ranks(2, bytes_of_head, Sampling()) == [[2 * 16]] * 2
    assert on_ranks(2, bytes_of_head, Sampling(1.0, seed=1)) == [[68 * 4]] * 2  # 67 logits, shares of 34


def test_each_rank_reads_and_keeps_its_part(on_ranks, checkpoint):
    folder = checkpoint("qwen3")

    def sizes(ranks):
        read = []

        class Counting(SafetensorsFolder):
            def read(self, name, box):
                found = super().read(name, box)
                read.append(found.numel())
                return found

        model = Transformer(read_config(folder))
        if ranks > 1:
            tensor_parallel.shard(model, dist.group.WORLD)
        weights.fill(model, Counting(folder), torch.float32)
        return sum(read), sum(parameter.numel() for parameter in model.parameters())

    whole_read, whole_kept = sizes(1)
    config = read_config(folder)
    norms = config.layers * (2 * config.width + 2 * 16) + config.width
    for ranks in (2, 3):
        shares = on_ranks(ranks, sizes, ranks)
        assert all(kept == read for read, kept in shares)
        filling = sum(kept for _, kept in shares) - (ranks - 1) * norms
        assert filling == whole_kept == whole_read
