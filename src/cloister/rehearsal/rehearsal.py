"""Rehearsal: every party of a study on one machine, with real messages between them.

    run = cl.rehearse("bin-values", data={"basel": a, "lugano": b, "vienna": c})

Each party runs in a thread of its own with its own data and its own event loop; `processes=True` gives each a process.
Frames go through the same encoding, checks and receipts as between machines, so bytes, rounds and receipts are real.
Faults can be injected on the way: that is how the test kit asks what happens when a message is lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, overload

import numpy as np

from cloister import workflows
from cloister.cells.files import open_cells
from cloister.cells.progress import told_to
from cloister.errors import DataError, ParameterError, about
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net.events import Event, ignore_errors
from cloister.mpc.net.mailbox import Mailbox
from cloister.mpc.net.memory_transport import Fault, Killed, MemoryLink, Wires
from cloister.rehearsal.processes import run_processes
from cloister.rehearsal.progress import passes_of
from cloister.rehearsal.results import write_files
from cloister.rehearsal.run import Run, Series, workflow_part
from cloister.session import Outcome, Session, take_part
from cloister.study import CONSENTS, Mode, Party, Role, Study
from cloister.workflows import pipeline, site_labels

if TYPE_CHECKING:
    from anndata import AnnData


LOG = logging.getLogger("cloister")


def plan(
    workflow: str,
    sites: Iterable[str],
    *,
    mode: str = "hardened",
    seed: int = 0,
    timeout: float = 60.0,
    colluders: int = 0,
    coordinator: str = "coordinator",
    options: Mapping[str, Any] | None = None,
) -> Study:
    """The study of a rehearsal: the named sites, a coordinator, and as many auxiliaries as the mode needs."""
    chosen = workflows.get(workflow)
    count = chosen.mode(mode).auxiliaries
    parties: dict[Party, Role] = {Party(coordinator): "coordinator"}
    for site in sites:
        if site in parties:
            raise ParameterError(f"two parties are called '{site}'; every party needs a name of its own")
        parties[Party(site)] = "site"
    parties |= {Party(f"auxiliary-{i + 1}" if count > 1 else "auxiliary"): "auxiliary" for i in range(count)}
    return Study(
        name="rehearsal",
        workflow=workflow,
        parties=parties,
        mode=cast(Mode, mode),
        seed=seed,
        timeout=timeout,
        colluders=colluders,
        parameters={k: _plain(v) for k, v in _said(chosen, options or {}).items()},
    )


def _said(workflow: workflows.Workflow, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options without those that are none, as a study leaves them out: which is one thing only where none is usual."""
    usual = {f.name: f.default for f in dataclasses.fields(workflow.options)}
    for key, value in options.items():
        if value is None and usual.get(key) is not None:
            hint = "; for adata.X write use_rep='X'" if key == "use_rep" else ""
            raise ParameterError(f"option '{key}' cannot be none, which would be taken for {usual[key]!r}{hint}")
    return {key: value for key, value in options.items() if value is not None}


def _plain(x: Any) -> Any:
    """An option as `study.toml` can hold it: lists, and Python's numbers instead of NumPy's."""
    if isinstance(x, list | tuple):
        return [_plain(v) for v in x]
    return x.item() if isinstance(x, np.generic) else x


@overload
def rehearse(
    workflow: str, data: Mapping[str, Any], *, mode: str = ..., seed: int = ..., timeout: float = ..., **options: Any
) -> Run: ...


@overload
def rehearse(workflow: Study | Path, data: Mapping[str, Any], **options: Any) -> Run | Series: ...


def rehearse(
    workflow: str | Study | Path,
    data: Mapping[str, AnnData | str | Path | Any],
    *,
    mode: str = "hardened",
    seed: int = 0,
    timeout: float = 60.0,
    colluders: int = 0,
    processes: bool = False,
    inplace: bool = False,
    faults: Iterable[Fault] = (),
    on_event: Callable[[Event], None] | None = None,
    on_frame: Callable[[bytes], None] | None = None,
    check: bool = True,
    **options: Any,
) -> Run | Series:
    """Run a workflow, or a study, among all parties on this machine; warnings go to the log `cloister`.

    Parameters
    ----------
    workflow
        Its name, as on the command line: `"bin-values"`. Or a `Study` or the `Path` of its file, which says mode, seed
        and options itself; the steps of one that has several run one after the other.
    data
        Site name → its cells: an `AnnData`, the path of a file, or a pandas table of numbers with a row per cell (or
        patient). No party ever sees another's.
    mode
        `"hardened"`, or another mode that the workflow has.
    colluders
        Number of sites that may collude with a malicious coordinator; sums then need more remaining sites.
    processes
        One process per party instead of one thread.
    inplace
        Write results into the given objects; by default into copies.
    faults
        What to do to messages on the way; for tests.
    on_frame
        Gets every frame as it is delivered; for attacks on messages (`cloister.papers.attacks.sent`). Threads only.
    check
        Raise if a party failed. With `check=False`, look at `run.errors`.

    Returns
    -------
    A `Run`: `data`, `receipts`, `cost`, `errors`, and `report(path)`; of a study of several steps, a `Series` of them.
    """
    if not isinstance(data, Mapping):
        raise ParameterError(f"data must be a dictionary of site name → cells, found a {type(data).__name__}")
    if isinstance(workflow, str):
        study = plan(workflow, data, mode=mode, seed=seed, timeout=timeout, colluders=colluders, options=options)
    else:
        plain = not options and (mode, seed, timeout, colluders) == ("hardened", 0, 60.0, 0)
        study = _agreed(workflow, data, plain=plain)
    for note in workflows.warnings_of(study):
        LOG.warning(note)
    told = {"on_event": on_event, "on_frame": on_frame}
    how: dict[str, Any] = {"processes": processes, "inplace": inplace, "faults": faults, **told}
    run: Run | Series = rehearse_steps(study, data, **how) if study.steps else rehearse_study(study, data, **how)
    if check:
        run.check()
    return run


def _agreed(study: Study | Path, data: Mapping[str, Any], *, plain: bool) -> Study:
    """A study as it stands; raises unless the call is `plain`, with nothing that the study says itself."""
    study = study if isinstance(study, Study) else Study.load(study)
    if not plain:
        raise ParameterError(f"the study '{study.name}' says its mode, seed, timeout and options itself")
    check_sites(study, data)
    return study


def check_sites(study: Study, data: Mapping[str, Any]) -> None:
    """Raise `ParameterError` unless there are cells for each site of the study, and for nobody else."""
    for site in (*study.sites, *data):
        if site not in data:
            raise ParameterError(f"no cells for '{site}', which is a site of the study '{study.name}'")
        if site not in study.sites:
            raise ParameterError(f"'{site}' is not a site of the study '{study.name}'; it has {', '.join(study.sites)}")


def rehearse_steps(
    study: Study,
    data: Mapping[str, AnnData | str | Path | Any],
    *,
    processes: bool = False,
    inplace: bool = False,
    on_step: Callable[[Run], None] | None = None,
    **how: Any,
) -> Series:
    """Rehearse the steps of a study one after the other, each on what the one before gave; stops where one fails.

    `on_step` gets the run of every step as it ends, before the next one goes on with its cells.
    """
    needs_files = pipeline.uses_files(study)
    identities = {p: Identity.create(Entropy()) for p in study.parties}
    study = study.with_keys({p: i.public for p, i in identities.items()})
    series, now = Series(study), dict(data)
    for site in study.sites:
        with named_site(site, data[site]):
            adata = study_cells(study, site, data[site], inplace=inplace)
            pipeline.check_site(study, site, adata)
            now[site] = data[site] if processes else adata
    with tempfile.TemporaryDirectory(prefix="cloister-") as folder:
        folders: dict[str, Path] = {}
        for part in study.parts:
            with pipeline.named(part):
                once: dict[str, Any] = {"identities": identities, "folders": folders}
                run = rehearse_study(part, now, processes=processes, inplace=inplace, **once, **how)
            series.runs[part.label] = run
            run.draw()  # of the cells as they are now
            if on_step is not None:
                on_step(run)
            if not run.whole:
                break
            now = dict(run.data)
            if needs_files:
                folders[part.label] = Path(folder) / part.label
                folders[part.label].mkdir()
                for party in run.outcomes:
                    write_files(run, party, folders[part.label])
    return series


def rehearse_study(
    study: Study,
    data: Mapping[str, AnnData | str | Path | Any],
    *,
    processes: bool = False,
    inplace: bool = False,
    faults: Iterable[Fault] = (),
    on_event: Callable[[Event], None] | None = None,
    on_frame: Callable[[bytes], None] | None = None,
    identities: Mapping[Party, Identity] | None = None,
    folders: Mapping[str, Path] | None = None,
) -> Run:
    """`rehearse` a study of one workflow, or one step, that is there already; errors of single parties stay in the run.

    `identities` are new ones unless given; `folders` holds what earlier steps wrote, by their names.
    """
    workflow, options = workflows.check_plan(study)
    given, on_event = {}, ignore_errors(on_event)
    for site, cells_or_file in data.items():
        with named_site(site, cells_or_file), told_to(passes_of(site, on_event)):
            given[site] = study_cells(study, site, cells_or_file, inplace=inplace)
            workflow.check_at(Party(site), given[site], options)
    if processes and on_frame is not None:
        raise ParameterError("on_frame receives only messages of this process; rehearse with processes=False")
    files = {Party(p): x for p, x in data.items() if isinstance(x, str | Path)}
    if processes:
        given = {p: a for p, a in given.items() if p not in files}  # a party's process reads its file itself
    cells = {Party(p): a if inplace or p in files else _copy(a) for p, a in given.items()}
    if processes:
        how: dict[str, Any] = {"faults": faults, "on_event": on_event, "identities": identities, "folders": folders}
        run = run_processes(study, {**cells, **files}, **how)
    else:
        parts = dict.fromkeys(study.parties, functools.partial(workflow_part, checked=True, folders=folders))
        reveals = workflows.reveals(study)
        told: dict[str, Any] = {"on_event": on_event, "on_frame": on_frame, "reveals": reveals}
        run = run_parties(study, parts, cells, faults=faults, identities=identities, **told)
    if inplace and processes:
        for site in given.keys() & run.data.keys():
            given[site]._init_as_actual(run.data[site])
    return run


def _cells_of(given: Any) -> AnnData:
    """A site's cells: as they are, from a file, or from a pandas table, whose text columns go to `obs`."""
    from anndata import AnnData

    if isinstance(given, AnnData):
        return given
    if isinstance(given, str | Path):
        return open_cells(given)
    if type(given).__name__ == "DataFrame" and hasattr(given, "select_dtypes"):
        table = given.set_axis([str(x) for x in given.index], axis=0).set_axis([str(x) for x in given.columns], axis=1)
        numbers = table.select_dtypes("number")
        if not numbers.shape[1]:
            raise DataError("the table has no column of numbers; expected one per gene or measurement")
        return AnnData(numbers, obs=table.drop(columns=numbers.columns))
    raise DataError(f"expected an AnnData, the path of a file or a pandas DataFrame, found a {type(given).__name__}")


def study_cells(study: Study | None, site: str, given: Any, *, inplace: bool) -> AnnData:
    """A site's cells with labels under the study's names; the log says what was renamed."""
    adata = _cells_of(given)
    if study is None or not site_labels.rules_of(study):
        return adata
    adata = adata if inplace or isinstance(given, str | Path) else _copy(adata)
    for note in site_labels.use_study_labels(study, adata):
        LOG.warning(f"site '{site}': labels renamed, {note}")
    return adata


def _copy(adata: AnnData) -> AnnData:
    return adata.to_memory() if adata.isbacked else adata.copy()  # a backed one has no copy without a file


@contextlib.contextmanager
def named_site(site: str, given: Any) -> Iterator[None]:
    """Let an error say of whose cells it is, and of which file."""
    with about(f"site '{site}'"), about(str(given) if isinstance(given, str | Path) else ""):
        yield


def run_parties(
    study: Study,
    parts: Mapping[Party, Callable[[Session, Any], Outcome]],
    data: Mapping[Party, Any],
    *,
    faults: Iterable[Fault] = (),
    on_event: Callable[[Event], None] | None = None,
    on_frame: Callable[[bytes], None] | None = None,
    entropy: Callable[[Party], Entropy] | None = None,
    consent: Mapping[Party, frozenset[str]] | None = None,
    reveals: Mapping[str, str] | None = None,
    identities: Mapping[Party, Identity] | None = None,
) -> Run:
    """Run given parts in threads of this process; for `rehearse` and the test kit. All consent unless told."""
    sources = {p: entropy(p) if entropy else Entropy() for p in study.parties}
    identities = identities or {p: Identity.create(sources[p]) for p in study.parties}
    study = study.with_keys({p: i.public for p, i in identities.items()})
    boxes = {p: Mailbox(p) for p in study.parties}

    def deliver(sender: Party, to: Party, frame: bytes) -> None:
        if on_frame is not None:
            on_frame(frame)
        boxes[to].put(sender, frame)

    wires = Wires(deliver, faults)
    run, lock = Run(study), threading.Lock()

    def note(event: Event) -> None:
        with lock:
            run.events.append(event)
        if on_event is not None:
            on_event(event)

    def session(p: Party) -> None:
        try:
            run.outcomes[p] = take_part(
                study,
                p,
                MemoryLink(p, wires),
                boxes[p],
                data.get(p),
                part=parts[p],
                reveals=reveals,
                identity=identities[p],
                entropy=sources[p],
                on_event=note,
                on_receipt=lambda receipt: run.receipts.__setitem__(p, receipt),
                consent=(consent or {}).get(p, frozenset(CONSENTS)),
            )
        except BaseException as e:
            run.errors[p] = e

    _in_threads(session, study.parties)
    run.errors = {p: e for p, e in run.errors.items() if not isinstance(e, Killed)}
    run.outcomes = {p: run.outcomes[p] for p in study.parties if p in run.outcomes}  # in the study's order,
    run.receipts = {p: run.receipts[p] for p in study.parties if p in run.receipts}  # whoever was first
    return run


def _in_threads(work: Callable[[Party], None], parties: Iterable[Party]) -> None:
    threads = [threading.Thread(target=work, args=(p,), name=p, daemon=True) for p in parties]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():  # in slices, so that Ctrl-C is heard
            thread.join(0.2)
