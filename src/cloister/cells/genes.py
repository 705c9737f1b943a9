"""Gene names: Ensembl ids or symbols, and one order of genes for every site.

An Ensembl id is compared without its version (`ENSG00000141510.18` is `ENSG00000141510`). Symbols are
compared as they are written, since human `CD3E` and mouse `Cd3e` differ in nothing else. Where a file lacks the kind of
name that a study uses, a table that comes with the package translates it (GENCODE, human and mouse, with the symbols
that human genes had before; `data/genes.json.gz`, NOTICE names its sources).
"""

from __future__ import annotations

import functools
import gzip
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from cloister.arrays import Index
from cloister.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

LOG = logging.getLogger("cloister")
FEW = 10  # sites that share less than one in so many genes of the smallest list measure different things
LEAST = (
    200  # genes in common that expression data need; not asked of panels, where every site has fewer than twice that
)
TRANSLATED = 0.5  # fraction of a file's genes that the table must know before their names are translated
GeneIdKind = Literal["ensembl", "symbol", "mixed"]

# Columns of `adata.var` in which CELLxGENE, 10x and scanpy users keep the other kind of name.
NAME_COLUMNS = (
    *("gene_symbol", "gene_symbols", "feature_name", "gene_name", "gene_names", "symbol"),
    *("gene_id", "gene_ids", "ensembl_id", "ensembl_gene_id", "ensembl", "feature_id"),
)
_ENSEMBL = re.compile(r"(ENS[A-Z]{0,6}G\d{11})(?:\.\d+)?(_PAR_Y)?", re.ASCII)
_WORDS = {"ensembl": "Ensembl ids", "symbol": "symbols", "mixed": "Ensembl ids and symbols side by side"}


class FewGenes(DataError):
    """Too few genes in common; `site` is the one to ask."""

    def __init__(self, text: str, site: str) -> None:
        super().__init__(text)
        self.site = site


def plain_name(name: str) -> str:
    """Return the name as it is compared: no spaces around it, no version after an Ensembl id."""
    name = name.strip()
    ensembl = _ENSEMBL.fullmatch(name) if name.startswith("ENS") else None
    return ensembl[1] + (ensembl[2] or "") if ensembl else name


def gene_id_kind(names: Iterable[str]) -> GeneIdKind:
    """Tell Ensembl ids from symbols; `mixed` where neither makes up nine tenths of the names."""
    is_ensembl = [_ENSEMBL.fullmatch(str(name).strip()) is not None for name in names]
    share = sum(is_ensembl) / max(1, len(is_ensembl))
    return "ensembl" if share >= 0.9 else "symbol" if share <= 0.1 else "mixed"


class GeneTable(NamedTuple):
    """Symbols and Ensembl ids of one organism."""

    version: str
    by_symbol: dict[str, str]
    by_id: dict[str, str]
    previous: dict[str, str]  # symbol that a gene had → the one it has


@functools.cache
def gene_tables() -> dict[str, GeneTable]:
    """Organism → its table."""
    raw = json.loads(gzip.decompress((resources.files("cloister") / "data" / "genes.json.gz").read_bytes()))
    tables = {}
    for organism, packed in raw.items():
        ids = [f"{packed['prefix']}{number:011d}" for number in np.cumsum(packed["steps"]).tolist()]
        symbols = packed["symbols"].split("\n")
        by_symbol, by_id = dict(zip(symbols, ids, strict=True)), dict(zip(ids, symbols, strict=True))
        previous = dict(line.split(" ") for line in packed["previous"].split("\n") if line)
        tables[organism] = GeneTable(packed["version"], by_symbol, by_id, previous)
    return tables


def organism_of(names: Iterable[str]) -> str | None:
    """`human` or `mouse`, by the Ensembl ids or the case of the symbols; none where neither is clear."""
    plain = [plain_name(str(name)) for name in names]
    ids = [name for name in plain if _ENSEMBL.fullmatch(name)]
    mouse = sum(name.startswith("ENSMUSG") for name in ids)
    human = sum(name.startswith("ENSG") for name in ids)
    symbols = [name for name in plain if not _ENSEMBL.fullmatch(name) and sum(map(str.isalpha, name)) > 1]
    upper = [name == name.upper() or "orf" in name for name in symbols]
    mouse += sum(name[0].isupper() and not up for name, up in zip(symbols, upper, strict=True))
    human += sum(upper)
    enough = 0.8 * max(1, len(ids) + len(symbols))
    return "human" if human >= enough else "mouse" if mouse >= enough else None


def translated(names: Sequence[str], kind: GeneIdKind) -> list[str] | None:
    """The names in one kind by the table of their organism; a gene that it lacks, or names twice, keeps its name.

    None if the table knows fewer than `TRANSLATED` of the names.
    """
    plain = [plain_name(str(name)) for name in names]
    table = gene_tables()[organism_of(plain) or "human"]
    known = [_in_table(name, kind, table) for name in plain]
    if sum(name is not None for name in known) < TRANSLATED * len(plain):
        return None
    return _without_clashes(plain, known)


def readable(names: Sequence[str]) -> list[str]:
    """Symbols of Ensembl ids, for people to read; all other names as they are."""
    found = translated(names, "symbol") if len(names) and gene_id_kind(names) == "ensembl" else None
    return list(map(str, names)) if found is None else found


def with_symbols(table: pd.DataFrame) -> pd.DataFrame:
    """The table with a column `symbol` after `gene`, where genes are Ensembl ids; else the table."""
    genes = table["gene"].astype(str).unique().tolist()
    symbols = dict(zip(genes, readable(genes), strict=True))
    if all(gene == symbol for gene, symbol in symbols.items()):
        return table
    table = table.copy()
    table.insert(table.columns.get_loc("gene") + 1, "symbol", table["gene"].astype(str).map(symbols))
    return table


def for_people(table: pd.DataFrame) -> pd.DataFrame:
    """The table with symbols in place of genes, where it has both: for figures."""
    return table.assign(gene=table["symbol"]) if "symbol" in table else table


def current_symbols(names: Sequence[str]) -> list[str]:
    """The names with symbols that human genes had before replaced by those they have; all others as they are."""
    plain = [plain_name(str(name)) for name in names]
    table = gene_tables()["human"]
    return _without_clashes(plain, [table.previous.get(name) for name in plain])


def _in_table(name: str, kind: GeneIdKind, table: GeneTable) -> str | None:
    symbol = table.by_id.get(name, table.previous.get(name, name))
    return symbol if symbol in table.by_symbol and kind == "symbol" else table.by_symbol.get(symbol)


def _without_clashes(plain: Sequence[str], new: Sequence[str | None]) -> list[str]:
    """New names, but the old one of a gene without a new one, or whose new name another gene has too."""
    counts = Counter(old if name is None else name for old, name in zip(plain, new, strict=True))
    return [old if name is None or counts[name] > 1 else name for old, name in zip(plain, new, strict=True)]


def check_unique(names: Iterable[str], where: str) -> None:
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise DataError(
            f"{where} must be unique, but {len(repeated)} of them occur more than once ({_some(repeated)}); "
            "merge or rename them, e.g. with adata.var_names_make_unique()."
        )


def gene_names(var: pd.DataFrame | Sequence[str], kind: GeneIdKind) -> list[str]:
    """Return this site's genes under names of one kind, from `adata.var_names` or a column of `adata.var`.

    If no column holds that kind for every gene, names are translated by the table of the package.
    """
    for _, names in _name_columns(var):
        if all(name is not None for name in names) and gene_id_kind(filter(None, names)) == kind:
            full = [plain_name(name) for name in names if name is not None]
            if kind == "ensembl" and all(_ENSEMBL.fullmatch(name) for name in full):
                return full
            return translated(full, kind) or full
    for _, names in _name_columns(var):
        full = [name for name in names if name is not None]
        if len(full) == len(names) and (new := translated(full, kind)) is not None:
            return new
    raise DataError(
        f"The genes are to be named by {_WORDS[kind]}, and neither adata.var_names nor a column of adata.var "
        f"such as '{NAME_COLUMNS[0]}' holds them, nor does the table of human and mouse genes know most of these "
        "names; add them to adata.var."
    )


def match_genes(var: pd.DataFrame | Sequence[str], agreed: Sequence[str]) -> Index:
    """Find the agreed genes among this site's, in the agreed order.

    Parameters
    ----------
    var
        `adata.var`, or only the gene names. A name that is not in `var.index` is looked up in the columns of
        `NAME_COLUMNS`, so a site with Ensembl ids and a column of symbols follows a list of either kind.
    agreed
        The list that all sites agreed on, without repetitions.

    Returns
    -------
    Positions, such that `adata[:, positions]` has the agreed genes in the agreed order.
    """
    wanted = [plain_name(str(name)) for name in agreed]
    check_unique(wanted, "The agreed gene names")
    columns = _name_columns(var)
    lookups = [_positions(names) for _, names in columns]
    found: list[Sequence[int]] = [next((lookup[name] for lookup in lookups if name in lookup), ()) for name in wanted]
    missing = [name for name, at in zip(wanted, found, strict=True) if not at]
    if missing:
        here, there = gene_id_kind(filter(None, columns[0][1])), gene_id_kind(wanted)
        hint = (
            f"the study uses {_WORDS[there]} and this file {_WORDS[here]}: add the other names to adata.var, "
            f"e.g. as '{NAME_COLUMNS[0]}'."
            if here != there
            else "use the gene annotation of the study, or agree on fewer genes."
        )
        raise DataError(f"{len(missing)} of {len(wanted)} agreed genes are missing ({_some(missing)}); {hint}")
    ambiguous = [name for name, at in zip(wanted, found, strict=True) if len(at) > 1]
    if ambiguous:
        raise DataError(
            f"{len(ambiguous)} agreed genes stand for several columns here ({_some(ambiguous)}); "
            "merge them or keep one of each."
        )
    positions = np.array([at[0] for at in found], dtype=np.intp)
    if len(np.unique(positions)) < len(positions):
        raise DataError("Two agreed names stand for the same gene here; agree on names of one kind.")
    return positions


def genes_in_common(
    lists: Mapping[str, Sequence[str]] | Sequence[Sequence[str]], *, least: int = LEAST, notes: list[str] | None = None
) -> list[str]:
    """Return the names that every site has, in an order that does not depend on the order of the sites.

    Parameters
    ----------
    lists
        Gene names by site; a plain sequence of lists stands for sites 1, 2, ...
    least
        Genes in common below which it is an error, where a site has at least twice as many.
    notes
        Takes what `few_in_common` notices; the log does if none.

    Returns
    -------
    The names without Ensembl versions: sorted, or as they come where all lists are the same.
    """
    if not isinstance(lists, Mapping):
        lists = {f"site {number}": names for number, names in enumerate(lists, start=1)}
    plain = {site: [plain_name(str(name)) for name in names] for site, names in lists.items()}
    for site, names in plain.items():
        check_unique(names, f"The gene names of {site}")
    every = list(plain.values())
    if not every:
        raise DataError("There is no list of genes to compare; name at least one site.")
    common = set(every[0]).intersection(*every[1:])
    if not common:
        raise DataError(f"The sites have no gene in common: {_why_disjoint(plain)}")
    if FEW * len(common) < (shortest := min(map(len, every))):
        odd = _odd_one(plain)
        raise FewGenes(
            f"The sites have only {len(common)} of {shortest} genes in common; '{odd}' shares fewest with the others:"
            f" {cause_of(odd, plain)}. Name genes alike at all sites, or leave out at every site what the others do not"
            " measure.",
            odd,
        )
    if len(common) < least and max(map(len, every)) >= 2 * least:
        odd = min(plain, key=lambda site: len(plain[site]))
        odd = odd if len(plain[odd]) < least else _odd_one(plain)
        raise FewGenes(
            f"The sites have only {len(common)} genes in common, fewer than {least}; '{odd}' has {len(plain[odd])} and"
            f" others up to {max(map(len, every))}: {cause_of(odd, plain)}. To use these few all the same, keep only"
            " the genes in common at every site.",
            odd,
        )
    for note in few_in_common(plain, len(common)):
        LOG.warning(note) if notes is None else notes.append(note)
    return every[0] if all(names == every[0] for names in every) else sorted(common)


def few_in_common(plain: Mapping[str, Sequence[str]], common: int) -> list[str]:
    """One sentence if the genes in common are fewer than half of those of any site: which, and why."""
    halved = [site for site, names in plain.items() if 2 * common < len(names)]
    if not halved:
        return []
    odd = min(plain, key=lambda site: len(plain[site]))
    odd = odd if 2 * len(plain[odd]) < max(map(len, plain.values())) else _odd_one(plain)
    listed = ", ".join(f"'{site}' {len(plain[site])}" for site in halved[:5])
    return [
        f"only {common} genes are in common, fewer than half of those of some sites ({listed}); the cause seems to be"
        f" '{odd}': {cause_of(odd, plain)}"
    ]


def cause_of(site: str, plain: Mapping[str, Sequence[str]]) -> str:
    """Why a site shares few genes with the others."""
    own, rest = plain[site], [name for other, names in plain.items() if other != site for name in names]
    kinds = gene_id_kind(own), gene_id_kind(rest)
    if kinds[0] != kinds[1]:
        return f"it uses {_WORDS[kinds[0]]} and the others {_WORDS[kinds[1]]}; set names='symbol' or names='ensembl'"
    species = organism_of(own), organism_of(rest)
    if None not in species and species[0] != species[1]:
        return f"its genes are written as those of {species[0]}, the others' as those of {species[1]}"
    if 2 * len(own) < max(map(len, plain.values())):
        return f"it has {len(own)} genes only; bring all that were measured"
    return "it names genes by another annotation, or measured others"


def _odd_one(plain: Mapping[str, Sequence[str]]) -> str:
    """The site that shares the smallest part of its genes with any other."""
    sets = {site: set(names) for site, names in plain.items()}
    shared = {
        site: max((len(own & other) / len(own) for s, other in sets.items() if s != site), default=1.0)
        for site, own in sets.items()
    }
    return min(shared, key=lambda site: shared[site])


def _why_disjoint(plain: dict[str, list[str]]) -> str:
    by_kind = {gene_id_kind(names): site for site, names in plain.items() if names}
    if len(by_kind) > 1:
        (one, a), (other, b) = list(by_kind.items())[:2]
        return (
            f"{a} seems to use {_WORDS[one]} and {b} {_WORDS[other]}; choose one kind of name for the study, with"
            " names='symbol' or names='ensembl'."
        )
    by_species = {organism_of(names): site for site, names in plain.items() if names}
    if {"human", "mouse"} <= by_species.keys():
        human, mouse = by_species["human"], by_species["mouse"]
        return (
            f"{human} writes genes as those of human (CD3E) and {mouse} as those of mouse (Cd3e), in upper and lower"
            " case; bring cells of one species."
        )
    folded = [{name.casefold() for name in names} for names in plain.values()]
    if set.intersection(*folded):
        return "their names differ in upper and lower case only; are all cells of one species?"
    return "check that all files hold the same species and the same kind of measurement."


def _name_columns(var: pd.DataFrame | Sequence[str]) -> list[tuple[str, list[str | None]]]:
    """List the places where this site keeps gene names, `var_names` first; `None` is a missing name."""
    if not hasattr(var, "columns"):
        return [("var_names", [str(name) for name in var])]
    table: Any = var  # a DataFrame
    series = {"var_names": table.index} | {name: table[name] for name in NAME_COLUMNS if name in table.columns}
    return [(name, [x if isinstance(x, str) else None for x in column]) for name, column in series.items()]


def _positions(names: Iterable[str | None]) -> dict[str, list[int]]:
    positions: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        if name is not None:
            positions.setdefault(plain_name(name), []).append(index)
    return positions


def _some(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(_quoted(names[:most])) + (", ..." if len(names) > most else "")


def _quoted(names: Iterable[str]) -> Iterator[str]:
    return (f"'{name}'" for name in names)
