"""The house rules that a machine can see: which way imports run, how long modules are, what is named in them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import minifer

ROOT = Path(minifer.__file__).parent
MODULES = {path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path for path in ROOT.rglob("*.py")}
# In parts, so that this file does not name them either.
HOSTS = ["".join(parts) for parts in (("py", "pi.org"), ("python", "hosted"), ("registry.", "npm", "js"), ("deb.", "debian"))]
TECHNIQUES = {
    *(
        "decode",
        "mtp",
        "tensor_parallel",
        "pipeline_parallel",
        "expert_parallel",
        "context_parallel",
        "data_parallel",
        "disaggregation",
    ),
}


def imports_of(name: str) -> set[str]:
    """Modules of minifer that this one imports, wherever in its text."""
    package = name.split(".") if MODULES[name].name == "__init__.py" else name.split(".")[:-1]
    if MODULES[name].name == "__init__.py":
        package = package[:-1]
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            target = [*base, *(node.module.split(".") if node.module else [])]
            for alias in node.names:
                full = ".".join([*target, alias.name])
                found.add(full if full in MODULES else ".".join(target))
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("minifer"):
            found.add(node.module.removeprefix("minifer").strip("."))
    return {name if name in MODULES else f"{name}.__init__".strip(".") for name in found}


GRAPH = {name: imports_of(name) for name in MODULES}


def test_the_graph_is_read_right():
    assert {"batch", "model.cache", "model.transformer"} <= GRAPH["decode"]
    assert "ranks.worker" in GRAPH["ranks.launch"] and "decode" in GRAPH["__init__"]


def test_model_and_ranks_stand_on_the_ground():
    for name, imports in GRAPH.items():
        for ground in ("model", "ranks"):
            if name.startswith(f"{ground}."):
                assert all(other.startswith(f"{ground}.") for other in imports), (name, imports)


def test_no_technique_imports_another():
    for name in TECHNIQUES & GRAPH.keys() - {"decode"}:
        assert not GRAPH[name] & (TECHNIQUES - {name, "decode"}), (name, GRAPH[name])
        assert not any(other.startswith("viz") for other in GRAPH[name])
    assert not GRAPH["decode"] & TECHNIQUES


def test_no_circles():
    left = {name: {other for other in imports if other in GRAPH and other != name} for name, imports in GRAPH.items()}
    # passes names these for their types only.
    left["model.passes"] -= {"model.transformer", "model.cache"}
    # cli reads the version of the package, whose __init__ does not import it.
    left["cli"].discard("__init__")
    while left:
        ready = [name for name, imports in left.items() if not imports & left.keys()]
        assert ready, f"a circle among {sorted(left)}"
        for name in ready:
            del left[name]


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_read_in_a_sitting(name):
    text = MODULES[name].read_text()
    assert len(text.splitlines()) <= 300
    assert not text.strip() or ast.get_docstring(ast.parse(text)), "a module opens with what it is about"
    assert not re.search(r"\b(pickle\.load|torch\.load|(?<!\.)eval\(|(?<!\.)exec\()", text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 60, f"{node.name} is long"


def test_no_machine_and_no_registry_is_named():
    for path in (*ROOT.rglob("*.py"), *(ROOT.parent / "tests").glob("*.py"), ROOT.parent / "README.md"):
        if path.is_file() and path != Path(__file__):
            text = path.read_text()
            assert not re.search(r"/(work|farm|root|home/\w+)/", text), path
            assert not any(host in text for host in HOSTS), path
