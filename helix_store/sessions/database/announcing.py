"""Signals of a database store, sent after the commit and never after a rollback."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from django.dispatch import Signal

from helix_store.engine.database import Database
from helix_store.sessions.announcements import send_signals

__all__ = ["announce"]


def announce(
    db: Database,
    session_id: str,
    signals: Sequence[Signal],
    *,
    tenant: str | None = None,
    **details: str | None,
) -> None:
    """Send signals after the commit of the open transaction, or immediately if there is none.

    ``tenant`` is the session's tenant, if ``db`` works on several.
    """
    if signals:
        tenant = db.tenant if tenant is None else tenant
        send = partial(send_signals, signals, session_id=session_id, tenant=tenant, alias=db.alias, **details)
        db.after_commit(send)
