"""Compare with other people's engines, each in an environment of its own: `make oracle`.

limma and edgeR are R's: Debian's r-bioc-limma and r-bioc-edger, used where they are installed.

SecretFlow SPU pins NumPy < 2 and has no wheel beyond Python 3.11; OpenFHE's wheels want Python 3.10; CellTypist trains
only with a scikit-learn before 1.8. None can be an extra of this package, so they live under build/oracle, where the
tests find them through variables.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ORACLES = {  # variable of the tests: packages, the first of them its name; interpreters that have wheels of it
    "CLOISTER_SPU_PYTHON": ("spu==0.9.5", ("python3.11", "python3.10")),
    "CLOISTER_OPENFHE_PYTHON": ("openfhe", ("python3.10",)),
    "CLOISTER_CELLTYPIST_PYTHON": ("celltypist scikit-learn<1.8", ("python3.11", "python3.12", "python3.13")),
}
TESTS = (
    "tests/workflows/map_labels/test_oracle_spu.py",
    "tests/mpc/threshold_ckks/test_oracle_openfhe.py",
    "tests/workflows/compare_groups/test_oracle_limma.py",
    "tests/workflows/train_classifier/test_oracle_celltypist.py",
)


def runs(python: str) -> bool:
    """Whether it is an interpreter, and not a stand-in for one that is not installed."""
    return subprocess.run([python, "--version"], capture_output=True, check=False).returncode == 0


def environment(package: str, interpreters: tuple[str, ...]) -> Path | None:
    """The interpreter of an environment that has the package, made if needed."""
    folder = ROOT / "build" / "oracle" / package.split()[0].partition("=")[0]
    python = folder / "bin" / "python"
    if (folder / ".installed").exists():
        return python
    found = next((path for name in interpreters if (path := shutil.which(name)) and runs(path)), None)
    if found is None:
        print(f"{package}: none of {', '.join(interpreters)} is on this machine; left out", flush=True)
        return None
    shutil.rmtree(folder, ignore_errors=True)
    done = subprocess.run([found, "-m", "venv", str(folder)], check=False).returncode
    done = done or subprocess.run([str(python), "-m", "pip", "install", "-q", *package.split()], check=False).returncode
    if done:
        print(f"{package}: could not be installed with {found}; left out", flush=True)
        return None
    (folder / ".installed").touch()
    return python


def has_limma() -> bool:
    """Whether R is here, with limma and edgeR."""
    ask = ["Rscript", "-e", "library(limma); library(edgeR)"]
    there = shutil.which("Rscript") is not None and not subprocess.run(ask, capture_output=True, check=False).returncode
    if not there:
        print("limma: no R with limma and edgeR (Debian: r-bioc-limma, r-bioc-edger); left out", flush=True)
    return there


def main() -> int:
    found = {name: environment(*what) for name, what in ORACLES.items()}
    variables = {name: str(python) for name, python in found.items() if python is not None}
    if has_limma():
        variables["CLOISTER_LIMMA"] = "1"
    if not variables:
        print("no oracle could be installed, nothing was compared")
        return 1
    command = [sys.executable, "-m", "pytest", "-rs", *TESTS]
    return subprocess.run(command, cwd=ROOT, env=os.environ | variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
