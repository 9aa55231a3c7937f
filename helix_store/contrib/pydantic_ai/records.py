"""The conversion of Pydantic AI's records and entries to rows and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_ai.conversation_store import ConversationEntry, ConversationRecord
from pydantic_ai.messages import ModelMessagesTypeAdapter

from helix_store.adapters import session_id_for
from helix_store.contrib.pydantic_ai.writing import EntryRow, RecordRow
from helix_store.core import validation
from helix_store.core.limits import Limits
from helix_store.core.payloads import decode_all, encode, encode_all
from helix_store.exceptions import IntegrityFault, InvalidPayload

# As a list, because a dataclass takes the encoding of bytes from its container.
_RECORDS: Final = TypeAdapter(
    list[ConversationRecord], config=ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
)


def scope_name(scope: str | None) -> str | None:
    """Return the text of a scope for its indexed column, which is an identifier."""
    return scope if scope in (None, "") else session_id_for(scope)


def record_row(record: ConversationRecord, limits: Limits) -> RecordRow:
    """Raises `InvalidPayload` and `LimitExceeded`."""
    if record.updated_at.utcoffset() is None:
        raise InvalidPayload(path="record/updated_at", reason="a time needs a time zone")
    return RecordRow(
        head_id=validation.optional_identifier(record.head_id, "record/head_id"),
        branches=[
            validation.identifier(tip, f"record/branches/{index}")
            for index, tip in enumerate(validation.items(record.branches, "record/branches"))
        ],
        revision=validation.identifier(record.revision, "record/revision"),
        scope=scope_name(record.scope),
        updated_at=record.updated_at,
        document=encode(
            _dumped(_RECORDS, [record], "record")[0], limit=limits.max_state_bytes, path="record"
        ),
    )


def record_from(text: str) -> ConversationRecord:
    """Return the record of a stored text. Raises `IntegrityFault`."""
    records: list[ConversationRecord] = _validated(_RECORDS, [text])
    return records[0]


def entry_rows(entries: Sequence[ConversationEntry], limits: Limits) -> list[EntryRow]:
    """Raises `InvalidPayload` and `LimitExceeded`."""
    entries = validation.items(entries, "new_entries")
    messages = _dumped(ModelMessagesTypeAdapter, [entry.message for entry in entries], "new_entries")
    payloads = encode_all(messages, limit=limits.max_state_bytes, name="max_state_bytes", path="new_entries")
    return [
        EntryRow(
            entry_id=validation.identifier(entry.id, f"new_entries/{index}/id"),
            parent_id=validation.optional_identifier(entry.parent_id, f"new_entries/{index}/parent_id"),
            kind=validation.identifier(entry.kind, f"new_entries/{index}/kind"),
            payload=payload,
        )
        for index, (entry, payload) in enumerate(zip(entries, payloads, strict=True))
    ]


def entries_from(rows: Sequence[EntryRow]) -> list[ConversationEntry]:
    """Return the entries of stored rows. Raises `IntegrityFault`."""
    messages = _validated(ModelMessagesTypeAdapter, [row.payload for row in rows])
    return [
        ConversationEntry(id=row.entry_id, parent_id=row.parent_id, kind=row.kind, message=message)  # type: ignore[arg-type]  # a newer version may have stored another kind
        for row, message in zip(rows, messages, strict=True)
    ]


def _dumped(adapter: TypeAdapter[Any], values: list[Any], path: str) -> list[Any]:
    """Dump a value. Raises `InvalidPayload` if Pydantic cannot write it, such as a deeply nested one."""
    try:
        dumped: list[Any] = adapter.dump_python(values, mode="json")
        return dumped
    except (ValueError, TypeError, RecursionError) as exc:
        reason = f"Pydantic cannot write it as JSON ({type(exc).__name__})"
    raise InvalidPayload(path=path, reason=reason)


def _validated(adapter: TypeAdapter[Any], texts: Sequence[str]) -> Any:
    # From values instead of JSON, because Pydantic's JSON reader refuses lone surrogates.
    values = decode_all(texts)
    try:
        return adapter.validate_python(values)
    except ValidationError as exc:
        reason = f"{exc.error_count()} fields do not fit"
    # Raised outside the handler, because Pydantic's error holds the values.
    raise IntegrityFault(
        f"The installed pydantic-ai cannot read a stored conversation ({reason}); was it stored by another "
        "version?"
    )
