"""A site's own cells: opened under the study's names, held to the site's floors, known again by their fingerprint."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cloister.cells import files as cell_files
from cloister.cells.files import Settings
from cloister.cells.fingerprint import Fingerprint, fingerprint
from cloister.cells.tables import donors
from cloister.deploy.approval.approval import Approvals, Refusal
from cloister.errors import DataError, about
from cloister.study import Party, Study
from cloister.workflows import check_plan, pipeline, site_labels
from cloister.workflows.options import opening_floor

if TYPE_CHECKING:
    from anndata import AnnData


class OwnPolicy(Protocol):
    """What `local/site.toml` says about a site's cells."""

    @property
    def data(self) -> Path | None: ...
    @property
    def settings(self) -> Settings: ...
    @property
    def obs(self) -> Mapping[str, str]: ...
    @property
    def obsm(self) -> Mapping[str, str]: ...
    @property
    def labels(self) -> Mapping[str, str]: ...
    @property
    def floors(self) -> Mapping[str, int]: ...


UNGROUPED = ("donor_key", "sample_key", "library_key")  # no sum is over the cells of one donor alone


class OwnKit(Protocol):
    """Whose cells they are, for which study, and what was approved for it."""

    @property
    def study(self) -> Study: ...
    @property
    def me(self) -> Party: ...
    @property
    def approvals(self) -> Approvals: ...


def open_cells(kit: OwnKit, policy: OwnPolicy) -> AnnData:
    """Open this site's cells, give columns the names that the study uses, and hold them to this site's own floors."""
    if policy.data is None:
        raise DataError("local/site.toml: 'data' is missing; write where your cells are")
    with about(str(policy.data)):
        adata = cell_files.open_cells(policy.data, settings=policy.settings)
    for name, table, renames in (("obs", adata.obs, policy.obs), ("obsm", adata.obsm, policy.obsm)):
        for theirs, ours in renames.items():
            if ours not in table:
                raise DataError(f"local/site.toml: [{name}] {theirs} = {ours!r}, but adata.{name}[{ours!r}] is missing")
            table[theirs] = table[ours]
    site_labels.use_study_labels(kit.study, adata, policy.labels)
    for part in kit.study.parts:
        check_floors(kit.me, part, policy, adata)
    return adata


def check_floors(me: Party, part: Study, policy: OwnPolicy, adata: AnnData) -> None:
    """Raise `Refusal` if the cells are of fewer donors than this site's policy asks for, whatever the study says.

    Nor may the study agree on a lower number where that number decides what is opened.
    """
    if (least := policy.floors.get("min_donors")) is None:
        return
    what = part.place or "the study"
    key = part.parameters.get("donor_key")
    if key is None:
        raise Refusal(f"'{me}' answers about at least {least} donors ([floors]), and {what} has no donor_key")
    if (here := donors(adata, str(key))) < least:
        raise Refusal(f"{here} donors, fewer than the {least} that [floors] in local/site.toml requires")
    _, options = check_plan(part)
    if (agreed := opening_floor(options, "min_donors")) is not None and agreed < least:
        raise Refusal(
            f"{me!r} answers about at least {least} donors ([floors]), and {what} opens what {agreed} have in common; "
            f"it needs min_donors = {least} there"
        )


def fingerprint_of(study: Study, me: Party, adata: AnnData) -> Fingerprint:
    """The fingerprint of a site's cells, with everything of them that an option of the study names."""
    places = {f"obs[{name!r}]" for name in columns_named(study)}
    keys: list[str | None] = []
    for _, workflow, options in pipeline.check_steps(study):
        places |= pipeline.needed(workflow, options, me)
        keys.append(getattr(options, "donor_key", None))
    return fingerprint(adata, places, next((key for key in keys if key), None))


def columns_named(study: Study) -> set[str]:
    """Names in options of the study that may be columns of obs, those of results excepted."""
    return {name for _, _, options in pipeline.check_steps(study) for _, name in _names(options)}


def columns_read(study: Study, *, grouped: bool = False) -> set[str]:
    """Those of them that what the study opens depends on; with `grouped`, those by whose values it may sum cells.

    A column that an earlier step of the study writes is not there yet when a run begins, so it is not among them.
    """
    columns, written = set[str](), set[str]()
    for _, workflow, options in pipeline.check_steps(study):
        places = {name: f"obs[{name!r}]" for field, name in _names(options) if not _apart(field, grouped=grouped)}
        columns |= {name for name, place in places.items() if place not in written}
        written |= {place for site in study.sites for place in pipeline.given(workflow, options, site)}
    return columns


def _names(options: Any) -> Iterator[tuple[dataclasses.Field[Any], str]]:
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        for name in value if isinstance(value, list | tuple) else [value]:
            if isinstance(name, str) and not field.name.endswith("_added"):
                yield field, name


def _apart(field: dataclasses.Field[Any], *, grouped: bool) -> bool:
    return bool(field.metadata.get("drawn")) or (grouped and field.name in UNGROUPED)


def check_approved_cells(kit: OwnKit, adata: AnnData) -> Fingerprint:
    """Raise `Refusal` unless these are the cells that were approved; returns their fingerprint.

    A large file that has not been written to since is not read again.
    """
    approvals = kit.approvals
    entry = approvals.current(kit.study)
    if entry.data is not None and entry.stamp and entry.stamp == large_stamp(adata):
        return entry.data
    found = fingerprint_of(kit.study, kit.me, adata)
    approvals.check_data(kit.study, found)
    return found


def large_stamp(adata: AnnData) -> tuple[Any, ...]:
    """What a large file is like, its last change included; () for cells in memory, and for folders."""
    origin = getattr(adata, "origin", None)
    if origin is None or Path(origin.path).is_dir():
        return ()
    from cloister.cells.stored import stamp_of

    return (str(origin.path), origin.part or "", *stamp_of(origin.path), Path(origin.path).stat().st_ctime_ns)
