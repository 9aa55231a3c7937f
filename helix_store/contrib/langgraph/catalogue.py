"""The tables and the conversation that the catalogue registers, the types of stored values, and values as
plain data. Nothing here imports LangGraph, or builds objects of a type that the bytes name: an object is read
as its fields.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final, NamedTuple

from django.db.models import Model

from helix_store.catalogue import AppTable, Branch, ConversationPage, ConversationStep, Outline
from helix_store.contrib.langgraph.memories import sweep
from helix_store.contrib.langgraph.models import (
    LangGraphCheckpoint,
    LangGraphMemory,
    LangGraphValue,
    LangGraphWrite,
)
from helix_store.contrib.langgraph.statements import COPY_PARTS, LOST_VALUES
from helix_store.core import validation
from helix_store.core.moments import as_utc
from helix_store.core.transcript import ROLES, ConversationMessage, Part, parts_of
from helix_store.engine.database import Database
from helix_store.engine.expressions import is_in_list, list_parameter, looked_up
from helix_store.engine.statement import Statement, table
from helix_store.exceptions import InvalidPayload, shown_id

PLAIN_TYPES: Final = frozenset({"bytearray", "bytes", "msgpack", "null"})
"""The types that the default serializer writes. Reading them never builds an object that the bytes name."""

_registered: Final[set[str]] = set()

HEADER_BYTES: Final = 11
"""The number of bytes at the start of a value from which `length_of` reads its length."""

_FIXED_LIST: Final = 0x90
_LIST_16: Final = 0xDC
_LIST_32: Final = 0xDD
_SNAPSHOT: Final = 7
"""The code that LangGraph uses to wrap the value of a `DeltaChannel`."""
_WRAPPED: Final = {0xD4: 0, 0xD5: 0, 0xD6: 0, 0xD7: 0, 0xD8: 0, 0xC7: 1, 0xC8: 2, 0xC9: 4}
"""The first byte of a wrapped value, and the number of bytes of the length that follows it."""


def register_types(*types: str) -> None:
    """Let imports and moves accept rows of these types, which one of the project's own serializers writes.

    Call it in ``AppConfig.ready()``. The types of LangGraph's default serializer are known, even with a
    cipher, such as ``msgpack+aes``. Raises `InvalidPayload` for a name that no column can hold.
    """
    _registered.update(validation.identifier(each, "types") for each in types)


def importable_type(value: Any, name: str = "type") -> str:
    """Return the type of an imported row. Raises `InvalidPayload` if the saver could not read it."""
    kind = validation.identifier(value, name)
    plain, has_cipher, cipher = kind.partition("+")
    if kind in _registered or (plain in PLAIN_TYPES and bool(has_cipher) == bool(cipher)):
        return kind
    known = ", ".join(sorted(PLAIN_TYPES))
    raise InvalidPayload(
        path=name,
        reason=f"expected one of {known}, or one of these with a cipher; if a serializer of your own writes "
        "other types, name them with register_types",
    )


def length_of(kind: str, header: bytes) -> int | None:
    """Return the length of a stored list from its first bytes, or ``None`` for any other value."""
    if kind != "msgpack" or not (header := _unwrapped(header)):
        return None
    if header[0] & 0xF0 == _FIXED_LIST:
        return header[0] & 0x0F
    size = {_LIST_16: 2, _LIST_32: 4}.get(header[0])
    return None if size is None else int.from_bytes(header[1 : 1 + size])


def items_of(kind: str, blob: bytes, first: int, limit: int) -> list[Any] | None:
    """Return ``limit`` items of a stored list from the index ``first``, as values that JSON can represent.

    Return ``None`` if the value is not a list that LangGraph's serializer has written without a cipher.
    """
    if kind != "msgpack":
        return None
    try:
        # It is installed with LangGraph; without LangGraph there is nothing to read.
        import ormsgpack

        def unpack(data: bytes, hook: Any) -> Any:
            return ormsgpack.unpackb(data, ext_hook=hook, option=ormsgpack.OPT_NON_STR_KEYS)

        def fields(_code: int, data: bytes) -> Any:
            """Return the fields of an object: the bytes contain its module, its class and its fields."""
            value = unpack(data, fields)
            match value:
                case [str(), str(), fields_of_object, *_]:
                    return fields_of_object
            return value

        # Objects are left as bytes on other pages.
        items = unpack(_unwrapped(blob), lambda code, data: ormsgpack.Ext(code, data))
        if not isinstance(items, list):
            return None
        page = ormsgpack.packb(items[first : first + limit], option=ormsgpack.OPT_NON_STR_KEYS)
        return [_json(item) for item in unpack(page, fields)]
    except Exception:  # noqa: BLE001  what damaged bytes raise depends on where they are damaged
        return None


def _unwrapped(data: bytes) -> bytes:
    """Return the value inside a snapshot of a channel that is stored as deltas, and other data unchanged."""
    size = _WRAPPED.get(data[0]) if data else None
    if size is None or data[1 + size : 2 + size] != bytes([_SNAPSHOT]):
        return data
    return data[2 + size :]


def _json(value: Any) -> Any:
    return json.loads(json.dumps(_with_text_keys(value), default=_written))


def _with_text_keys(value: Any) -> Any:
    """Return a value whose objects have only keys that JSON can represent."""
    if isinstance(value, dict):
        return {
            key if isinstance(key, str) else _written(key): _with_text_keys(each)
            for key, each in value.items()
        }
    return [_with_text_keys(each) for each in value] if isinstance(value, list | tuple) else value


def _written(value: Any) -> str:
    return b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _check_type(columns: Mapping[str, Any]) -> None:
    importable_type(columns["type"])


def _check_checkpoint(columns: Mapping[str, Any]) -> None:
    """Check ``versions``, which statements read as JSON: any other text would break every list."""
    _check_type(columns)
    try:
        versions = json.loads(columns["versions"])
    except (ValueError, RecursionError):
        versions = None
    if type(versions) is not dict or not all(type(version) is str for version in versions.values()):
        raise InvalidPayload(path="versions", reason="expected a JSON object of strings")


def _copy_to_branch(statement: Statement, model: type[Model], branch: Branch) -> None:
    """Copy a part of the thread to a branch of its session, under the id of the branch."""
    names = {"tenant": branch.db.tenant, "session_id": branch.source_id}
    branch.db.execute(statement, {**names, "target": branch.target, "thread_id": None})


def _unknown_types(model: type[Model], db: Database, keys: Collection[int]) -> Iterator[tuple[int, str]]:
    rows = model._base_manager.using(db.alias).filter(session_id__in=keys).exclude(type__in=PLAIN_TYPES)
    for key, kind in rows.order_by("session_id", "type").values_list("session_id", "type").distinct():
        try:
            importable_type(kind)
        except InvalidPayload:
            yield (
                key,
                f"rows of {model.__name__} have the type {shown_id(kind)}, which the default serializer "
                "does not read; if a serializer of your own wrote it, name it with register_types",
            )


def _faults_of_checkpoints(db: Database, keys: Collection[int]) -> Iterator[tuple[int, str]]:
    yield from _unknown_types(LangGraphCheckpoint, db, keys)
    for key, checkpoint_id, channel in db.execute(LOST_VALUES, {"keys": list_parameter(db, list(keys))}):
        yield (
            key,
            f"the LangGraph checkpoint {shown_id(checkpoint_id)} refers to a value of the channel "
            f"{shown_id(channel)} that is not stored",
        )


_COPY_CHECKPOINTS, _COPY_VALUES, _COPY_WRITES = (partial(_copy_to_branch, each) for each in COPY_PARTS)
TABLES: Final = (
    AppTable(
        LangGraphCheckpoint,
        record="langgraph_checkpoint",
        order=("namespace", "checkpoint_id"),
        branch=_COPY_CHECKPOINTS,
        check=_faults_of_checkpoints,
        check_import=_check_checkpoint,
    ),
    AppTable(
        LangGraphValue,
        record="langgraph_value",
        order=("namespace", "channel", "version"),
        branch=_COPY_VALUES,
        check=partial(_unknown_types, LangGraphValue),
        check_import=_check_type,
    ),
    AppTable(
        LangGraphWrite,
        record="langgraph_write",
        order=("namespace", "checkpoint_id", "task_id", "position"),
        branch=_COPY_WRITES,
        check=partial(_unknown_types, LangGraphWrite),
        check_import=_check_type,
    ),
    AppTable(
        LangGraphMemory, record="langgraph_memory", order=("namespace", "key"), parent="tenant", sweep=sweep
    ),
)


_CHANNEL: Final = "messages"
_LARGEST_VALUE: Final = 16 * 1024 * 1024
"""The maximum number of bytes of a value that a page reads, because a value is one row."""

_DELTAS: Final = (
    "LangGraph keeps the messages of this thread as deltas. Call the graph's get_state() to read them."
)
_WITHOUT_LIMIT: Final = 2**31 - 1
_LARGEST_OUTLINED: Final = 32 * 1024
_LONGEST_PATH: Final = 100

# --- Statements ------------------------------------------------------------------------------------

_CHECKPOINT: Final = table(LangGraphCheckpoint)
_VALUE: Final = table(LangGraphValue)
_NEWEST: Final = f"""
    SELECT id FROM {_CHECKPOINT} WHERE session_id = {{key}} AND namespace = ''
    ORDER BY checkpoint_id DESC LIMIT 1"""


def _outlines(keys: str, version: str) -> str:
    return f"""
        WITH newest AS (SELECT ({_NEWEST.format(key="k.value")}) AS id FROM {keys})
        SELECT v.session_id, v.id, v.type, substr(v.blob, 1, {HEADER_BYTES}), c.step, c.created_at,
            CASE WHEN length(v.blob) <= {_LARGEST_OUTLINED} THEN v.blob END
        FROM newest CROSS JOIN {_CHECKPOINT} AS c CROSS JOIN {_VALUE} AS v
        WHERE c.id = newest.id AND v.session_id = c.session_id AND v.namespace = ''
            AND v.channel = '{_CHANNEL}' AND v.version = {version}"""


_OUTLINES: Final = Statement(
    _outlines("unnest(%(keys)s::bigint[]) AS k(value)", f"c.versions::json ->> '{_CHANNEL}'"),
    _outlines("json_each(%(keys)s) AS k", f"json_extract(c.versions, '$.{_CHANNEL}')"),
)


def _path(parent: str) -> str:
    return f"""
        WITH RECURSIVE path (depth, id, session_id, parent_id) AS (
            SELECT 1, id, session_id, parent_id FROM {_CHECKPOINT}
            WHERE id = ({_NEWEST.format(key="%(key)s")})
          UNION ALL
            SELECT path.depth + 1, p.id, p.session_id, p.parent_id FROM path {parent}
            WHERE path.depth < {_LONGEST_PATH}
        )
        SELECT c.id, c.checkpoint_id, c.parent_id, c.source, c.step, c.created_at, c.has_deltas, c.versions
        FROM path CROSS JOIN {_CHECKPOINT} AS c WHERE c.id = path.id ORDER BY path.depth"""


_ITS_PARENT: Final = looked_up(
    LangGraphCheckpoint,
    "p",
    "p.session_id = path.session_id AND p.namespace = '' AND p.checkpoint_id = path.parent_id",
)
_PATH: Final = Statement(*map(_path, _ITS_PARENT))
_OF_CHANNEL: Final = "session_id = %(key)s AND namespace = '' AND channel = %(channel)s AND"
_HEADERS: Final = Statement(
    *(
        f"SELECT version, id, type, substr(blob, 1, {HEADER_BYTES}), length(blob) FROM {_VALUE} "
        f"WHERE {_OF_CHANNEL} {of_versions}"
        for of_versions in is_in_list("version", "versions", "text")
    )
)
_BLOB: Final = Statement(f"SELECT blob FROM {_VALUE} WHERE id = %(id)s")


class _Value(NamedTuple):
    id: int
    type: str
    header: bytes
    size: int

    @property
    def length(self) -> int | None:
        return length_of(self.type, bytes(self.header))


# --- Reading ---------------------------------------------------------------------------------------


class _LangGraphConversation:
    """The conversations of LangGraph's threads.

    The messages are in the channel ``messages``, or in one whose name ends with this word.
    """

    name = "LangGraph"
    needs: tuple[type[Model], ...] = (LangGraphCheckpoint, LangGraphValue)

    def outlines(self, db: Database, keys: Collection[int]) -> Mapping[int, Outline]:
        found = {}
        for key, pk, kind, header, step, at, blob in db.read(
            _OUTLINES, {"keys": list_parameter(db, list(keys))}
        ):
            if count := length_of(kind, bytes(header)):
                items = None if blob is None else items_of(kind, bytes(blob), count - 1, 1)
                last = _message(count, items[0], pk, step, as_utc(at)) if items else None
                found[key] = Outline(count=count, last=last)
        return found

    def page(
        self, db: Database, key: int, *, first: int | None, limit: int, thread: str | None = None
    ) -> ConversationPage | None:
        return self._page(db, key, first=first, limit=limit, is_whole_read=False)

    def messages(
        self, db: Database, key: int, *, thread: str | None = None, first: int = 1
    ) -> Iterator[ConversationMessage]:
        """Yield the messages of the thread. They are in one row, which is read as a whole, of any size."""
        page = self._page(db, key, first=first, limit=_WITHOUT_LIMIT, is_whole_read=True)
        return iter(() if page is None else page.messages)

    def threads(self, db: Database, key: int, *, after: str | None = None) -> Iterator[str]:
        return iter(("",) if after is None else ())

    def _page(
        self, db: Database, key: int, *, first: int | None, limit: int, is_whole_read: bool
    ) -> ConversationPage | None:
        path = db.read(_PATH, {"key": key})
        if not path:
            return None
        versions = [json.loads(row[-1]) for row in path]
        channel = _channel_of(versions[0])
        values = _values(db, key, channel, [each[channel] for each in versions if channel in each])
        counts = [values[each[channel]].length if each.get(channel) in values else 0 for each in versions]
        steps = tuple(
            ConversationStep(
                step_id=checkpoint_id,
                name=source,
                step=step,
                count=count,
                at=as_utc(at),
                row=(LangGraphCheckpoint, pk),
            )
            for (pk, checkpoint_id, _, source, step, at, _, _), count in zip(path, counts, strict=True)
        )
        newest = values.get(versions[0].get(channel))
        if newest is None:
            pk, has_deltas = path[0][0], path[0][-2]
            notes = (_note(LangGraphCheckpoint, pk, "DeltaChannel", _DELTAS),) if has_deltas else ()
            return ConversationPage(messages=notes, total=len(notes), path=steps)
        total = newest.length
        may_read = total and (is_whole_read or newest.size <= _LARGEST_VALUE)
        blob = db.read(_BLOB, {"id": newest.id})[0][0] if may_read else b""
        start = 1 if total is None else max(1, total - limit + 1) if first is None else first
        start = max(1, (total or 0) + start + 1) if start < 0 else start
        items = items_of(newest.type, bytes(blob), start - 1, limit) if blob else None
        if total is None or items is None:
            # Only the application can read the value, or it is too long.
            shown = _note(LangGraphValue, newest.id, newest.type, f"{newest.size:,} bytes")
            return ConversationPage(messages=(shown,), total=1, path=steps)
        is_whole = path[-1][2] is None
        messages = (
            _message(number, item, newest.id, *_origin(steps, number, is_whole))
            for number, item in enumerate(items, start)
        )
        return ConversationPage(messages=tuple(messages), total=total, path=steps)


CONVERSATION: Final = _LangGraphConversation()


def _channel_of(versions: Mapping[str, str]) -> str:
    return (
        _CHANNEL
        if _CHANNEL in versions
        else next((channel for channel in sorted(versions) if channel.endswith(_CHANNEL)), _CHANNEL)
    )


def _values(db: Database, key: int, channel: str, versions: Sequence[str]) -> dict[str | None, _Value]:
    parameters = {"key": key, "channel": channel, "versions": list_parameter(db, sorted(set(versions)))}
    return {version: _Value(*columns) for version, *columns in db.read(_HEADERS, parameters)}


def _origin(
    path: Sequence[ConversationStep], number: int, is_whole: bool
) -> tuple[int | None, datetime | None]:
    """Return the step and the time of the first checkpoint that contained the message with this number.

    A message is in all checkpoints from that one to the newest. Both are ``None`` if the path is too short.
    """
    for step, before in zip(path, [*path[1:], None], strict=True):
        if before is None:
            return (step.step, step.at) if is_whole else (None, None)
        if before.count is None or before.count < number:
            return step.step, step.at
    return None, None


def _message(number: int, item: Any, pk: int, step: int | None, at: datetime | None) -> ConversationMessage:
    role, parts = _said(item)
    return ConversationMessage(
        number=number, role=role, parts=parts, at=at, step=step, row=(LangGraphValue, pk), stored=item
    )


def _said(item: Any) -> tuple[str, list[Part]]:
    if isinstance(item, list) and len(item) == 2 and isinstance(item[0], str):
        return _role(item[0]), parts_of({"content": item[1]})
    if not isinstance(item, dict):
        return "?", parts_of({"content": item})
    role = _role(item.get("role", item.get("type")))
    return role, parts_of({**item, "role": role})


def _role(name: Any) -> str:
    return ROLES.get(name, name) if isinstance(name, str) else "?"


def _note(model: type[Model], pk: int, name: str, text: str) -> ConversationMessage:
    """Return a note in place of messages that cannot be shown."""
    part = Part(kind="other", text=text, name=name)
    return ConversationMessage(number=1, role="?", parts=[part], row=(model, pk))
