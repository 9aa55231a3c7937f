"""What clients of one session were told, and whether one order of whole writes explains it.

Each call has the moments of its begin and its end. A call without an answer may have happened or not. The
versions of a session are the order of its writes, so no search is needed.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from helix_store.exceptions import (
    ConflictError,
    FencedOutError,
    HelixStoreError,
    OutcomeUnknown,
    StaleStateError,
)

__all__ = ["Event", "History", "faults_of"]

_REFUSALS: Final = (ConflictError, FencedOutError, StaleStateError)


@dataclass
class Event:
    """A call. ``result`` is ``ok``, ``fail`` (refused, nothing written) or ``info`` (nobody knows).

    ``begin`` and ``end`` are nanoseconds of a clock that all processes of the machine share.
    """

    call: Literal["step", "append", "status", "read", "acquire", "usage"]
    begin: int
    end: int = -1
    client: int = 0
    result: Literal["ok", "fail", "info"] = "info"
    error: HelixStoreError | None = None
    items: list[int] = field(default_factory=list)
    """What a step adds to list and messages, an append to messages; the id of a usage entry."""
    version: int | None = None
    """After a write, or of what was read."""
    expected_version: int | None = None
    token: int | None = None
    expected: list[str] = field(default_factory=list)
    status: str | None = None
    """What was set, was read, or has caused a refusal."""
    count: int | None = None
    read_list: list[int] = field(default_factory=list)
    read_messages: list[int] = field(default_factory=list)
    read_entries: list[int] = field(default_factory=list)


class History:
    """Records the calls of one client, or of several."""

    def __init__(self, events: Sequence[Event] = (), *, client: int = 0) -> None:
        self.events = list(events)
        self._client = client

    @contextmanager
    def calling(self, call: Any, **arguments: Any) -> Iterator[Event]:
        """Record a call; an error of the store ends here, with its answer recorded."""
        event = Event(call, time.monotonic_ns(), client=self._client, **arguments)
        self.events.append(event)
        try:
            yield event
            event.result = "ok" if event.result == "info" else event.result
        except HelixStoreError as exc:
            event.error = exc
            event.result = "info" if exc.applied == "unknown" else "fail"
        finally:
            event.end = time.monotonic_ns()


def faults_of(history: History) -> list[str]:
    """What no order of whole writes explains. The last event is a read after all other calls."""
    events = history.events
    return [fault for check in _CHECKS for fault in check(events, events[-1])]


def _writes(events: Sequence[Event]) -> list[Event]:
    """Acknowledged writes that have a version, in its order."""
    made = [e for e in events if e.result == "ok" and e.call in ("step", "status") and e.version is not None]
    return sorted(made, key=lambda event: event.version or 0)


def _after(events: Sequence[Event], measure: Callable[[Event], int]) -> Iterator[tuple[Event, Event]]:
    """Each call with the one of the greatest measure among those that ended before it began."""
    by_end = iter(sorted(events, key=lambda event: event.end))
    ended = next(by_end, None)
    greatest: Event | None = None
    for later in sorted(events, key=lambda event: event.begin):
        while ended is not None and ended.end < later.begin:
            if greatest is None or measure(ended) > measure(greatest):
                greatest = ended
            ended = next(by_end, None)
        if greatest is not None:
            yield greatest, later


def _versions(events: Sequence[Event], last: Event) -> Iterator[str]:
    """Two writes have two versions, and a guarded one has the next after the version that it expects."""
    for version, count in Counter(event.version for event in _writes(events)).items():
        if count > 1:
            yield f"{count} writes have version {version}"
    for event in _writes(events):
        if event.expected_version is not None and event.version != event.expected_version + 1:
            yield f"a write on version {event.expected_version} has version {event.version}"


def _real_time(events: Sequence[Event], last: Event) -> Iterator[str]:
    """What has ended before a call begins is older than it."""
    known = [e for e in events if e.result == "ok" and e.version is not None]
    for earlier, later in _after(known, lambda event: event.version or 0):
        if (later.version or 0) < (earlier.version or 0):
            yield f"{later.call} has version {later.version} after {earlier.call} {earlier.version}"


def _items(
    events: Sequence[Event], calls: tuple[str, ...], found: list[int], reads: Callable[[Event], list[int]]
) -> Iterator[str]:
    """Everything acknowledged is there once, nothing refused is, and every read was a prefix of the end."""
    counts = Counter(found)
    place = {item: number for number, item in reversed([*enumerate(found)])}
    known = set()
    for event in events:
        if event.call not in calls:
            continue
        known.update(event.items)
        for item in event.items:
            if counts[item] > 1:
                yield f"{item} is there {counts[item]} times"
            if event.result == "ok" and not counts[item]:
                yield f"{item} was acknowledged and is lost (lost update)"
            if event.result == "fail" and counts[item]:
                yield f"{item} was refused and is there (G1a)"
        places = [place[item] for item in event.items if counts[item]]
        if len(places) not in (0, len(event.items)):
            yield f"a part of {event.items} is there (G1b)"
        if places and places != list(range(places[0], places[0] + len(places))):
            yield f"{event.items} are not in order"
    for item in found:
        if item not in known:
            yield f"nobody wrote {item}"
    for event in events:
        if event.call == "read" and event.result == "ok":
            seen = reads(event)
            if seen != found[: len(seen)]:
                yield f"a read saw {seen[-3:]}, which the end does not begin with (G1c, or no order)"


def _lists(events: Sequence[Event], last: Event) -> Iterator[str]:
    yield from _items(events, ("step",), last.read_list, lambda event: event.read_list)
    order = [item for event in _writes(events) if event.call == "step" for item in event.items]
    known = set(order)
    if [item for item in last.read_list if item in known] != order:
        yield "the list is not in the order of the versions (G0)"
    versions = [event.version or 0 for event in _writes(events) if event.call == "step" for _ in event.items]
    for event in events:
        if event.call == "read" and event.result == "ok":
            made = order[: bisect_right(versions, event.version or 0)]
            if [item for item in event.read_list if item in known] != made:
                yield f"a read of version {event.version} saw the list of another version"


def _messages(events: Sequence[Event], last: Event) -> Iterator[str]:
    yield from _items(events, ("step", "append"), last.read_messages, lambda event: event.read_messages)
    for event in events:
        if event.call == "append" and event.result == "ok" and event.count is not None:
            begin = event.count - len(event.items)
            if last.read_messages[begin : event.count] != event.items:
                yield f"{event.items} are not where the count {event.count} says"
    of_steps = {item for event in events if event.call == "step" for item in event.items}
    if of_steps & set(last.read_messages) != set(last.read_list):
        yield "the list and the messages of the steps differ: a step is torn"
    place = {item: number for number, item in enumerate(last.read_messages)}
    done = [e for e in events if e.result == "ok" and e.call in ("step", "append") and e.items[0] in place]
    for earlier, later in _after(done, lambda event: place[event.items[0]]):
        if place[later.items[0]] < place[earlier.items[0]]:
            yield f"{later.items} come before {earlier.items}, which were acknowledged earlier"


def _entries(events: Sequence[Event], last: Event) -> Iterator[str]:
    """Usage is recorded once where it was acknowledged, and nothing else is."""
    counts = Counter(last.read_entries)
    told = {event.items[0]: event.result for event in events if event.call == "usage"}
    for item in counts.keys() | told.keys():
        if counts[item] > 1:
            yield f"the usage {item} is there {counts[item]} times"
        if told.get(item) == "ok" and not counts[item]:
            yield f"the usage {item} was acknowledged and is lost"
        if told.get(item, "fail") == "fail" and counts[item]:
            yield f"the usage {item} was not recorded by anybody"


def _statuses(events: Sequence[Event], last: Event) -> Iterator[str]:
    """A status is compared with that of the version before, and a refusal reports its own cause."""
    perhaps = {event.status for event in events if event.call == "status" and event.result == "info"}
    changes = [(event.version or 0, event) for event in _writes(events) if event.call == "status"]
    status: str | None = "active"
    for version, event in changes:
        if not {status, *perhaps} & {*event.expected}:
            yield f"version {version} replaced {status}, but expected {event.expected}"
        status = event.status
    for event in events:
        if event.call == "status" and event.result == "fail" and event.status in event.expected:
            yield f"a refusal reports {event.status}, which was expected"
        if event.call == "read" and event.result == "ok":
            made = bisect_right([version for version, _ in changes], event.version or 0)
            known = changes[made - 1][1].status if made else "active"
            if event.status not in {known, *perhaps}:
                yield f"a read of version {event.version} saw {event.status}, not {known}"


def _fences(events: Sequence[Event], last: Event) -> Iterator[str]:
    """Tokens grow, and after a write of a newer one no older one writes."""
    highest = 0
    for event in _writes(events):
        if event.token is not None:
            if event.token < highest:
                yield f"token {event.token} wrote version {event.version} after token {highest}"
            highest = max(highest, event.token)
    acquired = [e for e in events if e.call == "acquire" and e.result == "ok" and e.token is not None]
    for earlier, later in _after(acquired, lambda event: event.token or 0):
        if (later.token or 0) <= (earlier.token or 0):
            yield f"token {later.token} was given after token {earlier.token}"


def _errors(events: Sequence[Event], last: Event) -> Iterator[str]:
    """An error says that another one has won, that a repeat may succeed, or under which id to ask."""
    for event in events:
        error = event.error
        if error is None or isinstance(error, _REFUSALS):
            continue
        if isinstance(error, OutcomeUnknown):
            if event.call == "step" and not error.operation_id:
                yield "a step ended in OutcomeUnknown without an id"
        elif not error.retryable:
            yield f"{event.call} ended in {type(error).__name__}, which is not to be repeated: {error}"


_CHECKS: Final = (_versions, _real_time, _lists, _messages, _entries, _statuses, _fences, _errors)
