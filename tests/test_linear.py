"""What `finish` makes faster stays what it was."""

from __future__ import annotations

import pytest
import torch
from helpers import FAMILIES, plain_model
from torch.nn import functional as F

from minifer.model import weights
from minifer.model.checkpoints import SafetensorsFolder
from minifer.model.linear import Linear, fuse, packs
from minifer.model.passes import Pass, Span
from minifer.model.transformer import Transformer

IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2])
WHOLE = Pass(IDS, (Span(0, 0, 7),), tuple(range(7)))
needs_packing = pytest.mark.skipif(not packs(torch.zeros(1, 1, dtype=torch.bfloat16)), reason="no native bfloat16 here")


def logits_by_steps(model) -> torch.Tensor:
    cache = model.new_cache(1, 7)
    outputs = []
    for start, count in ((0, 3), (3, 1), (4, 1), (5, 2)):
        part = Pass(IDS[start : start + count], (Span(0, start, count),), tuple(range(count)))
        outputs.append(model(part, cache).logits)
    return torch.cat(outputs)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_finished_model_computes_the_same(family, checkpoint):
    plain, finished = plain_model(checkpoint(family)), plain_model(checkpoint(family), finish=True)
    assert finished.layers[0].attention.qkv.weight.shape[0] == sum(
        getattr(plain.layers[0].attention, part).weight.shape[0] for part in "qkv"
    )
    assert (finished(WHOLE).logits - plain(WHOLE).logits).abs().max() < 1e-4
    assert (logits_by_steps(finished) - plain(WHOLE).logits).abs().max() < 1e-4
    assert finished.bytes_kept_twice == 0


@needs_packing
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 33])
@pytest.mark.parametrize("shape", [(48, 32), (67, 32), (3, 7), (1, 64)])
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_a_packed_matrix_multiplies_as_its_rows_do(rows, shape, bias):
    torch.manual_seed(0)
    linear = Linear("x", *shape, bias)
    linear.weight = torch.nn.Parameter(torch.randn(shape).to(torch.bfloat16), requires_grad=False)
    linear.bias = torch.nn.Parameter(torch.randn(shape[0]).to(torch.bfloat16), requires_grad=False) if bias else None
    x = torch.randn(rows, shape[1]).to(torch.bfloat16)
    exact = F.linear(x.double(), linear.weight.double(), None if linear.bias is None else linear.bias.double())
    by_rows = linear(x)
    assert linear.pack() == 2 * shape[0] * shape[1] and linear.weight is None
    packed = linear(x)
    assert packed.dtype == torch.bfloat16 and packed.shape == (rows, shape[0])
    # Both round once to bfloat16, which has 8 bits.
    for given in (by_rows, packed):
        assert ((given - exact).abs() <= 2**-8 * exact.abs() + 1e-2).all()


@needs_packing
@torch.inference_mode()
def test_a_packed_model_stays_near(checkpoint):
    wanted = plain_model(checkpoint("llama"))(WHOLE).logits
    for model in (plain_model(checkpoint("llama"), torch.bfloat16), plain_model(checkpoint("llama"), torch.bfloat16, finish=True)):
        assert (model(WHOLE).logits - wanted).abs().mean() / wanted.abs().mean() < 0.05
    assert model.layers[0].feed_forward.down.packed is not None and model.dtype == torch.bfloat16


@needs_packing
def test_a_tied_head_that_is_kept_twice_is_said_so(checkpoint):
    assert plain_model(checkpoint("llama"), torch.bfloat16, finish=True).bytes_kept_twice == 0
    assert plain_model(checkpoint("llama-biases-tied"), torch.bfloat16, finish=True).bytes_kept_twice == 67 * 32 * 2


def test_fused_outputs_stand_behind_each_other():
    parts = [Linear(f"p{at}", out, 4, bias=True) for at, out in enumerate((2, 3))]
    fused = fuse(parts)
    assert fused.weight.is_meta and [piece.target[0] for piece in fused.weight.pieces] == [(0, 2), (2, 5)]
    stored = {
        "p0.weight": torch.ones(2, 4),
        "p1.weight": 2 * torch.ones(3, 4),
        "p0.bias": torch.zeros(2),
        "p1.bias": 10 * torch.ones(3),
    }

    class Memory:
        def read(self, name, box):
            return stored[name][tuple(slice(*bounds) for bounds in box)]

    weights.fill(fused, Memory(), torch.float32)
    assert fused(torch.ones(1, 4)).tolist() == [[4, 4, 18, 18, 18]]


def test_what_is_selected_and_then_fused_comes_from_its_own_rows(checkpoint):
    """As a rank of tensor parallelism does it: a part of q, k and v each, then one matrix of the parts."""
    whole = plain_model(checkpoint("llama"))
    model = Transformer(whole.config)
    attention = model.layers[2].attention
    attention.q.weight = weights.select(attention.q.weight, 0, [(16, 32)])
    attention.k.weight, attention.v.weight = (weights.select(part.weight, 0, [(8, 16)]) for part in (attention.k, attention.v))
    attention.fuse()
    weights.fill(attention, SafetensorsFolder(checkpoint("llama")), torch.float32)
    theirs = whole.layers[2].attention
    assert torch.equal(attention.qkv.weight, torch.cat([theirs.q.weight[16:], theirs.k.weight[8:], theirs.v.weight[8:]]))
