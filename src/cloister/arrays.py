"""Types of arrays, by what they hold: `F64` is an array of 64-bit floats, of any shape. Shapes stand in comments."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Bits: TypeAlias = npt.NDArray[np.bool_]
U8: TypeAlias = npt.NDArray[np.uint8]
U32: TypeAlias = npt.NDArray[np.uint32]
U64: TypeAlias = npt.NDArray[np.uint64]
I32: TypeAlias = npt.NDArray[np.int32]
I64: TypeAlias = npt.NDArray[np.int64]
Index: TypeAlias = npt.NDArray[np.intp]
F32: TypeAlias = npt.NDArray[np.float32]
F64: TypeAlias = npt.NDArray[np.float64]
C128: TypeAlias = npt.NDArray[np.complex128]
