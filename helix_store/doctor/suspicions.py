"""Checks for rows that no sound program writes. The store accepts any parent, root and owner in a state."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

from helix_store.core.payloads import decode_object
from helix_store.doctor import sql
from helix_store.doctor.findings import Fault
from helix_store.doctor.registry import by_statement, each, fault
from helix_store.doctor.scope import fetched
from helix_store.engine.database import Database
from helix_store.exceptions import IntegrityFault
from helix_store.models import Lock, Session
from helix_store.sessions.tool_calls import tree_of

__all__ = ["LONG_AGO", "SUSPICIONS"]

LONG_AGO: Final = timedelta(days=1)
"""The age after which nobody is expected to release an expired lock."""


@each(Session, "ownership-outside-tree")
def owners(db: Database, keys: list[int]) -> Iterator[Fault]:
    """Yield owners outside of the tree. A deleted owner is not a fault, because the record outlives it."""
    rows = Session.objects.using(db.alias).filter(pk__in=keys, client_tool_call_ownership__isnull=False)
    columns = ("tenant", "session_id", "pk", "root_session_id", "client_tool_call_ownership")
    for tenant, name, key, root, text in fetched(db, rows.values_list(*columns)):
        named = _owners(text)
        known = Session.objects.using(db.alias).filter(tenant=tenant, session_id__in=set(named.values()))
        trees = dict(fetched(db, known.values_list("session_id", "root_session_id")))
        for call, owner in named.items():
            if owner in trees and tree_of(owner, trees[owner]) != tree_of(name, root):
                yield fault("ownership-outside-tree", "session", tenant, name, call, key=key)


def _owners(text: str) -> dict[str, str]:
    try:
        return {call: owner for call, owner in decode_object(text).items() if type(owner) is str}
    except IntegrityFault:
        return {}


@each(Lock, "lock-expired")
def locks(db: Database, keys: list[int]) -> Iterator[Fault]:
    def expired() -> list[tuple[Any, ...]]:
        rows = Lock.objects.using(db.alias).filter(pk__in=keys, expires_at__lt=db.now() - LONG_AGO)
        return list(rows.order_by("pk").values_list("tenant", "name", "pk", "owner"))

    for tenant, name, key, owner in db.query(expired):
        yield fault("lock-expired", "lock", tenant, name, owner, key=key)


SUSPICIONS: Final = (
    by_statement("parent-missing", Session, "session", sql.PARENT_MISSING),
    by_statement("root-of-another-tree", Session, "session", sql.ROOT_OF_ANOTHER_TREE),
    owners,
    locks,
)
