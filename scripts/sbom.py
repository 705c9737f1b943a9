"""What is installed, as a CycloneDX bill of materials: `make sbom` → build/sbom.json.

The environment of the interpreter that runs this is read (`cyclonedx-py environment`), validated, and what depends on
the moment or the machine is left out, so that two runs in one environment give one file.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUT = ROOT / "build" / "sbom.json"


def main() -> None:
    OUT.parent.mkdir(exist_ok=True)
    part = OUT.with_suffix(".part")
    command = [
        *(sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", "--of", "JSON"),
        *("--pyproject", str(ROOT / "pyproject.toml"), "--mc-type", "application", "-o", str(part), sys.executable),
    ]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    text = part.read_text(encoding="utf-8").replace(ROOT.as_uri(), "file:.").replace(str(ROOT), ".")
    OUT.write_text(text, encoding="utf-8")
    part.unlink()
    told = json.loads(text)
    print(f"{OUT.relative_to(ROOT)}: {told['bomFormat']} {told['specVersion']}, {len(told['components'])} components")


if __name__ == "__main__":
    main()
