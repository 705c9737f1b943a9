import dataclasses
import inspect
import types
import warnings
from typing import Literal

import pytest

import cloister as cl
from cloister import protocols, workflows
from cloister.errors import ParameterError, UsageError
from cloister.session import Outcome
from cloister.study import Study
from cloister.workflows import Workflow, check_plan, get, options_of, warnings_of
from cloister.workflows.modes import Mode
from cloister.workflows.options import options_in, read_options


@dataclasses.dataclass(frozen=True)
class Options:
    n: int
    share: float = 0.5
    name: str | None = None
    flag: bool = False
    kind: Literal["a", "b"] = "a"
    sizes: tuple[int, ...] = (1,)
    either: int | float = 1

    def __post_init__(self) -> None:
        if self.n < 0:
            raise ParameterError(f"option 'n' must be at least 0, found {self.n}")


TOY = Workflow("toy", "A toy.", Options, {"hardened": Mode(("secure_sum",))}, lambda *_: Outcome(), lambda *_: [])


def test_options_are_checked_and_made():
    made = options_of(TOY, {"n": 3, "share": 1, "name": "x", "flag": True, "kind": "b", "sizes": [1, 2]})
    assert made == Options(3, 1.0, "x", True, "b", (1, 2))
    assert type(made.share) is float
    assert options_of(TOY, {"n": 3}) == Options(3)
    assert options_of(TOY, {"n": 3, "name": None}).name is None
    assert type(options_of(TOY, {"n": 3, "either": 2}).either) is int


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "'toy' needs the option 'n'"),
        ({"m": 3}, "'toy' has no option 'm'"),
        ({"shar": 3}, "no option 'shar'; did you mean 'share'"),
        ({"n": 1.0}, "option 'n' must be a whole number, found 1.0"),
        ({"n": True}, "option 'n' must be a whole number"),
        ({"n": "3"}, "option 'n' must be a whole number"),
        ({"n": 1, "share": "x"}, "option 'share' must be a number"),
        ({"n": 1, "share": True}, "option 'share' must be a number"),
        ({"n": 1, "name": 3}, "option 'name' must be a text or none"),
        ({"n": 1, "flag": 1}, "option 'flag' must be true or false"),
        ({"n": 1, "kind": "c"}, "option 'kind' must be one of 'a', 'b'"),
        ({"n": 1, "sizes": 3}, "option 'sizes' must be a list of a whole number"),
        ({"n": 1, "sizes": [1, "x"]}, "option 'sizes' must be a list"),
        ({"n": -1}, "option 'n' must be at least 0"),
    ],
)
def test_a_wrong_option_is_named(given, said):
    with pytest.raises(ParameterError, match=said):
        options_of(TOY, given)


def test_a_workflow_is_found_by_name_or_the_nearest_is_suggested():
    assert get("bin-values").name == "bin-values"
    with pytest.raises(UsageError, match="did you mean 'bin-values'"):
        get("bin_values")
    with pytest.raises(UsageError, match="known are bin-values"):
        get("zzz")


def study(sites=3, auxiliaries=0, **changes):
    parties = {"hub": "coordinator"} | {f"s{i}": "site" for i in range(sites)}
    parties |= {f"aux-{i}": "auxiliary" for i in range(auxiliaries)}
    return Study(**({"name": "n", "workflow": "bin-values", "parties": parties} | changes))


def test_a_plan_is_checked_whole():
    found, options = check_plan(study(parameters={"n_bins": 7}))
    assert (found.name, options.n_bins) == ("bin-values", 7)
    with pytest.raises(ParameterError, match="at least 2 sites, found 1"):
        check_plan(study(sites=1))
    with pytest.raises(ParameterError, match="has no mode 'plain'; use mode hardened or published"):
        check_plan(study(mode="plain"))
    with pytest.raises(ParameterError, match="no option 'bins'"):
        check_plan(study(parameters={"bins": 7}))
    with pytest.raises(UsageError, match="there is no workflow"):
        check_plan(study(workflow="nothing"))


def test_a_plan_needs_its_auxiliary_servers(monkeypatch):
    needs = dataclasses.replace(TOY, modes={"hardened": Mode(("secure_sum",), auxiliaries=1)})
    monkeypatch.setattr(workflows, "get", lambda name: needs)
    with pytest.raises(ParameterError, match=r"needs 1 auxiliary server\(s\) in \[parties\], found 0"):
        check_plan(study(parameters={"n": 1}))
    assert check_plan(study(auxiliaries=1, parameters={"n": 1}))[1] == Options(1)


def test_two_sites_and_published_modes_are_warned_of():
    assert warnings_of(study()) == []
    (two,) = warnings_of(study(sites=2))
    assert "two sites only" in two
    assert "subtract its own input" in two
    (leaks,) = warnings_of(study(mode="published"))
    assert "the coordinator learns each site's own quantiles" in leaks
    assert "cloister explain bin-values --mode published" in leaks
    assert len(warnings_of(study(sites=2, mode="published"))) == 2


def test_sections_of_a_docstring_are_cut_out():
    text = "Title.\n\nReveals\n-------\na : one\n    more\n\nb : two\n\nCost\n----\nmuch\n"
    assert protocols.cut_section(text, "Reveals") == "a : one\n    more\n\nb : two"
    assert protocols.cut_section(text, "Cost") == "much"
    assert protocols.cut_section(text, "Assumes") == ""
    assert protocols.cut_section("", "Reveals") == ""


def test_a_protocol_is_found_by_its_name_and_nothing_else_is_read():
    assert protocols.load("secure_sum").__name__ == "cloister.mpc.sums.secure_sum"
    assert protocols.section("secure_sum", "Reveals").startswith("aggregator : ")
    assert protocols.docstring("../errors") == protocols.docstring("no_such") == ""


def test_every_workflow_has_a_public_function_of_its_name():
    assert [name.replace("_", "-") for name in cl._WORKFLOWS] == list(workflows.SHIPPED)
    for name in cl._WORKFLOWS:
        parameters = list(inspect.signature(getattr(cl, name)).parameters)
        assert parameters[:2] == ["adata", "session"], name
        assert set(parameters[2:]) <= {"copy"}, name


def test_an_option_of_earlier_versions_ends_in_a_sentence():
    toy = dataclasses.replace(TOY, retired={"old": "use the new one"})
    with pytest.raises(ParameterError, match="'toy' has no option 'old' any more: use the new one"):
        options_of(toy, {"n": 1, "old": True})


@pytest.mark.parametrize("name", workflows.SHIPPED)
def test_every_workflow_says_what_it_does_and_reveals(name):
    found = get(name)
    assert found.name == name
    assert len(found.summary.splitlines()) == 1
    for f in dataclasses.fields(found.options):
        assert f.metadata.get("help"), f"option '{f.name}' of {name} has no help"


def test_every_workflow_begins_its_summary_like_a_sentence_and_draws_figures():
    for name in workflows.SHIPPED:
        found = get(name)
        assert (found.summary[0].isupper(), found.summary[-1]) == (True, "."), name
        assert found.figures is not None, name


def test_figures_of_predictions():
    pytest.importorskip("matplotlib")
    import anndata as ad
    import numpy as np

    rows = [{"donor": f"d{i}", "class": "ab"[i % 2], "score": 0.5 + i / 10} for i in range(4)]
    workflow = get("predict-cellcnn")
    (figure,) = workflow.figures({"basel": Outcome(None, {"predictions": rows}), "lugano": Outcome()}, None)
    assert figure["png"].startswith(b"\x89PNG")
    assert "d3: b (0.80)" in figure["alt"]
    assert workflow.figures({"lugano": Outcome()}, None) == []
    served = ad.AnnData(np.zeros((3, 1)))
    served.obs["predicted_confidence"] = [0.2, 0.9, 0.8]
    workflow = get("serve-model")
    options = types.SimpleNamespace(key_added="predicted")
    (figure,) = workflow.figures({"basel": Outcome(served), "lugano": Outcome()}, options)
    assert "basel: 0.8" in figure["alt"]


def test_a_retired_option_is_accepted_with_a_warning_and_listed_nowhere():
    kind = workflows.get("integrate").options
    with pytest.warns(FutureWarning, match="option 'sigma' of 'integrate' goes in the next release, which always uses"):
        assert read_options(kind, {"sigma": 0.2}, "integrate").sigma == 0.2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_options(kind, {"theta": 1.0}, "integrate")
    assert "sigma" not in {f.name for f in options_in(kind, "hardened")}
    with pytest.raises(ParameterError, match="no option 'zzz'; it has use_rep, ") as caught:
        read_options(kind, {"zzz": 1}, "integrate")
    assert "sigma" not in str(caught.value)
