"""All keys of an encrypted training: made together by everyone, kept as they come, or loaded again.

    all     `collective_key` → public key
    all     `collective_relin` → relinearisation key
    all     `collective_rotation`, once per rotation → rotation keys

Switching keys are large (tens of megabytes): each is written to the store as soon as it is made, and held once per
process, however many parties are in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cloister.errors import ParameterError
from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.crypto.ckks.parameters import OPENINGS
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.prg import Prg
from cloister.mpc.net import wire
from cloister.mpc.net.channel import Channel
from cloister.mpc.threshold_ckks import collective_key, collective_relin, collective_rotation
from cloister.study import Party
from cloister.workflows.train_cellcnn.key_store import KeyStore, check_openings

NAME = "encrypted_training"  # whose progress these steps are


@dataclass
class Keys:
    """What a party holds of the collective key, loaded for evaluation."""

    name: bytes
    public: ckks.PublicKey
    relin: Any
    rotation: Mapping[int, Any]
    secret: ckks.Secret | None = None  # sites only
    store: KeyStore | None = None
    openings: int = 0  # results opened with them so far

    def __repr__(self) -> str:
        return f"Keys({self.name.hex()[:8]})"

    @property
    def share(self) -> ckks.Secret:
        """One party's share of the secret key."""
        if self.secret is None:
            raise ParameterError("this party holds no share of the key")
        return self.secret

    def spend(self, openings: int) -> None:
        """Count openings before they happen: floods hide the noise of `OPENINGS` of them, and no more."""
        if self.store is not None:  # counts every run that uses these keys, also one at the same time
            self.openings = self.store.spend(openings, OPENINGS)
        else:
            self.openings = check_openings(self.openings, openings, OPENINGS)


def key_costs(params: Any) -> list[dict[Party, tuple[int, int]]]:
    """Messages and bytes of each key generation, by party."""
    who = (params.holders, params.aggregator, params.ckks)
    rotations = [collective_rotation.Params(*who, steps=(steps,)) for steps in params.layout.rotations]
    return [
        collective_key.cost(collective_key.Params(*who)),
        collective_relin.cost(collective_relin.Params(*who)),
        *(collective_rotation.cost(p) for p in rotations),
    ]


async def make_keys(
    ch: Channel, params: Any, entropy: Entropy, secret: ckks.Secret | None, store: KeyStore | None
) -> Keys:
    """Both sides of the key generation; with a store, everything is kept as soon as it is there."""
    c, who = ckks.context(params.ckks), (params.holders, params.aggregator, params.ckks)

    async def generate(protocol: Any, what: str, label: str, **more: Any) -> Any:
        ch.step(f"collective keys: {what}", protocol=NAME, line="L2")
        terms, sub = protocol.Params(*who, **more), ch.sub(label)
        if secret is None:
            return await protocol.aggregator(sub, terms)
        return await protocol.holder(sub, terms, secret, entropy=entropy)

    public = await generate(collective_key, "public key", "public")
    switching = await generate(collective_relin, "relinearisation", "relin")
    name = wire.digest("keys", ch.run_id, public.b)
    if store is not None:
        store.put_public(public, secret)
        store.put_switching("relin", switching)
    relin, rotation = c.held(switching), {}
    for i, steps in enumerate(params.layout.rotations):
        what = f"rotation {i + 1} of {len(params.layout.rotations)}"
        turned = await generate(collective_rotation, what, f"rotation/{steps}", steps=(steps,))
        if store is not None:
            store.put_switching(f"rotation-{steps}", turned[steps])
        rotation[steps] = c.held(turned[steps])
    if store is not None:
        store.finish(name)
    return Keys(name, public, relin, rotation, secret, store)


def relinearised_zero(params: ckks.Parameters, keys: Keys, model: Sequence[ckks.Cipher], k: int) -> ckks.Cipher:
    """A product of two encryptions of zero, relinearised: its plaintext is large if the relinearisation key is wrong.

    A holder that adds δ to its h in `collective_relin` has everybody's secret multiplied by δ in the key. What the key
    adds to a product then is public digits times δ·s. The encryptions are made of [M], which nobody knew when the key
    was made, and are the same at all parties.
    """
    c, h = ckks.context(params), hashlib.sha256(b"cloister/relinearised_zero/")
    for ct in model:
        h.update(c.pack(ct.polys[0]))
    prg = Prg(h.digest())
    first, second = (c.cipher(c.encrypted_zero(keys.public, k, prg), params.scale) for _ in range(2))
    return c.product(first, second, keys.relin)


def load_keys(params: Any, store: KeyStore, *, site: bool) -> Keys:
    c = ckks.context(params.ckks)
    public, secret = store.get_public(params.ckks, secret=site)
    if site:
        store.begin_run()
    relin = c.held(store.get_switching(params.ckks, "relin"))
    turned = {steps: c.held(store.get_switching(params.ckks, f"rotation-{steps}")) for steps in params.layout.rotations}
    return Keys(store.name, public, relin, turned, secret, store, store.openings)
