"""Names of labels at several sites: whether they are of one vocabulary, in one spelling.

Two names that differ by blanks or case only (`T cell`, `t cell `, `T_cell`) are one label in two spellings, which every
protocol takes for two. So are names of the same words at different sites (`CD4 T cells`, `T_CD4`), unless a site uses
both. Of sites with several names, one whose names no other site has labels by another vocabulary; a site with a single
name may hold cells of one type that the others lack.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from cloister.errors import ProtocolAbort, blame

# Words that do not tell types apart, short forms, and markers under their other names.
_NO_WORDS = frozenset({"cell", "human", "of", "the", "positive", "pos", "type"})
_SHORT = {
    **{"mono": "monocyte", "mac": "macrophage", "mφ": "macrophage", "macro": "macrophage", "dc": "dendritic"},
    **{"pdc": "plasmacytoid dendritic", "cdc": "conventional dendritic", "mdc": "myeloid dendritic"},
    **{"nk": "natural killer", "nkt": "natural killer t", "mk": "megakaryocyte", "treg": "regulatory t"},
    **{"reg": "regulatory", "th": "helper t", "ctl": "cytotoxic t", "mem": "memory", "eff": "effector"},
    **{"endo": "endothelial", "epi": "epithelial", "fibro": "fibroblast", "ec": "endothelial", "fb": "fibroblast"},
    **{"smc": "smooth muscle", "hsc": "hematopoietic stem", "haematopoietic": "hematopoietic", "rbc": "erythrocyte"},
    **{"astro": "astrocyte", "oligo": "oligodendrocyte", "opc": "oligodendrocyte precursor", "neutro": "neutrophil"},
    **{"at1": "type 1 alveolar", "at2": "type 2 alveolar", "ati": "type 1 alveolar", "atii": "type 2 alveolar"},
    **{"gd": "gammadelta", "gdt": "gammadelta t", "γδ": "gammadelta", "plasmablast": "plasmablast"},
    **{"fcgr3a": "cd16", "ncam1": "cd56", "ms4a1": "cd20", "il2ra": "cd25", "ptprc": "cd45", "itgax": "cd11c"},
}
_GREEK = {"α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon"}
_WORD = re.compile(r"[^\W_]+|[^\w\s+−,.;:()\[\]'\"-]")  # usual punctuation separates; any other sign counts
_MARKER = re.compile(r"cd\d|hla|ig[adegm]$")
_ROMAN = {"i": "1", "ii": "2", "iii": "3"}


class Unfit(NamedTuple):
    site: str
    code: str
    why: str


def folded(name: str) -> str:
    """A name without what two spellings of one label differ in."""
    return " ".join(name.replace("_", " ").split()).casefold()


def label_words(name: str) -> frozenset[str]:
    """The words that tell a label from others, whatever their order, number, short form and punctuation.

    `CD4 T cells`, `T_CD4`, `CD4+ T` and `CD4-positive, alpha-beta T cell` are {cd4, t}; `CD25-` is not `CD25+`.
    """
    text = unicodedata.normalize("NFKC", name)
    text = re.sub(r"(?<=[a-z]{3})(?=[A-Z])|(?<=\d)(?=[A-Z][a-z])", " ", text).casefold()
    text = re.sub(r"\b(?:alpha[- /]?beta|αβ)\b|\bthymus-derived\b", " ", text)  # of T cells, where it says nothing new
    text = re.sub(r"\bgamma[- /]?delta\b", "gammadelta", text)
    for letter, word in _GREEK.items():
        text = text if "γδ" in text else text.replace(letter, word)
    text = re.sub(r"(\w)[- ]?(?:negative|neg)\b", r"\1neg", text)
    text = re.sub(r"(\d)[- ]?(low|dim|lo|high|hi|bright)\b", r"\1\2", text)
    text = re.sub(r"([a-z]*\d\w*)[-−](?=$|[\s/,;)])", r"\1neg ", text)
    is_typed = re.search(r"\btype\b", text) is not None
    parts = [
        {w for word in _WORD.findall(part) for w in _one_word(word, is_typed=is_typed)}
        for part in re.split(r"/|&|\bor\b|\band\b", text)
    ]
    words = set().union(*parts)
    if len(parts) > 1 and all(any(not _MARKER.match(word) for word in part - _NO_WORDS) for part in parts):
        words.add("or")  # NK/NKT are two types, CD4+/CD25+ T cells are one
    if words & {"t", "b", "killer"} and len(words) > 1:
        words.discard("lymphocyte")
    return frozenset(words - _NO_WORDS or words or {folded(name)})


def _one_word(word: str, *, is_typed: bool) -> list[str]:
    if len(word) > 5 and word.endswith(("cells", "cell")):
        word = word.removesuffix("s").removesuffix("cell")
    glued = re.fullmatch(r"(naive|memory|regulatory|cytotoxic|effector|helper)(t)|(t)(helper|reg)", word)
    if glued:
        return [part for whole in glued.groups() if whole for part in _SHORT.get(whole, whole).split()]
    if re.fullmatch(r"naivecytotoxic", word):
        return ["naive", "cytotoxic", "t"]
    if is_typed and word in _ROMAN:
        return [_ROMAN[word]]
    if len(word) > 2 and word.endswith("s") and not word.endswith(("ss", "us", "is")):
        word = word.removesuffix("s")
    return _SHORT.get(word, word).split()


def unfit(by_site: Mapping[str, Iterable[str]]) -> Unfit | None:
    """The first site whose names do not go together with those of the others, if there is one."""
    names = {site: sorted(set(own)) for site, own in by_site.items()}
    holders: dict[str, dict[str, list[str]]] = {}  # folded name → spelling → who has it
    for site, own in names.items():
        for name in own:
            holders.setdefault(folded(name), {}).setdefault(name, []).append(site)
    for spellings in holders.values():
        if len(spellings) > 1:
            usual = max(spellings, key=lambda name: len(spellings[name]))
            other, (site, *_) = next((name, who) for name, who in spellings.items() if name != usual)
            why = f"{other!r} at '{site}' and {usual!r} at '{spellings[usual][0]}' differ by blanks or case only"
            return Unfit(site, "spelling", f"{why}; write the label alike at all sites")
    if (found := _same_words(names)) is not None:
        return found
    labelled = {site: {folded(name) for name in own} for site, own in names.items() if own}
    shared = {site: own & set().union(*(labelled[s] for s in labelled if s != site)) for site, own in labelled.items()}
    several = [site for site, own in labelled.items() if len(own) > 1]
    if len(several) > 1 and (site := next((site for site in several if not shared[site]), "")):
        why = f"the labels of '{site}' have none in common with those of any other site"
        return Unfit(site, "foreign-labels", f"{why}; use one vocabulary, or list all its names in the study: labels=")
    return None


def _same_words(names: Mapping[str, list[str]]) -> Unfit | None:
    """Two names of the same words, each at sites that do not have the other."""
    holders: dict[frozenset[str], dict[str, set[str]]] = {}
    for site, own in names.items():
        for name in own:
            holders.setdefault(label_words(name), {}).setdefault(name, set()).add(site)
    for spellings in holders.values():
        usual = max(spellings, key=lambda name: len(spellings[name]))
        for other, sites in spellings.items():
            if other != usual and not sites & spellings[usual]:
                site, there = min(sites), min(spellings[usual])
                why = f"{other!r} at '{site}' and {usual!r} at '{there}' consist of the same words"
                how = f'write [labels] "{other}" = "{usual}" into the study, or list all names there: labels='
                return Unfit(site, "spelling", f"{why} and seem to be one label; {how}")
    return None


def check_vocabularies(by_site: Mapping[str, Iterable[str]], protocol: str, line: str) -> None:
    """Raise unless the names of all sites go together; the abort names the site to ask."""
    if (found := unfit(by_site)) is not None:
        e = ProtocolAbort(protocol, line, found.code, found.why)
        blame(e, found.site, found.code)
        raise e
