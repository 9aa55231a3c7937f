"""Stored messages with a hole, or beside a wrong number, are an error for whoever reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from helix_store import DatabaseStateStore
from helix_store.exceptions import IntegrityFault
from helix_store.models import Message, Session
from tests.databases import CommittedDatabase

_SESSION: Final = "session"
_READS: Final[dict[str, Callable[[DatabaseStateStore], Any]]] = {
    "all": lambda store: store.get_messages(_SESSION),
    "first page": lambda store: store.get_messages(_SESSION, limit=3),
    "middle": lambda store: store.get_messages(_SESSION, offset=3, limit=3),
    "end": lambda store: store.get_messages(_SESSION, offset=6, limit=3),
    "only the last": lambda store: store.get_messages(_SESSION, offset=7),
    "newest": lambda store: store.get_messages(_SESSION, limit=3, order="desc"),
    "all, newest first": lambda store: store.get_messages(_SESSION, order="desc"),
    "before the newest": lambda store: store.get_messages(_SESSION, offset=3, limit=3, order="desc"),
    "iteration": lambda store: list(store.iter_messages(_SESSION, chunk_size=3)),
}
_EVERYTHING: Final = frozenset(("all", "all, newest first", "iteration"))


def _lose(*sequences: int) -> Callable[[CommittedDatabase], object]:
    return lambda db: (
        Message.objects.using(db.alias).filter(session__tenant=db.tenant, sequence__in=sequences).delete()
    )


def _count(number: int) -> Callable[[CommittedDatabase], object]:
    return lambda db: Session.objects.using(db.alias).filter(tenant=db.tenant).update(message_count=number)


_DAMAGES: Final[dict[str, tuple[Callable[[CommittedDatabase], object], frozenset[str]]]] = {
    # Of eight messages; the reads that meet the damage.
    "none": (_count(8), frozenset()),
    "the first is lost": (_lose(1), _EVERYTHING | {"first page"}),
    "one in the middle is lost": (_lose(5), _EVERYTHING | {"middle", "before the newest"}),
    "the last is lost": (_lose(8), _EVERYTHING | {"end", "only the last", "newest"}),
    "the last two are lost": (_lose(7, 8), _EVERYTHING | {"end", "only the last", "newest"}),
    "the number is too low": (_count(7), _EVERYTHING | {"end", "newest", "only the last"}),
    "the number is too high": (_count(9), _EVERYTHING | {"end", "newest", "only the last"}),
}


def _unexpected(db: CommittedDatabase) -> Iterator[str]:
    for damage, (make, meet_it) in _DAMAGES.items():
        store = DatabaseStateStore(db.alias, tenant=f"{db.tenant} {damage}")
        store.create_session(_SESSION, agent_type="agent")
        store.append_messages(_SESSION, [{"role": "user", "content": str(number)} for number in range(8)])
        make(CommittedDatabase(alias=db.alias, tenant=store.tenant))
        for read, call in _READS.items():
            try:
                call(store)
            except IntegrityFault:
                if read not in meet_it:
                    yield f"{damage}: {read} is refused"
            else:
                if read in meet_it:
                    yield f"{damage}: {read} says nothing"


def test_a_hole_or_a_wrong_number_is_an_error_for_every_read_that_meets_it(
    committed_db: CommittedDatabase,
) -> None:
    assert list(_unexpected(committed_db)) == []
