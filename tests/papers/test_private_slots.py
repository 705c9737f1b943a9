import threading
from pathlib import Path

import numpy as np
import pytest

from cloister.errors import CloisterError, ParameterError
from cloister.mpc.crypto import paillier
from cloister.mpc.crypto.entropy import Entropy
from cloister.papers import masked_forest, private_slots
from cloister.study import Party
from cloister.testing import (
    Case,
    check_abort,
    check_cost,
    check_no_errors,
    check_vectors,
    check_view,
    run_protocol,
    values,
)

AUX = Party("auxiliary")
SITES = tuple(Party(f"site-{i}") for i in range(3))


@pytest.fixture(autouse=True)
def _short_keys(monkeypatch):
    """1024 bits here, so that the tests are about the protocol; the key size has tests of its own."""
    monkeypatch.setattr(paillier, "LEAST_BITS", 1024)


def case(rows=(5, 1, 9), width=4):
    params = private_slots.Params(SITES, AUX, 1024)
    return Case(params, {u: (n, width) for u, n in zip(SITES, rows, strict=True)})


def check_slots(c, run):
    """Same seed and N everywhere, and slots that cover 0 … N-1 once; nothing to check where a client failed."""
    if run.errors:
        return None
    found = {u: values(run)[u] for u in SITES}
    N = sum(n for n, _ in c.inputs.values())
    assert {v.rows for v in found.values()} == {N}
    assert values(run)[AUX] == private_slots.Size(N, 4)
    assert len({v.seed for v in found.values()}) == 1
    slots = [masked_forest.slots_of(v.seed, v.start, c.inputs[u][0], N) for u, v in found.items()]
    np.testing.assert_array_equal(np.sort(np.concatenate(slots)), np.arange(N))
    return found


def test_ideal_slots_are_disjoint_and_cover_everything():
    starts = set()
    for _ in range(4):
        c = case()
        run = run_protocol(private_slots, c)
        check_no_errors(run)
        found = check_slots(c, run)
        starts.add(found[SITES[0]].start)
        assert found[SITES[0]].seed.hex() not in repr(found[SITES[0]])
    assert len(starts) > 1  # H and the order of clients are fresh in every run


def test_vectors(monkeypatch):
    """Primes come from OpenSSL and never repeat; with given ones everything else does."""
    primes = [prime_from((n << 509) + (i << 500)) for i in range(3) for n in (6, 7)]
    keys = {u: paillier.SecretKey(*primes[2 * i : 2 * i + 2]) for i, u in enumerate(SITES)}
    monkeypatch.setattr(paillier, "generate", lambda bits: keys[Party(threading.current_thread().name)])
    check_vectors(private_slots, case(), Path(__file__).parents[1] / "vectors" / "private_slots.json")


def prime_from(n):
    return next(m for m in range(n | 1, n + 10**5, 2) if all(pow(a, m - 1, m) == 1 for a in (2, 3, 5)))


def test_as_printed_slots_would_collide():
    """The paper's sum for s_i stops one short: with three clients, the last two start at the same place."""
    N, H = (5, 1, 9), 3
    printed = [H, *(H + sum(N[: i - 1]) for i in range(1, 3))]
    places = [(s + np.arange(n)) % sum(N) for s, n in zip(printed, N, strict=True)]
    assert len(np.unique(np.concatenate(places))) < sum(N)


def test_the_start_does_not_tell_the_offset(monkeypatch):
    """Without k_i N, s_i would be H + Σ N_j as it is, and H a sum of numbers that clients partly know."""
    seen, keys = [], []
    make = paillier.generate
    monkeypatch.setattr(paillier, "generate", lambda bits: keys.append(make(bits)) or keys[-1])
    decrypt = paillier.SecretKey.decrypt
    monkeypatch.setattr(paillier.SecretKey, "decrypt", lambda self, c: seen.append(decrypt(self, c)) or seen[-1])
    run = run_protocol(private_slots, case())
    check_no_errors(run)
    starts = [m for m in seen if m.bit_length() > private_slots.SEED_BITS + 20]  # the seeds have 256 bits and two
    assert len(starts) == len(keys) == 3
    assert {m % 15 for m in starts} == {values(run)[u].start for u in SITES}
    assert min(abs(a - b) for a in starts for b in starts if a != b) > 2**300


def test_what_clients_know_of_the_seeds_does_not_tell_rows_before_them(monkeypatch):
    """With J = all clients, H is the sum that every client decrypts; s_i - H would be the rows of those before i."""
    monkeypatch.setattr(private_slots, "_shuffled", lambda clients, entropy: list(clients))
    kept = Entropy.integer_below
    monkeypatch.setattr(Entropy, "integer_below", lambda self, n: 1 if n == 2 else kept(self, n))  # J is everyone
    seen: dict[int, list[int]] = {}
    decrypt = paillier.SecretKey.decrypt

    def note(self, c):
        seen.setdefault(id(self), []).append(decrypt(self, c))
        return seen[id(self)][-1]

    monkeypatch.setattr(paillier.SecretKey, "decrypt", note)
    rows = (500, 1000, 900)
    run = run_protocol(private_slots, case(rows))
    check_no_errors(run)
    check_slots(case(rows), run)
    told = {(s - total) % sum(rows) for total, _, s in seen.values()}  # what each client can compute
    assert len(told) == 3
    assert told != {0, 500, 1500}


def test_the_auxiliary_and_one_client_know_everybodys_slots_as_reveals_says(monkeypatch):
    """Rows are encrypted under every client's key, and all ciphertexts go through A."""
    keys, sent = [], []
    make, kept = paillier.generate, private_slots.commitment
    monkeypatch.setattr(paillier, "generate", lambda bits: keys.append(make(bits)) or keys[-1])
    monkeypatch.setattr(private_slots, "commitment", lambda run, i, m: sent.append((i, m)) or kept(run, i, m))
    check_no_errors(run_protocol(private_slots, case()))
    secret, seen = keys[0], dict(sent)
    known = [u for u in SITES if len(seen[SITES[0]].rows[u]) and _opens(secret, seen, u)]
    assert len(known) == 1  # the client whose key it is
    found = {j: secret.decrypt(secret.public.from_bytes(m.rows[known[0]])) for j, m in seen.items()}
    assert found == dict(zip(SITES, (5, 1, 9), strict=True))
    assert "of EVERY client N_j and its slots" in private_slots.__doc__
    assert "which places of the shuffled table are whose" in masked_forest.__doc__


def _opens(secret, seen, u):
    try:
        return sum(secret.decrypt(secret.public.from_bytes(m.rows[u])) for m in seen.values()) == 15
    except CloisterError:
        return False


def test_view_and_cost():
    check_view(private_slots, case((5, 1, 9)), case((1, 13, 1)))
    check_cost(private_slots, case())


@pytest.mark.parametrize(
    "kind", ["truncate", *(pytest.param(k, marks=pytest.mark.slow) for k in ("drop", "duplicate", "swap", "kill"))]
)
def test_any_loss_aborts_by_name(kind):
    c = case()
    up = ("Key", "Commitment", "Encrypted", "Agreed")
    down = ("Keys", "Commitments", "Totals", "Start")
    messages = [("site-1", "auxiliary", f"private_slots.{n}") for n in up]
    messages += [("auxiliary", "site-1", f"private_slots.{n}") for n in down]
    assert check_abort(private_slots, c, survived=lambda run: check_slots(c, run), kinds=[kind], messages=messages) == 8


async def changes_its_mind(ch, params, own, width, *, entropy):
    """Commits to one set of ciphertexts and sends another."""
    secret = paillier.generate(params.key_bits)
    await ch.send(params.auxiliary, private_slots.Key(private_slots._bytes(secret.public.n)))
    roster = (await ch.recv(AUX, private_slots.Keys)).n
    keys = {j: paillier.PublicKey(int.from_bytes(n, "big")) for j, n in roster.items()}
    make = lambda: {j: k.to_bytes(k.encrypt(1, entropy)) for j, k in keys.items()}  # noqa: E731
    first = private_slots.Encrypted(make(), make())
    await ch.send(AUX, private_slots.Commitment(private_slots.commitment(ch.run_id, ch.me, first)))
    await ch.recv(AUX, private_slots.Commitments)
    await ch.send(AUX, private_slots.Encrypted(make(), make()))
    await ch.recv(AUX, private_slots.Totals)


def test_other_ciphertexts_than_committed_are_refused():
    run = run_protocol(private_slots, case(), roles={SITES[2]: changes_its_mind}, timeout=2.0)
    assert run.errors[AUX].code == "commitment"


async def repeats_a_key(ch, params, *, entropy):
    keys = await ch.gather(params.sites, private_slots.Key)
    same = {j: keys[params.sites[0]].n for j in params.sites}
    await ch.scatter(params.sites, private_slots.Keys(same))
    await ch.gather(params.sites, private_slots.Commitment)


def test_swapped_keys_are_refused():
    run = run_protocol(private_slots, case(), roles={AUX: repeats_a_key}, timeout=2.0)
    assert {e.code for p, e in run.errors.items() if p != AUX} == {"roster"}


def test_bad_parameters():
    with pytest.raises(ParameterError):
        private_slots.Params((SITES[0],), AUX)
    assert private_slots.Params(SITES, AUX).key_bits == 3072
