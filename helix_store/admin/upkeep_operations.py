"""Operations of those who keep the database in order: release a lock, clean up, prune."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

from django import forms
from django.contrib import messages
from django.db import router
from django.utils.text import format_lazy
from django.utils.translation import gettext_lazy as _

from helix_store.admin.operations import Operation, Outcome
from helix_store.cleanup.run import expired_session_cleanup
from helix_store.models import Lock, Session, Stream
from helix_store.stores import DatabaseLockManager
from helix_store.streams.pruning import prune_streams

__all__ = ["CLEAN_UP", "FORCE_RELEASE", "PRUNE_STREAMS"]

_SESSIONS_AT_ONCE: Final = 1_000
"""A request of a browser must end soon; the command has no limit."""


def _force_release(lock: Lock, given: Mapping[str, Any]) -> Outcome:
    locks = DatabaseLockManager(router.db_for_write(Lock, instance=lock), tenant=lock.tenant)
    if locks.force_release(lock.name):
        return Outcome(message=_("Released the lock. Its former holder can write no more."))
    return Outcome(message=_("Nobody holds this lock any more."), is_done=False, level=messages.WARNING)


FORCE_RELEASE: Final = Operation(
    name="force-release",
    label=_("Force release"),
    model=Lock,
    permission="change",
    call=_force_release,
    guard="token",
    is_destructive=True,
    warning=_("The holder loses the lock, and its guarded writes are refused from now on."),
    is_possible=lambda lock: lock.expires_at is not None,
)


def _clean_up(row: None, given: Mapping[str, Any]) -> Outcome:
    summary = expired_session_cleanup(limit=_SESSIONS_AT_ONCE)
    return Outcome(
        message=format_lazy(
            _(
                "Found {detected} expired sessions: {marked} are marked as failed, {deleted} snapshots are "
                "deleted, {defaults} calls got their default answer, {errors} have a problem."
            ),
            detected=summary.detected,
            marked=summary.marked,
            deleted=summary.snapshots_deleted,
            defaults=summary.defaults_applied,
            errors=summary.errors,
        ),
        level=messages.WARNING if summary.errors else messages.SUCCESS,
    )


CLEAN_UP: Final = Operation(
    name="clean-up",
    label=_("Clean up expired sessions"),
    model=Session,
    permission="change",
    call=_clean_up,
    is_destructive=True,
    warning=_(
        "Expired sessions are marked as failed, and their workspace snapshots are deleted. At most 1,000 "
        "sessions at once."
    ),
)


class AgeForm(forms.Form):
    days = forms.IntegerField(
        label=_("Streams that ended so many days ago"), min_value=0, max_value=36_500, initial=7
    )


def _prune_streams(row: None, given: Mapping[str, Any]) -> Outcome:
    pruned = prune_streams(older_than=timedelta(days=given["days"]))
    return Outcome(
        message=format_lazy(
            _("Removed {chunks} chunks of {streams} streams; failed {failed} streams without a writer."),
            chunks=pruned.chunks,
            streams=pruned.streams,
            failed=pruned.failed,
        )
    )


PRUNE_STREAMS: Final = Operation(
    name="prune-streams",
    label=_("Prune streams"),
    model=Stream,
    permission="delete",
    call=_prune_streams,
    form=AgeForm,
    is_destructive=True,
    warning=_("The chunks of these streams are removed. The streams and the sessions stay."),
)
