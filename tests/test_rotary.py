"""Rotary angles against the values of the case log and against transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from minifer.model.families import from_dict
from minifer.model.rotary import Rope, angles, inverse_frequencies, rotate

BASE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 10,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    "options",
    [
        {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "llama3"}},
        {"rope_theta": 10000.0, "rope_scaling": {"type": "llama3"}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0}},
    ],
)
def test_hf_04_llama3_scaling_under_all_its_names(options):
    rest = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 64}
    for key in ("rope_scaling", "rope_parameters"):
        if key in options:
            options = options | {key: options[key] | rest}
    rope = from_dict(BASE | options).rope
    wanted = torch.tensor([1, 0.0130422560, 0.00125, 0.000125])
    assert torch.allclose(inverse_frequencies(rope, 8), wanted, rtol=1e-6)
    assert torch.allclose(inverse_frequencies(Rope(10000.0), 8), torch.tensor([1, 0.1, 0.01, 0.001]))


def test_hf_04_unknown_scaling_is_an_error():
    for kind in ("dynamic", "longrope", "made-up"):
        with pytest.raises(ValueError, match=kind):
            from_dict(BASE | {"rope_scaling": {"rope_type": kind, "factor": 2.0}})
    with pytest.raises(ValueError, match="surprise"):
        from_dict(BASE | {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "surprise": 1}})


def test_hf_06_half_split_pairs():
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    turned = rotate(x, *angles(Rope(10000.0), 4, torch.tensor([1]), torch.float32))
    assert torch.allclose(turned, torch.tensor([[[-1.984111, 1.959901, 2.462378, 4.019800]]]), atol=1e-6)


SCALINGS = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16.0, "beta_slow": 2.0},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 1.3},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "attention_factor": 1.5, "truncate": False},
]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("head_dim", [8, 64])
def test_frequencies_equal_transformers(scaling, head_dim):
    raw = BASE | {"head_dim": head_dim, "rope_parameters": scaling | {"rope_theta": 50000.0}}
    rope = from_dict(raw).rope
    config = LlamaConfig(**{key: value for key, value in raw.items() if key != "model_type"})
    if scaling["rope_type"] == "default":
        wanted, factor = 1 / 50000.0 ** (torch.arange(0, head_dim, 2) / head_dim), 1.0
    else:
        wanted, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
    assert torch.allclose(inverse_frequencies(rope, head_dim), wanted, rtol=1e-5)
    assert rope.attention_factor == pytest.approx(factor)


def test_factors_slow_each_pair_by_its_own():
    rope = Rope(10000.0, "factors", factors=(1.0, 1.0, 2.0, 8.0))
    assert torch.allclose(inverse_frequencies(rope, 8), torch.tensor([1, 0.1, 0.005, 0.000125]))
    with pytest.raises(ValueError, match="4 rotary factors for 2 pairs"):
        inverse_frequencies(rope, 4)


def test_products_depend_on_distance_only():
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 16, dtype=torch.float64), torch.randn(1, 1, 16, dtype=torch.float64)

    def product(at_q: int, at_k: int) -> float:
        turned = [rotate(x, *angles(Rope(), 16, torch.tensor([at]), torch.float64)) for x, at in ((q, at_q), (k, at_k))]
        return float((turned[0] * turned[1]).sum())

    assert product(7, 3) == pytest.approx(product(104, 100), abs=1e-6)
    assert abs(product(7, 3) - product(7, 4)) > 1e-3


def test_only_a_share_of_the_pairs_turns():
    """Gemma 4's full layers: the first quarter of the pairs, each as fast as if all turned; the others stay."""
    slow = inverse_frequencies(Rope(1e6, "proportional", share=0.25), 16)
    assert torch.equal(slow[:2], inverse_frequencies(Rope(1e6), 16)[:2]) and slow[2:].tolist() == [0.0] * 6
