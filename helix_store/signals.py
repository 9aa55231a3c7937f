"""Signals of sessions, sent after the commit of the write that causes them.

A receiver gets ``session_id``, ``tenant`` and ``using``, the database alias, which is ``None`` for an
in-memory store. ``alias`` is the same value under the name that stores use. ``sender`` is ``None``. An error
in a receiver is logged. It does not undo the write, and the caller does not see it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, Protocol

from django.dispatch import Signal

from helix_store.core.types import SESSION_EXPIRED, SessionStatus

__all__ = [
    "effect_unknown",
    "session_answered",
    "session_expired",
    "session_failed",
    "session_finished",
    "session_posted",
    "session_ready",
    "session_waiting",
]

_logger = logging.getLogger(__name__)

session_answered = Signal()
"""All calls that the session waits for are answered. ``session_id`` is the owner of the tool calls."""

session_finished = Signal()
"""The status became ``completed``."""

session_failed = Signal()
"""The status became ``failed``."""

session_expired = Signal()
"""The status became ``failed`` with the reason ``session_expired``; `session_failed` is sent before it."""

session_posted = Signal()
"""A post of the session is due. A receiver also gets ``post_id`` and ``author``."""

effect_unknown = Signal()
"""A turn or a handle has found an effect of which nobody knows whether it happened (`EffectUnknown`). A
receiver also gets ``effect_id``.
"""

session_waiting = Signal()
"""Calls of the session have been opened. A receiver also gets their ids as ``tool_call_ids``, a list, and
``root_session_id``.
"""

session_ready = Signal()
"""A turn can go on although nothing has arrived. A receiver also gets ``reason``: ``abandoned``, ``budget``,
``effect``, or ``again`` if a person asked for it.
"""

EXPIRY_SIGNALS: Final = (session_failed, session_expired)


def signals_of_status(before: str, after: str, failure_reason: str | None) -> tuple[Signal, ...]:
    """Return the signals for a change from one status to another; none if the status is unchanged."""
    if before == after:
        return ()
    if after == SessionStatus.COMPLETED:
        return (session_finished,)
    if after == SessionStatus.FAILED:
        return EXPIRY_SIGNALS if failure_reason == SESSION_EXPIRED else (session_failed,)
    return ()


class _Database(Protocol):
    """The database of a store."""

    @property
    def tenant(self) -> str: ...

    def after_commit(self, call: Callable[[str], object]) -> None: ...


def announce(
    db: _Database,
    session_id: str,
    signals: Sequence[Signal],
    *,
    tenant: str | None = None,
    **details: Any,
) -> None:
    """Send signals after the commit of the open transaction, or immediately if there is none.

    ``tenant`` is the session's tenant, for a ``db`` that works on several.
    """
    if signals:
        tenant = db.tenant if tenant is None else tenant
        send = partial(send_signals, signals=signals, session_id=session_id, tenant=tenant, **details)
        db.after_commit(send)


def send_signals(
    alias: str | None, *, signals: Iterable[Signal], session_id: str, tenant: str, **details: Any
) -> None:
    """Send signals of one session without letting any error of a receiver reach the caller."""
    for signal in signals:
        try:
            signal.send_robust(
                sender=None, session_id=session_id, tenant=tenant, using=alias, alias=alias, **details
            )
        except Exception:
            # The receivers are asynchronous, but a synchronous call occupies the event loop's own thread.
            _logger.exception("Some receivers of a signal of session %r were not called.", session_id)
