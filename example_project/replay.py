"""Replaying a file of recorded conversations through a store, with progress and verification."""

from __future__ import annotations

import time
from collections.abc import Callable, Sized
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from django.db import reset_queries

from example_project.transcripts import difference, read_transcripts, replay
from helix_store.stores import DatabaseStateStore

__all__ = ["Progress", "ReplaySummary", "replay_file"]

Progress = Callable[[str, bool], None]
"""Called with a line, and whether it is the last one."""


@dataclass
class ReplaySummary:
    """``sessions`` counts the conversations that were read; the next two fields count what was written."""

    sessions: int = 0
    messages_written: int = 0
    steps_written: int = 0
    sessions_verified: int | None = None
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    stopped_at: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def figures(self) -> dict[str, Any]:
        """Return the figures for one line of progress."""
        return {
            "sessions": self.sessions,
            "messages written": self.messages_written,
            "steps written": self.steps_written,
            "verified": "-" if self.sessions_verified is None else self.sessions_verified,
            "seconds": self.seconds,
        }


def replay_file(
    store: DatabaseStateStore, path: Path, *, progress: Progress, stop: Sized, verify: bool
) -> ReplaySummary:
    """Replay each conversation of a file, then verify them if ``verify``. Safe to repeat.

    Stops after the current conversation once ``stop`` is not empty.
    """
    summary = ReplaySummary()
    started = time.monotonic()
    for transcript in read_transcripts(path):
        written = replay(store, transcript)
        summary.sessions += 1
        summary.messages_written += written.messages
        summary.steps_written += written.steps
        summary.seconds = round(time.monotonic() - started, 3)
        # With DEBUG, Django keeps the text of thousands of statements, which contain whole messages.
        reset_queries()
        progress(_line(summary), False)
        if stop:
            summary.stopped_at = transcript.session_id
            break
    progress(_line(summary), True)
    if verify and summary.stopped_at is None:
        _verify(store, path, summary)
    return summary


def _verify(store: DatabaseStateStore, path: Path, summary: ReplaySummary) -> None:
    found = [difference(store, transcript) for transcript in read_transcripts(path)]
    summary.problems = [problem for problem in found if problem is not None]
    summary.sessions_verified = len(found) - len(summary.problems)


def _line(summary: ReplaySummary) -> str:
    written = f"{summary.messages_written} messages in {summary.steps_written} steps written"
    return f"{summary.sessions} sessions, {written}, {summary.seconds:.1f} s"
