"""Keys between two parties: X25519 agreement, HKDF, Ed25519 identities, and sealed boxes.

    KA(sk_u, pk_v) = HKDF(X25519(sk_u, pk_v), info = bind("agree", context, min(pk_u, pk_v), max(pk_u, pk_v)))
    sign(m)        = Ed25519(sk, bind("sign", context, m))
    seal(k, m)     = nonce ‖ ChaCha20-Poly1305(k, nonce, m, aad = bind("seal", aad))      96-bit random nonce

`bind` puts a domain before every input and a length before every part, so no key, signature or box made for one
purpose means anything for another. Checks raise `ProtocolAbort` with one of the codes `bad-key`, `bad-signature`,
`bad-box`; no error, `repr` or `str` carries a secret.

References
----------
[RFC7748] X25519.  [RFC5869] HKDF.  [RFC8032] Ed25519.  [RFC8439] ChaCha20-Poly1305.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from cryptography.exceptions import InvalidSignature, InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.mpc.crypto.entropy import Entropy, check_entropy
from cloister.mpc.crypto.prg import check_key

DOMAIN = b"cloister/1/"
NONCE_BYTES = 12
MAX_KEY_FILE = 1 << 12  # bytes; a PEM of Ed25519 has 119


def bind(purpose: str, *parts: bytes) -> bytes:
    """One byte string that says what it is for; two of them are equal only if purpose and all parts are."""
    whole = (DOMAIN + purpose.encode(), *parts)
    return b"".join(len(part).to_bytes(8, "big") + part for part in whole)


def hkdf(secret: bytes, context: bytes, length: int = 32, *, salt: bytes = b"") -> bytes:
    """HKDF-SHA256 [RFC5869] with `context` as info; build it with `bind`."""
    if not 0 < length <= 255 * 32:
        raise ParameterError(f"HKDF-SHA256 gives 1 to {255 * 32} bytes, requested {length}")
    return HKDF(hashes.SHA256(), length, salt, context).derive(secret)


# ---- agreement -----------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True, eq=False)
class KeyPair:
    """An X25519 key pair; the public half follows from the private one."""

    private: bytes = field(repr=False)
    public: bytes = field(init=False)
    _key: X25519PrivateKey = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_key(self.private)
        key = X25519PrivateKey.from_private_bytes(self.private)
        object.__setattr__(self, "_key", key)
        object.__setattr__(self, "public", key.public_key().public_bytes_raw())


def key_pair(entropy: Entropy) -> KeyPair:
    check_entropy(entropy)
    return KeyPair(entropy.bytes(32))


def agree(keys: KeyPair, peer_public: bytes, context: bytes, length: int = 32) -> bytes:
    """The key that `keys` and the owner of `peer_public` share for `context`; the same bytes at both."""
    if not isinstance(peer_public, bytes) or len(peer_public) != 32:
        raise ProtocolAbort("agreement", "agree", "bad-key", "the peer's public key must have 32 bytes")
    if peer_public == keys.public:
        raise ProtocolAbort("agreement", "agree", "bad-key", "the peer's public key is this party's own")
    try:
        secret = keys._key.exchange(X25519PublicKey.from_public_bytes(peer_public))
    except ValueError:  # the shared secret is all zero: a point of low order, [RFC7748] section 6.1
        raise ProtocolAbort(
            "agreement",
            "agree",
            "bad-key",
            "the peer's public key is a point of low order, which no honest party makes",
        ) from None
    return hkdf(secret, bind("agree", context, *sorted((keys.public, peer_public))), length)


# ---- identity ------------------------------------------------------------------------------------------------------


@final
class Identity:
    """A party's long-lived Ed25519 key. `public` stands in `study.toml`; the rest never leaves the site."""

    __slots__ = ("_private", "public")

    def __init__(self, private: bytes) -> None:
        check_key(private)
        self._private = Ed25519PrivateKey.from_private_bytes(private)
        self.public = self._private.public_key().public_bytes_raw()

    def __repr__(self) -> str:
        return f"Identity(public={self.public.hex()})"

    @classmethod
    def create(cls, entropy: Entropy) -> Identity:
        check_entropy(entropy)
        return cls(entropy.bytes(32))

    def sign(self, context: str, data: bytes) -> bytes:
        return self._private.sign(bind("sign", context.encode(), data))

    def save(self, path: str | Path) -> None:
        """Write the private key as PEM, readable by the owner only; an existing file is never replaced."""
        pem = self._private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        try:
            target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise DataError(
                f"{path} exists already and is not replaced; choose another file, or move it away"
            ) from None
        except OSError as e:
            raise DataError(f"{path} cannot be written ({type(e).__name__}); does its folder exist?") from None
        with os.fdopen(target, "wb") as file:
            file.write(pem)

    @classmethod
    def load(cls, path: str | Path) -> Identity:
        """Read what `save` wrote; a file that others could read is refused."""
        try:
            with open(path, "rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
                    raise DataError(
                        f"{path} is open to other users of this machine (mode {stat.S_IMODE(mode):03o}); "
                        f"run: chmod 600 {path}, and make a new key if others may have read it"
                    )
                pem = file.read(MAX_KEY_FILE)
        except FileNotFoundError:
            raise DataError(f"there is no key file at {path}; `cloister provision` makes one") from None
        except OSError as e:
            raise DataError(f"{path} cannot be read ({type(e).__name__})") from None
        try:
            private = serialization.load_pem_private_key(pem, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            private = None
        if not isinstance(private, Ed25519PrivateKey):
            raise DataError(f"{path} holds no Ed25519 private key in PEM without a password")
        return cls(private.private_bytes_raw())


def check_signature(public: bytes, context: str, data: bytes, signature: bytes) -> None:
    """Raise unless the owner of `public` signed `data` in this context."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, bind("sign", context.encode(), data))
    except (InvalidSignature, ValueError, TypeError):
        raise ProtocolAbort(
            "agreement", "signature", "bad-signature", f"a signature for '{context}' does not fit the key and the data"
        ) from None


# ---- sealed boxes --------------------------------------------------------------------------------------------------


def seal(key: bytes, plaintext: bytes, aad: bytes, entropy: Entropy) -> bytes:
    """Encrypt and authenticate; `aad` is authenticated only. At most 2**32 boxes for one key."""
    check_key(key)
    check_entropy(entropy)
    nonce = entropy.bytes(NONCE_BYTES)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, plaintext, bind("seal", aad))


def unseal(key: bytes, box: bytes, aad: bytes) -> bytes:
    """The plaintext of a box that `seal` made with the same key and `aad`; anything else raises."""
    check_key(key)
    try:
        return ChaCha20Poly1305(key).decrypt(box[:NONCE_BYTES], box[NONCE_BYTES:], bind("seal", aad))
    except (InvalidTag, ValueError, TypeError):
        raise ProtocolAbort(
            "agreement",
            "unseal",
            "bad-box",
            "a sealed box was altered, or made with another key or for another purpose",
        ) from None
