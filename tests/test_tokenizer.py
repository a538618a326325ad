"""Tokenizers of folders, and chat templates."""

from __future__ import annotations

import json

import pytest
from tokenizers import processors

from minifer.model.tokenizer import from_folder
from minifer.training.corpus import train_tokenizer

TEMPLATE = "{{ bos_token }}U:{{ messages[0]['content'] }}{% if add_generation_prompt %}A:{% endif %}"


@pytest.fixture
def folder(tmp_path):
    core = train_tokenizer(["hello world hello", "U: A:"], 300)
    core.add_special_tokens(["<s>"])
    bos = core.token_to_id("<s>")
    core.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", bos)])
    core.enable_truncation(4)
    core.enable_padding(length=12)
    core.save(str(tmp_path / "tokenizer.json"))
    options = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    return tmp_path


def test_dec_11_one_bos(folder):
    tokenizer = from_folder(folder)
    bos = tokenizer.core.token_to_id("<s>")
    for ids in (tokenizer.encode("hello"), tokenizer.encode_chat([{"role": "user", "content": "hello"}])):
        assert ids.count(bos) == 1 and ids[0] == bos
    assert bos not in tokenizer.encode("hello", special_tokens=False)


def test_dec_11_no_bos_where_nobody_asks_for_one(folder):
    tokenizer = from_folder(folder)
    tokenizer.core.post_processor = None
    tokenizer.template = TEMPLATE.replace("{{ bos_token }}", "")
    bos = tokenizer.core.token_to_id("<s>")
    assert bos not in tokenizer.encode("hello") + tokenizer.encode_chat([{"role": "user", "content": "hello"}])


def test_trainings_padding_and_truncation_are_off(folder):
    tokenizer = from_folder(folder)
    text = "hello world hello world hello"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_left_out_of_text(folder):
    tokenizer = from_folder(folder)
    ids = [*tokenizer.encode("hello"), *tokenizer.end_ids]
    assert tokenizer.decode(ids) == "hello" and tokenizer.decode(ids, special_tokens=True) == "<s>hello<|endoftext|>"


def test_answer_prompt_and_templates_of_several_places(folder):
    tokenizer, messages = from_folder(folder), [{"role": "user", "content": "hi"}]
    assert tokenizer.chat_text(messages) == "<s>U:hiA:" and tokenizer.chat_text(messages, answer=False) == "<s>U:hi"
    (folder / "chat_template.jinja").write_text("J:{{ messages[0].content }}")
    assert from_folder(folder).chat_text(messages) == "J:hi"
    (folder / "chat_template.jinja").unlink()
    several = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert from_folder(folder).chat_text(messages) == "D"


def test_a_template_runs_in_a_sandbox(folder):
    tokenizer = from_folder(folder)
    for template in (
        "{{ messages.__class__.__mro__ }}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
    ):
        tokenizer.template = template
        with pytest.raises(ValueError, match="chat template fails"):
            tokenizer.chat_text([{"role": "user", "content": "hi"}])


def test_no_template_and_no_tokenizer(folder):
    tokenizer = from_folder(folder)
    tokenizer.template = None
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.chat_text([])
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        from_folder(folder)
