"""A run as a Five Safes RO-Crate: what the profile demands is there, and nothing of the data is."""

import copy
import json
import re
import stat

import pytest

from cloister.cells.demo import demo_sites
from cloister.cli.receipt import receipt as show
from cloister.errors import DataError, ReceiptError, UsageError
from cloister.rehearsal.record import Drawing
from cloister.rehearsal.rehearsal import rehearse
from cloister.rehearsal.results import save_run
from cloister.study import Study

SITES = ("basel", "lugano", "vienna")
GROUNDS = {
    "purpose": "Common bins for a foundation model",
    "legal_basis": "Art. 9(2)(j) GDPR",
    "permit": "EKNZ 2026-01234",
    "contact": "Dr. B. Beispiel",
    "retention": "2 years, then deleted",
    "expires": "2099-12-31",
}
RFC3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")
STATUS = {f"http://schema.org/{s}ActionStatus" for s in ("Potential", "Active", "Completed", "Failed")}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    parties = {"hub": "coordinator", **dict.fromkeys(SITES, "site")}
    study = Study("bins", "bin-values", parties, governance=GROUNDS, parameters={"n_bins": 8})
    folder = tmp_path_factory.mktemp("crate") / "results"
    run = rehearse(study, {site: demo_sites()[site] for site in SITES})
    run.drawing = Drawing()  # nothing is looked at here
    save_run(run, folder)
    return folder


@pytest.fixture(scope="module")
def crate(results, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "crate"
    show(results / "basel.receipt.json", crate=out)
    return out


def of(graph, x):
    return next((e for e in graph if e["@id"] == x), None)


def many(x):
    return x if isinstance(x, list) else [x]


def ids(x):
    return [one["@id"] for one in many(x)]


def kinds(entity):
    return set(many(entity["@type"])) if entity else set()


def problems(graph):
    """What RO-Crate 1.1 and the Five Safes profile 0.4 demand (MUST), and this graph has not."""
    found = []

    def demand(holds, what):
        if not holds:
            found.append(what)

    ids_of = [e.get("@id") for e in graph]
    demand(len(set(ids_of)) == len(ids_of), "ids are unique")
    demand(all("@type" in e for e in graph), "every entity has a type")
    metadata, root = of(graph, "ro-crate-metadata.json"), of(graph, "./")
    demand(metadata and metadata["about"] == {"@id": "./"}, "the descriptor is about the root")
    demand(metadata and "https://w3id.org/ro/crate/1.1" in ids(metadata["conformsTo"]), "it conforms to RO-Crate")
    for key in ("name", "description", "datePublished", "license"):
        demand(root.get(key), f"the root has {key}")
    demand("https://w3id.org/5s-crate/0.4" in ids(root.get("conformsTo", [])), "the root conforms to the profile")
    demand(kinds(of(graph, ids(root["sourceOrganization"])[0])) & {"Project", "Organization"}, "a responsible project")
    main = root.get("mainEntity", {}).get("@id")
    demand("Dataset" in kinds(of(graph, main)), "the main entity is a dataset")
    demand(
        str(ids(of(graph, main)["conformsTo"])[0]).startswith("https://w3id.org/workflowhub/workflow-ro-crate"), ".."
    )
    actions = [of(graph, x) for x in ids(root.get("mentions", []))]
    runs = [a for a in actions if "CreateAction" in kinds(a)]
    demand(runs, "the root mentions a run")
    for run in (e for e in graph if "CreateAction" in kinds(e)):
        demand(len(run.get("name", "")) >= 10, "a run has a name")
        demand("Person" in kinds(of(graph, run.get("agent", {}).get("@id"))), "its agent is a person")
        who = of(graph, run.get("agent", {}).get("@id")) or {}
        demand("Organization" in kinds(of(graph, who.get("affiliation", {}).get("@id"))), "of an organisation")
        demand(main in ids(run.get("instrument", [])), "its instrument is the main entity")
        demand(all(of(graph, x) for x in ids(run["object"])), "its objects are described")
        demand(all(of(graph, x) for x in ids(run["result"])), "its results are described")
        demand(run.get("actionStatus") in STATUS, "its status is one of schema.org's")
    for action in (e for e in graph if "additionalType" in e):
        demand("AssessAction" in kinds(action), "a phase is an assessment")
        demand(len(action.get("name", "")) >= 10, "a phase has a name")
        demand(action.get("actionStatus") in STATUS, "its status is one of schema.org's")
        demand(all(of(graph, x) for x in ids(action["object"])), "its objects are described")
    for entity in graph:
        for key in ("startTime", "endTime"):
            demand(key not in entity or RFC3339.fullmatch(entity[key]), f"{key} is a time")
    return found


def load(folder):
    return json.loads((folder / "ro-crate-metadata.json").read_text())


def test_it_has_what_the_profile_demands(crate):
    whole = load(crate)
    assert whole["@context"] == "https://w3id.org/ro/crate/1.1/context"
    assert problems(whole["@graph"]) == []
    parts = ids(of(whole["@graph"], "./")["hasPart"])
    assert parts == ["workflow/", "receipt.json"]
    assert all((crate / part).exists() for part in parts)
    inner = load(crate / "workflow")["@graph"]
    main = of(inner, of(inner, "./")["mainEntity"]["@id"])
    assert {"File", "SoftwareSourceCode", "ComputationalWorkflow"} <= kinds(main)
    assert Study.load(crate / "workflow" / main["@id"]).governance == GROUNDS


def test_whatever_is_taken_out_is_missed(crate):
    """The demands above are demands: a graph without one of these has a problem."""
    graph = load(crate)["@graph"]
    taken = [("./", k) for k in ("name", "license", "datePublished", "mentions")]
    taken += [("#run", k) for k in ("name", "agent", "instrument", "actionStatus")]
    taken += [("#disclosure", k) for k in ("name", "actionStatus")]
    for entity, key in taken:
        less = copy.deepcopy(graph)
        del of(less, entity)[key]
        assert problems(less), (entity, key)
    for entity in ("#requesting", "#project", "receipt.json", "#cells", "#party-hub"):
        assert problems([e for e in graph if e["@id"] != entity]), entity


def test_it_says_purpose_permit_and_what_left(crate):
    graph = load(crate)["@graph"]
    project = of(graph, "#project")["description"]
    assert all(text in project for text in GROUNDS.values())
    assert of(graph, "#requesting")["name"] == GROUNDS["contact"]
    assert f"Cells used: {demo_sites()['basel'].n_obs} cells" in of(graph, "#cells")["description"]
    assert "Stays at its site: every cell" in of(graph, "#cells")["description"]
    assert "pooled_quantiles" in of(graph, "#run")["description"]
    assert GROUNDS["retention"] in of(graph, "#terms")["description"]


def test_nothing_of_the_data_is_in_it(crate, results):
    text = "".join(p.read_text() for p in crate.rglob("*") if p.is_file())
    adata = demo_sites()["basel"]
    kinds_of_cells = [name for name in adata.obs["cell_type"].unique() if len(name) > 3]
    assert not [name for name in [*adata.obs_names, *kinds_of_cells] if name in text]
    assert sorted(p.name for p in crate.iterdir()) == ["receipt.json", "ro-crate-metadata.json", "workflow"]
    assert all(stat.S_IMODE(p.stat().st_mode) == 0o600 for p in crate.rglob("*") if p.is_file())
    show(crate / "receipt.json", verify=True)


def test_a_receipt_that_was_altered_makes_no_crate(results, tmp_path):
    raw = json.loads((results / "basel.receipt.json").read_text())
    raw["header"]["governance"]["permit"] = "EKNZ 2026-99999"
    (tmp_path / "basel.receipt.json").write_text(json.dumps(raw))
    with pytest.raises(ReceiptError, match="altered"):
        show(tmp_path / "basel.receipt.json", crate=tmp_path / "crate")
    assert not (tmp_path / "crate").exists()


def test_what_it_is_not_made_from(results, tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(DataError, match="is there already"):
        show(results / "basel.receipt.json", crate=tmp_path / "taken")
    with pytest.raises(UsageError, match="--ro-crate needs the receipt.json"):
        show(results / "basel.h5ad", crate=tmp_path / "crate")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["taken"]


def test_the_validator_finds_nothing(crate):
    reason = "the profile's own validator is not installed: pip install roc-validator"
    services = pytest.importorskip("rocrate_validator.services", reason=reason)
    settings = {"rocrate_uri": str(crate), "profile_identifier": "five-safes-crate", "requirement_severity": "REQUIRED"}
    found = services.validate(settings)
    assert not found.has_issues(), [str(issue) for issue in found.get_issues()]
