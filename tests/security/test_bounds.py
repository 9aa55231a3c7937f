"""Every public argument has a bound, which is the same on every back end and is checked before SQL.

Methods and arguments are found by reflection: a new one without a bound in ``bounds.py`` fails here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, fields
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

import pytest
from django.test import override_settings

from helix_store.core.limits import (
    MAX_CALL_BYTES,
    MAX_CALL_ITEMS,
    MAX_CHECKPOINT_ID_CHARACTERS,
    MAX_DIRECTORY_BYTES,
    MAX_ID_BYTES,
    MAX_ID_CHARACTERS,
    MAX_METADATA_BYTES,
    MAX_REASON_BYTES,
    MAX_TAGS_BYTES,
    MAX_TITLE_BYTES,
    Limits,
)
from helix_store.core.patches import MAX_MOVED_ELEMENTS, MAX_OPERATIONS
from helix_store.core.typed_json import MAX_EQUAL_HASHES
from helix_store.core.types import SubSessionRef
from helix_store.exceptions import (
    ConflictError,
    FencedOutError,
    InvalidCursor,
    InvalidPayload,
    InvalidQuery,
    LimitExceeded,
    LockLostError,
    NotFoundError,
    StaleStateError,
    StreamClosed,
    StreamTruncated,
)
from helix_store.testing.state_store.samples import contents
from tests.cells import Cells, for_each
from tests.databases import ALIASES
from tests.security.arguments import (
    ARGUMENTS,
    BACKENDS,
    ENTRIES,
    METHODS,
    Argument,
    World,
    parameters,
    paths,
)
from tests.security.bounds import COLLECTIONS, LIMITS, Bound, Growing, bound_of

REFUSALS: Final = (InvalidPayload, LimitExceeded, InvalidQuery, InvalidCursor)
ANSWERS: Final = (
    ConflictError,
    FencedOutError,
    LockLostError,
    NotFoundError,
    StaleStateError,
    StreamClosed,
    StreamTruncated,
)
"""Errors of calls whose arguments were accepted."""


@pytest.fixture
def new_world(request: pytest.FixtureRequest) -> Iterator[Callable[[str], World]]:
    """Creates an empty world of one back end."""
    for database in ALIASES:
        request.getfixturevalue(f"{database}_db")
    with override_settings(HELIX_STORE={"LIMITS": asdict(LIMITS)}):
        yield World


def test_the_docs_state_the_bounds() -> None:
    text = (Path(__file__).parents[2] / "docs" / "payloads.md").read_text()
    stated = [
        f"{MAX_ID_CHARACTERS} characters and {MAX_ID_BYTES} bytes",
        f"{MAX_CHECKPOINT_ID_CHARACTERS} characters",
        *(
            f"| {size // 1024} KiB |"
            for size in (
                MAX_TITLE_BYTES,
                MAX_DIRECTORY_BYTES,
                MAX_REASON_BYTES,
                MAX_TAGS_BYTES,
                MAX_METADATA_BYTES,
            )
        ),
        f"| {MAX_CALL_ITEMS:,} |",
        f"{MAX_CALL_BYTES // 2**20} MiB",
        f"| {MAX_EQUAL_HASHES} |",
        f"{MAX_OPERATIONS:,} operations",
        f"2**{MAX_MOVED_ELEMENTS.bit_length() - 1} list elements",
        *(field.name for field in fields(Limits)),
    ]
    assert [one for one in stated if one not in text] == []


def test_every_argument_has_a_bound() -> None:
    without = [
        f"{method} {path}"
        for method, name in parameters()
        for path in paths(method, name)
        if bound_of(method, path) is None and name not in COLLECTIONS
    ]
    assert without == [], (
        "Add the bound of each new argument to tests/security/bounds.py and docs/payloads.md"
    )


@pytest.mark.parametrize("method", dict.fromkeys(argument.method for argument in ARGUMENTS))
def test_an_argument_is_accepted_at_its_bound_and_refused_beyond_it(
    new_world: Callable[[str], World], method: str, security_counts: Counter[str]
) -> None:
    with Cells() as cells:
        for backend, argument in product(BACKENDS, ARGUMENTS):
            if argument.method != method or not argument.exists_in(backend):
                continue
            with cells.check(f"{argument} {backend}"):
                check = _check_bound if isinstance(argument.bound, Bound) else _check_growing
                security_counts["values at and beyond bounds"] += check(argument, partial(new_world, backend))


def _check_bound(argument: Argument, new_world: Callable[[], World]) -> int:
    bound = argument.bound
    assert isinstance(bound, Bound)
    world = _world_for(argument, new_world)
    for value in bound.beyond:
        call = argument.prepared(world, value)
        with world.untouched(), pytest.raises(REFUSALS):
            call()
    for value in bound.within:
        call = argument.prepared(_world_for(argument, new_world), value)
        with suppress(*ANSWERS):
            call()
    return len(bound.beyond) + len(bound.within)


def _check_growing(argument: Argument, new_world: Callable[[], World]) -> int:
    """A payload is accepted up to its last byte."""
    assert isinstance(argument.bound, Growing)
    build = argument.bound.build
    world = _world_for(argument, new_world)
    before = contents(world.store, "session")
    of_no_type = argument.prepared(world, object())
    with world.untouched(), pytest.raises(REFUSALS):
        of_no_type()
    length = LIMITS.max_state_bytes
    for _ in range(5):
        with pytest.raises(LimitExceeded) as caught:
            argument.prepared(world, build("x" * length))()
        length -= caught.value.actual - caught.value.limit
        with suppress(*ANSWERS):
            try:
                argument.prepared(_world_for(argument, new_world), build("x" * length))()
            except LimitExceeded:
                continue
        break
    with pytest.raises(LimitExceeded):
        argument.prepared(world, build("x" * (length + 1)))()
    assert contents(world.store, "session") == before
    return 4


def _world_for(argument: Argument, new_world: Callable[[], World]) -> World:
    world = new_world()
    # Made before statements are counted.
    if argument.method in METHODS:
        getattr(world, argument.method.partition(".")[0])
    return world


_LARGEST_CALLS: Final[dict[str, Callable[[World], Any]]] = {
    "append_messages": lambda world: world.store.append_messages(
        "session", [{"role": "user"}] * MAX_CALL_ITEMS
    ),
    "append_messages by bytes": lambda world: world.store.append_messages(
        "session", [{"role": "user", "text": "x" * (2**16 - 25)}] * 2**10
    ),
    "add_sub_session_refs": lambda world: world.store.add_sub_session_refs(
        "session",
        [SubSessionRef(sub_session_id=str(number), agent_type="agent") for number in range(MAX_CALL_ITEMS)],
    ),
    "write_sync": lambda world: world.streams.write_sync("stream", [{"type": "t"}] * MAX_CALL_ITEMS),
    "record_entries": lambda world: world.usage.record_entries([ENTRIES["custom"]] * MAX_CALL_ITEMS),
    "add_messages": lambda world: world.graph.add_messages("graph", [{"role": "user"}] * MAX_CALL_ITEMS),
}


@for_each("backend", BACKENDS)
@for_each("call", _LARGEST_CALLS)
def test_the_largest_call_is_stored(new_world: Callable[[str], World], backend: str, call: str) -> None:
    if (call, backend) != ("add_messages", "memory"):
        with override_settings(HELIX_STORE={}):
            _LARGEST_CALLS[call](new_world(backend))


@for_each("backend", BACKENDS)
def test_more_bytes_than_one_call_takes_are_refused(new_world: Callable[[str], World], backend: str) -> None:
    world = new_world(backend)
    with override_settings(HELIX_STORE={}):
        for write, key, name in (
            (world.store.append_messages, "role", "session"),
            (world.streams.write_sync, "type", "stream"),
        ):
            largest = [{key: "t", "text": "x" * (2**18 - 100)}] * 257
            with world.untouched(), pytest.raises(LimitExceeded) as caught:
                write(name, largest)
            assert caught.value.limit == MAX_CALL_BYTES
