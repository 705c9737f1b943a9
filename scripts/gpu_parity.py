"""Does a graphics card compute what a CPU does? Every operation of encrypted inference, byte for byte.

python scripts/gpu_parity.py            compare a card with the stored vectors; needs torch and CuPy, not numba
python scripts/gpu_parity.py --write    write the vectors, by the CPU's path; needs numba, no card
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import parity

VECTORS = Path(__file__).parents[1] / "tests" / "vectors" / "owner_ckks.json"


def compare() -> bool:
    from cloister.provider.gpu import cuda_device

    cuda_device.check()
    print(f"card: {cuda_device.name()}", flush=True)
    good = True
    for name, held in parity.streams():
        good = good and bool(held)
        print(f"  {'ok   ' if held else 'WRONG'} {name}")
    stored = json.loads(VECTORS.read_text())
    for ring, params in parity.RINGS.items():
        began = time.monotonic()
        found = parity.hashes(parity.Card(params))
        wrong = [name for name in stored[ring] if found.get(name) != stored[ring][name]]
        good = good and not wrong and set(found) == set(stored[ring])
        took = time.monotonic() - began
        print(
            f"{ring}: {len(found) - len(wrong)} of {len(stored[ring])} results equal the CPU's, {took:.1f} s",
            flush=True,
        )
        for name in wrong:
            print(f"  WRONG {name}")
        for what, value, least, most in parity.noise_found(params):
            held = least <= value <= most
            good = good and bool(held)
            print(f"  {'ok   ' if held else 'WRONG'} {what}: {value:.4g} in [{least:.4g}, {most:.4g}]", flush=True)
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the vectors by the CPU's path")
    if parser.parse_args().write:
        made = {ring: parity.hashes(parity.Cpu(params)) for ring, params in parity.RINGS.items()}
        VECTORS.write_text(json.dumps(made, indent=1) + "\n")
        return
    if not compare():
        raise SystemExit("the card does not compute what the CPU does")
    print("all as on a CPU")


if __name__ == "__main__":
    main()
