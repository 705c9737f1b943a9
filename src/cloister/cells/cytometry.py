"""A folder of `.fcs` files as one table of cells: which donor each file is of, and channels matched by marker.

    donors.csv      one line per file: `file`, `donor`, and what else is known of the donor, such as `condition`
    *.fcs           the files that it names
    markers.txt     optional: the markers to use, one a line; without it all that have a name of their own

Panels spell a marker in many ways: `CD57`, `176Yb_CD57`, `CD57(Yb176)Dd`, `HLA DR` and `HLA-DR`. What names an isotope
is left out, and letters and digits alone are compared.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cloister.cells.plain_files import read_fcs
from cloister.errors import DataError

if TYPE_CHECKING:
    from anndata import AnnData

TABLE, MARKERS = "donors.csv", "markers.txt"
METALS = "Ag|Ba|Bi|Cd|Ce|Cs|Dy|Er|Eu|Gd|Ho|I|In|Ir|La|Lu|Nd|Pb|Pd|Pr|Pt|Rh|Ru|Sm|Sn|Tb|Tm|Xe|Y|Yb"
ISOTOPE = re.compile(rf"(?:\d{{2,3}}(?:{METALS})|(?:{METALS})\d{{2,3}})(?:D[id])?|D[id]")


def is_folder(path: Path) -> bool:
    """With the table of donors, or with files that lack one."""
    return path.is_dir() and ((path / TABLE).is_file() or any(path.glob("*.fcs")))


def read_folder(path: Path) -> AnnData:
    """All files that `donors.csv` names, one after the other; its other columns go to `obs`."""
    import anndata
    import pandas as pd

    if not (path / TABLE).is_file():
        raise DataError(f"{path} has .fcs files but no {TABLE}; write one with the columns file, donor and condition.")
    rows = donor_table(path / TABLE)
    wanted = wanted_markers(path / MARKERS)
    parts: list[AnnData] = []
    first: list[str] = []
    for row in rows:
        part = by_marker(read_file(path, row["file"]), path / row["file"], wanted)
        first = first or [str(v) for v in part.var_names]
        columns = {key_of(str(v)): i for i, v in enumerate(part.var_names)}
        if lacking := [m for m in first if key_of(m) not in columns]:
            raise DataError(f"{path / row['file']} has no marker '{lacking[0]}', which {rows[0]['file']} has; {NEXT}")
        if more := [str(v) for v in part.var_names if key_of(str(v)) not in {key_of(m) for m in first}]:
            raise DataError(f"{path / row['file']} has the marker '{more[0]}', which {rows[0]['file']} lacks; {NEXT}")
        X = np.asarray(part.X)[:, [columns[key_of(m)] for m in first]]
        stem = row["file"].removesuffix(".fcs")
        obs = pd.DataFrame({k: v for k, v in row.items() if k != "file"}, index=[f"{stem}-{i}" for i in range(len(X))])
        parts.append(anndata.AnnData(X, obs=obs, var=pd.DataFrame(index=first)))
    whole = anndata.concat(parts)
    for name in whole.obs:
        whole.obs[name] = whole.obs[name].astype("category")
    return whole


NEXT = f"list the markers that all files have in {MARKERS}, one a line."


def donor_table(path: Path) -> list[dict[str, str]]:
    """The lines of `donors.csv`: every one names a file and its donor, no file twice."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header, *lines = [[entry.strip() for entry in row] for row in csv.reader(file) if row] or [[]]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} must be text in UTF-8, separated by commas; export it again.") from error
    if not lines or not {"file", "donor"} <= set(header) or len(set(header)) < len(header):
        raise DataError(f"{path} needs the columns 'file' and 'donor', each once, and a line for every file.")
    seen: set[str] = set()
    rows = []
    for line, entries in enumerate(lines, start=2):
        if len(entries) != len(header) or not all(entries):
            raise DataError(f"{path}: line {line} has an empty or surplus entry; every column needs one.")
        row = dict(zip(header, entries, strict=True))
        if row["file"] in seen:
            raise DataError(f"{path}: line {line} names {row['file']} again; a file is of one donor.")
        if Path(row["file"]).name != row["file"] or not row["file"].lower().endswith(".fcs"):
            raise DataError(f"{path}: line {line} must name an .fcs file of this folder, found '{row['file']}'.")
        seen.add(row["file"])
        rows.append(row)
    return rows


def wanted_markers(path: Path) -> list[str]:
    if not path.is_file():
        return []
    return [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]


def read_file(folder: Path, name: str) -> AnnData:
    if not (folder / name).is_file():
        raise DataError(f"{folder / name} does not exist, but {TABLE} names it; copy it there or remove the line.")
    try:
        return read_fcs(folder / name)
    except DataError:
        raise
    except (ValueError, OSError, KeyError, EOFError, IndexError) as error:
        raise DataError(f"{folder / name} cannot be read as FCS: it is damaged or cut short; copy it again.") from error


def marker_name(label: str, channel: str) -> str:
    """The marker in what a cytometer wrote beside a channel, without isotopes; '' where it only repeats the channel."""
    words = [w for w in re.split(r"[\s_()]+", label) if w]
    kept = [w for w in words if not ISOTOPE.fullmatch(w)]
    name = "_".join(kept)
    return "" if key_of(name) in ("", key_of(channel)) else name


def key_of(marker: str) -> str:
    """What is compared: letters and digits."""
    return re.sub(r"[^a-z0-9]", "", marker.lower())


def by_marker(adata: AnnData, path: Path, wanted: Sequence[str] = ()) -> AnnData:
    """The channels that measure a marker, under its name; with `wanted`, those, in that order."""
    found: dict[str, tuple[int, str]] = {}
    for i, (label, channel) in enumerate(zip(adata.var["marker"], adata.var["channel"], strict=True)):
        name = marker_name(str(label), str(channel)) or (str(channel) if wanted else "")
        if not name:
            continue
        if key_of(name) in found:
            raise DataError(f"{path} has two channels for the marker '{name}'; rename one.")
        found[key_of(name)] = i, name
    if missing := [m for m in wanted if key_of(m) not in found]:
        raise DataError(f"{path} has no marker '{missing[0]}', which {MARKERS} lists; it has {_some(found)}.")
    if not found:
        raise DataError(f"{path} names no marker beside its channels; list channels to use in {MARKERS}.")
    chosen = [found[key_of(m)][0] for m in wanted] or [i for i, _ in found.values()]
    made = adata[:, chosen].copy()
    made.var_names = list(wanted) or [name for _, name in found.values()]
    return made


def _some(found: dict[str, tuple[int, str]]) -> str:
    names = [name for _, name in found.values()]
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
