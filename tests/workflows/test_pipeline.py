"""What a study of several steps needs is said before anything is sent, and workflows write where they say they do."""

import dataclasses

import pytest

from cloister import workflows
from cloister.cells.demo import demo_sites
from cloister.errors import DataError, ParameterError, UsageError
from cloister.rehearsal.rehearsal import rehearse
from cloister.session import Outcome
from cloister.study import Party, Step, Study
from cloister.workflows import SHIPPED, Workflow, get, options_of
from cloister.workflows.modes import Mode
from cloister.workflows.options import option
from cloister.workflows.pipeline import check_site, check_steps, given, needed, uses_files, with_files

PARTIES = {Party("hub"): "coordinator", Party("basel"): "site", Party("lugano"): "site", Party("vienna"): "site"}
BINS, PCA = Step("bin-values"), Step("shared-pca", options={"n_components": 10})
POOLED = {"query": "vienna", "use_rep": "X_pca"}
LABELS = Step("map-labels", "plain", {"query": "vienna", "use_rep": "X_shared_pca"})


def story(*steps):
    return Study("story", "", PARTIES, steps=steps)


@pytest.fixture(scope="module")
def sites():
    return {p: a[:60].copy() for p, a in demo_sites().items()}


def test_a_study_whose_steps_have_what_they_need_passes(sites):
    checked = check_steps(story(BINS, PCA, LABELS))
    assert [part.label for part, _, _ in checked] == ["bin-values", "shared-pca", "map-labels"]
    for site, adata in sites.items():
        notes = check_site(story(BINS, PCA, LABELS), Party(site), adata)
        assert any("corrects no batch effect" in note for note in notes)


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        (
            (BINS, Step("map-label")),
            "step 2 of 2 .map-label.: there is no workflow 'map-label'; did you mean 'map-labels'",
        ),
        ((PCA, Step("bin-values", "plain")), "step 2 of 2 .bin-values.: 'bin-values' has no mode 'plain'"),
        ((Step("bin-values", options={"bins": 9}),), "step 1 of 1 .bin-values.: 'bin-values' has no option 'bins'"),
        (
            (BINS, Step("bin-values", name="again")),
            "steps 'bin-values' and 'again' both write adata.layers.'binned'.; give",
        ),
        ((Step("serve-model", options={"adapter": "step:adapt/adapter.npz"}),), "no earlier step is called so"),
        (
            (Step("train-classifier", name="fit"), Step("serve-model", options={"adapter": "step:fit/adapter.npz"})),
            "names 'adapter.npz' of step 'fit', which gives model.npz",
        ),
        ((BINS, Step("serve-model", options={"adapter": "step:bin-values/x"})), "which gives no file"),
        ((Step("find-outliers", "published"),), "needs 1 auxiliary server"),
    ],
)
def test_what_is_wrong_in_the_list_is_one_sentence_that_names_the_step(steps, says):
    with pytest.raises((ParameterError, UsageError), match=says):
        check_steps(story(*steps))


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        (
            (BINS, LABELS),
            r"step 2 of 2 \(map-labels\): it needs adata.obsm\['X_shared_pca'\], which neither these cells nor",
        ),
        ((LABELS, PCA), r"step 1 of 2 \(map-labels\): it needs adata.obsm\['X_shared_pca'\]"),
        ((PCA, Step("bin-values", options={"layer": "raw"})), r"needs adata.layers\['raw'\]"),
        ((BINS, Step("shared-pca", options={"donor_key": "patient"})), r"needs adata.obs\['patient'\]"),
        (
            (BINS, Step("shared-pca", options={"kind": "log"})),
            r"step 2 of 2 \(shared-pca\): expected log values, found counts",
        ),
    ],
)
def test_what_a_step_lacks_at_a_site_is_one_sentence_before_anything_is_sent(steps, says, sites):
    with pytest.raises(DataError, match=says):
        check_site(story(*steps), Party("basel"), sites["basel"])
    heard = []
    with pytest.raises(DataError, match="site 'basel': step"):
        rehearse(story(*steps), sites, on_event=heard.append)
    assert heard == []


def test_what_one_site_asks_for_is_given_to_that_site_alone(sites):
    again = Step("map-labels", "plain", {**POOLED, "label_key": "mapped", "key_added": "twice"}, "again")
    first = Step("map-labels", "plain", POOLED)
    with pytest.raises(DataError, match=r"step 2 of 2 \(again\): it needs adata.obs\['mapped'\]"):
        check_site(story(first, again), Party("basel"), sites["basel"])
    check_site(story(first, again), Party("vienna"), sites["vienna"])


def test_the_whole_of_a_story_is_no_single_workflow():
    with pytest.raises(UsageError, match="'story' is a study of several steps .bin-values, shared-pca.; run it whole"):
        workflows.check_plan(story(BINS, PCA))


@pytest.mark.parametrize("name", SHIPPED)
def test_every_workflow_says_where_its_results_go(name):
    workflow = get(name)
    required = {
        "predict-cellcnn": {"query": "a", "keep": "k"},
        "compare-groups": {"groups": ("control", "case"), "donor_key": "donor"},
        "model-outcome": {"model": "linear", "outcome_key": "age", "donor_key": "donor", "features": ("sex",)},
        "find-programs": {"donor_key": "donor", "labels": ("B", "T")},
    }
    options = options_of(workflow, required.get(name, {}))
    assert given(workflow, options, "a")
    assert all(
        place.split("[")[0] in ("obs", "var", "obsm", "layers", "uns") for place in given(workflow, options, "a")
    )
    assert needed(workflow, options, "a") is not None


def check_written(study, sites):
    """Rehearse, and hold the receipts against what the workflows say that they write; the cells at the end."""
    series = rehearse(study, sites)
    for part, workflow, options in check_steps(study):
        for site in sites:
            written = {e.name for e, _ in series.receipts[part.label][site].entries if e.kind == "written"}
            assert given(workflow, options, site) <= written, (part.label, site)
    return series.data["vienna"]


def test_results_are_where_the_workflows_say_by_the_receipts(sites):
    last = check_written(story(BINS, PCA, LABELS), sites)
    assert {"bin-values", "shared-pca", "map-labels"} <= set(last.uns["cloister"])  # a receipt of each


@pytest.mark.slow
def test_results_of_more_workflows_are_where_they_say():
    train = {"n_top_genes": 60, "key_added": "by_sums"}
    steps = (
        BINS,
        PCA,
        Step("find-outliers", options={"use_rep": "X_shared_pca", "trees": 5, "sample": 32}),
        LABELS,
        Step("train-classifier", options=train),
        Step("propagate-labels", options={"use_rep": "X_shared_pca", "bits": 128}),
        Step(
            "fine-tune",
            options={
                "use_rep": "X_shared_pca",
                "rounds": 1,
                "hidden": [8],
                "key_added": "tuned",
                "features_added": "X_tuned",
            },
        ),
    )
    more = {p: a[:300].copy() for p, a in demo_sites().items()}  # a classifier needs groups of cells of a label
    last = check_written(story(*steps), more)
    assert {"mapped", "by_sums", "propagated", "tuned", "outlier"} <= set(last.obs)
    assert {"X_shared_pca", "X_tuned"} <= set(last.obsm)


# ---- files -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Writing:
    key_added: str = option("w", "unused")


@dataclasses.dataclass(frozen=True)
class Reading:
    source: str = option("", "a file")


@pytest.fixture
def toys(monkeypatch):
    def write(session, adata, options):
        return Outcome(adata, model=session.me.encode())

    def read(session, adata, options):
        from pathlib import Path

        adata.obs["read"] = Path(options.source).read_text()
        return Outcome(adata)

    modes = {"hardened": Mode(())}
    made = Workflow(
        "write-it", "W.", Writing, modes, write, lambda *_: [], min_sites=1, model=("it.txt", lambda *_: None)
    )
    made = dataclasses.replace(made, files=lambda outcome: {"it.txt": outcome.model} if outcome.model else {})
    taken = Workflow("read-it", "R.", Reading, modes, read, lambda *_: [], min_sites=1)
    monkeypatch.setattr(workflows, "_registered", {})
    for workflow in (made, taken):
        workflows.register(workflow)


def test_a_file_of_an_earlier_step_is_handed_on_at_each_party_its_own(toys, sites, tmp_path):
    study = story(Step("write-it", name="first"), Step("read-it", options={"source": "step:first/it.txt"}))
    assert uses_files(study)
    assert with_files(Reading("step:first/it.txt"), "basel", {"first": tmp_path}).source == str(
        tmp_path / "basel.it.txt"
    )
    assert with_files(Reading("plain.txt"), "basel", {}) == Reading("plain.txt")
    series = rehearse(study, sites)
    assert {p: a.obs["read"].iloc[0] for p, a in series.data.items()} == {p: p for p in sites}


def test_one_step_is_checked_among_the_others():
    """What a step costs when it is answered once more: it may name a file that an earlier step writes."""
    adapt = Step("adapt-model", "published", name="adapt", options={"model": "model.npz", "label_key": "cell_type"})
    study = story(
        BINS,
        adapt,
        Step("serve-model", "published", options={"adapter": "step:adapt/adapter.npz", "key_added": "served"}),
    )
    whole = check_steps(study)
    for i, part in enumerate(study.parts):
        assert [one.label for one, _, _ in check_steps(part)] == [whole[i][0].label]
