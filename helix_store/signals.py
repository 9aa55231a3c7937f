"""Signals of sessions, sent after the commit of the write that causes them.

A receiver gets ``session_id``, ``tenant`` and ``using``, the database alias, which is ``None`` for an
in-memory store. ``alias`` is the same value under the name that stores use. ``sender`` is ``None``. An error
in a receiver is logged. It does not undo the write and does not reach the caller.
"""

from django.dispatch import Signal

__all__ = ["session_answered", "session_expired", "session_failed", "session_finished", "session_posted"]

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
