"""Coverage-guided fuzzing with atheris: `python fuzz/run.py TARGET [--seconds N]`, or `make fuzz`.

New inputs that reach new code are stored in build/fuzz/TARGET, and one that fails in build/fuzz/TARGET-crash-*.
`--keep N` copies at most N of the new inputs into fuzz/corpus/TARGET.
`python fuzz/run.py --seeds` writes the seeds anew. atheris has wheels for Linux and Python 3.11 to 3.13.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))
LARGEST = {"hdf5": 16384, "npz": 8192}  # bytes of one input; 4096 otherwise
TIMEOUT = {"hdf5": 400}  # seconds; the probe itself gives up on a file after 15 of CPU time


def fuzz(target: str, seconds: int) -> None:
    """Runs in a process of its own: libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["cloister.mpc.net", "cloister.study", "cloister.cells"]):
        import targets

    stored = targets.CORPUS / target
    new = ROOT / "build" / "fuzz" / target
    new.mkdir(parents=True, exist_ok=True)
    words = [sys.argv[0], str(new), str(stored), f"-max_total_time={seconds}"]
    words += [f"-max_len={LARGEST.get(target, 4096)}", f"-timeout={TIMEOUT.get(target, 30)}", "-rss_limit_mb=4096"]
    words += [f"-artifact_prefix={new.parent / target}-", "-print_final_stats=1"]
    atheris.Setup(words, targets.TARGETS[target])
    atheris.Fuzz()


def seeds() -> None:
    """A few valid and nearly valid inputs per target."""
    import io

    import h5py
    import numpy as np
    import targets

    from cloister.mpc.crypto.agreement import Identity
    from cloister.mpc.crypto.entropy import Entropy
    from cloister.mpc.net import wire
    from cloister.mpc.net.journal import Journal
    from cloister.mpc.net.receipts import Entry, Receipt
    from cloister.session import SIGNED
    from cloister.study import Party

    def write(target: str, name: str, data: bytes) -> None:
        path = targets.CORPUS / target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    classes = targets.message_classes()
    body = {"y": ["<u8", [2], np.arange(2, dtype="<u8").tobytes()]}
    for name, content in (("secure_sum.MaskedInput", body), ("x.Y", {}), ("x.Z", [1, None, 2.5, "é", [[]]])):
        made = wire.Frame("data", bytes(16), "run", Party("a"), Party("b"), 0, name, content)
        write("frame", name, wire.pack(made))
    write("frame", "classes", wire.canonical(sorted(classes))[:4096])
    me = Identity.create(Entropy())
    header = {"study": "s", "party": "basel", "parameters": {"n": 51, "x": None, "w": [1, 2.5]}}
    path = targets._FOLDER / "seed.receipt.journal"
    made = Receipt(header, Journal(path))
    made.add(Entry("sent", "secure_sum", "L1", "secure_sum.Keys", "hub", 100, "00" * 32, "sum"))
    made.add(Entry("contributed", "secure_sum", "", "sum | cells 12 | donors 3", "", 0, ""))
    made.close("done", lambda head: (me.public, me.sign(SIGNED, head)))
    write("journal", "done", path.read_bytes())
    write("journal", "torn", path.read_bytes()[:-40] + bytes(20))
    write("receipt", "done", json.dumps(made.to_json()).encode())
    parties = '[parties]\nhub = "coordinator"\na = "site"\nb = "site"\nc = "site"\n'
    one = 'name = "three"\nworkflow = "bin-values"\nmode = "hardened"\n'
    write("study", "minimal", (one + parties).encode())
    write("study", "options", (one + "timeout = 30\n" + parties + "[parameters]\nn_bins = 21\n").encode())
    steps = '[[step]]\nworkflow = "shared-pca"\n[[step]]\nworkflow = "integrate"\n'
    write("study", "steps", ('name = "two"\n' + parties + steps).encode())
    buffer = io.BytesIO()
    np.savez(buffer, X=np.ones((3, 2), np.float32), cells=np.array(["a", "b", "c"]), genes=np.array(["g", "h"]))
    write("npz", "dense", buffer.getvalue())
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        data=np.ones(2),
        indices=np.array([0, 1]),
        indptr=np.array([0, 1, 2]),
        shape=np.array([2, 2]),
        format=np.array(b"csr"),
    )
    write("npz", "sparse", buffer.getvalue())
    buffer = io.BytesIO()
    import anndata
    from anndata.io import write_elem

    adata = anndata.AnnData(np.ones((3, 2), np.float32))
    with h5py.File(buffer, "w", libver="latest") as file:
        write_elem(file, "/", adata)
    write("hdf5", "small", buffer.getvalue())


def merge(target: str, keep: int) -> None:
    """The smallest inputs that reach all that was reached, at most `keep`, into the stored corpus."""
    stored, new = ROOT / "fuzz" / "corpus" / target, ROOT / "build" / "fuzz" / target
    seen = {path.read_bytes() for path in stored.iterdir()}
    found = sorted((p for p in new.iterdir() if p.read_bytes() not in seen), key=lambda p: p.stat().st_size)
    for path in found[:: max(1, -(-len(found) // keep))] if keep else []:
        (stored / path.name[:12]).write_bytes(path.read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help="all without a name")
    parser.add_argument("--seconds", type=int, default=60, help="per target")
    parser.add_argument("--seeds", action="store_true")
    parser.add_argument("--keep", type=int, default=0, help="store at most this many new inputs per target")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.seeds:
        seeds()
        return
    if args.child:
        fuzz(args.targets[0], args.seconds)
        return
    import targets

    failed = []
    for target in args.targets or targets.TARGETS:
        began = time.monotonic()
        command = [sys.executable, __file__, target, "--seconds", str(args.seconds), "--child"]
        done = subprocess.run(command, capture_output=True, text=True)
        runs = [line for line in done.stderr.splitlines() if line.startswith("stat::number_of_executed_units")]
        last = runs[0].split()[-1] if runs else "?"
        print(f"{target}: {time.monotonic() - began:.0f} s, {last} inputs, exit code {done.returncode}", flush=True)
        if done.returncode:
            failed.append(target)
            print(done.stderr[-6000:], flush=True)
        if args.keep:
            merge(target, args.keep)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; inputs are in build/fuzz")


if __name__ == "__main__":
    main()
