"""What is remembered of usage in memory, by the id of its session."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from helix_store.core.usage import UsageEntry

__all__ = ["StoredEntry", "UsageLedger"]


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """``place`` counts the entries in the order they were recorded; the rest is what the session was then."""

    entry: UsageEntry
    place: int
    agent_type: str | None
    user_id: str | None


@dataclass(slots=True)
class UsageLedger:
    """The entries of one tenant; change it with the world's lock held."""

    current: dict[str, list[StoredEntry]] = field(default_factory=dict)
    kept: dict[str, list[StoredEntry]] = field(default_factory=dict)
    """Entries that have outlived a session of this id."""
    _ids: set[str] = field(default_factory=set)
    _recorded: int = 0

    def add(self, entry: UsageEntry, *, agent_type: str | None, user_id: str | None) -> None:
        """Record an entry unless its id is known."""
        entry_id = str(entry.id)
        if entry_id in self._ids:
            return
        self._ids.add(entry_id)
        self._recorded += 1
        stored = StoredEntry(entry, self._recorded, agent_type, user_id)
        self.current.setdefault(entry.session_id, []).append(stored)

    def of(self, session_id: str) -> Sequence[StoredEntry]:
        return self.current.get(session_id, ())

    def all(self) -> Iterator[StoredEntry]:
        for entries in (*self.current.values(), *self.kept.values()):
            yield from entries

    def session_is_gone(self, session_id: str, *, keep: bool) -> None:
        """Drop a session's entries, or keep them apart from those of a later session of the same id."""
        entries = self.current.pop(session_id, [])
        if keep and entries:
            self.kept.setdefault(session_id, []).extend(entries)
        if not keep:
            self._ids.difference_update(str(stored.entry.id) for stored in entries)

    def delete(self, session_id: str) -> int:
        """Drop everything recorded under an id and return how many entries that were."""
        entries = [*self.current.pop(session_id, ()), *self.kept.pop(session_id, ())]
        self._ids.difference_update(str(stored.entry.id) for stored in entries)
        return len(entries)
