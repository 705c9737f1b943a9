"""Values on the wire: for each type that may travel, how it is written, and how it is read back and checked.

Each function gives a pair (write, read). `write` takes what a protocol hands over, `read` what arrived and where in the
message it stands; whatever is wrong raises `WireError`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from cloister.errors import WireError

MAX_FRAME = 1 << 31  # bytes of one frame
MAX_ITEMS = 1 << 16  # entries of one list or map; the numbers of an array do not count
MAX_DIMS = 4
_KINDS = ("uint64", "uint32", "uint8", "int64", "int32", "float64", "float32")
DTYPES = {np.dtype(name).newbyteorder("<").str: name for name in _KINDS}

Write = Callable[[Any], Any]
Read = Callable[[Any, str], Any]
Codec = tuple[Write, Read]


def exact(kind: type) -> Codec:
    def write(x: Any) -> Any:
        if kind is int and isinstance(x, np.integer):
            x = int(x)
        if kind is float and isinstance(x, int | np.integer | np.floating) and not isinstance(x, bool):
            try:
                x = float(x)
            except OverflowError:
                raise WireError("a field of type float cannot carry a whole number that large") from None
        if kind is bool and isinstance(x, np.bool_):
            x = bool(x)
        if type(x) is not kind:
            raise WireError(f"a field of type {kind.__name__} cannot carry {type(x).__name__}")
        return x

    def read(x: Any, at: str) -> Any:
        if type(x) is not kind:
            raise WireError(f"{at}: expected {kind.__name__}, found {type(x).__name__}")
        return x

    return write, read


def array(dtype: np.dtype[Any]) -> Codec:
    code = dtype.newbyteorder("<").str
    if code not in DTYPES:
        raise TypeError(f"arrays of {dtype} do not travel; allowed: {', '.join(DTYPES.values())}")

    def write(x: Any) -> Any:
        if not isinstance(x, np.ndarray) or x.dtype != dtype:
            raise WireError(f"a field of {dtype} cannot carry {getattr(x, 'dtype', type(x).__name__)}")
        if x.ndim > MAX_DIMS:
            raise WireError(f"an array of {x.ndim} axes cannot travel; at most {MAX_DIMS}")
        return [code, list(x.shape), np.ascontiguousarray(x).astype(code, copy=False).tobytes()]

    def read(x: Any, at: str) -> Any:
        if type(x) is not list or len(x) != 3:
            raise WireError(f"{at}: expected an array as [dtype, shape, bytes]")
        sent_code, shape, raw = x
        if sent_code != code:
            raise WireError(f"{at}: expected dtype {code}, found another")
        if type(shape) is not list or len(shape) > MAX_DIMS or type(raw) is not bytes:
            raise WireError(f"{at}: expected a shape of at most {MAX_DIMS} axes, and bytes")
        if any(type(n) is not int or n < 0 or n > MAX_FRAME for n in shape):
            raise WireError(f"{at}: a length in the shape is not a size")
        if math.prod(shape) * dtype.itemsize != len(raw):
            raise WireError(f"{at}: shape and bytes disagree")
        try:
            return np.frombuffer(raw, dtype=code).reshape(shape)
        except ValueError:  # an empty array along one axis and beyond all bounds along another
            raise WireError(f"{at}: a shape that no array has") from None

    return write, read


def optional(inner: Codec) -> Codec:
    write, read = inner
    return lambda x: None if x is None else write(x), lambda x, at: None if x is None else read(x, at)


def sequence(inner: Codec) -> Codec:
    write, read = inner

    def write_all(xs: Any) -> Any:
        if len(xs) > MAX_ITEMS:
            raise WireError(f"{len(xs)} entries cannot travel in one list; at most {MAX_ITEMS}")
        return [write(x) for x in xs]

    def read_all(xs: Any, at: str) -> Any:
        if type(xs) is not list:
            raise WireError(f"{at}: expected a list, found {type(xs).__name__}")
        return tuple(read(x, f"{at}[{i}]") for i, x in enumerate(xs))

    return write_all, read_all


def mapping(inner: Codec) -> Codec:
    write, read = inner
    key_write, _ = exact(str)

    def write_all(xs: Any) -> Any:
        if len(xs) > MAX_ITEMS:
            raise WireError(f"{len(xs)} entries cannot travel in one map; at most {MAX_ITEMS}")
        return {key_write(k): write(x) for k, x in xs.items()}

    def read_all(xs: Any, at: str) -> Any:
        if type(xs) is not dict or any(type(k) is not str for k in xs):
            raise WireError(f"{at}: expected a map with text keys")
        return {k: read(x, f"{at}[...]") for k, x in xs.items()}

    return write_all, read_all
