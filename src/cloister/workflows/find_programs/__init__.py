"""Find multicellular programs of donors of all sites (`find-programs`)."""

from cloister.workflows.find_programs.workflow import WORKFLOW, Options, find_programs, program_baselines

__all__ = ["WORKFLOW", "Options", "find_programs", "program_baselines"]
