"""How many cells, genes and donors the file has that a site would approve; read by a process of its own.

    python -m cloister.page.count KIT

No cell comes into the process that serves the page. It is started once for each state of the file.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

from cloister.cells.tables import donors
from cloister.deploy.approval.own_cells import open_cells
from cloister.deploy.kit import Kit
from cloister.errors import CloisterError

SECONDS = 600.0


class Counter:
    """Counts in the background; `words` is what is known by now."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int], str] = {}
        self._lock = threading.Lock()

    def words(self, kit: Path, data: Path) -> str:
        try:
            stat = data.stat()
        except OSError:
            return "there is no such file"
        key = (str(data), stat.st_mtime_ns, stat.st_size)
        with self._lock:
            if key not in self._known:
                self._known = {key: "being counted; reload the page"}
                threading.Thread(target=self._count, args=(key, kit), name="count", daemon=True).start()
            return self._known[key]

    def _count(self, key: tuple[str, int, int], kit: Path) -> None:
        command = [sys.executable, "-m", "cloister.page.count", str(kit)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
            said = json.loads(done.stdout)["words"]
        except (OSError, ValueError, KeyError, TypeError, subprocess.TimeoutExpired):
            said = "they could not be counted; cloister doctor --kit KIT says why"
        with self._lock:
            if key in self._known:
                self._known[key] = str(said)[:300]


def main() -> None:
    try:
        kit = Kit.open(sys.argv[1])
        adata = open_cells(kit, kit.policy())
        key = kit.donor_key
        of = f" of {donors(adata, key)} donors" if key is not None and key in adata.obs else ""
        words = f"{adata.n_obs:,} cells{of}, {adata.n_vars:,} genes"
    except CloisterError as e:
        words = str(e)
    print(json.dumps({"words": words}))


if __name__ == "__main__":
    main()
