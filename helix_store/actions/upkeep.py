"""Maintenance actions: release a lock, clean up, prune."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

from django import forms
from django.contrib.messages import constants as levels
from django.db import router
from django.utils.text import format_lazy
from django.utils.translation import gettext_lazy as _

from helix_store.actions.action import Action, Outcome
from helix_store.cleanup.run import expired_session_cleanup
from helix_store.models import Lock, Session, Stream
from helix_store.stores import DatabaseLockManager
from helix_store.streams.pruning import prune_streams

_SESSIONS_AT_ONCE: Final = 1_000
"""A browser's request must end soon, so the admin limits the number of sessions. The command has no limit."""


class ForceRelease(Action):
    name = "force-release"
    label = _("Force release")
    model = Lock
    guard = "token"
    is_destructive = True
    warning = _("The holder loses the lock, and its guarded writes are refused from now on.")

    def is_possible(self, row: Any) -> bool:
        return row.expires_at is not None

    def call(self, row: Any, given: Mapping[str, Any]) -> Outcome:
        locks = DatabaseLockManager(router.db_for_write(Lock, instance=row), tenant=row.tenant)
        if locks.force_release(row.name):
            return Outcome(message=_("Released the lock. Its former holder can no longer write."))
        return Outcome(message=_("Nobody holds this lock any more."), is_done=False, level=levels.WARNING)


class CleanUp(Action):
    name = "clean-up"
    label = _("Clean up expired sessions")
    model = Session
    is_destructive = True
    warning = _(
        "Expired sessions are marked as failed, and their workspace snapshots are deleted. At most 1,000 "
        "sessions at once."
    )

    def call(self, row: None, given: Mapping[str, Any]) -> Outcome:
        summary = expired_session_cleanup(limit=_SESSIONS_AT_ONCE)
        return Outcome(
            message=format_lazy(
                _(
                    "Found {detected} expired sessions: {marked} are marked as failed, {deleted} snapshots "
                    "are deleted, {defaults} calls received their default answer, {errors} have a problem."
                ),
                detected=summary.detected,
                marked=summary.marked,
                deleted=summary.snapshots_deleted,
                defaults=summary.defaults_applied,
                errors=summary.errors,
            ),
            level=levels.WARNING if summary.errors else levels.SUCCESS,
        )


class AgeForm(forms.Form):
    days = forms.IntegerField(
        label=_("Streams that ended this many days ago"), min_value=0, max_value=36_500, initial=7
    )


class PruneStreams(Action):
    name = "prune-streams"
    label = _("Prune streams")
    model = Stream
    permission = "delete"
    form = AgeForm
    is_destructive = True
    warning = _("The chunks of these streams are removed. The streams and the sessions stay.")

    def call(self, row: None, given: Mapping[str, Any]) -> Outcome:
        pruned = prune_streams(older_than=timedelta(days=given["days"]))
        return Outcome(
            message=format_lazy(
                _("Removed {chunks} chunks of {streams} streams; failed {failed} streams without a writer."),
                chunks=pruned.chunks,
                streams=pruned.streams,
                failed=pruned.failed,
            )
        )


FORCE_RELEASE: Final = ForceRelease()
CLEAN_UP: Final = CleanUp()
PRUNE_STREAMS: Final = PruneStreams()
