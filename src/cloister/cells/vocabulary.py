"""Labels of several sites side by side, and the maps that make one vocabulary of them.

    found = compare_labels({"USZ": {"CD4 T cells": 210}, "basel": {"T_CD4": 190, "B": 40}})
    found.near           "T_CD4" and "CD4 T cells" are one label, because they consist of the same words
    found.single         labels that one site alone has
    found.suggested      label → label, for [labels] in the study; nothing is renamed unless somebody writes it there

`Rules` are what a site and a study wrote down. `rename_labels` applies them to a column of `obs` when cells are opened,
and keeps the original beside it. Rules apply in this order: the site's own map, the study's map, the Cell Ontology
(names and synonyms become the name of their term), the study's map once more, and the nearest of the study's terms that
includes the label.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cloister.cells.names import folded, label_words
from cloister.cells.ontology import cell_ontology, check_version
from cloister.errors import ParameterError

if TYPE_CHECKING:
    from anndata import AnnData

ALIKE = 0.88  # similarity of two names' letters from which one is taken for a slip of the pen
ORIGINAL = "_original"  # ends the name of the column that keeps what a site wrote


@dataclass(frozen=True)
class Near:
    """Names of two sites that seem to be one label."""

    name: str
    usual: str  # the spelling that more sites, or more cells, have
    why: str
    sure: bool  # same words or same term of the ontology; otherwise only similar letters


@dataclass(frozen=True)
class Deeper:
    """A label of one site that is a special case of another site's."""

    special: str
    general: str


@dataclass(frozen=True)
class Comparison:
    counts: Mapping[str, Mapping[str, int]]  # label → site → cells
    terms: Mapping[str, str]  # label → id in the Cell Ontology, where it has one
    near: tuple[Near, ...]
    single: Mapping[str, str]  # label → the one site that has it, under any spelling
    deeper: tuple[Deeper, ...]

    @property
    def suggested(self) -> dict[str, str]:
        """Label → label, as it could stand under [labels]."""
        same = {pair.name: pair.usual for pair in self.near if pair.sure}
        general = {pair.special: pair.general for pair in self.deeper}
        found: dict[str, str] = {}
        for name in (*same, *general):
            target, seen = name, {name}
            while (step := same.get(target, general.get(target))) is not None and step not in seen:
                target = step
                seen.add(step)
            if target != name:
                found[name] = target
        return found


def compare_labels(by_site: Mapping[str, Mapping[str, int]]) -> Comparison:
    """Put the labels of several sites side by side; arguments are site → label → cells."""
    cl = cell_ontology()
    names = sorted({name for own in by_site.values() for name in own})
    counts = {name: {site: own[name] for site, own in by_site.items() if name in own} for name in names}
    terms = {name: key for name in names if (key := cl.find(name)) is not None}
    near = tuple(_near(counts, terms))
    groups = {name: name for name in names} | {pair.name: pair.usual for pair in near}
    holders: dict[str, set[str]] = {}
    for name in names:
        holders.setdefault(groups[name], set()).update(counts[name])
    labelled = [site for site, own in by_site.items() if own]
    single = {
        name: next(iter(holders[groups[name]]))
        for name in names
        if len(labelled) > 1 and len(holders[groups[name]]) == 1
    }
    deeper = []
    for special, key in terms.items():
        above = [
            general
            for general, other in terms.items()
            if other != key and cl.includes(other, key) and not holders[groups[special]] >= holders[groups[general]]
        ]
        if above and groups[special] == special:
            nearest = min(above, key=lambda g: (cl.ancestors(key)[terms[g]], groups[g] != g, g))
            deeper.append(Deeper(special, groups[nearest]))
    return Comparison(counts, terms, near, single, tuple(deeper))


def _near(counts: Mapping[str, Mapping[str, int]], terms: Mapping[str, str]) -> Iterable[Near]:
    """Pairs of names that seem to be one label: never two names that one site uses side by side."""
    order = sorted(counts, key=lambda name: (-len(counts[name]), -sum(counts[name].values()), name))
    words = {name: label_words(name) for name in order}
    usual: list[str] = []
    for name in order:
        pair = None
        for other in usual:
            if counts[name].keys() & counts[other].keys():
                continue
            if folded(name) == folded(other):
                pair = Near(name, other, "differ by blanks or case only", sure=True)
            elif words[name] == words[other]:
                pair = Near(name, other, "consist of the same words", sure=True)
            elif name in terms and terms[name] == terms.get(other):
                pair = Near(name, other, f"are both {terms[name]} in the Cell Ontology", sure=True)
            elif _similar(words[name], words[other]) and (terms.get(name) is None or terms.get(other) is None):
                pair = Near(name, other, "their spelling is similar", sure=False)
            if pair is not None:
                break
        if pair is None:
            usual.append(name)
        else:
            yield pair


def _similar(one: frozenset[str], other: frozenset[str]) -> bool:
    """Whether words differ by letters only, as a slip of the pen does; CD4 and CD8 differ by more."""
    if {w for w in one if not w.isalpha()} != {w for w in other if not w.isalpha()}:
        return False
    a, b = (" ".join(sorted(w for w in words if w.isalpha())) for words in (one, other))
    return len(a) >= 6 and len(b) >= 6 and difflib.SequenceMatcher(None, a, b).ratio() >= ALIKE


# ---- maps ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rules:
    """What names mean: a site's own map, the map and the terms that a study agreed on."""

    own: Mapping[str, str] = field(default_factory=dict)
    agreed: Mapping[str, str] = field(default_factory=dict)
    version: str = ""  # of the Cell Ontology; none: names stay as they are
    terms: tuple[str, ...] = ()  # names or ids; labels become the nearest of these that includes them

    def __post_init__(self) -> None:
        check_map(self.own, "site.toml: [labels]")
        check_map(self.agreed, "[labels]")
        if self.version:
            check_version(self.version)
        elif self.terms:
            raise ParameterError("[ontology] terms need a version, as: version = " + repr(cell_ontology().version))
        for term in self.terms:
            if cell_ontology().find(term) is None:
                raise ParameterError(f"[ontology] terms: {term!r} is not a term of the Cell Ontology {self.version}")

    def __bool__(self) -> bool:
        return bool(self.own or self.agreed or self.version)

    def apply(self, name: str) -> str:
        """The label that a name stands for."""
        name = _mapped(_mapped(name, self.own), self.agreed)
        if not self.version:
            return name
        cl = cell_ontology()
        if (key := cl.find(name)) is not None:
            name = _mapped(cl.name(key), self.agreed)
            key = cl.find(name)
        if self.terms and key is not None:
            above = cl.nearest(key, [found for term in self.terms if (found := cl.find(term)) is not None])
            return name if above is None else cl.name(above)
        return name


def check_map(labels: Mapping[str, Any], where: str) -> None:
    """Raise `ParameterError` unless a map gives every name one label, which no other line renames again."""
    for name, label in labels.items():
        if not isinstance(label, str) or not label.strip() or not name.strip():
            raise ParameterError(f'{where} holds lines as: "T_CD4" = "CD4 T cells"; found {name!r} = {label!r}')
        if label in labels and labels[label] != label:
            raise ParameterError(
                f"{where} renames {name!r} to {label!r} and {label!r} to {labels[label]!r}; write one name for both"
            )


def _mapped(name: str, labels: Mapping[str, str]) -> str:
    if name in labels:
        return labels[name]
    if name in labels.values():
        return name
    alike = {folded(key): label for key, label in labels.items()}
    return alike.get(folded(name), name)


def rename_labels(adata: AnnData, keys: Iterable[str], rules: Rules) -> dict[str, dict[str, str]]:
    """Apply rules to columns of `obs`; what a site wrote stays in a column `..._original`.

    Returns column → name → label, of names that changed. Columns that are missing are left to the workflow's check.
    """
    changed: dict[str, dict[str, str]] = {}
    for key in dict.fromkeys(keys):
        if not rules or key not in adata.obs:
            continue
        column = adata.obs[key]
        new = {name: label for name in column.dropna().unique() if (label := rules.apply(str(name))) != str(name)}
        if not new:
            continue
        if f"{key}{ORIGINAL}" not in adata.obs:
            adata.obs[f"{key}{ORIGINAL}"] = column.copy()
        texts = column.astype(object).where(column.notna(), None)
        adata.obs[key] = texts.map(lambda x, new=new: new.get(x, x)).astype("category")
        changed[key] = {str(name): label for name, label in sorted(new.items(), key=lambda item: str(item[0]))}
    return changed


def in_words(changed: Mapping[str, Mapping[str, str]]) -> list[str]:
    """One line per column whose labels were renamed."""
    return [
        f"obs['{key}']: " + ", ".join(f"'{name}' → '{label}'" for name, label in names.items()) + f"; the original is"
        f" in obs['{key}{ORIGINAL}']"
        for key, names in changed.items()
    ]
