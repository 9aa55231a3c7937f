"""Decisions about approvals, in rows of their own; those that were columns of the session move there."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from django.db import migrations, models
from django.db.models import Q

from helix_store.conf import table_name
from helix_store.core.approvals import digest_of
from helix_store.core.limits import UNLIMITED
from helix_store.core.payloads import decode_object, encode
from helix_store.core.validation import MAX_EPOCH_MILLISECONDS, milliseconds_to_datetime
from helix_store.exceptions import IntegrityFault
from helix_store.migrations._operations import (
    RefuseToLose,
    WholeMigration,
    add_fields,
    parent,
    surrogate_key,
)
from helix_store.models.constraints import one_of, unique
from helix_store.models.fields import IdentifierField, MomentField, PayloadField

_OUTCOMES = {
    "approved": "approved",
    "rejected": "rejected",
    "error": "answered with an error",
    "expired": "expired",
}
_DEADLINE_PASSED = "deadline_passed"
_ROWS = 200


def store_earlier_decisions(apps: Any, schema_editor: Any) -> None:
    """Store the answers, approvals and uses of each session as decisions."""
    alias = schema_editor.connection.alias
    sessions = apps.get_model("helix_store", "Session")._base_manager.using(alias)
    decision = apps.get_model("helix_store", "Decision")
    has_calls = Q(pending_client_tool_calls__isnull=False) | Q(approved_tool_calls__isnull=False)
    columns = ("pending_client_tool_calls", "completed_client_tool_calls", "approved_tool_calls")
    page = sessions.filter(has_calls).order_by("pk").values_list("pk", "updated_at", *columns)
    last = 0
    while rows := list(page.filter(pk__gt=last)[:_ROWS]):
        found = []
        for last, at, *texts in rows:
            try:
                documents = [{} if text is None else decode_object(text) for text in texts]
            except IntegrityFault:
                # It cannot be read at all, so none of its approvals counts.
                continue
            decisions, live = earlier_decisions(*documents, at=at)
            found += [decision(session_id=last, **each) for each in decisions]
            if live:
                sessions.filter(pk=last).update(live_decisions=live)
        decision._base_manager.using(alias).bulk_create(found)


def earlier_decisions(
    pending: dict[str, Any], completed: dict[str, Any], approved: dict[str, Any], *, at: datetime
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the decisions of a session and the live ones. Their versions are negative: -2, -1.

    An approval counts if the state still says that the call is approved. The answer of a call that the state
    has reduced to a mark is unknown, so such an approval does not count.
    """
    groups: list[tuple[str, list[dict[str, Any]], str | None]] = []
    for call_id, approval in approved.items():
        entry = _object(pending.get(call_id)) or _object(completed.get(call_id))
        approval = _object(approval)
        used_by = approval.get("used_by")
        rows = _approvals(
            _texts(approval.get("actors")) or [None], _moment(entry, at), approval.get("digest")
        )
        rows[-1]["is_final"] = True
        if "tool_name" in approval:
            rows[-1]["content"] = encode([approval["tool_name"], approval.get("input")], limit=UNLIMITED)
        if isinstance(used_by, str):
            rows[-1] |= {"used_at": at, "used_by_step": used_by}
        counts = used_by is None and entry.get("approved") is True and type(entry.get("submitted_at")) is int
        groups.append((call_id, rows, f"approved {entry['submitted_at']}" if counts else None))
    for call_id, call in pending.items():
        entry = _object(call)
        is_known = call_id in approved and entry.get("approved") is True
        if not is_known and entry.get("approval_id") is not None:
            groups += _of_pending(call_id, entry, at)
    decisions: list[dict[str, Any]] = []
    live = {}
    version = -sum(len(rows) for _, rows, _ in groups)
    for call_id, rows, mark in groups:
        asking = version
        for row in rows:
            decisions.append({**row, "tool_call_id": call_id, "asking": asking, "version": version})
            version += 1
        if mark is not None:
            by = [row["actor"] for row in rows if row["actor"] is not None]
            live[call_id] = {"asking": asking, "mark": mark, "by": by}
    return decisions, live


def _of_pending(
    call_id: str, entry: dict[str, Any], at: datetime
) -> Iterator[tuple[str, list[dict[str, Any]], str | None]]:
    """Yield the decisions about a call without a stored approval, and their mark."""
    tool_name, value, answered_at = entry.get("tool_name"), entry.get("input"), entry.get("submitted_at")
    actors, digest, moment = _texts(entry.get("actors")), digest_of(tool_name, value), _moment(entry, at)
    if answered_at is None:
        by = _texts(entry.get("approved_by"))
        if by and entry.get("digest") == digest:
            requested_at = entry.get("requested_at")
            mark = f"open {requested_at if type(requested_at) is int else None} {digest}"
            yield call_id, _approvals(by, moment, digest), mark
    elif entry.get("approved") is True:
        # It was stored before the session stored approvals, so nobody knows its actors.
        (row,) = _approvals([None], moment, digest)
        row |= {"is_final": True, "content": encode([tool_name, value], limit=UNLIMITED)}
        yield call_id, [row], f"approved {answered_at}" if type(answered_at) is int else None
    else:
        reason = entry.get("reason")
        (row,) = _approvals(actors[-1:] or [None], moment, digest)
        outcome = "error" if "error" in entry else "rejected"
        if not actors and (
            reason == _DEADLINE_PASSED or _object(entry.get("error")).get("code") == _DEADLINE_PASSED
        ):
            outcome = "expired"
        row |= {"is_final": True, "outcome": outcome, "reason": reason if isinstance(reason, str) else None}
        yield call_id, [row], None


def _approvals(actors: list[Any], at: datetime, digest: Any) -> list[dict[str, Any]]:
    known = digest if isinstance(digest, str) else None
    return [
        {"actor": actor, "outcome": "approved", "is_final": False, "digest": known, "decided_at": at}
        for actor in actors
    ]


def _moment(entry: dict[str, Any], at: datetime) -> datetime:
    submitted_at = entry.get("submitted_at")
    if type(submitted_at) is int and 0 <= submitted_at <= MAX_EPOCH_MILLISECONDS:
        return milliseconds_to_datetime(submitted_at)
    return at


def _object(value: Any) -> dict[str, Any]:
    return value if type(value) is dict else {}


def _texts(value: Any) -> list[Any]:
    return [each for each in value if type(each) is str] if type(value) is list else []


class Migration(WholeMigration):
    dependencies = [("helix_store", "0011_budgets")]

    operations = [
        migrations.CreateModel(
            name="Decision",
            fields=[
                ("id", surrogate_key()),
                ("version", models.BigIntegerField()),
                ("asking", models.BigIntegerField()),
                ("tool_call_id", IdentifierField()),
                ("outcome", models.CharField(choices=list(_OUTCOMES.items()), max_length=16)),
                ("is_final", models.BooleanField()),
                ("actor", IdentifierField(blank=True, null=True)),
                ("digest", models.CharField(blank=True, max_length=64, null=True)),
                ("content", PayloadField(blank=True, null=True)),
                ("reason", models.TextField(blank=True, null=True)),
                ("decided_at", MomentField()),
                ("used_at", MomentField(blank=True, null=True)),
                ("used_by_step", IdentifierField(blank=True, null=True)),
                ("used_by_effect", IdentifierField(blank=True, null=True)),
                ("session", parent("session", "decisions")),
            ],
            options={
                "db_table": table_name("decision"),
                "verbose_name": "decision",
                "verbose_name_plural": "decisions",
                "constraints": [
                    unique("decision_version_uniq", ["session", "version"]),
                    one_of("decision_outcome_ck", "outcome", list(_OUTCOMES)),
                ],
            },
        ),
        *add_fields("session", live_decisions=models.JSONField(blank=True, editable=False, null=True)),
        migrations.RunPython(store_earlier_decisions, migrations.RunPython.noop, elidable=False),
        migrations.RemoveField(model_name="session", name="approved_tool_calls"),
        RefuseToLose("decision"),
    ]
