"""Where a provider computes: on its CPU, or on a graphics card if there is one and it is asked for."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from cloister.arrays import U32
from cloister.mpc.crypto.owner_ckks import scheme
from cloister.mpc.crypto.owner_ckks.ring import Parameters
from cloister.provider.gpu import cuda_device

Device: TypeAlias = Literal["cpu", "gpu"]


def check(device: Device) -> None:
    """Raise unless one can compute there."""
    if device == "gpu":
        cuda_device.check()


def evaluator(device: Device, params: Parameters, b: U32, seed: bytes) -> Any:
    """A `scheme.Evaluator`, or its like on a GPU."""
    check(device)
    if device == "cpu":
        return scheme.Evaluator(params, b, seed)
    from cloister.provider.gpu import gpu

    return gpu.Evaluator(params, b, seed)
