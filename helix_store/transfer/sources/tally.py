"""The account of rows read from another store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from helix_store.transfer.records import Counts, Problem

__all__ = ["Tally"]


@dataclass(slots=True)
class Tally:
    """Counts of rows by table name: ``found`` in the source, and the part of these that was ``left`` there.

    ``problems`` has each row that is left out, and each row that is imported with a change.
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
        """Yield the tables whose number of rows differs from the number found."""
        for table, count in stored.items():
            more = count - self.found[table]
            self.found[table] = count
            if more:
                self.left[table] += more
                yield Problem(text=f"{table}: {more} left out, which belong to no session")
