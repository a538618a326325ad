"""The lessons and the site: what a reader's kernel does, what is checked, and that every link leads somewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).parent.parent
LESSONS = sorted((ROOT / "lessons").glob("*.ipynb"))


def run(*cells: str) -> list:
    """Run cells in a kernel of their own; the cells with their outputs. An error in one does not stop the others."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=60, kernel_name="python3", allow_errors=True).execute()
    return notebook.cells


def text(cell) -> str:
    return "".join(out.get("text", "") + out.get("data", {}).get("text/plain", "") for out in cell.outputs)


def error(cell) -> str:
    return "\n".join(line for out in cell.outputs if out.output_type == "error" for line in out.traceback)


SETUP = "import minifer, torch, torch.distributed as dist"


def test_nb_01_functions_closures_and_classes_of_a_cell():
    cells = run(
        SETUP,
        "def f(): return dist.get_rank() * 10\nminifer.launch(f, ranks=2)",
        "k = 3\nminifer.launch(lambda: dist.get_rank() + k, ranks=2)",
        "class Box:\n    def __init__(self, x): self.x = x\n[box.x for box in minifer.launch(lambda: Box(dist.get_rank()), ranks=2)]",
    )
    assert [text(cell) for cell in cells[1:]] == ["[0, 10]", "[3, 4]", "[0, 1]"]


def test_nb_02_a_failing_rank_ends_the_cell_and_the_next_one_runs():
    cells = run(
        SETUP,
        "def f():\n    if dist.get_rank() == 1:\n        raise ValueError('boom')   # here\n    dist.barrier()\nminifer.launch(f, ranks=2)",
        "minifer.launch(dist.get_rank, ranks=2)",
    )
    shown = re.sub(r"\x1b\[[\d;]*m", "", error(cells[1]))
    assert "rank 1 raised" in shown and "raise ValueError('boom')   # here" in shown
    assert text(cells[2]) == "[0, 1]"


def test_nb_03_the_same_cell_again_and_with_another_size():
    again = "minifer.launch(dist.get_rank, ranks={})"
    cells = run(
        SETUP, *(again.format(ranks) for ranks in (2, 2, 2, 4, 1)), "import multiprocessing; len(multiprocessing.active_children())"
    )
    assert [text(cell) for cell in cells[1:]] == ["[0, 1]"] * 3 + ["[0, 1, 2, 3]", "[0]", "0"]


def test_nb_04_prints_of_ranks_stand_in_order():
    talk = "def f():\n    for line in range(3): print('line', line)\n_ = minifer.launch(f, ranks=4)"
    wanted = "".join(f"[rank {rank}] line {line}\n" for rank in range(4) for line in range(3))
    assert [text(cell) for cell in run(SETUP, *[talk] * 10)[1:]] == [wanted] * 10


def test_a_slider_in_a_kernel_stands_over_its_last_picture():
    [cell] = run("from minifer import viz\nviz.play(lambda step: viz.picture(2, 1), 3)")
    assert "image/png" in cell.outputs[0].data
    assert "IntSlider(value=2" in text(cell)


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_stored_outputs_are_small_whole_and_clean(path):
    notebook = nbformat.read(path, 4)
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        assert cell.execution_count is not None, "a lesson is stored with its outputs"
        for out in cell.outputs:
            assert out.output_type != "error" and out.get("name") != "stderr", cell.source
            for data in out.get("data", {}).values():
                assert len(data) < 140_000, "a picture is under 100 KB (4/3 of that in base64)"
    source = path.read_text()
    assert not re.search(r"/(work|farm|root|home/\w+)/", source)


def nbval(path: Path) -> subprocess.CompletedProcess:
    """The command that CI runs over the lessons."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval-lax", "--nbval-current-env", str(path)]
    return subprocess.run(command, capture_output=True, text=True, cwd=path.parent)


def test_nb_05_a_changed_number_in_a_checked_output_is_seen(tmp_path):
    notebook = nbformat.read(ROOT / "lessons" / "01_autoregressive_decode.ipynb", 4)
    checked = [at for at, cell in enumerate(notebook.cells) if "nbval-check-output" in cell.metadata.get("tags", [])]
    assert len(checked) >= 4
    # The first checked cell and what it needs, so that the test is quick.
    notebook.cells = [cell for cell in notebook.cells[: checked[0] + 1] if cell.cell_type == "code"]
    right, wrong = tmp_path / "right.ipynb", tmp_path / "wrong.ipynb"
    nbformat.write(notebook, right)
    assert "470" in notebook.cells[-1].outputs[0].text
    notebook.cells[-1].outputs[0].text = notebook.cells[-1].outputs[0].text.replace("470", "471")
    nbformat.write(notebook, wrong)
    assert nbval(right).returncode == 0 and nbval(wrong).returncode == 1


def test_nb_06_an_error_in_a_lesson_fails_the_command(tmp_path):
    broken = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    broken.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(broken, tmp_path / "broken.ipynb")
    assert nbval(tmp_path / "broken.ipynb").returncode == 1
    with pytest.raises(CellExecutionError):
        NotebookClient(broken, kernel_name="python3").execute()


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag, attributes):
        held = dict(attributes)
        self.targets |= {held[name] for name in ("id", "name") if held.get(name)}
        self.links += [held[name] for name in ("href", "src") if held.get(name) and tag != "link"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--config-file",
        str(ROOT / "mkdocs.yml"),
        "--site-dir",
        str(folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_nb_06_no_page_shows_a_traceback(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) >= 5 and not [page for page in pages if "Traceback" in page.read_text()]


def test_nb_07_every_link_leads_somewhere(site):
    parsed = {}
    for page in site.rglob("*.html"):
        parsed[page] = Links()
        parsed[page].feed(page.read_text())
    seen, dead = 0, []
    for page, held in parsed.items():
        for link in held.links if page.name != "404.html" else []:
            if re.match(r"(https?|mailto|data|javascript):", link):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            seen += 1
            if not target.exists() or (anchor and target in parsed and anchor not in parsed[target].targets):
                dead.append((page.parent.name, link))
    assert seen > 100 and dead == []


def test_the_index_of_lessons_is_complete():
    nav = (ROOT / "mkdocs.yml").read_text()
    the_map = json.dumps(nbformat.read(ROOT / "lessons" / "00_map.ipynb", 4))
    for path in LESSONS:
        assert path.name in nav
        assert path.stem == "00_map" or path.name in the_map
