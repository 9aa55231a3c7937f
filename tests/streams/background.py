"""The background threads of streams, seen from a test."""

from __future__ import annotations

import threading
import time

__all__ = ["wait_for_background_threads"]

_PATIENCE_SECONDS = 30.0


def wait_for_background_threads(alias: str) -> None:
    """Wait until poller, listener and notifier of an alias have ended; they linger for a second."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while any(f"({alias})" in thread.name for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
