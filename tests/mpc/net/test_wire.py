import contextlib
import dataclasses
import random
import string
import tracemalloc
from typing import Any, TypeVar

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cloister.arrays import F32, F64, I32, I64, U8, U32, U64
from cloister.errors import WireError
from cloister.mpc.net import wire
from cloister.mpc.net.mailbox import Mailbox
from cloister.mpc.net.wire import Frame, message
from cloister.mpc.parties import Party

try:
    from typing import TypeAliasType  # Python 3.12
except ImportError:
    from typing_extensions import TypeAliasType

A, B = Party("a"), Party("b")


@message("L1", protocol="toy")
class Inner:
    x: I64
    note: str


@message("L2", protocol="toy")
class Everything:
    whole: int
    real: float
    flag: bool
    text: str
    raw: bytes
    who: Party
    u64: U64
    u32: U32
    u8: U8
    i64: I64
    i32: I32
    f64: F64
    f32: F32
    maybe: int | None
    perhaps: F64 | None
    many: tuple[bytes, ...]
    table: dict[str, float]
    by_party: dict[Party, U64]
    inner: Inner
    inners: dict[Party, Inner]
    nested: tuple[tuple[int, ...], ...]


@message("L3", protocol="toy")
class Vector:
    y: U64


@message("L4", protocol="toy")
class Empty:
    pass


def arrays(dtype):
    return hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))


TEXT = st.text(max_size=20)
INNER = st.builds(Inner, x=arrays("int64"), note=TEXT)
VALUES = {
    "whole": st.integers(-(2**63), 2**64 - 1),
    "real": st.floats(),
    "flag": st.booleans(),
    "text": TEXT,
    "raw": st.binary(max_size=50),
    "who": TEXT,
    **{
        name: arrays(dtype)
        for name, dtype in {
            "u64": "uint64",
            "u32": "uint32",
            "u8": "uint8",
            "i64": "int64",
            "i32": "int32",
            "f64": "float64",
            "f32": "float32",
        }.items()
    },
    "maybe": st.none() | st.integers(-5, 5),
    "perhaps": st.none() | arrays("float64"),
    "many": st.lists(st.binary(max_size=9), max_size=5).map(tuple),
    "table": st.dictionaries(TEXT, st.floats(), max_size=4),
    "by_party": st.dictionaries(TEXT, arrays("uint64"), max_size=3),
    "inner": INNER,
    "inners": st.dictionaries(TEXT, INNER, max_size=3),
    "nested": st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=3).map(tuple),
}
EVERYTHING = st.builds(Everything, **VALUES)


def frame(msg, **changes):
    made = Frame("data", bytes(16), "1", A, B, 0, type(msg).__message__.name, wire.to_fields(msg))
    return dataclasses.replace(made, **changes)


def through(msg):
    return wire.from_fields(type(msg), wire.unpack(wire.pack(frame(msg))).body)


def same(x, y):
    if isinstance(x, np.ndarray):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)
        assert x.shape == y.shape
    elif dataclasses.is_dataclass(x):
        assert type(x) is type(y)
        for f in dataclasses.fields(x):
            same(getattr(x, f.name), getattr(y, f.name))
    elif isinstance(x, dict):
        assert x.keys() == y.keys()
        for k in x:
            same(x[k], y[k])
    elif isinstance(x, tuple):
        assert len(x) == len(y)
        for a, b in zip(x, y, strict=True):
            same(a, b)
    else:
        assert type(x) is type(y)
        assert x == y or (x != x and y != y)


def example():
    dtypes = {"u64": "uint64", "u32": "uint32", "u8": "uint8", "i64": "int64", "i32": "int32"}
    dtypes |= {"f64": "float64", "f32": "float32"}
    fields = {name: np.arange(6).reshape(2, 3).astype(dtype) for name, dtype in dtypes.items()}
    inner = Inner(np.arange(2), "é")
    return Everything(
        whole=-7,
        real=0.5,
        flag=True,
        text="täxt",
        raw=b"\0\xff",
        who=A,
        maybe=None,
        perhaps=np.zeros(2),
        many=(b"1", b"22"),
        table={"k": 1.0},
        by_party={A: np.uint64([1, 2**63])},
        inner=inner,
        inners={B: inner},
        nested=((1, 2), ()),
        **fields,
    )


# ---- round trips -----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(msg=EVERYTHING)
def test_every_type_comes_back_as_it_was_sent(msg):
    same(msg, through(msg))


def test_a_message_knows_its_protocol_name_and_line():
    assert Vector.__message__ == wire.Spec("toy", "toy.Vector", "L3")


def test_messages_are_frozen_and_hold_nothing_else():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Vector(np.zeros(1, np.uint64)).y = None
    same(Empty(), through(Empty()))


def test_numbers_of_numpy_are_sent_as_plain_ones():
    @message("L1", protocol="toy")
    class Numbers:
        a: int
        b: float
        c: float
        d: bool

    got = through(Numbers(np.int64(3), np.float32(0.5), 2, np.bool_(True)))
    assert (got.a, got.b, got.c, got.d) == (3, 0.5, 2.0, True)
    assert [type(x) for x in (got.a, got.b, got.c, got.d)] == [int, float, float, bool]


def test_arrays_need_not_be_contiguous_nor_little_endian():
    x = np.arange(12, dtype=np.uint64).reshape(3, 4)
    np.testing.assert_array_equal(through(Vector(x[::2, ::-1])).y, x[::2, ::-1])
    big = x.astype(">u8")
    assert big.dtype != np.dtype("uint64")
    with pytest.raises(WireError, match="cannot carry"):
        through(Vector(big))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("whole", True),
        ("whole", 1.0),
        ("whole", "1"),
        ("real", "1.0"),
        ("real", 10**400),
        ("flag", 1),
        ("text", b"x"),
        ("raw", "x"),
        ("u64", np.zeros(2)),
        ("u64", [1, 2]),
        ("u8", np.zeros((1,) * 5, np.uint8)),
        ("table", {1: 1.0}),
        ("many", (b"x",) * (wire.MAX_ITEMS + 1)),
        ("table", {str(i): 0.0 for i in range(wire.MAX_ITEMS + 1)}),
    ],
)
def test_a_sender_cannot_put_in_what_the_field_does_not_say(field, value):
    with pytest.raises(WireError):
        wire.to_fields(dataclasses.replace(example(), **{field: value}))


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1])
def test_whole_numbers_beyond_64_bits_travel_as_bytes_only(value):
    with pytest.raises(WireError, match="cannot be encoded"):
        wire.pack(frame(dataclasses.replace(example(), whole=value)))


@pytest.mark.parametrize(
    "annotation", ["object", "list[int]", "complex", "int | str", "dict[int, int]", "npt.NDArray[np.complex128]"]
)
def test_types_without_an_encoding_are_refused_when_the_message_is_first_used(annotation):
    import numpy.typing as npt

    kind = eval(annotation, {"np": np, "npt": npt})  # noqa: S307
    with pytest.raises(TypeError, match=r"travel"):
        wire._codec(kind)


def test_alias_types_are_written_out():
    ScalarT, Key = TypeVar("ScalarT", bound=np.generic), TypeVar("Key")
    array = TypeAliasType(
        "array", np.ndarray[tuple[Any, ...], np.dtype[ScalarT]], type_params=(ScalarT,)
    )  # NumPy 2.5's
    words = TypeAliasType("words", array[np.uint64])
    name = TypeAliasType("name", Party)
    turned = TypeAliasType("turned", dict[Key, ScalarT], type_params=(ScalarT, Key))

    @message("L1", protocol="toy")
    class Aliased:
        direct: array[np.float32]
        named: words
        perhaps: words | None
        many: tuple[array[np.uint8], ...]
        table: dict[name, words]
        other: turned[words, name]

    ones = np.ones(2, np.uint64)
    fields = {"many": (np.uint8([1]),), "table": {A: ones}, "other": {B: ones}}
    for perhaps in (None, ones):
        sent = Aliased(direct=np.float32([0.5]), named=ones, perhaps=perhaps, **fields)
        same(sent, through(sent))
    assert wire.array_fields(Aliased) == {"direct", "named"}
    with pytest.raises(WireError, match="a field of uint64 cannot carry float64"):
        wire.to_fields(Aliased(np.float32([0.5]), np.ones(2), None, **fields))
    for alias in (array[np.complex128], TypeAliasType("anything", object), turned[int, int]):
        with pytest.raises(TypeError, match="travel"):
            wire._codec(alias)


# ---- what is wrong has a name ----------------------------------------------------------------------------------------


def body(**changes):
    fields = wire.to_fields(example())
    return {k: v for k, v in (fields | changes).items() if v is not ...}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"whole": ...}, "field 'whole' is missing"),
        ({"more": 1}, "1 field.s. that Everything does not have"),
        ({"whole": 1.0}, "Everything.whole: expected int, found float"),
        ({"whole": True}, "expected int, found bool"),
        ({"real": 1}, "Everything.real: expected float, found int"),
        ({"flag": 1}, "expected bool"),
        ({"text": b"x"}, "expected str"),
        ({"raw": "x"}, "expected bytes"),
        ({"u64": ["<f8", [1], bytes(8)]}, "Everything.u64: expected dtype <u8"),
        ({"u64": ["<u8", [2], bytes(8)]}, "shape and bytes disagree"),
        ({"u64": ["<u8", [-1], bytes(8)]}, "not a size"),
        ({"u64": ["<u8", [True], bytes(8)]}, "not a size"),
        ({"u64": ["<u8", [2**40], bytes(8)]}, "not a size"),
        ({"u64": ["<u8", [1] * 5, bytes(8)]}, "at most 4 axes"),
        ({"u64": ["<u8", [0, 2**31, 2**31, 2**31], b""]}, "a shape that no array has"),
        ({"u64": ["<u8", 1, bytes(8)]}, "at most 4 axes"),
        ({"u64": ["<u8", [1], "12345678"]}, "and bytes"),
        ({"u64": ["<u8", [1]]}, "expected an array"),
        ({"u64": bytes(8)}, "expected an array"),
        ({"u64": ["|O", [1], bytes(8)]}, "expected dtype"),
        ({"many": b"x"}, "Everything.many: expected a list"),
        ({"many": [b"x", 1]}, r"Everything.many\[1\]: expected bytes"),
        ({"table": [1.0]}, "expected a map with text keys"),
        ({"table": {b"k": 1.0}}, "expected a map with text keys"),
        ({"by_party": {"a": 1}}, r"Everything.by_party\[...\]: expected an array"),
        ({"inner": 3}, "Everything.inner: expected a map of fields"),
        ({"inner": {"x": ["<i8", [0], b""]}}, "Everything.inner: field 'note' is missing"),
        ({"inner": {"x": ["<i8", [0], b""], "note": 1}}, "Everything.inner.note: expected str"),
    ],
)
def test_a_wrong_field_is_a_wire_error_that_names_it(changes, said):
    with pytest.raises(WireError, match=said):
        wire.from_fields(Everything, body(**changes))


@pytest.mark.parametrize("whole", [None, 3, "x", [], [["whole", 1]], {1: 2}])
def test_a_body_that_is_no_map_of_fields(whole):
    with pytest.raises(WireError):
        wire.from_fields(Everything, whole)


def test_shapes_have_to_be_stated_and_hold():
    msg = Vector(np.zeros((3, 2), np.uint64))
    wire.check_shapes(msg, {"y": (3, 2)})
    wire.check_shapes(msg, {"y": (None, 2)})
    for wrong in ((3,), (3, 2, 1), (2, 2), (None, 3), ()):
        with pytest.raises(WireError, match="Vector.y: expected shape"):
            wire.check_shapes(msg, {"y": wrong})
    with pytest.raises(TypeError, match="must state the shape of 'y'"):
        wire.check_shapes(msg, {})
    with pytest.raises(TypeError, match="no field 'z'"):
        wire.check_shapes(msg, {"y": (3, 2), "z": (1,)})


def test_shapes_of_optional_arrays_and_of_maps_of_arrays_can_be_stated():
    @message("L1", protocol="toy")
    class Loose:
        perhaps: F64 | None
        many: tuple[U64, ...]
        by_party: dict[Party, U64]

    ones = np.ones(2, np.uint64)
    wire.check_shapes(Loose(None, (ones, ones), {A: ones}), {"perhaps": (5,), "many": (2,), "by_party": (2,)})
    wire.check_shapes(Loose(None, (), {}), {})
    for name in ("perhaps", "many", "by_party"):
        with pytest.raises(WireError, match=f"Loose.{name}"):
            wire.check_shapes(Loose(np.ones(2), (ones, ones), {A: ones}), {name: (3,)})


HEADER = [1, 0, bytes(16), "1", "a", "b", 0, "toy.Empty", {}]


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        (0, 2, "another format"),
        (0, "1", "another format"),
        (0, True, "another format"),
        (1, 4, "unknown kind"),
        (1, -1, "unknown kind"),
        (1, "data", "unknown kind"),
        (2, "x", "expected bytes in 'run'"),
        (3, b"1", "expected str in 'scope'"),
        (4, 1, "expected str in 'sender'"),
        (5, None, "expected str in 'to'"),
        (6, 0.0, "expected int in 'seq'"),
        (6, True, "expected int in 'seq'"),
        (7, b"", "expected str in 'name'"),
    ],
)
def test_a_wrong_header_is_named(at, value, said):
    with pytest.raises(WireError, match=said):
        wire.unpack(msgpack.packb([*HEADER[:at], value, *HEADER[at + 1 :]]))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x93",
        msgpack.packb(HEADER[:-1]),
        msgpack.packb([*HEADER, 1]),
        msgpack.packb({"a": 1}),
        msgpack.packb(HEADER) + b"\0",
        msgpack.packb(HEADER)[:-1],
        msgpack.packb([*HEADER[:-1], msgpack.ExtType(5, b"x")]),
        msgpack.packb([*HEADER[:-1], msgpack.Timestamp(1)]),
        msgpack.packb([*HEADER[:-1], {1: 2}]),
        msgpack.packb([*HEADER[:-1], "x" * (wire.MAX_TEXT + 1)]),
        msgpack.packb([*HEADER[:-1], "ab"]).replace(b"ab", b"\xff\xfe"),
    ],
)
def test_bytes_that_are_no_frame(data):
    with pytest.raises(WireError):
        wire.unpack(data)


def test_a_frame_comes_back_as_it_was_packed():
    for kind in wire.KINDS:
        sent = Frame(kind, bytes(range(16)), "1/sub", A, B, 7, "toy.Empty", {"k": [1, b"x"]})
        got = wire.unpack(wire.pack(sent))
        assert dataclasses.replace(got, weight=0) == sent
        assert got.weight > len(wire.pack(sent))


@pytest.mark.parametrize(
    "msg", [example(), Vector(np.arange(9, dtype=np.uint64)), Empty()], ids=lambda m: type(m).__name__
)
def test_a_body_that_is_packed_once_for_many_makes_the_same_frame(msg):
    assert wire.pack(frame(msg, body=wire.pack_body(msg))) == wire.pack(frame(msg))


# ---- limits, before any memory is taken ------------------------------------------------------------------------------


def array32(n):
    return b"\xdd" + n.to_bytes(4, "big")


def map32(n):
    return b"\xdf" + n.to_bytes(4, "big")


def bin32(n):
    return b"\xc6" + n.to_bytes(4, "big")


HUGE = 2**32 - 1
CLAIMS = {
    "a long list": array32(HUGE),
    "a long map": map32(HUGE),
    "a list as long as allowed": array32(wire.MAX_ITEMS),
    "such lists within each other": array32(wire.MAX_ITEMS) * 1000,
    "such lists within each other, filled up": array32(wire.MAX_ITEMS) * 15 + b"\0" * 70_000,
    "a list of such lists": array32(1000) + array32(wire.MAX_ITEMS) * 1000,
    "such maps within each other": (map32(wire.MAX_ITEMS) + b"\xa1k") * 1000,
    "many empty maps": array32(wire.MAX_ITEMS) + b"\x80" * (wire.MAX_ITEMS - 1),
    "long bytes": bin32(HUGE),
    "long text": b"\xdb" + HUGE.to_bytes(4, "big"),
    "an extension": b"\xc9" + HUGE.to_bytes(4, "big") + b"\1",
    "a huge array": msgpack.packb([*HEADER[:-1], {"y": ["<u8", [2**31], b"1"]}])[:-1] + b"",
    "deep lists": b"\x91" * 100_000,
    "deep maps": b"\x81\xa0" * 50_000,
    "deep lists that end": b"\x91" * 900 + b"\x90",
}


@pytest.mark.parametrize("what", CLAIMS)
def test_small_frames_that_claim_much_take_no_memory(what):
    for data in (CLAIMS[what], msgpack.packb(HEADER)[:-1] + CLAIMS[what]):
        tracemalloc.start()
        try:
            with pytest.raises(WireError):
                wire.unpack(data)
            assert tracemalloc.get_traced_memory()[1] < 200_000
        finally:
            tracemalloc.stop()


def test_an_array_that_claims_more_than_it_brings_is_not_made():
    claim = msgpack.packb([*HEADER[:7], "toy.Vector", {"y": ["<u8", [2**28, 2**3], b"12345678"]}])
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="shape and bytes disagree"):
            wire.from_fields(Vector, wire.unpack(claim).body)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def test_the_number_of_values_in_all_levels_is_limited():
    row = [0] * (wire.MAX_OBJECTS // 32)
    wire.check_structure(msgpack.packb([row] * 31))
    with pytest.raises(WireError, match="more entries"):
        wire.check_structure(msgpack.packb([row] * 33))


def test_depth_is_limited_where_it_says():
    def deep(n):
        x = 0
        for _ in range(n):
            x = [x]
        return msgpack.packb(x)

    wire.check_structure(deep(wire.MAX_DEPTH))
    with pytest.raises(WireError, match="levels"):
        wire.check_structure(deep(wire.MAX_DEPTH + 1))


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | TEXT | st.binary(max_size=300),
        lambda inner: st.lists(inner, max_size=20) | st.dictionaries(TEXT, inner, max_size=20),
        max_leaves=60,
    )
)
def test_the_walk_over_the_bytes_agrees_with_msgpack(x):
    data = msgpack.packb(x)
    wire.check_structure(data)
    for broken in (data[:-1], data + b"\0"):
        with pytest.raises(WireError):
            wire.check_structure(broken)


# ---- random and mutated bytes ----------------------------------------------------------------------------------------

SEEDS = [
    wire.pack(frame(example())),
    wire.pack(frame(Vector(np.arange(9, dtype=np.uint64)))),
    wire.pack(frame(Empty())),
    wire.pack(Frame("pulse", bytes(16), "", A, B, 0, "pulse", 2)),
    wire.pack(Frame("abort", bytes(16), "", A, B, 0, "abort", ["p", "L1", "c"])),
    wire.pack(Frame("bye", bytes(16), "", A, B, 0, "bye", None)),
]


def mutated(rng):
    """Random bytes, or a real frame with bytes changed, cut, repeated, inserted or joined with another."""
    way = rng.randrange(8)
    if way == 0:
        return rng.randbytes(rng.randrange(64))
    data = bytearray(rng.choice(SEEDS))
    if way == 1:
        return bytes(data[: rng.randrange(len(data))])
    if way == 2:
        other = rng.choice(SEEDS)
        return bytes(data[: rng.randrange(len(data))]) + other[rng.randrange(len(other)) :]
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(data))
        if way == 3:
            data[at] ^= 1 << rng.randrange(8)
        elif way == 4:
            data[at] = rng.randrange(256)
        elif way == 5:
            data[at:at] = rng.randbytes(rng.randrange(1, 5))
        elif way == 6:
            del data[at : at + rng.randrange(1, 9)]
            data = data or bytearray(1)
        else:
            data[at:at] = rng.choice((array32(HUGE), map32(70), bin32(3), b"\xd9\x05", b"\xcb", b"\xc7\x01"))
    return bytes(data)


def try_bytes(count, seed):
    """Every frame that is taken in is complete; everything else is a WireError. Returns how many were taken in."""
    rng = random.Random(seed)
    box, taken = Mailbox(B), 0
    for _ in range(count):
        data = mutated(rng)
        try:
            got = wire.unpack(data)
            taken += 1
            for kind in (Everything, Vector, Empty):
                try:
                    made = wire.from_fields(kind, got.body)
                    wire.check_shapes(made, dict.fromkeys(wire.array_fields(kind), (None,)))
                except WireError:
                    pass
        except WireError:
            pass
        box.put(A, data)  # never raises
        if len(box.failed) or rng.random() < 0.01:
            box = Mailbox(B)
    return taken


def test_a_hundred_thousand_random_and_mutated_bytes_raise_nothing_but_wire_errors():
    assert try_bytes(100_000, seed=1) > 500  # some changes leave a frame whole


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=400))
def test_any_bytes_at_all(data):
    with contextlib.suppress(WireError):
        wire.unpack(data)
    Mailbox(B).put(A, data)


# ---- canonical form --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Params:
    sites: tuple[str, ...]
    n: int


DIFFERENT = [
    None,
    0,
    1,
    1.0,
    True,
    False,
    "1",
    b"1",
    [],
    [[]],
    {},
    {"a": 1},
    {"a": 2},
    ["map", []],
    ["map", [["a", 1]]],
    ["list", ["map", []]],
    ["array", "<i8", [1], bytes(8)],
    np.zeros(1, np.int64),
    np.zeros(1, np.uint64),
    np.zeros((1, 1), np.int64),
    Params(("a",), 1),
    Params(("a",), 2),
    Params(("b",), 1),
    ["Params", [["sites", ["a"]], ["n", 1]]],
    2**64,
    2**70,
    -(2**70),
    ["int", ["0x10000000000000000"]],
    "a",
    ["a", "b"],
    ["ab"],
    ["a", ["b"]],
]


def test_different_values_have_different_digests_and_equal_ones_the_same():
    assert len({wire.digest(x) for x in DIFFERENT}) == len(DIFFERENT)
    assert wire.digest({"b": 1, "a": 2}) == wire.digest({"a": 2, "b": 1})
    assert wire.digest((1, 2)) == wire.digest([1, 2])
    assert wire.digest(np.int64(3), np.float64(0.5)) == wire.digest(3, 0.5)
    assert wire.digest(np.arange(3)) == wire.digest(np.arange(3).astype(">i8"))
    assert wire.digest(Party("x")) == wire.digest("x")
    assert wire.digest("a", "b") != wire.digest("ab") != wire.digest(["a", "b"])


@pytest.mark.parametrize("value", [object(), {1, 2}, np.array([object()]), lambda: 0, Params])
def test_what_has_no_canonical_form_is_refused(value):
    with pytest.raises(TypeError, match="canonical"):
        wire.digest(value)


def test_letters_of_every_kind_travel():
    letters = string.printable + "äß漢🧬\0"
    assert through(Inner(np.arange(1), letters)).note == letters
