"""Rows with a unique text in every column that holds text, and a dump of a database to look for them."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

from django.apps import apps
from django.db import connections, models

from helix_store.core import moments
from helix_store.core.payloads import encode
from helix_store.models import (
    Budget,
    BudgetCounter,
    Checkpoint,
    Decision,
    Effect,
    InterruptRequest,
    Item,
    Lock,
    Message,
    Operation,
    Post,
    Run,
    Session,
    StagedChange,
    Stream,
    StreamChunk,
    SubSessionRef,
    UsageEntry,
)
from helix_store.models.fields import CostField, MomentField, PayloadField
from tests.postgres import installed_program

__all__ = ["CHILDREN", "Canaries", "canary", "dumps", "text_columns"]

CHILDREN: Final = (
    Run,
    Message,
    Item,
    StagedChange,
    Operation,
    Post,
    InterruptRequest,
    SubSessionRef,
    Checkpoint,
    Decision,
    Effect,
)
_CHOSEN: Final[dict[Any, dict[str, str]]] = {
    Run: {"status": "completed"},
    Post: {"state": "waiting"},
    Decision: {"outcome": "approved"},
    Effect: {"state": "done"},
}


def canary() -> str:
    """A text that is nowhere else, and short enough for every column."""
    return f"cn{secrets.token_hex(5)}"


def text_columns() -> set[tuple[str, str]]:
    """Every column of the app that can hold a text of a user: model and field."""
    return {
        (model.__name__, field.name)
        for model in apps.get_app_config("helix_store").get_models()
        for field in model._meta.concrete_fields
        if _is_text(field)
    }


def _is_text(field: Any) -> bool:
    return isinstance(field, models.CharField | models.TextField | models.JSONField) and not field.choices


class Canaries:
    """Makes rows in a tenant, and remembers the texts in them by column."""

    def __init__(self, alias: str, tenant: str) -> None:
        self.alias = alias
        self.tenant = tenant
        self.texts: dict[str, set[tuple[str, str]]] = {}

    @property
    def columns(self) -> set[tuple[str, str]]:
        return set().union(*self.texts.values())

    def row(self, model: Any, **given: Any) -> Any:
        """A row with a canary in every text column, or the given text."""
        values = dict(given)
        for field in model._meta.concrete_fields:
            if field.primary_key or (field.name in values and not _is_text(field)):
                continue
            if field.is_relation:
                continue
            if _is_text(field):
                values[field.name] = self._text(model, field, given)
            else:
                values[field.name] = _filler(field)
        row = model(**values)
        row.save(using=self.alias, force_insert=True)
        return row

    def _text(self, model: Any, field: Any, given: dict[str, Any]) -> Any:
        if field.name in given:
            if isinstance(given[field.name], str):
                self.texts.setdefault(given[field.name], set()).add((model.__name__, field.name))
            return given[field.name]
        if field.name == "tenant":
            return self.tenant
        text = canary()
        self.texts.setdefault(text, set()).add((model.__name__, field.name))
        if field.name == "envelope":
            refs = {"code": {"provider": "memory", "path": text}}
            return f'{{"workspace_refs":{_json(refs)}}}'
        if isinstance(field, models.JSONField):
            return [text] if field.default is list else {text: text}
        return _json({"text": text}) if isinstance(field, PayloadField) else text

    def session(self, **given: Any) -> Any:
        """A session with a row in each table of its own, its stream and its lock."""
        session = self.row(Session, **given)
        for model in CHILDREN:
            row = self.row(model, session=session, **_CHOSEN.get(model, {}))
            if model is Checkpoint:
                session.current = row
                session.save(using=self.alias, update_fields=["current"])
        stream = self.row(Stream, stream_id=session.stream_id, floor=0)
        self.row(StreamChunk, stream=stream)
        self.row(Lock, name=session.session_id)
        self.row(UsageEntry, session=session, recorded_for=session.session_id, user_id=session.user_id)
        return session

    def budget(self, scope: str, value: str) -> None:
        """A budget of this value with its counter."""
        budget = self.row(Budget, scope=scope, value=value)
        self.row(BudgetCounter, name=budget.name, value=value)


def _json(value: Any) -> str:
    return encode(value)


def _filler(field: Any) -> Any:
    if field.choices:
        return field.choices[0][0]
    if isinstance(field, MomentField):
        return moments.now()
    if isinstance(field, CostField):
        return Decimal(1)
    return False if isinstance(field, models.BooleanField) else 1


def dumps(alias: str) -> Iterator[tuple[str, bytes]]:
    """What can be read of a database after an erasure, by the name of the way to read it."""
    connection = connections[alias]
    if connection.vendor == "sqlite":
        with connection.cursor() as cursor:
            cursor.execute("VACUUM")
            cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.close()
        file = str(connection.settings_dict["NAME"])
        yield "file", b"".join(Path(file + end).read_bytes() for end in ("", "-wal") if _exists(file + end))
        return
    yield "copy", b"".join(_copied(alias))
    if program := installed_program("pg_dump"):
        connection.ensure_connection()
        address = connection.connection.info
        environment = {
            **os.environ,
            "PGHOST": address.host,
            "PGPORT": str(address.port),
            "PGUSER": address.user,
            "PGPASSWORD": address.password,
        }
        command = [program, "--dbname", address.dbname, "--inserts"]
        yield "pg_dump", subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout


def _exists(file: str) -> bool:
    return Path(file).exists()


def _copied(alias: str) -> Iterator[bytes]:
    with connections[alias].cursor() as cursor:
        tables = connections[alias].introspection.table_names(cursor)
        for table in tables:
            with cursor.copy(f'COPY "{table}" TO STDOUT') as rows:
                yield from (bytes(block) for block in rows)
