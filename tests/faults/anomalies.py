"""Anomalies of isolation in transactions that append to lists and read them, after Adya's definitions.

An item is appended once. So a read shows which transactions it depends on, and the lists at the end show in
which order their transactions wrote. A cycle of these dependencies is an anomaly, named by its edges.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Literal

__all__ = ["Append", "Read", "Transaction", "anomalies_of"]


@dataclass(frozen=True)
class Append:
    key: str
    item: int


@dataclass(frozen=True)
class Read:
    key: str
    items: tuple[int, ...]


@dataclass
class Transaction:
    """``info``: nobody knows whether it was committed."""

    operations: list[Append | Read] = field(default_factory=list)
    result: Literal["ok", "fail", "info"] = "info"

    def appended(self, key: str, before: int | None = None) -> list[int]:
        """The items that the operations, or the first ones of them, append to a list."""
        made = self.operations[:before]
        return [each.item for each in made if isinstance(each, Append) and each.key == key]

    def reads(self) -> Iterator[tuple[str, tuple[int, ...], list[int]]]:
        """Each read: the key, what others had appended, and what the transaction itself had."""
        for place, each in enumerate(self.operations):
            if isinstance(each, Read):
                own = self.appended(each.key, place)
                yield each.key, each.items[: max(0, len(each.items) - len(own))], own


Lists = Mapping[str, Sequence[int]]
_Edges = dict[int, set[int]]


def anomalies_of(transactions: Sequence[Transaction], last: Lists) -> list[str]:
    """What isolation forbids, each line with its name first. ``last``: the lists after all transactions."""
    return [*_of_items(transactions, last), *_of_reads(transactions, last), *_of_cycles(transactions, last)]


def _writers(transactions: Sequence[Transaction]) -> dict[tuple[str, int], int]:
    return {
        (each.key, each.item): number
        for number, made in enumerate(transactions)
        for each in made.operations
        if isinstance(each, Append)
    }


def _of_items(transactions: Sequence[Transaction], last: Lists) -> Iterator[str]:
    writers = _writers(transactions)
    for key, items in last.items():
        for item, count in Counter(items).items():
            if count > 1:
                yield f"doubled: {item} is {count} times in {key}"
            if (key, item) not in writers:
                yield f"G1a: nobody appended {item} to {key}"
    for (key, item), number in writers.items():
        result, is_there = transactions[number].result, item in last[key]
        if result == "ok" and not is_there:
            yield f"lost: {item} in {key} was committed"
        if result == "fail" and is_there:
            yield f"G1a: {item} in {key} was rolled back"


def _of_reads(transactions: Sequence[Transaction], last: Lists) -> Iterator[str]:
    writers = _writers(transactions)
    changed: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for number, made in enumerate(transactions):
        newest: dict[str, tuple[int, ...]] = {}
        for (key, items, own), (_, seen) in zip(made.reads(), _whole_reads(made), strict=True):
            if not own:
                newest[key] = items
            if list(seen[len(items) :]) != own:
                yield f"internal: a read of {key} does not end with what its transaction appended"
            for item in items:
                writer = writers.get((key, item))
                if writer is None or transactions[writer].result == "fail":
                    yield f"G1a: {item} in {key} was read, but not committed"
            writer = writers.get((key, items[-1])) if items else None
            if writer not in (None, number) and transactions[writer or 0].appended(key)[-1] != items[-1]:
                yield f"G1b: a read of {key} ends amid a transaction"
            if items != tuple(last[key][: len(items)]):
                yield f"no order: a read of {key} is not what the end begins with"
        if made.result == "ok":
            changed.update((key, items) for key, items in newest.items() if made.appended(key))
    for (key, items), count in changed.items():
        if count > 1:
            yield f"lost update of {key}: {count} transactions changed it after {len(items)} items"


def _whole_reads(made: Transaction) -> Iterator[tuple[str, tuple[int, ...]]]:
    return ((each.key, each.items) for each in made.operations if isinstance(each, Read))


def _of_cycles(transactions: Sequence[Transaction], last: Lists) -> Iterator[str]:
    """G0: of writes alone. G1c: of writes and reads. G-single: with one read that is overwritten."""
    writers = _writers(transactions)
    order = {
        key: [writers[key, item] for item in items if (key, item) in writers] for key, items in last.items()
    }
    is_there = {number for numbers in order.values() for number in numbers}
    write: _Edges = defaultdict(set)
    read: _Edges = defaultdict(set)
    overwritten: _Edges = defaultdict(set)
    for numbers in order.values():
        for earlier, later in pairwise(numbers):
            write[earlier] |= {later} - {earlier}
    for number, made in enumerate(transactions):
        if made.result == "fail" or (made.result == "info" and number not in is_there):
            continue
        for key, items, own in made.reads():
            if items and (writer := writers.get((key, items[-1]))) is not None:
                read[writer] |= {number} - {writer}
            if not own and len(items) < len(order[key]):
                overwritten[number] |= {order[key][len(items)]} - {number}
    committed = _union(write, read)
    for name, through, closing in (
        ("G0", write, write),
        ("G1c", committed, read),
        ("G-single", committed, overwritten),
    ):
        for number, others in closing.items():
            for other in others:
                if number in _reachable(other, through):
                    yield f"{name}: transactions {number} and {other} depend on each other"


def _union(*edges: _Edges) -> _Edges:
    both: _Edges = defaultdict(set)
    for each in edges:
        for number, others in each.items():
            both[number] |= others
    return both


def _reachable(begin: int, edges: _Edges) -> set[int]:
    found, waiting = {begin}, [begin]
    while waiting:
        new = edges.get(waiting.pop(), _NOTHING) - found
        found |= new
        waiting += new
    return found


_NOTHING: Final[set[int]] = set()
