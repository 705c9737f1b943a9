from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.errors import DataError, ProtocolAbort
from cloister.rehearsal.rehearsal import Fault
from cloister.study import Party
from cloister.testing import Case, check_abort, check_cost, check_ideal, check_vectors, check_view, run_protocol, values
from cloister.workflows.common import common_genes
from cloister.workflows.common.common_genes import Agreed, Common, Measured, Params

VECTORS = Path(__file__).parents[2] / "vectors" / "common_genes.json"
HUB = Party("hub")
SITES = tuple(map(Party, ("a", "b", "c")))
PARAMS = Params(SITES, HUB)


def case(lists=(["CD3E", "CD4", "CD8A"], ["CD4", "CD8A", "TP53"], ["CD8A", "CD4"]), kinds=("counts",) * 3):
    params = Params(SITES[: len(lists)], HUB)
    return Case(params, {u: (k, list(g)) for u, k, g in zip(params.sites, kinds, lists, strict=True)})


def agree(found, ideal):
    assert found == ideal


GENES = st.lists(st.sampled_from([f"GENE{i}" for i in range(30)]), min_size=12, max_size=25, unique=True)


@settings(max_examples=20, deadline=None)
@given(lists=st.lists(GENES, min_size=2, max_size=3), kind=st.sampled_from(["counts", "log"]))
def test_ideal(lists, kind):
    lists = [["ALWAYS", *names] for names in lists]
    check_ideal(common_genes, [case(lists, (kind,) * len(lists))], agree=agree)


def test_the_result_is_the_intersection():
    run = run_protocol(common_genes, case())
    assert set(values(run).keys()) == {HUB, *SITES}
    assert all(v == Agreed("counts", ("CD4", "CD8A")) for v in values(run).values())


def test_the_same_list_everywhere_keeps_its_order():
    names = ["TP53", "ACTB", "CD4"]
    run = run_protocol(common_genes, case([names] * 3))
    assert values(run)[HUB].names == tuple(names)


def test_ensembl_versions_do_not_matter():
    lists = [["ENSG00000141510.18", "ENSG00000010610.9"], ["ENSG00000141510.5", "ENSG00000010610.9"]]
    run = run_protocol(common_genes, case(lists, ("log",) * 2))
    assert values(run)[HUB].names == ("ENSG00000141510", "ENSG00000010610")


def test_vectors():
    check_vectors(common_genes, case(), VECTORS)


def test_view_depends_on_the_names_and_the_kind_alone():
    """Names and kind are public inputs, so two cases with the same ones look the same."""
    check_view(common_genes, case(), case())
    longer = [["CD3E", "CD4", "CD8A", "ONE-MORE"], ["CD4", "CD8A", "TP53"], ["CD8A", "CD4"]]
    with pytest.raises(AssertionError, match="depend on the inputs"):
        check_view(common_genes, case(), case(longer))


def test_cost():
    check_cost(common_genes, case())
    names = [f"GENE{i:05d}" for i in range(20_000)]
    run = run_protocol(common_genes, case([names] * 3))
    size = len("\n".join(names).encode())
    wanted = common_genes.cost(PARAMS, up=size, down=size)
    for party, (messages, payload) in wanted.items():
        rows = [e for e, _ in run.receipts[party].entries if e.kind == "sent" and e.protocol == "common_genes"]
        assert len(rows) == messages
        assert payload <= sum(e.bytes for e in rows) <= payload + 400 * messages


def test_abort_or_survive():
    c = case()

    def survived(run):
        found = values(run)[HUB]
        assert found.kind == "counts"
        assert {"CD4", "CD8A"} <= set(found.names)

    messages = [("b", "hub", "common_genes.Measured"), ("hub", "b", "common_genes.Common")]
    messages += [("b", "hub", "channel.Hello"), ("hub", "b", "channel.Welcome")]
    assert check_abort(common_genes, c, survived=survived, messages=messages) == 24


def test_a_missing_site_is_left_out():
    lists = [["A", "B"], ["A", "B"], ["A"]]
    run = run_protocol(common_genes, case(lists), faults=[Fault("kill", "c", "hub", "Measured")], timeout=1.0)
    assert run.errors == {}
    assert values(run)[HUB].names == ("A", "B")


def test_two_missing_of_three_are_too_many():
    faults = [Fault("kill", s, "hub", "Measured") for s in ("b", "c")]
    run = run_protocol(common_genes, case(), faults=faults, timeout=1.0)
    assert run.errors[HUB].code == "too-few"


@pytest.mark.parametrize(
    ("c", "code", "said"),
    [
        (case(kinds=("counts", "log", "counts")), "mixed-values", "a: counts, b: log, c: counts"),
        (case([["A"], ["B"], ["C"]]), "no-common-genes", "no gene in common"),
        (case([["A"], ["ENSG00000141510"], ["A"]]), "no-common-genes", "Ensembl ids"),
        (case([["A", "A"], ["A"], ["A"]]), "no-common-genes", "unique"),
        (case([[], ["A"], ["A"]]), "no-common-genes", "no gene in common"),
    ],
)
def test_what_does_not_fit_together_is_named_at_the_coordinator_and_by_code_at_the_sites(c, code, said):
    run = run_protocol(common_genes, c)
    assert run.errors.keys() == {HUB, *SITES}
    assert {e.code for e in run.errors.values()} == {code}
    assert said in str(run.errors[HUB])


def test_a_line_break_in_a_name_is_refused_before_anything_is_sent():
    run = run_protocol(common_genes, case([["A\nB", "C"], ["C"], ["C"]]))
    assert isinstance(run.errors[SITES[0]], DataError)
    assert not any(e.protocol == "common_genes" and e.kind == "sent" for e, _ in run.receipts[SITES[0]].entries)


async def lies_about_the_kind(ch, params):
    await ch.gather(params.sites, Measured)
    await ch.scatter(params.sites, Common("log", b"A"))


async def sends_no_text(ch, params):
    await ch.gather(params.sites, Measured)
    await ch.scatter(params.sites, Common("counts", b"\xff\xfe"))


@pytest.mark.parametrize(("role", "code"), [(lies_about_the_kind, "mixed-values"), (sends_no_text, "malformed")])
def test_a_coordinator_that_answers_nonsense_is_refused(role, code):
    run = run_protocol(common_genes, case(), roles={HUB: role})
    for u in SITES:
        assert isinstance(run.errors[u], ProtocolAbort)
        assert (run.errors[u].code, run.errors[u].line) == (code, "L2")


def test_no_value_is_sent():
    assert {f for kind in (Measured, Common) for f in kind.__dataclass_fields__} == {"kind", "names"}
    assert not any(isinstance(x, np.ndarray) for x in case().inputs[SITES[0]])
