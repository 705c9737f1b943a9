import math

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from cloister.errors import ParameterError
from cloister.mpc.crypto.prg import Prg, expand, gaussian_table

quick = settings(derandomize=True, deadline=None, max_examples=50)
KEY = bytes(range(32))

# AES-256 of the counters 0, 1, 2 under the zero key: H, E(K, Y0) and E(K, Y1) of test cases 13 and 14 in
# McGrew and Viega, The Galois/Counter Mode of Operation.
ZERO_KEY = "dc95c078a2408989ad48a21492842087 530f8afbc74536b9a963b4f1c4cb738b cea7403d4d606b6e074ec5d3baf39d18"


def test_stream_of_the_zero_key():
    assert Prg(bytes(32)).bytes(48) == bytes.fromhex(ZERO_KEY)


def test_first_block_of_the_aesavs_key_sbox_vector():
    key = bytes.fromhex("c47b0294dbbbee0fec4757f22ffeee3587ca4730c3d33b691df38bab076bc558")
    assert Prg(key).bytes(16).hex() == "46f2fb342d6f0ab477476fc501242c5f"


def test_fill_against_sp800_38a_f_5_5():
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    counter = bytes.fromhex("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff")  # ours starts at zero, so the test puts it in
    plain = bytes.fromhex(
        "6bc1bee22e409f96e93d7e117393172a ae2d8a571e03ac9c9eb76fac45af8e51"
        "30c81c46a35ce411e5fbc1191a0a52ef f69f2445df4f9b17ad2b417be66c3710"
    )
    cipher = bytes.fromhex(
        "601ec313775789a5b7a7f504bbf3d228 f443e3ca4d62b59aca84e990cacaf5c5"
        "2b0930daa23de94ce87017ba2d84988d dfc9c58db67aada613c2dd08457941a6"
    )
    prg = Prg(key)
    prg._stream = Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor()
    assert (prg.uint8(64) ^ np.frombuffer(plain, np.uint8)).tobytes() == cipher


@quick
@given(st.lists(st.tuples(st.sampled_from(["bytes", "uint8", "uint32", "uint64"]), st.integers(0, 50)), max_size=8))
def test_calls_go_on_where_the_last_one_stopped(calls):
    prg = Prg(KEY)
    parts = [getattr(prg, kind)(n) for kind, n in calls]
    joined = b"".join(p if isinstance(p, bytes) else p.tobytes() for p in parts)  # little endian machine
    assert joined == Prg(KEY).bytes(len(joined))


def test_long_streams_are_seamless_where_chunks_meet():
    n = (1 << 18) + 12_345
    assert Prg(KEY).uint8(n).tobytes() == Prg(KEY).bytes(n)
    assert Prg(KEY).uint64(n).tobytes() == Prg(KEY).bytes(8 * n)


def test_arrays_are_writeable_and_have_their_type():
    prg = Prg(KEY)
    for method, dtype in (("uint64", np.uint64), ("uint32", np.uint32), ("uint8", np.uint8), ("bits", np.uint8)):
        for shape in (0, 5, (), (2, 3), (4, 0)):
            x = getattr(prg, method)(shape)
            assert x.dtype == dtype
            assert x.shape == ((shape,) if isinstance(shape, int) else shape)
            assert x.flags.writeable
    assert prg.below(np.int64(97), np.int64(5)).shape == prg.ternary(np.int64(5)).shape == (5,)
    for x in (prg.ternary((2, 3)), prg.gaussian((2, 3))):
        assert (x.shape, x.dtype, x.flags.writeable) == ((2, 3), np.int64, True)
    for x in (prg.below(7, ()), prg.ternary(()), prg.gaussian(()), prg.below(7, 0), prg.ternary(0), prg.gaussian(0)):
        assert x.size in (0, 1)


def test_fill_writes_in_place_and_only_where_it_can():
    out = np.zeros((3, 4), np.int64)
    Prg(KEY).fill(out)
    assert np.array_equal(out.view(np.uint64), Prg(KEY).uint64((3, 4)))
    frozen = np.zeros(4, np.uint8)
    frozen.flags.writeable = False
    for bad in (np.zeros((4, 4), np.uint64)[:, ::2], np.zeros(4), frozen):
        with pytest.raises(ParameterError, match="fill needs"):
            Prg(KEY).fill(bad)


def test_expand_is_the_start_of_the_stream():
    assert np.array_equal(expand(KEY, 100), Prg(KEY).uint64(100))
    assert not np.array_equal(expand(KEY, 100), expand(bytes(32), 100))


def test_bits_are_the_bytes_lowest_first():
    assert np.array_equal(np.packbits(Prg(KEY).bits(800), bitorder="little"), Prg(KEY).uint8(100))


def fits(observed, expected):
    assert stats.chisquare(observed, expected).pvalue > 0.001


def test_bytes_and_bits_are_uniform():
    prg = Prg(KEY)
    fits(np.bincount(prg.uint8(256_000), minlength=256), np.full(256, 1000.0))
    fits(np.bincount(prg.bits(100_000), minlength=2), np.full(2, 50_000.0))


def test_ternary_is_uniform():
    x = Prg(KEY).ternary(300_000)
    fits(np.bincount(x + 1, minlength=3), np.full(3, 100_000.0))


def test_ternary_redraws_255():
    prg = Prg(KEY)
    raw = Prg(KEY).uint8(10_000)
    x = prg.ternary(10_000)
    kept = raw != 255
    assert 0 < (~kept).sum() < 100
    assert np.array_equal(x[kept], raw[kept].astype(np.int64) % 3 - 1)


@pytest.mark.parametrize("n", [2, 3, 10, 97])
def test_below_is_uniform(n):
    fits(np.bincount(Prg(KEY).below(n, 50_000).astype(np.int64), minlength=n), np.full(n, 50_000 / n))


def test_below_without_rejection_would_be_biased_here():
    # n = 3 · 2^61: of the 8 · 2^61 words, 3, 3 and 2 parts fall into the thirds of [0, n) unless 2 parts are redrawn
    n = 3 << 61
    x = Prg(KEY).below(n, 60_000)
    assert int(x.max()) < n
    fits(np.bincount((x >> np.uint64(61)).astype(np.int64), minlength=3), np.full(3, 20_000.0))
    biased = np.bincount(((Prg(KEY).uint64(60_000) % np.uint64(n)) >> np.uint64(61)).astype(np.int64), minlength=3)
    assert stats.chisquare(biased).pvalue < 1e-9


@quick
@given(st.integers(1, 2**63 - 1))
def test_below_is_below(n):
    assert not Prg(KEY).below(1, 5).any()
    x = Prg(KEY).below(n, 200)
    assert x.dtype == np.uint64
    assert int(x.max()) < n


@pytest.mark.parametrize("n", [0, -1, 2**63, 2**70])
def test_below_refuses_other_sizes(n):
    with pytest.raises(ParameterError, match=r"0 < n < 2\*\*63"):
        Prg(KEY).below(n, 3)


@pytest.mark.parametrize("sigma", [0.5, 3.2, 19.0])
def test_gaussian_has_its_distribution(sigma):
    size = 200_000
    x = Prg(KEY).gaussian(size, sigma)
    edge = math.ceil(3 * sigma)
    ks = np.arange(-edge, edge + 1)
    weight = np.exp(-(np.arange(-200, 201) ** 2) / (2 * sigma**2))
    pmf = np.exp(-(ks**2) / (2 * sigma**2)) / weight.sum()
    inner = np.bincount(x[np.abs(x) <= edge] + edge, minlength=ks.size)
    fits([*inner, size - inner.sum()], [*(size * pmf), size * (1 - pmf.sum())])
    assert abs(x.mean()) < 5 * sigma / math.sqrt(size) + 1e-9
    assert np.abs(x).max() < 9.3 * sigma + 2


@pytest.mark.parametrize("sigma", [0.5, 3.2, 40.0])
def test_gaussian_table_is_the_distribution_function(sigma):
    table = [int(t) for t in gaussian_table(sigma)]
    tail = len(table) // 2
    assert tail >= 6 * sigma
    assert table == sorted(table)
    weights = [math.exp(-k * k / (2 * sigma**2)) for k in range(-tail, tail + 1)]
    for i in range(0, len(table), max(1, len(table) // 50)):
        assert math.isclose(
            table[i] / 2**64, math.fsum(weights[: i + 1]) / math.fsum(weights), rel_tol=1e-12, abs_tol=2e-19
        )
    # symmetric to the last bit: P(X <= k) + P(X <= -k-1) = 1, each rounded down
    assert all(2**64 - (a + b) in (0, 1) for a, b in zip(table, reversed(table), strict=True))


@pytest.mark.parametrize("word", [0, 2**64 - 1])
def test_gaussian_at_the_ends_of_the_table(word, monkeypatch):
    monkeypatch.setattr(Prg, "uint64", lambda self, n: np.full(n, word, np.uint64))
    tail = gaussian_table(3.2).size // 2
    assert 6 * 3.2 <= abs(int(Prg(KEY).gaussian(1)[0])) <= tail


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.nan, math.inf, 1e6])
def test_gaussian_refuses_other_widths(sigma):
    with pytest.raises(ParameterError, match="sigma must lie"):
        Prg(KEY).gaussian(3, sigma)


def test_the_table_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        gaussian_table(3.2)[0] = 1


@pytest.mark.parametrize("key", [b"", b"secret", bytes(16), bytes(33), bytearray(32), "k" * 32, None])
def test_a_key_has_32_bytes(key):
    with pytest.raises(ParameterError, match="a key has 32 bytes") as e:
        Prg(key)
    assert "secret" not in str(e.value)
    assert "kkk" not in str(e.value)


def test_repr_shows_nothing():
    prg = Prg(KEY)
    assert repr(prg) == str(prg) == f"{prg}" == "Prg(...)"
    assert not hasattr(prg, "__dict__")
