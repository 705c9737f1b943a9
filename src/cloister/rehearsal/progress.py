"""How far a run has come at each party: what is done of how much, rounds, bytes, and about how long the rest takes.

Fed with the events of a run, wherever its parties are. Passes over cells and steps of a protocol say themselves how far
they are. Otherwise the lines of the mode's own protocol are counted, as its file lists them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from cloister import protocols
from cloister.cells.progress import Listener
from cloister.mpc.net.events import Event
from cloister.report.parts import size
from cloister.study import Party
from cloister.workflows.modes import leading

TASKS = {  # what a workflow does, while it does it
    "bin-values": "binning values",
    "find-outliers": "finding outliers",
    "shared-pca": "computing shared components",
    "integrate": "integrating cells",
    "compare-groups": "comparing groups",
    "train-classifier": "training the classifier",
    "map-labels": "labelling cells",
    "propagate-labels": "propagating labels",
    "fine-tune": "fine-tuning the model",
    "train-cellcnn": "training on encrypted data",
    "predict-cellcnn": "predicting on encrypted data",
    "adapt-model": "adapting the model",
    "serve-model": "answering encrypted queries",
}
STAGES = ("reading", "writing", "report")  # what happens on this machine alone; the rest is protocols


@dataclass
class Standing:
    """Where one party stands."""

    doing: str = ""  # "reading adata.X", "shared_pca L5 Components"
    done: int = 0
    of: int = 0  # 0: not known
    unit: str = ""  # what is counted: "line", "step", or "%" for cells and bytes
    rounds: int = 0
    sent: int = 0
    left: float | None = None  # seconds, about
    step: str = ""  # "step 2 of 3 (integrate)", where a study has several
    task: str = ""  # what is being done, for people: "integrating cells"
    about: int = 0  # rounds of the latest finished run of the same study; 0: there was none

    @property
    def words(self) -> str:
        """How far it is, for people: "step 2 of 3, integrating cells, round 124 of about 146". No guess at the time."""
        if self.doing.partition(" ")[0] in STAGES:
            return ", ".join(x for x in (self.step, self.doing, self.count) if x)
        rounds = f"round {self.rounds}" if self.rounds else ""
        if rounds and self.about >= self.rounds:
            rounds += f" of about {self.about}"
        if not self.about and self.unit == "step" and self.of:
            rounds = ", ".join(x for x in (rounds, f"iteration {self.done} of {self.of}") if x)
        return ", ".join(x for x in (self.step, self.task or self.doing, rounds) if x)

    @property
    def fraction(self) -> tuple[int, int] | None:
        """For a bar: what is done of how much; None where that is not known."""
        if self.doing.partition(" ")[0] in STAGES or not self.about:
            return (min(self.done, self.of), self.of) if self.of and self.unit != "line" else None
        return (self.rounds, self.about) if self.rounds <= self.about else None

    @property
    def count(self) -> str:
        """What is done of how much, in words."""
        if not self.of:
            return ""
        return f"{self.done / self.of:.0%}" if self.unit == "%" else f"{self.unit} {self.done} of {self.of}"

    @property
    def time_left(self) -> str:
        if self.left is None:
            return ""
        return f"about {self.left:.0f} s left" if self.left < 120 else f"about {self.left / 60:.0f} min left"

    def __str__(self) -> str:
        sent = f"{size(self.sent)} sent" if self.sent else ""
        return ", ".join(x for x in (self.words, sent, self.doing if self.task else "") if x)


def passes_of(party: str, on_event: Callable[[Event], None] | None) -> Listener | None:
    """A listener to passes over a party's cells, before and after its place in the run is there."""
    if on_event is None:
        return None
    return lambda stage, what, done, of: on_event(Event(Party(party), "step", stage, "-", what, "", 0, 0, 0, done, of))


class Watch:
    """What is known of all parties, from the events that were heard."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.standings: dict[str, Standing] = {}
        self._series: dict[str, tuple[tuple[str, ...], float, int]] = {}  # party → what is counted, since when, from
        self._stepped: set[tuple[str, str]] = set()  # party and protocol whose steps say how far they are

    def hear(self, event: Event) -> Standing:
        """Take in an event; returns where its party stands now."""
        now, local = self.standings.setdefault(event.party, Standing()), event.protocol in STAGES
        now.sent, now.rounds = event.total or now.sent, event.rounds or now.rounds
        name = event.name.rpartition(".")[2] if event.kind in ("sent", "received") else event.name
        now.doing = f"{event.protocol} {name}" if local else f"{event.protocol} {event.line} {name}"
        if event.of:
            self._stepped.add((event.party, event.protocol))
            what = (event.protocol, event.name if local else "step")
            self._count(event.party, what, event.done, event.of, "%" if local else "step")
        elif (at := self._line(event)) is not None:
            self._count(event.party, (event.protocol, "line"), *at, "line")
        elif self._series.get(event.party, ((STAGES[0],),))[0][0] in STAGES:  # a pass over cells has ended
            now.done, now.of, now.left = 0, 0, None
        return now

    def _line(self, event: Event) -> tuple[int, int] | None:
        """Which line of the mode's own protocol this is, and of how many; None where its steps are counted instead."""
        if event.protocol not in leading() or (event.party, event.protocol) in self._stepped:
            return None
        lines = protocols.lines(event.protocol)
        return (lines.index(event.line) + 1, len(lines)) if event.line in lines else None

    def _count(self, party: str, what: tuple[str, ...], done: int, of: int, unit: str) -> None:
        now, at = self.standings[party], self._clock()
        key, since, first = self._series.get(party, ((), 0.0, 0))
        again = key != what or of != now.of
        if not again and done < now.done:
            if unit == "line":  # it comes back to a line of the loop it is in
                done = now.done
            else:
                again = True  # the next pass over the same cells
        if again:
            since, first = at, 0 if unit == "line" else done
            self._series[party] = (what, since, first)
        now.done, now.of, now.unit = done, of, unit
        now.left = (at - since) * (of - done) / (done - first) if done > first and at > since else None
