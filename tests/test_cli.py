"""The command line."""

from __future__ import annotations

import io

import pytest

import minifer
from minifer import cli


def test_generate_streams_what_generate_returns(capsys):
    model, tokenizer = minifer.load("tiny")
    assert cli.main(["generate", "tiny", "import os\n", "-n", "12"]) == 0
    out, err = capsys.readouterr()
    assert out == "import os\n" + minifer.generate(model, tokenizer, "import os\n", 12) + "\n"
    assert "12 tokens" in err and "tokens/s" in err


def test_generate_with_a_drafter_says_the_same(capsys):
    outs = []
    for more in ([], ["--drafter", "prompt_lookup"], ["--drafter", "draft_model", "--draft-length", "3"]):
        assert cli.main(["generate", "tiny", "class Stack:", "-n", "40", "--dtype", "float32", *more]) == 0
        outs.append(capsys.readouterr())
    assert outs[0].out == outs[1].out == outs[2].out
    assert "40 tokens in 40 passes" in outs[0].err and "40 tokens in 40" not in outs[2].err


def test_generate_from_standard_input_with_a_seed_and_a_stop(capsys, monkeypatch):
    outs = []
    for _ in range(2):
        monkeypatch.setattr("sys.stdin", io.StringIO("def f(x):\n"))
        assert (
            cli.main(["generate", "tiny", "-", "-n", "30", "--temperature", "0.9", "--seed", "3", "--stop", "\n", "--quiet"]) == 0
        )
        outs.append(capsys.readouterr())
    assert outs[0] == outs[1] and outs[0].err == "" and outs[0].out.count("\n") <= 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "tinny", "x"], "no model 'tinny'"),
        (["generate", "tiny", "x", "--temperature", "-1"], "temperature"),
        (["generate", "tiny", "x", "--chat"], "no chat template"),
        (["generate", "tiny", "x", "--system", "y"], "--system goes with --chat"),
        (["generate", "tiny", "x", "-n", "5000"], "exceed the model's context of 2048"),
        (["generate", "tiny", ""], "empty"),
        (["generate", "tiny", "x", "-n", "-3"], "max_new_tokens must be >= 0"),
        (["generate", "tiny", "x", "--stop", ""], "empty stop string"),
        (["generate", "tiny", "x", "--draft-length", "3"], "--draft-length goes with --drafter"),
        (["generate", "tiny", "x", "--drafter", "oracle"], "no drafter 'oracle'"),
        (["generate", "tiny", "x", "--drafter", "medusa", "--draft-length", "4"], "draft_length 4 is more than the 3 heads"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys):
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.startswith("minifer: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["tour"],
        ["generate"],
        ["train"],
        ["train", "drafters"],
        ["bench"],
        ["bench", "speculation"],
        ["bench", "tensor"],
        ["bench", "pipeline"],
        ["bench", "data"],
    ],
)
def test_help(command, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main([*command, "--help"])
    assert left.value.code == 0 and len(capsys.readouterr().out.splitlines()) > 8


def test_bad_numbers(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["tour", "--tokens", "0"])
    assert left.value.code == 2 and "0 is not a positive whole number" in capsys.readouterr().err


def test_without_a_command_there_is_help(capsys):
    assert cli.main([]) == 0 and "minifer tour" in capsys.readouterr().out


def test_lessons_are_copied_and_never_written_over(tmp_path, capsys):
    folder = tmp_path / "mine"
    assert cli.main(["lessons", str(folder), "--no-open"]) == 0
    assert (folder / "01_autoregressive_decode.ipynb").is_file() and (folder / "pictures" / "tour.png").is_file()
    (folder / "00_map.ipynb").write_text("changed by me")
    (folder / "01_autoregressive_decode.ipynb").unlink()
    assert cli.copy_lessons(folder)[0] == 1
    assert (folder / "00_map.ipynb").read_text() == "changed by me"
