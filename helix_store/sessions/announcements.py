"""The signals that a write causes, and the function that sends them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from django.dispatch import Signal

from helix_store.core.types import SESSION_EXPIRED, SessionStatus
from helix_store.signals import session_expired, session_failed, session_finished

__all__ = ["EXPIRY_SIGNALS", "send_signals", "signals_of_status"]

EXPIRY_SIGNALS: Final = (session_failed, session_expired)

_logger = logging.getLogger(__name__)


def signals_of_status(before: str, after: str, failure_reason: str | None) -> tuple[Signal, ...]:
    """Return the signals for replacing one status with another; none if the status is unchanged."""
    if before == after:
        return ()
    if after == SessionStatus.COMPLETED:
        return (session_finished,)
    if after == SessionStatus.FAILED:
        return EXPIRY_SIGNALS if failure_reason == SESSION_EXPIRED else (session_failed,)
    return ()


def send_signals(
    signals: Iterable[Signal], *, session_id: str, tenant: str, alias: str | None, **details: str | None
) -> None:
    """Send signals of one session without letting any error of a receiver reach the caller."""
    for signal in signals:
        try:
            signal.send_robust(
                sender=None, session_id=session_id, tenant=tenant, using=alias, alias=alias, **details
            )
        except Exception:
            # The receivers are asynchronous, and a synchronous call runs on the event loop's own thread.
            _logger.exception("Some receivers of a signal of session %r were not called.", session_id)
