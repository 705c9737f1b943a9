import dataclasses
import gc
import subprocess
import threading
import time
import weakref

import numpy as np
import pytest
from anndata import AnnData
from scipy import sparse

from cloister.cells import demo as demo_data
from cloister.cells.files import write_cells
from cloister.errors import DataError, MissingExtra, ParameterError, PeerLost, ProtocolAbort, UsageError
from cloister.mpc.net.wire import Frame, message, pack
from cloister.rehearsal import rehearsal
from cloister.rehearsal.rehearsal import Fault, Wires, rehearse, run_parties
from cloister.rehearsal.run import workflow_part
from cloister.session import Outcome
from cloister.study import Party, Study

HUB, A, B = map(Party, ("coordinator", "a", "b"))


def cells(n=40, genes=12, seed=0):
    rng = np.random.default_rng(seed)
    adata = AnnData(sparse.csr_matrix(rng.poisson(1.5, (n, genes)).astype(np.float32)))
    adata.var_names = [f"g{i}" for i in range(genes)]
    adata.obs_names = [f"c{i}" for i in range(n)]
    return adata


def sites():
    return {name: cells(40 + 10 * i, seed=i) for i, name in enumerate(("basel", "lugano", "vienna"))}


OPTIONS = {"n_bins": 8, "min_values": 50}


@pytest.mark.parametrize("colluders", [0, 1])
def test_a_study_that_names_a_colluder_lets_fewer_drop_out(colluders):
    """Three sites: two suffice for a sum by default, all three where one may help a lying coordinator."""
    gone = [Fault("kill", "vienna", "coordinator", "checked_sum.Masked")]
    run = rehearse("bin-values", sites(), timeout=1.0, faults=gone, colluders=colluders, check=False, **OPTIONS)
    if colluders:
        assert {e.code for p, e in run.errors.items()} == {"too-few"}
        assert not run.outcomes
    else:
        assert {"basel", "lugano"} <= run.outcomes.keys()


# ---- the wires -------------------------------------------------------------------------------------------------------


def frame(name, seq=0, kind="data", sender="a", to="b"):
    return pack(Frame(kind, bytes(16), "1", Party(sender), Party(to), seq, name, {}))


def carried(faults, *frames):
    got = []
    wires = Wires(lambda sender, to, data: got.append(data), faults)
    for data in frames:
        wires.carry(A, B, data)
    return got, wires


X, Y, Z = frame("p.X"), frame("p.Y", 1), frame("p.Z", 2)
PULSE = frame("pulse", kind="pulse")


def test_without_faults_everything_passes():
    assert carried([], X, Y, PULSE)[0] == [X, Y, PULSE]


@pytest.mark.parametrize(
    ("kind", "got"),
    [
        ("drop", [X, PULSE, Z]),
        ("duplicate", [X, Y, Y, PULSE, Z]),
        ("truncate", [X, Y[: len(Y) // 2], PULSE, Z]),
        ("swap", [X, PULSE, Z, Y]),  # behind the next message, not behind a pulse
    ],
)
def test_a_fault_does_what_it_says_to_one_message(kind, got):
    assert carried([Fault(kind, "a", "b", "Y")], X, Y, PULSE, Z)[0] == got


def test_a_delayed_message_comes_later():
    got, _ = carried([Fault("delay", name="Y", seconds=0.3)], X, Y, Z)
    assert got == [X, Z]
    end = time.monotonic() + 20
    while len(got) < 3 and time.monotonic() < end:
        time.sleep(0.02)
    assert got == [X, Z, Y]


def test_a_killed_party_says_nothing_more_not_even_a_pulse():
    got = []
    wires = Wires(lambda sender, to, data: got.append(data), [Fault("kill", name="Y")])
    wires.carry(A, B, X)
    with pytest.raises(rehearsal.Killed):
        wires.carry(A, B, Y)
    wires.carry(A, B, PULSE)
    assert got == [X]
    assert wires.dead == {A}


def test_which_message_a_fault_fits():
    fits = [
        (Fault("drop"), True),
        (Fault("drop", "a"), True),
        (Fault("drop", "b"), False),
        (Fault("drop", to="b"), True),
        (Fault("drop", to="a"), False),
        (Fault("drop", name="X"), True),
        (Fault("drop", name="p.X"), True),
        (Fault("drop", name="Y"), False),
    ]
    for fault, hit in fits:
        assert (carried([fault], X)[0] == []) == hit


def test_the_nth_message_that_fits():
    assert carried([Fault("drop", nth=1)], X, Y, Z)[0] == [X, Z]
    assert carried([Fault("drop", nth=1), Fault("drop", name="Z")], X, Y, Z)[0] == [X]


# ---- rehearse --------------------------------------------------------------------------------------------------------


def test_a_rehearsal_returns_data_receipts_costs_and_events_and_leaves_the_input_alone():
    data = sites()
    run = rehearse("bin-values", data, **OPTIONS)
    assert run.errors == {}
    assert run.data.keys() == data.keys()
    assert run.receipts.keys() == {"coordinator", *data}
    assert all("binned" in a.layers for a in run.data.values())
    assert not any("binned" in a.layers for a in data.values())
    assert all(c["bytes"] > 0 for c in run.cost.values())
    assert {e.party for e in run.events} == set(run.receipts)
    assert len({tuple(r["bin_edges"]) for r in run.results.values()}) == 1


def test_inplace_writes_into_what_was_given():
    data = sites()
    run = rehearse("bin-values", data, inplace=True, **OPTIONS)
    assert all("binned" in a.layers for a in data.values())
    assert all(run.data[s] is data[s] for s in data)


def test_options_may_be_numpy_numbers_none_and_tuples():
    run = rehearse("bin-values", sites(), n_bins=np.int64(8), min_values=50, layer=None)
    assert run.study.parameters == {"n_bins": 8, "min_values": 50}
    study = rehearsal.plan("bin-values", ["a", "b"], options={"n_bins": 5})
    assert study.parameters == {"n_bins": 5}


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda d: rehearse("bin-value", d), UsageError, "did you mean 'bin-values'"),
        (lambda d: rehearse("bin-values", d, n_bin=3), ParameterError, "no option 'n_bin'; did you mean 'n_bins'"),
        (lambda d: rehearse("bin-values", d, n_bins="many"), ParameterError, "'n_bins' must be a whole number"),
        (lambda d: rehearse("bin-values", d, n_bins=2), ParameterError, "'n_bins' must be between"),
        (
            lambda d: rehearse("bin-values", d, mode="soft"),
            ParameterError,
            "no mode 'soft'; use mode hardened or published",
        ),
        (lambda d: rehearse("bin-values", d, mode="plain"), ParameterError, "has no mode 'plain'"),
        (lambda d: rehearse("bin-values", {"a": d["basel"]}), ParameterError, "at least 2 sites, found 1"),
        (lambda d: rehearse("bin-values", {}), ParameterError, "no site"),
        (lambda d: rehearse("bin-values", {"_basel": d["basel"], "b": d["basel"]}), ParameterError, "'_basel'"),
        (lambda d: rehearse("bin-values", {"coordinator": d["basel"], **d}), ParameterError, "two parties are called"),
        (lambda d: rehearse("bin-values", d, timeout=0), ParameterError, "'timeout'"),
        (lambda d: rehearse("bin-values", d, layer="missing"), DataError, "site 'basel': .*layers"),
        (lambda d: rehearse("bin-values", d, min_values=10**6), DataError, "site 'basel': .* non-zero values"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(call, kind, said, monkeypatch):
    monkeypatch.setattr(rehearsal, "run_parties", lambda *a, **k: pytest.fail("it ran"))
    with pytest.raises(kind, match=said):
        call(sites())


def test_an_error_keeps_its_kind_when_the_site_is_named():
    for error in (MissingExtra("seal", "he"), PeerLost("p", "L1", "timeout"), DataError("no cells")):
        text = str(error)
        with pytest.raises(type(error)) as e, rehearsal.named_site("basel", None):
            raise error
        assert str(e.value) == f"site 'basel': {text}"


def test_a_failed_rehearsal_raises_the_cause_or_hands_out_all_errors():
    faults = [Fault("duplicate", "lugano", "coordinator", "Measured")]
    run = rehearse("bin-values", sites(), faults=faults, check=False, timeout=10.0, **OPTIONS)
    assert run.errors.keys() == run.receipts.keys() == {"coordinator", "basel", "lugano", "vienna"}
    assert run.errors["coordinator"].code == "replay"
    assert not run.errors["coordinator"].heard
    assert all(run.errors[s].heard for s in sites())
    with pytest.raises(ProtocolAbort, match="of 'lugano'"):
        rehearse("bin-values", sites(), faults=faults, timeout=10.0, **OPTIONS)


def test_a_damaged_message_of_a_site_ends_the_run_and_names_the_site():
    faults = [Fault("truncate", "lugano", "coordinator", "Measured")]
    run = rehearse("bin-values", sites(), faults=faults, check=False, timeout=10.0, **OPTIONS)
    assert run.outcomes.keys() == set()
    assert {e.code for e in run.errors.values()} == {"malformed"}
    assert "from 'lugano'" in str(run.errors["coordinator"])
    assert run.errors["lugano"].heard


def test_a_killed_site_is_left_out():
    faults = [Fault("kill", "vienna", "coordinator", "common_seed.Key")]
    run = rehearse("bin-values", sites(), faults=faults, check=False, timeout=1.5, **OPTIONS)
    assert run.errors == {}
    assert run.outcomes.keys() == {"coordinator", "basel", "lugano"}


def test_progress_is_told_as_it_happens():
    seen = []
    rehearse("bin-values", sites(), on_event=seen.append, **OPTIONS)
    assert {"sent", "received", "opened"} <= {e.kind for e in seen}
    assert {"checked_sum", "pooled_quantiles", "common_genes"} <= {e.protocol for e in seen}


def test_a_progress_bar_that_raises_is_not_asked_again_and_stops_nothing(caplog):
    calls = []

    def broken(event):
        calls.append(event)
        raise RuntimeError("no terminal")

    run = rehearse("bin-values", sites(), on_event=broken, **OPTIONS)
    assert run.errors == {}
    assert len(calls) <= len(run.study.parties)
    assert len(run.events) > 50
    assert "progress is no longer shown: RuntimeError" in caplog.text


def test_somebody_who_stops_it_from_the_progress_bar_stops_it():
    def stop(event):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rehearse("bin-values", sites(), on_event=stop, timeout=20.0, **OPTIONS)


def test_no_thread_is_left_behind():
    before = set(threading.enumerate())
    rehearse("bin-values", sites(), **OPTIONS)
    rehearse(
        "bin-values",
        sites(),
        faults=[Fault("drop", "basel", "coordinator", "Local")],
        mode="published",
        check=False,
        timeout=1.0,
        **OPTIONS,
    )
    assert set(threading.enumerate()) <= before


def test_cells_on_disk_stay_there_and_those_that_were_given_stay_as_they_are(tmp_path):
    from cloister.cells.files import read_cells, write_cells
    from cloister.cells.values import is_on_disk

    data = sites()
    backed = {}
    for name, adata in data.items():
        write_cells(adata, tmp_path / f"{name}.h5ad")
        backed[name] = read_cells(tmp_path / f"{name}.h5ad", backed=True)
    run = rehearse("bin-values", backed, **OPTIONS)
    plain = rehearse("bin-values", data, **OPTIONS)
    for name in data:
        assert is_on_disk(backed[name].X)
        assert "binned" not in backed[name].layers
        found, wanted = run.data[name].layers["binned"][:], plain.data[name].layers["binned"]
        assert (found != wanted).nnz == 0


# ---- who sees what ---------------------------------------------------------------------------------------------------


@message("L1", protocol="toy")
class Count:
    n: int


def test_a_part_gets_its_own_data_only():
    study = Study("t", "toy", {HUB: "coordinator", A: "site", B: "site"}, timeout=20.0)
    seen = {}

    def part(session, data):
        seen[session.me] = data

        async def role(ch, params):
            if ch.me == HUB:
                return sum(m.n for m in (await ch.gather((A, B), Count)).values())
            await ch.send(HUB, Count(len(data)))
            return None

        return Outcome(result={"value": session.run(role, None)})

    mine, yours = [1, 2, 3], [4, 5]
    run = run_parties(study, dict.fromkeys(study.parties, part), {A: mine, B: yours})
    assert run.results[HUB]["value"] == 5
    assert seen == {HUB: None, A: mine, B: yours}


def reachable(start, limit=200_000):
    """Everything that can be reached from an object through containers and attributes."""
    import gc

    seen, todo = {}, [start]
    while todo and len(seen) < limit:
        x = todo.pop()
        if id(x) in seen or isinstance(x, type | type(gc) | type(reachable)):
            continue
        seen[id(x)] = x
        todo += [y for y in gc.get_referents(x) if not isinstance(y, type)]
    return seen.values()


def test_a_sites_arrays_are_out_of_reach_of_the_other_parties():
    data = sites()
    run = rehearse("bin-values", data, **OPTIONS)
    own = {s: id(run.data[s].X.data) for s in data}
    for party, outcome in run.outcomes.items():
        found = {id(x) for x in reachable([outcome.result, outcome.adata, outcome.receipt])}
        for site, array in own.items():
            assert (array in found) == (site == party)


def test_a_server_that_the_workflow_does_not_need_is_no_hindrance():
    data = {Party(p): a for p, a in sites().items()}
    parties = {HUB: "coordinator", **dict.fromkeys(data, "site"), Party("helper"): "auxiliary"}
    study = Study("spare", "bin-values", parties, timeout=30.0, parameters=OPTIONS)
    run = run_parties(study, dict.fromkeys(parties, workflow_part), data)
    assert not run.errors
    assert run.outcomes.keys() == parties.keys()


@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_cells_of_files_are_held_once_and_in_processes_not_at_all(processes, tmp_path, monkeypatch):
    paths = {site: tmp_path / f"{site}.h5ad" for site in sites()}
    for site, adata in sites().items():
        write_cells(adata, paths[site])
    monkeypatch.setattr("cloister.rehearsal.rehearsal._copy", lambda adata: pytest.fail("cells were copied"))
    opened, real = [], rehearsal.open_cells

    def noted(path):
        opened.append(weakref.ref(adata := real(path)))
        return adata

    monkeypatch.setattr("cloister.rehearsal.rehearsal.open_cells", noted)
    monkeypatch.setattr("cloister.rehearsal.processes.subprocess.Popen", watched := Watched(opened))
    run = rehearse("bin-values", paths, processes=processes, inplace=processes, **OPTIONS)
    assert watched.alive == ([0] * 4 if processes else [])
    assert run.data.keys() == paths.keys()


class Watched:
    """Starts processes, and notes how many of some things are still held then."""

    def __init__(self, things):
        self.things, self.alive, self.start = things, [], subprocess.Popen

    def __call__(self, *args, **kwargs):
        if "cloister.rehearsal.processes" in args[0]:
            gc.collect()
            self.alive.append(sum(thing() is not None for thing in self.things))
        return self.start(*args, **kwargs)


def test_sites_may_be_files_or_tables(tmp_path):
    import pandas as pd

    rows = demo_data.demo_rows()
    write_cells(rows["basel"], tmp_path / "basel.csv")
    table = rows["lugano"].to_df().assign(ward="north")
    run = rehearse(
        "find-outliers", {"basel": tmp_path / "basel.csv", "lugano": table, "vienna": rows["vienna"]}, trees=5
    )
    assert "outlier" in run.data["lugano"].obs
    assert list(run.data["lugano"].obs["ward"].unique()) == ["north"]
    assert repr(run).startswith("<Run of find-outliers, hardened: 3 sites, done, ")
    assert repr(run.receipts["basel"]).startswith("<Receipt of basel: ")
    for wrong, says in (
        ({"basel": rows["basel"].X}, "site 'basel': expected an AnnData, the path of a file or a pandas DataFrame"),
        ({"basel": "nowhere.h5ad"}, "site 'basel': nowhere.h5ad does not exist"),
        ({"basel": pd.DataFrame({"a": ["x"]})}, "no column of numbers"),
    ):
        with pytest.raises(DataError, match=says):
            rehearse("find-outliers", rows | wrong)
    with pytest.raises(ParameterError, match="a dictionary of site name"):
        rehearse("find-outliers", [*rows.values()])


def test_the_receipt_says_which_cells_were_used_and_what_privacy_was_spent(monkeypatch):
    from cloister.workflows.bin_values import workflow as bin_values

    noisy = dataclasses.replace(
        bin_values.WORKFLOW, privacy=lambda options: {"epsilon": 2.5, "delta": 1e-5, "protects": "all cells of a donor"}
    )
    monkeypatch.setattr(bin_values, "WORKFLOW", noisy)
    sites = {site: cells(seed=i) for i, site in enumerate(("a", "b", "c"))}
    for adata in sites.values():
        adata.obs["donor"] = [f"d{i % 5}" for i in range(adata.n_obs)]
    run = rehearse("bin-values", sites, donor_key="donor", min_values=5)

    def entered(party, kind):
        return [e.name for e, _ in run.receipts[party].entries if e.kind == kind]

    for site in sites:
        assert entered(site, "used") == ["40 cells of 5 donors"]
        assert entered(site, "spent") == ["epsilon 2.5, delta 1e-05, for all cells of a donor"]
        assert "pooled_quantiles" in run.receipts[site].protocols  # what is entered at home is no protocol
        assert "bin-values" not in run.receipts[site].protocols
    assert entered("coordinator", "used") == entered("coordinator", "spent") == []
