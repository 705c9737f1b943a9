"""Reference mapping measured: on real studies, beside SPU and CrypTen, and at scale.

    python benchmarks/mapping.py --quick                      real sets cut short, one small size, a few minutes
    python benchmarks/mapping.py                              everything
    python benchmarks/mapping.py --spu PYTHON --crypten PYTHON      interpreters that have the peers installed
    python benchmarks/mapping.py --only modes                 hardened beside semi-honest, also with late messages
    python benchmarks/mapping.py --only equal                 both on the whole real sets: labels of pooled k-NN?

Peers live in environments of their own (`python -m venv`, `pip install spu==0.9.5`; CrypTen: `pip install --no-deps
crypten` beside torch, onnx, omegaconf, pyyaml). Where an interpreter is not given, that peer is left out and the table
says so. Ours, SPU and CrypTen each run as three processes on this machine; CPU is the sum over the three.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing as mp
import os
import platform
import queue
import resource
import subprocess
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
PARTIES = ("ask", "basel", "lugano")


# ---- ours, three processes connected by socket pairs -----------------------------------------------------------------


class Wires:
    """A `Link` over one connection per peer, written by a thread each."""

    def __init__(self, ends):
        self.ends = ends
        self.queues = {p: queue.SimpleQueue() for p in ends}
        self.writers = [threading.Thread(target=self._write, args=(p,), daemon=True) for p in ends]
        for w in self.writers:
            w.start()

    def _write(self, peer):
        while (frame := self.queues[peer].get()) is not None:
            self.ends[peer].send_bytes(frame)

    def post(self, to, frame):
        self.queues[to].put(frame)

    def close(self):
        for q in self.queues.values():
            q.put(None)
        for w in self.writers:
            w.join(timeout=10)


def protocol(params, mode):
    """The protocol file of a mode, and its parameters."""
    from cloister.workflows.map_labels import private_knn, verified_knn

    core = private_knn.Params(**params)
    return (private_knn, core) if mode == "semi-honest" else (verified_knn, verified_knn.Params(core))


def warm_up():
    """Load the compiled loops before the clock starts."""
    from cloister.mpc.crypto import gf64

    def some(*shape):
        return np.ones(shape, np.uint64)

    half = some(32, 8)
    gf64.gram_bits(half, half, half, half, some(8))
    gf64.fold_bits(half, half, some(64), some(8), some(8, 64))
    gf64.sum_where(some(8, 64), half, half, some(64))
    gf64.product_coefficients(gf64.gram_field(some(16, 8), some(16, 8)), gf64.powers(np.uint64(3), 16))
    gf64.fold_field(some(16, 8), gf64.times(some(16), some(16)))
    gf64.weigh_rows(half, some(32), some(8)), gf64.dot(some(8), some(8))
    gf64.scatter_weights(np.zeros((1, 8), np.uint32), some(1), some(8), some(1, 8))
    gf64.to_words(gf64.to_planes(some(64), 3))


def child(rank, ends, path, params, out, mode, late):
    from cloister.mpc.crypto.agreement import Identity
    from cloister.mpc.crypto.entropy import Entropy
    from cloister.mpc.crypto.prg import Prg
    from cloister.mpc.net.mailbox import Mailbox
    from cloister.session import Outcome, take_part
    from cloister.study import Study

    me = PARTIES[rank]
    # identities that all three can derive: this is a benchmark, not a study
    identities = {p: Identity.create(Entropy(Prg(bytes([i] * 32)).bytes)) for i, p in enumerate(PARTIES)}
    study = Study(
        name="benchmark",
        workflow="map-labels",
        parties={p: "site" if i else "coordinator" for i, p in enumerate(PARTIES)},
        keys={p: i.public for p, i in identities.items()},
        timeout=600.0,
    )
    given = np.load(path)
    module, params = protocol(params, mode)
    inputs = (given["q"],) if rank == 0 else (given[f"r{rank}"], given[f"y{rank}"])
    role = module.roles(params)[me]
    warm_up()
    box = Mailbox(me)

    def listen(peer):
        held = queue.SimpleQueue()  # frames that are late, each by `late` seconds

        def hand_over():
            while True:
                at, frame = held.get()
                time.sleep(max(0.0, at - time.perf_counter()))
                box.put(peer, frame)

        if late:
            threading.Thread(target=hand_over, daemon=True).start()
        try:
            while True:
                frame = ends[peer].recv_bytes()
                if late:
                    held.put((time.perf_counter() + late, frame))
                else:
                    box.put(peer, frame)
        except (EOFError, OSError):
            pass

    for p in ends:
        threading.Thread(target=listen, args=(p,), daemon=True).start()
    cpu, wall = time.process_time(), time.perf_counter()
    outcome = take_part(
        study,
        me,
        Wires(ends),
        box,
        None,
        part=lambda session, _: Outcome(result={"value": session.run(role, params, *inputs)}),
        identity=identities[me],
    )
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    kinds = Counter()
    for e, _ in outcome.receipt.entries:
        if e.kind == "sent":
            kinds[e.name.rpartition(".")[2]] += e.bytes
    value = outcome.result["value"]
    out.put(
        {
            "rank": rank,
            "seconds": wall,
            "cpu": cpu,
            "bytes": outcome.cost["bytes"],
            "rounds": outcome.cost["rounds"],
            "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "kinds": dict(kinds),
            "labels": None if value is None else value.labels.tolist(),
        }
    )
    out.close()
    out.join_thread()


def ours(path, params, mode="hardened", late=0.0):
    context = mp.get_context("spawn")
    pipes = {frozenset((i, j)): context.Pipe() for i in range(3) for j in range(i)}
    out = context.Queue()
    children = []
    for i in range(3):
        ends = {PARTIES[j]: pipes[frozenset((i, j))][int(i < j)] for j in range(3) if j != i}
        children.append(context.Process(target=child, args=(i, ends, path, params, out, mode, late)))
    for c in children:
        c.start()
    rows = {}
    while len(rows) < 3:
        try:
            row = out.get(timeout=1)
        except queue.Empty:
            if any(c.exitcode not in (None, 0) for c in children):
                for c in children:
                    c.kill()
                raise SystemExit("a process died") from None
            continue
        rows[row["rank"]] = row
    for c in children:
        c.join(timeout=20)
    kinds = Counter()
    for row in rows.values():
        kinds.update(row["kinds"])
    return {
        "seconds": max(r["seconds"] for r in rows.values()),
        "cpu": sum(r["cpu"] for r in rows.values()),
        "bytes": sum(r["bytes"] for r in rows.values()),
        "rounds": max(r["rounds"] for r in rows.values()),
        "peak": max(r["peak"] for r in rows.values()),
        "kinds": dict(kinds),
        "labels": rows[0]["labels"],
    }


# ---- one size, side by side ------------------------------------------------------------------------------------------


def blobs(m, n, d, labels=16, seed=0):
    rng = np.random.default_rng(seed)
    centres = rng.normal(0, 1, (labels, d))

    def draw(count):
        y = rng.integers(0, labels, count)
        return centres[y] + rng.normal(0, 1, (count, d)), y

    (q, _), (r, y) = draw(m), draw(n)
    return q, r, y


def write_case(folder, m, n, d, k, bits, labels=16):
    """The same blobs for everyone: reals for ours, 12-bit integers for the peers' packed keys."""
    q, r, y = blobs(m, n, d, labels)
    half = n // 2
    bound = float(max(np.linalg.norm(q, axis=1).max(), np.linalg.norm(r, axis=1).max())) * 1.0001
    np.savez(f"{folder}/ours.npz", q=q, r1=r[:half], y1=y[:half], r2=r[half:], y2=y[half:])
    scale = 2000 / bound
    np.savez(
        f"{folder}/peers.npz",
        q=np.rint(q * scale).astype(np.int64),
        r=np.rint(r * scale).astype(np.int64),
        labels=y,
        k=k,
        count=labels,
    )
    params = {
        "querier": "ask",
        "sites": PARTIES[1:],
        "computing": PARTIES,
        "queries": m,
        "rows": (half, n - half),
        "dims": d,
        "labels": tuple(f"type {i}" for i in range(labels)),
        "bound": bound,
        "k": k,
        "bits": bits,
    }
    return params, (q, r, y)


def peer(python, name, folder, limit, part, m):
    """Run a peer on the first `part` of m queries; what grows with them is multiplied up."""
    target, given = f"{folder}/{name}.json", dict(np.load(f"{folder}/peers.npz"))
    np.savez(f"{folder}/{name}.npz", **given | {"q": given["q"][:part]})
    done = subprocess.run(
        [python, str(HERE / "mapping_peers.py"), name, f"{folder}/{name}.npz", target],
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1][:200] if done.stderr.strip() else "failed"}
    row = json.loads(Path(target).read_text())
    return row | {x: row[x] * m / part for x in ("seconds", "cpu", "bytes")}


def pooled(q, r, y, k):
    from cloister.papers.baselines.mapping import nearest_label

    names = np.array([f"{label:03d}" for label in y])
    found, ties = nearest_label(q, r, names, k)
    return found.astype(int), ties


def side_by_side(m, n, d, k, args, limit):
    print(f"\n{m} queries x {n} references, d={d}, k={k}, 16 labels, three processes each")
    print(f"{'':26}{'seconds':>9}{'CPU-s':>9}{'MB':>10}{'B/pair':>9}{'rounds':>8}  agrees with pooled k-NN")
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for bits in (40, 32):
            params, (q, r, y) = write_case(folder, m, n, d, k, bits)
            truth, ties = pooled(q, r, y, k)
            rows[f"ours, {bits} bits"] = ours(f"{folder}/ours.npz", params)
        for name, python in (("spu", args.spu), ("crypten", args.crypten)):
            label = {"spu": "SPU, ABY3, 64 bits", "crypten": "CrypTen, Algorithm 5"}[name]
            if not python:
                rows[label] = {"error": "not installed here; see --help"}
            else:
                part = m if name == "spu" else max(1, min(m, args.crypten_pairs // n))  # its cost is linear in queries
                try:
                    rows[label] = peer(python, name, folder, limit, part, m)
                except subprocess.TimeoutExpired:
                    rows[label] = {"error": f"more than {limit} s"}
    for label, row in rows.items():
        if "error" in row:
            print(f"{label:26}{row['error']}")
            continue
        got = np.array(row["labels"])
        free = ~ties[: len(got)]
        agree = float((got == truth[: len(got)])[free].mean())
        print(
            f"{label:26}{row['seconds']:9.2f}{row['cpu']:9.2f}{row['bytes'] / 1e6:10.1f}"
            f"{row['bytes'] / m / n:9.1f}{row['rounds']:8d}  {agree:.4f} of {int(free.sum())} without a tie"
            f"{'' if len(got) == m else f'; * measured on {len(got)} queries'}"
        )
    mine = rows["ours, 40 bits"]
    for label, row in rows.items():
        if "error" not in row and not label.startswith("ours"):
            print(
                f"  against {label}: {mine['bytes'] / row['bytes']:.3f} of its bytes, {mine['cpu'] / row['cpu']:.3f} of"
                f" its CPU, {mine['seconds'] / row['seconds']:.3f} of its time"
            )
    return rows


def modes(sizes, args):
    """Hardened (one party may lie) beside semi-honest and SPU, in one run; then with every message late."""
    print(f"\nhardened beside semi-honest, 40 bits, 16 labels, three processes each, in turn; {args.repeats} repeats")
    print("seconds and CPU-s: smallest of the repeats, and ratios of these; bytes and rounds: where CPU is least")
    print(f"{'':47}{'seconds':>9}{'CPU-s':>9}{'MB':>10}{'B/pair':>9}{'rounds':>8}{'peak GB':>9}  equal to pooled k-NN")
    for (m, n, d, k), late in sizes:
        with tempfile.TemporaryDirectory() as folder:
            params, (q, r, y) = write_case(folder, m, n, d, k, 40)
            truth, ties = pooled(q, r, y, k)
            ways = {
                x: functools.partial(ours, f"{folder}/ours.npz", params, x, late) for x in ("semi-honest", "hardened")
            }
            if args.spu and not late and m * n <= SPU_PAIRS:
                ways["SPU, semi-honest"] = functools.partial(peer, args.spu, "spu", folder, args.limit, m, m)
            load = os.getloadavg()[0]
            tried = {name: [] for name in ways}
            for _ in range(args.repeats):
                for name, way in ways.items():
                    tried[name].append(attempt(way))
        title = f"{m} x {n}, d={d}, k={k}, {f'{1000 * late:.0f} ms late, ' if late else ''}"
        print(f"{title}load {load:.1f}")
        rows = {name: min(found, key=lambda row: row.get("cpu", math.inf)) for name, found in tried.items()}
        for name, row in rows.items():
            if "error" in row:
                print(f"  {name:45}{row['error']}")
                continue
            row["seconds"] = min(x["seconds"] for x in tried[name] if "seconds" in x)
            agree = float((np.array(row["labels"]) == truth)[~ties].mean())
            print(
                f"  {name:45}{row['seconds']:9.2f}{row['cpu']:9.2f}{row['bytes'] / 1e6:10.1f}"
                f"{row['bytes'] / m / n:9.1f}{row['rounds']:8d}{row.get('peak', math.nan) / 1e9:9.2f}"
                f"  {agree:.4f} of {int((~ties).sum())}"
            )
        two = rows["hardened"]
        for name, row in rows.items():
            if row is not two and "error" not in row:
                shared = [x for x in ("seconds", "cpu", "bytes", "rounds", "peak") if x in row]
                print(f"  hardened / {name}: " + ", ".join(f"{x} {two[x] / row[x]:.3f}" for x in shared))
        parts = sorted(two["kinds"].items(), key=lambda x: -x[1])
        print(
            "  bytes per pair: "
            + ", ".join(f"{kind} {size / m / n:.2f}" for kind, size in parts if size > m * n / 100),
            flush=True,
        )


def attempt(way):
    try:
        return way()
    except subprocess.TimeoutExpired as e:
        return {"error": f"more than {e.timeout:.0f} s"}


MODES = [((100, 2000, 64, 5), 0.0), ((500, 6000, 128, 10), 0.0), ((100, 2000, 64, 5), 0.03)]
SPU_PAIRS = 4_000_000  # a larger run of SPU takes a quarter of an hour, and nothing new would be learnt from it
LARGE = [((1000, 20_000, 128, 10), 0.0)]


def floor(m, n, row, bits):
    """Where the bytes go, and what the least is that this way of computing could send."""
    print(f"\nwhere the bytes go, {m} x {n}, {bits} bits (bytes per pair of query and reference)")
    names = {
        "Hopped": "shuffle: 6 words",
        "Gate": "one AND per bit of a key and of a comparison",
        "Product": "keys: 3 words",
        "Sum": "bits of the sum that party 0 knows",
        "Halves": "proofs of products",
        "Folded": "proofs of gates, carries and hops",
        "Open": "outcomes of comparisons",
        "Input": "inputs",
    }
    for kind, size in sorted(row["kinds"].items(), key=lambda x: -x[1]):
        if kind in names:
            print(f"  {size / m / n:7.2f}  {kind:8} {names[kind]}")
    wide = bits + (n - 1).bit_length()  # the number of a reference stands below every key
    size = [-(-x // 8) for x in (bits, wide)]
    words, gates = 3 * size[0] + 6 * size[1], (bits + 3 * (bits - 1) + 3 * wide + 3) / 8
    least = words + gates
    print(f"  floor of this method: {words:.1f} (words) + {gates:.1f} (bits, one comparison per pair) = {least:.1f}")
    print(f"  sent: {row['bytes'] / m / n:.1f}, {row['bytes'] / m / n / least:.2f} of the floor")


# ---- real studies ----------------------------------------------------------------------------------------------------


def studies(data, quick):
    """Two sets of several studies: one study asks, the others offer; embedded by shared-pca, which no cell leaves."""
    import anndata

    found = []
    path = Path(data) / "scrna" / "lung_ts_vs_hlca.h5ad"
    if path.exists():
        lung = anndata.read_h5ad(path)
        sites = {"hlca": lung[(lung.obs["study"] != reference_study(lung)).to_numpy()].copy()}
        refs = lung[(lung.obs["study"] == reference_study(lung)).to_numpy()]
        for i, donor in enumerate(sorted(refs.obs["donor"].unique())):
            sites[f"ts-donor-{i + 1}"] = refs[(refs.obs["donor"] == donor).to_numpy()].copy()
        found.append(("lung: Tabula Sapiens donors offer, HLCA asks", sites, "hlca", "cell_type_coarse"))
    path = Path(data) / "scrna" / "pbmc_federation.h5ad"
    if path.exists():
        pbmc = anndata.read_h5ad(path)
        sites = {
            str(b).replace("_", "-"): pbmc[(pbmc.obs["batch"] == b).to_numpy()].copy()
            for b in pbmc.obs["batch"].unique()
        }
        if quick:
            sites = {name: adata[::4].copy() for name, adata in sites.items()}
        found.append(
            ("PBMC: pbmc3k, Kang control, Kang stimulated offer; Zheng asks", sites, "zheng-sorted", "cell_type")
        )
    return found


def reference_study(lung):
    names = sorted(map(str, lung.obs["study"].unique()))
    return next((n for n in names if "sapiens" in n.lower() or n.lower().startswith("ts")), names[0])


def embedded(title, sites, query, label_key):
    """The studies in one space, and the options of the mapping."""
    import cloister as cl

    print(f"\n{title}")
    print("  " + ", ".join(f"{name} {a.n_obs} cells" for name, a in sites.items()), flush=True)
    made = cl.rehearse("shared-pca", data=sites, library_key="n_counts_all_genes", n_components=50, timeout=600.0)
    return made.data, {"query": query, "label_key": label_key, "use_rep": "X_shared_pca", "n_neighbors": 10}


def equal_on_real_data(title, sites, query, label_key):
    """Both modes on the whole set: the label of pooled k-NN for every cell whose vote is no tie."""
    import cloister as cl

    shared, options = embedded(title, sites, query, label_key)
    pool = cl.mapping_baselines(shared, **options)["pooled k-NN"]
    for mode in ("hardened", "semi-honest"):
        began, cpu = time.perf_counter(), time.process_time()
        run = cl.rehearse("map-labels", data=shared, mode=mode, timeout=1200.0, **options)
        took, spent = time.perf_counter() - began, time.process_time() - cpu
        same = (run.data[query].obs["mapped"].astype(str).to_numpy() == pool["labels"])[~pool["ties"]]
        print(
            f"  {mode:12} equal {int(same.sum())} of {len(same)} cells without a tie ({len(pool['ties'])} in all),"
            f" {sum(c['bytes'] for c in run.cost.values()) / 1e6:.0f} MB, {took:.0f} s, {spent:.0f} CPU-s",
            flush=True,
        )


def on_real_data(title, sites, query, label_key, quick):
    import cloister as cl

    shared, options = embedded(title, sites, query, label_key)
    table = cl.mapping_baselines(shared, **options)
    print(f"  {'':34}{'accuracy':>9}{'macro-F1':>9}{'seconds':>9}{'MB':>9}")
    for name, row in table.items():
        print(f"  {name:34}{row['accuracy']:9.3f}{row['macro_f1']:9.3f}")
    clear = ~table["pooled k-NN"]["ties"]
    mapped = {}
    runs = [("plain", {}), ("hardened", {}), ("hardened, 32 bits", {"precision": 32})]
    runs += [("hardened, 20 prototypes per label", {"prototypes": 20})]
    for name, more in runs:
        began = time.perf_counter()
        run = cl.rehearse("map-labels", data=shared, mode=name.split(",")[0], timeout=600.0, **options, **more)
        took = time.perf_counter() - began
        result = run.results[query]
        mapped[name] = run.data[query].obs["mapped"].astype(str).to_numpy()
        size = sum(c["bytes"] for c in run.cost.values()) / 1e6
        print(f"  {name:34}{result['accuracy']:9.3f}{result['macro_f1']:9.3f}{took:9.1f}{size:9.1f}")
    # the published protocol on the whole set; every few cells of it with --quick
    few = {name: a[:: max(1, a.n_obs // 150)].copy() for name, a in shared.items()} if quick else shared
    began = time.perf_counter()
    one = cl.rehearse("map-labels", data=few, mode="published", timeout=600.0, **options)
    took = time.perf_counter() - began
    two = cl.rehearse("map-labels", data=few, mode="hardened", timeout=600.0, **options)
    pool = cl.mapping_baselines(few, **options)["pooled k-NN"]
    sides = [r.data[query].obs["mapped"].astype(str).to_numpy() for r in (one, two)]
    print(f"  equal to pooled k-NN where the vote is no tie ({int(clear.sum())} of {len(clear)} cells):", end=" ")
    same = {name: float((labels == table["pooled k-NN"]["labels"])[clear].mean()) for name, labels in mapped.items()}
    print(", ".join(f"{name} {same[name]:.4f}" for name in ("plain", "hardened", "hardened, 32 bits")))
    equal = [float((s == pool["labels"])[~pool["ties"]].mean()) for s in sides]
    sent = [sum(c["bytes"] for c in r.cost.values()) for r in (one, two)]
    print(
        f"  {few[query].n_obs} cells against {sum(a.n_obs for a in few.values()) - few[query].n_obs}: published"
        f" {equal[0]:.4f}, hardened {equal[1]:.4f} of {int((~pool['ties']).sum())} without a tie; published took"
        f" {took:.0f} s and sent {sent[0] / 1e6:.0f} MB, {sent[0] / sent[1]:.1f} times the bytes of hardened"
    )
    if not quick:
        return cl.rehearse("map-labels", data=shared, timeout=600.0, **options)
    return None


# ---- scale -----------------------------------------------------------------------------------------------------------


def absent_types(sites, query, label_key, use_rep, least=15):
    """Each type in turn is taken from the references: how many of its cells, and of the others, are then unknown."""
    from cloister.disclosure import Thresholds
    from cloister.workflows.map_labels.reference_distances import Params, contribution, threshold

    x = {s: np.asarray(a.obsm[use_rep], float) for s, a in sites.items()}
    y = {s: a.obs[label_key].astype(str).to_numpy() for s, a in sites.items()}
    others = tuple(s for s in sites if s != query)
    bound = max(float(np.linalg.norm(v, axis=1).max()) for v in x.values())
    params = Params(query, others, "coordinator", bound, 0.95)
    print(f"\nknown_share=0.95, {query} asks: share of cells that are unknown")
    for name in [n for n in np.unique(y[query]) if np.count_nonzero(y[query] == n) >= least]:
        kept = {s: x[s][y[s] != name] for s in others}
        tau = threshold(params, np.sum([contribution(params, r, Thresholds()).values for r in kept.values()], axis=0))
        r = np.concatenate(list(kept.values()))
        near = np.sqrt(((x[query] ** 2).sum(1)[:, None] - 2 * x[query] @ r.T + (r**2).sum(1)).min(1).clip(0))
        its = y[query] == name
        far = near > tau
        print(
            f"  without {name:16} {its.sum():4} cells of it {far[its].mean():.2f}, of the others {far[~its].mean():.2f}"
        )


def absent_in_studies(data, shares=(0.9, 0.95, 0.98), least=15):
    """Each type in turn is taken from the references, with each site as querier, in both spaces of three studies."""
    import integration

    from cloister import rehearse
    from cloister.disclosure import Thresholds
    from cloister.errors import ProtocolAbort
    from cloister.workflows.map_labels.reference_distances import Params, contribution, threshold

    def nearest(a, b):
        return np.sqrt(((a**2).sum(1)[:, None] - 2 * a @ b.T + (b**2).sum(1)).min(1).clip(0))

    print("\nstudies, every type absent in turn, every site as querier: means over types")
    for name, sites, batch, label, space in integration.studies(Path(data), quick=True):
        if name not in ("pbmc_federation", "lung_ts_vs_hlca", "glioblastoma_panobinostat_zhao"):
            continue
        cells = rehearse("shared-pca", sites, timeout=900, **space).data
        cells = rehearse("integrate", cells, seed=0, timeout=900, batch_key=batch).data
        y = {s: a.obs[label].astype(str).to_numpy() for s, a in cells.items()}
        for use_rep, share in ((r, s) for r in ("X_shared_pca", "X_integrated") for s in shares):
            x, rows = {s: np.asarray(a.obsm[use_rep], float) for s, a in cells.items()}, []
            bound = max(float(np.linalg.norm(v, axis=1).max()) for v in x.values())
            for query in cells:
                others = tuple(s for s in cells if s != query)
                params = Params(query, others, "coordinator", bound, share)
                for kind in [n for n in np.unique(y[query]) if np.count_nonzero(y[query] == n) >= least]:
                    kept = {s: x[s][y[s] != kind] for s in others}
                    curves = [contribution(params, r, Thresholds()).values for r in kept.values()]
                    try:
                        far = nearest(x[query], np.concatenate(list(kept.values()))) > threshold(params, sum(curves))
                    except ProtocolAbort:  # too few references for this share
                        continue
                    its = y[query] == kind
                    known = ~its & np.isin(y[query], np.concatenate([y[s] for s in others]))
                    rows.append((far[its].mean(), far[known].mean()))
            found = np.mean(rows, axis=0)
            print(f"  {name:32}{use_rep:14} known_share={share:g}: unknown {found[0]:.2f} of the absent type, "
                  f"{found[1]:.3f} of the others")  # fmt: skip


def scale(sizes, budget, d, k):
    print(f"\nscale, d={d}, k={k}, 40 bits, three processes (budget {budget} s a row; * extrapolated from its batches)")
    print(f"{'queries':>9}{'references':>12}{'seconds':>10}{'CPU-s':>10}{'GB':>9}{'rounds':>9}{'peak GB a party':>17}")
    rate = None
    for m, n in sizes:
        guess = None if rate is None else rate * m * n
        mark, run_m = "", m
        if guess is not None and guess > budget:
            run_m = max(1, min(m, math.ceil(budget / rate / n)))
            mark = "*"
        with tempfile.TemporaryDirectory() as folder:
            params, _ = write_case(folder, run_m, n, d, k, 40)
            row = ours(f"{folder}/ours.npz", params)
        factor = m / run_m
        rate = row["seconds"] / run_m / n
        print(
            f"{m:9,}{n:12,}{row['seconds'] * factor:10.1f}{row['cpu'] * factor:10.1f}"
            f"{row['bytes'] * factor / 1e9:9.2f}{int(row['rounds'] * factor):9,}{row['peak'] / 1e9:17.2f}"
            f"{mark} {f'measured on {run_m} queries' if mark else ''}"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few minutes on two cores")
    parser.add_argument("--data", default=str(HERE.parent.parent / "shared" / "data"), help="folder of the data sets")
    parser.add_argument("--spu", default=os.environ.get("CLOISTER_SPU_PYTHON", ""), help="interpreter that has SPU")
    parser.add_argument("--crypten", default=os.environ.get("CLOISTER_CRYPTEN_PYTHON", ""), help="one that has CrypTen")
    parser.add_argument("--crypten-pairs", type=int, default=200_000, help="CrypTen runs so many; the rest is by rule")
    parser.add_argument("--limit", type=int, default=1200, help="seconds a peer may take")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds a row of the scale table may take")
    parser.add_argument("--only", choices=("real", "equal", "peers", "scale", "modes", "unknown"), help="one part only")
    parser.add_argument("--size", type=int, help="of --only modes, the sizes with so many queries alone")
    parser.add_argument("--repeats", type=int, default=1, help="how often --only modes runs each")
    parser.add_argument("--report", help="write the report of the real runs to this folder")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    threads = os.environ["OMP_NUM_THREADS"]
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, {threads} thread(s) a process, Python"
        f" {platform.python_version()}, NumPy {np.__version__}; load {os.getloadavg()[0]:.1f}"
    )
    if args.only == "equal":
        for found in studies(args.data, args.quick):
            equal_on_real_data(*found)
    if args.only in (None, "real"):
        for title, sites, query, key in studies(args.data, args.quick) or []:
            run = on_real_data(title, sites, query, key, args.quick)
            if args.report and run is not None:
                target = Path(args.report)
                target.mkdir(parents=True, exist_ok=True)
                print(f"  report: {run.report(target / f'{query}.html')}")
        if not Path(args.data).exists():
            print(f"no data at {args.data}; the part on real studies is left out")
    if args.only in (None, "peers"):
        sizes = [(100, 2000, 64, 5)] if args.quick else [(100, 2000, 64, 5), (500, 6000, 128, 10)]
        for m, n, d, k in sizes:
            rows = side_by_side(m, n, d, k, args, args.limit)
        floor(m, n, rows["ours, 40 bits"], 40)
    if args.only in (None, "unknown"):
        import cloister as cl

        absent_types(cl.demo_sites(), "vienna", "cell_type", "X_pca")
        absent_in_studies(args.data)
    if args.only in (None, "modes"):
        chosen = MODES[:1] if args.quick else MODES + LARGE
        modes([x for x in chosen if not args.size or x[0][0] == args.size], args)
    if args.only in (None, "scale"):
        sizes = [(200, 2000), (500, 6000)]
        sizes += [] if args.quick else [(1000, 20_000), (1000, 150_000), (5000, 150_000)]
        scale(sizes, args.budget, 50, 10)


if __name__ == "__main__":
    main()
