"""Tools under scanpy's names: `cl.tl.leiden(adata, session)` is `cl.cluster_cells(adata, session)`."""

from cloister._scanpy_names import workflows_as

NAMES = {
    "pca": "shared_pca",
    "leiden": "cluster_cells",
    "umap": "shared_map",
    "rank_genes_groups": "find_markers",
    "ingest": "map_labels",
    "outliers": "find_outliers",
    "groups": "compare_groups",
    "programs": "find_programs",
}
__getattr__, __dir__ = workflows_as(__name__, NAMES)
