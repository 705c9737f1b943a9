"""Cloister: analyse single-cell data together while every cell stays at home.

import cloister as cl

run = cl.rehearse("bin-values", data={"basel": a, "lugano": b, "vienna": c})
run.data["basel"].layers["binned"]      # results, in annotated copies
run.receipts["basel"]                   # what basel sent, to whom, and what each party learned
run.cost                                # bytes, messages, rounds, seconds per party
run.report("report.html")
cl.pl.composition(run, "cell_type")     # figures; cl.pp and cl.tl have the workflows under scanpy's names
"""

from __future__ import annotations

import importlib
from typing import Any

from cloister import _moved
from cloister._version import __version__

_WORKFLOWS = (  # each has a function of its name, the part of a site
    "bin_values",
    "find_outliers",
    "quality_control",
    "choose_genes",
    "shared_pca",
    "integrate",
    "cluster_cells",
    "find_markers",
    "shared_map",
    "compare_groups",
    "model_outcome",
    "find_programs",
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
    "rehearse": "rehearsal.rehearsal",
    "Run": "rehearsal.run",
    "Series": "rehearsal.run",
    "join": "deploy.join",
    "take_part": "deploy.join",
    "Study": "study",
    "Step": "study",
    "Party": "study",
    "Receipt": "mpc.net.receipts",
    "read_cells": "cells.files",
    "write_cells": "cells.files",
    "demo_sites": "cells.demo",
    "demo_donors": "cells.demo",
    "demo_rows": "cells.demo",
    "demo_cohort": "cells.demo",
    "demo_outcomes": "cells.demo",
    "embed": "workflows.embed",
    "FineTuned": "workflows.saved_models.fine_tuned",
    "load_model": "workflows.saved_models",
    "CellClassifier": "workflows.saved_models.cell_classifier",
    "Integration": "workflows.saved_models.integration",
    "SharedMap": "workflows.saved_models.shared_map",
    "place_in_space": "workflows.shared_pca.workflow",
    "mapping_baselines": "papers.baselines.mapping",
    "group_baselines": "papers.baselines.groups",
    "outcome_baselines": "workflows.model_outcome.baselines",
    "program_baselines": "workflows.find_programs.workflow",
    "cellcnn_baselines": "papers.baselines.cellcnn",
    "propagation_baselines": "papers.baselines.propagation",
    "adaptation_baselines": "papers.baselines.adaptation",
    "advise": "rehearsal.advise",
} | {name: f"workflows.{name}.workflow" for name in _WORKFLOWS}
_MODULES = ("pl", "pp", "tl")

__all__ = ["__version__", *_PUBLIC, *_MODULES]

_moved.install()


def __getattr__(name: str) -> Any:
    """Import what is asked for, when it is asked for: `import cloister` itself costs nothing."""
    if name in _MODULES:
        return importlib.import_module(f"cloister.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'cloister' has no attribute '{name}'")
    return getattr(importlib.import_module(f"cloister.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
