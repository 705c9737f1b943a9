"""Hello: before a run, all parties find that they agreed on the same things, and get an id that no run had before.

H1   u → S   version, digest of the study, digest of protocol and public parameters, a nonce
H2   S ⇒ u   everyone's H1; who finds a difference, or its own changed, stops
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from cloister.errors import ProtocolAbort
from cloister.mpc.net import wire
from cloister.mpc.net.wire import message
from cloister.study import Party, Study

if TYPE_CHECKING:
    from cloister.mpc.net.channel import Channel

NAME = "channel"


@message("H1", protocol=NAME)
class Hello:  # every party → coordinator
    version: str
    study: bytes  # digest
    params: bytes  # digest of protocol name and public parameters
    nonce: bytes


@message("H2", protocol=NAME)
class Welcome:  # coordinator → every party
    hellos: dict[Party, Hello]


async def agree(lobby: Channel, mine: Hello, peers: Iterable[Party], *, first: bool) -> bytes:
    """H1, H2: the id of the run."""
    hub = lobby.study.coordinator
    if lobby.me == hub:
        # the first time everyone must be there, but for servers that have no part in this workflow and leave at once;
        # later on, who has dropped out since is left out
        spare = set(lobby.study.auxiliaries) - {hub}
        needed = [p for p in peers if p not in spare]
        hellos = {hub: mine, **await lobby.gather(needed, Hello, quorum=None if first else 1)}
        hellos |= await lobby.gather([p for p in peers if p in spare], Hello, quorum=0)  # H1
        await lobby.broadcast([p for p in hellos if p != hub], Welcome(hellos))  # H2
        check_hellos(hellos, hub, lobby.study)  # after it, so that everyone can say who differs
    else:
        await lobby.send(hub, mine)  # H1
        hellos = {Party(p): h for p, h in (await lobby.recv_broadcast(hub, Welcome)).hellos.items()}  # H2
        known = {hub, lobby.me} <= hellos.keys() <= set(lobby.study.parties)
        if not known or hellos[lobby.me].nonce != mine.nonce:
            raise ProtocolAbort(NAME, "H2", "mismatch", "the coordinator repeats another hello than was sent")
        check_hellos(hellos, lobby.me, lobby.study)
    nonces = {p: h.nonce for p, h in hellos.items()}
    return wire.digest("run", mine.study, mine.params, mine.version, nonces)


def check_hellos(hellos: Mapping[Party, Hello], me: Party, study: Study | None = None) -> None:
    """Raise unless all parties agreed on the same things as `me`; who is at another step of `study` is told so."""
    mine = hellos[me]
    for p, h in hellos.items():
        if study is not None and h.study != mine.study and (place := study.place_of(h.study)):
            why = f"'{p}' is at {place}, and '{me}' at {study.place}; nothing was sent"
            raise ProtocolAbort(NAME, "H2", "order", why)
    for field, what in {
        "version": "another version of Cloister",
        "study": "another study file",
        "params": "other options for this workflow",
    }.items():
        others = [p for p, h in hellos.items() if getattr(h, field) != getattr(mine, field)]
        if others:
            names = ", ".join(sorted(others))
            raise ProtocolAbort(NAME, "H2", "mismatch", f"{names} came with {what} than {me}; nothing was sent")
    if any(len(h.nonce) != 16 for h in hellos.values()):
        raise ProtocolAbort(NAME, "H2", "malformed", "a nonce that is not 16 bytes")
