"""Build the wheel and try it where nothing of the repository is in reach: `make wheel`.

    python scripts/wheel.py                                       Python 3.11 to 3.14, those that are found
    python scripts/wheel.py --build-only                          wheel and sdist, built twice and compared
    python scripts/wheel.py --python /opt/python3.13/bin/python3  these interpreters and no search; may be repeated
    python scripts/wheel.py --versions newest --extras ''         one set of versions; the base package alone
    make wheel PYTHONS="python3.12 /opt/python3.13/bin/python3"

Each interpreter gets two fresh environments: one under `constraints.txt`, one with the newest versions that pip finds,
as whoever installs the wheel by itself will get. In each, from an empty folder: `cloister --version`, `cloister
doctor`, the demo's files, a rehearsal of `bin-values` on them with its receipt verified; then the fast tests of the
wire, the channel, the cells and that workflow, copied there. An interpreter that is not found is named at the end and
is no failure.

The extras are all but those that bring torch (`models`, `lora`, `privacy`): where pip brings it with CUDA, it is
several gigabytes for each of six environments, and nothing that is tried here needs it.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SITES = ("basel", "lugano", "vienna")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
VERSIONS = ("constraints", "newest")
EXTRAS = "flare,he,ot,report"
TESTS = ("net/test_wire.py", "net/test_channel.py", "cells/test_tables.py", "workflows/test_bin_values.py")
NEEDED = ("pytest", "hypothesis")  # by these tests, beside the package
TOLD = ("numpy", "pandas", "anndata", "scipy", "h5py", "msgpack", "cryptography", "numba", "nvflare")
COMING = ("DeprecationWarning", "PendingDeprecationWarning", "FutureWarning")


class Failed(Exception):
    """One step of one environment, with what it printed."""


def build() -> Path:
    """dist/cloister-*.whl and .tar.gz, anew; they are built twice, and both builds have to agree byte for byte."""
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory(prefix="another-name-") as two:
        first, second = built(Path(one)), built(Path(two))
        for a, b in zip(first, second, strict=True):
            if a.name != b.name or a.read_bytes() != b.read_bytes():
                sys.exit(f"{a.name} is not reproducible: two builds of the same files differ")
        shutil.rmtree(ROOT / "dist", ignore_errors=True)
        (ROOT / "dist").mkdir()
        copies = [Path(shutil.copy(path, ROOT / "dist")) for path in first]
    for path in copies:
        print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}, two builds alike")
    return copies[0]


def built(work: Path) -> tuple[Path, Path]:
    """Wheel and sdist from the files that git knows or would take in, dated by the last commit."""
    stamp = subprocess.check_output(["git", "log", "-1", "--format=%ct"], cwd=ROOT, text=True).strip()
    environment = {**clean_environment(), "SOURCE_DATE_EPOCH": stamp, "LC_ALL": "C.UTF-8", "TZ": "UTC"}
    before = os.umask(0o022)  # modes are part of a wheel
    try:
        source = work / "source"
        for name in subprocess.check_output(
            ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, text=True
        ).split("\0"):
            if name and (ROOT / name).is_file():
                (source / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, source / name)
        command = [sys.executable, "-m", "build", "--wheel", "--sdist", "--no-isolation", "--outdir", str(work)]
        subprocess.run(
            [*command, str(source)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
        )
    finally:
        os.umask(before)
    (wheel,), (archive,) = work.glob("*.whl"), work.glob("*.tar.gz")
    repack(archive, int(stamp))
    return wheel, archive


def repack(archive: Path, stamp: int) -> None:
    """The same files in an order, with dates and owners that do not depend on who builds."""
    with tarfile.open(archive) as old:
        members = sorted(old.getmembers(), key=lambda m: m.name)
        whole = io.BytesIO()
        with tarfile.open(fileobj=whole, mode="w", format=tarfile.PAX_FORMAT) as new:
            for member in members:
                member.mtime, member.uid, member.gid, member.uname, member.gname = stamp, 0, 0, "", ""
                member.mode = 0o755 if member.isdir() else 0o644
                member.pax_headers = {}
                new.addfile(member, old.extractfile(member) if member.isfile() else None)
    with archive.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=stamp) as packed:
        packed.write(whole.getvalue())


# ---- interpreters --------------------------------------------------------------------------------------------------


def version_of(python: str) -> str | None:
    """'3.12' of an interpreter that runs and can make environments; None of anything else."""
    code = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, env=clean_environment())
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def candidates(version: str) -> Iterator[str]:
    """Where an interpreter of this version may be: this one, on the path, where pyenv and uv keep theirs."""
    yield sys.executable
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        yield str(Path(folder) / f"python{version}")
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or Path.home() / ".local" / "share" / "uv" / "python")
    for kept, pattern in ((pyenv, f"{version}.*"), (uv, f"cpython-{version}.*")):
        for folder in sorted(kept.glob(pattern), reverse=True):
            yield str(folder / "bin" / f"python{version}")


def find(version: str) -> str | None:
    """The first that is there, runs (a pyenv shim may not) and has this version."""
    return next((p for p in candidates(version) if Path(p).is_file() and version_of(p) == version), None)


def clean_environment() -> dict[str, str]:
    """Without what would let another Python, or other versions than we say, into the environment."""
    unwanted = ("PYTHON", "VIRTUAL", "PIP_CONSTRAINT", "PIP_REQUIREMENT", "PIP_PRE", "PYTEST")
    return {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}


# ---- one environment -----------------------------------------------------------------------------------------------


def run(command: list[object], cwd: Path) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=clean_environment(), capture_output=True, text=True)
    if done.returncode:
        raise Failed(
            f"{Path(words[0]).name} {' '.join(words[1:])}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def attempt(wheel: Path, python: str, versions: str, extras: str) -> str:
    """Install it in a fresh environment, use it from an empty folder, run the tests; returns pytest's last line."""
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary).resolve()
        empty, inside = work / "empty", work / "venv" / "bin" / "python"
        empty.mkdir()
        run([python, "-m", "venv", work / "venv"], empty)
        limits = ["-c", ROOT / "constraints.txt"] if versions == "constraints" else []
        wanted = f"cloister[{extras}] @ {wheel.as_uri()}" if extras else str(wheel)
        run([inside, "-m", "pip", "install", "-q", *limits, wanted], empty)
        listed = run([inside, "-m", "pip", "list", "--format=freeze"], empty).split()
        print("  ", *(line.replace("==", " ") + "," for line in listed if line.partition("==")[0].lower() in TOLD))

        def cloister(*words: str) -> str:
            return run([inside.with_name("cloister"), *words], empty)

        print("  ", cloister("--version").strip())
        cloister("doctor")
        cloister("demo", "--cells", "--out", "sites")
        data = [word for site in SITES for word in ("--data", f"{site}=sites/{site}.h5ad")]
        cloister("rehearse", "bin-values", *data, "--out", "results")
        cloister("receipt", "results/basel.receipt.json", "--verify")
        where = run([inside, "-c", "import cloister; print(cloister.__file__)"], empty).strip()
        if not where.startswith(str(work)):
            raise Failed(f"this was not the wheel but {where}")
        print("   demo, rehearsal and receipt work")
        return test(inside, work, limits, versions)


def test(python: Path, work: Path, limits: list[object], versions: str) -> str:
    """Run the fast tests on what is installed; what a newest version announces for later is no failure."""
    run([python, "-m", "pip", "install", "-q", *limits, *NEEDED], work)
    shutil.copyfile(ROOT / "pyproject.toml", work / "pyproject.toml")  # pytest's settings
    for name in TESTS:
        (work / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / "tests" / name, work / "tests" / name)
    lenient = [word for kind in COMING for word in ("-W", f"default::{kind}")] if versions == "newest" else []
    chosen = ["-q", "-m", "not slow", "-p", "no:cacheprovider", *lenient]
    return run([python, "-m", "pytest", *chosen, "tests"], work).strip().splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--python", action="append", metavar="PATH", help="try this interpreter instead of a search")
    parser.add_argument("--versions", choices=VERSIONS, action="append", help="default: both")
    parser.add_argument("--extras", default=EXTRAS, help="comma-separated; none: --extras ''")
    args = parser.parse_args()
    if args.build_only:
        build()
        return
    pythons, missing = {}, []
    if args.python:
        for given in args.python:
            if (found := version_of(given)) is None:
                sys.exit(f"{given} is no Python that can make environments (it needs the modules venv and ensurepip)")
            pythons[given] = found
    else:
        for version in PYTHONS:
            if (path := find(version)) is None:
                missing.append(version)
            else:
                pythons[path] = version
    if not pythons:
        sys.exit(f"no Python {', '.join(PYTHONS)} was found; name one with --python")
    wheel = build()
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    results = {}
    for python, version in pythons.items():
        for versions in args.versions or VERSIONS:
            print(f"Python {version} ({python}), {versions}", flush=True)
            try:
                results[version, versions] = attempt(wheel, python, versions, args.extras)
            except Failed as failed:
                print(failed, file=sys.stderr)
                results[version, versions] = "FAILED"
            print("  ", results[version, versions], flush=True)
    print()
    for (version, versions), outcome in results.items():
        print(f"Python {version}  {versions:<11}  {outcome}")
    for version in missing:
        print(f"Python {version}  not found, so not tried; install it, or name it with --python or PYTHONS=")
    if "FAILED" in results.values():
        sys.exit(f"{wheel.name} does not work everywhere")
    print(f"{wheel.name} works outside the repository")


if __name__ == "__main__":
    main()
