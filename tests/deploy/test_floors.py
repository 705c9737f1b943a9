"""A site's own floors: they raise what the study agreed on, and never lower it."""

import re

import numpy as np
import pytest

from cloister.cells.demo import demo_sites
from cloister.cells.files import write_cells
from cloister.deploy import join as attending
from cloister.deploy.approval.own_cells import check_floors, open_cells
from cloister.deploy.join import attend
from cloister.deploy.kit import Kit
from cloister.deploy.provision import provision
from cloister.errors import DataError, ParameterError, RefusedError
from cloister.study import Study

PARTIES = {"hub": "coordinator", "basel": "site", "lugano": "site", "vienna": "site"}
NETWORK = {"host": "localhost", "port": 18778}


def kit_of(folder, floor=None, *, donors=4, **parameters):
    """Basel's kit of a study with these parameters, its cells of so many donors, and a floor in its policy."""
    study = Study("floors", "bin-values", PARTIES, network=NETWORK, parameters=parameters)
    kit = Kit.open(provision(study, folder / "kits")["basel"])
    adata = demo_sites()["basel"]
    adata.obs["donor"] = np.resize([f"d{i}" for i in range(donors)], adata.n_obs)
    write_cells(adata, folder / "basel.h5ad")
    kit.approve(data=folder / "basel.h5ad")
    text, found = re.subn(r'(?m)^data = ".*"', f'data = "{folder / "basel.h5ad"}"', kit.policy_file.read_text())
    assert found
    if floor is not None:
        text = text.replace("# min_donors = 3", f"min_donors = {floor}")
    kit.policy_file.write_text(text)
    return kit


@pytest.fixture
def no_service(monkeypatch):
    """Nothing is sent: the service would have to be started first."""
    monkeypatch.setattr(attending, "_service", lambda *a: pytest.fail("the service was started"))


pytest.importorskip("nvflare")


@pytest.mark.parametrize(("agreed", "floor", "here", "refused"), [
    (3, None, 3, None),                     # the study's own floor
    (3, None, 2, "2 donors, fewer than 3"),
    (3, 6, 5, "5 donors, fewer than the 6 that .floors. in local/site.toml requires"),  # raised here
    (3, 6, 6, "'basel' answers about at least 6 donors .*opens what 3 have in common; it needs min_donors = 6 there"),
    (6, 6, 6, None),
    (5, 2, 4, "4 donors, fewer than 5"),    # a lower one lowers nothing
    (5, 2, 5, None),
])  # fmt: skip
def test_the_larger_of_both_floors_holds(agreed, floor, here, refused, tmp_path, no_service):
    kit = kit_of(tmp_path, floor, donors=here, donor_key="donor", min_donors=agreed)
    if refused is None:
        with pytest.raises(pytest.fail.Exception, match="the service was started"):  # all was well until then
            attend(kit.path, tmp_path / "basel.h5ad", say=lambda _: None)
    else:
        with pytest.raises((DataError, RefusedError), match=refused):
            attend(kit.path, tmp_path / "basel.h5ad", say=lambda _: None)


def test_a_site_with_a_floor_refuses_a_study_that_counts_cells(tmp_path, no_service):
    kit = kit_of(tmp_path, 3)
    with pytest.raises(RefusedError, match="at least 3 donors .*and the study has no donor_key") as e:
        attend(kit.path, tmp_path / "basel.h5ad", say=lambda _: None)
    assert e.value.code == "refused"  # all that the others hear


def test_in_a_run_the_floor_holds_before_anything_is_sent(tmp_path):
    kit = kit_of(tmp_path, 6, donors=4, donor_key="donor")
    with pytest.raises(RefusedError, match="4 donors, fewer than the 6"):
        open_cells(kit, kit.policy())  # what `Turn` calls before the first frame
    kit.policy_file.write_text(kit.policy_file.read_text().replace("min_donors = 6", "min_donors = 3"))
    assert open_cells(kit, kit.policy()).n_obs == demo_sites()["basel"].n_obs


@pytest.mark.parametrize(("workflow", "opens"), [("shared-pca", True), ("find-outliers", True)])
def test_only_what_a_study_opens_must_reach_a_sites_floor(workflow, opens, tmp_path):
    kit = kit_of(tmp_path, 4, donors=4)
    study = Study("floors", workflow, PARTIES, network=NETWORK, parameters={"donor_key": "donor"})
    adata = demo_sites()["basel"]
    adata.obs["donor"] = np.resize(["a", "b", "c", "d"], adata.n_obs)
    if opens:
        with pytest.raises(RefusedError, match="opens what 3 have in common"):
            check_floors(kit.me, study, kit.policy(), adata)
    else:  # sums over all of a site's donors: it holds as many as it asks for
        check_floors(kit.me, study, kit.policy(), adata)


def test_a_column_that_is_named_otherwise_here_is_counted(tmp_path):
    kit = kit_of(tmp_path, 4, donors=4, donor_key="patient", min_donors=4)
    text = re.sub(r"(?m)^\[obs\].*", '[obs]\npatient = "donor"', kit.policy_file.read_text())
    kit.policy_file.write_text(text if "patient" in text else text + '\n[obs]\npatient = "donor"\n')
    adata = open_cells(kit, kit.policy())
    check_floors(kit.me, kit.study, kit.policy(), adata)
    adata.obs["patient"] = "one"
    with pytest.raises(RefusedError, match="1 donors, fewer than the 4"):
        check_floors(kit.me, kit.study, kit.policy(), adata)


@pytest.mark.parametrize(("line", "says"), [
    ("min_donors = 0", "'min_donors' must be a whole number of at least 1, found 0"),
    ("min_donors = 2.5", "whole number of at least 1, found 2.5"),
    ("min_cells = true", "whole number of at least 1, found True"),
    ('min_cells = "3"', "whole number of at least 1, found '3'"),
    ("min_genes = 50", "unknown key 'min_genes'"),
])  # fmt: skip
def test_wrong_floors_are_named(line, says, tmp_path):
    kit = kit_of(tmp_path)
    kit.policy_file.write_text(kit.policy_file.read_text().replace("min_cells = 10", line))
    with pytest.raises(ParameterError, match=says):
        kit.policy()
