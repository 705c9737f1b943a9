"""What `compare-groups` is compared with: limma-voom on all donors in one place, and on each site's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.errors import ProtocolAbort
from cloister.protocols.groups import pooled_contrasts as protocol
from cloister.protocols.groups.contrast_steps import census, take_census
from cloister.protocols.groups.contrast_terms import part_of
from cloister.study import Party
from cloister.workflows.compare_groups import WORKFLOW, Options, check, donors_of, params_of
from cloister.workflows.figures.groups import tables
from cloister.workflows.options import read_options

if TYPE_CHECKING:
    from anndata import AnnData

NOBODY = Party("nobody")  # adds up


def group_baselines(data: Mapping[str, AnnData], **options: Any) -> dict[str, dict[str, Any]]:
    """Compare groups in the ways that need no protocol.

    Returns
    -------
    `pooled`, and `SITE alone` for every site → `expression` and `composition`, tables as in `compare_groups`. A site
    whose own donors cannot be compared has tables without rows.
    """
    chosen: Options = read_options(WORKFLOW.options, options, WORKFLOW.name)
    for adata in data.values():
        check(adata, chosen)
    held = {Party(name): donors_of(adata, chosen) for name, adata in data.items()}
    made = {"pooled": tables(protocol.ideal(params_of(tuple(held), NOBODY, chosen), held)[NOBODY], chosen)}
    return made | {f"{site} alone": _alone(site, mine, chosen) for site, mine in held.items()}


def _alone(site: Party, mine: Any, chosen: Options) -> dict[str, Any]:
    """The same of one site, which needs no second one to see its own donors."""
    params = params_of((site,), NOBODY, chosen)
    brought = {site: protocol.Brings(protocol.labels_of(params, mine), mine.levels())}
    made = protocol.tables_of(params, mine.names if chosen.expression else (), protocol.agree(params, brought))
    for t in made:
        part = part_of(params, mine, t.label, t.names, composition=t.composition)
        sums = census(t, part)
        sums[1] = np.full_like(sums[1], 2.0)  # as if at two sites
        take_census(t, sums)
        if not t.left_out:
            protocol.fit_pooled(t, [part])
    try:
        return tables(protocol.compared(made, 0), chosen)
    except ProtocolAbort:
        return tables(protocol.Compared((), {}, 0), chosen)
