"""The words that this version knows: statuses, kinds, sources. Check constraints enforce most of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from django.db.models import Model

from helix_store.doctor import sql
from helix_store.doctor.findings import Fault
from helix_store.doctor.invariants.owners import table_of
from helix_store.doctor.registry import Check, by_statement, each, fault
from helix_store.doctor.scope import fetched
from helix_store.engine.database import Database
from helix_store.models import (
    Checkpoint,
    InterruptRequest,
    Run,
    Session,
    Stream,
    SubSessionRef,
    UsageEntry,
)

__all__ = ["WORDS"]


def _known_words(model: type[Model]) -> dict[str, list[str]]:
    """Return the columns with a fixed vocabulary, and their words."""
    return {
        field.attname: [word for word, _ in field.flatchoices]
        for field in model._meta.concrete_fields
        if field.choices
    }


def _unknown(db: Database, model: Any, condition: dict[str, Any], owner: tuple[str, ...]) -> Iterator[Fault]:
    for column, words in _known_words(model).items():
        rows = model._base_manager.using(db.alias).filter(**condition, **{f"{column}__isnull": False})
        rows = rows.exclude(**{f"{column}__in": words}).order_by("pk").values_list(*owner, "pk", column)
        for tenant, name, key, row, word in fetched(db, rows):
            place = f"{column} {word!r}" if model in (Session, Stream) else f"{row} {column} {word!r}"
            yield fault("unknown-word", table_of(model), tenant, name, place, key=key)


def _words(model: type[Model], of: type[Model], key: str, *owner: str) -> Check:
    """Return a model's check: by the keys of its owner ``of``, and the columns that identify the owner."""

    @each(of, "unknown-word")
    def check(db: Database, keys: list[int]) -> Iterator[Fault]:
        yield from _unknown(db, model, {f"{key}__in": keys}, owner)

    return check


def _of_sessions(model: type[Model]) -> Check:
    return _words(model, Session, "session", "session__tenant", "session__session_id", "session_id")


WORDS: Final = (
    _words(Session, Session, "pk", "tenant", "session_id", "pk"),
    *map(_of_sessions, (Run, Checkpoint, InterruptRequest, SubSessionRef)),
    by_statement("unknown-word", Session, "checkpoint", sql.UNKNOWN_CHECKPOINT_STATUS),
    _words(Stream, Stream, "pk", "tenant", "stream_id", "pk"),
    _words(UsageEntry, UsageEntry, "pk", "tenant", "recorded_for", "pk"),
)
