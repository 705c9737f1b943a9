"""The graphics card: whether there is one, our CUDA kernels on it, and arrays that go there and back.

Kernels are the files of `cuda/`, compiled on first use for the ring they serve (NVRTC, through CuPy). Residues lie on
the card as PyTorch tensors of 32-bit integers: all are below 2^28, so their sign does not matter.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from cloister.arrays import U32, Array
from cloister.errors import ParameterError

Tensor: TypeAlias = Any  # torch has no type for "on the card"
DEVICE = "cuda"
DEGREES = (4096, 8192, 16384)
SOURCES = ("arithmetic", "transforms", "randomness", "integers", "ciphertexts", "pairs", "linear")
THREADS = 256  # of a block, where nothing else is asked for


def why_not() -> str | None:
    """Why there is no card to compute on, in words; None if there is one."""
    for package in ("torch", "cupy"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed; if needed: pip install 'cloister[gpu]'"
    import torch

    if not torch.cuda.is_available():
        return "PyTorch finds no NVIDIA card on this machine"
    return None


def check() -> None:
    """Raise unless there is a card."""
    if reason := why_not():
        raise ParameterError(f"a GPU was requested, but {reason}")


def name() -> str:
    import torch

    size = torch.cuda.get_device_properties(0).total_memory / 2**30
    return f"{torch.cuda.get_device_name(0)}, {size:.0f} GiB"


def free_memory() -> int:
    """Bytes that could still be had, with those that PyTorch holds without using them."""
    import torch

    return int(torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())


def source() -> str:
    folder = Path(__file__).parent / "cuda"
    return "\n".join((folder / f"{part}.cu").read_text(encoding="utf-8") for part in SOURCES)


def compiled(code: str, log_degree: int) -> Callable[[str], Any]:
    """The kernels by name."""
    import cupy

    module = cupy.RawModule(code=code, options=("-std=c++17", f"-DLOG_DEGREE={log_degree}"), backend="nvrtc")
    return functools.cache(module.get_function)


class Kernels:
    """The kernels for one ring degree. A tensor among the arguments stands for its address, None for no address."""

    def __init__(self, degree: int) -> None:
        if degree not in DEGREES:
            raise ParameterError(f"there are kernels for rings of {', '.join(map(str, DEGREES))}, not of {degree}")
        check()
        self._get = compiled(source(), degree.bit_length() - 1)
        self.degree, self.exchange = degree, (degree + degree // 8) * 4  # bytes that a transform exchanges
        for kernel in ("forward", "forward_small", "opened", "backward", "switched"):
            self._get(kernel).max_dynamic_shared_size_bytes = self.exchange

    def each(self, kernel: str, count: int, *args: Any) -> None:
        """One thread for each of `count` pieces."""
        self.blocks(kernel, (-(-count // THREADS),), THREADS, *args)

    def transforms(self, kernel: str, count: int, *args: Any) -> None:
        """One block for each of `count` polynomials."""
        self.blocks(kernel, (count,), self.degree // 16, *args, shared=self.exchange)

    def blocks(self, kernel: str, grid: tuple[int, ...], threads: int, *args: Any, shared: int = 0) -> None:
        self._get(kernel)(grid, (threads,), tuple(map(argument, args)), shared_mem=shared)


def argument(x: Any) -> Any:
    """As CUDA takes it: plain numbers are 32 bits, counts (`wide`) 64, tensors and None addresses."""
    if x is None:
        return np.uint64(0)
    if isinstance(x, np.generic):
        return x
    return np.int32(x) if isinstance(x, int) else np.uint64(x.data_ptr())


wide = np.int64


def upload(x: Array) -> Tensor:
    """Any array, as bytes."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(x).reshape(-1).view(np.uint8).copy()).to(DEVICE)


def put(x: U32) -> Tensor:
    import torch

    return torch.from_numpy(np.require(x, np.uint32, ["C", "W"]).view(np.int32)).to(DEVICE)


def host(x: Tensor) -> U32:
    found: U32 = x.cpu().numpy().view(np.uint32)
    return found


def empty(*shape: int) -> Tensor:
    import torch

    try:
        return torch.empty(shape, dtype=torch.int32, device=DEVICE)
    except torch.OutOfMemoryError:
        full = "the GPU's memory is full; use device = 'cpu', or let fewer owners query at a time"
        raise ParameterError(full) from None
