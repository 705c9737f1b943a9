"""Build the wheel and try it where nothing of the repository is in reach: `make wheel`.

    python scripts/wheel.py                                  with this interpreter, base package and the extras it tries
    python scripts/wheel.py --python python3.12 --extras he,report,ot,fcs,flare

A fresh environment gets the wheel, under the constraints; then, in an empty folder: `cloister --version`, `cloister
doctor`, the demo's files, and a rehearsal of `bin-values` on them with its receipt verified.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SITES = ("basel", "lugano", "vienna")


def build() -> Path:
    """dist/cloister-*.whl, anew, from the files that git knows or would take in."""
    with tempfile.TemporaryDirectory() as work:
        source = Path(work) / "source"
        for name in subprocess.check_output(
            ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, text=True
        ).split("\0"):
            if name and (ROOT / name).is_file():
                (source / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, source / name)
        subprocess.run(
            [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", work, str(source)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        (wheel,) = Path(work).glob("*.whl")
        (ROOT / "dist").mkdir(exist_ok=True)
        return Path(shutil.copy(wheel, ROOT / "dist"))


def smoke(wheel: Path, python: str, extras: str) -> None:
    """Install it in a fresh environment, and use it from an empty folder."""
    with tempfile.TemporaryDirectory() as work:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL"))}
        subprocess.run([python, "-m", "venv", f"{work}/venv"], check=True, env=env)
        bin_ = Path(work) / "venv" / "bin"
        wanted = f"cloister[{extras}] @ {wheel.as_uri()}" if extras else str(wheel)
        install = [bin_ / "python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wanted]
        subprocess.run([str(x) for x in install], check=True, env=env)
        (Path(work) / "empty").mkdir()

        def cloister(*words: str) -> str:
            print("$ cloister", *words)
            done = subprocess.run(
                [str(bin_ / "cloister"), *words], cwd=f"{work}/empty", env=env, capture_output=True, text=True
            )
            if done.returncode:
                sys.exit(f"exit code {done.returncode}\n{done.stdout}{done.stderr}")
            return done.stdout

        print(cloister("--version").strip())
        print(cloister("doctor").rstrip())
        cloister("demo", "--cells", "--out", "sites")
        data = [word for site in SITES for word in ("--data", f"{site}=sites/{site}.h5ad")]
        print(cloister("rehearse", "bin-values", *data, "--out", "results").rstrip())
        cloister("receipt", "results/basel.receipt.json", "--verify")
        where = subprocess.check_output(
            [str(bin_ / "python"), "-c", "import cloister; print(cloister.__file__)"], cwd=work, text=True, env=env
        )
        if not where.startswith(work):
            sys.exit(f"this was not the wheel but {where}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the fresh environment")
    parser.add_argument("--extras", default="report", help="comma-separated; none: --extras ''")
    args = parser.parse_args()
    wheel = build()
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    smoke(wheel, args.python, args.extras)
    print(f"{wheel.name} works outside the repository")


if __name__ == "__main__":
    main()
