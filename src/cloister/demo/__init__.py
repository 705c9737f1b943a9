"""The demo: one story on one set of cells (`demo.story`), told by every workflow, in minutes on two cores.

Each entry of `DEMOS` plays its workflow's modes in rehearsal, on what those before have made of the cells, and returns
the runs and the rows of the table: what a site gets alone, what all get together, what the pooled analysis would give,
what an attack makes of what the mode shows (`demo.attacks`), the cost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cloister.cells import demo as demo_data
from cloister.cells.files import write_cells
from cloister.demo.labels import map_labels, propagate_labels
from cloister.demo.models import adapt_model, fine_tune, train_cellcnn, train_classifier
from cloister.demo.rows import HEADER, Played, Tell, halves
from cloister.demo.rows import auroc as auroc
from cloister.demo.statistics import (
    bin_values,
    choose_genes,
    cluster_cells,
    compare_groups,
    find_markers,
    find_outliers,
    find_programs,
    integrate,
    model_outcome,
    quality_control,
    shared_map,
    shared_pca,
)
from cloister.demo.story import Story
from cloister.rehearsal.results import save_run
from cloister.rehearsal.run import Run
from cloister.report.page import write_report

DEMOS: dict[str, Callable[[Story, Tell], Played]] = {  # in the order of the story
    "bin-values": bin_values,
    "quality-control": quality_control,
    "choose-genes": choose_genes,
    "shared-pca": shared_pca,
    "integrate": integrate,
    "cluster-cells": cluster_cells,
    "shared-map": shared_map,
    "find-outliers": find_outliers,
    "map-labels": map_labels,
    "propagate-labels": propagate_labels,
    "fine-tune": fine_tune,
    "train-classifier": train_classifier,
    "compare-groups": compare_groups,
    "find-markers": find_markers,
    "model-outcome": model_outcome,
    "find-programs": find_programs,
    "train-cellcnn": train_cellcnn,
    "adapt-model": adapt_model,
}


def run_demo(
    folder: Path, *, on_event: Tell = None, say: Callable[[str], None] = print
) -> tuple[list[tuple[Any, ...]], Path]:
    """Run every demo, save its files and each run under `folder`, and write one report. Returns table and page."""
    rows: list[tuple[Any, ...]] = [HEADER]
    runs: list[Run] = []
    story = Story.draw()
    story.write(folder / "sites")
    say(story.about)
    for name, play in DEMOS.items():
        say(f"{name} ...")
        began = time.perf_counter()
        with told_once():
            played, lines = play(story, on_event)
        runs += played
        rows += lines
        for run in played:
            save_run(run, folder / f"{name}-{run.study.mode}")
        say(f"{name}: {time.perf_counter() - began:.1f} s")
    measured = [("workflow", "what is measured")]
    measured += [(name, str(play.__doc__).partition("\n")[0]) for name, play in DEMOS.items()]
    tables = halves(rows) | {"What is measured alone, together, and with all cells in one place": measured}
    page = write_report(folder / "report.html", runs, title="Cloister demo", about=story.about, table=tables)
    return rows, page


@contextmanager
def told_once() -> Iterator[None]:
    """What runs warn of, each sentence once: some modes are played several times."""
    heard: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        before = len(heard)
        heard.add(record.getMessage())
        return len(heard) > before

    log = logging.getLogger("cloister")
    log.addFilter(is_new)
    try:
        yield
    finally:
        log.removeFilter(is_new)


def write_sites(folder: Path) -> list[Path]:
    """Write the demo's three sites as .h5ad files, to try the command line on."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {folder / f"{site}.h5ad": adata for site, adata in demo_data.demo_sites().items()}
    for path, adata in files.items():
        write_cells(adata, path)
    return list(files)
