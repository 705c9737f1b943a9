import os
import traceback

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.mpc.crypto.agreement import Identity, KeyPair, agree, bind, check_signature, hkdf, key_pair, seal, unseal
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.prg import Prg

quick = settings(derandomize=True, deadline=None, max_examples=40)
hexed = bytes.fromhex


def entropy(seed=0):
    return Entropy(Prg(seed.to_bytes(32, "big")).bytes)


# ---- HKDF, RFC 5869 appendix A -------------------------------------------------------------------------------------


def test_hkdf_rfc5869_case_1():
    okm = hkdf(b"\x0b" * 22, hexed("f0f1f2f3f4f5f6f7f8f9"), 42, salt=hexed("000102030405060708090a0b0c"))
    assert okm.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"


def test_hkdf_rfc5869_case_2():
    ikm, salt, info = (bytes(range(start, start + 80)) for start in (0x00, 0x60, 0xB0))
    assert hkdf(ikm, info, 82, salt=salt).hex() == (
        "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c"
        "59045a99cac7827271cb41c65e590e09da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87"
    )


def test_hkdf_rfc5869_case_3():
    okm = hkdf(b"\x0b" * 22, b"", 42)
    assert okm.hex() == "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"


@pytest.mark.parametrize("length", [0, -1, 255 * 32 + 1])
def test_hkdf_has_a_limit(length):
    with pytest.raises(ParameterError, match="1 to 8160"):
        hkdf(b"x", b"", length)


# ---- X25519, RFC 7748 section 6.1 ----------------------------------------------------------------------------------

ALICE = "77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a"
ALICE_PUBLIC = "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
BOB = "5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb"
BOB_PUBLIC = "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
SHARED = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"
P = 2**255 - 19
LOW_ORDER = [
    *(n.to_bytes(32, "little") for n in (0, 1, P - 1, P, P + 1)),
    hexed("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    hexed("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
]


def test_x25519_rfc7748():
    alice, bob = KeyPair(hexed(ALICE)), KeyPair(hexed(BOB))
    assert (alice.public.hex(), bob.public.hex()) == (ALICE_PUBLIC, BOB_PUBLIC)
    info = bind("agree", b"run", hexed(ALICE_PUBLIC), hexed(BOB_PUBLIC))  # 85 < de: in this order
    assert agree(alice, bob.public, b"run") == agree(bob, alice.public, b"run") == hkdf(hexed(SHARED), info)


@quick
@given(st.integers(0, 2**32), st.binary(max_size=64), st.integers(1, 200))
def test_both_sides_agree(seed, context, length):
    e = entropy(seed)
    u, v = key_pair(e), key_pair(e)
    key = agree(u, v.public, context, length)
    assert key == agree(v, u.public, context, length)
    assert len(key) == length


def test_a_key_belongs_to_its_context_and_its_pair():
    e = entropy()
    u, v, w = key_pair(e), key_pair(e), key_pair(e)
    keys = {agree(u, v.public, b"a"), agree(u, v.public, b"b"), agree(u, v.public, b""), agree(u, w.public, b"a")}
    assert len(keys) == 4
    # the same point, written another way (RFC 7748 ignores the top bit), is another key
    assert agree(u, v.public[:31] + bytes([v.public[31] | 128]), b"a") not in keys


def test_bind_is_injective():
    assert bind("a").startswith((12).to_bytes(8, "big") + b"cloister/1/a")
    parts = [("a",), ("a", b""), ("a", b"", b""), ("a", b"bc"), ("a", b"b", b"c"), ("ab", b"c"), ("a", b"", b"bc")]
    assert len({bind(*p) for p in parts}) == len(parts)


@pytest.mark.parametrize("point", LOW_ORDER, ids=range(len(LOW_ORDER)))
def test_points_of_low_order_are_refused(point):
    with pytest.raises(ProtocolAbort, match="low order") as e:
        agree(key_pair(entropy()), point, b"run")
    assert e.value.code == "bad-key"
    assert e.value.exit_code == 4


@pytest.mark.parametrize("bad", [b"", bytes(31), bytes(33), "x" * 32, None])
def test_a_public_key_has_32_bytes(bad):
    with pytest.raises(ProtocolAbort, match="32 bytes"):
        agree(key_pair(entropy()), bad, b"run")


def test_ones_own_key_comes_back_from_nobody():
    keys = key_pair(entropy())
    with pytest.raises(ProtocolAbort, match="own"):
        agree(keys, keys.public, b"run")


def test_key_pairs_are_fresh():
    assert key_pair(Entropy()).public != key_pair(Entropy()).public


# ---- Ed25519, RFC 8032 section 7.1 ---------------------------------------------------------------------------------

SIGNED = {
    "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60": (
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555"
        "fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb": (
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da0"
        "85ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
    "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7": (
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac1"
        "8ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
}


@pytest.mark.parametrize("private", SIGNED)
def test_ed25519_rfc8032(private):
    public, message, signature = SIGNED[private]
    identity = Identity.create(Entropy(lambda n: hexed(private)))
    assert identity.public.hex() == public
    # our signatures always carry a context, so the RFC's bare ones meet the key below it
    assert identity._private.sign(hexed(message)).hex() == signature
    assert identity.sign("a", hexed(message)) == identity._private.sign(bind("sign", b"a", hexed(message)))


@quick
@given(st.text(max_size=20), st.binary(max_size=100))
def test_signatures_verify(context, data):
    identity = Identity.create(entropy())
    check_signature(identity.public, context, data, identity.sign(context, data))


def test_a_signature_fits_one_key_one_context_and_one_text():
    me, other = Identity.create(entropy(1)), Identity.create(entropy(2))
    good = me.sign("keys", b"data")
    flipped = bytes([good[0] ^ 1]) + good[1:]
    wrong = [
        (other.public, "keys", b"data", good),
        (me.public, "keyz", b"data", good),
        (me.public, "key", b"sdata", good),
        (me.public, "keys", b"dat", good),
        (me.public, "keys", b"data", flipped),
        (me.public, "keys", b"data", good[:-1]),
        (me.public, "keys", b"data", b""),
        (me.public, "keys", b"data", None),
        (me.public[:-1], "keys", b"data", good),
        (bytes(32), "keys", b"data", good),
        (None, "keys", b"data", good),
    ]
    for arguments in wrong:
        with pytest.raises(ProtocolAbort) as e:
            check_signature(*arguments)
        assert e.value.code == "bad-signature"


def test_identity_on_disk(tmp_path):
    path = tmp_path / "basel.pem"
    identity = Identity.create(entropy())
    before = os.umask(0)
    try:
        identity.save(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    loaded = Identity.load(path)
    assert loaded.public == identity.public
    assert loaded.sign("a", b"b") == identity.sign("a", b"b")
    assert path.read_bytes().startswith(b"-----BEGIN PRIVATE KEY-----")


def test_a_key_is_never_overwritten(tmp_path):
    path, link = tmp_path / "a.pem", tmp_path / "link.pem"
    link.symlink_to(tmp_path / "elsewhere.pem")
    Identity.create(entropy(1)).save(path)
    kept = path.read_bytes()
    for target in (path, str(path), link):
        with pytest.raises(DataError, match="exists already"):
            Identity.create(entropy(2)).save(target)
    assert path.read_bytes() == kept
    assert not (tmp_path / "elsewhere.pem").exists()
    with pytest.raises(DataError, match="does its folder exist"):
        Identity.create(entropy(2)).save(tmp_path / "no" / "a.pem")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o620, 0o777])
def test_a_key_that_others_can_read_is_refused(tmp_path, mode):
    path = tmp_path / "a.pem"
    Identity.create(entropy()).save(path)
    path.chmod(mode)
    with pytest.raises(DataError, match=f"mode {mode:03o}.*chmod 600"):
        Identity.load(path)
    path.chmod(0o400)
    Identity.load(path)


def test_what_is_no_key_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="no key file"):
        Identity.load(tmp_path / "none.pem")
    with pytest.raises(DataError, match="cannot be read"):
        Identity.load(tmp_path)
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    other = generate_private_key(SECP256R1()).private_bytes(*form, serialization.NoEncryption())
    key = Identity.create(entropy())._private
    locked = key.private_bytes(*form, serialization.BestAvailableEncryption(b"password"))
    for i, content in enumerate((b"", b"top secret", entropy(3).bytes(200), other, locked)):
        path = tmp_path / f"{i}.pem"
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(DataError, match="holds no Ed25519 private key") as e:
            Identity.load(path)
        assert "top secret" not in "".join(traceback.format_exception(e.value))


# ---- sealed boxes --------------------------------------------------------------------------------------------------


@quick
@given(st.binary(max_size=300), st.binary(max_size=50))
def test_boxes_open(plaintext, aad):
    key = bytes(range(32))
    box = seal(key, plaintext, aad, Entropy())
    assert unseal(key, box, aad) == plaintext
    assert len(box) == len(plaintext) + 28


def test_equal_texts_make_different_boxes():
    assert seal(bytes(32), b"x", b"", Entropy()) != seal(bytes(32), b"x", b"", Entropy())


def test_an_altered_box_stays_shut():
    key = bytes(range(32))
    box = seal(key, b"plain", b"aad", entropy())
    wrong = [(key, bytes([*box[:i], box[i] ^ 1, *box[i + 1 :]]), b"aad") for i in range(len(box))]
    wrong += [(key, box[:n], b"aad") for n in (0, 5, 11, 12, 20, len(box) - 1)]
    wrong += [(key, box + b"x", b"aad"), (key, box, b"aa"), (bytes(32), box, b"aad"), (key, None, b"aad")]
    for arguments in wrong:
        with pytest.raises(ProtocolAbort) as e:
            unseal(*arguments)
        assert e.value.code == "bad-box"


# ---- secrets stay inside -------------------------------------------------------------------------------------------


def traces(secret):
    return [secret.hex(), repr(secret)[2:-1], str(int.from_bytes(secret, "big")), str(int.from_bytes(secret, "little"))]


def test_no_secret_in_repr_or_str():
    secret = entropy(7).bytes(32)
    fixed = Entropy(lambda n: secret[:n])
    for thing in (key_pair(fixed), Identity.create(fixed), fixed, fixed.prg(), KeyPair(secret), Identity(secret)):
        for text in (repr(thing), str(thing), f"{thing}", repr([thing]), repr(getattr(thing, "__dict__", ""))):
            assert not any(trace in text for trace in traces(secret))
    assert key_pair(fixed).public.hex() != secret.hex()


def test_no_secret_in_errors():
    secret = entropy(7).bytes(32)
    keys = KeyPair(secret)
    fails = [
        lambda: KeyPair(secret[:31]),
        lambda: Identity(secret + b"x"),
        lambda: Prg(secret[:30]),
        lambda: seal(secret[:31], secret, b"", entropy()),
        lambda: unseal(secret, bytes(40), b""),
        lambda: agree(keys, bytes(32), secret),
        lambda: agree(keys, keys.public, secret),
        lambda: check_signature(Identity(secret).public, "a", secret, bytes(64)),
    ]
    for fail in fails:
        with pytest.raises((ParameterError, ProtocolAbort)) as e:
            fail()
        text = "".join(traceback.format_exception(e.value)) + repr(e.value.args)
        assert not any(trace[:40] in text for trace in traces(secret))
