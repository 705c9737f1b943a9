"""docs/architecture.md: the picture is what the script draws, and every function in it exists."""

import ast
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "cloister"
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "diagrams.py"))
NAMES = [name for _, left, right in SCRIPT["WAY"] for name, _ in (*left, *right)]


def names_in(path):
    """Functions and classes of a file, methods as `Class.method`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in tree.body:
        if isinstance(node, kinds):
            yield node.name
            if isinstance(node, ast.ClassDef):
                yield from (f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, kinds))


@pytest.mark.parametrize("name", NAMES)
def test_every_function_of_the_picture_exists(name):
    words = name.split(".")
    for i in range(len(words) - 1, 0, -1):
        stem = SOURCE.joinpath(*words[:i])
        path = stem.with_suffix(".py") if stem.with_suffix(".py").exists() else stem / "__init__.py"
        if path.exists():
            assert ".".join(words[i:]) in set(names_in(path)), f"{path.relative_to(ROOT)} has no {'.'.join(words[i:])}"
            return
    pytest.fail(f"there is no file of {name}")


def test_no_step_stands_twice():
    assert len(set(NAMES)) == len(NAMES)


def test_the_picture_is_what_the_script_draws():
    assert SCRIPT["PICTURE"].read_text(encoding="utf-8") == SCRIPT["way"](), "run: python scripts/diagrams.py"
