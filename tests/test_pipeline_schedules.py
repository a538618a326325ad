"""Schedules as data: counts, order and idle time by formula; and the executor, against one process."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from helpers import plain_model

from minifer import pipeline_parallel
from minifer.model.passes import Pass, Span
from minifer.model.transformer import Transformer
from minifer.pipeline_schedules import Step, all_forward, execute, gpipe, idle_share, one_forward_one_backward, simulate


def passes_of(count, tokens=6):
    return [Pass(torch.arange(tokens) + 3 * at, (Span(0, 0, tokens),), tuple(range(tokens - 1))) for at in range(count)]


def loss_of(output, micro_batch):
    return torch.nn.functional.cross_entropy(output.logits, output.pass_.ids[1:])


def trainable(model: Transformer) -> Transformer:
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return model


# Golden values of facts §2.6: (p, m, v): idle share of the whole.
GOLDEN = {
    (4, 1, 1): 0.75, (4, 2, 1): 0.6, (4, 4, 1): 0.4286, (4, 8, 1): 0.2727, (4, 16, 1): 0.1579, (4, 32, 1): 0.0857,
    (4, 8, 2): 0.1579, (4, 8, 4): 0.0857, (8, 8, 1): 0.4667, (8, 32, 1): 0.1795, (8, 8, 4): 0.1795, (2, 4, 1): 0.2,
}  # fmt: skip


@pytest.mark.parametrize(("p", "m", "v"), GOLDEN)
def test_idle_share_is_that_of_the_formula(p, m, v):
    def seconds(stage, step):
        return (2.0 if step.backward else 1.0) / v

    assert GOLDEN[p, m, v] == pytest.approx((p - 1) / (v * m + p - 1), abs=5e-5)
    forward = simulate(all_forward(p, m, v), seconds)
    if m >= p or v == 1:
        assert idle_share(forward) == pytest.approx(GOLDEN[p, m, v], abs=5e-5)
    if v == 1:
        assert max(line[-1].end for line in forward) == m + p - 1
        assert idle_share(simulate(gpipe(p, m), seconds)) == pytest.approx(GOLDEN[p, m, v], abs=5e-5)
    if v == 1 or m % p == 0:
        both = simulate(one_forward_one_backward(p, m, v), seconds)
        assert idle_share(both) == pytest.approx(GOLDEN[p, m, v], abs=5e-5)


def test_the_slowest_stage_sets_the_pace():
    """Sum of all stages once, and the slowest for every further micro-batch."""
    taken = (1.0, 3.0, 2.0)
    lines = simulate(all_forward(3, 5), lambda stage, step: taken[stage])
    assert max(line[-1].end for line in lines) == sum(taken) + 4 * max(taken)


def test_every_step_once_and_in_an_order_that_can_be():
    for p, m, v in itertools.product((1, 2, 3, 4), (1, 2, 4, 8, 12), (1, 2, 3)):
        schedules = [all_forward(p, m, v)] + ([gpipe(p, m)] if v == 1 else [])
        if v == 1 or m % p == 0:
            schedules.append(one_forward_one_backward(p, m, v))
        for schedule in schedules:
            kinds = {step.backward for step in schedule[0]}
            wanted = sorted(Step(kind, micro, chunk) for kind in kinds for micro in range(m) for chunk in range(v))
            assert all(sorted(steps) == wanted for steps in schedule)
            simulate(schedule, lambda *_: 1.0)  # and no stage waits for ever
    with pytest.raises(ValueError, match="3 are no multiple"):
        one_forward_one_backward(2, 3, 2)
    with pytest.raises(ValueError, match="wait for each other.*'B0', 'F0'"):
        simulate([[Step(True, 0), Step(False, 0)], [Step(False, 0), Step(True, 0)]], lambda *_: 1.0)


def most_kept(steps):
    kept = most = 0
    for step in steps:
        kept += -1 if step.backward else 1
        most = max(most, kept)
    return most


def test_1f1b_keeps_few_activations():
    for p, m in itertools.product((1, 2, 4), (1, 2, 3, 8)):
        assert [most_kept(steps) for steps in one_forward_one_backward(p, m)] == [min(m, p - stage) for stage in range(p)]
        assert [most_kept(steps) for steps in gpipe(p, m)] == [m] * p


@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), (2, 1), (2, 2), (3, 1), (4, 1)])
def test_prompts_through_any_schedule(on_ranks, checkpoint, stages, chunks):
    """All forward, micro-batches of different lengths, with caches: the logits of one process."""
    folder = checkpoint("llama")
    whole = plain_model(folder, torch.float64)
    passes = [passes_of(5, tokens)[at] for at, tokens in enumerate((6, 3, 9, 4, 7))]
    with torch.inference_mode():
        wanted = [whole(pass_).logits for pass_ in passes]

    def rank():
        model = plain_model(folder, torch.float64, shard=lambda e: pipeline_parallel.shard(e, dist.group.WORLD, "even", chunks))
        caches = [model.new_cache(1, 16) for _ in passes]
        done = execute(model, all_forward(stages, 5, chunks), passes, caches)
        with torch.inference_mode():
            return {at: output.logits for at, output in done.outputs.items()}, [cache.lengths for cache in caches], done.most_kept

    *earlier, (logits, lengths, kept) = on_ranks(stages, rank)
    torch.testing.assert_close([logits[at] for at in range(5)], wanted, rtol=0, atol=1e-9)
    assert lengths == [[len(pass_.ids)] for pass_ in passes] and kept == 0
    assert all(found == ({}, lengths, 0) for found in earlier)


@pytest.mark.parametrize("make", [gpipe, one_forward_one_backward])
@pytest.mark.parametrize("family", ["llama", "llama-biases-tied"])
@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), (2, 1), (2, 2), (3, 1), (4, 1)])
def test_gradients_are_those_of_one_process(on_ranks, checkpoint, make, family, stages, chunks):
    if chunks > 1 and make is gpipe:
        pytest.skip("GPipe has one chunk a stage")
    folder, m = checkpoint(family), 4
    whole, passes = trainable(plain_model(folder, torch.float64)), passes_of(m)
    losses = [loss_of(whole(pass_), at) for at, pass_ in enumerate(passes)]
    sum(losses).backward()
    wanted = {name: parameter.grad for name, parameter in by_tensor(whole)}

    def rank():
        model = trainable(
            plain_model(folder, torch.float64, shard=lambda e: pipeline_parallel.shard(e, dist.group.WORLD, "even", chunks))
        )
        options = () if make is gpipe else (chunks,)
        done = execute(model, make(stages, m, *options), passes, loss=loss_of)
        assert not any(pass_.shared for pass_ in passes), "what layers keep for a backward pass is gone after it"
        once = {name: parameter.grad.clone() for name, parameter in by_tensor(model)}
        execute(model, make(stages, m, *options), passes, loss=loss_of)  # gradients add up, as torch's do
        for name, parameter in by_tensor(model):
            torch.testing.assert_close(parameter.grad, 2 * once[name], rtol=0, atol=1e-9)
        return once, done.losses, done.most_kept

    found = on_ranks(stages, rank)
    for mine, _, _ in found:
        torch.testing.assert_close(mine, {name: wanted[name] for name in mine}, rtol=0, atol=1e-9)
    twice = family == "llama-biases-tied" and stages > 1  # the embedding that is the head too
    assert {name for mine, _, _ in found for name in mine} == wanted.keys()
    assert sum(len(mine) for mine, _, _ in found) == len(wanted) + twice
    assert [found[-1][1][at] for at in range(m)] == pytest.approx([float(loss.detach()) for loss in losses])
    if chunks == 1:
        kept = [m] * stages if make is gpipe else [min(m, stages - stage) for stage in range(stages)]
        assert [most for _, _, most in found] == kept


def by_tensor(model):
    """Parameters by the checkpoint tensor that they come from."""
    return [(parameter.pieces[0].name, parameter) for parameter in model.parameters()]


def test_what_does_not_fit_is_an_error(on_ranks, checkpoint):
    folder = checkpoint("llama")

    def rank():
        model = plain_model(folder, shard=lambda e: pipeline_parallel.shard(e, dist.group.WORLD, "even"))
        errors = []
        cases = [(all_forward(2, 3), 2), (all_forward(2, 2, 2), 2), (all_forward(3, 2), 2)]
        for schedule, passes in ((schedule, passes_of(count)) for schedule, count in cases):
            with pytest.raises(ValueError) as caught:
                execute(model, schedule, passes)
            errors.append(str(caught.value))
        return errors

    first, second = on_ranks(2, rank)
    assert (
        first
        == second
        == [
            "a schedule of 3 micro-batches, and 2 passes",
            "a schedule of 2 chunks, and a model with 1",
            "a schedule for 3 stages, and 2 of them",
        ]
    )


def test_a_loss_without_backward_and_frozen_first_layers(on_ranks, checkpoint):
    folder = checkpoint("llama-biases-tied")
    whole, passes = plain_model(folder, torch.float64), passes_of(2)
    with torch.inference_mode():
        wanted = [float(loss_of(whole(pass_), 0)) for pass_ in passes]

    def rank():
        model = plain_model(folder, torch.float64, shard=lambda e: pipeline_parallel.shard(e, dist.group.WORLD, "even"))
        losses = execute(model, all_forward(2, 2), passes, loss=loss_of).losses
        if model.decides:
            for layer in model.layers:
                for parameter in layer.parameters():
                    parameter.requires_grad_(True)
        execute(model, gpipe(2, 2), passes, loss=loss_of)
        return losses, [parameter.grad is not None for parameter in model.layers[0].parameters()]

    (none, earlier), (losses, later) = on_ranks(2, rank)
    assert none == {} and [losses[at] for at in range(2)] == pytest.approx(wanted)
    assert not any(earlier) and all(later)
