"""Write constraints-hashed.txt: every pinned version with the SHA-256 of all its files on the package index.

    python scripts/hash_constraints.py               read the index anew and write the file
    python scripts/hash_constraints.py --check       only compare names and versions with constraints.txt
    python scripts/hash_constraints.py --wheels      list which pins have no wheel for Linux and which Python

    pip install --require-hashes --no-deps -r constraints-hashed.txt
    pip install --no-deps --no-build-isolation .

The file holds what `cloister[dev]` and the extras ot, he, flare, report, cluster, map and privacy's accountant need on
Python 3.11 to 3.14. It leaves out flowio, which has no wheel since 1.3 and runs its build script (extra `fcs`), and
what brings torch, whose files and dependencies differ between PyPI and PyTorch's own indices. The dependencies are read
from the packages that are installed here. The index is the one in pip's settings, else pip's default.
"""

from __future__ import annotations

import argparse
import html
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PINS, HASHED = ROOT / "constraints.txt", ROOT / "constraints-hashed.txt"
EXTRAS = ("ot", "he", "flare", "report", "cluster", "map", "docs", "dev")
BESIDE = ("dp-accounting", "pip", "setuptools", "wheel")
LEFT_OUT = {"torch", "flowio"}
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
LINK = re.compile(r'<a href="[^"#]*#sha256=([0-9a-f]{64})"[^>]*>([^<]+)</a>')
HEAD = """\
# Versions of constraints.txt with the hashes of all their files. Made by scripts/hash_constraints.py; do not edit.
# pip install --require-hashes --no-deps -r constraints-hashed.txt
"""


def index_url() -> str:
    """The package index that pip uses here."""
    from pip._internal.models.index import PyPI  # pip has no public name for its default

    if url := os.environ.get("PIP_INDEX_URL"):
        return url
    asked = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    return subprocess.run(asked, capture_output=True, text=True).stdout.strip() or str(PyPI.simple_url)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, tuple[str, str]]:
    """Normal name → version and environment marker."""
    found = {}
    for line in PINS.read_text(encoding="utf-8").splitlines():
        text, _, marker = line.partition(";")
        if "==" in text and not text.lstrip().startswith("#"):
            name, version = text.split("==")
            found[normal(name.strip())] = (version.strip(), marker.strip())
    return found


def needed() -> set[str]:
    """Names of all packages that the extras need, on any of the Pythons."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [*project["dependencies"], *(t for e in EXTRAS for t in project["optional-dependencies"][e]), *BESIDE]
    waiting = [Requirement(text) for text in texts if not text.startswith("cloister")]
    found: set[tuple[str, str]] = set()
    while waiting:
        requirement = waiting.pop()
        name = normal(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) in found or name in LEFT_OUT:
                continue
            found.add((name, extra))
            try:
                texts = importlib.metadata.requires(name) or []
            except importlib.metadata.PackageNotFoundError:
                continue  # wanted on another Python
            for other in map(Requirement, texts):
                places = [{"python_version": p, "python_full_version": f"{p}.0", "extra": extra} for p in PYTHONS]
                if other.marker is None or any(other.marker.evaluate(place) for place in places):
                    waiting.append(other)
    return {name for name, _ in found}


def files(index: str, name: str, version: str) -> list[tuple[str, str]]:
    """File name and hash of every file of a version."""
    with urllib.request.urlopen(f"{index}/{name}/", timeout=60) as answer:
        page = answer.read().decode()
    found = []
    for digest, text in LINK.findall(page):
        file = html.unescape(text).strip()
        stem = file.removesuffix(".tar.gz").removesuffix(".zip")
        parts = file.split("-") if file.endswith(".whl") else [stem.rpartition("-")[0], stem.rpartition("-")[2]]
        if normal(parts[0]) == name and parts[1].split("+")[0] == version:
            found.append((file, digest))
    if not found:
        raise LookupError(f"{index} has no file of {name} {version}")
    return sorted(found)


def fits(file: str, python: str) -> bool:
    """Whether a file is a wheel for this Python on Linux x86-64."""
    if not file.endswith(".whl"):
        return False
    tags, abi, platform = file.removesuffix(".whl").split("-")[-3:]
    if platform != "any" and not ("linux" in platform and "x86_64" in platform):
        return False
    here = int(python.split(".")[1])
    stable = abi == "abi3" or abi == "none"
    for tag in tags.split("."):
        if tag == "py3" or tag == f"cp3{here}":
            return True
        if stable and re.fullmatch(r"(cp|py)3\d+", tag) and int(tag[3:]) <= here:
            return True
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--wheels", action="store_true")
    args = parser.parse_args()
    pinned, names = pins(), needed()
    if lacking := sorted(names - pinned.keys() - set(BESIDE)):
        print(f"not in {PINS.name}, so without hashes: {', '.join(lacking)}", file=sys.stderr)
    wanted = {name: pin for name, pin in pinned.items() if name in names}
    if args.check:
        lines = re.findall(r"^([a-z0-9-]+)==([^ ;\\]+)", HASHED.read_text(encoding="utf-8"), flags=re.MULTILINE)
        if dict(lines) != {name: version for name, (version, _) in wanted.items()}:
            sys.exit(f"{HASHED.name} is older than {PINS.name}; run scripts/hash_constraints.py")
        return
    index = index_url().rstrip("/")
    with ThreadPoolExecutor(8) as pool:
        found = dict(zip(wanted, pool.map(lambda n: files(index, n, wanted[n][0]), wanted), strict=True))
    if args.wheels:
        for python in PYTHONS:
            lacking = [name for name, rows in found.items() if not any(fits(file, python) for file, _ in rows)]
            without = ", ".join(lacking) or "none"
            print(f"Python {python}: {len(found) - len(lacking)} of {len(found)} have a wheel; not: {without}")
        return
    text = HEAD
    for name, (version, marker) in sorted(wanted.items()):
        hashes = sorted({digest for _, digest in found[name]})
        text += f"{name}=={version}{f' ; {marker}' if marker else ''}"
        text += "".join(f" \\\n    --hash=sha256:{digest}" for digest in hashes) + "\n"
    HASHED.write_text(text, encoding="utf-8")
    print(f"{HASHED.name}: {len(found)} packages")


if __name__ == "__main__":
    main()
