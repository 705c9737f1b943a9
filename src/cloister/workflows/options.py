"""Options of a workflow: a frozen dataclass, the same names in Python, on the command line and under `[parameters]`."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
import warnings
from collections.abc import Mapping
from typing import Any

from cloister.errors import ParameterError

WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


PAPER = ("published",)  # modes of an option that only a paper's own protocol needs
WEAKER = ("semi-honest", "published")  # of one that hardened mode does not compute


def option(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    opens: bool = False,
    modes: tuple[str, ...] = (),
    drawn: bool = False,
    retired: bool = False,
) -> Any:
    """A field of a workflow's options, with the line that `cloister explain` prints about it.

    `opens`: it decides what is opened, so that a site's own floor must be met by the number that the study agreed on.
    `modes`: the modes that have this option; every mode if empty. `drawn`: it names a column of obs that only appears
    in figures at the site, so its groups are in no sum.
    `retired`: the next release has its default as a constant. Until then it is listed nowhere, and accepted with a
    warning.
    """
    what = {"help": help, "opens": opens, "modes": modes, "retired": retired, "drawn": drawn}
    return dataclasses.field(default=default, metadata=what)


def listed_options(kind: type[Any]) -> tuple[dataclasses.Field[Any], ...]:
    """The options of all modes that are not retired, in their order."""
    return tuple(f for f in dataclasses.fields(kind) if not f.metadata.get("retired"))


def options_in(kind: type[Any], mode: str) -> tuple[dataclasses.Field[Any], ...]:
    """The options that a mode has, in their order."""
    return tuple(f for f in listed_options(kind) if _is_in(f, mode))


def _is_in(f: dataclasses.Field[Any], mode: str) -> bool:
    return not f.metadata.get("modes") or mode in f.metadata["modes"]


def check_mode_options(kind: type[Any], given: Mapping[str, Any], mode: str) -> None:
    """Raise `ParameterError` for an option that this mode does not have, unless it has its default value."""
    here = {f.name for f in dataclasses.fields(kind) if _is_in(f, mode)}
    for f in dataclasses.fields(kind):
        if f.name in given and f.name not in here and given[f.name] != f.default:
            modes = " and ".join(f.metadata["modes"])
            raise ParameterError(
                f"option '{f.name}' = {given[f.name]!r} exists in mode {modes} only, found mode {mode}; leave it out"
            )


def opening_floor(options: Any, name: str) -> int | None:
    """The agreed number below which nothing is opened, if the workflow has an option of this name that says so."""
    return next(
        (getattr(options, f.name) for f in dataclasses.fields(options) if f.name == name and f.metadata["opens"]), None
    )


def check_min_donors(least: int) -> None:
    """Raise `ParameterError` for a floor that lets one person's cells through as a sum."""
    if least < 2:
        raise ParameterError(f"option 'min_donors' must be at least 2, found {least}")


def check_levels(levels: tuple[str, ...], label_key: str, labels: tuple[str, ...]) -> None:
    """Raise `ParameterError` for columns beside the labels that cannot go with them."""
    if len({*levels, label_key}) != len(levels) + 1:
        raise ParameterError("option 'levels' names columns beside 'label_key', each once")
    if levels and labels:
        raise ParameterError("give either 'labels' or 'levels': names with their levels are collected from the sites")


def read_options(kind: type[Any], given: Mapping[str, Any], workflow: str) -> Any:
    """An instance of the options' dataclass from plain values; the error names the key."""
    known = {f.name: f for f in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    for key, value in given.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = (
                f"did you mean '{close[0]}'?" if close else f"it has {', '.join(f.name for f in listed_options(kind))}"
            )
            raise ParameterError(f"'{workflow}' has no option '{key}'; {hint}")
        if not _fits(value, hints[key]):
            raise ParameterError(f"option '{key}' must be {_name(hints[key])}, found {value!r}")
        if known[key].metadata.get("retired"):
            usual = known[key].default
            warnings.warn(
                f"option '{key}' of '{workflow}' goes in the next release, which always uses {usual!r}; leave it out",
                FutureWarning,
                stacklevel=2,
            )
    missing = [name for name, f in known.items() if name not in given and f.default is dataclasses.MISSING]
    if missing:
        raise ParameterError(f"'{workflow}' needs the option '{missing[0]}'")
    return kind(**{k: _coerce(v, hints[k]) for k, v in given.items()})


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the one that is there."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    for one in alternatives(hint):
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
    if isinstance(value, int) and not isinstance(value, bool) and float in alternatives(hint):
        return value if int in alternatives(hint) else float(value)
    return value


def _name(hint: Any) -> str:
    words = []
    for one in alternatives(hint):
        if typing.get_origin(one) is typing.Literal:
            words.append("one of " + ", ".join(map(repr, typing.get_args(one))))
        elif typing.get_origin(one) is tuple:
            words.append("a list of " + _name(typing.get_args(one)[0]))
        else:
            words.append(WORDS.get(one, "none"))
    return " or ".join(words)


def privacy_budget(noise: float, delta: float, sums: int) -> float:
    """Return ε of a number of sums with Gaussian noise, rounded up to two digits; 0 without noise.

    Rényi differential privacy of the Gaussian mechanism, converted as in [CKS20]; equal to Opacus's accountant without
    sampling. `noise` is the standard deviation divided by what one cell, donor or site can change; its data are
    compared with none. Against other data a sum may change by twice as much, and ε is that of half the noise.
    """
    if not noise:
        return 0.0
    orders = [1 + x / 20 for x in range(1, 400)] + [float(x) for x in range(21, 512)]
    bounds = (
        sums * a / (2 * noise**2) + math.log1p(-1 / a) - (math.log(delta) + math.log(a)) / (a - 1) for a in orders
    )
    return math.ceil(max(0.0, min(bounds)) * 100) / 100
