"""The admin of checkpoints. A checkpoint is the state of a session after a step."""

from __future__ import annotations

from typing import Any, Final

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from helix_store.admin.base import SessionChildAdmin
from helix_store.admin.columns import column
from helix_store.admin.elements import NOTHING, badge, hide_secrets, identifier, json_block, one_line, under
from helix_store.admin.labels import name_of_status
from helix_store.admin.times import distance, stamp
from helix_store.core import moments
from helix_store.models import Checkpoint, CheckpointKind
from helix_store.reports.payloads import (
    PayloadText,
    payload_of,
    whole_state,
)

_OF_SNAPSHOT: Final = _("Snapshot")
_OWNER_LENGTH: Final = 60


@admin.register(Checkpoint)
class CheckpointAdmin(SessionChildAdmin):
    list_display = (
        "name",
        "of_session",
        "which",
        "steps",
        "messages",
        "status_badge",
        "size",
        "written_at",
    )
    ordering = ("-session_id", "-kind", "-namespace", "-version")
    fieldsets = (
        (
            None,
            {"fields": ("checkpoint_id", "of_session", "status_badge", "which", "source", "written_at")},
        ),
        (_("State"), {"fields": ("custom_state", "rest_of_state")}),
        (
            _("Place in the history"),
            {
                "fields": (
                    "version",
                    "step_id",
                    "step_count",
                    "message_count",
                    "stream_sequence",
                    "run_id",
                    "parent_checkpoint_id",
                    "namespace",
                    "size_bytes",
                )
            },
        ),
        (_OF_SNAPSHOT, {"fields": ("snapshot_version", "claim", "claim_token")}),
    )

    name = column("checkpoint_id", _("checkpoint"), identifier)
    which = column("kind", _("kind"), name_of_status)
    steps = column("step_count", _("steps"), int)
    messages = column("message_count", _("messages"), int)
    size = column("size_bytes", _("bytes"), "{:,}".format)
    written_at = column("created_at", _("created"), stamp)

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        groups = super().get_fieldsets(request, obj)
        is_snapshot = obj is not None and obj.kind == CheckpointKind.SNAPSHOT
        return [group for group in groups if is_snapshot or group[0] != _OF_SNAPSHOT]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        # A state between checkpoints is shown on the session page, and a base within the states that use it.
        return super().get_queryset(request).exclude(kind__in=(CheckpointKind.STATE, CheckpointKind.BASE))

    @admin.display(description=_("status"))
    def status_badge(self, checkpoint: Checkpoint) -> SafeString | str:
        return badge(checkpoint.status) if checkpoint.status else NOTHING

    @admin.display(description=_("claim"))
    def claim(self, checkpoint: Checkpoint) -> SafeString:
        return claim_of(checkpoint)

    @admin.display(description=_("custom state"))
    def custom_state(self, checkpoint: Checkpoint) -> SafeString | str:
        payload = payload_of(checkpoint, "payload")
        if payload is not None and checkpoint.base_id is not None:
            bases = Checkpoint._base_manager.using(checkpoint._state.db).filter(pk=checkpoint.base_id)
            payload = whole_state(payload, bases.values_list(PayloadText("payload"), flat=True).first())
        return json_block(payload)

    @admin.display(description=_("rest of the state"))
    def rest_of_state(self, checkpoint: Checkpoint) -> SafeString | str:
        return json_block(payload_of(checkpoint, "envelope"), shown=without_secrets)


def without_secrets(envelope: Any) -> Any:
    """Return the rest of a state without its tracing context, which other shapes may hold in any place."""
    if not isinstance(envelope, dict):
        return hide_secrets(envelope)
    if "tracing_context" not in envelope:
        return envelope
    return {**envelope, "tracing_context": hide_secrets(envelope["tracing_context"])}


def claim_of(snapshot: Checkpoint) -> SafeString:
    """Return text that shows whether a snapshot is free, claimed (by whom and until when) or resumed."""
    if snapshot.claim_done_at is not None:
        status, words, when = "resumed", "{when}", snapshot.claim_done_at
    elif snapshot.claim_expires_at is None:
        return badge("free")
    elif snapshot.claim_expires_at > moments.now():
        status, words, when = "held", gettext("ends {when}"), snapshot.claim_expires_at
    else:
        status, words, when = "expired", gettext("ended {when}"), snapshot.claim_expires_at
    owner = under(one_line(snapshot.claim_owner or "", _OWNER_LENGTH))
    line = format_html(words, when=distance(when))
    return format_html('{}{}<span class="helix-under">{}</span>', badge(status), owner, line)
