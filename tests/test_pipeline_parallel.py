"""Stages of a model on ranks: the ids of the whole one, on every rank, one micro-batch at a time or several in flight."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers import FAMILIES, ids_of, noting, plain_model

import minifer
from minifer import decode, drafters, mtp, pipeline_parallel, tensor_parallel, trace
from minifer.batch import Request
from minifer.model.config import Config, Rope
from minifer.model.families import read_config
from minifer.model.passes import Pass, Span
from minifer.model.sampling import Sampling
from minifer.model.transformer import Transformer
from minifer.pipeline_split import balanced, boundaries, even, seconds

PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5], [8, 9, 7, 9, 3, 2, 3, 8, 4], [6, 2]]
SAMPLED = [Request(ids, 9, Sampling(1.0, seed=at)) for at, ids in enumerate(PROMPTS)]


def staged(folder, dtype=torch.float32, **options):
    """On a rank: its stage of a folder's model."""
    return plain_model(folder, dtype, shard=lambda empty: pipeline_parallel.shard(empty, dist.group.WORLD, **options))


def config_of(layers, **sizes):
    given = {"vocabulary": 11, "width": 8, "layers": layers, "heads": 2, "kv_heads": 1, "head_dim": 4, "inner": 12} | sizes
    return Config(family="llama", rope=Rope(), norm_eps=1e-5, context=64, tied=False, **given)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_hidden_states_are_those_of_one_device(on_ranks, checkpoint, family, stages):
    folder = checkpoint(family)
    whole = plain_model(folder, torch.float64)
    pass_ = Pass(torch.tensor([5, 6, 7, 8, 9, 66, 33]), (Span(0, 0, 5), Span(1, 0, 2)), (1, 4, 6), states=(0, 1, 4))
    with torch.inference_mode():
        wanted = whole(pass_, whole.new_cache(2, 8))
    ids = ids_of(decode.generate(whole, PROMPTS, 9))
    places = boundaries(read_config(folder))  # where layers share keys not every cut is possible
    if stages > len(places) + 1:
        pytest.skip("its layers cannot be cut so often")
    ends = [0, *places[: stages - 1], 5]
    split = [b - a for a, b in itertools.pairwise(ends)]

    def rank():
        model = staged(folder, torch.float64, split=split)
        with torch.inference_mode():
            output = model(pass_, model.new_cache(2, 8))
        found = ids_of(decode.generate(model, PROMPTS, 9)), ids_of(pipeline_parallel.generate(model, PROMPTS, 2, max_new_tokens=9))
        return found, output.hidden, output.states

    *earlier, (found, hidden, states) = on_ranks(stages, rank)
    assert found == (ids, ids)
    assert all(one[0] == (ids, ids) and one[1] is None and one[2] is None for one in earlier)
    torch.testing.assert_close(hidden, wanted.hidden, rtol=0, atol=1e-9)
    torch.testing.assert_close(states, wanted.states, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (4, 1)])
def test_any_number_of_micro_batches(on_ranks, checkpoint, stages, chunks):
    """PP-04, PP-05: more than rows, fewer than stages, one, remainders; greedy and sampled with seeds; every row as if alone."""
    folder = checkpoint("llama")
    whole = plain_model(folder)
    greedy, drawn = ids_of(decode.generate(whole, PROMPTS, 9)), ids_of(decode.generate(whole, SAMPLED))
    assert greedy == [ids_of(decode.generate(whole, [ids], 9))[0] for ids in PROMPTS]

    def rank():
        model = staged(folder, chunks=chunks, split="even")
        for rows, m in itertools.product((5, 3, 1), (1, 2, 3, 4, 5, 8)):
            done = pipeline_parallel.generate(model, PROMPTS[:rows], m, max_new_tokens=9)
            assert ids_of(done) == greedy[:rows], (rows, m)
            assert ids_of(pipeline_parallel.generate(model, SAMPLED[:rows], m)) == drawn[:rows], (rows, m)
        turned = [*reversed(PROMPTS)]
        assert ids_of(pipeline_parallel.generate(model, turned, 4, max_new_tokens=9)) == greedy[::-1]
        assert pipeline_parallel.generate(model, [], 3) == []
        return True

    assert on_ranks(stages, rank) == [True] * stages


def test_pp_08_rows_that_end_at_different_times(on_ranks, checkpoint):
    """All stages return, with the same result, and the same ranks serve again."""
    folder = checkpoint("llama")
    whole = plain_model(folder)
    free = ids_of(decode.generate(whole, PROMPTS[:3], 9))
    requests = [Request(ids, 9, stop_ids=(said[at],)) for ids, said, at in zip(PROMPTS, free, (0, 2, 6))]
    wanted = [(one.ids, one.finish_reason) for one in decode.generate(whole, requests)]
    assert {len(ids) for ids, _ in wanted} > {1}

    def rank():
        model = staged(folder)
        found = []
        for m in (1, 3, 3):
            done = pipeline_parallel.generate(model, requests, m)
            found.append([(one.ids, one.finish_reason) for one in done])
        return found

    assert on_ranks(3, rank, timeout=20) == [[wanted] * 3] * 3


@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (2, 2), (3, 1), (4, 1), (4, 2)])
def test_speculation_inside_a_pipeline(on_ranks, stages, chunks):
    """All drafters of tiny: plain ids, the drafts of one device, and after every round the same lengths in all stages' caches."""
    texts = ["def read(path):\n    with", "class Stack:", "import os\n\nfor name in"]

    def rounds(model, tokenizer, m):
        prompts, found = [tokenizer.encode(text) for text in texts], {}
        for kind in [*drafters.available("tiny"), "prompt_lookup+deepseek"]:
            drafter, seen = drafters.load(kind, model, tokenizer), []
            options = {"drafter": drafter, "draft_length": 3, "max_new_tokens": 20}
            if m:
                begun = partial(_noting, seen)
                done = pipeline_parallel.generate(model, prompts, m, begun, **options)
            else:
                done = mtp.generate(model, prompts, **options)
            accepted = [[(one.drafted, one.accepted) for one in each.rounds] for each in done]
            found[kind] = ids_of(done), accepted, seen
        return found

    model, tokenizer = minifer.load("tiny", torch.float32, "cpu")
    wanted = rounds(model, tokenizer, 0)
    plain = ids_of(decode.generate(model, [tokenizer.encode(text) for text in texts], 20))
    assert all(ids == plain for ids, _, _ in wanted.values())

    def rank(m):
        model, tokenizer = minifer.load("tiny", torch.float32, "cpu", _drafting(chunks))
        return rounds(model, tokenizer, m)

    for m in (0, 1, 3):
        first, *others = on_ranks(stages, rank, m, timeout=100)
        for kind, (ids, accepted, lengths) in first.items():
            assert ids == plain and all(other[kind] == first[kind] for other in others), (kind, m)
            if m != 3:  # other batches sum in another order, which may flip a draft
                assert accepted == wanted[kind][1], (kind, m)
            assert bool(lengths) == bool(m)


def _drafting(chunks):
    return lambda empty: pipeline_parallel.shard(empty, dist.group.WORLD, "even", chunks, drafting=True)


def _noting(seen, model, prompts, **options):
    """mtp.start, with the lengths of its cache noted at each pass."""
    batch, loop, cache = mtp.start(model, prompts, **options)
    lengths: list[list[int]] = []
    seen.append(lengths)
    return batch, noting(loop, lambda _: lengths.append(cache.lengths)), cache


def test_a_drafter_that_embeds_needs_the_embedding_on_the_last_stage(on_ranks):
    def rank():
        model, tokenizer = minifer.load(
            "tiny", torch.float32, "cpu", lambda e: pipeline_parallel.shard(e, dist.group.WORLD, "even")
        )
        drafter = drafters.load("deepseek", model, tokenizer)
        if not model.decides:
            return None
        with pytest.raises(ValueError, match="drafting=True"):
            drafter.module.enter(torch.tensor([1]), torch.zeros(1, 256))
        return model.lookup

    assert on_ranks(2, rank) == [None, None]


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_pp_01_tied_weights_are_on_both_ends(on_ranks, checkpoint, stages):
    folder = checkpoint("llama-biases-tied")

    def rank():
        model = staged(folder)
        ends = [model.chunks[0].entrance, model.chunks[-1].exit]
        return [end.weight if end is ends[0] else end.linear.weight for end in ends if not hasattr(end, "post")], len(
            {id(parameter) for parameter in model.parameters()}
        )

    found = on_ranks(stages, rank)
    embedding, head = found[0][0][0], found[-1][0][-1]
    assert torch.equal(embedding, head)
    if stages == 1:
        assert found[0][1] == len({id(parameter) for parameter in plain_model(folder).parameters()})  # no second copy
    else:
        assert [len(ends) for ends, _ in found] == [1, *[0] * (stages - 2), 1]


def test_pp_02_every_layer_once():
    for layers, parts in ((5, 2), (7, 2), (10, 3), (62, 4), (5, 4), (30, 7)):
        found = even(layers, parts)
        assert sum(found) == layers and len(found) == parts and max(found) - min(found) <= 1
    assert (even(7, 2), even(10, 3), even(62, 4)) == ([4, 3], [4, 3, 3], [16, 16, 15, 15])


def test_balanced_is_the_best_there_is():
    generator = torch.Generator().manual_seed(0)
    for layers, parts in ((5, 2), (6, 3), (8, 4), (7, 1)):
        for _ in range(10):
            taken, last = torch.rand(layers, generator=generator).tolist(), 3 * float(torch.rand(1, generator=generator))
            found = balanced(taken, last, parts)

            def slowest(sizes, taken=taken, last=last):
                ends = [0, *itertools.accumulate(sizes)]
                return max(sum(taken[a:b]) + (b == len(taken)) * last for a, b in itertools.pairwise(ends))

            cuts = itertools.combinations(range(1, layers), parts - 1)
            every = [[b - a for a, b in itertools.pairwise([0, *cut, layers])] for cut in cuts]
            assert min(found) >= 1 and sum(found) == layers
            assert slowest(found) == pytest.approx(min(map(slowest, every)))
    assert balanced([1.0] * 30, 3.0, 2) == [17, 13]  # 17 and 16; or 16 and 17, with less in the first
    with pytest.raises(ValueError, match="begin with layers"):
        balanced([1.0] * 5, 0, 3, allowed=[2])


def test_heads_weigh_layers():
    """A vocabulary a hundred times as large takes longer: measured, so only that is certain."""
    layers, small = seconds(config_of(3))
    assert len(layers) == 3 and layers[0] == layers[1] > 0
    assert seconds(config_of(3, vocabulary=200_000, width=64))[1] > 3 * small


def test_splits_that_cannot_be_are_the_same_error_on_all_ranks(on_ranks, checkpoint):
    def errors(config, **options):
        with pytest.raises(ValueError) as caught:
            pipeline_parallel.shard(Transformer(config), dist.group.WORLD, **options)
        return str(caught.value)

    shared = read_config(checkpoint("gemma4-shared"))
    cases = [
        (config_of(2), {}, "3 layers at least"),  # PP-03
        (config_of(5), {"chunks": 2}, "6 layers at least"),
        (config_of(5), {"split": [2, 2, 2]}, "5 layers over 3 parts"),
        (config_of(5), {"split": [1, 4]}, "5 layers over 3 parts"),
        (config_of(5), {"split": [0, 4, 1]}, "1 or more"),
        (config_of(5), {"split": "fast"}, "'fast'"),
        (shared, {"split": "even"}, "keys and values from before"),
    ]
    for config, options, text in cases:
        found = on_ranks(3, partial(errors, config, **options))
        assert len(set(found)) == 1 and text in found[0]
    with pytest.raises(ValueError, match="no pipeline"):
        pipeline_parallel.run(Transformer(config_of(2)), [], [])
    with pytest.raises(ValueError, match="cache of its own"):
        pipeline_parallel.generate(Transformer(config_of(2)), [], 2, cache=1)
    with pytest.raises(ValueError, match="0 micro-batches"):
        pipeline_parallel.generate(Transformer(config_of(2)), [], 0)


def test_a_readers_own_split_and_the_measured_one(on_ranks, checkpoint):
    folder = checkpoint("llama")
    wanted = ids_of(decode.generate(plain_model(folder), PROMPTS, 5))

    def rank(split):
        model = staged(folder, split=split)
        return [layer.number for layer in model.layers], ids_of(pipeline_parallel.generate(model, PROMPTS, 2, max_new_tokens=5))

    assert on_ranks(2, rank, [1, 4]) == [([0], wanted), ([1, 2, 3, 4], wanted)]
    (first, ids), (second, others) = on_ranks(2, rank, None)
    assert first + second == [0, 1, 2, 3, 4] and ids == others == wanted


@pytest.mark.parametrize("stages", [2, 3])
def test_payload_is_that_of_the_formula(on_ranks, checkpoint, stages):
    """N D elements a boundary and pass, 8 bytes for the token to each earlier stage; nothing else."""
    folder = checkpoint("llama")

    def rank():
        model = staged(folder)
        with trace.record() as record:
            decode.generate(model, [list(range(1, 7))], 4)
        assert {event.kind for event in record.events} == {"isend", "recv"}  # and no word besides
        return sorted(event.bytes for event in record.events if event.kind == "isend")

    prompt, step, decisions = 6 * 32 * 4, 32 * 4, [8] * 4
    *earlier, last = on_ranks(stages, rank)
    assert earlier == [sorted([prompt, *[step] * 3])] * (stages - 1)
    assert last == decisions * (stages - 1)


@pytest.mark.parametrize("chunks", [1, 2])
def test_pp_02_what_is_dealt_out(on_ranks, checkpoint, chunks):
    folder = checkpoint("llama")
    found = on_ranks(
        2, lambda: [[layer.number for layer in chunk.layers] for chunk in staged(folder, chunks=chunks, split="even").chunks]
    )
    parts = [part for number in range(chunks) for part in (found[0][number], found[1][number])]
    assert [layer for part in parts for layer in part] == [0, 1, 2, 3, 4] and all(parts)


def test_slices_and_stages_together(on_ranks, checkpoint):
    """Two stages of two ranks each: the decision goes round within the stage first."""
    folder = checkpoint("llama")
    wanted = ids_of(decode.generate(plain_model(folder), PROMPTS, 9))

    def rank():
        groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
        me = dist.get_rank()

        def shard(empty):
            empty = tensor_parallel.shard(empty, groups[me // 2])
            return pipeline_parallel.shard(empty, groups[2 + me % 2])

        model = plain_model(folder, shard=shard)
        return [ids_of(pipeline_parallel.generate(model, PROMPTS, m, max_new_tokens=9)) for m in (1, 3)]

    assert on_ranks(4, rank, timeout=100) == [[wanted, wanted]] * 4
