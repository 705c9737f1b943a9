"""Cloister: analyse single-cell data together while every cell stays at home.

import cloister as cl

run = cl.rehearse("bin-values", data={"basel": a, "lugano": b, "vienna": c})
run.data["basel"].layers["binned"]      # results, in annotated copies
run.receipts["basel"]                   # what basel sent, to whom, and what each party learned
run.cost                                # bytes, messages, rounds, seconds per party
run.report("report.html")
"""

from __future__ import annotations

import importlib
from typing import Any

from cloister._version import __version__

_PUBLIC = {
    "rehearse": "run.rehearsal",
    "Run": "run.rehearsal",
    "Study": "study",
    "Party": "study",
    "Receipt": "net.receipts",
    "read_cells": "cells.files",
    "write_cells": "cells.files",
    "demo_sites": "cells.demo",
    "demo_donors": "cells.demo",
    "demo_rows": "cells.demo",
    "bin_values": "workflows.bin_values",
    "find_outliers": "workflows.find_outliers",
    "shared_pca": "workflows.shared_pca",
    "embed": "workflows.embed",
    "fine_tune": "workflows.fine_tune",
    "FineTuned": "workflows.fine_tuned",
    "load_model": "workflows.trained_models",
    "train_classifier": "workflows.train_classifier",
    "CellClassifier": "workflows.cell_classifier",
    "map_labels": "workflows.map_labels",
    "offer_labels": "workflows.map_labels",
    "mapping_baselines": "workflows.mapping_baselines",
    "adapt_model": "workflows.adapt_model",
    "serve_model": "workflows.serve_model",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    """Import what is asked for, when it is asked for: `import cloister` itself costs nothing."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'cloister' has no attribute '{name}'")
    return getattr(importlib.import_module(f"cloister.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
