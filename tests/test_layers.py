"""Imports follow the arrows of the house style, and nothing reaches for what its layer has no business with."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "cloister"
FILES = sorted(p.relative_to(ROOT).with_suffix("").as_posix() for p in ROOT.rglob("*.py"))

BASE = {"errors", "study", "wire", "receipts", "_version"}
MAY_IMPORT = {  # what of cloister; a name stands for the module or the whole package
    "errors": set(),
    "_version": set(),
    "study": {"errors"},
    "receipts": {"errors", "study"},
    "wire": {"errors", "study"},
    "mailbox": BASE,
    "channel": BASE | {"mailbox"},
    "genes": {"errors"},
    "hdf5_probe": set(),
    "cell_files": {"errors", "genes", "hdf5_probe"},
    "cells": {"errors", "genes", "cell_files", "hdf5_probe"},
    "figures": {"errors"},
    "in_short": set(),
    "crypto": {"errors", "crypto"},
    "models": {"errors", "crypto", "models", "genes"},
    "protocols": {"errors", "study", "wire", "receipts", "channel", "crypto", "models", "genes", "protocols"},
    "attacks": {"errors", "study", "wire", "crypto", "models", "genes", "protocols", "attacks"},
    "seat": BASE | {"channel", "mailbox", "crypto", "cells"},
    "workflows": BASE | {"seat", "cells", "genes", "figures", "models", "crypto", "protocols", "workflows"},
}
NEVER = {  # of other packages, anywhere under that name
    "protocols": {"anndata", "scanpy", "pandas", "socket", "ssl", "nvflare", "grpc", "requests", "urllib", "http"},
    "crypto": {"anndata", "scanpy", "pandas", "socket", "ssl", "nvflare", "asyncio", "grpc", "requests", "urllib"},
    "models": {"socket", "ssl", "nvflare", "asyncio", "grpc", "requests", "urllib", "http"},
    "workflows": {"socket", "ssl", "nvflare", "asyncio", "grpc", "requests", "urllib", "http", "subprocess"},
    "cells": {"cryptography", "socket", "ssl", "nvflare", "asyncio"},
    "cell_files": {"cryptography", "socket", "ssl", "nvflare", "asyncio"},
    "channel": {"anndata", "pandas", "socket", "ssl", "nvflare", "subprocess"},
}
ANYWHERE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
TRANSPORT = {"socket": ("processes", "doctor", "runtime"), "nvflare": ("doctor", "runtime"), "grpc": ("runtime",)}
STATISTICAL = {  # protocols that draw with NumPy, and what: never a mask, a key or a share
    "protocols/training_terms": "which sites take part in a round, from the public seed",
    "protocols/counted_forest": "rows and axes of a forest, from a secret of the sites",
}


@functools.cache
def tree(name):
    return ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8"))


@functools.cache
def imports(name):
    """Every module that a file imports, at any depth, as full names."""
    found = set()
    package = ["cloister", *name.split("/")[:-1]]
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            stem = ".".join([*package[: len(package) + 1 - node.level], *filter(None, [node.module])])
            base = stem if node.level else node.module
            found |= {f"{base}.{alias.name}" for alias in node.names} if is_package(base) else {base}
    return frozenset(found)


def is_package(module):
    return module == "cloister" or (module.startswith("cloister.") and (ROOT / module[9:].replace(".", "/")).is_dir())


def ours(name):
    """First part below `cloister` of what a file imports of us."""
    return {m.split(".")[1] for m in imports(name) if m.startswith("cloister.")}


def layer(name):
    return name.split("/")[0]


def test_the_walk_sees_imports_of_every_kind():
    assert "cells" in ours("seat")  # inside a function
    assert "seat" in ours("workflows/__init__")  # for type checkers only
    assert {"wire", "workflows"} <= ours("rehearsal")  # from cloister import ...
    assert "socket" in imports("processes")


@pytest.mark.parametrize("name", [n for n in FILES if layer(n) in MAY_IMPORT])
def test_imports_follow_the_arrows(name):
    allowed = MAY_IMPORT[layer(name)]
    wrong = ours(name) - allowed - {n for n in allowed if n == layer(name)}
    assert not wrong, f"{name} imports {', '.join(sorted(wrong))}; it may import {', '.join(sorted(allowed))}"


@pytest.mark.parametrize("name", [n for n in FILES if layer(n) in NEVER])
def test_no_layer_reaches_for_what_is_none_of_its_business(name):
    found = {m.split(".")[0] for m in imports(name)}
    allowed = {"asyncio"} if layer(name) == "protocols" else set()
    assert not found & (NEVER[layer(name)] - allowed)


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_ever_unpickled_or_evaluated(name):
    assert not {m.split(".")[0] for m in imports(name)} & ANYWHERE
    for node in ast.walk(tree(name)):
        if not isinstance(node, ast.Call):
            continue
        keywords = {k.arg: k.value for k in node.keywords}
        if isinstance(node.func, ast.Name):
            assert node.func.id not in ("eval", "exec", "compile"), f"{name}:{node.lineno}"
        if isinstance(node.func, ast.Attribute) and node.func.attr == "load":
            owner = ast.unparse(node.func.value)
            if owner == "torch":
                assert ast.unparse(keywords.get("weights_only", ast.Constant(0))) == "True", f"{name}:{node.lineno}"
            if owner in ("np", "numpy"):
                assert ast.unparse(keywords.get("allow_pickle", ast.Constant(0))) in ("False", "0")
        assert ast.unparse(keywords.get("allow_pickle", ast.Constant(0))) in ("False", "0"), f"{name}:{node.lineno}"


@pytest.mark.parametrize("name", FILES)
def test_sockets_and_flare_stay_in_the_runtime(name):
    for package, places in TRANSPORT.items():
        if package in {m.split(".")[0] for m in imports(name)}:
            assert layer(name) in places, f"{name} imports {package}"


def uses_of_numpy_random(name):
    """Lines that use `np.random` for more than the type of a generator that was handed in."""
    for node in ast.walk(tree(name)):
        drawn = isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("np.random", "numpy.random")
        if drawn and node.attr not in ("Generator", "RandomState"):
            yield node.lineno, node.attr


@pytest.mark.parametrize("name", [n for n in FILES if layer(n) in ("crypto", "protocols", "channel", "wire", "seat")])
def test_no_protocol_draws_secrets_from_a_statistical_generator(name):
    modules = {m.split(".")[0] for m in imports(name)} | {".".join(m.split(".")[:2]) for m in imports(name)}
    assert not modules & {"random", "numpy.random"}, f"{name} imports a statistical generator"
    drawn = list(uses_of_numpy_random(name))
    if name in STATISTICAL or name == "seat":  # Seat.rng is the one place that makes a role's `rng`
        assert {what for _, what in drawn} <= {"default_rng"}
    else:
        assert not drawn, f"{name} draws with np.random in line {drawn[0][0]}"


def test_the_list_of_exceptions_is_no_longer_than_needed():
    for name in STATISTICAL:
        if (ROOT / f"{name}.py").exists():
            assert list(uses_of_numpy_random(name)), f"{name} draws nothing any more; take it off the list"


@pytest.mark.parametrize("name", [n for n in FILES if layer(n) == "protocols"])
def test_only_protocols_that_say_what_they_reveal_are_run(name):
    """A file with roles over a channel has the sections of the house style."""
    if not any(isinstance(n, ast.FunctionDef) and n.name == "roles" for n in tree(name).body):
        return
    text = ast.get_docstring(tree(name)) or ""
    for title in ("Reveals", "Assumes", "Cost"):
        assert f"{title}\n{'-' * len(title)}" in text, f"{name} has no section {title}"
    assert "ideal" in {n.name for n in tree(name).body if isinstance(n, ast.FunctionDef)}


def test_the_package_itself_is_light():
    """`import cloister` and the base bring none of the heavy engines with them."""
    code = (
        "import sys, cloister, cloister.channel, cloister.rehearsal, cloister.protocols.secure_sum\n"
        "heavy = {'torch', 'anndata', 'pandas', 'scipy', 'sklearn', 'seal', 'nvflare', 'matplotlib', 'numba'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"
