"""Runs (turns) of a session, interrupt requests, and the sub-agents that a session started."""

from __future__ import annotations

from typing import Any, Self

from django.db import models
from django.db.models import F, Q
from django.utils.translation import gettext_lazy as _

from helix_store.conf import table_name
from helix_store.core.types import InterruptKind, RunStatus
from helix_store.models.constraints import index, one_of, unique
from helix_store.models.fields import CallIdsField, IdentifierField, MomentField, PayloadField
from helix_store.models.sessions import Session


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
