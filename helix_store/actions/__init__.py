"""The actions that a person may take, shared by the admin, the management commands and code."""

from __future__ import annotations

from typing import Final

from helix_store.actions import answers, checkpoints, posts, sessions
from helix_store.actions.action import SessionAction

__all__ = ["SESSION_ACTIONS"]

SESSION_ACTIONS: Final[tuple[SessionAction, ...]] = (
    answers.ANSWER,
    posts.POST,
    posts.WITHDRAW_POST,
    sessions.SET_STATUS,
    sessions.INTERRUPT,
    sessions.ABORT,
    sessions.CLEAR_INTERRUPT,
    sessions.MARK_FAILED,
    checkpoints.RESTORE,
    checkpoints.BRANCH,
    checkpoints.PRUNE_CHECKPOINTS,
    sessions.DELETE,
)
"""The session page offers actions with a label; `helix_sessions` offers actions with a help text."""
