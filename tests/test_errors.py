import inspect
import json

import pytest

from cloister import errors
from cloister.errors import CloisterError, MissingExtra, PeerLost, ProtocolAbort

CODES = {
    "UsageError": 2,
    "DataError": 1,
    "DiskError": 1,
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


def test_an_error_comes_back_from_json_as_it_was():
    lost = errors.PeerLost("p", "L1", "timeout", "what happened")
    lost.heard = True
    for e in (lost, errors.DataError("no column 'x'"), errors.MissingExtra("torch", "models")):
        again = errors.from_json(json.loads(json.dumps(errors.to_json(e))))
        assert (type(again), str(again)) == (type(e), str(e))
    assert (again.exit_code, lost.exit_code) == (1, 3)
    again = errors.from_json(errors.to_json(lost))
    assert (again.protocol, again.line, again.code, again.heard) == ("p", "L1", "timeout", True)


@pytest.mark.parametrize("kind", ["ZeroDivisionError", "in_words", "annotations", "NoSuch", "__name__"])
def test_what_is_no_error_of_ours_comes_back_as_a_plain_one(kind):
    e = errors.from_json({"type": kind, "text": "what happened"})
    assert type(e) is errors.CloisterError
    assert "what happened" in str(e)
