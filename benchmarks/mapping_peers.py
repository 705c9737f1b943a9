"""The peers of `mapping.py`, each in an interpreter of its own: this file imports nothing of Cloister.

    python benchmarks/mapping_peers.py spu     in.npz out.json
    python benchmarks/mapping_peers.py crypten in.npz out.json

Three processes on this machine compute the k-NN vote on the integers in `in.npz` (q, r, labels, k) and report seconds,
CPU-seconds of all three, bytes and messages that they sent, and the labels. SPU runs ABY3 over Z_2^64 on the same
packed keys as ours, with `lax.top_k`. CrypTen runs the paper's Algorithm 5 as corrected, over one pooled site; votes
are M times one-hot labels instead of Algorithm 6, and its provider is the default one, both of which make it cheaper
than the printed protocol.
"""

import json
import multiprocessing as mp
import os
import queue
import re
import socket
import sys
import time

import numpy as np


def free_ports(n):
    socks = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [s.getsockname()[1] for s in socks]
    for s in socks:
        s.close()
    return ports


def run_three(work, args):
    context = mp.get_context("spawn")
    out = context.Queue()
    children = [context.Process(target=work, args=(rank, out, *args)) for rank in range(3)]
    for c in children:
        c.start()
    rows = {}
    while len(rows) < 3:
        try:
            row = out.get(timeout=1)
        except queue.Empty:
            dead = [c for c in children if c.exitcode not in (None, 0)]
            if dead:
                for c in children:
                    c.kill()
                raise SystemExit("a process of the peer died") from None
            continue
        rows[row.pop("rank")] = row
    for c in children:
        c.join(timeout=20)
        if c.is_alive():
            c.kill()
    return {
        "seconds": max(r["seconds"] for r in rows.values()),
        "cpu": sum(r["cpu"] for r in rows.values()),
        "bytes": sum(r["bytes"] for r in rows.values()),
        "rounds": max(r["rounds"] for r in rows.values()),
        "labels": [rows[i]["labels"] for i in range(3)],
    }


# ---- SecretFlow SPU, ABY3 over Z_2^64 --------------------------------------------------------------------------------


def spu_knn(q, r, w, k, count):
    """As ours: the owner of r shares w = 64 |r|² + label, which it knows."""
    import jax
    import jax.numpy as jnp

    keys = w[None, :] - 128 * (q @ r.T)
    near = -jax.lax.top_k(-keys, k)[0]
    found = near - ((near >> 6) << 6)
    votes = (found[:, :, None] == jnp.arange(count)[None, None, :]).sum(1)
    return jnp.argmax(votes, axis=1)


def spu_child(rank, out, path, ports, shares, executable):
    import pickle

    import spu
    import spu.libspu as lib

    log = f"{path}.spu-{rank}.log"  # the only place where SPU says what its links carried
    where = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(where, 1)
    os.dup2(where, 2)
    desc = lib.link.Desc()
    for i, port in enumerate(ports):
        desc.add_party(f"P{i}", f"127.0.0.1:{port}")
    link = lib.link.create_brpc(desc, rank)
    config = spu.RuntimeConfig(protocol=spu.ProtocolKind.ABY3, field=spu.FieldType.FM64)
    config.enable_pphlo_profile = True
    runtime = spu.Runtime(link, config)
    program, names, shares = pickle.loads(executable), *pickle.loads(shares)  # noqa: S301 (SPU's own objects, from our parent)
    cpu, wall = time.process_time(), time.perf_counter()
    for name, parts in zip(names, shares, strict=True):
        runtime.set_var(name, parts[rank])
    runtime.run(program)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    result = runtime.get_var(program.output_names[0])
    sys.stdout.flush()
    with open(log) as f:
        text = f.read()
    lines = [x for x in text.splitlines() if "- pphlo." in x]  # one per kind of operation
    sent, actions = (
        sum(int(re.search(pattern, x)[1]) for x in lines) for pattern in (r"send bytes (\d+)", r"send actions (\d+)")
    )
    out.put(
        {
            "rank": rank,
            "seconds": wall,
            "cpu": cpu,
            "bytes": sent,
            "rounds": actions,
            "labels": pickle.dumps(result),
        }
    )
    out.close()
    out.join_thread()
    link.stop_link()


def spu_main(path):
    import pickle

    import jax
    import spu
    import spu.utils.frontend as frontend

    jax.config.update("jax_enable_x64", val=True)
    given = np.load(path)
    q, r, labels = (given[x].astype(np.int64) for x in ("q", "r", "labels"))
    k, count = int(given["k"]), int(given["count"])
    config = spu.RuntimeConfig(protocol=spu.ProtocolKind.ABY3, field=spu.FieldType.FM64)
    io = spu.Io(3, config)
    names = ["q", "r", "w"]
    w = (r * r).sum(1) * 64 + labels
    shares = [io.make_shares(x, spu.Visibility.VIS_SECRET) for x in (q, r, w)]
    program, _ = frontend.compile(
        frontend.Kind.JAX,
        lambda a, b, c: spu_knn(a, b, c, k, count),
        [q, r, w],
        {},
        names,
        [spu.Visibility.VIS_SECRET] * 3,
        lambda outs: [f"out{i}" for i in range(len(outs))],
    )
    made = run_three(spu_child, (path, free_ports(3), pickle.dumps((names, shares)), pickle.dumps(program)))
    made["bytes"] += 8 * (q.size + r.size + w.size)  # inputs: one word a number, as ours sends, not measured
    made["labels"] = io.reconstruct([pickle.loads(x) for x in made["labels"]]).tolist()  # noqa: S301
    return made


# ---- CrypTen, the paper's algorithm ----------------------------------------------------------------------------------


def crypten_child(rank, out, path, port):
    import types

    shim = types.ModuleType("torch.onnx.symbolic_registry")  # gone from recent torch, never used here
    sys.modules["torch.onnx.symbolic_registry"] = shim
    os.environ |= {
        "WORLD_SIZE": "3",
        "RANK": str(rank),
        "RENDEZVOUS": f"tcp://127.0.0.1:{port}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "BACKEND": "gloo",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    import crypten
    import crypten.communicator as comm
    import torch

    torch.set_num_threads(1)
    crypten.init()
    crypten.cfg.communicator.verbose = True
    given = np.load(path)
    scale = 2.0**-8  # keeps squares and the suppression below CrypTen's 2^63 with 16 fraction bits
    q = torch.tensor(given["q"] * scale, dtype=torch.float64)
    r = torch.tensor(given["r"] * scale, dtype=torch.float64)
    codes, k, count = given["labels"], int(given["k"]), int(given["count"])
    far = 4.0 * max(float((q**2).sum(1).max()), float((r**2).sum(1).max())) + 1
    comm.get().reset_communication_stats()
    cpu, wall = time.process_time(), time.perf_counter()
    Q = crypten.cryptensor(q.float(), src=0)
    R = crypten.cryptensor(r.float(), src=1)
    L = crypten.cryptensor(torch.tensor(np.eye(count)[codes]).float(), src=1)
    D = (Q * Q).sum(1).view(-1, 1) + (R * R).sum(1).view(1, -1) - 2 * Q.matmul(R.t())
    votes = None
    for _ in range(k):  # Algorithm 5, suppression and tie-break as corrected
        M = D.argmin(dim=1, one_hot=True)
        one = M.matmul(L)
        votes = one if votes is None else votes + one
        D = D + far * M
    winner = votes.argmax(dim=1, one_hot=False)
    plain = winner.get_plain_text(dst=0)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    stats = comm.get().get_communication_stats()
    out.put(
        {
            "rank": rank,
            "seconds": wall,
            "cpu": cpu,
            "bytes": int(stats["bytes"]),
            "rounds": int(stats["rounds"]),
            "labels": plain.long().tolist() if rank == 0 else None,
        }
    )
    out.close()
    out.join_thread()


def main():
    peer, path, target = sys.argv[1:]
    if peer == "spu":
        made = spu_main(path)
    else:
        made = run_three(crypten_child, (path, free_ports(1)[0]))
        made["labels"] = made["labels"][0]
    with open(target, "w") as f:
        json.dump(made, f)


if __name__ == "__main__":
    main()
