"""The background threads of streams, seen from a test."""

from __future__ import annotations

import threading
import time

__all__ = ["wait_for_background_threads"]

_PATIENCE_SECONDS = 30.0


def wait_for_background_threads(alias: str) -> None:
    """Wait until the readers' threads, and poller, listener and notifier of an alias have ended.

    They linger for a second. A thread closes the connections that the settings name then, and no others.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while any(f"({alias})" in name or name.startswith("helix_store reader") for name in _thread_names()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _thread_names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]
