"""Names of labels at several sites: whether they are of one vocabulary, in one spelling.

Two names that differ by blanks or case only (`T cell`, `t cell `, `T_cell`) are one label in two spellings, which every
protocol takes for two. Of sites with several names, one whose names no other site has labels by another vocabulary; a
site with a single name may hold cells of one type that the others lack.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from cloister.errors import ProtocolAbort, blame


class Unfit(NamedTuple):
    site: str
    code: str
    why: str


def folded(name: str) -> str:
    """A name without what two spellings of one label differ in."""
    return " ".join(name.replace("_", " ").split()).casefold()


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
    labelled = {site: {folded(name) for name in own} for site, own in names.items() if own}
    shared = {site: own & set().union(*(labelled[s] for s in labelled if s != site)) for site, own in labelled.items()}
    several = [site for site, own in labelled.items() if len(own) > 1]
    if len(several) > 1 and (site := next((site for site in several if not shared[site]), "")):
        why = f"the labels of '{site}' have none in common with those of any other site"
        return Unfit(site, "foreign-labels", f"{why}; use one vocabulary, or list all its names in the study: labels=")
    return None


def check_vocabularies(by_site: Mapping[str, Iterable[str]], protocol: str, line: str) -> None:
    """Raise unless the names of all sites go together; the abort names the site to ask."""
    if (found := unfit(by_site)) is not None:
        e = ProtocolAbort(protocol, line, found.code, found.why)
        blame(e, found.site, found.code)
        raise e
