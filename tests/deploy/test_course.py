"""A study's course through its steps: what is agreed on, what counts, and what a false statement obtains."""

from __future__ import annotations

import dataclasses
import json

import pytest
from federation import free_port

from cloister.deploy.course import FILE, Course, Statement, close_course, common_prefix, has_sent, is_paid
from cloister.deploy.kit import Kit
from cloister.deploy.provision import provision
from cloister.errors import ProtocolAbort, RefusedError
from cloister.mpc.net.journal import Journal
from cloister.mpc.net.receipts import Entry, Receipt
from cloister.rehearsal.results import step_folder
from cloister.rehearsal.run import Run
from cloister.study import Party, Step, Study

PARTIES = {"hub": "coordinator", "basel": "auxiliary", "lugano": "auxiliary", "vienna": "site", "zurich": "site"}
STEPS = tuple(Step("bin-values", name=name, options={"key_added": name}) for name in ("one", "two", "six"))
A, B = ("run a", "welcome a"), ("run b", "welcome b")


@pytest.fixture
def kits(tmp_path):
    network = {"host": "localhost", "port": free_port()}
    made = provision(Study("steps", "", PARTIES, steps=STEPS, network=network), tmp_path / "kits")
    return {p: Kit.open(folder) for p, folder in made.items() if PARTIES[p] != "site"}


def approve(kit):
    kit.approve("somebody")
    return kit


class Turn:
    """One party's course in one run, as `party.Turn` drives it."""

    def __init__(self, kit, run, tmp_path, **how):
        self.kit, self.folder, self.counted = kit, tmp_path / f"{kit.me}-{run}", []
        self.course = Course(kit, run, **how)

    def count(self, what, more):
        self.kit.count_run(self.kit.policy(), None, None if what.digest == self.kit.study.digest else what, more=more)
        self.counted.append((what.place or "study", more))

    def attempt(self, i, *, sends=True, done=True):
        part = self.kit.study.parts[i]
        place = step_folder(self.folder, part)
        receipt = Receipt({"party": self.kit.me}, Journal(place / f"{self.kit.me}.receipt.journal"))
        self.course.begin(part, place, self.count)
        receipt.add(Entry("sent", "channel", "H1", "channel.Hello", "hub", 1, ""))
        receipt.add(Entry("told", "channel", "H2", "channel.Welcome", "hub", 0, f"welcome {self.folder.name[-1]}"))
        if sends:
            receipt.add(Entry("sent", "secure_sum", "L1", "secure_sum.Keys", "hub", 1, ""))
        if done:
            self.course.finish(part, Run(part, receipts={self.kit.me: receipt}), place)


def agree(turns):
    told = {t.kit.me: t.course.statement.pack() for t in turns}
    missing = {p: Statement().pack() for p in PARTIES if p not in told}
    if missing:  # parties that these tests do not play state what the first one does
        missing = dict.fromkeys(missing, turns[0].course.statement.pack())
    return [t.course.agree({**missing, **{p: s for p, s in told.items() if p != t.kit.me}}) for t in turns]


# -- what all state alike ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mine", "theirs", "expected"), [
    (Statement("c", (A, B)), Statement("c", (A, B)), 2),
    (Statement("c", (A, B)), Statement("c", (A,)), 1),
    (Statement("c", (A,)), Statement("c", (A, B)), 1),
    (Statement("c", (A, B)), Statement("c", (A, ("run b", ""))), 2),  # a server that had no part in step 2
    (Statement("c", (A, B)), Statement("c", (A, ("run x", "welcome b"))), 1),
    (Statement("c", (A, B)), Statement("c", (A, ("run b", "welcome x"))), 1),  # another session of the same run
    (Statement("c", (A, B)), Statement("c", (("run x", ""), B)), 0),
    (Statement("c", (A,)), Statement("d", (A,)), None),
    (Statement("c", (A,)), Statement(), None),
    (Statement(), Statement(), None),
])  # fmt: skip
def test_the_longest_prefix_that_all_have_finished_in_the_same_sessions(mine, theirs, expected):
    assert common_prefix(mine, {Party("b"): theirs, Party("c"): mine}, 3) == expected


@pytest.mark.parametrize("data", [b"", b"{}", b"[" * 50_000, b"null", b'{"course":1,"steps":[],"answered":[]}',
    b'{"course":"c","steps":[["a"]],"answered":[]}', b'{"course":"c","steps":[],"answered":[1]}',
    b'{"course":"c","steps":[],"answered":[],"more":0}', b'{"course":"' + b"c" * 65 + b'","steps":[],"answered":[]}',
    b'{"course":"c","steps":' + json.dumps([A] * 1000).encode() + b',"answered":[]}'])  # fmt: skip
def test_what_is_no_statement_is_named_with_its_party(data):
    with pytest.raises(ProtocolAbort, match="'basel' states no record of finished steps"):
        Statement.read(Party("basel"), data)


def test_a_statement_survives_the_way():
    one = Statement("c", (A, B), (True, False, True))
    assert Statement.read(Party("basel"), one.pack()) == one


# -- what counts -------------------------------------------------------------------------------------------------------


def test_a_run_that_continues_counts_only_for_the_step_that_is_answered_again(kits, tmp_path):
    kit = approve(kits["basel"])
    first = Turn(kit, "a", tmp_path)
    assert agree([first]) == [0]
    first.attempt(0)
    first.attempt(1, done=False)  # broke off after it had sent something
    first.course.release()
    assert kit.runs_so_far() == {"study": 1, "bin-values": 3}
    second = Turn(kit, "b", tmp_path)
    assert agree([second]) == [1]
    assert second.course.repeated == [True, True, False]
    second.attempt(1)
    second.attempt(2)
    second.course.release()
    assert second.counted == [("step 2 of 3 (two)", True)]
    third = Turn(kit, "c", tmp_path)
    assert agree([third]) == [3]  # nothing is left to be computed
    third.course.release()


def test_an_attempt_that_sent_nothing_counts_once_with_the_one_that_follows(kits, tmp_path):
    kit = approve(kits["basel"])
    for run in "abc":
        turn = Turn(kit, run, tmp_path)
        agree([turn])
        turn.attempt(0, sends=False, done=False)
        turn.course.release()
    assert kit.runs_so_far()["study"] == 1
    assert is_paid(kit)


def test_a_study_of_one_workflow_counts_every_run_that_sent_something(kits, tmp_path):
    kit = kits["basel"]
    study = dataclasses.replace(kit.study, workflow="bin-values", steps=())
    kit = approve(dataclasses.replace(kit, study=study))
    for run, sends, expected in (("a", False, 1), ("b", True, 1), ("c", True, 2), ("d", False, 3), ("e", True, 3)):
        turn = Turn(kit, run, tmp_path)
        assert agree([turn]) == [0]
        turn.attempt(0, sends=sends, done=False)
        turn.course.release()
        assert kit.runs_so_far()["study"] == expected, run


def test_without_its_receipt_an_attempt_counts_as_answered(tmp_path):
    assert has_sent(tmp_path, "basel")
    (tmp_path / "basel.receipt.json").write_text("{")
    assert has_sent(tmp_path, "basel")


def test_a_course_ends_when_all_have_their_results_or_when_the_coordinator_wants_it_anew(kits, tmp_path):
    hub = kits["hub"]
    turn = Turn(hub, "a", tmp_path)
    turn.attempt(0)
    turn.course.release()
    again = Turn(hub, "b", tmp_path, anew=True)
    assert again.course.statement == Statement()
    again.course.release()
    assert Turn(hub, "c", tmp_path).course.statement.course == "a"


def test_two_runs_at_once_do_not_share_a_course(kits, tmp_path, monkeypatch):
    monkeypatch.setattr("cloister.deploy.course.WAIT", 0.1)
    kit = approve(kits["basel"])
    first, second = Turn(kit, "a", tmp_path), Turn(kit, "b", tmp_path)
    assert second.course.statement == Statement()
    for turn in (first, second):
        agree([turn])
        turn.attempt(0)
    assert kit.runs_so_far()["study"] == 2
    close_course(kit)  # in use: it stays
    first.course.release()
    assert Turn(kit, "c", tmp_path).course.statement.course == "a"


# -- attacks -----------------------------------------------------------------------------------------------------------


def finished(kit, tmp_path, steps=2):
    turn = Turn(kit, "a", tmp_path)
    agree([turn])
    for i in range(steps):
        turn.attempt(i)
    turn.course.release()
    return Turn(kit, "b", tmp_path)


def test_a_coordinator_that_claims_a_loss_pays_with_an_answer_and_nobody_may_drop_out(kits, tmp_path):
    """It wants step 2 once more, with other input of its own, or without one of the sites."""
    kit = approve(kits["basel"])
    turn = finished(kit, tmp_path)
    claim = Statement("a", turn.course.statement.steps[:1], (False, False, False))
    others = {p: turn.course.statement.pack() for p in PARTIES if p not in ("hub", "basel")}
    assert turn.course.agree({**others, Party("hub"): claim.pack()}) == 1
    assert turn.course.repeated[1]  # whatever the coordinator says of it
    part = kit.study.parts[1]
    agreement = turn.course.agreement(part)
    assert all(agreement.quorum(n) == n for n in (1, 2, 3, 4))  # nor a sum over fewer sites than before
    assert kit.study.parts[2].agreement.quorum(3) < 3
    assert turn.course.agreement(kit.study.parts[2]).quorum(3) < 3  # never answered: as ever
    turn.attempt(1)
    assert turn.counted == [("step 2 of 3 (two)", True)]


def test_claims_end_with_the_limit(kits, tmp_path):
    kit = approve(kits["basel"])
    kit.policy_file.write_text(kit.policy_file.read_text().replace("study = 20", "study = 2"))
    finished(kit, tmp_path, 1).course.release()
    refused = 0
    for run in "cde":
        turn = Turn(kit, run, tmp_path)
        others = {p: Statement("a").pack() for p in PARTIES if p != "basel"}
        assert turn.course.agree(others) == 0
        try:
            turn.attempt(0)
        except RefusedError:
            refused += 1
        turn.course.release()
    assert refused == 2
    assert kit.runs_so_far()["study"] == 2


def test_a_party_that_claims_more_than_it_has_obtains_nothing(kits, tmp_path):
    kit = approve(kits["basel"])
    turn = finished(kit, tmp_path, 1)
    claim = Statement("a", (*turn.course.statement.steps, B, B), (True, True, True))
    assert turn.course.agree({p: claim.pack() for p in PARTIES if p != "basel"}) == 1


def test_who_states_two_things_to_two_parties_ends_the_run(kits, tmp_path):
    """Their digests differ, and the hello of the step compares them."""
    one, two = (finished(approve(kits[p]), tmp_path) for p in ("basel", "lugano"))
    honest = {p: one.course.statement.pack() for p in PARTIES if p != "hub"}
    lie = dataclasses.replace(one.course.statement, answered=(False, False, False))
    digests = []
    for turn, said in ((one, one.course.statement), (two, lie)):
        others = {p: s for p, s in honest.items() if p != turn.kit.me}
        assert turn.course.agree({**others, Party("hub"): said.pack()}) == 2
        digests.append(turn.course.agreement(turn.kit.study.parts[2]).digest)
    assert digests[0] != digests[1]


def test_other_cells_do_not_continue(kits, tmp_path, monkeypatch):
    """Approved again on other cells, a site begins with step 1, and everybody with it."""
    kit = approve(kits["basel"])
    turn = finished(kit, tmp_path)
    turn.course.release()
    monkeypatch.setattr("cloister.deploy.course._cells_of", lambda kit: "other cells")
    other = Turn(kit, "c", tmp_path)
    assert other.course.statement == Statement()
    others = {p: turn.course.statement.pack() for p in PARTIES if p != "basel"}
    assert other.course.agree(others) == 0
    other.attempt(0)
    assert other.counted == [("study", True)]


def test_results_that_were_changed_on_the_disk_are_not_finished(kits, tmp_path):
    kit = approve(kits["basel"])
    turn = finished(kit, tmp_path)
    turn.course.release()
    (step_folder(tmp_path / "basel-a", kit.study.parts[1]) / "basel.receipt.journal").write_text("changed")
    assert len(Turn(kit, "c", tmp_path).course.statement.steps) == 1


def test_a_damaged_record_is_no_course(kits, tmp_path):
    kit = approve(kits["basel"])
    finished(kit, tmp_path).course.release()
    (kit.path / "local" / FILE).write_text('{"x": []}')
    assert Turn(kit, "c", tmp_path).course.statement == Statement()
    assert not is_paid(kit)
