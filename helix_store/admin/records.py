"""The admin of messages, runs, checkpoints, locks and streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from helix_store.actions.upkeep import FORCE_RELEASE, PRUNE_STREAMS
from helix_store.admin.base import PayloadDownload, SessionChildAdmin
from helix_store.admin.elements import (
    NOTHING,
    badge,
    column,
    distance,
    duration,
    format_time,
    grouped,
    hide_secrets,
    identifier,
    json_block,
    json_column,
    link,
    name_of_status,
    narrow,
    note,
    number,
    one_line,
    own_column,
    reason_words,
    short_id,
    stacked,
    stamp,
    text_block,
    under,
)
from helix_store.admin.filters import NEWEST_SEARCHED, BuildFilter, ChoiceFilter, NamedChoicesFilter
from helix_store.admin.operating import OperatedAdmin, list_action
from helix_store.core import moments
from helix_store.core.transcript import is_unread, parts_of
from helix_store.models import Checkpoint, CheckpointKind, Item, Lock, Message, Run, Session, Stream
from helix_store.reports.conversations import said_at_start, text_of
from helix_store.reports.payloads import (
    PayloadText,
    payload_of,
    payload_start,
    read_start,
    said_by,
    start_of,
    traceback_of,
    whole_state,
)

PREVIEW_LENGTH: Final = 180

_UNREADABLE: Final = _("This message cannot be read.")


@admin.register(Message)
class MessageAdmin(PayloadDownload, SessionChildAdmin):
    list_display = (own_column("sequence"), own_column("role"), "preview", "of_session", "written_at")
    list_display_links = (list_display[0], "preview")
    list_texts = {"payload_start": payload_start()}
    ordering = ("-session_id", "-sequence")
    order_of_session = ("session_id", "sequence")
    fields = ("of_session", "sequence", "role", "written_at", "said", "document", "download")

    written_at = column("created_at", _("created"), stamp)
    document = json_column("payload", _("as stored"))

    @admin.display(description=_("message"))
    def preview(self, message: Any) -> SafeString | str:
        text = message_preview(message.payload_start)
        return note(str(_UNREADABLE)) if text is None else text

    @admin.display(description=_("says"))
    def said(self, message: Message) -> SafeString:
        stored = payload_of(message, "payload") or ""
        whole, _is_cut = read_start(stored, len(stored))
        if whole is None:
            return note(str(_UNREADABLE))
        return text_block("\n\n".join(map(text_of, parts_of(whole))))


def message_preview(start: str) -> str | None:
    """Return the text of a message in one line, or ``None``. ``start`` is the start of its stored text."""
    said = said_at_start(start)
    return None if said is None else one_line(said, PREVIEW_LENGTH)


# --- Items in a session's lanes


def item_preview(start: str) -> str:
    """Return an item's text if it is a message, otherwise its JSON. ``start`` is the start of its text."""
    message, _is_cut = read_start(start)
    is_message = message is not None and not is_unread(message, parts_of(message))
    said = (message_preview(start) or "") if is_message else ""
    return said if said.strip("…") else one_line(start, PREVIEW_LENGTH)


@admin.register(Item)
class ItemAdmin(PayloadDownload, SessionChildAdmin):
    list_display = ("lane_name", "item_key", "preview", "of_session", "written_at")
    list_display_links = ("lane_name", "preview")
    list_texts = {"payload_start": payload_start()}
    ordering = ("-pk",)
    order_of_session = ("session_id", "lane", "pk")
    fields = ("of_session", "lane_name", "item_key", "written_at", "document", "download")

    lane_name = column("lane", _("lane"), lambda lane: identifier(lane or NOTHING))
    item_key = column("key", _("key"), lambda key: identifier(key or NOTHING))
    preview = column("payload_start", _("message"), item_preview)
    written_at = column("created_at", _("created"), stamp)
    document = json_column("payload", _("as stored"))


_REASON_LENGTH = 60


@admin.register(Run)
class RunAdmin(SessionChildAdmin):
    list_display = (
        "name",
        "of_session",
        own_column("turn"),
        "outcome",
        "steps",
        "build_name",
        "started",
        "lasted",
    )
    list_filter = (("status", NamedChoicesFilter), BuildFilter)
    list_texts = {"reason_start": start_of("completion_reason", _REASON_LENGTH)}
    ordering = ("-session_id", "-turn")
    fields = (
        "run_id",
        "of_session",
        "turn",
        "status_badge",
        "reason",
        "step_count",
        "start_sequence",
        "fencing_token",
        "build_name",
        "started_exactly",
        "ended_exactly",
        "lasted",
        "error_document",
    )

    name = column("run_id", _("run"), short_id)
    steps = column("step_count", _("steps"), int)
    started = column("started_at", _("started"), distance)
    started_exactly = column("started_at", _("started"), format_time)
    ended_exactly = column("ended_at", _("ended"), format_time)
    status_badge = column("status", _("status"), badge)
    build_name = column("build", _("build"), lambda build: identifier(build or NOTHING))

    def list_notes(self, request: HttpRequest) -> Iterator[str]:
        yield from super().list_notes(request)
        if getattr(request, "is_of_newest_runs", False):
            words = gettext("Filtered among the newest %(count)s runs.")
            yield words % {"count": grouped(NEWEST_SEARCHED)}

    @admin.display(description=_("outcome"))
    def outcome(self, run: Any) -> SafeString:
        return stacked(badge(run.status), reason_words(run.reason_start))

    @admin.display(description=_("duration"))
    def lasted(self, run: Run) -> str:
        """Return how long a run lasted, or has lasted so far if it has not ended."""
        return duration((run.ended_at or moments.now()) - run.started_at)

    @admin.display(description=_("completion reason"))
    def reason(self, run: Run) -> SafeString | str:
        return text_block(payload_of(run, "completion_reason") or NOTHING)

    @admin.display(description=_("error"))
    def error_document(self, run: Run) -> SafeString | str:
        stored = payload_of(run, "error")
        trace = traceback_of(stored)
        # This is text with line breaks, which JSON would escape.
        return json_block(stored) if trace is None else text_block(f"{trace}{said_by(stored)}")


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
    size = column("size_bytes", _("bytes"), grouped)
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


_LOCK_OWNER_LENGTH: Final = 80


class LockStateFilter(ChoiceFilter):
    title = _("state")
    parameter_name = "state"
    options = (("held", _("held")), ("expired", _("expired, not released")), ("free", _("free")))

    def chosen(self, queryset: QuerySet[Any], value: str) -> QuerySet[Any]:
        if value == "free":
            return queryset.filter(expires_at__isnull=True)
        now = moments.now()
        return queryset.filter(Q(expires_at__gt=now) if value == "held" else Q(expires_at__lte=now))


@admin.register(Lock)
class LockAdmin(OperatedAdmin):
    list_display = ("title", "of_session", "state", "held_by", "since", "lease_ends", own_column("token"))
    list_filter = (LockStateFilter,)
    ordering = ("tenant", "name")
    fields = ("tenant", "name", "state", "owner", "token", "acquired", "lease_end")
    of_other_models = {"of_session": Session}
    row_operations = (FORCE_RELEASE,)
    actions = (list_action(FORCE_RELEASE),)

    held_by = column("owner", _("owner"), lambda owner: narrow(one_line(owner, _LOCK_OWNER_LENGTH)))
    since = column("acquired_at", _("acquired"), distance)
    acquired = column("acquired_at", _("acquired"), format_time)
    lease_ends = column("expires_at", _("lease ends"), distance)
    lease_end = column("expires_at", _("lease ends"), format_time)

    def complete_rows(self, request: HttpRequest, rows: list[Any]) -> None:
        """Set, for each lock, the key of the session with the same name."""
        if not self.may_view(request, Session):
            return
        sessions = self.rows(request, Session).filter(
            tenant__in={lock.tenant for lock in rows}, session_id__in={lock.name for lock in rows}
        )
        keys = {
            (tenant, name): key for tenant, name, key in sessions.values_list("tenant", "session_id", "pk")
        }
        for lock in rows:
            lock.session_key = keys.get((lock.tenant, lock.name))

    @admin.display(description=_("lock"))
    def title(self, lock: Lock) -> SafeString:
        return stacked(short_id(lock.name), lock.tenant)

    @admin.display(description=_("session"), empty_value=NOTHING)
    def of_session(self, lock: Any) -> SafeString | None:
        key = lock.session_key
        return None if key is None else link(self.page_url(Session, key), gettext("open"))

    @admin.display(description=_("state"))
    def state(self, lock: Lock) -> SafeString:
        if lock.expires_at is None:
            return badge("free")
        return badge("held" if lock.expires_at > moments.now() else "expired")


_AGENT_LENGTH: Final = 120


@admin.register(Stream)
class StreamAdmin(OperatedAdmin):
    list_display = ("name", "state", "agent", "writer", "chunks", "updated", "ended")
    list_filter = (("status", NamedChoicesFilter),)
    ordering = ("-pk",)
    fields = (
        "stream_id",
        "tenant",
        "state",
        "agent_name",
        "run_id",
        "writer_id",
        "chunks",
        "last_sequence",
        "floor",
        "created",
        "updated_at_exactly",
        "ended_at_exactly",
        "output_document",
        "error_document",
    )
    table_operations = (PRUNE_STREAMS,)

    state = column("status", _("status"), badge)
    agent = column("agent_name", _("agent"), lambda name: narrow(one_line(name, _AGENT_LENGTH)))
    created = column("created_at", _("created"), format_time)
    updated = column("updated_at", _("updated"), distance)
    updated_at_exactly = column("updated_at", _("updated"), format_time)
    ended = column("ended_at", _("ended"), distance)
    ended_at_exactly = column("ended_at", _("ended"), format_time)
    output_document = json_column("output", _("output"))
    error_document = json_column("error", _("error"))

    @admin.display(description=_("stream"))
    def name(self, stream: Stream) -> SafeString:
        return stacked(short_id(stream.stream_id), stream.tenant)

    @admin.display(description=_("writer"), empty_value=NOTHING)
    def writer(self, stream: Stream) -> str | None:
        if stream.status != "active" or stream.lease_expires_at is None:
            return None
        return gettext("alive") if stream.lease_expires_at > moments.now() else gettext("lost")

    @admin.display(description=_("chunks"))
    def chunks(self, stream: Stream) -> SafeString:
        return number(stream.last_sequence - stream.floor)
