"""Messages and their bytes: frozen dataclasses over msgpack, read back field by field, never pickled.

A protocol declares what it sends:

    @message("L4")
    class MaskedInput:                # u → S
        y: U64                        # (m,)

and the annotation is the whole schema. Allowed are `int` (64 bit), `float`, `bool`, `str`, `bytes`, `Party`, the
array types of `values.DTYPES`, other messages, and `X | None`, `tuple[X, ...]`, `dict[str, X]` of these. Integers
that may be larger than 64 bits travel as `bytes`. An array travels as `[dtype, shape, bytes]`, little endian, C order.

A frame is one msgpack list:

    [format, kind, run, scope, sender, to, seq, name, body]

Everything that arrives is checked against the schema before anything is built from it, and whatever is wrong with
it, random bytes included, raises `WireError` and nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal, Protocol, TypeVar, dataclass_transform

import msgpack
import numpy as np

from cloister.errors import WireError
from cloister.mpc.net import values
from cloister.mpc.net.values import MAX_FRAME, MAX_ITEMS, Codec
from cloister.mpc.parties import Party

FORMAT = 1
MAX_TEXT = 1 << 16  # bytes of one string
MAX_OBJECTS = 1 << 20  # values, lists and maps of one frame, all levels together
MAX_DEPTH = 16  # lists and maps within each other

Kind = Literal["data", "abort", "pulse", "bye"]
KINDS: tuple[Kind, ...] = ("data", "abort", "pulse", "bye")
Shape = tuple[int | None, ...]  # None: any length along that axis

T = TypeVar("T")
M = TypeVar("M", bound="Message")


class Message(Protocol):
    """What `@message` makes of a class."""

    __message__: ClassVar[Spec]


@dataclasses.dataclass(frozen=True, slots=True)
class Spec:
    protocol: str  # the protocol file, `secure_sum`
    name: str  # `secure_sum.MaskedInput`
    line: str  # `L4`


def protocol_of(module: str) -> str:
    """What a module's protocol is called on the wire: its `PROTOCOL`, or else its file's name."""
    return getattr(sys.modules.get(module), "PROTOCOL", "") or module.rpartition(".")[2]


@dataclass_transform(frozen_default=True)
def message(line: str, *, protocol: str | None = None) -> Callable[[type[T]], type[T]]:
    """Make a class a message that belongs to `line` of the protocol whose module it stands in."""

    def decorate(cls: type[T]) -> type[T]:
        new = dataclasses.dataclass(frozen=True, slots=True, eq=False)(cls)
        owner = protocol or protocol_of(cls.__module__)
        new.__message__ = Spec(owner, f"{owner}.{cls.__name__}", line)  # type: ignore[attr-defined]
        return new

    return decorate


# ---- fields: one pair of `values` per annotation ---------------------------------------------------------------------


def _codec(annotation: Any) -> Codec:
    annotation = _written_out(annotation)
    if isinstance(annotation, typing.NewType):
        return _codec(annotation.__supertype__)
    if annotation in (int, float, bool, str, bytes):
        return values.exact(annotation)
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is np.ndarray:
        return values.array(np.dtype(typing.get_args(args[1])[0]))
    if origin in (typing.Union, types.UnionType) and type(None) in args and len(args) == 2:
        return values.optional(_codec(next(a for a in args if a is not type(None))))
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return values.sequence(_codec(args[0]))
    if origin is dict and _plain(_written_out(args[0])) is str:
        return values.mapping(_codec(args[1]))
    if hasattr(annotation, "__message__"):
        return to_fields, functools.partial(from_fields, annotation)
    raise TypeError(f"{annotation!r} cannot travel; see the list of types in cloister.mpc.net.wire")


def _written_out(annotation: Any) -> Any:
    """What an alias type stands for: `type Words = U64`, and `NDArray` itself since NumPy 2.5."""
    alias = typing.get_origin(annotation) or annotation
    if not hasattr(alias, "__value__"):
        return annotation
    meant = alias.__value__
    if alias is not annotation:  # NDArray[np.uint64]: each parameter by its name, wherever it stands in the value
        given = dict(zip(alias.__type_params__, typing.get_args(annotation), strict=True))
        meant = meant[tuple(given[p] for p in meant.__parameters__)]
    return _written_out(meant)


def _plain(annotation: Any) -> Any:
    return annotation.__supertype__ if isinstance(annotation, typing.NewType) else annotation


_SCHEMAS: dict[Any, dict[str, Codec]] = {}  # per message class, built at first use
_ARRAYS: dict[Any, frozenset[str]] = {}


def _codecs(cls: Any) -> dict[str, Codec]:
    if cls not in _SCHEMAS:
        hints = typing.get_type_hints(cls)
        _SCHEMAS[cls] = {f.name: _codec(hints[f.name]) for f in dataclasses.fields(cls)}
    return _SCHEMAS[cls]


def array_fields(cls: Any) -> frozenset[str]:
    """Names of the fields of `cls` that are arrays: the ones whose shape a receiver has to state."""
    if cls not in _ARRAYS:
        codecs = _codecs(cls).items()
        _ARRAYS[cls] = frozenset(name for name, (write, _) in codecs if write.__qualname__.startswith("array."))
    return _ARRAYS[cls]


def to_fields(msg: Any) -> dict[str, Any]:
    return {name: write(getattr(msg, name)) for name, (write, _) in _codecs(type(msg)).items()}


def from_fields(cls: type[T], body: Any, at: str = "") -> T:
    """Build a message from the map that arrived; unknown, missing or ill-typed fields raise `WireError`."""
    at = at or cls.__name__
    codecs = _codecs(cls)
    if type(body) is not dict or any(type(k) is not str for k in body):
        raise WireError(f"{at}: expected a map of fields")
    if missing := codecs.keys() - body.keys():
        raise WireError(f"{at}: field '{min(missing)}' is missing")
    if len(body) > len(codecs):
        raise WireError(f"{at}: {len(body) - len(codecs)} field(s) that {at} does not have")
    return cls(**{name: read(body[name], f"{at}.{name}") for name, (_, read) in codecs.items()})


def check_shapes(msg: Any, shapes: Mapping[str, Shape]) -> None:
    """Raise unless every array of `msg` has the shape that the receiver states.

    A field that is an array must be stated; optional arrays and tuples or maps of arrays may be, for each of them.
    """
    for name in sorted(array_fields(type(msg)) | shapes.keys()):
        if name not in shapes:
            raise TypeError(f"recv of {type(msg).__name__} must state the shape of '{name}'")
        if not hasattr(msg, name):
            raise TypeError(f"{type(msg).__name__} has no field '{name}' to have a shape")
        want = shapes[name]
        for shape in _shapes(getattr(msg, name)):
            if len(shape) != len(want) or any(w is not None and w != f for f, w in zip(shape, want, strict=True)):
                raise WireError(f"{type(msg).__name__}.{name}: expected shape {want}, found {shape}")


def _shapes(x: Any) -> Iterator[tuple[int, ...]]:
    """Of an array, or of all arrays in a tuple or map of them; none for a field that was left out."""
    if isinstance(x, np.ndarray):
        yield x.shape
    elif x is not None:
        for each in x.values() if isinstance(x, dict) else x:
            yield from _shapes(each)


# ---- frames --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    kind: Kind
    run: bytes  # first 16 bytes of the run id; zero before the parties have agreed on one
    scope: str  # path of the sub-protocol within the run
    sender: Party
    to: Party
    seq: int  # counts the data frames of (sender, to, scope)
    name: str
    body: Any
    weight: int = 0  # of what arrived, once it is unpacked: about its bytes in memory


_HEADER: tuple[tuple[str, type], ...] = (
    ("run", bytes),
    ("scope", str),
    ("sender", str),
    ("to", str),
    ("seq", int),
    ("name", str),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
    """The body of a message that goes to many, packed once."""

    data: bytes


def pack_body(msg: Any) -> Packed:
    return Packed(_encoded(msg.__message__.name, to_fields(msg)))


def _encoded(name: str, x: Any) -> bytes:
    try:
        return _packed(x)
    except (ValueError, OverflowError, TypeError) as e:
        raise WireError(f"{name} cannot be encoded: {type(e).__name__}") from None


def pack(frame: Frame) -> bytes:
    head = [FORMAT, KINDS.index(frame.kind), frame.run, frame.scope, frame.sender, frame.to, frame.seq, frame.name]
    if isinstance(frame.body, Packed):
        data = _LIST_OF_NINE + _encoded(frame.name, head)[1:] + frame.body.data
    else:
        data = _encoded(frame.name, [*head, frame.body])
    if len(data) > MAX_FRAME:
        raise WireError(f"{frame.name} has {len(data)} bytes; a frame holds at most {MAX_FRAME}: send it in parts")
    return data


# msgpack's first byte → bytes of the length that follows it, by what it starts; extension types are not in the list
_BYTES_OF = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_ENTRIES_OF = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
_NUMBERS = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_LIST_OF_NINE = b"\x99"
_FIXED = dict.fromkeys((0xC0, 0xC2, 0xC3), 0) | _NUMBERS  # none, false and true have no more bytes


def check_structure(data: bytes) -> int:
    """Walk over the bytes of a frame and build nothing; returns how many values, lists and maps are in it.

    Raises unless lengths, depth and number stay within the limits, so that no few bytes claim much memory.
    """
    at, end, objects = 0, len(data), 1
    left = [1]  # entries still to come, per open list or map
    while left:
        if not left[-1]:
            left.pop()
            continue
        left[-1] -= 1
        if at >= end:
            raise WireError("a frame that ends too early")
        first = data[at]
        at += 1
        if first < 0x80 or first >= 0xE0:  # a small number
            continue
        entries = -1
        if first < 0xA0:
            entries = (first & 15) * (2 if first < 0x90 else 1)
        elif first < 0xC0:
            at += first & 31
        elif first in _FIXED:
            at += _FIXED[first]
        elif first in _BYTES_OF:
            width = _BYTES_OF[first]
            at += width + int.from_bytes(data[at : at + width], "big")
        elif first in _ENTRIES_OF:
            width = _ENTRIES_OF[first]
            count = int.from_bytes(data[at : at + width], "big")
            if count > MAX_ITEMS:
                raise WireError(f"a list or map of {count} entries; at most {MAX_ITEMS}")
            entries = count * (2 if first >= 0xDE else 1)
            at += width
        else:
            raise WireError("a frame with a type that does not travel")
        if entries >= 0:
            objects += entries
            if objects > MAX_OBJECTS or entries > end - at:
                raise WireError("a frame that claims more entries than it holds, or than may travel")
            if len(left) > MAX_DEPTH:
                raise WireError(f"a frame of lists within lists; at most {MAX_DEPTH} levels")
            left.append(entries)
    if at != end:
        raise WireError("a frame that is shorter or longer than it says")
    return objects


def unpack(data: bytes) -> Frame:
    if len(data) > MAX_FRAME:
        raise WireError(f"a frame of {len(data)} bytes; at most {MAX_FRAME}")
    objects = check_structure(data)
    try:
        whole = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_str_len=MAX_TEXT,
            max_bin_len=len(data),
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException):
        raise WireError("bytes that are not a message") from None
    if type(whole) is not list or len(whole) != 3 + len(_HEADER):
        raise WireError("a frame that is not a list of nine")
    form, kind, *head, body = whole
    if type(form) is not int or form != FORMAT:
        raise WireError(f"a frame of another format; this is format {FORMAT}: do all sites run one version?")
    if type(kind) is not int or not 0 <= kind < len(KINDS):
        raise WireError("a frame of unknown kind")
    for (name, want), value in zip(_HEADER, head, strict=True):
        if type(value) is not want:
            raise WireError(f"frame header: expected {want.__name__} in '{name}'")
    run, scope, sender, to, seq, name = head
    return Frame(KINDS[kind], run, scope, Party(sender), Party(to), seq, name, body, len(data) + 64 * objects)


# ---- one encoding for hashing --------------------------------------------------------------------------------------


def canonical(x: Any) -> bytes:
    """Bytes that are equal exactly when two public values are: the input of every digest."""
    return _packed(_canonical(x))


def _packed(x: Any) -> bytes:
    packed: bytes = msgpack.packb(x, use_bin_type=True)
    return packed


_PLAIN = frozenset({bool, float, str, bytes, type(None)})  # the same in both forms


_FIELDS: dict[Any, tuple[str, ...]] = {}  # per dataclass, at first use


def _names(cls: Any) -> tuple[str, ...]:
    if cls not in _FIELDS:
        _FIELDS[cls] = tuple(f.name for f in dataclasses.fields(cls))
    return _FIELDS[cls]


def _canonical(x: Any) -> Any:
    kind = type(x)
    if kind in _PLAIN:
        return x
    if kind is int:
        return x if -(1 << 63) <= x < 1 << 64 else ["int", [hex(x)]]
    if isinstance(x, list | tuple):
        items = [_canonical(v) for v in x]
        return ["list", items] if _looks_tagged(items) else items
    if kind is dict or isinstance(x, Mapping):
        return ["map", [[_canonical(k), _canonical(x[k])] for k in sorted(x)]]
    if isinstance(x, str):
        return str(x)
    if isinstance(x, np.generic):
        return _canonical(x.item())
    if isinstance(x, np.ndarray):
        if x.dtype.kind not in "biufcSU":
            raise TypeError(f"an array of {x.dtype} has no canonical form")
        code = x.dtype.newbyteorder("<").str
        return ["array", code, list(x.shape), np.ascontiguousarray(x).astype(code, copy=False).tobytes()]
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return [kind.__name__, [[name, _canonical(getattr(x, name))] for name in _names(kind)]]
    raise TypeError(f"{kind.__name__} has no canonical form; public parameters are plain values")


def _looks_tagged(x: list[Any]) -> bool:
    """Whether a list could be taken for the form of a map, an array or a dataclass."""
    pair = len(x) == 2 and type(x[0]) is str and type(x[1]) is list
    return pair or (len(x) == 4 and x[0] == "array")


def digest(*parts: Any) -> bytes:
    """SHA-256 of the canonical forms."""
    return hashlib.sha256(_packed([_canonical(part) for part in parts])).digest()
