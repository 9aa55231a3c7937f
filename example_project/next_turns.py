"""The next turn of a trip, which a server takes as soon as a person has answered.

A real project enqueues a task instead: docs/queues-and-cron.md.
"""

from __future__ import annotations

import logging
import threading
from typing import Any, Final

from django.db import connections

from helix_store import SessionBusy, session_answered

__all__ = ["stop_taking_turns", "take_next_turns"]

_PATIENCE_SECONDS: Final = 2
"""The time to wait, so that the next page shows the result. The script of the demo takes less."""

_logger = logging.getLogger(__name__)


def take_next_turns() -> None:
    """Continue trips in this process, for servers only: the demo's workers take their own turns."""
    session_answered.connect(_take_next_turn)


def stop_taking_turns() -> None:
    session_answered.disconnect(_take_next_turn)


def _take_next_turn(*, session_id: str, tenant: str, using: str | None, **kwargs: Any) -> None:
    # The signal is sent after the commit, so that another thread sees the answer.
    turn = threading.Thread(target=_run, args=[using, tenant, session_id], daemon=True)
    turn.start()
    turn.join(_PATIENCE_SECONDS)


def _run(using: str | None, tenant: str, session_id: str) -> None:
    # Models can be imported only after setup.
    from example_project.agent import Agent
    from example_project.travel import PLANNER
    from helix_store import Store

    try:
        store = Store(using, tenant=tenant)
        if store.session(session_id).load().agent_type == PLANNER.agent_type:
            Agent(store, PLANNER, report=lambda event: _logger.info("%s", event)).run(session_id)
    except SessionBusy:
        _logger.info("Another worker drives session %r.", session_id)
    except Exception:
        _logger.exception("The next turn of session %r failed.", session_id)
    finally:
        connections.close_all()
