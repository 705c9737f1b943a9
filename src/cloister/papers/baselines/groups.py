"""What `compare-groups` is compared with: limma-voom on all donors in one place, and on each site's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cloister.disclosure import Thresholds
from cloister.errors import ProtocolAbort
from cloister.study import Party
from cloister.workflows.compare_groups import pooled_contrasts as protocol
from cloister.workflows.compare_groups.contrast_terms import Donors, part_of
from cloister.workflows.compare_groups.figures import tables
from cloister.workflows.compare_groups.workflow import WORKFLOW, Options, checked_samples, donors_of, params_of
from cloister.workflows.options import read_options

if TYPE_CHECKING:
    from anndata import AnnData

NOBODY = Party("nobody")  # adds up
NOTHING_OPENED = Thresholds(min_cells=1, min_donors=1)  # whoever sees all donors need not leave out any


def group_baselines(data: Mapping[str, AnnData], **options: Any) -> dict[str, dict[str, Any]]:
    """Compare groups in the ways that need no protocol.

    Returns
    -------
    `pooled`, and `SITE alone` for every site → `expression` and `composition`, tables as in `compare_groups`. A site
    whose own donors cannot be compared has tables without rows.
    """
    chosen: Options = read_options(WORKFLOW.options, options, WORKFLOW.name)
    for adata in data.values():
        checked_samples(adata, chosen)
    held = {Party(name): whole(donors_of(adata, chosen)) for name, adata in data.items()}
    made = {"pooled": tables(protocol.ideal(params_of(tuple(held), NOBODY, chosen), held)[NOBODY], chosen)}
    return made | {f"{site} alone": _alone(site, mine, chosen) for site, mine in held.items()}


def whole(mine: Donors) -> Donors:
    """The same donors, none of them left out for the sake of what others learn."""
    return replace(mine, thresholds=NOTHING_OPENED)


def _alone(site: Party, mine: Donors, chosen: Options) -> dict[str, Any]:
    """The same of one site, which needs no second one to see its own donors."""
    params = params_of((site,), NOBODY, chosen)
    brought = {site: protocol.Brings(protocol.labels_of(params, mine), mine.levels())}
    made = protocol.tables_of(params, mine.names if chosen.expression else (), protocol.agree(params, brought))
    for t in made:
        part = part_of(t, mine)
        sums = protocol.added(protocol.CENSUS, t, [part])
        groups = len(params.groups)
        sums[groups : 2 * groups] = 2.0  # as if at two sites
        protocol.take(protocol.CENSUS, [t], sums)
        if not t.left_out:
            protocol.fit_pooled(t, [part])
    try:
        return tables(protocol.compared(made, 0), chosen)
    except ProtocolAbort:
        return tables(protocol.Compared((), {}, 0), chosen)
