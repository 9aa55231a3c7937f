"""Rows for tests of what reads tables: the admin, commands, reports.

What a factory writes is what the store would have written: counts, sequences, versions and the current
state agree, so that a store can go on with it. Payloads and the fields of a session are given as the values
that the store's API takes. Call ``….create(using=alias)``; rows of a session go to its database.
"""

# mypy: allow-untyped-calls
# factory-boy annotates its classes and not what they are called with.

from __future__ import annotations

from typing import Any

from factory.declarations import LazyAttribute, LazyFunction, SelfAttribute, Sequence, SubFactory
from factory.django import DjangoModelFactory

from helix_store import models
from helix_store.core import ids, moments
from helix_store.core.limits import Limits
from helix_store.core.payloads import encode, size_of
from helix_store.core.types import (
    CheckpointSource,
    InterruptKind,
    RunStatus,
    SessionState,
    UsageKind,
)
from helix_store.models import CheckpointKind
from helix_store.sessions.state import EncodedState, encode_state

__all__ = [
    "CheckpointFactory",
    "InterruptRequestFactory",
    "LockFactory",
    "MessageFactory",
    "OperationFactory",
    "RunFactory",
    "SessionFactory",
    "StagedChangeFactory",
    "SubSessionRefFactory",
    "UsageEntryFactory",
]


class RowFactory(DjangoModelFactory[Any]):
    """A row in the database ``using``."""

    class Meta:
        abstract = True

    using = "default"

    @classmethod
    def _create(cls, model_class: Any, *args: Any, **columns: Any) -> Any:
        using = columns.pop("using")
        row = model_class(**columns)
        row.save(using=using, force_insert=True)
        return row


class SessionFactory(RowFactory):
    """A session with its current state: any field of `SessionState`, and ``tenant``."""

    class Meta:
        model = models.Session

    tenant = ""
    session_id = LazyFunction(ids.new_id)
    agent_type = "agent"
    root_session_id = SelfAttribute("session_id")
    stream_id = SelfAttribute("session_id")
    created_at = LazyFunction(moments.now)
    updated_at = SelfAttribute("created_at")

    @classmethod
    def _create(cls, model_class: Any, *args: Any, **fields: Any) -> Any:
        columns = {name: fields.pop(name) for name in ("using", "tenant", "created_at", "updated_at")}
        encoded = encode_state(SessionState(**fields), Limits())
        columns |= {"session_id": fields["session_id"], **encoded.columns}
        session = super()._create(model_class, **columns)
        session.current = models.Checkpoint.objects.using(session._state.db).create(
            session=session,
            kind=CheckpointKind.STATE,
            version=session.version,
            source=CheckpointSource.INPUT.value,
            payload=encoded.payload,
            envelope=encoded.envelope,
            size_bytes=size_of(encoded.payload) + size_of(encoded.envelope),
            created_at=session.created_at,
        )
        session.save(update_fields=["current"])
        return session


class SessionRowFactory(RowFactory):
    """A row of a session: of the one that is given, or of a new one."""

    class Meta:
        abstract = True

    session = SubFactory(SessionFactory, using=SelfAttribute("..using"))

    @classmethod
    def _create(cls, model_class: Any, *args: Any, **columns: Any) -> Any:
        columns["using"] = columns["session"]._state.db
        return super()._create(model_class, **columns)


class MessageFactory(SessionRowFactory):
    """The session's next message."""

    class Meta:
        model = models.Message
        exclude = ("content",)

    sequence = LazyAttribute(lambda row: row.session.message_count + 1)
    role = "user"
    content = "hello"
    payload = LazyAttribute(lambda row: encode({"role": row.role, "content": row.content}))
    created_at = LazyFunction(moments.now)

    @classmethod
    def _create(cls, model_class: Any, *args: Any, **columns: Any) -> Any:
        row = super()._create(model_class, **columns)
        _write_new_version(row.session, message_count=row.sequence)
        return row


class CheckpointFactory(SessionRowFactory):
    """The checkpoint of the session's next step, with the fields of its state in ``state``."""

    class Meta:
        model = models.Checkpoint
        exclude = ("state", "encoded")

    state: Any = None
    encoded = LazyAttribute(lambda row: _encoded_state(row.session, row.state or {}))
    kind = CheckpointKind.STEP
    source = CheckpointSource.STEP.value
    version = LazyAttribute(lambda row: row.session.version + 1)
    step_count = Sequence(lambda number: number + 1)
    step_id = LazyAttribute(lambda row: f"step-{row.step_count}")
    checkpoint_id = LazyAttribute(lambda row: ids.checkpoint_id(row.session.session_id, row.step_count))
    status = LazyAttribute(lambda row: row.encoded.columns["status"])
    message_count = SelfAttribute("session.message_count")
    payload = SelfAttribute("encoded.payload")
    envelope = SelfAttribute("encoded.envelope")
    size_bytes = LazyAttribute(lambda row: size_of(row.payload) + size_of(row.envelope))
    created_at = LazyFunction(moments.now)

    @classmethod
    def _create(cls, model_class: Any, *args: Any, **columns: Any) -> Any:
        row = super()._create(model_class, **columns)
        _write_new_version(row.session)
        return row


def _encoded_state(session: Any, fields: dict[str, Any]) -> EncodedState:
    given = {"session_id": session.session_id, "agent_type": session.agent_type, **fields}
    return encode_state(SessionState(**given), Limits())


class RunFactory(SessionRowFactory):
    """The session's next turn."""

    class Meta:
        model = models.Run

    run_id = LazyFunction(ids.new_id)
    turn = LazyAttribute(lambda row: row.session.runs.count() + 1)
    status = RunStatus.COMPLETED.value
    started_at = LazyFunction(moments.now)
    ended_at = LazyAttribute(lambda row: None if row.status == RunStatus.RUNNING else row.started_at)


class StagedChangeFactory(SessionRowFactory):
    class Meta:
        model = models.StagedChange
        exclude = ("merge_changes", "patches")

    step_id = "step-1"
    tool_call_id = LazyFunction(ids.new_id)
    merge_changes: Any = None
    patches: Any = ()
    payload = LazyAttribute(
        lambda row: encode(
            {
                "tool_call_id": row.tool_call_id,
                "patches": list(row.patches),
                "merge_changes": row.merge_changes,
                "timestamp": None,
            }
        )
    )
    created_at = LazyFunction(moments.now)


class SubSessionRefFactory(SessionRowFactory):
    class Meta:
        model = models.SubSessionRef

    sub_session_id = LazyFunction(ids.new_id)
    agent_type = "helper"
    status = "running"
    created_at = LazyFunction(moments.now)
    updated_at = SelfAttribute("created_at")


class InterruptRequestFactory(SessionRowFactory):
    class Meta:
        model = models.InterruptRequest

    kind = InterruptKind.INTERRUPT.value
    requested_at = LazyFunction(moments.now)


class OperationFactory(SessionRowFactory):
    """A step that was made under an operation id."""

    class Meta:
        model = models.Operation

    operation_id = LazyFunction(ids.new_id)
    digest = "0" * 64
    checkpoint_id = LazyAttribute(lambda row: ids.checkpoint_id(row.session.session_id, 1))
    version = SelfAttribute("session.version")
    created_at = LazyFunction(moments.now)


class UsageEntryFactory(SessionRowFactory):
    """A call of a model, by default."""

    class Meta:
        model = models.UsageEntry

    tenant = SelfAttribute("session.tenant")
    entry_id = LazyFunction(ids.new_id)
    recorded_for = SelfAttribute("session.session_id")
    session_agent_type = SelfAttribute("session.agent_type")
    user_id = SelfAttribute("session.user_id")
    kind = UsageKind.TOKENS.value
    timestamp = LazyFunction(moments.now)
    source_type = "agent"
    source_name = SelfAttribute("session.agent_type")
    model = "model-1"
    prompt_tokens = 100
    completion_tokens = 20
    total_tokens = LazyAttribute(lambda row: row.prompt_tokens + row.completion_tokens)


class LockFactory(RowFactory):
    """A lock that is free; give ``owner``, ``acquired_at`` and ``expires_at`` for one that is held."""

    class Meta:
        model = models.Lock

    tenant = ""
    name = LazyFunction(ids.new_id)
    token = 1


def _write_new_version(session: Any, **columns: Any) -> None:
    """Count a write on the session, as the store does."""
    columns |= {"version": session.version + 1, "updated_at": moments.now()}
    for name, value in columns.items():
        setattr(session, name, value)
    session.save(update_fields=list(columns))
