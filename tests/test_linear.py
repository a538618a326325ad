"""What `finish` makes faster stays what it was."""

from __future__ import annotations

import pytest
import torch
from helpers import FAMILIES, plain_model
from torch.nn import functional as F

from minifer.model.linear import Linear, fuse, packs
from minifer.model.passes import Pass, Span

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
    plain, finished = plain_model(checkpoint(family)), plain_model(checkpoint(family)).finish()
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
    for model in (plain_model(checkpoint("llama"), torch.bfloat16), plain_model(checkpoint("llama"), torch.bfloat16).finish()):
        assert (model(WHOLE).logits - wanted).abs().mean() / wanted.abs().mean() < 0.05
    assert model.layers[0].feed_forward.down.packed is not None and model.dtype == torch.bfloat16


@needs_packing
def test_a_tied_head_that_is_kept_twice_is_said_so(checkpoint):
    assert plain_model(checkpoint("llama"), torch.bfloat16).finish().bytes_kept_twice == 0
    assert plain_model(checkpoint("llama-biases-tied"), torch.bfloat16).finish().bytes_kept_twice == 67 * 32 * 2


def test_fused_outputs_stand_behind_each_other():
    parts = []
    for at, out in enumerate((2, 3)):
        part = Linear(f"p{at}", out, 4, bias=True)
        part.weight = torch.nn.Parameter(torch.full((out, 4), float(at + 1)), requires_grad=False)
        part.bias = torch.nn.Parameter(torch.full((out,), 10.0 * at), requires_grad=False)
        parts.append(part)
    assert fuse(parts)(torch.ones(1, 4)).tolist() == [[4, 4, 18, 18, 18]]
