"""The tones of statuses, which the admin and the commands turn into colours."""

from typing import Final

TONES: Final = {
    "active": "info",
    "running": "info",
    "paused": "waiting",
    "interrupted": "waiting",
    "suspended_client_tool": "waiting",
    "suspended_awaiting_children": "waiting",
    "suspended_step_partial": "waiting",
    "completed": "good",
    "failed": "bad",
    "ended": "good",
    "held": "info",
    "reached": "bad",
    "resumed": "good",
    "expired": "bad",
}
