"""Double-blind adaptation: what it costs per block and sample, and what the adapter is worth on cells.

    python benchmarks/adaptation.py --quick              minutes on two cores
    python benchmarks/adaptation.py                      more sizes, owners and splits

cost       one encrypted block, provider and owner apart (CPU seconds of one thread each), bytes and openings; the same
           multiply-accumulates by SEAL with ciphertext-plaintext products and rotations, at the same ring, as the peer;
           small batches with slots as features. `block_cost.py` runs the block of 65 tokens x 192 features
accuracy   a small post-norm encoder over a fixed gene panel, trained on one study's cells (the provider), adapted to
           another study's (the owners): linear probing, hardened taps, published activations, full fine-tuning in the
           clear. Taps are computed by the plain student plus the flooding's noise: the tests check that the encrypted
           ones are the same to 1e-2. FedAvg is run in the clear by `federated_training.ideal`.
functions  exp by degree, division by steps: error of the student against its teacher
cells      the encoder of `pretrain_cells.py` (200 genes, width 128) at three hospitals, donors of another study, each
           with labels for a fifth of its cells (--labelled): alone, together, pooled, linear probing, full
           fine-tuning; five draws of the labelled cells. Together is `adapt-model stage=train` on kept taps: those of
           the plain student with the flooding's noise or, with --encrypted, asked for under encryption (--device gpu:
           on a card). `--noise 0 1 2.5 5 10` trains with each of these dp_noise besides
demo       with --only demo: the demo's row, whose sites know different types, by dp_noise
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parent))

from block_cost import PUBLISHED, encrypted_block, small_batches

from cloister.errors import ParameterError
from cloister.models import polynomial
from cloister.mpc.crypto.owner_ckks import scheme as block
from cloister.study import Party
from cloister.workflows.adapt_model import block_plan as circuit


def rotation_peer(crypto):
    """SEAL: a matrix product by diagonals, one rotation and one product per diagonal of N/2 slots; ns per MAC."""
    try:
        import seal
    except ImportError:
        return None
    p = seal.EncryptionParameters(seal.scheme_type.ckks)
    p.set_poly_modulus_degree(crypto.degree)
    bits = [crypto.bits] * min(crypto.count, 7)
    p.set_coeff_modulus(seal.CoeffModulus.Create(crypto.degree, bits))
    ctx = seal.SEALContext(p, expand_mod_chain=True, sec_level=seal.sec_level_type.tc128)
    maker = seal.KeyGenerator(ctx)
    keys = seal.GaloisKeys()
    maker.create_galois_keys([1], keys)
    enc, ev, coder = seal.Encryptor(ctx, maker.create_public_key()), seal.Evaluator(ctx), seal.CKKSEncoder(ctx)
    scale = 2.0 ** (crypto.bits - 5)
    ct = enc.encrypt(coder.encode(np.ones(crypto.slots), scale))
    w = coder.encode(np.full(crypto.slots, 0.5), scale)
    ev.multiply_plain(ev.rotate_vector(ct, 1, keys), w)
    began, n = time.thread_time(), 20
    for _ in range(n):
        ev.multiply_plain(ev.rotate_vector(ct, 1, keys), w)
    return (time.thread_time() - began) / n / crypto.slots * 1e9


# ---- accuracy --------------------------------------------------------------------------------------------------------


def cells(folder: Path, genes_wanted: int):
    """Provider's and owners' cells over a panel: the genes that tell the provider's cell types apart best."""
    import anndata

    a = anndata.read_h5ad(folder / "scrna" / "pbmc_federation.h5ad")
    x = np.asarray(a.X.todense(), np.float64)
    x = np.log1p(x / a.obs["n_counts_all_genes"].to_numpy()[:, None] * 1e4)
    y, batch = a.obs["cell_type"].astype(str).to_numpy(), a.obs["batch"].astype(str).to_numpy()
    own = batch == "pbmc3k"
    means = np.stack([x[own & (y == k)].mean(0) for k in np.unique(y[own])])
    panel = np.argsort(-means.var(0))[:genes_wanted]
    inputs = np.minimum(x[:, panel] / 6.0, 1.2)
    inputs = np.stack([inputs, inputs**2], -1)
    return (inputs[own], y[own]), (inputs[batch == "kang_ctrl"], y[batch == "kang_ctrl"])


def provider_model(inputs, y, width, epochs):
    import torch

    from cloister.models import student

    names = sorted(set(y))
    code = torch.tensor([names.index(v) for v in y])
    torch.manual_seed(0)
    teacher = student.Transformer(inputs.shape[1] + 1, 2, width, 2, 2 * width, 3, len(names), "post", "relu")
    with torch.no_grad():
        teacher.positions.normal_(0, 1)
        for b in teacher.blocks:
            b.qkv.weight[: 2 * width] *= 0.5
    x = torch.as_tensor(inputs, dtype=torch.float32)
    began = time.monotonic()
    student.tune_teacher(teacher, x, code, student.Recipe(epochs=epochs, rate=2e-3, batch_size=64))
    made, history = student.distil(
        teacher, x, code, student.Recipe(epochs=max(2, epochs // 2), rate=1e-3, last_rate=3e-4, batch_size=64,
                                         penalty=2.0),
    )  # fmt: skip
    with torch.no_grad():
        right = [float((m(x).argmax(1) == code).float().mean()) for m in (teacher, made)]
    figures = {"teacher": right[0], "student": right[1], "seconds": time.monotonic() - began, **history}
    return teacher, made, figures


def split(y, owners, alpha, rng):
    """Dirichlet over labels; every owner gets at least four samples."""
    parts = [[] for _ in range(owners)]
    for k in np.unique(y):
        at = rng.permutation(np.flatnonzero(y == k))
        share = rng.dirichlet([alpha] * owners)
        for part, piece in zip(parts, np.split(at, (np.cumsum(share)[:-1] * len(at)).astype(int)), strict=True):
            part.extend(piece)
    spare = list(rng.permutation(len(y)))
    return [np.array(sorted(p if len(p) >= 4 else [*p, *(spare.pop() for _ in range(4))])) for p in parts]


def federated(module_of, x, y, parts, test, rounds, rate, seed=0):
    """Accuracy on the test samples of FedAvg over the owners, in the clear; and trainable parameters."""
    import torch

    from cloister.models.learner import Learner, Recipe, Table
    from cloister.papers import federated_training as training
    from cloister.workflows.fine_tune.training_parts import Offer

    names = tuple(sorted(set(y)))
    table = torch.as_tensor(x, dtype=torch.float32)
    learners = []

    def offer(at, site):
        codes = np.array([names.index(v) for v in y[at]])

        def build(labels):
            recipe = Recipe(1, 32, seed=seed)
            made = Learner(
                module_of(len(labels)), len(labels), recipe, Table(table[at]), codes, [], describe="", site=site
            )
            learners.append(made)
            return made

        return Offer("", names, build)

    sites = tuple(Party(f"o{i}") for i in range(len(parts)))
    offers = {u: offer(at, u) for u, at in zip(sites, parts, strict=True)}
    params = training.Params(sites, Party("hub"), "", rounds, rate=rate, labels=names, score_every=0)
    theta = training.ideal(params, offers)[sites[0]]
    model = learners[0]
    model.place(theta)
    model.model.eval()
    with torch.no_grad():
        found = torch.cat([model.model(part).argmax(1) for part in table[test].split(256)]).numpy()
    trainable = sum(p.numel() for p in model.model.parameters() if p.requires_grad)
    return float((np.array(names)[found] == y[test]).mean()), trainable


def arms(encoder, teacher, x, y, owners, alpha, rounds, rng):
    from torch import nn

    from cloister.models import adapter

    test = rng.permutation(len(y))[: len(y) // 3]
    rest = np.setdiff1d(np.arange(len(y)), test)
    parts = [rest[p] for p in split(y[rest], owners, alpha, rng)]
    b = polynomial.hidden(encoder, x)
    taps = (
        polynomial.taps_of(encoder, b) + rng.uniform(-1, 1, (len(x), len(encoder.shape.taps), encoder.shape.rank)) / 700
    )
    every = np.stack([v[:, 0] for v in b[1:]], 1)

    def small(values, bottleneck):
        return lambda k: adapter.make(adapter.Config(values.shape[1], values.shape[2], k, bottleneck))

    def whole(k):
        made = copy.deepcopy(teacher)
        made.head = nn.Linear(made.head.in_features, k)
        nn.init.zeros_(made.head.weight)  # the same at every owner
        nn.init.zeros_(made.head.bias)
        return made

    out = {}
    for name, values, module, rate in (
        ("linear probing", taps, small(taps, 0), 0.02),
        ("ours, hardened", taps, small(taps, 8), 0.01),
        ("ours, published", every, small(every, 8), 0.01),
        ("full fine-tuning", x, whole, 3e-3),
    ):
        began = time.monotonic()
        accuracy, parameters = federated(module, values, y, parts, test, rounds, rate)
        out[name] = {"accuracy": round(accuracy, 4), "parameters": parameters, "s": round(time.monotonic() - began, 1)}
    return out


def functions(made, teacher, inputs):
    """Tables 5 and 6: error of hidden states by degree of exp, and of the whole by steps of division."""
    import torch

    x = torch.as_tensor(inputs, dtype=torch.float32)
    rows = []
    with torch.no_grad():
        for degree in (2, 4, 6, 8, 10, 16):
            other = copy.deepcopy(teacher)
            other.exact, other.degree = False, degree
            a, b = other.trace(x), teacher.trace(x)
            rows.append({"exp degree": degree, "hidden MSE": float((a.hidden[1] - b.hidden[1]).square().mean())})
    D = np.linspace(0.2, 1.8, 99)
    rows += [
        {"division steps": k, "worst": float(np.abs(polynomial.inverse(D, k) * D - 1).max())} for k in (1, 3, 5, 7)
    ]
    return rows


# ---- three hospitals -------------------------------------------------------------------------------------------------


def hospitals(args):
    """Rows of `cl.adaptation_baselines`, a table for each draw of the labelled cells."""
    import tempfile

    import pretrain_cells

    import cloister as cl

    _, data = pretrain_cells.lung(args.data)
    encoder = polynomial.Encoder.load(pretrain_cells.OUT)
    options = {"model": str(pretrain_cells.OUT), "label_key": "some", "validation": 0.0, "timeout": 3600.0}
    options |= {"device": args.device}
    rows, rng = [], np.random.default_rng(0)
    kinds = np.unique(np.concatenate([a.obs["cell_type"].astype(str) for a in data.values()]))
    with tempfile.TemporaryDirectory() as folder:
        plain = keep_plain(encoder, data, Path(folder), None if args.encrypted else rng)
        options |= {"taps": folder, "ledger": f"{folder}/ledger.json"}
        if args.encrypted:
            asked = args.taps or Path(folder) / "asked"
            asked.mkdir(exist_ok=True, parents=True)
            options |= {"taps": str(asked), "ledger": str(asked / "ledger.json")}
            rounded = {u: taps_of_cells(encoder.rounded(block.QUADRATIC.weight_bits), a) for u, a in data.items()}
            rows += asking(data, plain, rounded, options)
            show("asking", rows)
        for draw in range(1 if args.quick else 5):
            picks = np.random.default_rng(draw)
            for i, a in enumerate(data.values()):
                known = a.obs["cell_type"].isin(kinds[np.arange(len(kinds)) % 3 != i]) if args.apart else True
                a.obs["some"] = a.obs["cell_type"].where((picks.random(a.n_obs) < args.labelled) & known)
            run = cl.rehearse("adapt-model", data, seed=draw, stage="train", **options)
            table = cl.adaptation_baselines(run, truth_key="cell_type", fine_tuning_rate=3e-4)
            rows += [{"draw": draw, "labelled": [int(a.obs["some"].notna().sum()) for a in data.values()]} | row
                     for row in table.values()]  # fmt: skip
            for noise in args.noise:
                for bottleneck in (8, 0):
                    more = {"dp_noise": noise, "bottleneck": bottleneck}
                    rows.append({"draw": draw} | noisy(data, draw, options | more))
            if args.encrypted:
                other = cl.rehearse("adapt-model", data, seed=draw, stage="train", **options | {"taps": folder})
                found = [np.concatenate([r.data[u].obs["predicted"].astype(str) for u in data]) for r in (run, other)]
                rows.append({"draw": draw, "same label as from plain taps": float((found[0] == found[1]).mean())})
    return rows


def noisy(data, seed, options):
    """Accuracy on the cells without a label, of hardened training with this noise."""
    import cloister as cl

    run = cl.rehearse("adapt-model", data, seed=seed, stage="train", **options)
    found, truth = (
        np.concatenate([a.obs[key].astype(str)[a.obs["some"].isna()] for a in run.data.values()])
        for key in ("predicted", "cell_type")
    )
    right = found == truth
    return {
        "way": f"together, dp_noise={options['dp_noise']:g}, bottleneck={options['bottleneck']}",
        "epsilon": run.results[next(iter(data))].get("privacy", {}).get("epsilon", np.inf),
        "accuracy": float(right.mean()),
        "balanced_accuracy": float(np.mean([right[truth == kind].mean() for kind in np.unique(truth)])),
        "parameters": run.model.parameters,
    }


def keep_plain(encoder, data, folder, rng):
    """Put the plain student's taps where `stage=train` looks for them; a `rng` adds the flooding's noise."""
    from cloister.workflows.adapt_model import model_card
    from cloister.workflows.adapt_model.checkpoint import Taps
    from cloister.workflows.adapt_model.inference import fingerprint, inputs_of

    told, plain = model_card.told_by(encoder, block.QUADRATIC), {}
    for site, a in data.items():
        x, plain[site] = inputs_of(a, encoder.card), taps_of_cells(encoder, a)
        noise = 0.0 if rng is None else rng.uniform(-1, 1, plain[site].shape) / 700
        Taps(folder / f"{site}.taps.npz", fingerprint(x, told, "hardened")).add(plain[site] + noise, None)
    return plain


def taps_of_cells(encoder, adata):
    from cloister.workflows.adapt_model.inference import inputs_of

    return polynomial.taps_of(encoder, polynomial.hidden(encoder, inputs_of(adata, encoder.card)))


def asking(data, plain, rounded, options):
    """Ask under encryption, all parties in this process: what it cost each, and how far the taps are from the plain."""
    import resource

    import cloister as cl

    began = time.process_time()
    run = cl.rehearse("adapt-model", data, stage="ask", **options)
    rows = [{
        "asking": run.results["coordinator"]["answered"], "CPU s of all": round(time.process_time() - began, 1),
        "peak GB of all": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
    }]  # fmt: skip
    rows += [{"party": p, **{k: round(v, 1) for k, v in c.items()}} for p, c in run.cost.items()]
    for site, wanted in plain.items():
        got = np.asarray(run.data[site].obsm["predicted_features"]).reshape(wanted.shape)
        found = {"samples": len(got), "left out": int(np.isnan(got).any(axis=(1, 2)).sum())}
        for name, other in (("plain", wanted), ("plain of rounded weights", rounded[site])):
            found[f"encrypted less {name}, worst"] = float(np.nanmax(np.abs(got - other)))
            found[f"encrypted less {name}, root mean square"] = float(np.sqrt(np.nanmean((got - other) ** 2)))
        rows.append({"site": site, **found, "largest tap": float(np.abs(wanted).max())})
    return rows


def means(rows):
    """Over the draws, with their standard deviation."""
    found = {}
    for row in rows:
        if "way" in row:
            found.setdefault(row["way"], []).append(row)
    apart = ("way", "draw", "labelled", "parameters")
    return [
        {"way": way, "parameters": each[0]["parameters"]}
        | {
            k: f"{np.mean([r[k] for r in each]):.3f} ± {np.std([r[k] for r in each]):.3f}"
            for k in each[0]
            if k not in apart
        }
        for way, each in found.items()
    ]


# ---- the demo's sites ------------------------------------------------------------------------------------------------


def demo_row(args):
    """Accuracy of the demo's row in hardened mode by dp_noise: queried once, trained three times for each."""
    import tempfile

    import cloister as cl
    from cloister.cells.demo import demo_encoder
    from cloister.demo.rows import linear_figures, right_of
    from cloister.demo.story import Story

    story = Story.draw()
    sites = {p: a[::3].copy() for p, a in story.sites.items()}
    truth, held, seen = ({p: x[p][::3] for p in sites} for x in (story.truth, story.held, story.seen))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        options = {"ring": "small", "model": str(demo_encoder()), "timeout": 300.0, "taps": folder}
        asked = cl.rehearse("adapt-model", sites, stage="ask", **options)
        taps = {p: np.asarray(asked.data[p].obsm["predicted_features"]) for p in sites}
        alone, pooled = linear_figures(taps, truth, held, seen)
        rows.append({"labelled": {p: int(x.sum()) for p, x in seen.items()}, "alone": alone, "pooled": pooled})
        for noise in args.noise or [5.0]:
            for bottleneck in (8, 0):
                found = []
                for _ in range(3 if noise else 1):
                    more = {"dp_noise": noise, "bottleneck": bottleneck}
                    run = cl.rehearse("adapt-model", sites, stage="train", **options, **more)
                    predicted = {p: run.data[p].obs["predicted"].astype(str).to_numpy() for p in sites}
                    found.append(right_of(predicted, truth, held))
                epsilon = run.results["basel"].get("privacy", {}).get("epsilon")
                rows.append(more | {"epsilon": epsilon, "mean": round(float(np.mean(found)), 3), "accuracy": found})
    return rows


def show(title, rows):
    print(f"\n{title}")
    for row in rows:
        print("  " + json.dumps(row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--only", choices=("cost", "accuracy", "cells", "demo"), default=None)
    parser.add_argument("--encrypted", action="store_true", help="cells: ask under encryption")
    parser.add_argument("--apart", action="store_true", help="cells: each hospital labels two thirds of the types only")
    parser.add_argument("--labelled", type=float, default=0.2, help="cells: fraction that has a label for training")
    parser.add_argument("--noise", type=float, nargs="*", default=[], help="cells: also train with these dp_noise")
    parser.add_argument(
        "--taps", type=Path, default=None, help="cells: folder for what was asked; a broken asking goes on"
    )
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="cells: where the provider computes")
    args = parser.parse_args()
    machine = f"{platform.machine()}, {os.cpu_count()} cores, one thread per party, load {os.getloadavg()[0]:.1f}"
    costs, accuracies = [], []
    if args.only in (None, "cells") and (args.data / "scrna").exists():
        rows = hospitals(args)
        show(f"three hospitals, 200 genes, width 128 ({machine})", rows)
        show("means over the draws", means(rows))
    if args.only == "demo":
        show(f"the demo's sites ({machine})", demo_row(args))
    if args.only in ("cells", "demo"):
        return
    if args.only != "accuracy":
        sizes = [(5, 8), (5, 16)] if args.quick else [(5, 8), (9, 8), (5, 16), (9, 16), (17, 16)]
        encrypted_block(block.SMALL, 3, 8)  # compiles
        costs = [encrypted_block(block.SMALL, t, d) for t, d in sizes]
        sizes = [(9, 32)] if args.quick else [(9, 32), (17, 32), (9, 64), (17, 64)]
        costs += [encrypted_block(block.STANDARD, t, d) for t, d in sizes]
    sources = []
    if args.only != "cost" and (args.data / "scrna").exists():
        (px, py), (ox, oy) = cells(args.data, 12 if args.quick else 24)
        if args.quick:
            rng = np.random.default_rng(0)
            keep, other = rng.permutation(len(ox))[:900], rng.permutation(len(px))[:1000]
            ox, oy, px, py = ox[keep], oy[keep], px[other], py[other]
        teacher, made, figures = provider_model(px, py, 16, 6 if args.quick else 30)
        show("provider", [figures])
        from cloister.models import student

        try:
            encoder = student.export(made, np.concatenate([px[:400], ox[:100]]), {"kind": "cells"}, rank=8)
            sources.append(("PBMC, panel", encoder, teacher, ox, oy))
            accuracies += functions(made, teacher, px[:200])
        except ParameterError as e:
            print(f"the student was refused: {e}")
    few, many = [(5, 100.0), (5, 0.01)], [(2, 100.0), (5, 100.0), (5, 1.0), (5, 0.01), (10, 1.0), (20, 1.0), (50, 1.0)]
    splits = few if args.quick else many
    for name, encoder, teacher, x, y in sources:
        for owners, alpha in splits:
            found = arms(encoder, teacher, x, y, owners, alpha, 20 if args.quick else 40, np.random.default_rng(1))
            accuracies.append({"data": name, "owners": owners, "alpha": alpha, **found})
    print(f"\nmachine: {machine}")
    if costs:
        show("cost of one encrypted block", costs)
        peer = rotation_peer(block.STANDARD)
        ours, other = round(min(c["ns_per_mac"] for c in costs), 1), "SEAL diagonals, linear part only"
        row = {"ours": ours, other: peer and round(peer, 1), "published, ViT-Base": round(PUBLISHED, 1)}
        show("per multiply-accumulate, ns", [row])
        big = polynomial.Shape(65, 48, 192, 3, 768, 1, taps=(1,), rank=32, variances=(2.0, 2.0), means=(1.0,))
        show(
            "65 tokens x 192 features, ring 8192, counted (run by block_cost.py)",
            [circuit.used(big, block.STANDARD, 0)],
        )
        if peer is not None:
            rows, about = small_batches()
            show("linear layers of that block by size of the batch, CPU seconds", [*rows, about])
    if accuracies:
        show("accuracy", accuracies)


if __name__ == "__main__":
    main()
