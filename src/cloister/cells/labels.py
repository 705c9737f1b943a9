"""Labels of cells, with what goes with them: coarser levels of an atlas, ontology ids.

    labels_of(adata, "cell_type", ("level_1", "ontology_id"))     "T cell ‹level_1=Immune · ontology_id=CL:0000084›"
    write_labels(adata, "mapped", labels)                         obs["mapped"], obs["mapped_level_1"], ...

A label and its levels travel as one name, so every protocol and model that knows names of labels carries them along.
Two sites that give one label different levels have two labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cloister.arrays import Array
from cloister.cells.names import folded
from cloister.cells.ontology import cell_ontology
from cloister.cells.values import listed
from cloister.errors import DataError

if TYPE_CHECKING:
    from anndata import AnnData

ID = "ontology_id"  # ends the name of the column with the ids of labels in the Cell Ontology
BEGIN, BETWEEN, END = " ‹", " · ", "›"  # of what goes with a label


def check_labels(adata: AnnData, label_key: str) -> None:
    """Raise a `DataError` unless a column holds at least one label."""
    if label_key not in adata.obs:
        raise DataError(
            f"adata.obs[{label_key!r}] is missing; there is {listed(adata.obs)}. Pass one of these as label_key=."
        )
    if adata.obs[label_key].isna().all():
        raise DataError(f"adata.obs[{label_key!r}] holds no label; at least one cell needs one.")


def labels_of(adata: AnnData, label_key: str, levels: Sequence[str] = ()) -> tuple[str | None, ...]:
    """The label of every cell with its levels, `None` where there is none; a missing column is one without labels."""
    if label_key not in adata.obs:
        return (None,) * int(adata.n_obs)
    column = adata.obs[label_key]
    codes, names = column.astype("object").where(column.notna(), None).factorize()  # a missing label has the code -1
    full = [str(name) for name in names]
    if levels:
        full = [_with_levels(adata, label_key, name, codes == i, levels) for i, name in enumerate(full)]
    return tuple(None if code < 0 else full[code] for code in codes)


def _with_levels(adata: AnnData, label_key: str, name: str, cells: Array, levels: Sequence[str]) -> str:
    parts = []
    for level in levels:
        if level not in adata.obs:
            raise DataError(f"adata.obs[{level!r}] is missing; there is {listed(adata.obs)}. Pass others as levels=.")
        found = sorted({str(x) for x in adata.obs[level][cells].dropna().unique()})
        if len(found) > 1:
            raise DataError(
                f"adata.obs[{level!r}] holds {len(found)} values for the label '{name}' in adata.obs[{label_key!r}]; a"
                " label has one: name the finest column with label_key=."
            )
        parts += [f"{level}={found[0]}"] if found else []
    for text in (name, *parts):
        if any(mark in text for mark in (BEGIN, BETWEEN, END)):
            raise DataError(f"'{text}' holds '{BEGIN.strip()}', '{END}' or '{BETWEEN}', which mark levels; rename it.")
    return f"{name}{BEGIN}{BETWEEN.join(parts)}{END}" if parts else name


def split_label(label: str) -> tuple[str, dict[str, str]]:
    """A label's own name, and level → value."""
    if not label.endswith(END) or BEGIN not in label:
        return label, {}
    name, _, rest = label.removesuffix(END).partition(BEGIN)
    return name, dict(part.partition("=")[::2] for part in rest.split(BETWEEN))


def write_labels(
    adata: AnnData,
    key_added: str,
    labels: Sequence[str | None] | Array,
    share: npt.ArrayLike | None = None,
    *,
    share_name: str = "share",
) -> None:
    """Write one label per cell to `adata.obs[key_added]`, missing ones as `None` or NaN.

    `share`, how sure the label is, goes to `adata.obs[f"{key_added}_{share_name}"]`, and what goes with a label to
    `adata.obs[f"{key_added}_{level}"]`. If all labels but `unknown` are names of the Cell Ontology, their ids go to
    `adata.obs[f"{key_added}_ontology_id"]`.
    """
    import pandas as pd

    shares = None if share is None else np.asarray(share, dtype=np.float64)
    for name, column in (("labels", np.asarray(labels, dtype=object)), ("shares", shares)):
        if column is not None and column.shape != (adata.n_obs,):
            raise DataError(f"Expected {adata.n_obs} {name}, one per cell, found shape {column.shape}.")
    made = pd.Categorical(labels)
    parts = [split_label(str(label)) for label in made.categories]
    if any(levels for _, levels in parts):
        for level in dict.fromkeys(level for _, levels in parts for level in levels):
            adata.obs[f"{key_added}_{level}"] = _of_codes(made.codes, [levels.get(level) for _, levels in parts])
        made = _of_codes(made.codes, [name for name, _ in parts])
    adata.obs[key_added] = made
    ids = [term_id(name) for name, _ in parts]
    if any(ids) and all(key or folded(name) == "unknown" for key, (name, _) in zip(ids, parts, strict=True)):
        adata.obs[f"{key_added}_{ID}"] = _of_codes(pd.Categorical(labels).codes, ids)
    if shares is not None:
        adata.obs[f"{key_added}_{share_name}"] = shares


def term_id(label: str) -> str | None:
    """The id of a label that is, letter by letter, the name of a term of the Cell Ontology."""
    return cell_ontology().exact(label)


def _of_codes(codes: Array, values: Sequence[str | None]) -> npt.ArrayLike:
    import pandas as pd

    made: npt.ArrayLike = pd.Categorical(np.array([*values, None], dtype=object)[codes])  # the code -1 is the last
    return made
