import dataclasses
import html
import json
import re
import stat
from html.parser import HTMLParser
from importlib import resources

import numpy as np
import pytest

from cloister.cells import demo as demo_data
from cloister.cells.files import read_cells
from cloister.errors import DataError, MissingExtra, ProtocolAbort
from cloister.mpc.net.events import Event
from cloister.mpc.net.receipts import Entry, Receipt
from cloister.rehearsal.record import PNG, Flow, plain
from cloister.rehearsal.rehearsal import Fault, plan, rehearse
from cloister.rehearsal.results import load_runs, save_run
from cloister.rehearsal.run import Run
from cloister.report.figures import confusion, curves, embedding, heatmap, histograms
from cloister.report.learned import members_of
from cloister.report.page import write_report
from cloister.report.parts import NUMBER, escape, names, sequence, size, tag, value
from cloister.report.sections import _opened, result
from cloister.session import Outcome

TABLE = [
    ("workflow", "mode", "pooled", "federated", "bytes"),
    ("bin-values", "hardened", "100 %", "100 %", 620900),
    ("bin-values", "published", "100 %", "95 %", 4600),
]
EVIL = "<script>document.title='evil'</script><img src=x onerror=\"document.title='evil'\">"


@pytest.fixture(scope="module")
def runs():
    sites = demo_data.demo_sites()
    cut = Fault("truncate", sender="basel", name="Hello")
    return {
        "hardened": rehearse("bin-values", sites),
        "published": rehearse("bin-values", sites, mode="published"),
        "aborted": rehearse("bin-values", sites, faults=[cut], check=False),
    }


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    return write_report(path, list(runs.values()), title="Three hospitals", table=TABLE)


def test_the_page_says_whether_donors_or_cells_were_counted(runs, page, tmp_path):
    assert "cells: this is what floors and limits are about" in page.read_text()
    named = dataclasses.replace(runs["hardened"], receipts={})
    for party, receipt in runs["hardened"].receipts.items():
        named.receipts[party] = Receipt({**receipt.header, "counted": "donors"})
    told = write_report(tmp_path / "report.html", [named]).read_text()
    assert "donors: this is what floors and limits are about" in told
    assert "cells: this" not in told


class Outline(HTMLParser):
    """What a screen reader goes by."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.headings, self.ids, self.links, self.open = [], [], [], [], []
        self.feed(text)

    def handle_starttag(self, name, attributes):
        attributes = dict(attributes)
        self.tags.append((name, attributes))
        if re.fullmatch("h[1-6]", name):
            self.headings.append(int(name[1]))
        if "id" in attributes:
            self.ids.append(attributes["id"])
        if attributes.get("href", "").startswith("#"):
            self.links.append(attributes["href"][1:])
        if name not in ("meta", "img", "br", "link"):
            self.open.append(name)

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def all(self, name):
        return [a for n, a in self.tags if n == name]


# ---- the page --------------------------------------------------------------------------------------------------------


def test_page_says_what_left_and_what_was_learned(page, runs):
    text = page.read_text()
    hardened = runs["hardened"]
    for words in ("Three hospitals", "3 runs: 2 completed, 1 aborted", "What left each building", "620.9 kB"):
        assert words in text
    assert "How many values all sites together have in each interval" in text  # Reveals, of the receipts
    assert "Which genes each site measured" in text  # Reveals of a protocol on the way
    assert "my local quantiles, to coordinator" in text  # what the published mode opens
    assert "aborted at channel H1" in text
    assert "NOT GENUINE" not in text
    assert text.count("intact and signed") == 12
    sent = sum(r["bytes"] for r in hardened.receipts["basel"].summary() if r["kind"] == "sent")
    assert sent == hardened.cost["basel"]["bytes"]
    for row in hardened.receipts["basel"].summary():
        if row["kind"] == "sent":
            assert f"{row['protocol']} {row['line']}" in text


def test_page_is_self_contained(page):
    text = page.read_text()
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in text.replace("&#x27;", "'")
    outline = Outline(text)
    assert not outline.all("script")
    assert not outline.all("link")
    assert all(a["src"].startswith("data:image/png;base64,") for a in outline.all("img"))
    assert not re.search(r"(https?:)?//\w", re.sub(r"data:[^\"]*", "", text))


def test_page_is_accessible(page):
    outline = Outline(page.read_text())
    assert not outline.open
    assert outline.headings[0] == 1
    assert outline.headings.count(1) == 1
    assert all(b - a <= 1 for a, b in zip(outline.headings, outline.headings[1:], strict=False))
    assert len(outline.ids) == len(set(outline.ids))
    assert set(outline.links) <= set(outline.ids)
    for landmark in ("header", "nav", "main", "footer"):
        assert len(outline.all(landmark)) == 1
    assert outline.all("html")[0]["lang"] == "en"
    assert all(len(a["alt"]) > 20 for a in outline.all("img"))
    assert len(outline.all("table")) == len(outline.all("caption"))
    assert all(a.get("scope") in ("row", "col") for a in outline.all("th"))
    scrollable = [a for a in outline.all("div") if a.get("class") == "scroll"]
    assert all(a["tabindex"] == "0" and a["role"] == "region" and a["aria-label"] for a in scrollable)
    drawings = [a for a in outline.all("svg") if a.get("role") == "img"]
    assert len(drawings) == 3 + 2 + 2 + 1  # a sequence each, two charts each, one where nothing was timed


@pytest.mark.parametrize("scheme", [0, 1])
def test_contrast(scheme):
    """Every text colour on every ground it stands on has 4.5 to 1, in light and in dark."""
    css = (resources.files("cloister") / "data" / "report.css").read_text()
    colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", re.findall(r":root \{(.*?)\}", css, re.S)[scheme]))

    def light(colour):
        parts = [int(colours[colour][i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    grounds = {"ink": ("page", "card", "soft"), "quiet": ("page", "card", "soft"), "link": ("page", "card")}
    grounds |= {c: (f"{c}-back",) for c in ("good", "bad", "warn")}
    for text, backs in grounds.items():
        for back in backs:
            high, low = sorted((light(text), light(back)), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 4.5, (text, back)


def test_what_is_opened_is_told_once_for_all_who_learn_it():
    rows = [
        {"name": f"value {i}", "protocol": "p", "line": "L1", "count": 1 + i, "to": to}
        for i in range(7)
        for to in ("basel", "lugano", "vienna")
    ]
    text = "".join(_opened("basel", rows))
    assert text.count("<li>") == 6
    assert "value 0, for itself and to lugano and vienna<" in text
    assert "value 1, for itself and to lugano and vienna, 2 times" in text
    assert "and 2 more, in the tables below" in text


def test_results_are_told_in_words():
    history = [{"round": 0, "loss": 1.5}, {"round": 1, "loss": 0.5, "train_loss": 2.0}]
    assert result(history, "history").count("<tr>") == 3
    assert result([[0.1, 0.2]] * 3, "filters") == "3 × 2 numbers"
    assert result({"up": 21960, "down": 20000.0}, "bytes_per_round") == "up: 22.0 kB; down: 20.0 kB"
    assert result([{EVIL: EVIL}] * 2, EVIL).count("&lt;script&gt;") > 2


def test_an_abort_is_told_in_words(tmp_path):
    sites = demo_data.demo_sites()
    sites["basel"].X = np.log1p(sites["basel"].X)
    run = rehearse("bin-values", sites, check=False)
    text = write_report(tmp_path / "r.html", [run], about=f"About {EVIL}").read_text()
    assert f"<p>About {html.escape(EVIL)}</p></header>" in text
    assert "the sites hold different kinds of values" in text
    assert text.index("This run was aborted") < text.index("In short: what a whole run reveals")


def test_very_many_parties_are_counted():
    assert names(["a", "b", "c"]) == "a, b and c"
    assert names(map(str, range(12))) == "0, 1, 2, 3, 4, 5 and 6 more"


def test_roles_are_told_by_name(runs):
    study = dataclasses.replace(runs["hardened"].study, parameters={"query": "vienna"})
    assert members_of("aggregator, holder", study) == ["coordinator", "basel", "lugano", "vienna"]
    assert members_of("querier", study) == ["vienna"]
    assert members_of("site, computing party", study) == []
    assert members_of("coordinator with one site", study) == []


def test_everything_is_escaped(runs, tmp_path):
    run = rehearse("bin-values", demo_data.demo_sites(), mode="published", key_added=EVIL)
    run.outcomes["basel"].result[EVIL] = EVIL
    run.receipts["basel"].add(Entry("ran", EVIL, EVIL, f"{EVIL} : {EVIL}", EVIL, 3, ""))
    run.receipts["basel"].add(Entry("sent", EVIL, EVIL, EVIL, EVIL, 3, ""))
    run.receipts["basel"].add(Entry("opened", EVIL, EVIL, EVIL, EVIL, 3, ""))
    run.receipts["basel"].add(Entry("written", EVIL, EVIL, EVIL, EVIL, 3, ""))
    run.events.append(Event(EVIL, "sent", EVIL, EVIL, EVIL, EVIL, 1, 1))
    path = write_report(
        tmp_path / "r.html", [run], title=EVIL, table=[{EVIL: EVIL}], baselines={"bin-values": [[EVIL], [EVIL]]}
    )
    outline = Outline(path.read_text())
    assert not outline.all("script")
    assert all("onerror" not in a for _, a in outline.tags)
    assert path.read_text().count("&lt;script&gt;") > 15
    assert "NOT GENUINE" in path.read_text()  # and the altered receipt does not pass


def test_two_runs_or_fewer_are_unfolded(runs, tmp_path):
    text = write_report(tmp_path / "one.html", [runs["hardened"]]).read_text()
    assert '<details class="part" open>' in text
    assert "Comparison" not in text


def test_baselines_and_table_of_dictionaries(runs, tmp_path):
    rows = [{"measure": "same bin", "pooled": 1.0, "alone": None}, {"measure": "seconds", "alone": 3}]
    text = write_report(tmp_path / "r.html", [runs["hardened"]], baselines={"bin-values/hardened": rows}).read_text()
    assert "bin-values, hardened, compared" in text
    assert "<td" in text
    assert ">–</td>" in text


def test_a_page_without_figures_says_what_is_missing(runs, tmp_path, monkeypatch):
    def missing(*_):
        raise MissingExtra("matplotlib", "report")

    monkeypatch.setattr("cloister.workflows.bin_values.workflow.canvas", missing)
    run = Run(**{k: v for k, v in vars(runs["hardened"]).items() if k not in ("drawing", "_rows")})
    text = write_report(tmp_path / "r.html", [run]).read_text()
    assert "matplotlib is not installed; run: pip install" in text
    assert "What left each building" in text


def test_one_party_alone(runs, tmp_path):
    """What a site between machines holds: its own receipt, its own events."""
    whole = runs["hardened"]
    own = [e for e in whole.events if e.party == "basel"]
    mine = Run(whole.study, {"basel": whole.outcomes["basel"]}, {}, {"basel": whole.receipts["basel"]}, own)
    flows = {f.key: f for f in mine.flows()}
    assert flows["channel", "H2", "channel.Welcome"].pairs["coordinator", "basel"][0] == 2  # received
    assert flows["checked_sum", "L2", "checked_sum.Masked"].pairs["basel", "coordinator"][0] == 2
    save_run(mine, tmp_path / "basel")
    assert not (tmp_path / "basel" / "lugano.h5ad").exists()
    text = write_report(tmp_path / "r.html", load_runs(tmp_path / "basel")).read_text()
    assert "The receipt of lugano is not here" in text
    assert "NOT GENUINE" not in text
    assert "basel sent " in text
    assert "All sites together sent" not in text
    assert 'class="badge bad"' not in text  # whose receipt stays elsewhere has not failed
    assert stat.S_IMODE((tmp_path / "r.html").stat().st_mode) == 0o600


def test_messages_without_events_are_ordered_by_line(runs):
    whole = runs["hardened"]
    silent = Run(whole.study, whole.outcomes, {}, whole.receipts, [])
    with_events, without = ([f.key for f in r.flows()] for r in (whole, silent))
    assert sorted(without) == sorted(with_events)
    for protocol in {key[0] for key in without}:  # retries enclose the sums, so their own lines come apart
        assert [k for k in without if k[0] == protocol] == [k for k in with_events if k[0] == protocol]


def test_many_sites_share_a_lifeline():
    study = plan("bin-values", [f"site-{i}" for i in range(20)])
    flow = Flow("secure_sum", "L5", "secure_sum.MaskedInput")
    for site in study.sites:
        flow.add(site, "coordinator", 2, 100)
    drawn = sequence(study, [flow] * 70, None, title="t")
    assert "20 sites" in drawn
    assert "40 × 50 B" in drawn
    assert "site-7" not in drawn
    assert "and 10 more kinds" in drawn


# ---- files -----------------------------------------------------------------------------------------------------------


def test_saved_runs_come_back(runs, page, tmp_path):
    for name, run in runs.items():
        written = save_run(run, tmp_path / "out" / name)
        assert all(p.is_file() and p.stat().st_mode & 0o077 == 0 for p in written)
        assert sorted(p.name for p in (tmp_path / "out" / name).iterdir()) == sorted(p.name for p in written)
    assert read_cells(tmp_path / "out" / "hardened" / "basel.h5ad").layers["binned"].max() == 50
    loaded = load_runs(tmp_path / "out")
    assert sorted(r.study.mode for r in loaded) == ["hardened", "hardened", "published"]
    again = {("aborted" if r.errors else r.study.mode): r for r in loaded}
    for name, run in runs.items():
        assert again[name].study == run.study
        assert again[name].results == ({} if run.errors else run.results)
        assert {p: r.head for p, r in again[name].receipts.items()} == {p: r.head for p, r in run.receipts.items()}
        assert again[name].draw() == run.draw()
        assert [vars(f) for f in again[name].flows()] == [vars(f) for f in run.flows()]
    other = write_report(tmp_path / "again.html", [again[n] for n in runs], title="Three hospitals", table=TABLE)
    strip = re.compile(r"Written by Cloister .*? UTC")
    assert strip.sub("", other.read_text()) == strip.sub("", page.read_text())


def test_an_aborted_run_leaves_receipts_and_its_name(runs, tmp_path):
    folder = tmp_path / "out"
    save_run(runs["hardened"], folder)
    write_report(folder / "report.html", [runs["hardened"]])
    save_run(runs["aborted"], folder)  # in the place of a whole one
    parties = ("basel", "coordinator", "lugano", "vienna")
    assert {p.name for p in folder.iterdir()} == {*(f"{p}.receipt.json" for p in parties), "run.json"}
    told = json.loads((folder / "run.json").read_text())
    assert told["status"] == "aborted"
    place = {"party": "coordinator", "protocol": "channel", "line": "H1", "code": "malformed"}
    assert told["abort"] == {**place, "origin": "coordinator", "reason": "malformed"}
    (loaded,) = load_runs(folder)
    assert isinstance(loaded.errors["coordinator"], ProtocolAbort)
    assert not loaded.outcomes


def test_nothing_half_written_is_left(runs, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    save_run(runs["published"], folder)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cloister.rehearsal.results._write_json", full)
    with pytest.raises(DataError, match="No space left"):
        save_run(runs["hardened"], folder)
    with pytest.raises(DataError, match="No space left"):
        save_run(runs["hardened"], tmp_path / "new")
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    monkeypatch.setattr("cloister.files.os.replace", full)
    with pytest.raises(DataError, match="No space left"):
        write_report(tmp_path / "r.html", [])
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_own_cells_are_never_overwritten(runs, tmp_path):
    (tmp_path / "vienna.h5ad").write_bytes(b"mine")
    with pytest.raises(DataError, match="not of an earlier run"):
        save_run(runs["hardened"], tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["vienna.h5ad"]
    assert (tmp_path / "vienna.h5ad").read_bytes() == b"mine"


def test_a_survived_dropout_counts_as_done(tmp_path):
    kill = Fault("kill", sender="vienna", name="checked_sum.Masked")
    run = rehearse("bin-values", demo_data.demo_sites(), faults=[kill], timeout=2.0, check=False)
    assert not run.errors
    save_run(run, tmp_path / "out")
    assert not (tmp_path / "out" / "vienna.h5ad").exists()
    assert (tmp_path / "out" / "basel.h5ad").exists()
    text = write_report(tmp_path / "r.html", load_runs(tmp_path / "out")).read_text()
    assert "vienna dropped out on the way" in text


def test_an_altered_receipt_shows(runs, tmp_path):
    save_run(runs["published"], tmp_path / "out")
    path = tmp_path / "out" / "basel.receipt.json"
    path.write_text(path.read_text().replace("my local quantiles", "nothing at all"))
    text = write_report(tmp_path / "r.html", load_runs(tmp_path / "out")).read_text()
    assert "NOT GENUINE: entry" in text
    assert text.count("intact and signed") == 3
    (tmp_path / "out" / "basel.receipt.json").write_bytes(
        (tmp_path / "out" / "lugano.receipt.json").read_bytes()
    )  # another party's
    text = write_report(tmp_path / "r.html", load_runs(tmp_path / "out")).read_text()
    assert "signed with another key" in text


def test_damaged_folders_are_refused(runs, tmp_path):
    folder = tmp_path / "out"
    save_run(runs["published"], folder)
    good = json.loads((folder / "run.json").read_text())
    with pytest.raises(DataError, match="there is no folder"):
        load_runs(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no run.json"):
        load_runs(tmp_path / "empty")
    for bad in ({}, [], {**good, "format": "x"}, {**good, "study": "x = ["}, {**good, "parties": {"x": {}}},
                {**good, "messages": [1]}, {**good, "abort": 3}, {**good, "study": 4}):  # fmt: skip
        (folder / "run.json").write_text(json.dumps(bad))
        with pytest.raises((DataError, Exception), match="run.json|another format") as caught:
            load_runs(folder)
        assert type(caught.value).__module__ == "cloister.errors"
    (folder / "run.json").write_text(json.dumps(good))
    receipt = json.loads((folder / "basel.receipt.json").read_text())
    receipt["entries"][0]["bytes"] = "many"
    (folder / "basel.receipt.json").write_text(json.dumps(receipt))
    with pytest.raises(DataError, match="receipt of 'basel'"):
        load_runs(folder)
    save_run(runs["published"], folder)
    rows = json.loads((folder / "figures.json").read_text())
    (folder / rows["figures"][0]["file"]).write_bytes(b"no image")
    assert "damaged: figure-1" in load_runs(folder)[0].draw().note
    rows["figures"][0]["file"] = "../../etc/figure-1.png"
    (folder / "figures.json").write_text(json.dumps(rows))
    with pytest.raises(DataError, match="not a figure"):
        load_runs(folder)


def test_results_become_plain():
    odd = {"a": np.arange(3), "b": np.float32("nan"), 3: (np.int64(4), {1}), "c": b"x", "d": [np.array(1.5)]}
    made = plain(odd)
    assert json.dumps(made, allow_nan=False)
    assert made["a"] == [0, 1, 2]
    assert made["b"] is None
    assert made["3"] == [4, [1]]


# ---- small parts -----------------------------------------------------------------------------------------------------


def test_small_parts():
    assert tag("p", "1 < 2", None, class_='a"b', hidden=True, id=None) == '<p class="a&quot;b" hidden>1 &lt; 2</p>'
    assert escape("a\x00\u202eb") == "a\ufffd\ufffdb"
    assert escape(tag("b", "x")) == "<b>x</b>"
    assert [size(n) for n in (0, 999, 1000, 999_960, 1.5e9)] == ["0 B", "999 B", "1.0 kB", "1.0 MB", "1.5 GB"]
    assert value(list(range(50))) == "0, 1, 2 … 48, 49 (50 in all)"
    assert (value(True), value(None), value(0.12345678), value(1500, "bytes")) == ("yes", "–", "0.1235", "1.5 kB")
    assert NUMBER.fullmatch("95.1%")
    assert not NUMBER.fullmatch("3 sites' own quantiles")


def test_figures_take_any_label(tmp_path):
    rng = np.random.default_rng(0)
    labels = np.asarray(["$x$", "_hidden", "T cell \N{CJK UNIFIED IDEOGRAPH-4E00}", EVIL])[rng.integers(0, 4, 60)]
    drawn = [
        embedding(rng.normal(size=(60, 2)), labels, title="Cells"),
        confusion(labels, labels[::-1], title="Labels", rows="true", columns="found"),
        heatmap(rng.normal(size=(3, 40)), "abc", range(40), title="Filters", rows="f", columns="m", alt="weights"),
        histograms({"a": rng.normal(size=50), "_b": [np.nan, 1.0]}, title="Scores", xlabel="score", marks={"cut": 0.5}),
        curves({"a": [3, 2, 1.5], "b": list(range(30))}, title="Loss", xlabel="round", ylabel="loss"),
    ]
    for figure in drawn:
        assert figure["png"].startswith(PNG)
        assert figure["alt"]
    same = confusion(["a", "b"], ["a", "b"], title="t", rows="r", columns="c")
    assert same["alt"] == "r against c for 2 cells; 100.0% agree."


def test_a_range_that_is_given_holds_however_near_the_values_are():
    """Probabilities that differ in the sixth digit look the same from 0 to 1, and not on an axis of their own."""

    def drawn(*values, **options):
        return histograms({"basel": values}, title="Sure", xlabel="probability", alt="a", **options)["png"]

    assert drawn(0.999998, 0.999999, within=(0.0, 1.0)) == drawn(0.999995, 0.999997, within=(0.0, 1.0))
    assert drawn(0.999998, 0.999999) != drawn(0.999995, 0.999997)


def test_a_figure_that_fails_leaves_a_note(runs):
    run = Run(runs["hardened"].study, {"basel": Outcome(demo_data.demo_sites()["basel"])})
    assert "drawing them failed (KeyError)" in run.draw().note


def test_another_version_is_named(runs, tmp_path, monkeypatch):
    monkeypatch.setattr("cloister.report.page.__version__", "99.0")
    text = write_report(tmp_path / "r.html", [runs["published"]]).read_text()
    assert "what is said here about its protocols comes from Cloister 99.0" in text


def test_an_unknown_workflow_still_has_a_page(runs, tmp_path):
    save_run(runs["published"], tmp_path / "out")
    path = tmp_path / "out" / "run.json"
    path.write_text(path.read_text().replace('workflow = \\"bin-values\\"', 'workflow = \\"from-tomorrow\\"'))
    text = write_report(tmp_path / "r.html", load_runs(tmp_path / "out")).read_text()
    assert "does not know" in text
    assert "NOT OF THIS RUN" in text  # the receipts are of another study


def test_a_receipt_is_not_needed(tmp_path):
    run = Run(plan("bin-values", ["a", "b"]), {"a": Outcome(result={"x": 1})}, {}, {"b": Receipt({})})
    text = write_report(tmp_path / "r.html", [run]).read_text()
    assert "two sites only" in text
    assert "NOT GENUINE" in text


GROUNDS = {
    "purpose": "to know",
    "legal_basis": "Art. 9",
    "permit": "EK 7",
    "retention": "2 years",
    "expires": "2099-12-31",
}


def test_what_was_signed_is_on_the_page(tmp_path):
    study = dataclasses.replace(plan("map-labels", ["a", "b", "c"], options={"query": "a"}), governance=GROUNDS)
    data = {"cells": 41, "genes": 7, "donors": 3, "matrix": "9f" * 32, "read": "77" * 32}
    approval = {"by": "Dr. <A> Muster", "user": "ops", "when": "2026-01-31T09:12:44Z", "data": data}
    header = {"party": "a", "study_digest": study.digest.hex(), "governance": GROUNDS, "approval": approval}
    receipt = Receipt(header)
    receipt.add(Entry("used", "map-labels", "-", "41 cells of 3 donors", "a", 0, ""))
    receipt.add(Entry("spent", "map-labels", "-", "epsilon 2.5, delta 1e-05, for all data of one site", "a", 0, ""))
    run = Run(study, {"a": Outcome(result={"x": 1})}, {}, {"a": receipt})
    text = write_report(tmp_path / "r.html", [run]).read_text()
    for said in (
        *GROUNDS.values(),
        study.digest.hex(),
        "9f" * 32,
        "41 cells of 3 donors",
        "epsilon 2.5",
        "random shares",
    ):
        assert said in text, said
    assert "2026-01-31T09:12:44Z by Dr. &lt;A&gt; Muster (logged in as ops)" in text
    for damaged in ({"approval": {"by": 3}}, {"approval": ["x"]}, {"governance": "none", "approval": approval}):
        run.receipts["a"] = Receipt({**header, **damaged})
        assert "about it is damaged" in write_report(tmp_path / "r.html", [run]).read_text()
