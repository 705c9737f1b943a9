"""The workflows: what a user can run. Each is one file; this one finds them and checks their options.

A workflow file defines `WORKFLOW`, which says what its options are (a frozen dataclass: the same names in Python, on
the command line and under `[parameters]`), which protocol file each mode runs, and `part`, the code of every party:
`part(seat, adata, options)` looks at the seat's role and plays it.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cloister import protocols
from cloister.errors import ParameterError, UsageError
from cloister.study import Study

if TYPE_CHECKING:
    from anndata import AnnData

    from cloister.net.seat import Outcome, Seat

SHIPPED = (
    "bin-values",
    "find-outliers",
    "shared-pca",
    "train-classifier",
    "map-labels",
    "propagate-labels",
    "fine-tune",
    "train-cellcnn",
    "predict-cellcnn",
    "adapt-model",
    "serve-model",
)
NAMES = SHIPPED  # tests and benchmarks add workflows of their own to these


@dataclass(frozen=True)
class Workflow:
    name: str
    summary: str  # one line
    options: type[Any]  # frozen dataclass; `help` of each field in its metadata
    protocols: Mapping[str, str]  # mode → module under cloister.protocols
    part: Callable[[Seat, AnnData | None, Any], Outcome]
    check: Callable[[AnnData, Any], list[str]]  # raises DataError, or returns warnings; nothing is sent
    auxiliaries: Mapping[str, int] = dataclasses.field(default_factory=dict)  # mode → servers beside the coordinator
    min_sites: int = 2
    files: Callable[[Outcome], dict[str, bytes]] | None = None  # further files to write at a party
    figures: Callable[[Mapping[str, Outcome], Any], list[Any]] | None = None  # for the report
    warnings: Callable[[Study, Any], list[str]] | None = None  # what the parties should hear before they start
    stand_in: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # options that say nothing about a file
    never: tuple[str, ...] = ()  # protocols that one of its protocols could run, and never does here

    def protocol(self, mode: str) -> types.ModuleType:
        if mode not in self.protocols:
            known = " or ".join(self.protocols)
            raise ParameterError(f"'{self.name}' has no mode '{mode}'; use mode {known}")
        return protocols.load(self.protocols[mode])


def option(default: Any, help: str) -> Any:
    """A field of a workflow's options, with the line that `cloister explain` prints about it."""
    return dataclasses.field(default=default, metadata={"help": help})


def names() -> tuple[str, ...]:
    return NAMES


def get(name: str) -> Workflow:
    """The workflow of that name; its module is imported now and not before."""
    if name not in NAMES:
        close = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"known are {', '.join(NAMES)}"
        raise UsageError(f"there is no workflow '{name}'; {hint}")
    module = importlib.import_module(f"cloister.workflows.{name.replace('-', '_')}")
    return typing.cast(Workflow, module.WORKFLOW)


def options_of(workflow: Workflow, given: Mapping[str, Any]) -> Any:
    """Check options against the workflow's dataclass; the error names the key."""
    known = {f.name: f for f in dataclasses.fields(workflow.options)}
    hints = typing.get_type_hints(workflow.options)
    for key, value in given.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"it has {', '.join(known)}"
            raise ParameterError(f"'{workflow.name}' has no option '{key}'; {hint}")
        if not _fits(value, hints[key]):
            raise ParameterError(f"option '{key}' must be {_name(hints[key])}, found {value!r}")
    missing = [n for n, f in known.items() if n not in given and _required(f)]
    if missing:
        raise ParameterError(f"'{workflow.name}' needs the option '{missing[0]}'")
    plain = {k: _coerce(v, hints[k]) for k, v in given.items()}
    return workflow.options(**plain)


def _required(f: dataclasses.Field[Any]) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    for one in _alternatives(hint):
        origin = typing.get_origin(one)
        if origin is typing.Literal:
            if value in typing.get_args(one):
                return True
        elif origin is tuple:
            if isinstance(value, list | tuple) and all(_fits(v, typing.get_args(one)[0]) for v in value):
                return True
        elif one is float:
            if isinstance(value, int | float) and not isinstance(value, bool):
                return True
        elif one is int:
            if isinstance(value, int) and not isinstance(value, bool):
                return True
        elif value is None if one is type(None) else isinstance(value, one):
            return True
    return False


def _coerce(value: Any, hint: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, int) and not isinstance(value, bool) and float in _alternatives(hint):
        return value if int in _alternatives(hint) else float(value)
    return value


def _name(hint: Any) -> str:
    words = []
    for one in _alternatives(hint):
        if typing.get_origin(one) is typing.Literal:
            words.append("one of " + ", ".join(map(repr, typing.get_args(one))))
        elif typing.get_origin(one) is tuple:
            words.append("a list of " + _name(typing.get_args(one)[0]))
        else:
            words.append(
                {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}.get(one, "none")
            )
    return " or ".join(words)


def section(module: types.ModuleType, title: str) -> str:
    """One section (`Reveals`, `Assumes`, `Cost`, ...) of a protocol's docstring."""
    lines = inspect.getdoc(module) or ""
    rows = lines.splitlines()
    for i in range(len(rows) - 1):
        if rows[i].strip() == title and set(rows[i + 1].strip()) == {"-"}:
            body = []
            for j in range(i + 2, len(rows)):
                if j + 1 < len(rows) and rows[j].strip() and rows[j + 1].strip() and set(rows[j + 1].strip()) == {"-"}:
                    break
                body.append(rows[j])
            return "\n".join(body).strip()
    return ""


def protocols_of(workflow: Workflow, mode: str) -> list[types.ModuleType]:
    """The protocol files that a mode runs: its own first, then those that it or the workflow calls."""
    main = workflow.protocol(mode)
    others = {name for one, name in workflow.protocols.items() if one != mode} | set(workflow.never)
    found, queue = [main], [main, sys.modules[workflow.part.__module__]]
    while queue:
        for name in {_home_of(x) for x in vars(queue.pop(0)).values()}:
            if _is_protocol(name) and name.rpartition(".")[2] not in others and sys.modules[name] not in found:
                found.append(sys.modules[name])
                queue.append(sys.modules[name])
    return [main, *sorted(found[1:], key=lambda module: module.__name__)]


def _is_protocol(name: str) -> bool:
    return name.startswith("cloister.protocols.") and not hasattr(sys.modules[name], "__path__")


def _home_of(x: Any) -> str:
    """The module that something is, or comes from."""
    return x.__name__ if isinstance(x, types.ModuleType) else str(getattr(x, "__module__", ""))


def reveals(workflow: Workflow, mode: str) -> dict[str, str]:
    """Protocol → its `Reveals`: the mode's own first, then every other protocol that it runs on the way."""
    texts = {m.__name__.rpartition(".")[2]: section(m, "Reveals") for m in protocols_of(workflow, mode)}
    return {name: text for name, text in texts.items() if text}


def check_plan(study: Study) -> tuple[Workflow, Any]:
    """Workflow and options of a study, or the error that names what is wrong in it."""
    workflow = get(study.workflow)
    workflow.protocol(study.mode)
    needed = workflow.auxiliaries.get(study.mode, 0)
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
    return workflow, options_of(workflow, study.parameters)


def warnings_of(study: Study) -> list[str]:
    """What the parties should hear before they start."""
    notes = []
    if len(study.sites) == 2:
        notes.append("two sites only: every opened sum tells each site the other's contribution by subtraction")
    if study.mode != "hardened":
        ask = f"cloister explain {study.workflow} --mode {study.mode}"
        notes.append(f"mode '{study.mode}' leaks what its paper leaks; see: {ask}")
    workflow = get(study.workflow) if study.workflow in NAMES else None
    if workflow is not None and workflow.warnings is not None:
        notes += workflow.warnings(study, options_of(workflow, study.parameters))
    return notes
