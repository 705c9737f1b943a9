"""Cluster the cells of all sites together, from shared prototypes (`cluster-cells`)."""

from cloister.workflows.cluster_cells.workflow import WORKFLOW, Options, check, cluster_cells

__all__ = ["WORKFLOW", "Options", "check", "cluster_cells"]
