import pytest

from cloister.cells.names import check_vocabularies, folded, unfit
from cloister.errors import ProtocolAbort


@pytest.mark.parametrize("name", ["T cell", " T cell", "T  cell ", "t CELL", "T_cell", "T\tcell"])
def test_spellings_of_one_label(name):
    assert folded(name) == "t cell"


@pytest.mark.parametrize(
    ("by_site", "site", "code"),
    [
        ({"a": ["T", "B"], "b": ["B", "NK"]}, "", ""),
        ({"a": ["T"], "b": ["B"], "c": []}, "", ""),  # sorted cells: one type each
        ({"a": ["T", "B"], "b": ["NK"], "c": []}, "", ""),
        ({"a": ["T", "B"], "b": []}, "", ""),  # one site with labels
        ({}, "", ""),
        ({"a": ["T", "B"], "b": ["T", "B"], "c": ["t", "B"]}, "c", "spelling"),
        ({"a": ["T "], "b": ["T"], "c": ["T"]}, "a", "spelling"),
        ({"a": ["T", "t"]}, "a", "spelling"),  # at one site alone
        ({"a": ["T", "B"], "b": ["T", "B"], "c": ["CL:1", "CL:2"]}, "c", "foreign-labels"),
        ({"a": ["T", "B"], "b": ["1"], "c": ["T"]}, "", ""),
    ],
)
def test_the_site_to_ask_is_named(by_site, site, code):
    found = unfit(by_site)
    assert (found.site, found.code) == (site, code) if code else found is None
    if code:
        with pytest.raises(ProtocolAbort) as e:
            check_vocabularies(by_site, "toy", "L1")
        assert (e.value.origin, e.value.began, e.value.code) == (site, code, code)
    else:
        check_vocabularies(by_site, "toy", "L1")
