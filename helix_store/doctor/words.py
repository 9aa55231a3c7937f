"""Words that this version knows: statuses, kinds, sources. Check constraints keep most of them."""

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
    """The columns with a fixed vocabulary, and their words."""
    return {
        field.attname: [word for word, _ in field.flatchoices]
        for field in model._meta.concrete_fields
        if field.choices
    }


def _unknown(
    db: Database, model: Any, condition: dict[str, Any], owner: tuple[str, str, str]
) -> Iterator[Fault]:
    for column, words in _known_words(model).items():
        rows = model._base_manager.using(db.alias).filter(**condition, **{f"{column}__isnull": False})
        rows = rows.exclude(**{f"{column}__in": words}).order_by("pk").values_list(*owner, "pk", column)
        for tenant, name, key, row, word in fetched(db, rows):
            place = f"{column} {word!r}" if model in (Session, Stream) else f"{row} {column} {word!r}"
            yield fault("unknown-word", table_of(model), tenant, name, place, key=key)


def _of_sessions(model: type[Model]) -> Check:
    own = model is Session

    @each(Session, "unknown-word")
    def check(db: Database, keys: list[int]) -> Iterator[Fault]:
        owner = ("tenant", "session_id", "pk") if own else _SESSION
        yield from _unknown(db, model, {"pk__in" if own else "session__in": keys}, owner)

    return check


_SESSION: Final = ("session__tenant", "session__session_id", "session_id")


@each(Stream, "unknown-word")
def _streams(db: Database, keys: list[int]) -> Iterator[Fault]:
    yield from _unknown(db, Stream, {"pk__in": keys}, ("tenant", "stream_id", "pk"))


@each(UsageEntry, "unknown-word")
def _usage(db: Database, keys: list[int]) -> Iterator[Fault]:
    yield from _unknown(db, UsageEntry, {"pk__in": keys}, ("tenant", "recorded_for", "pk"))


WORDS: Final = (
    *map(_of_sessions, (Session, Run, Checkpoint, InterruptRequest, SubSessionRef)),
    by_statement("unknown-word", Session, "checkpoint", sql.UNKNOWN_CHECKPOINT_STATUS),
    _streams,
    _usage,
)
