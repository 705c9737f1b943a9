"""count-labels: how many cells of each label all sites have together. A workflow that Cloister does not ship.

    L1   u ↔ S   secure sum of the cells per label; a label of few cells at a site counts as none there
    L2   S ⇒ u   the totals (line L11 of the secure sum)

Reveals
-------
coordinator, every site : cells per label over all sites.
one malicious site : the same; it may add any numbers.
malicious coordinator : the same, over sites that it chose. It can send the sites other totals.

Assumes
-------
What the secure sum assumes, with every site as its threshold.

Cost
----
One secure sum of a word per label.
"""

from dataclasses import dataclass

import numpy as np

from cloister.cells.labels import check_labels
from cloister.disclosure import Rows
from cloister.mpc import secure_sum
from cloister.session import Outcome
from cloister.workflows import Workflow
from cloister.workflows.modes import Mode
from cloister.workflows.options import option

PROTOCOL = "count_labels"


@dataclass(frozen=True)
class Options:
    label_key: str = option(help="column of obs with the labels")
    labels: tuple[str, ...] = option(help="labels that are counted")
    min_cells: int = option(10, "smallest number of a site's own cells that it counts", opens=True)


@dataclass(frozen=True)
class Params:  # public; a run starts only if all parties have the same
    sum: secure_sum.Params


def params_of(session, options):
    n = len(session.sites)
    return Params(secure_sum.Params(session.sites, session.coordinator, len(options.labels), threshold=n, to_all=True))


async def contributor(ch, params, counts, *, entropy, identity):
    words = ch.contribute(counts, protocol=PROTOCOL, line="L1", what="cells per label").astype(np.uint64)
    return await secure_sum.contributor(ch.sub("sum"), params.sum, words, entropy=entropy, identity=identity)


async def aggregator(ch, params):
    return await secure_sum.aggregator(ch.sub("sum"), params.sum)


def site(session, adata, options):
    labels = adata.obs[options.label_key].astype(str).to_numpy()
    known = np.isin(labels, options.labels)
    codes = np.array([options.labels.index(label) for label in labels[known]], np.int64)
    rows = Rows(len(codes), thresholds=session.thresholds(min_cells=options.min_cells))
    found = session.run(contributor, params_of(session, options), rows.grouped(codes, len(options.labels)))
    adata.uns["count_labels"] = dict(zip(options.labels, map(int, found.z), strict=True))
    return Outcome(adata, {"cells": adata.uns["count_labels"]})


def coordinator(session, options):
    found = session.run(aggregator, params_of(session, options))
    return Outcome(result={"cells": dict(zip(options.labels, map(int, found.z), strict=True))})


def check(adata, options):
    check_labels(adata, options.label_key)
    return []


WORKFLOW = Workflow(
    name="count-labels",
    summary="Count the cells of each label over all sites.",
    options=Options,
    modes={"hardened": Mode((PROTOCOL, "secure_sum"), (("Every party learns", "cells per label over all sites."),))},
    modules={PROTOCOL: "count_labels"},
    site=site,
    coordinator=coordinator,
    check=check,
)
