"""Choose the genes that vary most within the batches of all sites (`choose-genes`)."""

from cloister.workflows.choose_genes.workflow import WORKFLOW, Options, check, choose_genes

__all__ = ["WORKFLOW", "Options", "check", "choose_genes"]
