"""Make a large file of simulated counts, a few thousand cells at a time: for benchmarks/million.py.

    python scripts/make_cells.py large.h5ad --cells 1000000          11 GB, some minutes
    python scripts/make_cells.py small.h5ad --cells 10000 --genes 2000 --per-cell 200

Counts are whole numbers in single precision, CSR, uncompressed; some 1,400 of 20,000 genes are seen in a cell. Cells
are of ten types with rates of their own, and of `--donors` donors. Memory does not grow with the number of cells.
With `--distinct`, so many cells are drawn and then repeated: as large a file, in a tenth of the time or less.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
from anndata.io import write_elem
from scipy import sparse

STEP = 500  # cells that are drawn at a time: what they take fits the processor's caches
TYPES = 10


def write_cells(
    path: Path,
    cells: int,
    genes: int = 20_000,
    per_cell: int = 1400,
    donors: int = 20,
    seed: int = 0,
    distinct: int | None = None,
) -> None:
    """Write `cells` simulated cells to an `.h5ad` file."""
    rng = np.random.default_rng(seed)
    shared = np.random.default_rng(2016)  # rates of genes are the same at every site
    rates = shared.lognormal(0, 1.6, genes) * np.exp(shared.normal(0, 0.5, (TYPES, genes)))
    for row in rates:  # so that so many genes are seen in a cell on average
        low, high = 0.0, 1e6
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if np.sum(1 - np.exp(-row * middle)) < per_cell else (low, middle)
        row *= low
    distinct = min(cells, distinct or cells)
    kinds = np.resize(rng.integers(TYPES, size=distinct), cells)
    with h5py.File(path, "w") as file:
        write_elem(file, "/", {})
        file.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
        obs = {"cell_type": pd.Categorical.from_codes(kinds, [f"type-{i}" for i in range(TYPES)])}
        obs["donor"] = pd.Categorical.from_codes(rng.integers(donors, size=cells), [f"d{i}" for i in range(donors)])
        write_elem(file, "obs", pd.DataFrame(obs, index=[f"c{i}" for i in range(cells)]))
        write_elem(file, "var", pd.DataFrame(index=[f"gene-{i}" for i in range(genes)]))
        for slot in ("obsm", "varm", "obsp", "varp", "layers", "uns"):
            write_elem(file, slot, {})
        _write_counts(file, kinds, rates.astype(np.float32), rng, distinct)


def _write_counts(
    file: h5py.File, kinds: np.ndarray, rates: np.ndarray, rng: np.random.Generator, distinct: int
) -> None:
    group = file.create_group("X")
    shape = np.array((len(kinds), rates.shape[1]))
    group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": shape})
    arrays = {
        name: group.create_dataset(name, (0,), dtype, chunks=(1 << 17,), maxshape=(None,))
        for name, dtype in (("data", np.float32), ("indices", np.int32))
    }
    ends, at, drawn = [np.zeros(1, np.int64)], 0, []
    for start in range(0, len(kinds), STEP):
        if start < distinct:
            block = draw(rates, kinds[start : start + STEP], rng)
        else:
            block = drawn[start // STEP % len(drawn)][: len(kinds) - start]
        if start < distinct < len(kinds):
            drawn.append(block)
        for name, array in arrays.items():
            array.resize((at + block.nnz,))
            array[at:] = getattr(block, name)
        ends.append(block.indptr[1:].astype(np.int64) + at)
        at += block.nnz
    group.create_dataset("indptr", data=np.concatenate(ends))


def draw(rates: np.ndarray, kinds: np.ndarray, rng: np.random.Generator) -> sparse.csr_matrix:
    """Counts of cells of these kinds: which genes are seen at all is drawn first, since most are not."""
    expected = rates[kinds] * rng.lognormal(0, 0.3, (len(kinds), 1)).astype(np.float32)
    seen = rng.random(expected.shape, dtype=np.float32) < -np.expm1(-expected)
    at = np.flatnonzero(seen)
    counts = 1 + rng.poisson(np.minimum(expected.ravel()[at], 200.0))
    ends = np.concatenate([[0], np.cumsum(np.count_nonzero(seen, axis=1))])
    genes = (at % seen.shape[1]).astype(np.int32)
    return sparse.csr_matrix((counts.astype(np.float32), genes, ends), shape=seen.shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--cells", type=int, required=True)
    parser.add_argument("--genes", type=int, default=20_000)
    parser.add_argument("--per-cell", type=int, default=1400, help="genes seen in a cell")
    parser.add_argument("--donors", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--distinct", type=int, help=f"cells that are drawn, a multiple of {STEP}; then they repeat")
    args = parser.parse_args()
    if args.distinct is not None and (args.distinct < STEP or args.distinct % STEP):
        parser.error(f"--distinct must be a multiple of {STEP}, found {args.distinct}")
    write_cells(args.file, args.cells, args.genes, args.per_cell, args.donors, args.seed, args.distinct)


if __name__ == "__main__":
    main()
