"""Typed JSON: what comes back, what is refused, and that no text can make it do anything else."""

from __future__ import annotations

import json
import pickle
import random
import sys
import threading
import uuid
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Context, Decimal, getcontext, localcontext
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helix_store.core.limits import MAX_DEPTH
from helix_store.core.payloads import decode, encode
from helix_store.core.typed_json import MAX_EQUAL_HASHES, dumps, loads
from helix_store.exceptions import (
    HelixStoreError,
    IntegrityFault,
    InvalidPayload,
    LimitExceeded,
)
from tests.cells import for_each
from tests.strategies import HOSTILE_DOCUMENTS, doubling, exact_form, texts

Pair = namedtuple("Pair", "first second")


class SpecialDate(date):
    pass


def same(first: Any, second: Any) -> bool:
    """Equal with types, key order and all that ``==`` overlooks; sets in whatever order."""
    if type(first) is not type(second):
        return False
    if type(first) in (list, tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if type(first) is dict:
        return same(list(first.items()), list(second.items()))
    if type(first) in (set, frozenset):
        return same(sorted(first, key=dumps), sorted(second, key=dumps))
    if type(first) is datetime:
        return (first, first.utcoffset(), first.fold) == (second, second.utcoffset(), second.fold)
    return exact_form(first) == exact_form(second)


# --- By example -----------------------------------------------------------------------------------

EXAMPLES: list[Any] = [
    None,
    True,
    -0.0,
    10**40,
    "\x00\ud800",
    (),
    (1,),
    ((), [()], {"a": ()}),
    set(),
    {1, "1", 2.5, None, (1, frozenset({b"x"}))},
    frozenset({1, frozenset()}),
    b"",
    bytes(range(256)),
    datetime(1, 1, 1),  # noqa: DTZ001
    datetime(9999, 12, 31, 23, 59, 59, 999_999),  # noqa: DTZ001
    datetime(2026, 10, 25, 2, 30, fold=1),  # noqa: DTZ001
    datetime(2026, 1, 1, tzinfo=UTC),
    datetime(2026, 1, 1, 1, 2, 3, 4, tzinfo=timezone(timedelta(hours=-5, minutes=-30, seconds=-7))),
    datetime(2000, 1, 1, tzinfo=timezone(timedelta(microseconds=-1))),
    datetime(2000, 1, 1, 1, 1, 1, 1, fold=1, tzinfo=timezone(timedelta(hours=23, microseconds=7))),
    date.min,
    date(2026, 2, 28),
    Decimal("1.10"),
    Decimal("-0"),
    Decimal("1E+5"),
    Decimal("1e-400"),
    Decimal("NaN"),
    Decimal("sNaN7"),
    Decimal("-Infinity"),
    Decimal("7E+999999999"),
    uuid.UUID(int=0),
    uuid.UUID("018f6d5e-0000-7000-8000-000000000000"),
    {1: "int", "1": "text", 2.5: "float", None: "none", b"1": "bytes"},
    {True: "bool", date(2026, 1, 1): "date", Decimal("1.5"): "decimal", (1, "a"): "tuple"},
    {datetime(2026, 1, 1, tzinfo=UTC): {frozenset({1}): {uuid.UUID(int=1): []}}},
    {"a": 1, 2: "b", "c": 3},
]

LOOK_LIKE_TAGS: list[Any] = [
    {tag: content}
    for tag in ("$datetime", "$tuple", "$set", "$dict", "$bytes", "$", "$unknown", "$$dict")
    for content in ("2026-01-01", [1, 2], [["a", 1]], {"$tuple": [1]}, None, 5)
] + [
    {"$tuple": [1], "other": 2},
    {"__type": "Date", "value": "2020-01-01"},
    {"__type": 5},
    {"$dict": [["$dict", [["$dict", []]]]]},
    [{"$set": []}, ({"$set": []},), {1: {"$set": []}}],
]


@for_each("value", [*EXAMPLES, *LOOK_LIKE_TAGS, *HOSTILE_DOCUMENTS])
def test_value_and_type_come_back(value: Any) -> None:
    back = loads(dumps(value))
    assert same(back, value), (back, value)
    nested = {"outer": [value, (value,)]}
    if value is not HOSTILE_DOCUMENTS[-1]:
        assert same(loads(dumps(nested)), nested)


@for_each("value", HOSTILE_DOCUMENTS)
def test_plain_values_are_written_as_any_other_payload(value: Any) -> None:
    assert dumps(value) == encode(value)


def test_a_zone_comes_back_as_its_offset() -> None:
    value = datetime(2026, 7, 1, 12, tzinfo=ZoneInfo("Europe/Berlin"))
    back = loads(dumps(value))
    assert back == value
    assert back.tzinfo == timezone(timedelta(hours=2))


def test_equal_sets_have_one_text() -> None:
    names = [f"name-{number}" for number in range(50)]
    assert dumps(set(names)) == dumps({*names[25:], *names[:25]})
    assert dumps(frozenset({(1, 2), (0, 3)})) == dumps(frozenset({(0, 3), (1, 2)}))


def test_the_callers_decimal_context_plays_no_part() -> None:
    value = Decimal("1.23456789E+50")
    text = dumps(value)
    with localcontext(Context(prec=3, capitals=0, traps=[])):
        assert dumps(value) == text
        assert str(loads(text)) == str(value)
        with pytest.raises(IntegrityFault):
            loads('{"$decimal":"no number"}')
    assert getcontext().prec == 28


@for_each(
    "value",
    [
        float("nan"),
        float("inf"),
        object(),
        time(1, 2),
        timedelta(1),
        1 + 2j,
        range(3),
        bytearray(b"x"),
        memoryview(b"x"),
        Pair(1, 2),
        SpecialDate(2026, 1, 1),
        OrderedDict(a=1),
        len,
        int,
        iter(()),
    ],
    ids=lambda value: type(value).__name__,
)
@for_each("place", [lambda v: v, lambda v: [v], lambda v: {1: v}, lambda v: (1, v)])
def test_refuses_every_other_type(value: Any, place: Callable[[Any], Any]) -> None:
    with pytest.raises(InvalidPayload):
        dumps(place(value))


def test_says_where_a_value_is_wrong_and_not_what_it_is() -> None:
    with pytest.raises(InvalidPayload) as refused:
        dumps({"a": [1, ({"b": object()},)]}, path="/metadata")
    assert refused.value.path == "/metadata/a/1/0/b"
    assert "object" in refused.value.reason


def test_refuses_what_contains_itself() -> None:
    looped: list[Any] = []
    looped.append((looped,))
    with pytest.raises(InvalidPayload, match="itself"):
        dumps(looped)
    table: dict[Any, Any] = {1: 2}
    table[3] = {"inner": table}
    with pytest.raises(InvalidPayload, match="itself"):
        dumps(table)


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: (v,), lambda v: {1: v}, lambda v: {"k": v}])
def test_refuses_what_is_too_deep(wrap: Callable[[Any], Any]) -> None:
    value: Any = 1
    for _ in range(100_000):
        value = wrap(value)
    with pytest.raises(LimitExceeded) as refused:
        dumps(value)
    assert refused.value.name == "depth"
    while type(value) is not int:  # taken apart by hand: freeing it at once would exhaust the C stack
        (value,) = value.values() if type(value) is dict else value


def test_takes_the_deepest_value_in_a_small_stack() -> None:
    value: Any = []
    for _ in range(MAX_DEPTH - 1):
        value = [value]
    limit = sys.getrecursionlimit()
    depth = 0
    frame = sys._getframe()
    while frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
    sys.setrecursionlimit(depth + 2 * MAX_DEPTH + 50)
    try:
        assert loads(dumps(value)) == value
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.thorough
def test_refuses_a_small_graph_that_stands_for_a_huge_text() -> None:
    with pytest.raises(LimitExceeded):
        dumps(doubling(100))
    value: Any = "lol" * 30_000
    for _ in range(60):
        value = (value, value)
    with pytest.raises(LimitExceeded):
        dumps(value)


_MODULUS = sys.hash_info.modulus


@for_each("build", [set, frozenset, dict.fromkeys], ids=["set", "frozenset", "dict"])
@for_each(
    "key",
    [lambda n: n * _MODULUS, lambda n: Decimal(n * _MODULUS), lambda n: (n * _MODULUS, "x")],
    ids=["int", "Decimal", "tuple"],
)
def test_refuses_many_keys_with_one_hash(build: Callable[[Any], Any], key: Callable[[int], Any]) -> None:
    most = build([key(n) for n in range(MAX_EQUAL_HASHES)])
    assert loads(dumps(most)) == most
    with pytest.raises(LimitExceeded) as caught:
        dumps(build([key(n) for n in range(MAX_EQUAL_HASHES + 1)]))
    assert (caught.value.limit, caught.value.actual) == (MAX_EQUAL_HASHES, MAX_EQUAL_HASHES + 1)


@pytest.mark.parametrize("form", ['{"$set":[%s]}', '{"$frozenset":[%s]}', '{"$dict":[%s]}'])
def test_a_stored_text_with_many_keys_of_one_hash_is_an_integrity_fault(form: str) -> None:
    item = "[%d,0]" if "dict" in form else "%d"
    text = form % ",".join(item % (n * _MODULUS) for n in range(16_000))
    with pytest.raises(IntegrityFault):
        loads(text)


def test_counts_the_limit_on_the_text() -> None:
    text = dumps({(1,): b"x" * 100})
    assert dumps({(1,): b"x" * 100}, limit=len(text)) == text
    with pytest.raises(LimitExceeded) as refused:
        dumps({(1,): b"x" * 100}, limit=len(text) - 1, name="max_message_bytes")
    assert (refused.value.name, refused.value.limit) == ("max_message_bytes", len(text) - 1)


# --- Texts that nobody wrote ----------------------------------------------------------------------

CORRUPT = [
    "",
    "{",
    "NaN",
    "1e999",
    "[-1e999]",
    '{"$unknown":[]}',
    '{"$os.system":["true"]}',
    '{"$":""}',
    '{"$tuple":{}}',
    '{"$tuple":"ab"}',
    '{"$set":[1,1]}',
    '{"$set":[1,1.0]}',
    '{"$set":[[]]}',
    '{"$set":[{"$decimal":"sNaN"}]}',
    '{"$frozenset":[{}]}',
    '{"$dict":{}}',
    '{"$dict":[1]}',
    '{"$dict":["ab"]}',
    '{"$dict":[[1]]}',
    '{"$dict":[[1,2,3]]}',
    '{"$dict":[[[],2]]}',
    '{"$dict":[[1,2],[1,3]]}',
    '{"$dict":[{"$tuple":[1,2]}]}',
    '{"$datetime":5}',
    '{"$datetime":""}',
    '{"$datetime":"2026-13-01T00:00:00"}',
    '{"$datetime":"20260101T000000"}',
    '{"$datetime":"2026-01-01"}',
    '{"$datetime":"2026-01-01T00:00:00Z"}',
    '{"$datetime":"2026-01-01T00:00:00 fold fold"}',
    '{"$date":"2026-W01-1"}',
    '{"$date":"20260101"}',
    '{"$decimal":""}',
    '{"$decimal":" 1"}',
    '{"$decimal":"1_0"}',
    '{"$decimal":"1E5"}',
    '{"$decimal":"1E+99999999999999999999"}',
    '{"$decimal":1.5}',
    '{"$uuid":"{018f6d5e-0000-7000-8000-000000000000}"}',
    '{"$uuid":"018F6D5E-0000-7000-8000-000000000000"}',
    '{"$bytes":"eA"}',
    '{"$bytes":"eA==="}',
    '{"$bytes":"e A=="}',
    '{"$bytes":"eB=="}',
    '{"$bytes":["eA=="]}',
    "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1),
    "[" * 100_000,
    '{"a":' * 500 + "1" + "}" * 500,
    '{"$tuple":[' * 150 + "]}" * 150,
]


@for_each("text", CORRUPT, ids=lambda text: text[:40])
def test_a_text_that_nobody_wrote_is_an_integrity_fault(text: str) -> None:
    with pytest.raises(IntegrityFault) as fault:
        loads(text)
    assert fault.value.__cause__ is None
    assert fault.value.__context__ is None
    if len(text) > 10:
        assert text[2:12] not in str(fault.value)


@pytest.mark.parametrize("text", [None, b"{}", 7, []])
def test_what_is_no_text_is_an_integrity_fault(text: Any) -> None:
    with pytest.raises(IntegrityFault):
        loads(text)


# --- By property ----------------------------------------------------------------------------------


def typed_keys() -> st.SearchStrategy[Any]:
    scalars = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        texts(8),
        st.binary(max_size=8),
        st.uuids(),
        st.dates(),
        st.datetimes(),
        st.datetimes(timezones=st.timedeltas(timedelta(hours=-23), timedelta(hours=23)).map(timezone)),
        st.decimals(allow_nan=False),
    )
    return st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
        max_leaves=4,
    )


def typed_values() -> st.SearchStrategy[Any]:
    tags = st.sampled_from(["$dict", "$tuple", "$set", "$datetime", "$bytes", "$", "$x", "__type"])
    return st.recursive(
        typed_keys(),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.lists(inner, max_size=4).map(tuple),
            st.sets(typed_keys(), max_size=4),
            st.dictionaries(typed_keys(), inner, max_size=4),
            st.dictionaries(texts(5), inner, max_size=4),
            st.dictionaries(tags, inner, min_size=1, max_size=2),
        ),
        max_leaves=12,
    )


@given(typed_values())
def test_any_typed_value_comes_back(value: Any) -> None:
    text = dumps(value)
    back = loads(text)
    assert same(back, value)
    assert dumps(back) == text


# --- In numbers -----------------------------------------------------------------------------------


class RandomValues:
    """Typed values from a seeded source, ten times faster than a strategy."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311  test data
        self.scalars: list[Callable[[], Any]] = [
            lambda: None,
            lambda: self.random.random() < 0.5,
            lambda: self.random.randint(-(10**25), 10**25),
            lambda: self.random.uniform(-1e300, 1e300),
            lambda: -0.0,
            self.text,
            lambda: self.random.randbytes(self.random.randrange(9)),
            lambda: uuid.UUID(int=self.random.getrandbits(128)),
            lambda: date.fromordinal(self.random.randint(1, date.max.toordinal())),
            self.datetime,
            lambda: Decimal(self.random.randint(-(10**20), 10**20)).scaleb(self.random.randint(-50, 50)),
        ]

    def text(self) -> str:
        alphabet = 'ab$"\\\x00\ud800\udc00\U0001f600é~{}[]'
        return "".join(self.random.choices(alphabet, k=self.random.randrange(8)))

    def datetime(self) -> datetime:
        offset = self.random.choice(
            [None, UTC, timezone(timedelta(seconds=self.random.randint(-80_000, 80_000)))]
        )
        moment = datetime(2, 1, 1, tzinfo=offset) + timedelta(microseconds=self.random.getrandbits(57))
        return moment.replace(fold=self.random.randrange(2))

    def key(self, depth: int = 2) -> Any:
        if depth and self.random.random() < 0.2:
            kind = self.random.choice([tuple, frozenset])
            return kind(self.key(depth - 1) for _ in range(self.random.randrange(3)))
        return self.random.choice(self.scalars)()

    def value(self, depth: int = 4) -> Any:
        if not depth or self.random.random() < 0.35:
            return self.key()
        size = self.random.randrange(4)
        kind = self.random.randrange(6)
        if kind == 0:
            return [self.value(depth - 1) for _ in range(size)]
        if kind == 1:
            return tuple(self.value(depth - 1) for _ in range(size))
        if kind == 2:
            return {self.key() for _ in range(size)}
        if kind == 3:
            return {self.key(): self.value(depth - 1) for _ in range(size)}
        if kind == 4:
            return {self.text(): self.value(depth - 1) for _ in range(size)}
        tag = self.random.choice(
            ["$dict", "$tuple", "$set", "$frozenset", "$datetime", "$decimal", "$", "$no"]
        )
        return {tag: self.value(depth - 1)}


@pytest.mark.thorough
def test_ten_thousand_random_values_come_back_with_value_and_type() -> None:
    source = RandomValues(20260101)
    kinds = set()
    for number in range(10_000):
        value = source.value()
        kinds.add(type(value))
        back = loads(dumps(value))
        assert same(back, value), (number, value, back)
    assert len(kinds) >= 14


WATCHED = (
    "import",
    "exec",
    "compile",
    "open",
    "pickle",
    "marshal",
    "os.",
    "subprocess.",
    "socket.",
    "ctypes.",
)
_watching = threading.local()


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    events = getattr(_watching, "events", None)
    if events is not None and event.startswith(WATCHED):
        events.append((event, arguments))


sys.addaudithook(_watch)


@contextmanager
def watching() -> Iterator[list[Any]]:
    """What this thread imports, runs, opens or unpickles, as the interpreter itself reports it."""
    _watching.events = []
    try:
        yield _watching.events
    finally:
        _watching.events = None


def mutate(source: random.Random, text: str) -> str:
    characters = list(text)
    pieces = [
        '{"$dict":',
        '{"$set":[',
        '"$datetime"',
        '"$tuple"',
        '"$object"',
        '"os.system"',
        "__import__",
        "[[",
        "]}",
        "1e999",
        "NaN",
        "null",
        "\x00",
        "\ud800",
        "~",
        "-",
    ]
    for _ in range(source.randint(1, 4)):
        place = source.randrange(len(characters) + 1)
        kind = source.randrange(5)
        if kind == 0 and characters:
            del characters[place : place + source.randint(1, 5)]
        elif kind == 1:
            characters[place:place] = source.choice(pieces)
        elif kind == 2 and place < len(characters):
            characters[place] = chr(source.randrange(0x110000))
        elif kind == 3:
            characters[place:place] = characters[: source.randint(1, 20)]
        else:
            other = source.randrange(len(characters) + 1)
            characters[place:place] = characters[min(place, other) : max(place, other)][:40]
    return "".join(characters)


@pytest.mark.thorough
def test_ten_thousand_mutated_texts_load_or_are_integrity_faults_and_nothing_else() -> None:
    values = RandomValues(7)
    source = values.random
    loaded = refused = 0
    for _ in range(10_000):
        text = mutate(source, dumps(values.value()))
        with watching() as events:
            try:
                value = loads(text)
            except IntegrityFault:
                refused += 1
                continue
            finally:
                assert events == []
        loaded += 1
        assert same(loads(dumps(value)), value)
    assert loaded > 300
    assert refused > 5_000


def test_the_watch_of_that_test_sees_what_it_is_there_for() -> None:
    with watching() as events:
        eval("1 + 1")  # noqa: S307
        pickle.loads(pickle.dumps(Decimal))  # noqa: S301
    assert {"compile", "exec", "pickle.find_class"} <= {event for event, _ in events}


# --- Shown red ------------------------------------------------------------------------------------


def naive_dumps(value: Any) -> str:
    """Tags without an escape, as the original wrote them."""
    if type(value) is datetime:
        value = {"__type": "Date", "value": value.isoformat()}
    return json.dumps(value)


def naive_loads(text: str) -> Any:
    def revive(value: dict[str, Any]) -> Any:
        if value.get("__type") == "Date":
            return datetime.fromisoformat(value["value"])
        if "__type" in value and not isinstance(value["__type"], str):
            raise HelixStoreError("corrupt")
        return value

    return json.loads(text, object_hook=revive)


@pytest.mark.parametrize("data", [{"__type": "Date", "value": "2020-01-01"}, {"__type": 5}])
def test_user_data_that_looks_like_a_tag_survives_where_tags_without_an_escape_lose_it(data: Any) -> None:
    with suppress(HelixStoreError):
        assert naive_loads(naive_dumps(data)) != data
    assert same(loads(dumps(data)), data)


def test_no_plain_payload_is_ever_revived() -> None:
    for document in LOOK_LIKE_TAGS:
        if type(document) is dict and "$tuple" not in document:
            assert decode(encode(document)) == document
