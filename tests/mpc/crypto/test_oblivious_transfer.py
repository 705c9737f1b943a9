import numpy as np
import pytest

pytest.importorskip("nacl")

from cloister.errors import ParameterError, ProtocolAbort
from cloister.mpc.crypto import oblivious_transfer as ot
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.prg import Prg

E = Entropy()


@pytest.fixture(scope="module")
def base():
    sender, s = ot.BaseSender(E), Prg(bytes(32)).bits(ot.BASE)
    replies, chosen = ot.base_receive(sender.point, s, b"run", E)
    return s, chosen, *sender.keys(replies, b"run")


def test_base_transfers_give_the_chosen_key_and_not_the_other(base):
    s, chosen, first, second = base
    for i in range(ot.BASE):
        assert chosen[i] == (first, second)[s[i]][i]
        assert chosen[i] != (second, first)[s[i]][i]
    assert len({*first, *second}) == 2 * ot.BASE


@pytest.mark.parametrize("choice", [0, 1])
def test_whatever_is_chosen_first_comes_out(choice):
    sender = ot.BaseSender(E)
    replies, chosen = ot.base_receive(sender.point, np.full(3, choice, np.uint8), b"run", E)
    assert chosen == sender.keys(replies, b"run")[choice]


def test_base_keys_belong_to_the_run():
    sender, s = ot.BaseSender(E), np.zeros(2, np.uint8)
    replies, chosen = ot.base_receive(sender.point, s, b"run", E)
    assert sender.keys(replies, b"other run")[0][0] != chosen[0]


@pytest.mark.parametrize("bad", [b"", bytes(32), b"\x01" + bytes(31), b"\xff" * 32, b"\x05" + bytes(31)])
def test_points_outside_the_group_are_refused(bad):
    """Among them the neutral element and a point of low order."""
    with pytest.raises(ProtocolAbort, match="point of the group"):
        ot.base_receive(bad, np.zeros(1, np.uint8), b"run", E)
    with pytest.raises(ProtocolAbort, match="point of the group"):
        ot.BaseSender(E).keys([bad], b"run")


def test_extension(base):
    s, chosen, first, second = base
    receiver, sender = ot.ExtensionReceiver(first, second), ot.ExtensionSender(s, chosen)
    for m in (8, 4096 * 8 + 64):  # two batches of one pair of streams
        x = Prg(bytes(range(32))).bits(m)
        u, t = receiver.extend(x, E)
        q = sender.extend(u, m)
        np.testing.assert_array_equal(q, t ^ (x[:, None] * sender.s))
        sender.check(b"\x07" * 32, receiver.answer(b"\x07" * 32))
    with pytest.raises(ParameterError):
        receiver.extend(x[:7], E)


def test_a_receiver_with_other_choices_in_every_column_reads_everything_without_the_check(base):
    """S3: row i has another choice in column i. Who then sees m_i, by its distances, knows bit i of s, and all δ."""
    s, chosen, first, second = base
    receiver, sender, pads = ot.ExtensionReceiver(first, second), ot.ExtensionSender(s, chosen), ot.Pads(b"run")
    m = 256
    u, t = receiver.extend(np.zeros(m, np.uint8), E)
    for i in range(ot.BASE):
        u[i, i // 8] ^= 1 << i % 8
    q = sender.extend(u, m)
    secret = np.random.default_rng(1).integers(0, 1 << 16, (m, 2)).astype(np.uint16)
    base_words = pads.pad(q, 0, 2, np.uint16)
    corrections = base_words + secret - pads.pad(q ^ sender.s, 0, 2, np.uint16)
    guessed = np.zeros(ot.BASE, np.uint8)
    for i in range(ot.BASE):  # what follows from the first 128 of m, say because their distances are opened
        other = t[i : i + 1].copy()
        other[0, i // 8] ^= 1 << i % 8
        guessed[i] = (pads.pad(other, i, 2, np.uint16) == base_words[i]).all()
    np.testing.assert_array_equal(guessed, s)
    key = np.packbits(guessed, bitorder="little")
    rest = slice(ot.BASE, m)
    read = corrections[rest] - pads.pad(t[rest], ot.BASE, 2, np.uint16) + pads.pad(t[rest] ^ key, ot.BASE, 2, np.uint16)
    np.testing.assert_array_equal(read, secret[rest])
    with pytest.raises(ProtocolAbort, match="differ between columns"):
        sender.check(b"\x07" * 32, receiver.answer(b"\x07" * 32))


@pytest.mark.parametrize("column", [0, 77, 127])
def test_one_wrong_column_is_a_guess_at_one_bit(base, column):
    s, chosen, first, second = base
    receiver, sender = ot.ExtensionReceiver(first, second), ot.ExtensionSender(s, chosen)
    u, _ = receiver.extend(np.zeros(64, np.uint8), E)
    u[column, 3] ^= 4
    sender.extend(u, 64)
    answer = receiver.answer(b"\x07" * 32)
    if s[column]:
        with pytest.raises(ProtocolAbort, match="differ between columns"):
            sender.check(b"\x07" * 32, answer)
    else:
        sender.check(b"\x07" * 32, answer)


def test_the_answer_hides_the_choices(base):
    """X̃ for all zeros and for all ones is uniform alike: over many batches every bit is set half of the time."""
    _, _, first, second = base
    for x in (0, 1):
        receiver = ot.ExtensionReceiver(first, second)
        sums = []
        for _ in range(400):
            receiver.extend(np.full(8, x, np.uint8), E)
            sums.append(receiver.answer(b"\x07" * 32)[0])
        bits = np.unpackbits(np.array(sums).view(np.uint8).reshape(400, 8), axis=1)
        assert abs(bits.mean() - 0.5) < 0.02
        assert (abs(bits.mean(axis=0) - 0.5) < 0.17).all()  # 64 columns of 400 bits: 6.8 standard deviations


def test_what_the_sender_sees_does_not_depend_on_the_choices(base):
    _, _, first, second = base
    seen = [ot.ExtensionReceiver(first, second).extend(np.full(8000, x, np.uint8), E)[0] for x in (0, 1)]
    for u in seen:
        assert abs(np.unpackbits(u).mean() - 0.5) < 0.008  # 128 000 bits: nearly six standard deviations


def test_transpose():
    rows = np.random.default_rng(0).integers(0, 256, (128, 2050), dtype=np.uint8)
    bits = np.unpackbits(rows, axis=1, bitorder="little")
    np.testing.assert_array_equal(np.unpackbits(ot.transpose(rows), axis=1, bitorder="little"), bits.T)


def test_pads_are_numbered_and_as_long_as_asked():
    pads = ot.Pads(b"run")
    rows = np.zeros((3, 16), np.uint8)
    long = pads.pad(rows, 5, 40, np.uint16)
    assert long.shape == (3, 40)
    np.testing.assert_array_equal(long[:, :9], pads.pad(rows, 5, 9, np.uint16))
    np.testing.assert_array_equal(long[1], pads.pad(rows[:1], 6, 40, np.uint16)[0])
    assert len({r.tobytes() for r in long}) == 3  # equal rows, other numbers
    assert (ot.Pads(b"other").pad(rows, 5, 40, np.uint16) != long).mean() > 0.99
    blocks = pads.pad(rows, 0, 64, np.uint8).reshape(3, 4, 16)
    assert len({b.tobytes() for b in blocks.reshape(-1, 16)}) == 12
