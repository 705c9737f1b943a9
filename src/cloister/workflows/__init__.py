"""The workflows: what a user can run. This module finds them, checks a study, and says what it reveals.

Each is a folder with a `workflow.py`, or comes from another package by an entry point. A workflow is a `Workflow`: its
options, the code of every party (`site`, `coordinator`, and `auxiliary` where a mode needs one), the check of a site's
cells, and how to draw the result. `data/modes.toml` declares the modes of those here. `workflow.py` also has the public
function, `bin_values(adata, session)`: a site's part in a notebook.
"""

from __future__ import annotations

import difflib
import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cloister import governance, protocols
from cloister.errors import DataError, ParameterError, UsageError
from cloister.session import Outcome, RemoteSession, Session
from cloister.study import Study
from cloister.workflows.modes import LEAVES, STAYS, TOGETHER, Mode, Rows
from cloister.workflows.options import check_mode_options, read_options
from cloister.workflows.site_labels import rules_of

if TYPE_CHECKING:
    from anndata import AnnData

SHIPPED = (
    "bin-values",
    "find-outliers",
    "quality-control",
    "choose-genes",
    "shared-pca",
    "integrate",
    "cluster-cells",
    "find-markers",
    "shared-map",
    "compare-groups",
    "model-outcome",
    "find-programs",
    "train-classifier",
    "map-labels",
    "propagate-labels",
    "fine-tune",
    "train-cellcnn",
    "predict-cellcnn",
    "adapt-model",
    "serve-model",
)
GROUP = "cloister.workflows"  # entry points by which other packages offer theirs: name = "module:WORKFLOW"


def _no_part(session: Session, options: Any) -> Outcome:
    return Outcome()


def _reads(options: Any, site: str) -> tuple[str, ...]:
    return ("layer", "use_rep", "donor_key", "library_key")


@dataclass(frozen=True)
class Workflow:
    name: str
    summary: str  # one line
    options: type[Any]  # frozen dataclass of `option`s
    modes: Mapping[str, Mode]
    site: Callable[[Session, AnnData, Any], Outcome]
    check: Callable[[AnnData, Any], list[str]]  # raises DataError, or returns warnings; nothing is sent
    brings: Callable[[AnnData, Any], None] | None = None  # raises DataError if a site that offers labels has none
    coordinator: Callable[[Session, Any], Outcome] = _no_part
    auxiliary: Callable[[Session, Any], Outcome] = _no_part
    min_sites: int = 2
    in_mode: Callable[[Any, str], Any] | None = None  # options with the defaults of a mode filled in
    check_study: Callable[[Study, Any], None] | None = None  # raises ParameterError where options and study do not fit
    warnings: Callable[[Study, Any], list[str]] | None = None  # what the parties should hear before they start
    files: Callable[[Outcome], dict[str, bytes]] | None = None  # further files to write at a party
    model: tuple[str, Callable[[Path, Any], Any]] | None = None  # which of them is the model, and how to read it
    figures: Callable[[Mapping[str, Outcome], Any], list[Any]] | None = None  # for the report
    findings: Callable[[Mapping[str, Mapping[str, Any]], Any], list[str]] | None = None  # sentences from the results
    reads: Callable[[Any, str], tuple[str, ...]] = _reads  # options that name what a site's cells must have
    privacy: Callable[[Any], Mapping[str, Any]] = lambda options: {}  # epsilon, delta, whom they protect; with noise
    release: Callable[[Any], tuple[str, float, int] | None] = lambda options: None  # unit, noise, sums; for accounting
    writes: tuple[str, ...] = ()  # where a site's results go, by options: "obsm[{key_added!r}]"
    stand_in: Mapping[str, Any] = field(default_factory=dict)  # options that say nothing about a file
    modules: Mapping[str, str] = field(default_factory=dict)  # protocol → its module, for those of another package
    retired: Mapping[str, str] = field(default_factory=dict)  # option of earlier versions → what to do instead

    def mode(self, name: str) -> Mode:
        if name not in self.modes:
            raise ParameterError(f"'{self.name}' has no mode '{name}'; use mode {' or '.join(self.modes)}")
        return self.modes[name]

    def part(self, session: Session, adata: AnnData | None, options: Any, *, checked: bool = False) -> Outcome:
        """The part of whoever sits there. Cells are checked before anything is sent, unless they were already."""
        if session.role != "site":
            return (self.coordinator if session.role == "coordinator" else self.auxiliary)(session, options)
        if adata is None:
            raise DataError("a site needs cells; name them with --data")
        if not checked:
            self.check_at(session.me, adata, options)
        return self.site(session, adata, options)

    def check_at(self, site: str, adata: AnnData, options: Any) -> list[str]:
        """Check the cells of one site, with what this site has to bring; returns what to know."""
        notes = self.check(adata, options)
        if self.brings is not None and "label_key" in self.reads(options, site):
            self.brings(adata, options)
        return notes

    def at_site(
        self, adata: AnnData, session: Session | RemoteSession, *, copy: bool = False
    ) -> tuple[AnnData, Outcome]:
        """The site's part with the options that the study agreed on, for the public function of the workflow."""
        if session.study.steps and not session.study.at:
            names = ", ".join(step.name for step in session.study.steps)
            raise UsageError(
                f"this is a study of several steps ({names}); take part in all: cl.take_part(adata, session)"
            )
        workflow, options = check_plan(session.study)
        if workflow.name != self.name:
            raise UsageError(f"this is a study of '{workflow.name}', not of '{self.name}'")
        adata = adata.copy() if copy else adata
        if isinstance(session, Session):
            return adata, self.part(session, adata, options)
        self.check(adata, options)
        outcome = session.take_part(adata)
        adata._init_as_actual(outcome.adata)
        return adata, outcome


_registered: dict[str, Workflow] = {}


def register(workflow: Workflow) -> None:
    """Offer a workflow in this process; an installed package does so by an entry point of the group GROUP."""
    if workflow.name in SHIPPED:
        raise UsageError(f"'{workflow.name}' is a workflow of Cloister; give yours another name")
    _registered[workflow.name] = _known(workflow)


def _known(workflow: Workflow) -> Workflow:
    for protocol, module in workflow.modules.items():
        protocols.add(protocol, module)
    return workflow


@functools.cache
def offered() -> Mapping[str, EntryPoint]:
    """Workflows of other installed packages; nothing of theirs is imported here."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        if (other := found.setdefault(point.name, point)).value != point.value:
            raise UsageError(f"two packages offer a workflow '{point.name}': {other.value} and {point.value}")
    return {name: point for name, point in found.items() if name not in SHIPPED}


def names() -> tuple[str, ...]:
    return tuple(dict.fromkeys((*SHIPPED, *sorted(offered()), *_registered)))


def get(name: str) -> Workflow:
    """The workflow of that name; its module is imported now and not before."""
    if name in SHIPPED:
        return cast(Workflow, importlib.import_module(f"cloister.workflows.{name.replace('-', '_')}.workflow").WORKFLOW)
    if name in _registered:
        return _registered[name]
    if name not in offered():
        close = difflib.get_close_matches(name, names(), n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"known are {', '.join(names())}"
        raise UsageError(f"there is no workflow '{name}'; {hint}")
    found = offered()[name].load()
    if not isinstance(found, Workflow) or found.name != name:
        raise UsageError(f"{offered()[name].value} is not the workflow '{name}'; its package has to be corrected")
    return _known(found)


def options_of(workflow: Workflow, given: Mapping[str, Any]) -> Any:
    """The workflow's options from plain values; the error names the key."""
    for key in given.keys() & workflow.retired.keys():
        raise ParameterError(f"'{workflow.name}' has no option '{key}' any more: {workflow.retired[key]}")
    return read_options(workflow.options, given, workflow.name)


def check_plan(study: Study) -> tuple[Workflow, Any]:
    """Workflow and options of a study, or of one step of it, or the error that names what is wrong in it."""
    if study.steps and not study.at:
        steps = ", ".join(step.name for step in study.steps)
        raise UsageError(f"'{study.name}' is a study of several steps ({steps}); run it whole")
    workflow = get(study.workflow)
    needed = workflow.mode(study.mode).auxiliaries
    if len(study.auxiliaries) < needed:
        raise ParameterError(
            f"'{study.workflow}' in mode {study.mode} needs {needed} auxiliary server(s) in [parties], found"
            f" {len(study.auxiliaries)}"
        )
    if len(study.sites) < workflow.min_sites:
        raise ParameterError(
            f"'{study.workflow}' needs at least {workflow.min_sites} sites, found {len(study.sites)};"
            " with one site there is nobody to compute with"
        )
    rules_of(study)
    options = options_of(workflow, study.parameters)
    if workflow.in_mode is not None:
        options = workflow.in_mode(options, study.mode)
    if workflow.check_study is not None:
        workflow.check_study(study, options)
    check_mode_options(workflow.options, study.parameters, study.mode)
    return workflow, options


# ---- who learns what -------------------------------------------------------------------------------------------------


def learns(name: str, mode: str) -> Rows:
    """Who learns what, in a few plain words: rows of who and what. None for a workflow that is not one of ours."""
    return get(name).mode(mode).learns if name in names() else ()


def reveals(study: Study) -> dict[str, str]:
    """Protocol → its `Reveals`, for every one that this study may run, its own first; none where it is a test's own."""
    if study.workflow not in names():
        return {}
    workflow, options = check_plan(study)
    return {name: protocols.section(name, "Reveals") for name in workflow.mode(study.mode).may_run(options)}


def warnings_of(study: Study) -> list[str]:
    """What the parties should hear before they start."""
    notes = []
    if governance.expired(study.governance):
        notes.append(f"the study ended on {study.governance['expires']}; between machines it is refused")
    if len(study.sites) == 2:
        notes.append("two sites only: each site can subtract its own input from any opened sum")
    if study.steps and not study.at:
        return notes + [f"{part.place}: {x}" for part in study.parts for x in warnings_of(part) if x not in notes]
    if study.workflow not in names():
        return notes
    workflow, options = check_plan(study)
    if study.mode != "hardened":
        rows = [row for row in workflow.mode(study.mode).learns if row[0] not in (STAYS, LEAVES, TOGETHER)]
        leaks = "; ".join(f"{who[:1].lower()}{who[1:]} {what.rstrip('.')}" for who, what in rows)
        ask = f"cloister explain {study.workflow} --mode {study.mode}"
        kind = "trusts every party to keep to the protocol" if study.mode == "semi-honest" else "is for comparison"
        notes.append(f"mode '{study.mode}' {kind}: {leaks}. See: {ask}")
    return notes + (workflow.warnings(study, options) if workflow.warnings is not None else [])
