"""What parties are told by broadcast binds all later steps, and two receipts show who was told what."""

import sys

import pytest

from cloister.errors import ReceiptError
from cloister.mpc.net.receipts import Entry, Receipt, compare
from cloister.mpc.net.transcript import Transcript
from cloister.mpc.net.wire import message
from cloister.mpc.parties import Party
from cloister.testing import Case, check_no_errors, run_protocol, values

HUB, A, B, C = map(Party, ("hub", "a", "b", "c"))
SITES = (A, B, C)


@message("L1", protocol="toy")
class News:  # S → u
    text: str


@message("L2", protocol="toy")
class Answer:  # u → S
    run_id: bytes


class toy:
    """S tells something to all, then every site says the id of the next sub-channel."""

    @staticmethod
    def roles(params):
        return {HUB: honest} | dict.fromkeys(SITES, site)


toy.__name__ = "toy"


async def site(ch, params):
    if params == "nested":
        await ch.sub("inner").sub("deep").recv_broadcast(HUB, News)
    elif params == "apart":
        await ch.sub("inner", apart=True).recv_broadcast(HUB, News)
    elif params == "plain":
        await ch.recv(HUB, News)
    else:
        await ch.recv_broadcast(HUB, News)
    await ch.send(HUB, Answer(ch.sub("next").run_id))


async def honest(ch, params, texts=("x", "x", "x")):
    inner = ch.sub("inner").sub("deep") if params == "nested" else ch
    inner = ch.sub("inner", apart=True) if params == "apart" else inner
    for u, text in zip(SITES, texts, strict=True):
        await inner.send(u, News(text))
    inner._absorb(HUB, News(texts[0]))  # what `broadcast` does after sending
    answers = await ch.gather(SITES, Answer)
    return {u: m.run_id for u, m in answers.items()} | {HUB: ch.sub("next").run_id}


async def lying(ch, params):
    return await honest(ch, params, ("x", "x", "y"))


def ids(params, role=honest):
    run = run_protocol(toy, Case(params, {}), roles={HUB: role}, timeout=5.0)
    check_no_errors(run)
    return values(run)[HUB], run


@pytest.mark.parametrize("params", ["", "nested"])
def test_who_was_told_something_else_is_in_another_sub_channel(params):
    alike, _ = ids(params)
    assert len(set(alike.values())) == 1
    split, _ = ids(params, lying)
    assert split[A] == split[B] == split[HUB] != split[C]


@pytest.mark.parametrize("params", ["apart", "plain"])
def test_what_is_no_broadcast_or_stands_apart_binds_nothing_above(params):
    split, _ = ids(params, lying)
    assert split[A] == split[B] == split[C]


def test_the_order_in_which_parallel_steps_finish_does_not_matter_and_their_content_does():
    def digest(order, change=b""):
        top = Transcript(b"top")
        parts = {name: Transcript(name, top) for name in (b"one", b"two")}
        for name in order:
            parts[name].absorb(name + (change if name == b"two" else b""))
        return top.digest

    assert digest([b"one", b"two"]) == digest([b"two", b"one"])
    assert digest([b"one", b"two"]) != digest([b"one", b"two"], b"!")
    assert Transcript(b"top").digest == b""


def test_what_is_told_after_the_digest_was_read_counts_too():
    top = Transcript(b"top")
    step = Transcript(b"step", top)
    deep = Transcript(b"deep", step)
    seen = [top.digest]
    for one in (top, step, deep, step, deep):
        one.absorb(HUB, b"news")
        seen.append(top.digest)
    assert len(set(seen)) == len(seen)


def test_what_was_told_first_counts_after_something_else_was_told():
    """A coordinator that told two sites different things does not get them together by telling both the same after."""

    def told(*news):
        transcript = Transcript(b"run")
        for one in news:
            transcript.absorb(HUB, one)
        return transcript.digest

    assert told(b"one", b"same") != told(b"other", b"same")
    assert told(b"one", b"same") != told(b"same")
    assert told(b"one", b"same") != told(b"same", b"one")
    assert told(b"one", b"same") == told(b"one", b"same")


def test_two_receipts_agree_after_an_honest_run():
    _, run = ids("")
    found = compare(run.receipts[A], run.receipts[B])
    assert found.told == 2  # the hello, and the news
    assert compare(run.receipts[A], run.receipts[HUB]).exchanged == 4  # hello, welcome, news, answer
    assert compare(run.receipts[HUB], run.receipts[C]).unread == 0


def test_two_receipts_name_the_message_that_was_told_differently_and_who_told_it():
    _, run = ids("", lying)
    compare(run.receipts[A], run.receipts[B])
    with pytest.raises(ReceiptError, match="toy L1: 'a' and 'c' received different broadcasts from 'hub'"):
        compare(run.receipts[A], run.receipts[C])
    with pytest.raises(ReceiptError, match="toy L1"):
        compare(run.receipts[HUB], run.receipts[C])  # the hub's own receipt says what it means to have told


def altered(receipt, kind, **changes):
    made = Receipt({k: v for k, v in receipt.header.items() if k != "format"})
    for entry, _ in receipt.entries:
        fields = {name: getattr(entry, name) for name in Entry.__dataclass_fields__}
        made.add(Entry(**(fields | (changes if entry.kind == kind and entry.name.startswith("toy.") else {}))))
    return made


def test_a_message_that_changed_between_sender_and_receiver_is_named():
    _, run = ids("")
    forged = altered(run.receipts[A], "received", sha256="00" * 32)
    with pytest.raises(ReceiptError, match=r"toy L1: 'a' received another toy.News from 'hub' than 'hub' sent"):
        compare(run.receipts[HUB], forged)


def test_receipts_of_other_runs_parties_or_studies_are_not_compared():
    (_, one), (_, two) = ids(""), ids("")
    with pytest.raises(ReceiptError, match="two different"):
        compare(one.receipts[A], two.receipts[B])
    with pytest.raises(ReceiptError, match="both receipts are of 'a'"):
        compare(one.receipts[A], one.receipts[A])
    one.receipts[A].header["study_digest"] = two.receipts[B].header["study_digest"]
    with pytest.raises(ReceiptError, match="two different runs"):
        compare(one.receipts[A], two.receipts[B])


def test_the_command_line_compares_two_receipts(tmp_path, monkeypatch, capsys):
    from cloister.cli import main as cli

    def run_cli(*words):
        monkeypatch.setattr(sys, "argv", ["cloister", "receipt", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        told = capsys.readouterr()
        return ended.value.code or 0, told.out + told.err

    files = {}
    for name, role in (("good", honest), ("bad", lying)):
        _, run = ids("", role)
        for party in (A, C):
            files[name, party] = run.receipts[party].save(tmp_path / f"{name}-{party}.json")
    code, text = run_cli(files["good", A], files["good", C], "--compare")
    assert (code, "broadcasts are identical" in text) == (0, True)
    code, text = run_cli(files["bad", A], files["bad", C], "--compare")
    assert code == 4
    assert "received different broadcasts from 'hub'" in " ".join(text.split())
    assert run_cli(files["good", A], files["good", C])[0] == 2
    assert run_cli(files["good", A], "--compare")[0] == 2
    forged = tmp_path / "forged.json"
    forged.write_text(files["good", A].read_text().replace("toy.News", "toy.Olds"))
    assert run_cli(forged, files["good", C], "--compare")[0] == 4
