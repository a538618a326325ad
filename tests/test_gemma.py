"""Gemma 3 and 4 as targets, and Gemma 4's drafter beside transformers' assistant."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from helpers import GEMMA4, SIZES, drafts_of, ids_of, naive_greedy, plain_model, randomise, reference, trained_kind

from minifer import drafters, mtp
from minifer.model.config import Config
from minifer.model.families import from_dict
from minifer.model.gemma import from_dict as gemma_config
from minifer.model.layers import Norm, scaled
from minifer.model.passes import Pass, Span
from minifer.model.rotary import Rope

PROMPTS = [[3], [1, 4, 1, 5, 9, 2, 6, 5, 3], [9, 2, 6, 5, 3]]


# Targets. Their logits are compared in test_transformer.py, as those of every family.


def of_norm(weight: list[float], adds_one: bool) -> list[float]:
    sizes = {"layers": 1, "width": 2, "heads": 1, "kv_heads": 1, "head_dim": 2, "inner": 2, "vocabulary": 2, "context": 8}
    norm = Norm("x", Config(family="x", rope=Rope(), norm_eps=0.0, norm_adds_one=adds_one, **sizes))
    norm.weight = torch.nn.Parameter(torch.tensor(weight))
    return norm(torch.tensor([[3.0, 4.0]]))[0].tolist()


def test_hf_08_norms_and_the_scale_of_the_embedding():
    assert of_norm([0.5, 0.0], True) == pytest.approx([1.272792, 1.131371], abs=1e-6)
    assert of_norm([0.5, 0.0], False) == pytest.approx([0.424264, 0.0], abs=1e-6)
    one = torch.ones(1)
    assert float(scaled(one, 3072**0.5)) == pytest.approx(55.4256, abs=1e-4)
    assert float(scaled(one.bfloat16(), 3072**0.5)) == 55.5
    assert scaled(one, 1.0) is one


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "gemma4-shared"])
def test_bfloat16_stays_near_transformers(family, checkpoint):
    """In bfloat16 both round at the same places, nearly: nearer to each other than either is to float32."""
    model, theirs = plain_model(checkpoint(family), torch.bfloat16), reference(family).bfloat16()
    ids = torch.randint(0, 67, (24,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        mine = model(Pass(ids, (Span(0, 0, 24),), tuple(range(24)))).logits
        wanted = theirs(ids[None]).logits[0].float()
    assert (mine - wanted).abs().mean() < 0.05 * wanted.abs().mean()


PUBLISHED = {
    # name: (what its config.json says, parameters in billions, KV elements a token of layers that see everything)
    "Gemma 3 1B": (
        {"model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26}
        | {"num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 262144, "sliding_window": 512},
        1.00,
        4096 // 2,
    ),
    "Gemma 4 E2B": (
        {"model_type": "gemma4_text", "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35}
        | {"num_key_value_heads": 1, "num_kv_shared_layers": 20, "use_double_wide_mlp": True, "global_head_dim": 512}
        | {"layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7},
        4.6,
        6144 // 2,
    ),
    "Gemma 4 31B": (
        {"model_type": "gemma4_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60}
        | {"num_attention_heads": 32, "num_key_value_heads": 16, "num_global_key_value_heads": 4, "attention_k_eq_v": True}
        | {"hidden_size_per_layer_input": 0, "sliding_window": 1024},
        30.7,
        81920 // 2,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    raw, billions, elements = PUBLISHED[name]
    config = from_dict(raw)
    assert config.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    growing = sum(2 * one.kv_heads * one.head_dim for one in config.each if one.window is None and one.keys_of is None)
    assert growing == elements


def test_silence_means_what_the_classes_mean():
    config = from_dict(
        {"model_type": "gemma3", "text_config": {"hidden_size": 2560, "intermediate_size": 10240}, "eos_token_id": [1, 106]}
    )
    assert (config.layers, config.heads, config.vocabulary, config.tied, config.end_ids) == (26, 8, 262_208, True, (1, 106))
    assert [one.window for one in config.each[:7]] == [4096] * 5 + [None, 4096]
    assert config.each[0].rope == Rope(10_000.0) and config.each[5].rope == Rope(1_000_000.0)
    old = {"rope_theta": 2e6, "rope_local_base_freq": 5e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    config = from_dict({"model_type": "gemma3_text", "sliding_window_pattern": 2} | old)
    assert config.each[0].rope == Rope(5e3) and config.each[1].rope == Rope(2e6, "linear", factor=8.0)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"enable_moe_block": True}, "enable_moe_block=True is not supported"),
        ({"hidden_activation": "silu"}, "hidden_activation='silu' is not supported"),
        ({"use_bidirectional_attention": "all"}, "texts are read forward"),
        ({"num_kv_shared_layers": 5}, "5 of 5 layers read the keys of earlier ones"),
        ({"num_kv_shared_layers": 3}, "a full_attention layer reads the keys of an earlier one"),
        ({"layer_types": ["full_attention"] * 4}, "4 entries for 5 layers"),
        ({"altup": 3}, "altup=3"),
    ],
)
def test_what_is_not_supported_is_named(more, message):
    raw = {"model_type": "gemma4_text", **SIZES, **GEMMA4} | more
    with pytest.raises(ValueError, match=message):
        from_dict(raw)


def test_the_text_part_of_a_model_that_sees(tmp_path):
    """A multimodal checkpoint holds the text model under other names, among others; only that part is read."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    text = SIZES | {
        "head_dim": 8,
        "sliding_window": 4,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    config = transformers.Gemma3Config(text_config=text, vision_config=vision | {"patch_size": 14}, mm_tokens_per_image=4)
    whole = transformers.Gemma3ForConditionalGeneration(config).eval()
    randomise(whole, 0.3, adds_one=True)
    whole.save_pretrained(tmp_path)
    model = plain_model(tmp_path)
    ids = torch.tensor([5, 3, 9, 1, 4, 4, 8])
    with torch.inference_mode():
        wanted = whole(ids[None]).logits[0]
        mine = model(Pass(ids, (Span(0, 0, 7),), tuple(range(7)))).logits
    assert (mine - wanted).abs().max() < 1e-4


# The drafter.

VARIANTS = {
    # name: (options of target and drafter, clusters)
    "shared": ({"num_kv_shared_layers": 2}, False),
    "keys as values, clusters": ({"num_global_key_value_heads": 1, "attention_k_eq_v": True}, True),
}


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request, tmp_path_factory):
    """A target, its assistant, both as transformers has them, and both as minifer loads them."""
    options, clusters = VARIANTS[request.param]
    sizes = SIZES | GEMMA4 | options | {"vocab_size": 64, "sliding_window": 6}
    small = {"hidden_size": 16, "num_hidden_layers": 4, "num_kv_shared_layers": 4}
    kinds = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
    torch.manual_seed(0)
    target = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**sizes)).eval()
    about = transformers.Gemma4AssistantConfig(
        text_config=transformers.Gemma4TextConfig(**(sizes | small | kinds)),
        backbone_hidden_size=32,
        use_ordered_embeddings=clusters,
        num_centroids=16,
        centroid_intermediate_top_k=4,
    )
    assistant = transformers.Gemma4AssistantForCausalLM(about).eval()
    for model in (target, assistant):
        randomise(model, 0.3)
    if clusters:
        assistant.masked_embedding.token_ordering.copy_(torch.randperm(64))
    folder = tmp_path_factory.mktemp("gemma4")
    target.save_pretrained(folder / "target")
    assistant.save_pretrained(folder / "assistant")
    mine = plain_model(folder / "target")
    return target, assistant, mine, drafters.load(folder / "assistant", mine)


def spy(drafter, rounds):
    """The same drafter; of each round it keeps the texts, and of each step the positions, logits and hidden states."""

    class Spy(type(drafter)):
        def propose(self, batch, output, settled, deepest):
            rounds.append(([list(batch.row(at).tokens) for at in batch.active], []))
            return super().propose(batch, output, settled, deepest)

        def step(self, batch, rows, tokens, features, length):
            logits, after = super().step(batch, rows, tokens, features, length)
            rounds[-1][1].append((tokens, logits, after))
            return logits, after

    other = Spy.__new__(Spy)
    other.__dict__.update(drafter.__dict__)
    return other


def test_it_drafts_as_transformers_assistant_does(pair):
    """Four rounds and more: logits and hidden states of every step, texts longer than the window."""
    target, assistant, mine, drafter = pair
    rounds, prompt = [], [1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
    mtp.generate(mine, [prompt], spy(drafter, rounds), 3, 16)
    assert len(rounds) >= 4
    for [text], steps in rounds:
        with torch.inference_mode():
            # Keys and values of the decided tokens but for the last, as a fresh pass over the text makes them.
            said = target(torch.tensor([text[:-1]]), output_hidden_states=True, return_shared_kv_states=True)
            token, hidden = torch.tensor([[text[-1]]]), said.hidden_states[-1][:, -1:]
            for _, logits, after in steps:
                wanted = assistant(
                    inputs_embeds=torch.cat([target.get_input_embeddings()(token), hidden], -1),
                    position_ids=torch.tensor([[len(text) - 1]]),
                    shared_kv_states=dict(said.shared_kv_states),
                )
                assert (logits[0] - wanted.logits[0, 0]).abs().max() < 1e-4
                assert (after[0] - wanted.last_hidden_state[0, 0]).abs().max() < 1e-4
                token, hidden = wanted.logits.argmax(-1), wanted.last_hidden_state


@pytest.mark.parametrize("length", [1, 3, 5])
def test_greedy_ids_are_plain_decodings(length, pair):
    _, _, mine, drafter = pair
    said = [naive_greedy(mine, prompt, 20) for prompt in PROMPTS]
    assert ids_of(mtp.generate(mine, PROMPTS, drafter, length, 20)) == said


def test_rows_of_unequal_lengths_draft_as_alone(pair):
    _, _, mine, drafter = pair
    texts = [[3, 9], [1, 4, 1, 5, 9, 2, 6, 5, 3, 1, 1, 2], [9, 2, 6, 5, 3]]
    assert drafts_of(mine, drafter, 4, texts) == [drafts_of(mine, drafter, 4, [text])[0] for text in texts]


@pytest.mark.parametrize(("kind", "moves"), [("gemma", False), ("eagle", True), ("deepseek", True)])
def test_spec_10_one_position_a_round(kind, moves, checkpoint):
    """The drafter's position is that of the last decided token, in all steps of a round; the recurrent ones move on."""
    target = plain_model(checkpoint("llama"))
    truth, accepted = naive_greedy(target, PROMPTS[1], 24), (0, 2, 4)
    drafter, rounds = trained_kind(kind, target), []
    seen: list[list[list[int]]] = []

    class Spy(type(drafter)):
        def propose(self, batch, output, settled, deepest):
            rounds.append((len(batch.row(0).tokens), deepest[0]))
            seen.append([])
            found = super().propose(batch, output, settled, deepest)
            # What is verified is right so far and then wrong: 0, 2 and 4 tokens are kept in turn.
            known, right = batch.row(0).new, accepted[(len(rounds) - 1) % 3]
            for place, token in enumerate(truth[known : known + 4]):
                found[0, 0, place] = token if place < right else (token + 1) % 67
            return found

    drafter.__class__ = Spy
    drafter.module.register_forward_pre_hook(lambda _, given: seen[-1].append(given[0].positions.tolist()))
    [completion] = mtp.generate(target, [PROMPTS[1]], drafter, 4, 20)
    assert completion.ids == truth[:20] and [round.accepted for round in completion.rounds[:3]] == [0, 2, 4]
    for (length, deepest), passes in zip(rounds, seen):
        if moves:  # entry i is token i + 1, so the last decided token's stands at its position less one
            assert [one[-1] for one in passes] == [length - 2 + step for step in range(deepest)]
        else:
            assert passes == [[length - 1]] * deepest


def test_spec_11_which_layers_it_reads(tmp_path):
    """Zeroing the keys and values of each cached layer in turn: only the two that it reads change its draft."""
    kinds = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]}
    sizes = SIZES | GEMMA4 | kinds | {"num_kv_shared_layers": 2}
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_kv_shared_layers": 2}
    about = transformers.Gemma4AssistantConfig(
        text_config=transformers.Gemma4TextConfig(**(sizes | small | {"layer_types": ["sliding_attention", "full_attention"]})),
        backbone_hidden_size=32,
    )
    for name, model in (
        ("target", transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**sizes))),
        ("assistant", transformers.Gemma4AssistantForCausalLM(about)),
    ):
        torch.manual_seed(3)
        randomise(model, 0.3)
        model.save_pretrained(tmp_path / name)
    mine = plain_model(tmp_path / "target")
    module = drafters.load(tmp_path / "assistant", mine).module
    assert module.sources == [1, 2] and [mine.slot(number) for number in range(5)] == [0, 1, 2, 1, 2]
    text, changes = torch.tensor([3, 1, 4, 1, 5, 9]), []
    for zeroed in (None, 0, 1, 2):
        cache = mine.new_cache(1, 16)
        hidden = mine(Pass(text, (Span(0, 0, 6),), (5,)), cache).hidden
        if zeroed is not None:
            cache.keys[zeroed].zero_()
            cache.values[zeroed].zero_()
        changes.append(module(Pass(torch.tensor([2]), (Span(0, 6, 1),), (0,)), hidden, cache)[0])
    assert [bool((one - changes[0]).abs().max() > 1e-4) for one in changes] == [False, False, True, True]


def test_it_leaves_nothing_in_the_cache(checkpoint):
    target = plain_model(checkpoint("llama"))
    drafter = trained_kind("gemma", target)
    cache = target.new_cache(1, 16)
    hidden = target(Pass(torch.tensor([3, 1, 4]), (Span(0, 0, 3),), (2,)), cache).hidden
    before = [x.clone() for x in (*cache.keys, *cache.values)], [list(row) for row in cache.tokens]
    drafter.module(Pass(torch.tensor([2]), (Span(0, 3, 1),), (0,)), hidden, cache)
    assert all(torch.equal(a, b) for a, b in zip(before[0], (*cache.keys, *cache.values))) and cache.tokens == before[1]


def test_a_drafter_of_another_target(tmp_path, checkpoint, pair):
    _, assistant, mine, _ = pair
    assistant.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"width and vocabulary \(32, 64\), this one has \(32, 67\)"):
        drafters.load(tmp_path, plain_model(checkpoint("gemma4")))
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(about | {"backbone_hidden_size": 32, "altup": 2}))
    with pytest.raises(ValueError, match="altup=2"):
        drafters.load(tmp_path, mine)
    text = about["text_config"] | {"per_layer_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(about | {"text_config": text}))
    with pytest.raises(ValueError, match="asks 2 key/value heads of width 8; layer . of the target has . of width 16"):
        drafters.load(tmp_path, mine)
    with pytest.raises(ValueError, match="5 of 5 layers read"):
        gemma_config(SIZES | GEMMA4 | {"model_type": "gemma4_text", "num_kv_shared_layers": 5})
