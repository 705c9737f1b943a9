"""Predict with a provider's model and an adapter trained by `adapt-model` (`serve-model`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from cloister.cells import tables as cells
from cloister.errors import DataError, ParameterError
from cloister.report.figures import histograms
from cloister.session import Outcome, RemoteSession, Session
from cloister.workflows import Workflow
from cloister.workflows.adapt_model import model_card
from cloister.workflows.adapt_model.inference import answer, ask, beyond, exposed, inputs_of, load, stored_taps
from cloister.workflows.adapt_model.workflow import write
from cloister.workflows.modes import modes_of
from cloister.workflows.options import option

if TYPE_CHECKING:
    from anndata import AnnData


@dataclass(frozen=True)
class Options:
    model: str = option("model.npz", "file of the provider's model, at the coordinator")
    adapter: str = option("adapter.npz", "file of adapt-model's adapter, at every site")
    ring: Literal["small", "standard"] = option("standard", "lattice parameters, as in adapt-model")
    budget: int = option(65536, "number of samples that a site may query over all runs")
    ledger: str | None = option(
        None, "file of the provider with the number of queried samples; by default beside the model"
    )
    device: Literal["cpu", "gpu"] = option("cpu", "device of the provider's computation: CPU or NVIDIA GPU")
    taps: str | None = option(
        None, "folder for a site's answered and lost samples; 'taps' beside the adapter by default"
    )
    key_added: str = option("predicted", "column of obs for the model's labels")

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise ParameterError(f"option 'budget' must be at least 1, found {self.budget}")


def serve_model(adata: AnnData, session: Session | RemoteSession, *, copy: bool = False) -> AnnData | None:
    """Label samples by a model that stays with its provider, and an adapter that stays here.

    Parameters
    ----------
    adata
        Images (rows of X) or cells.
    session
        This site's place in a study of `serve-model`, from `cl.join(kit)`; the study says the options.

    Returns
    -------
    `None`, or a labelled copy if `copy=True`. Sets `adata.obs[key_added]`, `adata.obs[f"{key_added}_confidence"]` and
    `adata.obsm[f"{key_added}_features"]`.
    """
    adata, _ = WORKFLOW.at_site(adata, session, copy=copy)
    return adata if copy else None


def site(session: Session, adata: AnnData, options: Options) -> Outcome:
    from cloister.models.adapter import Adapted

    adapted = Adapted.load(options.adapter)
    told = session.run(model_card.owner, model_card.Params(session.sites, session.coordinator))
    if adapted.model != told.digest:
        raise DataError("this adapter was trained with another model than the provider's; run adapt-model again")
    inputs = inputs_of(adata, told.card)
    taps = ask(session, options, told, inputs, stored_taps(session, options, told, inputs))
    expected = (adapted.module.config.taps, adapted.module.config.rank)
    if taps.shape[1:] != expected:
        raise DataError("this adapter was trained in another mode; serve in the mode it was adapted in")
    write(adata, options.key_added, adapted, taps)
    counts = adata.obs[options.key_added].value_counts()
    found = {"predicted": {str(k): int(v) for k, v in counts.items()}} | beyond(adata, taps)
    return Outcome(adata, found, model=adapted)


def coordinator(session: Session, options: Options) -> Outcome:
    """The provider: answer what the sites ask."""
    encoder, told = load(options)
    session.run(model_card.provider, model_card.Params(session.sites, session.coordinator), told)
    answered = answer(session, options, told, encoder)
    return Outcome(None, {"answered": json.loads(json.dumps(answered))} | exposed(session, options, told))


def check(adata: AnnData, options: Any) -> list[str]:
    """Raise `DataError` if these samples cannot be labelled; return what the user should know."""
    cells.check_cells(adata, need_names=False)
    return ["every sample counts against the provider's budget; samples in the folder of taps are not queried again"]


def figures(outcomes: Mapping[str, Outcome], options: Options) -> list[Any]:
    """How sure the model is of its labels, at every site that is here."""
    key = f"{options.key_added}_confidence"
    here = {s: o.adata.obs[key] for s, o in outcomes.items() if o.adata is not None and key in o.adata.obs}
    title = "Confidence of the predicted labels"
    xlabel = "probability of the predicted label"
    return [histograms(here, title=title, xlabel=xlabel, within=(0.0, 1.0))] if here else []


WORKFLOW = Workflow(
    name="serve-model",
    summary="Label samples with a provider's hidden encoder and an adapter; the provider sees no sample.",
    options=Options,
    modes=modes_of("serve-model"),
    site=site,
    coordinator=coordinator,
    check=check,
    reads=lambda options, site: (),
    writes=("obs[{key_added!r}]", "obsm['{key_added}_features']"),
    min_sites=1,
    figures=figures,
)
