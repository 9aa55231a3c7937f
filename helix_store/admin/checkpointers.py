"""Lists of the checkpointers' sessions: graph sessions, and threads of snapshots.

Both are sessions of one agent type. A list shows the newest checkpoint of each, found by one index lookup.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

from django.contrib import admin
from django.db.models import OuterRef, QuerySet, Subquery
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from helix_store.actions.sessions import DELETE
from helix_store.admin.base import OF_SESSION
from helix_store.admin.checkpoints import claim_of
from helix_store.admin.columns import column, number
from helix_store.admin.elements import NOTHING, link, narrow, one_line, short_id, stacked
from helix_store.admin.filters import ChangedFilter, TenantFilter
from helix_store.admin.operating import list_action
from helix_store.admin.session_table import SessionTable, export_sessions
from helix_store.checkpointers.graph.types import GRAPH_AGENT_TYPE
from helix_store.checkpointers.snapshots.rules import SNAPSHOT_AGENT_TYPE
from helix_store.models import Checkpoint, CheckpointKind, Session
from helix_store.reports.payloads import start_of, without_payloads

_TEXT_LENGTH: Final = 60


class OfOneTypeTenantFilter(TenantFilter):
    """A tenant filter for a list of one agent type: the index on agent types begins with the tenant."""

    def needs_tenants(self, request: HttpRequest) -> bool:
        return True


class CheckpointerTable(SessionTable):
    """The sessions of one agent type, at a URL below that of the list of all sessions."""

    agent_type: ClassVar[str]
    list_filter = (ChangedFilter, OfOneTypeTenantFilter)
    actions = (list_action(DELETE), export_sessions)
    change_list_template = "admin/helix_store/side_list.html"

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        sessions: QuerySet[Any] = super().get_queryset(request).filter(agent_type=self.agent_type)
        return sessions

    def complete_rows(self, request: HttpRequest, rows: list[Any]) -> None:
        """Set the newest checkpoint of each session."""
        if not self.may_view(request, Checkpoint):
            return
        checkpoints = self.rows(Checkpoint)
        # This takes two statements, because in one PostgreSQL may read the checkpoints of all sessions.
        newest = self.newest_first(checkpoints.filter(session_id=OuterRef("pk"))).values("pk")[:1]
        keys = self.rows(Session).filter(pk__in=[each.pk for each in rows])
        found = checkpoints.filter(pk__in=list(keys.values_list(Subquery(newest), flat=True)))
        by_session = {row.session_id: row for row in without_payloads(found)}
        for session in rows:
            session.newest = by_session.get(session.pk)

    def list_context(self, request: HttpRequest) -> dict[str, Any]:
        context = super().list_context(request)
        return {**context, "title": self.heading, "list_url": self.list_url(Session)}

    def newest_first(self, checkpoints: QuerySet[Checkpoint]) -> QuerySet[Checkpoint]:
        raise NotImplementedError

    def checkpoint_link(self, checkpoint: Checkpoint, label: str) -> SafeString:
        """Return a link to the newest checkpoint and, below it, a link to all checkpoints of the session."""
        version = gettext("version %(number)s") % {"number": f"{checkpoint.version:,}"}
        return format_html(
            '{}<span class="helix-under">{}, {}</span>',
            link(self.page_url(Checkpoint, checkpoint.pk), label),
            version,
            link(self.list_url(Checkpoint, **{OF_SESSION: checkpoint.session_id}), gettext("show all")),
        )


class GraphSessions(CheckpointerTable):
    """The list of sessions that belong to `GraphCheckpointStore`."""

    agent_type = GRAPH_AGENT_TYPE
    heading = _("Graph sessions")
    list_display = ("name", "place", "newest_node", "messages", "changed")
    list_texts: ClassVar = {
        **SessionTable.list_texts,
        "directory_start": start_of("directory", _TEXT_LENGTH),
    }
    of_other_models: ClassVar = {"newest_node": Checkpoint}

    def newest_first(self, checkpoints: QuerySet[Checkpoint]) -> QuerySet[Checkpoint]:
        return checkpoints.filter(kind=CheckpointKind.GRAPH).order_by("-version", "-pk")

    messages = column("message_count", _("messages"), number)

    @admin.display(description=_("workspace, directory"))
    def place(self, session: Any) -> SafeString:
        workspace = one_line(session.workspace_id or "", _TEXT_LENGTH)
        directory = one_line(session.directory_start or "", _TEXT_LENGTH)
        return stacked(narrow(workspace or NOTHING), directory)

    @admin.display(description=_("newest checkpoint"), empty_value=NOTHING)
    def newest_node(self, session: Any) -> SafeString | None:
        checkpoint = session.newest
        if checkpoint is None:
            return None
        node = one_line(checkpoint.step_id or "", _TEXT_LENGTH) or gettext("no node")
        return self.checkpoint_link(checkpoint, narrow(node))


class SnapshotThreads(CheckpointerTable):
    """The list of threads that `SnapshotCheckpointer` has created, with the claim on the newest snapshot."""

    agent_type = SNAPSHOT_AGENT_TYPE
    heading = _("Snapshots")
    list_display = ("name", "newest_snapshot", "size", "claim", "changed")
    of_other_models: ClassVar = dict.fromkeys(("newest_snapshot", "size", "claim"), Checkpoint)

    def newest_first(self, checkpoints: QuerySet[Checkpoint]) -> QuerySet[Checkpoint]:
        return checkpoints.filter(kind=CheckpointKind.SNAPSHOT, namespace="").order_by("-version")

    @admin.display(description=_("newest snapshot"), empty_value=NOTHING)
    def newest_snapshot(self, session: Any) -> SafeString | None:
        checkpoint = session.newest
        if checkpoint is None:
            return None
        return self.checkpoint_link(checkpoint, short_id(checkpoint.checkpoint_id))

    @admin.display(description=_("size"), empty_value=NOTHING)
    def size(self, session: Any) -> str | None:
        if session.newest is None:
            return None
        size = session.newest.size_bytes
        return ngettext("%(count)s byte", "%(count)s bytes", size) % {"count": f"{size:,}"}

    @admin.display(description=_("claim"), empty_value=NOTHING)
    def claim(self, session: Any) -> SafeString | None:
        return None if session.newest is None else claim_of(session.newest)
