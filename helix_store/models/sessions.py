"""Sessions and the rows that belong to one: runs, messages, steps, checkpoints, tombstones."""

from __future__ import annotations

from typing import Any, Self

from django.db import models
from django.db.models import F, Q
from django.utils.translation import gettext_lazy as _

from helix_store.conf import constraint_name, table_name
from helix_store.core.limits import MAX_LANE_BYTES
from helix_store.core.types import (
    NON_TERMINAL_STATUSES,
    SESSION_EXPIRED,
    SUSPENDED_STATUSES,
    CheckpointSource,
    InterruptKind,
    RunStatus,
    SessionMode,
    SessionStatus,
)
from helix_store.models.constraints import index, one_of, unique
from helix_store.models.fields import (
    CallIdField,
    CallIdsField,
    CostField,
    IdentifierField,
    MomentField,
    PayloadField,
)

NON_TERMINAL = [status.value for status in NON_TERMINAL_STATUSES]

WAITING_KIND = RunStatus.SUSPENDED_CLIENT_TOOL.value

WAITS = Q(suspension_kind__in=[WAITING_KIND]) | Q(waiting_kind__isnull=False)
"""Sessions that wait for a person, according to their own calls or to an adapter."""

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
    # The approvals that count and are not used, by tool call id (`sessions.tool_calls`). It is not part of
    # the state: a write of a state can only remove entries.
    live_decisions = models.JSONField(null=True, blank=True, editable=False)
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
    # What an adapter's session waits for, such as LangGraph's "interrupt", and after a colon the text by
    # which the adapter recognises this wait. The adapter's own writes set it.
    waiting_kind = IdentifierField(null=True, blank=True, editable=False)
    # The last time at which a wake-up announced the session, so that those announced last come last.
    announced_at = MomentField(null=True, blank=True, editable=False)
    # What has ended the newest run, if it was an error, a budget or an unknown effect, and when: otherwise a
    # search would read every run that has ever failed. The next run clears both.
    stopped_by = models.CharField(  # noqa: DJ001  None if nothing has stopped it
        max_length=16, null=True, blank=True, editable=False
    )
    stopped_at = MomentField(null=True, blank=True, editable=False)

    objects = SessionQuerySet.as_manager()

    class Meta:
        db_table = table_name("session")
        verbose_name = _("session")
        verbose_name_plural = _("sessions")
        permissions = [("answer_call", _("Can answer calls"))]
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
                "session_stopped_idx",
                ["stopped_by", "stopped_at", "id"],
                where=Q(status__in=NON_TERMINAL, stopped_by__isnull=False),
            ),
            # It is ordered by time across tenants.
            index("session_waits_idx", ["updated_at", "id"], where=Q(status__in=NON_TERMINAL) & WAITS),
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


class IsWord(models.Lookup):
    """``=`` with a plain word as a literal instead of a parameter."""

    prepare_rhs = False

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, Any]:
        column, parameters = self.process_lhs(compiler, connection)
        return f"{column} = '{self.rhs}'", parameters


class RunQuerySet(models.QuerySet["Run"]):
    def running(self) -> Self:
        # This repeats the condition of the partial index: SQLite matches neither a parameter nor IN with it.
        return self.filter(IsWord(F("status"), RunStatus.RUNNING.value))


class Run(models.Model):
    session = models.ForeignKey(Session, on_delete=models.CASCADE, related_name="runs", db_index=False)
    run_id = IdentifierField()
    turn = models.BigIntegerField()
    status = models.CharField(max_length=32, choices=[(s.value, s.value) for s in RunStatus])
    step_count = models.BigIntegerField(default=0)
    start_sequence = models.BigIntegerField(default=0)
    fencing_token = models.BigIntegerField(null=True, blank=True)
    completion_reason = models.TextField(null=True, blank=True)  # noqa: DJ001  None and "" are different
    error = PayloadField(null=True, blank=True)
    started_at = MomentField()
    ended_at = MomentField(null=True, blank=True)
    call_ids = CallIdsField()
    # The amounts that a budget refused, if one has stopped the run.
    refused_usd = CostField(null=True, blank=True, editable=False)
    refused_tokens = models.BigIntegerField(null=True, blank=True, editable=False)
    # The version of the project's code that has started the run, or continued it last.
    build = IdentifierField(null=True, blank=True)

    objects = RunQuerySet.as_manager()

    class Meta:
        db_table = table_name("run")
        verbose_name = _("run")
        verbose_name_plural = _("runs")
        constraints = [
            unique("run_id_uniq", ["session", "run_id"]),
            unique("run_turn_uniq", ["session", "turn"]),
            unique("run_running_uniq", ["session"], where=Q(status=RunStatus.RUNNING.value)),
            one_of("run_status_ck", "status", RunStatus),
        ]
        indexes = [
            index("run_running_idx", ["started_at", "id"], where=Q(status=RunStatus.RUNNING.value)),
        ]

    def __str__(self) -> str:
        return str(self.run_id)


class InterruptRequest(models.Model):
    """A request; a session has at most one. An abort replaces an interrupt, but never vice versa."""

    session = models.OneToOneField(Session, on_delete=models.CASCADE, related_name="interrupt_request")
    kind = models.CharField(max_length=16, choices=[(k.value, k.value) for k in InterruptKind])
    reason = models.TextField(null=True, blank=True)  # noqa: DJ001  None and "" are different
    run_id = IdentifierField(null=True, blank=True)
    requested_at = MomentField()

    class Meta:
        db_table = table_name("interrupt_request")
        constraints = [
            one_of("interrupt_kind_ck", "kind", InterruptKind),
        ]

    def __str__(self) -> str:
        return self.kind


LOCATIONS = ["local", "remote"]


class SubSessionRef(models.Model):
    session = models.ForeignKey(
        Session, on_delete=models.CASCADE, related_name="sub_session_refs", db_index=False
    )
    sub_session_id = IdentifierField()
    agent_type = IdentifierField()
    parent_tool_call_id = IdentifierField(null=True, blank=True)
    status = IdentifierField()
    location = models.CharField(max_length=8, default="local", choices=[(name, name) for name in LOCATIONS])
    remote = PayloadField(null=True, blank=True)
    output = PayloadField(null=True, blank=True)
    error = PayloadField(null=True, blank=True)
    created_at = MomentField()
    updated_at = MomentField()

    class Meta:
        db_table = table_name("sub_session_ref")
        constraints = [
            unique("sub_ref_uniq", ["session", "sub_session_id"]),
            one_of("sub_ref_location_ck", "location", LOCATIONS),
        ]
        indexes = [index("sub_ref_owner_idx", ["sub_session_id"])]

    def __str__(self) -> str:
        return str(self.sub_session_id)


class Message(models.Model):
    # The unique constraint serves every lookup by session, and the lock on the session's row protects the
    # reference: a foreign key constraint and a separate index would cost a tenth of a step (measured).
    session = session_key("messages")
    sequence = models.BigIntegerField()
    role = IdentifierField()
    payload = PayloadField()
    created_at = MomentField()

    class Meta:
        db_table = table_name("message")
        verbose_name = _("message")
        verbose_name_plural = _("messages")
        constraints = [
            unique("message_seq_uniq", ["session", "sequence"]),
        ]

    def __str__(self) -> str:
        return f"{self.sequence} {self.role}"


class PostState(models.TextChoices):
    WAITING = "waiting", _("waiting")
    RECEIVED = "received", _("received")
    WITHDRAWN = "withdrawn", _("withdrawn")


class Post(models.Model):
    """A message that is waiting to be received, or what remains of one that was received or withdrawn.

    ``received_version`` is the session's version after the commit that received the post.
    """

    # The unique constraint begins with the session, and the lock on the session's row protects the reference.
    session = session_key("posts")
    post_id = IdentifierField()
    sequence = models.BigIntegerField()
    payload = PayloadField(null=True, blank=True)
    author = IdentifierField(null=True, blank=True)
    key = IdentifierField(null=True, blank=True)
    digest = models.CharField(max_length=64)
    not_before = MomentField(null=True, blank=True)
    due_at = MomentField()
    posted_at = MomentField()
    state = models.CharField(max_length=16, choices=PostState.choices, default=PostState.WAITING)
    received_at = MomentField(null=True, blank=True)
    position = models.BigIntegerField(null=True, blank=True)
    received_version = models.BigIntegerField(null=True, blank=True, editable=False)

    objects: models.Manager[Post] = models.Manager()

    class Meta:
        db_table = table_name("post")
        verbose_name = _("post")
        verbose_name_plural = _("posts")
        constraints = [
            unique("post_seq_uniq", ["session", "sequence"]),
            unique("post_key_uniq", ["session", "key"], where=Q(key__isnull=False)),
            one_of("post_state_ck", "state", PostState),
        ]
        indexes = [
            index("post_waiting_idx", ["session", "due_at", "sequence"], where=Q(state=PostState.WAITING)),
            index("post_author_idx", ["author", "id"], where=Q(author__isnull=False)),
        ]

    def __str__(self) -> str:
        return f"{self.sequence} {self.state}"


class StagedChange(models.Model):
    session = session_key("staged_changes")
    step_id = IdentifierField()
    tool_call_id = IdentifierField()
    payload = PayloadField()
    created_at = MomentField()
    call_ids = CallIdsField()

    class Meta:
        db_table = table_name("staged_change")
        constraints = [
            unique("staged_call_uniq", ["session", "step_id", "tool_call_id"]),
        ]

    def __str__(self) -> str:
        return f"{self.step_id} {self.tool_call_id}"


class Operation(models.Model):
    """The result of a step with an operation id, which a repeat returns.

    It is kept when its checkpoint is pruned, so that a late repeat is not applied twice. A row without a
    digest marks a staged change that was promoted or discarded; it has the id of the call that staged it.
    """

    session = session_key("operations")
    operation_id = IdentifierField()
    digest = models.CharField(max_length=64)
    checkpoint_id = models.CharField(max_length=320)
    version = models.BigIntegerField()
    created_at = MomentField()

    class Meta:
        db_table = table_name("operation")
        constraints = [
            unique("operation_id_uniq", ["session", "operation_id"]),
        ]

    def __str__(self) -> str:
        return str(self.operation_id)


class DecisionOutcome(models.TextChoices):
    APPROVED = "approved", _("approved")
    REJECTED = "rejected", _("rejected")
    ERROR = "error", _("answered with an error")
    EXPIRED = "expired", _("expired")


class Decision(models.Model):
    """An answer to an approval: who has answered which asking of a call, what, and when.

    It is not part of the state, so writes of the state, rewinds and branches do not change it. The column
    ``live_decisions`` of the session says which approvals count. A step or an effect that has used an
    approval is recorded in its final decision.
    """

    session = session_key("decisions")
    # The version of the session that the decision has made. It is negative if there were no decisions yet.
    version = models.BigIntegerField()
    # The version of the first decision about the same asking of the call.
    asking = models.BigIntegerField()
    tool_call_id = IdentifierField()
    outcome = models.CharField(max_length=16, choices=DecisionOutcome.choices)
    is_final = models.BooleanField()
    actor = IdentifierField(null=True, blank=True)
    digest = models.CharField(max_length=64, null=True, blank=True)  # noqa: DJ001  None if it is unknown
    # The tool's name and the input of a final approval.
    content = PayloadField(null=True, blank=True)
    reason = models.TextField(null=True, blank=True)  # noqa: DJ001  None and "" are different reasons
    decided_at = MomentField()
    used_at = MomentField(null=True, blank=True)
    used_by_step = IdentifierField(null=True, blank=True)
    used_by_effect = IdentifierField(null=True, blank=True)

    objects: models.Manager[Decision] = models.Manager()

    class Meta:
        db_table = table_name("decision")
        verbose_name = _("decision")
        verbose_name_plural = _("decisions")
        constraints = [
            unique("decision_version_uniq", ["session", "version"]),
            one_of("decision_outcome_ck", "outcome", DecisionOutcome),
        ]

    def __str__(self) -> str:
        return f"{self.tool_call_id} {self.outcome}"


class EffectState(models.TextChoices):
    STARTED = "started", _("started")
    DONE = "done", _("done")
    NOT_DONE = "not_done", _("not done")
    UNKNOWN = "unknown", _("unknown")


OPEN_EFFECTS = [EffectState.STARTED.value, EffectState.UNKNOWN.value]


class Effect(models.Model):
    """A call of the world outside the database: the intent, stored before it, and the result, after it.

    It is not part of the state, so rewinds and branches do not change it. ``fencing_token`` is that of the
    worker which began the current attempt; a ``started`` effect whose session's lock is not held with it any
    more reads as unknown.
    """

    session = session_key("effects")
    effect_id = IdentifierField()
    sequence = models.BigIntegerField()
    state = models.CharField(max_length=16, choices=EffectState.choices)
    tool_name = IdentifierField(default="", blank=True)
    input = PayloadField()
    # Of the tool's name and the input, so that another call with the same id is refused.
    digest = models.CharField(max_length=64)
    needs_approval = models.BooleanField(default=False)
    attempt = models.BigIntegerField(default=1)
    run_id = IdentifierField(null=True, blank=True)
    step_count = models.BigIntegerField(null=True, blank=True)
    fencing_token = models.BigIntegerField(null=True, blank=True)
    result = PayloadField(null=True, blank=True)
    # An exception as in a run, or the reason for which it was not done.
    error = PayloadField(null=True, blank=True)
    actors = PayloadField(default="[]")
    started_at = MomentField()
    ended_at = MomentField(null=True, blank=True)
    call_ids = CallIdsField()

    objects: models.Manager[Effect] = models.Manager()

    class Meta:
        db_table = table_name("effect")
        verbose_name = _("effect")
        verbose_name_plural = _("effects")
        permissions = [("settle_effect", _("Can settle effects"))]
        constraints = [
            unique("effect_id_uniq", ["session", "effect_id"]),
            unique("effect_seq_uniq", ["session", "sequence"]),
            one_of("effect_state_ck", "state", EffectState),
        ]
        indexes = [
            index("effect_open_idx", ["started_at", "id"], where=Q(state__in=OPEN_EFFECTS)),
        ]

    def __str__(self) -> str:
        return f"{self.effect_id} {self.state}"


class CheckpointKind(models.TextChoices):
    STATE = "state", "state between checkpoints"
    STEP = "step", "step"
    GRAPH = "graph", "graph"
    SNAPSHOT = "snapshot", "snapshot"
    BASE = "base", "base of steps"


class Checkpoint(models.Model):
    """A stored state. Each state is written once: ``Session.current`` points at its row.

    Kind ``state`` is the current state of a session whose last write was not a step. A session has at most
    one; lists omit it, and the next step turns it into that step's checkpoint. ``payload`` is the custom
    state, ``envelope`` the rest of the session state. Graphs and snapshots use only ``payload``. The columns
    ``claim_…`` belong to a snapshot that is being resumed or was resumed.

    If ``base`` is set, it is an older row of the session with a full payload, and ``payload`` is the delta
    from it. Kind ``base`` is a deleted checkpoint of a step that deltas still need; lists omit it.
    """

    session = session_key("checkpoints")
    kind = models.CharField(max_length=16, choices=CheckpointKind.choices)
    namespace = IdentifierField(default="", blank=True)
    version = models.BigIntegerField()
    checkpoint_id = models.CharField(max_length=320, null=True, blank=True)  # noqa: DJ001  None: not a checkpoint
    parent_checkpoint_id = models.CharField(max_length=320, null=True, blank=True)  # noqa: DJ001  None: a root
    source = models.CharField(max_length=16, choices=[(s.value, s.value) for s in CheckpointSource])
    run_id = IdentifierField(null=True, blank=True)
    step_id = IdentifierField(null=True, blank=True)
    step_count = models.BigIntegerField(default=0)
    status = models.CharField(max_length=16, default="", blank=True)
    message_count = models.BigIntegerField(default=0)
    stream_sequence = models.BigIntegerField(default=0)
    payload = PayloadField()
    # It has no constraint and no index: it is only followed forwards, and rows stay while deltas need them.
    base = models.ForeignKey(
        "self",
        null=True,
        editable=False,
        on_delete=models.DO_NOTHING,
        related_name="+",
        db_constraint=False,
        db_index=False,
    )
    envelope = PayloadField(default="{}")
    size_bytes = models.BigIntegerField(default=0)
    created_at = MomentField()
    call_id = CallIdField()
    snapshot_version = models.BigIntegerField(null=True, blank=True)
    claim_owner = IdentifierField(null=True, blank=True)
    claim_token = models.BigIntegerField(null=True, blank=True)
    claim_expires_at = MomentField(null=True, blank=True)
    claim_done_at = MomentField(null=True, blank=True)

    class Meta:
        db_table = table_name("checkpoint")
        verbose_name = _("checkpoint")
        verbose_name_plural = _("checkpoints")
        constraints = [
            unique("checkpoint_ver_uniq", ["session", "kind", "namespace", "version"]),
            unique("checkpoint_id_uniq", ["session", "checkpoint_id"], where=Q(checkpoint_id__isnull=False)),
            unique("checkpoint_state_uniq", ["session"], where=Q(kind=CheckpointKind.STATE)),
            one_of("checkpoint_kind_ck", "kind", CheckpointKind),
            one_of("checkpoint_source_ck", "source", CheckpointSource),
        ]
        indexes = [
            # Graph checkpoints are looked up by their id alone.
            index("checkpoint_graph_idx", ["checkpoint_id"], where=Q(kind=CheckpointKind.GRAPH)),
            # This index finds the newest checkpoint of all namespaces.
            index("checkpoint_order_idx", ["session", "version", "id"], where=Q(kind=CheckpointKind.GRAPH)),
        ]

    def __str__(self) -> str:
        return self.checkpoint_id or f"state at version {self.version}"


class Item(models.Model):
    """An item. The order of keys is that of the lane: keys are assigned under the lock of the session.

    ``session_version`` is the version of the session when the item was added: a checkpoint has a greater
    version than every item that was committed before it. Items that a branch copies have version 0.
    """

    # The index on the lane begins with the session, and the lock on the session's row protects the reference.
    session = session_key("items")
    lane = IdentifierField(max_length=MAX_LANE_BYTES, default="", blank=True)
    key = IdentifierField(max_length=MAX_LANE_BYTES, null=True, blank=True)
    payload = PayloadField()
    created_at = MomentField()
    # It is null in rows that earlier releases or other stores have written.
    session_version = models.BigIntegerField(null=True, blank=True, editable=False)

    class Meta:
        db_table = table_name("item")
        verbose_name = _("item")
        verbose_name_plural = _("items")
        constraints = [
            unique("item_key_uniq", ["session", "lane", "key"], where=Q(key__isnull=False)),
        ]
        indexes = [
            index("item_lane_idx", ["session", "lane", "id"]),
        ]

    def __str__(self) -> str:
        return str(self.pk)


class Tombstone(models.Model):
    """The mark that a session was erased, so that no later write of its agent creates it again.

    ``digest`` is the SHA-256 of the tenant and the session id. There is no other data of the session. The
    tombstones of an erased tenant have an empty ``tenant``.
    """

    tenant = IdentifierField(default="", blank=True)
    digest = models.CharField(max_length=64)
    erased_at = MomentField()

    objects: models.Manager[Tombstone] = models.Manager()

    class Meta:
        db_table = table_name("tombstone")
        verbose_name = _("tombstone")
        verbose_name_plural = _("tombstones")
        constraints = [
            unique("tombstone_digest_uniq", ["tenant", "digest"]),
        ]
        indexes = [
            index("tombstone_erased_idx", ["tenant", "erased_at"]),
        ]

    def __str__(self) -> str:
        return str(self.digest)
