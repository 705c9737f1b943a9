"""Every operation of encrypted inference on given inputs, by the CPU's path or a card's: name → SHA-256 of the result.

Inputs come from seeds by `Prg`, which needs no compiled loops: a machine with a card computes only its own side and
compares with the vectors (`tests/vectors/owner_ckks.json`), which the CPU's path wrote (`scripts/gpu_parity.py`).
"""

import hashlib

import numpy as np

from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.owner_ckks import ring as rings
from cloister.mpc.crypto.owner_ckks import rotations
from cloister.mpc.crypto.owner_ckks.smallness_check import SENT
from cloister.mpc.crypto.prg import Prg

RINGS = {"small": rings.SMALL, "standard": rings.STANDARD}
OFTEN = 1 << 63  # a last word at which every second one is drawn again


def seed(number):
    return bytes([number] * 32)


def repeated(number):
    return Entropy(Prg(seed(number)).bytes)


def hashed(x):
    return hashlib.sha256(np.ascontiguousarray(x, np.uint32).tobytes()).hexdigest()


class Cpu:
    """`scheme`, as it is."""

    def __init__(self, params):
        from cloister.mpc.crypto.owner_ckks import scheme

        self.params, self.scheme, self.ring = params, scheme, scheme.ring_of(params)
        self.key = scheme.OwnerKey(params, repeated(1))
        self.ev = scheme.Evaluator(params, self.key.b, self.key.seed)
        self.b = self.key.b

    def switching(self, polys, tokens=1):
        return self.key.switching(polys, seed(16), repeated(17), tokens)

    def put(self, x):
        return x

    def host(self, x):
        return x

    def wire(self, x):
        return self.ev.host(x)

    def uniform(self, number, n, k):
        halves = self.scheme.Halves(seed(number))
        return np.stack([self.ring.uniform(halves, k) for _ in range(n)])

    def uniform_again(self, number):
        """One polynomial of one prime, where words are drawn again often."""
        words = self.scheme.Halves(seed(number)).words(self.params.degree, OFTEN)
        return words % np.uint64(self.ring.primes[0])

    def later(self, number, first, n, k):
        """Uniform polynomials from number `first` on, drawn at all primes, of which k are kept."""
        return np.ascontiguousarray(self.uniform(number, first + n, self.params.count)[first:, :k])

    def cover(self, cts):
        from cloister.mpc.crypto.owner_ckks.smallness_check import cover

        return cover(self.ev, cts, repeated(18))

    def forward(self, x):
        return self.ring.forward(x.copy())

    def opened(self, cts):
        return np.stack([self.key._opened(c) for c in cts])

    def blind(self, cts, how):
        return self.ev.blind(cts, how, seed(11), repeated(12))

    def refresh(self, cts, how):
        return self.key.refresh(cts, how, seed(13), repeated(14))

    def unblind(self, c0, how):
        return self.ev.unblind(c0, seed(13), how, seed(11))

    def flood(self, cts, bits, primes):
        return self.ev.flood(cts, bits, primes, repeated(15))


class Card:
    """`gpu`, with the noise that the CPU's path would draw."""

    def __init__(self, params):
        import torch

        from cloister.provider.gpu import cuda_device, gpu, gpu_ring

        self.params, self.torch, self.card = params, torch, cuda_device
        self.ring, self.prime = gpu_ring.ring_on_card(params), gpu_ring.PRIME
        entropy = repeated(1)
        public = entropy.bytes(32)
        s, e = entropy.prg().ternary(params.degree), entropy.prg().gaussian(params.degree)
        drawn = self.ring.forward_small(self.small(np.stack([e, s])[None]), params.count)
        self.key = gpu.OwnerKey.of(params, cuda_device.host(drawn[0, 1]), np.zeros(0, np.uint32), public)
        self.b = cuda_device.host(self.key._less_product(drawn[:, 0].contiguous(), public))[0]
        self.ev = gpu.Evaluator(params, self.b, public)
        self.put, self.host = cuda_device.put, cuda_device.host

    def small(self, x):
        return self.torch.from_numpy(np.ascontiguousarray(x, np.int8)).to(self.card.DEVICE)

    def uniform(self, number, n, k):
        return self.ring.uniform(seed(number), n, k)

    def uniform_again(self, number):
        known = self.ring.known
        often = known.cpu().numpy().view(self.prime).copy()
        often["last"] = OFTEN
        self.ring.known = self.card.upload(often)
        try:
            return self.ring.uniform(seed(number), 1, 1)[0, 0]
        finally:
            self.ring.known = known

    def later(self, number, first, n, k):
        out = self.card.empty(n, 2, k, self.params.degree)
        self.ring.again(out, self.card.upload(np.frombuffer(seed(number), np.uint32)), self.params.count, first)
        return out[:, 1].contiguous()

    def cover(self, cts):
        prg, small, words = repeated(18).prg(), [], []
        for _ in cts:
            small.append(self.noise(prg, 2))
            words.append(rings.random_below(prg, rings.modulus(self.params, SENT), self.params.degree))
        return self.ev.covered_by(cts, self.small(np.stack(small)), self.put(np.stack(words)))

    def forward(self, x):
        return self.ring.forward(x.clone())

    def opened(self, cts):
        return self.key.opened(cts)

    def noise(self, prg, polys):
        """For one ciphertext, in the order of `scheme.Evaluator.rerandomise`."""
        n = self.params.degree
        return [prg.gaussian(n) for _ in range(polys)] + [prg.ternary(n) for _ in range(polys - 1)]

    def switching(self, polys, tokens=1):
        secret, n = repeated(17).prg(), (polys - 2 + rotations.Turns(tokens).count) * self.params.count
        errors = self.small(np.stack([[secret.gaussian(self.params.degree)] for _ in range(n)]))
        return self.key.switching_with(errors, seed(16), tokens)

    def wire(self, x):
        return self.ring.tight(x)

    def masks(self, n):
        prg, Q = Prg(seed(11)), rings.modulus(self.params, rings.KEEP)
        return self.put(np.stack([rings.random_below(prg, Q, self.params.degree) for _ in range(n)]))

    def blind(self, cts, how):
        prg, n = repeated(12).prg(), -(-len(cts) // 2)
        small = self.small(np.stack([self.noise(prg, 2) for _ in range(n)]))
        return self.ev.blinded(cts, how, small, self.masks(n))

    def refresh(self, cts, how):
        secret = repeated(14).prg()
        errors = self.small(np.stack([[secret.gaussian(self.params.degree)] for _ in range(2 * len(cts))]))
        return self.key.refreshed(cts, how, seed(13), errors)

    def unblind(self, c0, how):
        return self.ev.unblind(c0, seed(13), how, self.masks(len(c0) // 2))

    def flood(self, cts, bits, primes):
        prg, n, N = repeated(15).prg(), len(cts), self.params.degree
        words, small = np.zeros((n, -(-(bits + 2) // 32), N), np.uint32), []
        for i in range(n):
            drawn = rings.random_words(prg, bits + 1, N)
            words[i, : len(drawn)] = drawn
            small.append(self.noise(prg, cts.shape[1]))
        extra = self.ring.residues(self.put(words), primes, -(1 << bits))
        return self.ev.covered(self.ev.cut(cts, primes), self.small(np.stack(small)), extra)


def results(side):
    """Yield (name, result) of every operation."""
    params, N, K = side.params, side.params.degree, side.params.count
    q = np.array(rings.primes_of(params), np.uint64)[:, None]
    drawn = Prg(seed(2))

    def cts(n, p, k):
        return side.put((drawn.uint64((n, p, k, N)) % q[:k]).astype(np.uint32))

    ev = side.ev
    yield "key", side.put(side.b)
    yield "uniform", side.uniform(3, 3, K)
    yield "uniform, fewer primes", side.uniform(3, 2, 2)
    yield "uniform, drawn again", side.uniform_again(3)
    yield "uniform, from the third on", side.later(3, 2, 3, 2)
    x, y = cts(12, 2, K), cts(12, 2, K)
    yield "forward", side.forward(x[0, 0])
    yield "expand", ev.expand(side.put(side.host(x[:3, 0])), seed(4))
    for p in (2, 3, 4):
        yield f"open {p}", side.opened(cts(2, p, K))
    w = (drawn.uint64((10, 12)) % np.uint64(18000)).astype(np.int64) - 9000
    yield "linear", ev.linear(w, x)
    yield "linear, prepared", ev.linear(ev.weights(37 * w), x)
    yield "linear, four polynomials", ev.linear(w[:, :3], cts(3, 4, 3))
    yield "constants", ev.add_constants(ev.linear(w, x), np.arange(-5, 5) * 2.0**41 + 3)
    yield "centre", ev.centre(x)
    yield "total", ev.total(x)
    rows = x.reshape(3, 4, 2, K, N)
    yield "rows, scores", ev.rows(rows, y, np.arange(12).reshape(3, 4))
    yield "rows, sums", ev.rows(rows, y, np.arange(12).reshape(4, 3).T.copy())
    many = cts(70, 2, 2), cts(70, 2, 2)
    yield "rows, many terms", ev.rows(many[0].reshape(1, 70, 2, 2, N), many[1], np.arange(70)[None])
    yield "dot", ev.dot(*many)
    two = ev.products(x, y)
    three, four = ev.products(two[:4], two[:4]), ev.products(two[:4], x[:4])
    yield "products 2 2", two
    yield "products 3 3", three
    yield "products 3 2", four
    yield "products 3 1", ev.products(two, side.put(np.ascontiguousarray(side.host(x)[:, :1])))
    yield "products 5 3", ev.products(three, two[:4])
    yield "products 4 2", ev.products(four, y[:4])
    yield "combine", ev.combine([(1, two), (-(1 << 45) - 12345, x)], 7.25 * 2.0**55)
    yield "combine, one factor each", ev.combine([(list(range(-6, 6)), two), (3, x)], np.arange(12) * 1e9)
    yield "combine, fewer primes", ev.combine([(5, cts(3, 2, 2)), (-7, cts(3, 3, 3))])
    wide = params.count > 4
    keys = side.switching(7 if wide else 4)
    yield "switching keys", side.put(keys)
    ev.accept(keys, seed(16))
    for polys, k in ((3, K), (4, K - 1)):
        yield f"switched {polys}", ev.switched(cts(2, polys, k))
    yield "wire", side.wire(x[:3])
    yield "from the wire", ev.put(side.host(side.wire(x[:3])))
    scales = [(2, 30, 3), (3, 60, 4), (5, 110, 2), (7, 140, 1)] if wide else [(2, 30, 3), (3, 42, 4), (4, 50, 1)]
    for polys, bits, n in scales:
        how = rings.opening(params, f"p{polys}", n, polys, 2.0**bits, 4.0, params.scale)
        sent = side.blind(cts(n, polys, how.primes), how)
        yield f"blind {polys}", sent
        c0 = side.refresh(sent, how)
        yield f"refresh {polys}", c0
        yield f"unblind {polys}", side.unblind(c0, how)
    how = rings.opening(params, "tap", 2, 2, params.scale, 4.0, params.scale * 2.0**46)
    yield "refresh, upwards", side.refresh(cts(1, 2, rings.KEEP), how)
    yield "flood", side.flood(cts(2, 2, K), 40 if wide else 30, K - 1)
    for k, keep in ((K, K - 1), (K - 1, K - 3), (K, K - 2)):
        yield f"dropped to {keep} of {k}", ev.dropped(cts(2, 2, k), keep)
    keys = side.switching(3, 4)
    yield "switching keys, turns of 4 tokens", side.put(keys)
    ev.accept(keys, seed(16))
    yield "turned", ev.turned(x[:2], 4, 3)
    yield "switched by two keys", ev.switched(cts(2, 4, K - 1), (4, 0))
    yield "switched by eight keys", ev.switched(cts(1, 10, K), (3, 2, 1, 0, 1, 2, 3, 4))
    yield "plain", ev.plain(np.arange(N).reshape(2, -1) / N - 0.5, 2.0**20, K - 1)
    long = cts(2, 2, K)
    sent, masks = side.cover(cts(2, 2, min(K - 1, rings.KEEP + 1)))
    yield "cover", side.put(sent)
    yield "cover, its masks", side.put(masks.view(np.uint32))
    yield "tap, lifted and flooded", side.flood(ev.combine([(1 << 37, long)]), 60 if wide else 40, K - 1)
    yield "switched by keys of each", ev.switched(cts(3, 4, K - 1), np.array([[4, 0], [1, 2], [0, 4]]))


def hashes(side):
    return {name: hashed(side.host(x)) for name, x in results(side)}


# ---- what is drawn on the card itself --------------------------------------------------------------------------------


def noise_found(params):
    """(what, found, least, most) of noise on the card: samplers, fresh, blinded and refreshed ciphertexts."""
    from cloister.mpc.crypto.owner_ckks.packed_refresh import dropped
    from cloister.provider.gpu import cuda_device, gpu, gpu_ring

    entropy, ring, N = Entropy(), gpu_ring.ring_on_card(params), params.degree
    small = ring.noise(entropy.bytes(32), 16, 3, 1).cpu().numpy().astype(float)
    yield "error, standard deviation", small[:, 0].std(), 3.15, 3.25
    yield "error, mean", small[:, 0].mean(), -0.1, 0.1
    for value in (-1, 0, 1):
        yield f"ternary, share of {value}", (small[:, 1:] == value).mean(), 0.325, 0.342
    again = [ring.noise(seed(9), 2, 3, 1).cpu().numpy() for _ in range(2)]
    yield "the same key, the same noise", float((again[0] != again[1]).sum()), 0, 0
    other = ring.noise(seed(8), 2, 3, 1).cpu().numpy()
    yield "another key, the same noise", (again[0] == other).mean(), 0.0, 0.3

    key = gpu.OwnerKey(params, entropy)
    ev = gpu.Evaluator(params, key.b, key.seed)
    public = entropy.bytes(32)
    fresh = ev.expand(key.encrypt(np.zeros((4, params.slots)), public, entropy), public)
    yield "fresh, standard deviation", of(params, key, fresh).std(), 3.1, 3.3

    how = rings.opening(params, "noise", 4, 2, params.scale, 1.0, params.scale)
    k, mask_key = how.primes, entropy.bytes(32)
    sent = ev.blind(ev.cut(fresh, k), how, mask_key, entropy)
    Q, D = rings.modulus(params, rings.KEEP), dropped(params, k)
    masks = whole(params, cuda_device.host(ring.residues(ring.masks(mask_key, 2, Q), rings.KEEP)))
    yield "masks, largest of Q", float(max(masks.reshape(-1)) / Q), 0.99, 1.0
    yield "masks, mean of Q", float(sum(masks.reshape(-1)) / Q / masks.size), 0.47, 0.53
    under = (whole(params, cuda_device.host(key.opened(sent))) - masks) % Q
    noise = np.array([float(x - Q if x > Q // 2 else x) for x in under.reshape(-1)])
    lifted = 3.2 * np.sqrt(2) * 2.0**how.lift / D  # of a pair
    added = 3.2 * np.sqrt(1 + 4 * N / 3) / D  # e_0 + e_1·s + v·e, ternary of variance 2/3
    rounded = np.sqrt((1 + 2 * N / 3) / 12)  # of c_0, and of c_1 times s
    expected = np.sqrt(lifted**2 + added**2 + rounded**2)
    yield "blinded, against expected", noise.std() / expected, 0.95, 1.05
    c0 = key.refresh(sent, how, public, entropy)
    back = of(params, key, ev.unblind(c0, public, how, mask_key))
    rescaled = expected * np.sqrt(2) * how.factor / 2.0**how.shift  # the sum of two coefficients
    yield "refreshed, against expected", back.std() / np.sqrt(3.2**2 + rescaled**2 + 1 / 6), 0.95, 1.05

    seeds, most = entropy.bytes(32), 4
    ev.accept(key.switching(most, seeds, entropy), seeds)
    zero = ev.products(ev.products(fresh, fresh), fresh)  # of four polynomials
    apart = whole(params, cuda_device.host(key.opened(ev.switched(zero)))) - whole(
        params, cuda_device.host(key.opened(zero))
    )
    Q = rings.modulus(params, params.count)
    noise = np.array([float((x + Q // 2) % Q - Q // 2) for x in apart.reshape(-1)])
    digits = np.sqrt(sum(float(q) ** 2 for q in rings.primes_of(params)) / 12)  # uniform in [-q/2, q/2)
    yield "switched, against expected", noise.std() / (3.2 * digits * np.sqrt((most - 2) * N)), 0.9, 1.1


def whole(params, residues):
    """Coefficients (n, k, N) in [0, Q) as Python's integers."""
    k = residues.shape[1]
    Q, out = rings.modulus(params, k), 0
    for j, q in enumerate(rings.primes_of(params)[:k]):
        out = out + residues[:, j].astype(object) * (Q // q * pow(Q // q, -1, q))
    return out % Q


def of(params, key, cts):
    from cloister.provider.gpu import cuda_device, gpu

    return np.stack([gpu.centred(params, m) for m in cuda_device.host(key.opened(cts))])


def streams():
    """(what, whether it holds) of the two ciphers, by the vectors of their standards."""
    from cloister.provider.gpu import cuda_device, gpu_ring

    ring = gpu_ring.ring_on_card(rings.SMALL)
    key = cuda_device.upload(np.arange(32, dtype=np.uint8))
    out = cuda_device.empty(2, 16)
    nonce = [np.uint32(x) for x in (0x09000000, 0x4A000000, 0)]
    ring.kernels.each("chacha_stream", 2, out, key, np.uint32(1), *nonce, np.int64(2))
    yield (
        "ChaCha20 (RFC 8439, 2.3.2)",
        cuda_device.host(out)[0].tobytes().hex().startswith("10f1e7e4d13b5915500fdd1fa32071c4"),
    )
    out = cuda_device.empty(64, 4)
    args = (out, ring._aes, key, np.int64(64))
    ring.kernels.blocks("aes_stream", (2,), 64, *args, shared=gpu_ring.AES_SHARED)
    yield "AES-256-CTR (as Prg)", cuda_device.host(out).tobytes() == Prg(bytes(range(32))).bytes(1024)
