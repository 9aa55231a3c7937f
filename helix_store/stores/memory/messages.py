"""Messages in memory: append, read, truncate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from django.utils import timezone

from helix_store.core.requests import EncodedMessage, Guard
from helix_store.stores.memory.records import StoredMessage
from helix_store.stores.memory.scope import TenantScope

__all__ = ["MemoryMessages", "stored_messages"]


class MemoryMessages:
    def __init__(self, scope: TenantScope) -> None:
        self._scope = scope

    def append(self, session_id: str, messages: Sequence[EncodedMessage], guard: Guard) -> int:
        with self._scope.writing(session_id, guard) as draft:
            if messages:
                draft.messages.extend(stored_messages(messages, timezone.now()))
                draft.write()
            return len(draft.messages)

    def page(
        self, session_id: str, *, offset: int, limit: int | None, descending: bool
    ) -> tuple[list[str], int]:
        messages = self._scope.require(session_id).messages
        total = len(messages)
        first = min(offset, total)
        end = total if limit is None else min(first + limit, total)
        page = messages[total - end : total - first][::-1] if descending else messages[first:end]
        return [message.text for message in page], total

    def after(self, session_id: str, sequence: int, limit: int) -> list[str]:
        record = self._scope.find(session_id)
        following = [] if record is None else record.messages[sequence : sequence + limit]
        return [message.text for message in following]

    def count(self, session_id: str) -> int:
        return len(self._scope.require(session_id).messages)

    def truncate(self, session_id: str, keep: int, guard: Guard) -> int:
        with self._scope.writing(session_id, guard) as draft:
            if keep >= len(draft.messages):
                return draft.version
            del draft.messages[keep:]
            draft.checkpoints = {
                checkpoint_id: checkpoint
                for checkpoint_id, checkpoint in draft.checkpoints.items()
                if checkpoint.head.message_count <= keep
            }
            return draft.write()


def stored_messages(messages: Iterable[EncodedMessage], created_at: datetime) -> list[StoredMessage]:
    return [StoredMessage(message.role, message.text, created_at) for message in messages]
