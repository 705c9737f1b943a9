"""A study's parties as FLARE services on loopback, for benchmarks: each a process, and one more while a run lasts."""

from __future__ import annotations

import dataclasses
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START = "import sys; from cloister.deploy.start import start_party; start_party(sys.argv[1])"


@contextmanager
def services(folder: Path, workflow: str, cells: Mapping[str, Any], **parts: Any) -> Iterator[dict[str, Path]]:
    """Kits of `hub` and of one site for each table of cells, while their services run; `parts` are the study's."""
    from cloister.cells.files import write_cells
    from cloister.deploy.provision import provision
    from cloister.study import Study

    with socket.create_server(("127.0.0.1", 0)) as s:
        network = {"host": "localhost", "port": s.getsockname()[1]}
    parties = {"hub": "coordinator"} | dict.fromkeys(cells, "site")
    kits = provision(Study("bench", workflow, parties, network=network, **parts), folder / "kits")
    for site, adata in cells.items():
        write_cells(adata, kits[site] / "cells.h5ad")
    started = [
        subprocess.Popen([sys.executable, "-c", START, str(kit)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for kit in kits.values()
    ]
    try:
        end = time.monotonic() + 120
        while not all((kit / "running.lock").exists() for kit in kits.values()) and time.monotonic() < end:
            time.sleep(0.2)
        yield kits
    finally:
        for service in started:
            service.terminate()
        for service in started:
            service.wait(timeout=30)


def run(kits: Mapping[str, Path], limit: float, consent: Iterable[str] = (), **changes: Any) -> tuple[float, dict]:
    """Order a run of the study with these changes; seconds from order to end, and how it ended by party."""
    from cloister.deploy.control_socket import run_study
    from cloister.deploy.kit import Kit
    from cloister.deploy.party import Ended
    from cloister.study import Study, format_study

    study = dataclasses.replace(Study.load(kits["hub"].parent / "study.toml"), **changes)
    for party, path in kits.items():
        (path / "study.toml").write_text(format_study(study))
        if party != "hub":
            kit = Kit.open(path)
            kit.approve()
            words = ", ".join(f'"{word}"' for word in consent)
            kit.policy_file.write_text(kit.policy_file.read_text().replace("consent = []", f"consent = [{words}]"))
    began = time.monotonic()
    run_study(kits["hub"], limit=limit)
    took = time.monotonic() - began
    last = {p: max((k / "results").glob("*/outcome.json"), key=lambda f: f.stat().st_mtime) for p, k in kits.items()}
    return took, {party: (Ended.load(path), path.parent) for party, path in last.items()}
