"""The CUDA kernels on a CPU: the same source through a C++ compiler, with threads as fibres. Slow, and exact."""

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from cloister.provider.gpu import cuda_device

COMPILER = shutil.which("g++")
KERNEL = re.compile(r'extern "C"\s+void\s+(\w+)\(([^)]*)\)\s*\{')
BARRIERS = {
    "forward", "forward_small", "opened", "backward", "switched", "small_noise", "aes_stream", "uniform",
}  # fmt: skip


def compiled(code, log_degree):
    """As `cuda_device.compiled`."""
    library = ctypes.CDLL(str(built(code, log_degree)))
    return functools.cache(lambda name: Kernel(getattr(library, f"launch_{name}")))


@functools.cache
def built(code, log_degree):
    code = re.sub(r"extern __shared__ u32 (\w+)\[\];", r"u32* \1 = dynamic_shared;", code)
    whole = f"#define LOG_DEGREE {log_degree}\n" + (Path(__file__).parent / "emulated.h").read_text() + code
    folder = Path(tempfile.gettempdir()) / f"cloister-emulated-{hashlib.sha256(whole.encode()).hexdigest()[:16]}"
    folder.mkdir(exist_ok=True)
    made = folder / "kernels.so"
    if not made.exists():
        run = functools.partial(subprocess.run, check=True, capture_output=True, text=True)
        clean = run([COMPILER, "-std=c++17", "-E", "-P", "-x", "c++", "-"], input=whole).stdout
        clean += "\n".join(launcher(name, arguments) for name, arguments in KERNEL.findall(clean))
        part = folder / f"part-{os.getpid()}.so"  # two test workers may build it at once
        flags = ["-std=c++17", "-O2", "-U_FORTIFY_SOURCE", "-w", "-shared", "-fPIC"]
        run([COMPILER, *flags, "-x", "c++", "-", "-o", str(part)], input=clean)
        part.replace(made)
    return made


def launcher(name, arguments):
    """A C function that takes a kernel's arguments as addresses of values."""
    types = [re.sub(r"\b\w+$", "", one.strip()).strip() for one in arguments.split(",")]
    values = ", ".join(f"*({t}*)a[{i}]" for i, t in enumerate(types))
    barriers = "true" if name in BARRIERS else "false"
    return f"""
static void call_{name}(void** a) {{ {name}({values}); }}
extern "C" void launch_{name}(unsigned gx, unsigned gy, unsigned threads, unsigned shared, void** a) {{
  launch(call_{name}, gx, gy, threads, shared, a, {barriers});
}}"""


class Kernel:
    """Called as CuPy's."""

    def __init__(self, function):
        self.function = function

    def __call__(self, grid, block, args, shared_mem=0):
        addresses = (ctypes.c_void_p * len(args))(*(a.__array_interface__["data"][0] for a in map(boxed, args)))
        gx, gy = (*grid, 1)[:2]
        self.function(gx, gy, block[0], shared_mem, addresses)


BOXES = []


def boxed(value):
    """An array that holds one number, and lives as long as the call."""
    import numpy as np

    box = np.array([value])
    BOXES.append(box)
    del BOXES[:-64]
    return box


def use(monkeypatch):
    """Let `gpu` compute here."""
    from cloister.provider.gpu import gpu_ring

    monkeypatch.setattr(gpu_ring, "MOST_BLOCKS", 2)  # each fills a table first
    for name, instead in {
        "DEVICE": "cpu", "compiled": compiled, "why_not": lambda: None, "free_memory": lambda: 1 << 30,
    }.items():  # fmt: skip
        monkeypatch.setattr(cuda_device, name, instead)
    gpu_ring.ring_on_card.cache_clear()


def choose(kernels, monkeypatch):
    """Compute with the kernels by a C++ compiler ("emulated") or on a GPU; skip the test where there is none."""
    if kernels == "emulated":
        if COMPILER is None:
            pytest.skip("there is no C++ compiler")
        use(monkeypatch)
    elif reason := cuda_device.why_not():
        pytest.skip(reason)
