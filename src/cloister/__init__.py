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

_WORKFLOWS = (  # each has a function of its name, the part of a site
    "bin_values",
    "find_outliers",
    "choose_genes",
    "shared_pca",
    "integrate",
    "cluster_cells",
    "find_markers",
    "compare_groups",
    "train_classifier",
    "map_labels",
    "propagate_labels",
    "fine_tune",
    "train_cellcnn",
    "predict_cellcnn",
    "adapt_model",
    "serve_model",
)
_PUBLIC = {
    "rehearse": "run.rehearsal",
    "Run": "run.run",
    "Series": "run.run",
    "join": "runtime.attend",
    "take_part": "runtime.attend",
    "Study": "study",
    "Step": "study",
    "Party": "study",
    "Receipt": "net.receipts",
    "read_cells": "cells.files",
    "write_cells": "cells.files",
    "demo_sites": "cells.demo",
    "demo_donors": "cells.demo",
    "demo_rows": "cells.demo",
    "demo_cohort": "cells.demo",
    "embed": "workflows.embed",
    "FineTuned": "workflows.trained.fine_tuned",
    "load_model": "workflows.trained",
    "CellClassifier": "workflows.trained.cell_classifier",
    "Integration": "workflows.trained.integration",
    "place_in_space": "workflows.shared_pca",
    "mapping_baselines": "workflows.baselines.mapping",
    "group_baselines": "workflows.baselines.groups",
    "cellcnn_baselines": "workflows.baselines.cellcnn",
    "propagation_baselines": "workflows.baselines.propagation",
    "adaptation_baselines": "workflows.baselines.adaptation",
} | {name: f"workflows.{name}" for name in _WORKFLOWS}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    """Import what is asked for, when it is asked for: `import cloister` itself costs nothing."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'cloister' has no attribute '{name}'")
    return getattr(importlib.import_module(f"cloister.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
