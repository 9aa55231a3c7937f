"""The tables of sessions, for the catalogue."""

from typing import Final

from helix_store.catalogue import Part, Table, copied_by
from helix_store.core.payloads import decode_object
from helix_store.models import (
    Checkpoint,
    CheckpointKind,
    InterruptRequest,
    Message,
    Operation,
    Post,
    Run,
    Session,
    StagedChange,
    SubSessionRef,
)
from helix_store.sessions.requests import decode_staged
from helix_store.sessions.sql import COPY_MESSAGES


def _checkpoints(kind: CheckpointKind, *order: str) -> Part:
    return Part(order, {"kind": kind.value})


_AS_ADDED: Final = (Part(("id",)),)

TABLES: Final = (
    Table(
        Session,
        record="session",
        order=("session_id",),
        parent="tenant",
        not_exported={
            "base_key": "It matches states that processes have loaded from the other database, with its keys."
        },
        reads=None,
        reference="current",
        unit="session",
        session_id="session_id",
    ),
    Table(
        Checkpoint,
        record="checkpoint",
        reads=None,
        order=("kind", "namespace", "version"),
        parts=(
            # A base comes before the deltas that are built on it.
            _checkpoints(CheckpointKind.BASE, "namespace", "version"),
            _checkpoints(CheckpointKind.STEP, "namespace", "version"),
            _checkpoints(CheckpointKind.STATE, "namespace", "version"),
            # The newest of all namespaces has the highest version, and among equal versions the highest key.
            _checkpoints(CheckpointKind.GRAPH, "version", "id"),
            _checkpoints(CheckpointKind.SNAPSHOT, "namespace", "version"),
        ),
        reference="base",
    ),
    Table(
        Message, record="message", order=("sequence",), branch=copied_by(COPY_MESSAGES), reads=decode_object
    ),
    Table(Run, record="run", order=("turn",)),
    Table(SubSessionRef, record="sub_session_ref", order=("sub_session_id",), parts=_AS_ADDED),
    Table(InterruptRequest, record="interrupt_request"),
    Table(
        StagedChange,
        record="staged_change",
        order=("step_id", "tool_call_id"),
        parts=_AS_ADDED,
        reads=lambda text: decode_staged([text]),
    ),
    Table(Operation, record="operation", order=("operation_id",)),
    Table(Post, record="post", order=("sequence",), reads=decode_object),
)
