"""The Cell Ontology: names and synonyms of cell types as ids, and how types relate.

    cl = cell_ontology()
    cl.find("CD4 T cells")                          "CL:0000624"
    cl.common_ancestor(["CL:0000624", "CL:0000625"])     the nearest type that includes both
    cl.distance("CL:0000624", "CL:0000084")         is-a steps from one to the other by way of a common type

The table comes with the package (`data/cell_ontology.json.gz`, one release; NOTICE names source and licence). A study
fixes the release it means under `[ontology] version`. A name is found if it is an id, a name or an exact synonym of the
ontology, or consists of the same words (`names.label_words`); a name that fits several terms is not found.
"""

from __future__ import annotations

import functools
import gzip
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources

from cloister.cells.names import folded, label_words
from cloister.errors import DataError, ParameterError

SPECIES = ("(Mmus)", "(Hsap)")  # ends of the names of terms of one species
HUMAN = ", human"  # ends the names of a few terms whose like without it exists too
AMBIGUOUS = frozenset({"alpha", "beta", "gamma", "delta", "epsilon"})  # of which organ they are, the name does not tell
# What laboratories write, and the ontology has under other words; by the words that are left of a name.
USUAL = {
    "cd16 monocyte": "CL:0000875",
    "cd14 cd16 monocyte": "CL:0002397",
    "cd25 cd4 regulatory t": "CL:0000792",
    "cd4 regulatory t": "CL:0000792",
    "cytotoxic naive t": "CL:0000900",
    "cd19 b": "CL:0001201",
    "cd56 killer natural": "CL:0000623",
    "killer natural t": "CL:0000814",
    "mait": "CL:0000940",
    "type 1 alveolar": "CL:0002062",
    "type 2 alveolar": "CL:0002063",
    "gammadelta t": "CL:0000798",
    "proliferating t": "CL:0000084",
}


@dataclass(frozen=True)
class Term:
    id: str
    name: str
    synonyms: tuple[str, ...]
    parents: tuple[str, ...]


@dataclass(frozen=True)
class CellOntology:
    """The terms of one release."""

    version: str
    terms: Mapping[str, Term]
    replaced: Mapping[str, str] = field(default_factory=dict)  # ids that are no longer used → their successors

    @functools.cached_property
    def _by_name(self) -> dict[str, str]:
        """Folded name or synonym → id; a synonym of several terms stands for none, a name for its own."""
        synonyms: dict[str, set[str]] = {}
        for term in self.terms.values():
            for synonym in term.synonyms:
                synonyms.setdefault(folded(synonym), set()).add(term.id)
        known = {name: next(iter(ids)) for name, ids in synonyms.items() if len(ids) == 1}
        return known | {folded(term.name): term.id for term in self.terms.values()}

    @functools.cached_property
    def _by_words(self) -> dict[frozenset[str], str]:
        """Words of a name or synonym → id; of several terms the one that includes all others, if there is one."""
        names: dict[frozenset[str], set[str]] = {}
        synonyms: dict[frozenset[str], set[str]] = {}
        for term in self.terms.values():
            if term.name.endswith(SPECIES):
                continue
            names.setdefault(label_words(term.name), set()).add(term.id)
            for synonym in term.synonyms:
                synonyms.setdefault(label_words(synonym), set()).add(term.id)
        known: dict[frozenset[str], str] = {}
        for words, ids in (*synonyms.items(), *names.items()):
            known.pop(words, None)
            if top := [key for key in ids if all(self.includes(key, other) for other in ids)]:
                known[words] = top[0]
        usual = {label_words(words): key for words, key in USUAL.items() if key in self.terms}
        return {words: key for words, key in (known | usual).items() if not words <= AMBIGUOUS}

    def find(self, name: str) -> str | None:
        """The id of the term that a label means; none if there is none or more than one."""
        name = name.strip()
        key = name.upper().replace("_", ":") if name[:3].upper() in ("CL:", "CL_") else ""
        key = self.replaced.get(key, key)
        if not key:
            key = self._by_name.get(folded(name)) or self._by_words.get(label_words(name)) or ""
        if key not in self.terms:
            return None
        general = self.terms[key].name.removesuffix(HUMAN)  # the species is no part of a label here
        return self._by_name.get(folded(general), key)

    def name(self, key: str) -> str:
        return self._term(key).name

    def exact(self, name: str) -> str | None:
        """The id of a term with exactly this name."""
        key = self._by_name.get(folded(name))
        return key if key is not None and self.terms[key].name == name else None

    def ancestors(self, key: str) -> dict[str, int]:
        """Ids of all types that include this one, and the fewest is-a steps to each; itself with 0."""
        steps, edge, depth = {self._term(key).id: 0}, [key], 0
        while edge:
            depth += 1
            edge = [p for k in edge for p in self.terms[k].parents if p in self.terms and p not in steps]
            steps |= dict.fromkeys(edge, depth)
        return steps

    def includes(self, general: str, special: str) -> bool:
        """Whether every cell of the second type is one of the first."""
        return general in self.ancestors(special)

    def common_ancestor(self, keys: Iterable[str]) -> str:
        """The type that includes all of these with the fewest steps in all; of several the first by id."""
        every = [self.ancestors(key) for key in keys]
        if not every:
            raise DataError("no cell type was given; name at least one")
        shared = set(every[0]).intersection(*every[1:])
        if not shared:
            raise DataError("these cell types have no type in common")
        return min(shared, key=lambda key: (sum(steps[key] for steps in every), key))

    def distance(self, one: str, other: str) -> int:
        """Is-a steps from one type to the other by way of a type that includes both."""
        a, b = self.ancestors(one), self.ancestors(other)
        return min((a[key] + b[key] for key in a.keys() & b.keys()), default=len(self.terms))

    def nearest(self, key: str, among: Iterable[str]) -> str | None:
        """Of some types the one that includes this type in the fewest steps; none if no one does."""
        steps = self.ancestors(key)
        found = [k for k in among if k in steps]
        return min(found, key=lambda k: (steps[k], k)) if found else None

    def _term(self, key: str) -> Term:
        if key not in self.terms:
            raise DataError(f"'{key}' is not a term of the Cell Ontology {self.version}")
        return self.terms[key]


@functools.cache
def cell_ontology() -> CellOntology:
    """The release of the Cell Ontology that comes with the package."""
    packed = (resources.files("cloister") / "data" / "cell_ontology.json.gz").read_bytes()
    raw = json.loads(gzip.decompress(packed))
    terms = {key: Term(key, name, tuple(more), tuple(up)) for key, (name, more, up) in raw["terms"].items()}
    return CellOntology(raw["version"], terms, raw["replaced"])


def check_version(version: str) -> None:
    """Raise `ParameterError` unless the release that a study fixes is the one of this installation."""
    if version != (own := cell_ontology().version):
        raise ParameterError(
            f"[ontology] version is {version!r}, and this version of Cloister comes with the Cell Ontology {own!r};"
            " agree on one version of Cloister, or change the study"
        )


def accuracy_by_distance(
    truth: Sequence[str | None], called: Sequence[str | None], ontology: CellOntology | None = None
) -> dict[str, float]:
    """Fractions of cells by the distance between their label and the one they were given.

    Keys are `"0"`, `"1"`, ... in is-a steps, `"above"` for a type that includes the true one (in any number of steps:
    right, but less specific), `"unknown"` for cells without a call, and `"no term"` where one of both is not in the
    ontology and the names differ. Cells without a true label do not count. A call above the truth counts under both
    its number and `"above"`.
    """
    cl = ontology or cell_ontology()
    pairs = Counter(
        (str(a), None if b is None or b != b else str(b))
        for a, b in zip(truth, called, strict=True)
        if a is not None and a == a
    )
    total, counts = sum(pairs.values()), Counter[str]()
    for (a, b), n in pairs.items():
        if b is None or folded(b) == "unknown":
            counts["unknown"] += n
            continue
        one, other = cl.find(a), cl.find(b)
        if one is None or other is None:
            counts["0" if folded(a) == folded(b) else "no term"] += n
            continue
        counts[str(cl.distance(one, other))] += n
        if one != other and cl.includes(other, one):
            counts["above"] += n
    order = sorted(counts, key=lambda key: (not key.isdigit(), int(key) if key.isdigit() else 0, key))
    return {key: counts[key] / total for key in order} if total else {}
