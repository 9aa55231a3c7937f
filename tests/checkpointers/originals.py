"""Naive variants: what the original stores do, as little of it as shows each fault.

They keep plain Python lists. The tests show the fault on them, and its absence on ours.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Any

__all__ = ["NaiveGraphStore", "NaiveSnapshots", "corrupt"]


class corrupt(Exception):
    """What a naive store raises when a stored row cannot be read."""


class NaiveSnapshots:
    """Order by a random id within a millisecond, trim before the insert, no validation, nothing consumed."""

    def __init__(self, cap: float = 100, now: Callable[[], float] = time.time) -> None:
        self.cap = cap
        self.now = now
        self.rows: list[tuple[str, str, str]] = []

    def put(self, thread_id: str, snapshot: Any) -> str:
        checkpoint_id = f"{int(self.now() * 1000):012x}{random.getrandbits(74):019x}"
        survivors = {row[1] for row in self._newest(thread_id)[: int(self.cap)]}
        self.rows = [row for row in self.rows if row[0] != thread_id or row[1] in survivors]
        text = json.dumps(snapshot, sort_keys=True, default=str)
        self.rows.append((thread_id, checkpoint_id, text))
        return checkpoint_id

    def get(self, thread_id: str, checkpoint_id: str | None = None) -> Any:
        rows = [row for row in self._newest(thread_id) if not checkpoint_id or row[1] == checkpoint_id]
        return json.loads(rows[0][2]) if rows else None

    def ids(self, thread_id: str) -> list[str]:
        return [row[1] for row in self._newest(thread_id)]

    def delete(self, thread_id: str, checkpoint_id: str | None = None) -> None:
        self.rows = [
            row for row in self.rows if row[0] != thread_id or (checkpoint_id and row[1] != checkpoint_id)
        ]

    def _newest(self, thread_id: str) -> list[tuple[str, str, str]]:
        return sorted((row for row in self.rows if row[0] == thread_id), key=lambda row: row[1], reverse=True)


class NaiveGraphStore:
    """Read-back of the newest row, pages by milliseconds, latest by step, falsy filters, forks by time."""

    def __init__(self, now: Callable[[], int] = lambda: int(time.time() * 1000)) -> None:
        self.now = now
        self.sessions: dict[str, dict[str, Any]] = {}
        self.messages: list[dict[str, Any]] = []
        self.checkpoints: list[dict[str, Any]] = []
        self.between_insert_and_read_back: Callable[[], None] = lambda: None

    def create_session(self, session_id: str, **columns: Any) -> None:
        self.sessions[session_id] = {"id": session_id, "workspace_id": None, "title": None, **columns}

    def update_session(self, session_id: str, **columns: Any) -> None:
        given = {name: value for name, value in columns.items() if value is not None}
        self.sessions[session_id].update(given)

    def list_sessions(self, workspace_id: str | None = None) -> list[str]:
        return [
            row["id"]
            for row in self.sessions.values()
            if not workspace_id or row["workspace_id"] == workspace_id
        ]

    def add_message(self, session_id: str, **columns: Any) -> dict[str, Any]:
        key = len(self.messages) + 1
        self.messages.append({"id": key, "session": session_id, "created_at": self.now(), **columns})
        self.between_insert_and_read_back()
        return max(self._of(session_id), key=lambda row: row["id"])

    def get_messages(
        self, session_id: str, *, before: int | None = None, limit: int | None = None
    ) -> list[dict[str, Any]]:
        rows = sorted(self._of(session_id), key=lambda row: row["created_at"])
        for row in rows:
            if not isinstance(row.get("tool_calls", []), list):
                raise corrupt
        if before is None:
            return rows[-limit:] if limit else rows
        return [row for row in rows if row["created_at"] < before][:limit]

    def save_checkpoint(self, session_id: str, **columns: Any) -> dict[str, Any]:
        row = {
            "id": f"c{len(self.checkpoints)}",
            "session": session_id,
            "created_at": self.now(),
            "parent_id": None,
            **columns,
        }
        self.checkpoints.append(row)
        return row

    def get_latest_checkpoint(self, session_id: str) -> dict[str, Any]:
        rows = [row for row in self.checkpoints if row["session"] == session_id]
        for row in rows:
            for result in row.get("node_results", {}).values():
                if result.get("status") not in ("completed", "failed"):
                    raise corrupt
        return max(rows, key=lambda row: (row["step"], row["created_at"]))

    def next_version(self, session_id: str) -> int:
        return int(self.get_latest_checkpoint(session_id)["version"]) + 1

    def fork(self, checkpoint: dict[str, Any], new_id: str) -> None:
        source = checkpoint["session"]
        self.create_session(new_id)
        for row in self._of(source):
            if row["created_at"] <= checkpoint["created_at"]:
                self.add_message(new_id, content=row.get("content"))
        self.save_checkpoint(
            new_id, version=checkpoint["version"], step=checkpoint["step"], parent_id=checkpoint["id"]
        )

    def _of(self, session_id: str) -> list[dict[str, Any]]:
        return [row for row in self.messages if row["session"] == session_id]
