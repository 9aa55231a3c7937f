"""The head of a session: a narrow row that every write locks."""

from __future__ import annotations

from typing import Any, Self

from django.db import models
from django.db.models import F, Q
from django.utils.translation import gettext_lazy as _

from helix_store.conf import constraint_name, table_name
from helix_store.core.types import (
    NON_TERMINAL_STATUSES,
    SESSION_EXPIRED,
    SUSPENDED_STATUSES,
    RunStatus,
    SessionMode,
    SessionStatus,
)
from helix_store.models.constraints import index, one_of, unique
from helix_store.models.fields import CallIdsField, IdentifierField, MomentField, PayloadField

NON_TERMINAL = [status.value for status in NON_TERMINAL_STATUSES]

WAITING_KIND = RunStatus.SUSPENDED_CLIENT_TOOL.value

WRITES_ELSEWHERE = Q(stream_id__lt=F("session_id")) | Q(stream_id__gt=F("session_id"))
"""Sessions whose stream has another id. If it has the session's id, no index is needed."""


class OneOf(models.Lookup):
    """``IN`` with plain words as literals instead of parameters."""

    prepare_rhs = False

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, Any]:
        column, parameters = self.process_lhs(compiler, connection)
        words = ", ".join(f"'{word}'" for word in self.rhs)
        return f"{column} IN ({words})", parameters


class SessionQuerySet(models.QuerySet["Session"]):
    def non_terminal(self) -> Self:
        # This repeats the condition of the partial indexes: PostgreSQL does not recognise it as NOT IN
        # (terminal), and SQLite does not recognise it with parameters.
        return self.filter(OneOf(F("status"), tuple(NON_TERMINAL)))

    def waiting_for_person(self) -> Self:
        """Select sessions that are suspended until someone answers a tool call."""
        return self.non_terminal().filter(OneOf(F("suspension_kind"), (WAITING_KIND,)))

    def expired(self, at: Any) -> Self:
        return self.filter(expires_at__lte=at)

    def overdue(self, at: Any) -> Self:
        """Select sessions with an unanswered tool call past its deadline."""
        return self.filter(pending_deadline__lte=at)


class Session(models.Model):
    tenant = IdentifierField(default="", blank=True)
    session_id = IdentifierField()
    agent_type = IdentifierField()
    status = models.CharField(max_length=16, choices=[(s.value, s.value) for s in SessionStatus])
    version = models.BigIntegerField(default=1)
    step_count = models.BigIntegerField(default=0)
    resume_count = models.BigIntegerField(default=0)
    message_count = models.BigIntegerField(default=0)
    failure_reason = models.TextField(null=True, blank=True)  # noqa: DJ001  None and "" are different states
    user_id = IdentifierField(null=True, blank=True)
    tags = models.JSONField(default=list, blank=True)
    metadata = models.JSONField(default=dict, blank=True)
    # Metadata of a graph session: typed values as text, which are never queried.
    typed_metadata = PayloadField(null=True, blank=True)
    title = models.TextField(null=True, blank=True)  # noqa: DJ001  None and "" are different states
    workspace_id = IdentifierField(null=True, blank=True)
    directory = models.TextField(default="", blank=True)
    parent_session_id = IdentifierField(null=True, blank=True)
    root_session_id = IdentifierField(null=True, blank=True)
    stream_id = IdentifierField(null=True, blank=True)
    mode = models.CharField(  # noqa: DJ001  written once, None until then
        max_length=16, null=True, blank=True, choices=[(m.value, m.value) for m in SessionMode]
    )
    pending_client_tool_calls = PayloadField(null=True, blank=True)
    pending_deadline = MomentField(null=True, blank=True)
    completed_client_tool_calls = PayloadField(null=True, blank=True)
    client_tool_call_ownership = PayloadField(null=True, blank=True)
    # It is not part of the state: saves, rewinds and branches do not change it.
    approved_tool_calls = PayloadField(null=True, blank=True)
    suspension_kind = models.CharField(  # noqa: DJ001  None while it is not suspended
        max_length=32, null=True, blank=True, choices=[(s.value, s.value) for s in SUSPENDED_STATUSES]
    )
    suspension_context = PayloadField(null=True, blank=True)
    suspended_awaiting_children = PayloadField(null=True, blank=True)
    suspended_step_id = IdentifierField(null=True, blank=True)
    tracing_context = PayloadField(null=True, blank=True)
    expires_at = MomentField(null=True, blank=True)
    created_at = MomentField()
    updated_at = MomentField()
    # The row of the current state: the newest checkpoint, or a separate row after other writes. It has no
    # constraint and no index: it is only followed from this row, with the session locked.
    current = models.ForeignKey(
        "helix_store.Checkpoint",
        null=True,
        editable=False,
        on_delete=models.DO_NOTHING,
        related_name="+",
        db_constraint=False,
        db_index=False,
    )
    # A join would be wrong: after a wait for the row lock, the joined row may be older than the lock.
    current_is_checkpoint = models.BooleanField(default=False, editable=False)
    # A random key for the full payload of the current row or its base, from which the next step may be a
    # delta. It is not a row id, because a rollback or a restored backup may assign that to other content.
    base_key = models.BigIntegerField(null=True, editable=False)
    call_ids = CallIdsField()
    # The time at which the first waiting post is due. Posts change it without a new version of the session.
    next_post_at = MomentField(null=True, blank=True, editable=False)

    objects = SessionQuerySet.as_manager()

    class Meta:
        db_table = table_name("session")
        verbose_name = _("session")
        verbose_name_plural = _("sessions")
        constraints = [
            unique("session_id_uniq", ["tenant", "session_id"]),
            one_of("session_status_ck", "status", SessionStatus),
            models.CheckConstraint(
                condition=Q(mode__isnull=True) | Q(mode__in=[mode.value for mode in SessionMode]),
                name=constraint_name("session_mode_ck"),
            ),
            models.CheckConstraint(
                condition=Q(suspension_kind__isnull=True)
                | Q(suspension_kind__in=[status.value for status in SUSPENDED_STATUSES]),
                name=constraint_name("session_kind_ck"),
            ),
        ]
        indexes = [
            index("session_updated_idx", ["tenant", "updated_at", "session_id"]),
            index("session_stream_idx", ["tenant", "stream_id"], where=WRITES_ELSEWHERE),
            index("session_created_idx", ["tenant", "created_at", "session_id"]),
            index("session_agent_idx", ["tenant", "agent_type", "updated_at", "session_id"]),
            index("session_type_idx", ["tenant", "agent_type", "status", "updated_at", "session_id"]),
            index("session_status_idx", ["tenant", "status", "updated_at", "session_id"]),
            index(
                "session_user_idx",
                ["tenant", "user_id", "updated_at", "session_id"],
                where=Q(user_id__isnull=False),
            ),
            index(
                "session_work_idx",
                ["tenant", "workspace_id", "updated_at", "session_id"],
                where=Q(workspace_id__isnull=False),
            ),
            index("session_parent_idx", ["tenant", "parent_session_id", "updated_at", "session_id"]),
            index("session_root_idx", ["tenant", "root_session_id"]),
            index(
                "session_pending_idx",
                ["pending_deadline", "id"],
                where=Q(status__in=NON_TERMINAL, pending_deadline__isnull=False),
            ),
            # The index contains only the few sessions that wait, so the others need no additional write.
            index(
                "session_waiting_idx",
                ["tenant", "updated_at", "session_id"],
                where=Q(status__in=NON_TERMINAL, suspension_kind__in=[WAITING_KIND]),
            ),
            index(
                "session_expiry_idx",
                ["expires_at", "id"],
                where=Q(status__in=NON_TERMINAL, expires_at__isnull=False),
            ),
            index(
                "session_post_idx",
                ["next_post_at", "id"],
                where=Q(status__in=NON_TERMINAL, next_post_at__isnull=False),
            ),
            index(
                "session_expired_idx",
                ["expires_at", "id"],
                where=Q(failure_reason=SESSION_EXPIRED, expires_at__isnull=False),
            ),
        ]

    def __str__(self) -> str:
        return str(self.session_id)


def session_key(related_name: str) -> models.ForeignKey[Session, Session]:
    """Return the key of the session that a row belongs to, for a table with a unique constraint that begins
    with it and so serves as its index.
    """
    return models.ForeignKey(
        Session, on_delete=models.CASCADE, related_name=related_name, db_constraint=False, db_index=False
    )
