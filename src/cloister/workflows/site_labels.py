"""Labels of a site under the names that a study agreed on: its maps, applied to the columns that its steps read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cloister.cells.vocabulary import Rules, in_words, rename_labels
from cloister.study import Study

if TYPE_CHECKING:
    from anndata import AnnData

STORED = "labels"  # in adata.uns["cloister"]: column → name in the file → label in the study, as JSON


def rules_of(study: Study, own: Mapping[str, str] | None = None) -> Rules:
    """The rules of a study and of one site; raises `ParameterError` if they contradict each other."""
    ontology = study.ontology
    return Rules(own or {}, study.labels, str(ontology.get("version", "")), tuple(ontology.get("terms", ())))


def label_keys(study: Study) -> tuple[str, ...]:
    """Columns of `obs` with labels that any step of a study reads."""
    from cloister.workflows import check_plan

    keys = (getattr(check_plan(part)[1], "label_key", None) for part in study.parts)
    return tuple(dict.fromkeys(key for key in keys if key))


def use_study_labels(study: Study, adata: AnnData, own: Mapping[str, str] | None = None) -> list[str]:
    """Rename the labels of a site's cells by the site's and the study's rules; returns what was renamed, in words."""
    rules = rules_of(study, own)
    if not rules:
        return []
    changed = rename_labels(adata, label_keys(study), rules)
    if changed:
        adata.uns.setdefault("cloister", {})[STORED] = json.dumps(changed, ensure_ascii=False)
    return in_words(changed)
