"""Model outcomes of donors: regression and survival curves on features of their cells (`model-outcome`)."""

from cloister.workflows.model_outcome.baselines import outcome_baselines
from cloister.workflows.model_outcome.workflow import WORKFLOW, Options, model_outcome

__all__ = ["WORKFLOW", "Options", "model_outcome", "outcome_baselines"]
