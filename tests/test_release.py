"""What a release needs agrees: versions, metadata, pinned actions. Placeholders are listed, and stop only a release."""

import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHECK = runpy.run_path(str(ROOT / "scripts" / "release_check.py"))
HASHES = runpy.run_path(str(ROOT / "scripts" / "hash_constraints.py"))


def test_versions_and_metadata_agree():
    assert CHECK["inconsistencies"]() == []


def test_placeholders_stop_a_release_and_nothing_else():
    tag = f"v{CHECK['version']()}"
    for words, code in (([], 0), (["--release", tag], 1 if CHECK["placeholders"]() else 0), (["--release", "v0"], 1)):
        done = subprocess.run([sys.executable, ROOT / "scripts" / "release_check.py", *words], capture_output=True)
        assert done.returncode == code, done.stderr


def test_a_contradiction_is_found(tmp_path):
    """The check can fail: another version, an action that is not pinned, a dependency that the recipe lacks."""
    for name in ("src/cloister/_version.py", "CITATION.cff", "codemeta.json", "conda/recipe.yaml", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text().replace("msgpack >", "msgpackk >"))
    (tmp_path / "src" / "cloister" / "_version.py").write_text('__version__ = "9.9"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n")
    (tmp_path / "SECURITY.md").write_text("Write to the maintainers in private.\n")
    (tmp_path / ".github" / "workflows").mkdir(parents=True)
    (tmp_path / ".github" / "workflows" / "x.yml").write_text("      - uses: actions/checkout@v5\n")
    check = CHECK["inconsistencies"]
    check.__globals__["ROOT"], before = tmp_path, check.__globals__["ROOT"]
    try:
        wrong = "\n".join(check())
    finally:
        check.__globals__["ROOT"] = before
    for word in ("CITATION.cff", "codemeta.json", "CHANGELOG.md", "SECURITY.md", "msgpack", "actions/checkout@v5"):
        assert word in wrong


def test_hashed_versions_are_the_pinned_ones():
    """A package that is new in constraints.txt may still lack its hashes; `--check` says so before a release."""
    import re

    text = (ROOT / "constraints-hashed.txt").read_text()
    hashed = dict(re.findall(r"^([a-z0-9-]+)==([^ ;\\]+)", text, flags=re.MULTILINE))
    pins = HASHES["pins"]()
    assert len(hashed) > 100
    assert {name: version for name, (version, _) in pins.items() if name in hashed} == hashed
    assert text.count("--hash=sha256:") > len(hashed)
    assert not {"flowio", "torch"} & set(hashed)


@pytest.mark.parametrize(("file", "python", "fits"), [
    ("a-1-py3-none-any.whl", "3.14", True),
    ("a-1-cp311-cp311-manylinux_2_28_x86_64.whl", "3.11", True),
    ("a-1-cp311-cp311-manylinux_2_28_x86_64.whl", "3.12", False),
    ("a-1-cp39-abi3-manylinux2014_x86_64.whl", "3.14", True),
    ("a-1-cp312-abi3-manylinux2014_x86_64.whl", "3.11", False),
    ("a-1-cp311-cp311-win_amd64.whl", "3.11", False),
    ("a-1.tar.gz", "3.11", False),
])  # fmt: skip
def test_which_wheels_fit(file, python, fits):
    assert HASHES["fits"](file, python) is fits


def test_no_extra_of_all_is_built_from_source():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["fcs"] == ["flowio>=1.3"]
    assert "fcs" not in extras["all"][0]
    assert all("flowio" not in text for name, rows in extras.items() if name != "fcs" for text in rows)
