"""The README's status table is the tour's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from minifer import status, stops
from minifer.verdict import Result

ROOT = Path(__file__).parent.parent


def result(name: str, exact: bool = True) -> Result:
    return Result(name, 2, exact, 1.0, 0.5, 1234.4, 99.6, 1.456)


def test_the_readme_has_a_row_for_every_technique_and_they_lead_somewhere():
    text = (ROOT / "README.md").read_text()
    held = text.split(status.BEGIN)[1].split(status.END)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in held.splitlines() if line.startswith("|")]
    assert "| " + " | ".join(rows[0]) + " |" == status.HEAD
    assert [row[0] for row in rows[2:]] == [stop.name for stop in stops.STOPS]
    for row, stop in zip(rows[2:], stops.STOPS):
        assert row[1] == f"[`{stop.module}`](minifer/{stop.module}.py)" and (ROOT / "minifer" / f"{stop.module}.py").is_file()
        lesson = ROOT / "lessons" / f"{stop.lesson}.ipynb"
        assert row[2] == (f"[{stop.lesson[:2]}](lessons/{stop.lesson}.ipynb)" if lesson.is_file() else "to come")
        assert row[3] == str(stop.ranks) and row[4] == "yes"


def test_write(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(f"before\n{status.BEGIN}\nold\n{status.END}\nafter\n")
    status.write([result(stop.name, exact=stop.ranks == 1) for stop in stops.STOPS], path, "tiny, float32")
    text = path.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "| 2 | yes | 1,234 | 100, 1.46 |" in text and "**no**" in text and "tiny, float32" in text
    path.write_text("no marks")
    with pytest.raises(ValueError, match="no place for a status table"):
        status.write([], path, "")


def test_what_a_model_has_no_drafter_for_is_shown_on_tiny(tmp_path, monkeypatch):
    from minifer import cli, tour

    path = tmp_path / "README.md"
    path.write_text(f"{status.BEGIN}\n{status.END}\n")
    there = [stop for stop in stops.STOPS if stop.drafter in ("", "prompt_lookup")]

    def toured(name, *_, only=None, **__):
        held = there if only is None else [stop for stop in stops.STOPS if stop.name == stop.baseline or stop.name in only]
        return [replace(result(stop.name, exact=name != "tiny"), model=name) for stop in held]

    monkeypatch.setattr(tour, "tour", toured)
    monkeypatch.setattr(stops, "stops_for", lambda name: tuple(there))
    assert cli.main(["tour", "--model", "big", "--readme", str(path)]) == 1  # tiny's count as well
    rows = [line.split("|")[1].strip() for line in path.read_text().splitlines() if line.startswith("| ")][1:]
    assert rows == [stop.name for stop in stops.STOPS]
    assert path.read_text().count("(tiny)") == len(stops.STOPS) - len(there) > 0
