"""What a party signed, checked by the key that the study names: a local step of protocols that hand keys round."""

from __future__ import annotations

from cloister.errors import CloisterError, ProtocolAbort
from cloister.mpc.crypto.agreement import check_signature
from cloister.mpc.net.channel import Channel
from cloister.mpc.parties import Party


def check_signed(
    ch: Channel, v: Party, context: str, data: bytes, signature: bytes, *, protocol: str, line: str, mine: bytes = b""
) -> None:
    """Raise unless `v` signed `data` in this context; `data` has to name the run and the party.

    A party that gives its own signature of the same data as `mine` compares it where its own comes back.
    """
    if mine and v == ch.me:
        if signature != mine:
            raise ProtocolAbort(protocol, line, "signature", "my own signature came back changed")
        return
    if v not in ch.agreement.keys:
        raise ProtocolAbort(protocol, line, "no-key", f"the study names no key of '{v}'; add it under [keys]")
    try:
        check_signature(ch.agreement.keys[v], context, data, signature)
    except CloisterError:
        raise ProtocolAbort(protocol, line, "signature", f"'{v}' did not sign what it is said to have signed") from None
