"""docs/claims.md: every test that a claim names exists, and so does every file whose mutants are counted."""

import ast
import tomllib
from functools import cache
from pathlib import Path

import pytest

from cloister import workflows

ROOT = Path(__file__).parents[1]
CLAIMS = tomllib.loads((ROOT / "scripts" / "claims.toml").read_text(encoding="utf-8"))["claim"]
MUTATED = tomllib.loads((ROOT / "scripts" / "mutants.toml").read_text(encoding="utf-8"))


@cache
def names_in(path):
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda c: f"{c['workflow']}: {c['claim']}")
def test_named_tests_and_files_exist(claim):
    assert claim["hardened"], "a claim needs a test of the hardened step"
    for name in (*claim["published"], *claim["hardened"]):
        path, _, test = name.partition("::")
        assert test in names_in(path), name
    for name in claim["mutants"]:
        assert (ROOT / "src" / "cloister" / f"{name}.py").exists(), name


def test_every_workflow_that_joins_sites_has_a_claim():
    without = {"predict-cellcnn", "serve-model"}  # a budget bounds their answers: nothing that is closed
    assert {c["workflow"] for c in CLAIMS} - {"every sum"} == set(workflows.SHIPPED) - without
