"""Imports follow the arrows of the house style, and nothing reaches for what its layer has no business with."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cloister import workflows

ROOT = Path(__file__).parents[1] / "src" / "cloister"
FILES = sorted(p.relative_to(ROOT).with_suffix("").as_posix() for p in ROOT.rglob("*.py"))

NET = ("wire", "receipts", "mailbox", "transcript", "waiting", "events")  # what a channel is made of
WIRE = {"mpc.net.wire", "mpc.net.receipts", "mpc.net.channel"}  # how a protocol talks
BASE = {"errors", "arrays", "files"}
CORE = {*BASE, "disclosure", "governance", "study"}
BELOW = {*CORE, "mpc", "session", "models", "protocols", "cells", "workflows", "papers", "provider.gpu", "_version"}
ALL = BELOW | {"rehearsal", "report"}
PROTOCOLS = {*BASE, "disclosure", "mpc.parties", "mpc.crypto", *WIRE}
AROUND = {  # modules of a workflow's folder that read cells or draw; all others there are protocols and their steps
    "workflow",
    "options",
    "figures",
    "parts",
    "features",
    "baselines",
    "evaluation",
    "presets",
    "response",
    "inference",
    "training",
}
MAY_IMPORT = {  # what of cloister; a name stands for the module or the whole package
    "__init__": {"_version", "_moved"},
    "_scanpy_names": set(),
    "pp": {"_scanpy_names"},
    "tl": {"_scanpy_names"},
    "pl": {*CORE, "cells", "workflows", "rehearsal", "report.figures"},
    "_moved": set(),
    "errors": set(),
    "arrays": set(),
    "files": {"errors"},
    "_version": set(),
    "disclosure": BASE,
    "governance": {"errors"},
    "study": {"errors", "governance", "mpc.parties"},
    "mpc": {"errors", "mpc"},
    "mpc/net": {*BASE, "disclosure", "mpc.parties", "mpc.crypto", "_version", "mpc.net"},
    "mpc/net/values": BASE,
    "mpc/net/wire": {*BASE, "mpc.parties", "mpc.net.values"},
    "mpc/net/journal": BASE,
    "mpc/net/receipts": {*BASE, "mpc.parties", "mpc.net.journal"},
    "mpc/net/mailbox": {*BASE, "mpc.parties", "mpc.net.wire"},
    "mpc/net/transcript": {"mpc.net.wire"},
    "mpc/net/waiting": {"mpc.parties", "mpc.net.mailbox"},
    "mpc/net/events": {"mpc.parties"},
    "mpc/net/channel": {"_version", *BASE, "disclosure", "mpc.parties", *(f"mpc.net.{n}" for n in NET)},
    "mpc/crypto": {*BASE, "mpc.crypto"},
    "mpc/sums": {*PROTOCOLS, "mpc.sums"},
    "mpc/three_party": {*PROTOCOLS, "mpc.sums.signatures", "mpc.three_party"},
    "mpc/threshold_ckks": {*PROTOCOLS, "mpc.threshold_ckks"},
    "mpc/parties": set(),
    "mpc/session": {*BASE, "mpc.net", "mpc.crypto", "mpc.parties"},
    "mpc/simulation": {"mpc.net", "mpc.crypto", "mpc.parties", "mpc.session"},
    "mpc/testing": {"errors", "mpc"},
    "session": {*CORE, "_version", "mpc", "cells.progress", "cells.tables"},
    "cells": {*BASE, "cells", "mpc.sums.value_counts"},
    "models": {*BASE, "disclosure", "mpc.crypto", "models", "cells.genes"},
    "protocols": {"errors"},
    "a protocol": {  # of a workflow or of a paper
        *(*PROTOCOLS, "study", "models", "mpc", "a protocol", "cells.genes", "cells.names", "provider.gpu.devices"),
    },
    "papers/attacks": {*BASE, "study", "mpc", "models", "a protocol", "papers.attacks"},
    "papers/baselines": {*CORE, "session", "mpc", "models", "cells", "papers", "workflows", "report.figures"},
    "workflows": {*BELOW, "report.figures"},
    "provider": {*BASE, "cells.tables", "models", "mpc.crypto", "provider", "report.figures", "report.parts"},
    "provider/gpu": {*BASE, "mpc.crypto", "provider.gpu"},
    "report/figures": BASE,
    "rehearsal": BELOW | {"rehearsal"},
    "rehearsal/run": BELOW | {"rehearsal.record", "report.page"},  # Run.report, and nothing else of the report
    "rehearsal/progress": BELOW | {"report.parts"},  # how numbers are written for people
    "rehearsal/check_disclosure": ALL,
    "report": BELOW | {"rehearsal.record", "report"},
    "deploy": BELOW | {"rehearsal.run", "rehearsal.results", "rehearsal.progress", "deploy"},  # no rehearsal
    "testing": {"mpc.testing"},
    "demo": ALL | {"demo"},
    "page": ALL | {"deploy", "page"},
    "cli": ALL | {"deploy", "demo", "page", "provider", "cli"},
}
NEVER = {  # of other packages, anywhere under that name
    "mpc": {"anndata", "scanpy", "pandas", "socket", "ssl", "nvflare", "grpc", "requests", "urllib", "http", "typer"},
    "mpc/crypto": {"asyncio"},
    "a protocol": {"anndata", "scanpy", "pandas", "socket", "ssl", "nvflare", "grpc", "requests", "urllib", "http"},
    "models": {"socket", "ssl", "nvflare", "asyncio", "grpc", "requests", "urllib", "http"},
    "workflows": {"socket", "ssl", "nvflare", "asyncio", "grpc", "requests", "urllib", "http", "subprocess"},
    "cells": {"cryptography", "socket", "ssl", "nvflare", "asyncio"},
}
ANYWHERE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
TRANSPORT = {
    "socket": ("rehearsal/processes", "cli/doctor", "deploy"),
    "nvflare": ("cli/doctor", "deploy"),
    "grpc": ("deploy",),
}
STATISTICAL = {  # protocols that draw with NumPy, and what: never a mask, a key or a share
    "workflows/fine_tune/training_terms": "which sites take part in a round, from the public seed",
    "workflows/train_classifier/pooled_logistic": "directions in which covariance is looked at, from the public seed",
    "workflows/integrate/harmony_steps": "first directions of clusters, from the public seed",
    "workflows/train_classifier/pooled_discriminant": "first directions of a site's own genes, never sent",
    "workflows/shared_pca/shared_pca": "where a search for the largest eigenvalue starts",
    "workflows/find_outliers/counted_forest": "rows and axes of a forest, from a secret of the sites",
}


@functools.cache
def tree(name):
    return ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8"))


@functools.cache
def imports(name):
    """Every module that a file imports, at any depth, as full names."""
    nodes = [node for node in ast.walk(tree(name)) if isinstance(node, ast.Import | ast.ImportFrom)]
    return frozenset(module for node in nodes for module in named(name, node))


def named(name, node):
    """The modules that one import in the file `name` names, in full."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    package = ["cloister", *name.split("/")[:-1]]
    stem = ".".join([*package[: len(package) + 1 - node.level], *filter(None, [node.module])])
    base = stem if node.level else node.module
    return {f"{base}.{alias.name}" for alias in node.names} if is_package(base) else {base}


def is_package(module):
    return module == "cloister" or (module.startswith("cloister.") and (ROOT / module[9:].replace(".", "/")).is_dir())


def ours(name):
    """What a file imports of us, below `cloister`."""
    return {m[9:] for m in imports(name) if m.startswith("cloister.")}


def layer(name):
    """A row of MAY_IMPORT: the first folder, or what says more."""
    first, *rest = name.split("/")
    within = f"{first}/{rest[0]}" if rest else first
    if first == "papers" and within not in MAY_IMPORT:
        return "a protocol"
    if first == "workflows" and len(rest) == 2 and rest[0] != "saved_models" and rest[1] not in {"__init__", *AROUND}:
        return "a protocol"
    return within if len(rest) > 1 and within in MAY_IMPORT else first


def below(module, places):
    """Whether a module, or a package around it, is among the places."""
    parts = module.replace("/", ".").split(".")
    return any(".".join(parts[: i + 1]) in places for i in range(len(parts)))


def test_the_walk_sees_imports_of_every_kind():
    assert "cells.tables" in ours("session")
    assert "rehearsal.run" in ours("cli/console")  # for type checkers only
    assert "workflows" in ours("rehearsal/rehearsal")  # from cloister import ...
    assert "socket" in imports("rehearsal/processes")


@pytest.mark.parametrize("name", FILES)
def test_imports_follow_the_arrows(name):
    allowed = MAY_IMPORT[name if name in MAY_IMPORT else layer(name)]
    wrong = {m for m in ours(name) if not below(m, allowed) and layer(m.replace(".", "/")) not in allowed - BASE}
    assert not wrong, f"{name} imports {', '.join(sorted(wrong))}; it may import {', '.join(sorted(allowed))}"


def module_graph():
    """File → the files of ours that it imports when it is imported itself, and those it imports later."""
    graph = {}
    for name in FILES:
        early, late = set(), set()
        for node, inside, typing_only in walk_imports(tree(name)):
            for module in set() if typing_only else named(name, node):
                stem = module[9:].replace(".", "/")
                file = stem if stem in FILES else f"{stem}/__init__" if f"{stem}/__init__" in FILES else None
                if module.startswith("cloister.") and file not in (None, name):
                    (late if inside else early).add(file)
        graph[name] = early, late
    return graph


def walk_imports(node, inside=False, typing_only=False):
    """Every import, whether it stands in a function, and whether it is for type checkers only."""
    for child in ast.iter_child_nodes(node):
        hidden = typing_only or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        deep = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, deep, hidden
        yield from walk_imports(child, deep, hidden)


def circles(edges):
    """Sets of files that import each other, by removing what imports nothing that is left."""
    left = {name: set(targets) for name, targets in edges.items()}
    while done := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in done:
            del left[name]
    while done := [name for name in left if not any(name in targets for targets in left.values())]:
        for name in done:
            del left[name]
    return set(left)


def test_no_file_imports_itself_by_way_of_others():
    """Not even later."""
    edges = {name: early | late for name, (early, late) in module_graph().items()}
    assert circles(edges) == set()
    assert circles({"a": {"b"}, "b": {"a"}, "c": {"a"}}) == {"a", "b"}


def test_no_circle_hides_behind_type_checking():
    edges = {name: set() for name in FILES}
    for name in FILES:
        for module in {m for node, _, _ in walk_imports(tree(name)) for m in named(name, node)}:
            stem = module[9:].replace(".", "/")
            while module.startswith("cloister.") and stem not in FILES and "/" in stem:
                stem = stem.rpartition("/")[0]
            if stem in FILES and stem != name:
                edges[name].add(stem)
    assert circles(edges) == set()


HEAVY = {"torch", "anndata", "pandas", "scipy", "sklearn", "seal", "nvflare", "matplotlib", "numba", "opacus", "peft"}
LATE = (
    "cli",
    "workflows/fine_tune/pseudo_labels",
    "rehearsal/run",
)  # verbs, so that help is quick; what its options ask for


@functools.cache
def brought_by(name):
    """The heavy engines that a file imports when it is imported."""
    early = [n for n, deep, hidden in walk_imports(tree(name)) if not deep and not hidden]
    return {m.split(".")[0] for n in early for m in named(name, n)} & HEAVY


def test_imports_stand_at_the_top_unless_they_bring_a_heavy_engine():
    graph = module_graph()

    @functools.cache
    def engines(name):
        seen, queue, found = {name}, [name], set()
        while queue:
            here = queue.pop()
            found |= brought_by(here)
            for other in graph[here][0] - seen:
                seen.add(other)
                queue.append(other)
        return frozenset(found)

    late = {(a, b) for a, (_, later) in graph.items() for b in later if not engines(b) - engines(a)}
    wrong = {(a, b) for a, b in late if not below(a, {x.replace("/", ".") for x in LATE})}
    assert not wrong, f"nothing heavy is in them, so import them at the top: {sorted(wrong)}"


@pytest.mark.parametrize("name", [n for n in FILES if {layer(n), n.split("/")[0]} & NEVER.keys()])
def test_no_layer_reaches_for_what_is_none_of_its_business(name):
    found = {m.split(".")[0] for m in imports(name)}
    places = {layer(name)} if layer(name) == "a protocol" else {layer(name), name.split("/")[0]}
    assert not found & set().union(*(NEVER.get(place, set()) for place in places))


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
            assert below(name, {p.replace("/", ".") for p in places}), f"{name} imports {package}"


def uses_of_numpy_random(name):
    """Lines that use `np.random` for more than the type of a generator that was handed in."""
    for node in ast.walk(tree(name)):
        drawn = isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("np.random", "numpy.random")
        if drawn and node.attr not in ("Generator", "RandomState"):
            yield node.lineno, node.attr


@pytest.mark.parametrize(
    "name", [n for n in FILES if n == "session" or n.startswith("mpc") or layer(n) == "a protocol"]
)
def test_no_protocol_draws_secrets_from_a_statistical_generator(name):
    modules = {m.split(".")[0] for m in imports(name)} | {".".join(m.split(".")[:2]) for m in imports(name)}
    assert not modules & {"random", "numpy.random"}, f"{name} imports a statistical generator"
    drawn = list(uses_of_numpy_random(name))
    if name in STATISTICAL or name == "mpc/session":  # party_rng is the one place that makes a role's `rng`
        assert {what for _, what in drawn} <= {"default_rng"}
    else:
        assert not drawn, f"{name} draws with np.random in line {drawn[0][0]}"


def test_the_list_of_exceptions_is_no_longer_than_needed():
    for name in STATISTICAL:
        if (ROOT / f"{name}.py").exists():
            assert list(uses_of_numpy_random(name)), f"{name} draws nothing any more; take it off the list"


@pytest.mark.parametrize("name", [n for n in FILES if n.startswith("mpc/") or layer(n) == "a protocol"])
def test_only_protocols_that_say_what_they_reveal_are_run(name):
    """A file with roles over a channel has the sections of the house style."""
    if not any(isinstance(n, ast.FunctionDef) and n.name == "roles" for n in tree(name).body):
        return
    text = ast.get_docstring(tree(name)) or ""
    for title in ("Reveals", "Assumes", "Cost"):
        assert f"{title}\n{'-' * len(title)}" in text, f"{name} has no section {title}"
    functions = {n.name for n in tree(name).body if isinstance(n, ast.FunctionDef)}
    same_as = {t.id for n in tree(name).body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
    assert "ideal" in functions | same_as  # its own, or that of the protocol with the same function


def test_every_protocol_is_in_the_index_with_its_modes():
    """`protocols/__init__` has a line for each file with roles: paper, section, and the modes as they are declared."""
    index = {}
    for line in (ast.get_docstring(tree("protocols/__init__")) or "").splitlines():
        if found := re.fullmatch(r"  ( *)(\w+)  +(\S.*?)  +([a-z ]+)", line):
            index[found[2]] = set(found[4].split())
    letters = {"hardened": "h", "semi-honest": "s", "published": "p", "plain": "plain"}
    declared = {}
    for name in workflows.SHIPPED:
        for mode, what in workflows.get(name).modes.items():
            for protocol in what.protocols:
                declared.setdefault(protocol, set()).add(letters[mode])
    for name in FILES:
        with_roles = any(isinstance(n, ast.FunctionDef) and n.name == "roles" for n in tree(name).body)
        if (name.startswith("mpc/") or layer(name) == "a protocol") and with_roles:
            written = re.search(
                r'^PROTOCOL = "(\w+)"$', (ROOT / f"{name}.py").read_text(encoding="utf-8"), re.MULTILINE
            )
            protocol = written[1] if written else name.rpartition("/")[2]
            assert protocol in index, f"{protocol} has no line in protocols/__init__"
            assert index[protocol] == declared.get(protocol, set()), protocol


def test_the_package_itself_is_light():
    """`import cloister` and the base bring none of the heavy engines with them."""
    code = (
        "import sys, cloister, cloister.mpc.net.channel, cloister.rehearsal.rehearsal, cloister.mpc.sums.secure_sum\n"
        "heavy = {'torch', 'anndata', 'pandas', 'scipy', 'sklearn', 'seal', 'nvflare', 'matplotlib', 'numba'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"
