"""Run the notebooks under docs/notebooks and keep their outputs, small and without anything of this machine.

python scripts/notebooks.py                 all of them
python scripts/notebooks.py bin-values      this one
python scripts/notebooks.py --check NAME    run it and keep nothing; what tests/test_notebooks.py does
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
MOST = 120_000  # bytes of outputs that a notebook may carry


def execute(path: Path, *, timeout: int = 600) -> Any:
    """The notebook with fresh outputs; raises where a cell does."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as work:
        kernel = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{work}/kernel")  # no port is opened
        NotebookClient(notebook, kernel, timeout=timeout, resources={"metadata": {"path": work}}).execute()
    return notebook


def tidy(notebook: Any) -> Any:
    """Without times and warnings, which differ from run to run and machine to machine."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
    return notebook


def figures(notebook: Any) -> int:
    outputs = [o for c in notebook.cells if c.cell_type == "code" for o in c.outputs]
    return sum("image/png" in o.get("data", {}) for o in outputs)


if __name__ == "__main__":
    keep = "--check" not in sys.argv
    wanted = [a for a in sys.argv[1:] if not a.startswith("-")] or sorted(p.stem for p in FOLDER.glob("*.ipynb"))
    for name in wanted:
        began = time.perf_counter()
        made = tidy(execute(FOLDER / f"{name}.ipynb"))
        size, drawn = len(nbformat.writes(made)), figures(made)
        if size > MOST or not drawn:
            sys.exit(f"{name}: {drawn} figure(s) in {size} bytes; draw at least one, and in {MOST} bytes")
        if keep:
            nbformat.write(made, FOLDER / f"{name}.ipynb")
        print(f"{name}: {time.perf_counter() - began:.1f} s, {drawn} figure(s), {size} bytes")
