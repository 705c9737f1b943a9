"""The seventh question of the test kit: what of an honest site enters opened sums, whatever other parties send.

`check_disclosure` rehearses a workflow with one honest site, and with the other sites' inputs replaced by whatever an
attacker would choose. It fails unless every number that the honest site added to an opened sum

- came from the disclosure module by way of `Channel.contribute`: no other code contributes, and
- is based on at least `min_cells` of the site's cells and `min_donors` of its donors, or is suppressed.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np

from cloister.disclosure import Contribution, Thresholds
from cloister.errors import CloisterError
from cloister.mpc.net.channel import Channel
from cloister.mpc.sums import checked_sum, count_tests, secure_sum
from cloister.rehearsal.rehearsal import rehearse
from cloister.rehearsal.run import Run
from cloister.study import Party

PRIMITIVES = ((secure_sum, "contributor"), (secure_sum, "contribute"), (checked_sum, "site"), (count_tests, "site"))
Change = Callable[[Any], Any]  # what an attacker makes of its own cells

_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("inside a sum", default=False)


@dataclass
class Record:
    """What one party contributed in one run."""

    parts: list[tuple[str, Contribution]] = field(default_factory=list)  # where, and what
    unaccounted: list[str] = field(default_factory=list)  # sums whose input did not come from `Channel.contribute`
    _words: set[bytes] = field(default_factory=set)

    def contributed(self, where: str, part: Contribution) -> None:
        self.parts.append((where, part))
        self._words.add(np.ascontiguousarray(part.values).tobytes())

    def summed(self, scope: str, x: Any) -> None:
        if np.ascontiguousarray(x).tobytes() not in self._words:
            self.unaccounted.append(scope)


@contextlib.contextmanager
def recorded(honest: Party) -> Iterator[Record]:
    """Record what one party contributes to sums, and by which way."""
    record = Record()
    contribute = Channel.contribute

    def watched(ch: Channel, part: Contribution, *, line: str, what: str, protocol: str) -> Any:
        if ch.me == honest:
            record.contributed(f"{protocol} {line} {what}", part)
        return contribute(ch, part, line=line, what=what, protocol=protocol)

    def counted(role: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(role)
        async def run(ch: Channel, params: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            if ch.me == honest and not _inside.get():
                record.summed(ch.scope, x)
            token = _inside.set(True)
            try:
                return await role(ch, params, x, *args, **kwargs)
            finally:
                _inside.reset(token)

        return run

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Channel, "contribute", watched))
        for module, name in PRIMITIVES:
            stack.enter_context(mock.patch.object(module, name, counted(getattr(module, name))))
        yield record


@dataclass(frozen=True)
class Disclosed:
    """What `check_disclosure` saw over all its runs."""

    runs: int
    contributions: int
    withheld: int  # groups below a threshold
    cells: int | None  # smallest group of cells behind any number
    donors: int | None


def check_disclosure(
    workflow: str,
    data: Mapping[str, Any],
    honest: str,
    *,
    attacks: Sequence[Change] = (),
    least: Thresholds | None = None,
    **options: Any,
) -> Disclosed:
    """Raise `AssertionError` unless all that `honest` contributes is based on enough of its own cells and donors.

    `attacks` are changes of the other sites' cells, tried one after the other; honest inputs come first. A run that
    aborts counts too: what was contributed before is checked.
    """
    least = least or Thresholds()
    records: list[Record] = []
    for attack in (None, *attacks):
        sites = {p: x if p == honest or attack is None else attack(x) for p, x in data.items()}
        with recorded(Party(honest)) as record:
            try:
                run: Run = rehearse(workflow, sites, check=attack is None, **options)
            except CloisterError:
                if attack is None:
                    raise  # else: the attacker's own software would refuse these cells, so nothing was sent
        if attack is None and not record.parts:
            raise AssertionError(f"'{honest}' contributed nothing to {workflow}: {run.errors}")
        records.append(record)
    for record in records:
        if record.unaccounted:
            raise AssertionError(f"{workflow}: sums outside the disclosure module: {', '.join(record.unaccounted[:5])}")
        for where, part in record.parts:
            few = part.cells is not None and part.cells < least.min_cells
            if few or (part.donors is not None and part.donors < least.min_donors):
                raise AssertionError(f"{where}: {part.cells} cells of {part.donors} donors of '{honest}'")
    parts = [part for record in records for _, part in record.parts]
    return Disclosed(
        len(records),
        len(parts),
        sum(part.withheld for part in parts),
        min((part.cells for part in parts if part.cells is not None), default=None),
        min((part.donors for part in parts if part.donors is not None), default=None),
    )
