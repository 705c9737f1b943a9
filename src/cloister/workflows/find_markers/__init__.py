"""Find the genes by which cells of one label differ from all others, over all sites (`find-markers`)."""

from cloister.workflows.find_markers.workflow import WORKFLOW, Options, check, find_markers

__all__ = ["WORKFLOW", "Options", "check", "find_markers"]
