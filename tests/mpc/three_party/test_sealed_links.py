"""Keys of links are signed: who is handed a key that its sender did not sign says so, and agrees on nothing."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from cloister.mpc.crypto.agreement import key_pair
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.parties import Party
from cloister.mpc.testing.lies import Lie, Stage
from cloister.mpc.three_party import replicated, sealed_links
from cloister.testing import Case, check_no_errors, run_protocol

TRIO = ANN, BEN, CAT = tuple(map(Party, ("ann", "ben", "cat")))
DAN = Party("dan")  # gives inputs, computes nothing


class OneKey(Stage):
    """Whoever carries the frames puts a key of its own in place of one party's, to one recipient alone."""

    def __init__(self, liar, to):
        super().__init__(Lie("-", liar, "-"))
        self.victim = to

    def instead(self, to, msg):
        forged = to == self.victim and hasattr(msg, "pk") and not self.lied
        self.lied = self.lied or forged
        return [replace(msg, pk=key_pair(Entropy()).public) if forged else msg]


def meet(ends, stage=None):
    async def role(ch, params, *, entropy, identity):
        await ends.meet(ch, TRIO, (DAN,), entropy=entropy, identity=identity)

    members = (*TRIO, DAN)
    module = SimpleNamespace(__name__="replicated", roles=lambda _: dict.fromkeys(members, role))
    roles = {p: stage.role(p, role) for p in members} if stage else None
    return run_protocol(module, Case(0, {}), roles=roles, timeout=2.0)


@pytest.mark.parametrize(
    ("ends", "protocol", "line"),
    [(sealed_links.Links, "verified", "V1"), (replicated.Trio, "replicated", "R1")],
)
@pytest.mark.parametrize(("of", "to"), [(CAT, ANN), (ANN, BEN), (DAN, CAT), (BEN, DAN)])
def test_one_key_that_is_not_its_senders_is_refused_by_who_gets_it(ends, protocol, line, of, to):
    stage = OneKey(of, to)
    run = meet(ends, stage)
    assert stage.lied
    error = run.errors[to]
    assert (error.protocol, error.line, error.code, error.heard) == (protocol, line, "signature", False)
    assert f"'{of}'" in str(error)


@pytest.mark.parametrize("ends", [sealed_links.Links, replicated.Trio])
def test_keys_that_are_signed_pass(ends):
    check_no_errors(meet(ends))
