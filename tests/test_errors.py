import inspect

import pytest

from cloister import errors
from cloister.errors import CloisterError, MissingExtra, PeerLost, ProtocolAbort

CODES = {
    "UsageError": 2,
    "DataError": 1,
    "ParameterError": 1,
    "MissingExtra": 1,
    "RefusedError": 4,
    "WireError": 4,
    "ProtocolAbort": 4,
    "PeerLost": 3,
    "ReceiptError": 4,
}


def test_the_tree_has_the_exit_codes_of_the_command_line():
    kinds = {n: k for n, k in vars(errors).items() if inspect.isclass(k) and issubclass(k, CloisterError)}
    assert {n: k.exit_code for n, k in kinds.items() if n != "CloisterError"} == CODES


def test_the_docstring_draws_the_tree():
    for name, code in CODES.items():
        row = next(r for r in errors.__doc__.splitlines() if name in r)
        assert row.rstrip().endswith(f"exit code {code}")


def test_an_abort_says_where_and_why():
    e = PeerLost("secure_sum", "L5", "timeout", "nothing from 'basel' for 60 s")
    assert (e.protocol, e.line, e.code) == ("secure_sum", "L5", "timeout")
    assert str(e) == "secure_sum L5: nothing from 'basel' for 60 s"
    assert str(ProtocolAbort("p", "L1", "replay")) == "p L1: replay"
    assert str(ProtocolAbort("policy", "-", "refused", "not approved")) == "policy: not approved"
    assert not e.heard


def test_a_missing_extra_names_the_line_to_type():
    assert "pip install 'cloister[he]'" in str(MissingExtra("seal-python", "he"))


@pytest.mark.parametrize("kind", [k for k in CODES if k not in ("MissingExtra", "ProtocolAbort", "PeerLost")])
def test_the_others_are_made_from_a_sentence(kind):
    assert str(getattr(errors, kind)("what to do")) == "what to do"
