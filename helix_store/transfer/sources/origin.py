"""Where the data of another store is, and the account of what was read there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from helix_store.transfer.records import Counts, Problem, Source

__all__ = ["ForeignSource", "Origin", "Tally"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where another store keeps its tables, and the tenant here that its sessions belong to.

    ``schema`` and ``table`` are by default those of the store. With ``only_whole``, a session with a fault in
    one of its rows is left out; without, it is imported without that row. With ``leaves_tables``, rows of
    tables that have no counterpart here are counted, and are no problem.
    """

    dsn: str = field(repr=False)
    tenant: str = ""
    schema: str | None = None
    table: str | None = None
    only_whole: bool = False
    leaves_tables: bool = False


@dataclass(slots=True)
class Tally:
    """Rows by the name of their table: ``found`` in the source, and of these the ones ``left`` there.

    Each row that is left is in ``problems``, and so is each one that is imported with a change.
    """

    found: Counts = field(default_factory=Counter)
    left: Counts = field(default_factory=Counter)
    problems: list[Problem] = field(default_factory=list)

    def leave(self, table: str, row: str, reason: object) -> None:
        """Leave one row in the source."""
        self.left[table] += 1
        self.report(f"{row} is left out: {reason}")

    def leave_all(self, text: str) -> None:
        """Leave all rows that were found."""
        self.left = Counter(self.found)
        self.report(text)

    def report(self, text: str) -> None:
        self.problems.append(Problem(text=text))

    def add(self, part: Tally) -> None:
        self.found.update(part.found)
        self.left.update(part.left)
        self.problems.extend(part.problems)

    def compare(self, stored: Mapping[str, int]) -> Iterator[Problem]:
        """The tables that have another number of rows than were found."""
        for table, count in stored.items():
            more = count - self.found[table]
            self.found[table] = count
            if more:
                self.left[table] += more
                yield Problem(text=f"{more} rows of {table} are left out: they belong to no session")


class ForeignSource(Source, Protocol):
    """A store of another project, which is read once, inside of `reading`."""

    tally: Tally
