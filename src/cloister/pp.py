"""Preprocessing under scanpy's names: `cl.pp.pca(adata, session)` is `cl.shared_pca(adata, session)`."""

from cloister._scanpy_names import workflows_as

NAMES = {
    "calculate_qc_metrics": "quality_control",
    "scrublet": "quality_control",
    "highly_variable_genes": "choose_genes",
    "pca": "shared_pca",
    "harmony_integrate": "integrate",  # of scanpy.external
    "bin": "bin_values",
}
__getattr__, __dir__ = workflows_as(__name__, NAMES)
