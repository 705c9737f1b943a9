"""Studies with different label vocabularies, from their files to one classifier, without renaming by hand.

Four ways to name labels: as the files have them, by the names of the Cell Ontology (`[ontology] version`), with the
merges that `cloister check` suggests besides (`[labels]`), and as people harmonised them. Each site trains on half of
its cells; the other half is labelled by the model.

same       held-out cells whose label is the one that their own site gave them, under the same way of naming
by hand    the same after both are translated to the labels that people harmonised: each label stands for the most
           frequent of these among the cells of training; accuracy, and balanced accuracy

    python benchmarks/label_vocabularies.py [--data FOLDER] [--cells N]
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path

import numpy as np

from cloister.cells.ontology import accuracy_by_distance, cell_ontology
from cloister.cells.tables import read_cells
from cloister.cells.vocabulary import Rules, compare_labels
from cloister.rehearsal.rehearsal import plan, rehearse

OPTIONS = {
    "l2": 0.003,
    "validation": 0.0,
    "n_top_genes": 1000,
    "library_key": "n_counts_all_genes",
    "min_label_cells": 5,
}
SETS = {
    "blood": (
        "pbmc_federation.h5ad",
        "batch",
        ("pbmc3k", "kang_ctrl", "zheng_sorted"),
        "cell_type_original",
        "cell_type",
    ),
    "lung": ("lung_ts_vs_hlca.h5ad", "study", ("TabulaSapiens", "HLCA_Travaglini"), "cell_type", "cell_type_coarse"),
}


def sites_of(folder, name, most, rng):
    file, column, batches, own, by_hand = SETS[name]
    whole = read_cells(folder / file)
    train, held = {}, {}
    for batch in batches:
        at = np.flatnonzero((whole.obs[column] == batch).to_numpy())
        at = rng.permutation(at)[:most]
        adata = whole[at].copy()
        adata.obs["own"] = adata.obs[own].astype(str)
        adata.obs["by_hand"] = adata.obs[by_hand].astype(str)
        site = batch.replace("_", "-")
        train[site], held[site] = adata[::2].copy(), adata[1::2].copy()
    return train, held


def balanced(truth, called):
    return float(np.mean([np.mean(called[truth == name] == name) for name in np.unique(truth)]))


def measure(name, way, train, held):
    version = cell_ontology().version
    key = "by_hand" if way == "by hand" else "own"
    counts = {site: {str(k): int(n) for k, n in a.obs["own"].value_counts().items()} for site, a in train.items()}
    agreed = compare_labels(counts).suggested if way == "ontology, merged" else {}
    ontology = {"version": version} if way.startswith("ontology") else {}
    names = sorted({str(x) for a in train.values() for x in a.obs[key]}) if not ontology else ()
    options = {**OPTIONS, "label_key": key, **({"labels": names} if way == "as they are" else {})}
    study = dataclasses.replace(plan("train-classifier", train, options=options), labels=agreed, ontology=ontology)
    begin = time.process_time()
    run = rehearse(study, {site: a.copy() for site, a in train.items()})
    seconds = time.process_time() - begin
    rules = Rules(agreed=agreed, version=version if ontology else "")
    seen, truth, hand, called = {}, [], [], []
    for adata in train.values():
        for own, by_hand in zip(adata.obs[key], adata.obs["by_hand"], strict=True):
            seen.setdefault(rules.apply(own), []).append(by_hand)
    usual = {label: max(sorted(set(found)), key=found.count) for label, found in seen.items()}
    for adata in held.values():
        called += [str(x) for x in run.model.predict(adata, library_key=OPTIONS["library_key"], unknown=False)]
        truth += [rules.apply(x) for x in adata.obs[key]]
        hand += list(adata.obs["by_hand"])
    truth, hand, called = (np.array(x, dtype=object) for x in (truth, hand, called))
    translated = np.array([usual[x] for x in called], dtype=object)
    row = [name, way, str(len(set(truth))), f"{np.mean(truth == called):.3f}", f"{np.mean(translated == hand):.3f}"]
    row += [f"{balanced(hand, translated):.3f}", f"{seconds:.0f}"]
    near = accuracy_by_distance(list(truth), list(called)) if ontology else {}
    return row, near


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared/data/scrna")
    parser.add_argument("--cells", type=int, default=2600, help="cells of each site, at most")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    most = 300 if args.quick else args.cells
    print(f"{'set':6} {'labels':18} {'types':>5} {'same':>6} {'by hand':>8} {'balanced':>9} {'CPU-s':>6}")
    for name in SETS:
        train, held = sites_of(args.data, name, most, np.random.default_rng(37))
        for way in ("as they are", "ontology", "ontology, merged", "by hand"):
            row, near = measure(name, way, train, held)
            print(f"{row[0]:6} {row[1]:18} {row[2]:>5} {row[3]:>6} {row[4]:>8} {row[5]:>9} {row[6]:>6}", flush=True)
            if near:
                print("       by distance: " + ", ".join(f"{key} {value:.3f}" for key, value in near.items()))


if __name__ == "__main__":
    main()
