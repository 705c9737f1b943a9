from __future__ import annotations

import dataclasses
import stat
import sys

import numpy as np
import pytest

from cloister.cells.demo import demo_sites
from cloister.cells.files import Settings, write_cells
from cloister.cells.tables import expression_kind
from cloister.deploy.approval import own_cells
from cloister.deploy.control_socket import run_study
from cloister.deploy.kit import Kit
from cloister.deploy.provision import adopt, make_identity, provision
from cloister.deploy.ready import check_certificate
from cloister.errors import DataError, MissingExtra, ParameterError, ProtocolAbort, RefusedError, UsageError
from cloister.mpc.crypto.agreement import Identity
from cloister.study import Step, Study, format_study

PARTIES = {"hub": "coordinator", "basel": "site", "lugano": "site", "helper": "auxiliary"}
STUDY = Study("pair", "bin-values", PARTIES, network={"host": "localhost", "port": 18777})


@pytest.fixture(scope="module")
def kits(tmp_path_factory):
    made = provision(STUDY, tmp_path_factory.mktemp("kits"))
    write_cells(demo_sites()["basel"], made["basel"] / "cells.h5ad")
    return made


@pytest.fixture
def basel(kits):
    """Basel's kit, put back as it was."""
    kit = Kit.open(kits["basel"])
    files = {f: f.read_text() for f in (kit.policy_file, kit.path / "study.toml")}
    yield kit
    for file, text in files.items():
        file.write_text(text)
    (kit.path / "local" / "approvals.json").unlink(missing_ok=True)


# -- provisioning ------------------------------------------------------------------------------------------------------


def test_every_party_gets_a_kit_of_its_own(kits):
    assert [*kits] == [*PARTIES]
    opened = {p: Kit.open(kit) for p, kit in kits.items()}
    assert {p: kit.me for p, kit in opened.items()} == {p: p for p in PARTIES}
    assert len({kit.study.digest for kit in opened.values()}) == 1
    assert opened["hub"].study.keys.keys() == PARTIES.keys()
    for kit in opened.values():
        check_certificate(kit)


def test_private_keys_are_for_the_owner_only(kits):
    top = kits["hub"].parent
    keys = [*top.rglob("*.key"), top / "authority" / "cert.json"]
    assert len(keys) == 2 * len(PARTIES) + 1  # TLS and identity each, the authority
    for key in keys:
        assert stat.S_IMODE(key.stat().st_mode) == 0o600, key
    for folder in (*kits.values(), top / "authority"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder


def test_the_authority_keeps_no_partys_key(kits):
    kept = (kits["hub"].parent / "authority" / "cert.json").read_text()
    assert kept.count("PRIVATE KEY") == 2  # one, with its two lines
    assert "basel" not in kept


def test_no_kit_holds_what_is_anothers(kits):
    secrets = {p: [f.read_bytes() for f in kit.rglob("*.key")] for p, kit in kits.items()}
    for p, kit in kits.items():
        others = [s for q, found in secrets.items() if q != p for s in found]
        assert not any(s in f.read_bytes() for f in kit.rglob("*") if f.is_file() for s in others)


def test_a_party_that_joins_later_is_certified_by_the_same_authority(kits, tmp_path):
    top = kits["hub"].parent
    study = Study.load(top / "study.toml")
    grown = Study("pair", "bin-values", {"hub": "coordinator", "vienna": "site"}, network=study.network)
    (tmp_path / "authority").mkdir()
    (tmp_path / "authority" / "cert.json").write_bytes((top / "authority" / "cert.json").read_bytes())
    made = provision(grown, tmp_path)
    roots = [(kit / "startup" / "rootCA.pem").read_bytes() for kit in (made["vienna"], kits["basel"])]
    assert roots[0] == roots[1]


def test_keys_that_are_in_the_study_are_kept(tmp_path):
    public = make_identity(tmp_path / "own")
    study = STUDY.with_keys({"basel": bytes.fromhex(public)})
    made = provision(study, tmp_path / "kits")
    assert not (made["basel"] / "identity.key").exists()
    assert (made["lugano"] / "identity.key").exists()
    (tmp_path / "own" / "identity.key").rename(made["basel"] / "identity.key")
    assert Kit.open(made["basel"]).me == "basel"


def test_existing_kits_are_not_replaced(kits):
    with pytest.raises(DataError, match="exists already"):
        provision(STUDY, kits["hub"].parent)


@pytest.mark.parametrize(
    ("study", "says"),
    [
        (Study("s", "w", {"hub": "coordinator", "server": "site"}, network={"host": "h"}), "'server' is a name that"),
        (Study("s", "w", {"hub": "coordinator", "a": "site"}), r"\[network\] host is missing"),
        (
            Study("s", "w", {"hub": "coordinator", "a": "site"}, network={"host": "h", "port": 0}),
            "port must be between",
        ),
        (Study("s", "w", {"hub": "coordinator", "a": "site"}, network={"host": "no host"}), "FLARE refuses"),
    ],
)
def test_what_cannot_be_provisioned(study, says, tmp_path):
    with pytest.raises(ParameterError, match=says):
        provision(study, tmp_path)


def test_without_nvflare_there_is_one_clear_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvflare.lighter.entity", None)
    with pytest.raises(MissingExtra, match=r"pip install 'cloister\[flare\]'"):
        provision(STUDY, tmp_path)


def test_adopt_wants_a_kit_of_flare(tmp_path):
    with pytest.raises(ParameterError, match=r"no startup/rootCA\.pem"):
        adopt(tmp_path, STUDY, "basel")


def test_an_identity_is_never_replaced(tmp_path):
    make_identity(tmp_path)
    with pytest.raises(DataError, match="not replaced"):
        make_identity(tmp_path)


# -- a site's own policy -----------------------------------------------------------------------------------------------


def test_a_new_kit_approves_nothing(basel):
    assert basel.policy().workflows == ()
    with pytest.raises(RefusedError, match="has not approved the workflow 'bin-values'") as caught:
        basel.check_approved(basel.policy())
    assert isinstance(caught.value, ProtocolAbort)  # so the peers hear a code, and no more
    assert caught.value.code == "refused"


def test_what_was_approved_may_run_and_nothing_else(basel):
    basel.approve()
    basel.check_approved(basel.policy())
    for changed, says in (
        ({"workflow": "map-labels", "parameters": {"query": "basel"}}, "the workflow 'map-labels'"),
        ({"mode": "published"}, "the mode 'published'"),
        ({"parameters": {"n_bins": 7}}, "the study"),
    ):
        fields = {k: getattr(basel.study, k) for k in ("name", "workflow", "parties", "mode", "parameters", "keys")}
        (basel.path / "study.toml").write_text(format_study(Study(**{**fields, **changed})))
        other = Kit.open(basel.path)
        with pytest.raises(RefusedError, match=says):
            other.check_approved(other.policy())
        other.approve()
        other.check_approved(other.policy())


def test_approving_twice_changes_nothing(basel):
    basel.approve()
    once = basel.policy_file.read_text()
    basel.approve()
    assert basel.policy_file.read_text() == once
    assert 'data = "cells.h5ad"' in once


def test_consent_is_a_line_of_its_own_that_approving_does_not_write(basel):
    assert "consent = []" in basel.policy_file.read_text()
    basel.approve()
    assert basel.policy().consent == ()
    text = basel.policy_file.read_text().replace("consent = []", 'consent = ["open-model"]')
    basel.policy_file.write_text(text)
    assert basel.policy().consent == ("open-model",)


def test_the_coordinator_needs_no_approval(kits):
    hub = Kit.open(kits["hub"])
    hub.check_approved(hub.policy())
    assert "[approve]" not in hub.policy_file.read_text()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("data = 3", "'data' must be a path in quotes"),
        ("dta = 'x'", "unknown key 'dta'"),
        ("[approve]\nworkflow = []", "unknown key 'workflow'"),
        ("[approve]\nmodes = 'hardened'", "'modes' must be a list"),
        ("approve = 1", "must be a table"),
        ("[obs]\ncell_type = 2", r"\[obs\] and \[obsm\]"),
        ("[labels]\nT_CD4 = 2", r"\[labels\] holds lines as"),
        ('[labels]\na = "b"\nb = "c"', "renames 'a' to 'b' and 'b' to 'c'"),
        ("data = ", "cannot be read as TOML"),
    ],
)
def test_errors_in_site_toml_name_the_key(basel, text, says):
    basel.policy_file.write_text(text)
    with pytest.raises(ParameterError, match=says):
        basel.policy()


def test_a_data_path_is_the_sites_own(basel):
    basel.policy_file.write_text('data = "/srv/cells.h5ad"\nout = "elsewhere"\n')
    assert str(basel.policy().data) == "/srv/cells.h5ad"
    assert basel.policy().out == basel.path / "elsewhere"


# -- opening kits ------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_no_kit(tmp_path):
    with pytest.raises(ParameterError, match="not a start-up kit"):
        Kit.open(tmp_path)


def test_a_study_of_other_kits(basel):
    (basel.path / "study.toml").write_text(format_study(basel.study.with_keys({})))
    with pytest.raises(ParameterError, match=r"no party in \[keys\] has this kit's"):
        Kit.open(basel.path)


def test_a_certificate_of_somebody_else_is_noticed_at_home(kits, basel):
    file = basel.path / "startup" / "client.crt"
    own = file.read_bytes()
    try:
        file.write_bytes((kits["lugano"] / "startup" / "client.crt").read_bytes())
        with pytest.raises(ParameterError, match="issued to lugano, and this is the kit of basel"):
            check_certificate(basel)
        file.write_bytes(b"nonsense")
        with pytest.raises(ParameterError, match="not issued by the authority"):
            check_certificate(basel)
    finally:
        file.write_bytes(own)


def test_only_the_coordinator_starts_runs(basel):
    with pytest.raises(UsageError, match="the coordinator hub starts runs"):
        run_study(basel.path)


def test_a_kit_holds_certificates_and_nothing_of_flare_besides(kits):
    for p, kit in kits.items():
        name = "server" if p == "hub" else "client"
        assert {f.name for f in (kit / "startup").iterdir()} == {"rootCA.pem", f"{name}.crt", f"{name}.key"}
        assert {f.name for f in (kit / "local").iterdir()} <= {
            "site.toml",
            "runs.json.lock",
            "decisions.jsonl",
            "decisions.jsonl.lock",
        }
        assert not (kit / "admin").exists()


def test_adopting_again_forgets_no_run(limited):
    limited.count_run(limited.policy())
    adopt(limited.path, limited.study, limited.me)
    assert limited.runs_so_far()["study"] == 1


def test_identities_sign_as_the_study_says(kits):
    kit = Kit.open(kits["lugano"])
    assert isinstance(kit.identity, Identity)
    assert kit.identity.public == kit.study.keys["lugano"]


# -- how often ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def limited(basel):
    """Basel's kit, which allows its study, and two runs of it."""
    basel.approve()
    basel.policy_file.write_text(basel.policy_file.read_text().replace("study = 20", "study = 2"))
    yield basel
    (basel.path / "local" / "runs.json").unlink(missing_ok=True)


def test_runs_are_counted_and_the_third_is_refused_by_name(limited):
    for _ in range(2):
        limited.count_run(limited.policy())
    assert limited.runs_so_far() == {"study": 2, "bin-values": 2}
    with pytest.raises(RefusedError, match=r"allows 2 runs of this study, and 2 were begun.*\[limits\]") as e:
        limited.count_run(limited.policy())
    assert e.value.code == "refused"  # all that the others hear
    assert limited.runs_so_far()["study"] == 2
    assert stat.S_IMODE((limited.path / "local" / "runs.json").stat().st_mode) == 0o600


def test_a_workflow_is_limited_over_all_studies(limited):
    limited.count_run(limited.policy())
    text = limited.policy_file.read_text()
    limited.policy_file.write_text(text.replace("study = 2\nbin-values = 100", "bin-values = 1"))
    limited.path.joinpath("study.toml").write_text(
        limited.path.joinpath("study.toml").read_text().replace('"pair"', '"another"')
    )
    again = Kit.open(limited.path)
    assert again.runs_so_far() == {"study": 0, "bin-values": 1}
    with pytest.raises(RefusedError, match="allows 1 runs of 'bin-values'"):
        again.check_limits(again.policy())


def test_a_run_is_refused_before_the_cells_are_opened(limited):
    from cloister.deploy.join import attend

    for _ in range(2):
        limited.count_run(limited.policy())
    with pytest.raises(RefusedError, match="2 were begun"):
        attend(limited.path, data="nowhere.h5ad")


@pytest.mark.parametrize(("line", "says"), [
    ("study = -1", "number of runs"),
    ('study = "many"', "number of runs"),
    ("studies = 3", "unknown key 'studies'"),
])  # fmt: skip
def test_wrong_limits_are_named(basel, line, says):
    basel.policy_file.write_text(basel.policy_file.read_text().replace("study = 20", line))
    with pytest.raises(ParameterError, match=says):
        basel.policy()


def test_a_damaged_count_allows_nothing(limited):
    (limited.path / "local" / "runs.json").write_text("{")
    with pytest.raises(ParameterError, match="nobody knows how many runs"):
        limited.count_run(limited.policy())


def test_what_only_grows_is_moved_out_of_the_way(tmp_path, monkeypatch):
    from cloister.deploy import logs

    monkeypatch.setattr(logs, "MOST", 50)
    for i in range(7):
        (tmp_path / "service.out").write_text(f"{i}" * 100)
        logs.rotate(tmp_path / "service.out")
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"service.out.{i}" for i in range(1, 6)]
    assert (tmp_path / "service.out.1").read_text()[0] == "6"
    (tmp_path / "service.out").write_text("short")
    logs.rotate(tmp_path / "service.out")
    assert (tmp_path / "service.out").exists()


def test_refusals_do_not_fill_the_disk(tmp_path):
    from cloister.deploy.service import forget_refusals

    for i in range(30):
        (tmp_path / f"20260131T1000{i:02d}Z-0").mkdir()
        (tmp_path / f"20260131T1000{i:02d}Z-0" / "outcome.json").touch()
    (tmp_path / "20250131T100000Z-1").mkdir()  # a run that took place is never touched
    for name in ("outcome.json", "basel.receipt.json"):
        (tmp_path / "20250131T100000Z-1" / name).touch()
    forget_refusals(tmp_path, 20)
    left = sorted(f.name for f in tmp_path.iterdir())
    assert len(left) == 21
    assert left[0] == "20250131T100000Z-1"
    assert left[1] == "20260131T100010Z-0"


def test_runs_are_limited_where_the_owner_says_nothing(basel):
    basel.policy_file.write_text('data = "cells.h5ad"\n')
    assert dict(basel.policy().limits) == {"study": 20, "bin-values": 100}


@pytest.mark.parametrize("name", ["full", "files", "seccomp", "systemd"])
def test_who_confines_the_carrier_is_one_of_two(basel, name):
    text = basel.policy_file.read_text()
    basel.policy_file.write_text(text.replace('sandbox = "full"', f'sandbox = "{name}"'))
    assert basel.policy().sandbox == name
    basel.policy_file.write_text(text.replace('sandbox = "full"', 'sandbox = "none"'))
    with pytest.raises(ParameterError, match="'sandbox' must be one of full, files, seccomp, systemd"):
        basel.policy()


def test_doctor_looks_at_permissions_and_counts(limited, monkeypatch):
    from pathlib import Path

    from cloister.cli.doctor import examine

    def said(name):
        return [(f.state, f.detail) for f in examine(limited.path) if f.name == name]

    assert said("files")[0][0] == "ok"
    assert said("limits") == [("ok", "runs begun: 0 of this study (at most 2), 0 of 'bin-values' (at most 100)")]
    key = limited.path / "startup" / "client.key"
    key.chmod(0o640)
    assert said("keys")[0][0] == "wrong"
    key.chmod(0o600)
    limited.path.chmod(0o755)
    assert said("files")[0][0] == "note"
    limited.path.chmod(0o700)
    assert said("files")[0][0] == "ok"
    (limited.path / "results").mkdir(mode=0o755, exist_ok=True)  # in a folder that lets nobody in
    monkeypatch.chdir(limited.path.parent)
    assert next(f.state for f in examine(Path(limited.path.name)) if f.name == "files") == "ok"
    for _ in range(2):
        limited.count_run(limited.policy())
    assert said("limits")[0][0] == "note"


def test_cells_are_taken_away_whole_and_for_their_owner_only(tmp_path):
    from types import SimpleNamespace

    from cloister.deploy.join import take_away
    from cloister.errors import DataError

    (tmp_path / "basel.h5ad").write_bytes(b"cells")
    ended = SimpleNamespace(folder=str(tmp_path), party="basel")
    made = take_away(ended, tmp_path / "mine.h5ad")
    assert (made.read_bytes(), made.stat().st_mode & 0o777) == (b"cells", 0o600)
    with pytest.raises(DataError, match="the cells are in"):
        take_away(ended, tmp_path / "nowhere" / "mine.h5ad")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["basel.h5ad", "mine.h5ad"]


# -- several steps -----------------------------------------------------------------------------------------------------


@pytest.fixture
def stepwise(basel):
    """A kit whose study has two steps."""
    fields = {k: getattr(basel.study, k) for k in ("name", "parties", "keys", "network")}
    space = Step("shared-pca", options={"n_components": 4, "n_top_genes": 20, "layer": "binned", "min_cells": 5})
    steps = (Step("bin-values", "published", {"n_bins": 8, "min_values": 5}), space)
    (basel.path / "study.toml").write_text(format_study(Study(**fields, workflow="", steps=steps)))
    yield Kit.open(basel.path)
    (basel.path / "local" / "runs.json").unlink(missing_ok=True)
    write_cells(demo_sites()["basel"], basel.path / "cells.h5ad")


def test_all_steps_are_approved_once_and_any_other_list_is_refused(stepwise):
    with pytest.raises(RefusedError, match="has not approved the workflow 'bin-values'"):
        stepwise.check_approved(stepwise.policy())
    stepwise.approve()
    stepwise.check_approved(stepwise.policy())
    first, second = stepwise.study.steps
    changed = dataclasses.replace(second, options=dict(second.options) | {"n_components": 5})
    for steps in ((second, first), (first,), (first, second, Step("bin-values", name="more")), (first, changed)):
        (stepwise.path / "study.toml").write_text(format_study(dataclasses.replace(stepwise.study, steps=steps)))
        other = Kit.open(stepwise.path)
        with pytest.raises(RefusedError, match="has not approved the study"):
            other.check_approved(other.policy())
    part = dataclasses.replace(second, workflow="map-labels", options={"query": "basel"}, name="labels")
    (stepwise.path / "study.toml").write_text(format_study(dataclasses.replace(stepwise.study, steps=(first, part))))
    other = Kit.open(stepwise.path)
    with pytest.raises(RefusedError, match="the workflow 'map-labels'; read: cloister explain map-labels"):
        other.check_approved(other.policy())


def test_a_run_of_several_steps_counts_for_each_of_their_workflows(stepwise):
    stepwise.approve()
    stepwise.count_run(stepwise.policy())
    assert stepwise.runs_so_far() == {"study": 1, "bin-values": 1, "shared-pca": 1}
    assert dict(stepwise.policy().limits) == {"study": 20, "bin-values": 100, "shared-pca": 100}


def test_the_settings_of_a_kit_name_every_step(stepwise):
    from cloister.deploy.kit import format_policy

    text = format_policy(stepwise.study, "site")
    assert "#   workflow 'bin-values' in mode 'published'\n#   workflow 'shared-pca' in mode 'hardened'\n" in text
    assert "cloister explain study.toml" in text


def test_doctor_knows_the_steps_and_what_they_lack(stepwise):
    import anndata as ad
    import numpy as np

    from cloister.cells.files import write_cells
    from cloister.cli.doctor import examine

    adata = ad.AnnData(np.random.default_rng(0).poisson(2.0, (20, 30)).astype(np.float32))
    adata.var_names = [f"g{i}" for i in range(30)]
    write_cells(adata, stepwise.path / "cells.h5ad")
    said = {f.name: f for f in examine(stepwise.path) if f.name in ("study", "cells") and f.state != "note"}
    assert said["study"].detail.startswith("bin-values, mode published, then shared-pca, mode hardened,")
    assert said["cells"].state == "ok"
    first, second = stepwise.study.steps
    lacking = dataclasses.replace(second, options=dict(second.options) | {"layer": "none-such"})
    (stepwise.path / "study.toml").write_text(format_study(dataclasses.replace(stepwise.study, steps=(first, lacking))))
    said = {f.name: f for f in examine(stepwise.path) if f.name == "cells"}
    assert said["cells"].state == "wrong"
    assert "step 2 of 2 (shared-pca): it needs adata.layers['none-such']" in said["cells"].detail


@pytest.mark.parametrize(
    ("name", "mode", "says"),
    [
        ("startup/client.key", 0o644, r"client\.key can be read or changed by other users .*644.*chmod 600"),
        ("local/site.toml", 0o666, r"site\.toml can be changed by other users"),
        ("local", 0o777, r"local can be changed by other users .*chmod 700"),
    ],
)
def test_a_kit_that_others_can_read_or_change_is_not_opened(tmp_path, name, mode, says):
    kit = provision(STUDY, tmp_path)["basel"]
    (kit / name).chmod(mode)
    with pytest.raises(DataError, match=says):
        Kit.open(kit)


def test_names_as_hospitals_write_them(tmp_path):
    names = {"hub": "coordinator", "USZ": "site", "PW030": "site", "basel": "site"}
    kits = provision(Study("upper case", "bin-values", names, network={"host": "localhost", "port": 8102}), tmp_path)
    assert {kit.name for kit in kits.values()} == {*names}
    assert Kit.open(kits["USZ"]).me == "USZ"


def test_a_site_names_its_layer_genes_and_labels(basel):
    adata = demo_sites()["basel"]
    adata.layers["counts"] = adata.X.copy()
    adata.X = np.log1p(adata.X)
    adata.var["name"] = [f"X{i}" for i in range(adata.n_vars)]
    write_cells(adata, basel.path / "other.h5ad")
    text = 'data = "other.h5ad"\nlayer = "counts"\ngenes = "name"\n[labels]\n"T" = "T cell"\n'
    basel.policy_file.write_text(text)
    assert basel.policy().settings == Settings(layer="counts", genes="name")
    found = own_cells.open_cells(basel, basel.policy())
    assert expression_kind(found) == "counts"
    assert found.var_names[0] == "X0"
    for wrong, says in [("layer = 3", "'layer' must be a name"), ("raw = 1", "'raw' must be true or false")]:
        basel.policy_file.write_text(wrong)
        with pytest.raises(ParameterError, match=says):
            basel.policy()
