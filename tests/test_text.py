"""Streams of text: whole characters, and stop strings that span pieces."""

from __future__ import annotations

import pytest

from minifer.model.text import REPLACEMENT, Detokenizer, StopStrings


def bytes_decode(ids) -> str:
    """Ids are bytes."""
    return bytes(ids).decode("utf-8", "replace")


def stream(ids, decode=bytes_decode) -> list[str]:
    detokenizer = Detokenizer(decode)
    return [*(detokenizer.feed(token) for token in ids), detokenizer.flush()]


def test_dec_05_characters_of_several_bytes():
    text = "é👍日"
    pieces = stream(text.encode())
    assert "".join(pieces) == text and not any(REPLACEMENT in piece for piece in pieces)


def test_dec_05_a_budget_that_cuts_a_character():
    pieces = stream("é👍".encode()[:4])
    assert "".join(pieces[:-1]) == "é" and pieces[-1] == REPLACEMENT


def test_dec_05_bytes_that_are_no_character_do_not_hold_the_stream():
    pieces = stream(b"\xffabc")
    assert "".join(pieces) == REPLACEMENT + "abc" and pieces[1] == REPLACEMENT + "a"
    pieces = stream(b"\xff" * 6 + b"ok")
    assert "".join(pieces) == REPLACEMENT * 6 + "ok"
    assert pieces[3] == REPLACEMENT  # no more is held back than could still become a character


@pytest.mark.parametrize("before", [b"", b"\xff", b"\xff\xff", "é😀".encode()[:5], b"plain "])
def test_a_character_behind_bytes_that_are_none(before):
    text = before + "😀a日".encode()
    pieces = stream(text)
    assert "".join(pieces) == text.decode("utf-8", "replace")
    whole = [piece for piece in pieces if "😀" in piece]
    assert len(whole) == 1


def test_a_token_with_the_end_of_one_character_and_the_begin_of_another():
    parts = [b"a\xc3", b"\xa9\xf0\x9f", b"\x91\x8d!"]
    decode = lambda ids: b"".join(parts[token] for token in ids).decode("utf-8", "replace")  # noqa: E731
    assert stream([0, 1, 2], decode) == ["a", "é", "👍!", ""]


WORDS = ["▁the", "▁cat", "s", "▁sat", ""]  # the last one is a special token


def words_decode(ids) -> str:
    """Sentencepiece drops the space before the first word only."""
    return "".join(WORDS[token] for token in ids).replace("▁", " ").removeprefix(" ")


def test_decoders_that_treat_the_first_token_specially():
    assert stream([0, 1, 2, 3], words_decode) == ["the", " cat", "s", " sat", ""]
    assert stream([0, 4, 1], words_decode) == ["the", "", " cat", ""]  # a special token in between
    # A stream that continues a prompt keeps the space between them.
    continuing = Detokenizer(words_decode, before=[0, 1, 2])
    assert [continuing.feed(3), continuing.feed(0)] == [" sat", " the"]


def test_long_streams_stay_whole():
    text = "a é 日 👍 " * 40
    assert "".join(stream(text.encode())) == text
    assert "".join(stream([0, 1, 2, 3] * 50, words_decode)) == words_decode([0, 1, 2, 3] * 50)


PIECES = ["alpha", " be", "ta", " gam", "ma", " delta"]


def stopped(pieces, *stops) -> tuple[list[str], bool]:
    strings = StopStrings(stops)
    given = [strings.feed(piece) for piece in pieces]
    return [*given, strings.flush()], strings.found


def test_dec_14_a_stop_string_over_several_pieces():
    given, found = stopped(PIECES, "beta gamma")
    assert "".join(given) == "alpha " and found
    assert stopped(["".join(PIECES)], "beta gamma") == (["alpha ", ""], True)


def test_dec_14_only_its_beginning_occurs():
    given, found = stopped(PIECES, "beta zeta")
    assert "".join(given) == "".join(PIECES) and not found
    given, found = stopped(PIECES[:2], "beta gamma")
    assert given == ["alpha", " ", "be"] and not found  # held back, then let go at the end


def test_dec_14_no_more_is_held_back_than_must_be():
    strings = StopStrings(["beta gamma"])
    assert strings.feed("x b") == "x " and strings.feed("b") == "b" and strings.feed("e!") == "be!"


def test_the_first_of_several_stops_counts():
    assert "".join(stopped(["one two three"], "three", "two")[0]) == "one "
    assert "".join(stopped(["aab"], "ab")[0]) == "a"  # an overlap with itself


def test_empty_stop_string():
    with pytest.raises(ValueError, match="empty stop string"):
        StopStrings([""])
